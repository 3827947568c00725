# SPDX-License-Identifier: Apache-2.0
"""Formatters, linters and the type checker find nothing; every source names its licence."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.compiler import LOW_PRIORITY

pytestmark = pytest.mark.compiles

BIN = Path(sys.executable).parent
PYTHON_SOURCES = ["kernels", "ringcomm", "bench", "tests", "tools", "setup.py"]
CPP_ENDINGS = {".h", ".cpp", ".cu", ".cuh"}


def cpp_sources() -> list[str]:
    folders = [ROOT / "kernels", ROOT / "bench", ROOT / "tests"]
    return sorted(str(p) for top in folders for p in top.rglob("*") if p.suffix in CPP_ENDINGS)


COMMANDS = {
    "ruff format": ["ruff", "format", "--check", "--diff", *PYTHON_SOURCES],
    "ruff": ["ruff", "check", *PYTHON_SOURCES],
    "clang-format": ["clang-format", "--dry-run", "-Werror", *cpp_sources()],
    "mypy": ["mypy", "--strict"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_checker_has_nothing_to_say(name):
    tool, *arguments = COMMANDS[name]
    if not (BIN / tool).exists():
        pytest.skip(f"{tool} is not installed: pip install -e .[dev]")
    done = subprocess.run(
        [*LOW_PRIORITY, BIN / tool, *arguments], cwd=ROOT, text=True, capture_output=True
    )
    assert done.returncode == 0, f"\n{done.stdout}{done.stderr}"


def test_the_c_formatter_is_given_the_sources():
    assert any(path.endswith("platform.h") for path in cpp_sources())


def test_no_line_of_c_is_too_long():
    """clang-format leaves comments as they are, so that it does not break tables in them."""
    long = [
        f"{path}:{number}"
        for path in cpp_sources()
        for number, line in enumerate(Path(path).read_text().splitlines(), 1)
        if len(line) > 100
    ]
    assert long == []


LICENCE = "SPDX-License-Identifier: Apache-2.0"
LICENSED = {".py", ".sh", ".h", ".cpp", ".cu", ".pml"}


def unlicensed(paths: list[Path]) -> list[Path]:
    """Returns sources that do not name their licence in the first line, or after a ``#!``."""
    return [
        path
        for path in paths
        if (head := path.read_text().splitlines()[:2])
        and not any(line.strip("#/* ") == LICENCE for line in head)
    ]


def test_every_source_names_its_licence(tmp_path):
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, text=True, capture_output=True)
    if listed.returncode:
        pytest.skip("this is no checkout")
    paths = [ROOT / name for name in listed.stdout.splitlines()]
    sources = [path for path in paths if path.suffix in LICENSED and not path.is_symlink()]
    assert len(sources) > 1000
    assert unlicensed(sources) == []

    without = tmp_path / "without.py"
    without.write_text(f"import os\n\n# {LICENCE}\n")
    assert unlicensed([without]) == [without]
