# SPDX-License-Identifier: Apache-2.0
"""The set-up of the make targets on machines that lack a dependency."""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

MAKE_VENV = ROOT / "tools" / "make_venv.sh"


def fake_python(folder: Path, refuses: str) -> Path:
    """Writes an interpreter that fails if its code mentions `refuses`."""
    path = folder / "python"
    path.write_text(
        "#!/bin/sh\n"
        f'case "$2" in *"{refuses}"*) exit 1 ;; esac\n'
        f'exec {shlex.quote(sys.executable)} "$@"\n'
    )
    path.chmod(0o755)
    return path


def python_without_pip(folder: Path) -> Path:
    """Writes an interpreter whose environments have no pip, since unpacking pip takes seconds."""
    path = folder / "python_without_pip"
    path.write_text(
        "#!/bin/sh\n"
        '[ "$2" != venv ] || set -- "$@" --without-pip\n'
        f'exec {shlex.quote(sys.executable)} "$@"\n'
    )
    path.chmod(0o755)
    return path


def make_venv(folder: Path, **variables: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **{key: str(value) for key, value in variables.items()}}
    command = ["sh", str(MAKE_VENV), str(folder / "venv")]
    return subprocess.run(command, env=environment, text=True, capture_output=True)


@pytest.mark.parametrize(
    ("refuses", "advice"),
    [
        ("version_info", "Python 3.10 or newer is needed"),
        ("ensurepip", "apt-get install python3-venv"),
        ("Python.h", "apt-get install python3-dev"),
    ],
)
def test_what_a_python_lacks_is_said(tmp_path, refuses, advice):
    done = make_venv(tmp_path, PYTHON=fake_python(tmp_path, refuses))
    assert done.returncode == 1
    assert advice in done.stderr
    assert not (tmp_path / "venv").exists()


def test_an_absent_python_is_said(tmp_path):
    done = make_venv(tmp_path, PYTHON=tmp_path / "nowhere")
    assert done.returncode == 1
    assert "no Python was found" in done.stderr


def test_an_absent_compiler_is_said(tmp_path):
    done = make_venv(tmp_path, PYTHON=sys.executable, CXX=tmp_path / "nowhere")
    assert done.returncode == 1
    assert "no C++ compiler was found" in done.stderr


def test_a_later_interpreter_is_taken_when_an_earlier_one_will_not_do(tmp_path):
    refusing = fake_python(tmp_path, "ensurepip")
    other = python_without_pip(tmp_path)
    done = make_venv(tmp_path, PYTHON=f"{refusing} {other}", CXX=sys.executable)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "venv" / "bin" / "python").exists()


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_reads_the_build_requirements_from_pyproject():
    stated = re.search(r"^requires = (\[.*\])$", (ROOT / "pyproject.toml").read_text(), re.M)
    assert stated
    show = ["make", "--silent", "--eval=show: ; @echo '$(BUILD_REQUIRES)'", "show"]
    shown = subprocess.run(show, cwd=ROOT, check=True, text=True, capture_output=True).stdout
    assert shlex.split(shown) == ast.literal_eval(stated[1])
    assert len(shlex.split(shown)) == 4
