"""The table of what was tried: rows of several runs and systems, each with its date."""

import pytest

from tools import matrix

PAGE = f"""# A page

{matrix.BEGIN}
| Python | torch | compiler | NumPy | system | tried on | |
|---|---|---|---|---|---|---|
| 3.9 | 2.13.0+cpu | GCC 12 | with | x86_64, glibc 2.36 | 2026-01-01 | ok |
| 3.10 | 2.13.0 | GCC 12 | with | x86_64, glibc 2.36 | 2026-01-02 | build: no |
{matrix.END}
Below.
"""


def make_row(python, torch="2.13.0", system="x86_64, glibc 2.36", tried="2026-02-02"):
    return matrix.Row(python, torch, "GCC 12", "with", system, tried, "ok")


@pytest.fixture
def page(tmp_path, monkeypatch):
    path = tmp_path / "versions.md"
    path.write_text(PAGE)
    monkeypatch.setattr(matrix, "PAGE", path)
    return path


def test_a_row_takes_the_place_of_the_same_and_leaves_the_others(page):
    matrix.write([make_row("3.10")])
    text = page.read_text()
    assert text == PAGE.replace("2026-01-02 | build: no", "2026-02-02 | ok")


def test_builds_of_torch_are_one_version_and_systems_are_several(page):
    newer = [
        make_row("3.9"),
        make_row("3.10", system="x86_64, glibc 2.43"),
        make_row("3.10", "2.9"),
    ]
    matrix.write(newer)
    rows = matrix.read_rows(page.read_text())
    assert rows[0] == newer[0]
    # In the order of versions, not of their digits.
    assert [each.torch for each in rows[1:]] == ["2.9", "2.13.0", "2.13.0"]
    assert [each.tried for each in rows[1:]] == ["2026-02-02", "2026-01-02", "2026-02-02"]


def test_a_page_without_its_marks_is_refused(page):
    page.write_text("# A page\n")
    with pytest.raises(SystemExit, match="expected one"):
        matrix.write([make_row("3.10")])


def test_cases_share_a_build_and_a_failure_is_a_row(tmp_path, monkeypatch, capsys):
    built, used = [], []

    def build(case, tree, folder):
        built.append(case.python)
        return folder / "wheels"

    def attempt(case, wheels, tree, folder):
        used.append(wheels)
        assert not (tree / "ringcomm").exists()
        if not case.numpy:
            raise matrix.StepFailed("tests: a | b")
        return f"{case.torch}+cpu"

    monkeypatch.setattr(matrix, "clone", lambda tree: (tree / "ringcomm").mkdir(parents=True))
    monkeypatch.setattr(matrix, "build", build)
    monkeypatch.setattr(matrix, "attempt", attempt)
    monkeypatch.setattr(matrix, "lacks", lambda case: "" if case.python != "3.10" else "none here")
    names = {None: "GCC 12", "g++-12": "GCC 12", "clang++-14": "Clang 14"}
    monkeypatch.setattr(matrix, "compiler_name", lambda case: names[case.compiler])
    chosen = [
        matrix.Case("3.10"),
        matrix.Case("3.11"),
        matrix.Case("3.11", compiler="g++-12"),
        matrix.Case("3.11", numpy=False),
        matrix.Case("3.11", compiler="clang++-14"),
    ]
    rows = list(matrix.try_all(chosen, tmp_path, None))
    assert built == ["3.11", "3.11"]
    tried = [(each.compiler, each.numpy, each.torch, each.result) for each in rows]
    assert tried == [
        ("GCC 12", "with", "2.13.0+cpu", "ok"),
        ("GCC 12", "without", "2.13.0", "tests: a / b"),
        ("Clang 14", "with", "2.13.0+cpu", "ok"),
    ]
    assert "Python 3.10, torch 2.13.0, c++, NumPy: not tried: none here" in capsys.readouterr().out
    # Wheels that are given are tried as they are.
    (made,) = matrix.try_all([matrix.Case("3.11")], tmp_path, tmp_path / "dist")
    assert (made.compiler, made.result, used[-1]) == ("wheel", "ok", tmp_path / "dist")
    assert len(built) == 2


def test_a_step_that_fails_says_how_it_ended(tmp_path, capsys):
    with pytest.raises(matrix.StepFailed, match=r"^tests: the last$"):
        matrix.step("tests", "sh", "-c", "echo first; echo the last >&2; exit 3", cwd=tmp_path)
    assert "first" in capsys.readouterr().err


def test_the_version_is_what_torch_prints_last(tmp_path, monkeypatch):
    """Without NumPy it warns first, in several lines."""
    printed = {"torch": "x.py:368: UserWarning: no NumPy |\n  it cares\n2.13.0+cpu\n"}
    monkeypatch.setattr(matrix, "step", lambda name, *command, **settings: printed.get(name, ""))
    monkeypatch.setattr(matrix, "interpreter", lambda version: tmp_path / "python")
    case = matrix.Case("3.11", numpy=False)
    assert matrix.attempt(case, tmp_path, tmp_path, tmp_path) == "2.13.0+cpu"
