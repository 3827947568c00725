# SPDX-License-Identifier: Apache-2.0
"""The cases of `make matrix`: their shared environments, and the message of a failure."""

import shutil

import pytest

from tools import commands, matrix


def test_cases_share_a_build_and_a_failure_is_a_row(tmp_path, monkeypatch, capsys):
    built, used = [], []

    def run(*command, **settings):
        if command[:2] == ("git", "clone"):
            (command[-1] / "ringcomm").mkdir(parents=True)
            return ""
        return {"c++": "c++ 12.2.0", "g++-12": "g++ 12.2.0", "clang++-14": "clang 14.0.6"}[
            command[0]
        ]

    def build(case, folder):
        built.append(case.python)
        return folder / "wheels"

    def attempt(case, wheels, tests, folder):
        used.append(wheels)
        assert not (tests / "ringcomm").exists()
        if not case.numpy:
            raise commands.CommandFailed("pytest: a | b")
        return f"{case.torch}+cpu"

    for stand_in in (run, build, attempt):
        monkeypatch.setattr(matrix, stand_in.__name__, stand_in)
    monkeypatch.setattr(matrix, "interpreter", lambda version: version != "3.10" or None)
    monkeypatch.setattr(shutil, "which", lambda command: command)
    chosen = [
        matrix.Case("3.10"),
        matrix.Case("3.11"),
        matrix.Case("3.11", compiler="g++-12"),
        matrix.Case("3.11", numpy=False),
        matrix.Case("3.11", compiler="clang++-14"),
    ]
    rows = list(matrix.try_all(chosen, tmp_path, None))
    assert built == ["3.11", "3.11"]
    assert [
        (compiler, numpy, torch, result) for _, torch, compiler, numpy, _, _, result in rows
    ] == [
        ("GCC 12", "with", "2.13.0+cpu", "ok"),
        ("GCC 12", "without", "2.13.0", "pytest: a / b"),
        ("Clang 14", "with", "2.13.0+cpu", "ok"),
    ]
    said = capsys.readouterr().out
    assert "Python 3.10, torch 2.13.0, c++, NumPy: not tried: no Python 3.10 here" in said
    # Wheels that are passed in are tried unchanged.
    (made,) = matrix.try_all([matrix.Case("3.11")], tmp_path, tmp_path / "dist")
    assert (made[2], made[-1], used[-1]) == ("wheel", "ok", tmp_path / "dist")
    assert len(built) == 2


def test_a_command_that_fails_says_how_it_ended(tmp_path, capsys):
    with pytest.raises(commands.CommandFailed, match=r"^sh -c .*: the last$"):
        commands.run("sh", "-c", "echo first; echo the last >&2; exit 3", cwd=tmp_path)
    assert "first" in capsys.readouterr().err


def test_a_command_sees_no_other_tree(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    shown = commands.run("sh", "-c", 'echo "$PYTHONPATH,$PYTHONNOUSERSITE,$A"', A="b")
    assert shown == ",1,b\n"


def test_the_version_is_what_torch_prints_last(tmp_path, monkeypatch):
    """Without NumPy torch first prints a warning of several lines."""
    printed = "x.py:368: UserWarning: no NumPy |\n  it cares\n2.13.0+cpu\n"
    monkeypatch.setattr(matrix, "run", lambda *command, **settings: printed)
    monkeypatch.setattr(matrix, "make_environment", lambda python, *words: tmp_path / "python")
    monkeypatch.setattr(matrix, "interpreter", lambda version: tmp_path / "python")
    case = matrix.Case("3.11", numpy=False)
    assert matrix.attempt(case, tmp_path, tmp_path, tmp_path) == "2.13.0+cpu"
