"""``make matrix``: builds and tries ringcomm with each interpreter, compiler and torch here.

The package is built from a clone of what is committed, once for each interpreter and compiler: the
module that is built serves every torch. Each case installs it into a virtual environment of its
own, where a few exact tests of every layer run, and then the commands a newcomer types first. What
has no interpreter or compiler here is named as not tried. ``--write`` puts what was tried into the
table of docs/versions.md, each row with its date; rows that this run did not try stay as they are.
So rows of several systems can stand there, of a Debian in a chroot, too. ``--wheels`` tries wheels
that ``make wheels`` made instead of building.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "versions.md"
BEGIN, END = "<!-- matrix -->", "<!-- end of matrix -->"
TORCH = "2.13.0"
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
COMPILERS = ("g++-11", "g++-12", "g++-13", "clang++-14", "clang++-16", "clang++-18")
# What stands in place of a compiler where wheels of a release were tried.
OF_WHEELS = "wheel"
# Exact tests of collectives, messages, the optimizer and the stages, ranks mostly as threads.
TESTS = (
    "tests/comm/test_all_reduce.py",
    "tests/comm/test_messages.py",
    "tests/zero/test_uneven.py",
)
NEEDED = (
    "pytest>=8",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.8",
    "hypothesis>=6.100",
    "expecttest",
)
_LIMIT_S = 1800


@dataclass(frozen=True)
class Case:
    """One row: ``python`` builds and runs, ``compiler`` is None for the system's own."""

    python: str
    torch: str = TORCH
    compiler: str | None = None
    numpy: bool = True

    def __str__(self) -> str:
        compiler = self.compiler or "c++"
        return f"Python {self.python}, torch {self.torch}, {compiler}, " + (
            "NumPy" if self.numpy else "no NumPy"
        )


def interpreter(version: str) -> Path | None:
    """Finds an interpreter of ``version`` ("3.12") on the PATH or among pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found: list[str | Path | None] = [
        shutil.which(f"python{version}"),
        *pyenv.glob(f"{version}.*/bin/python{version}"),
    ]
    for each in found:
        if each is None:
            continue
        command = [str(each), "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])"]
        said = subprocess.run(command, capture_output=True, text=True, check=False)
        if said.returncode == 0 and said.stdout.strip() == version:
            return Path(each)
    return None


def cases(torch_versions: Sequence[str]) -> list[Case]:
    """All rows: every interpreter, one of them with every compiler and without NumPy, and torch."""
    usual = "3.11"
    made = [Case(version) for version in PYTHONS]
    made += [Case(usual, compiler=compiler) for compiler in COMPILERS]
    made += [Case(usual, numpy=False)]
    return made + [Case("3.12", torch=version) for version in torch_versions]


def lacks(case: Case) -> str:
    """Returns what this machine lacks for a case, or ""."""
    if interpreter(case.python) is None:
        return f"no Python {case.python} here"
    if case.compiler is not None and shutil.which(case.compiler) is None:
        return f"no {case.compiler} here"
    return ""


class StepFailed(Exception):
    """A command of a case failed; the text is what the table says."""


def step(name: str, *command: str | Path, cwd: Path, **variables: str) -> str:
    """Runs one command of a case; returns what it printed.

    Raises:
        StepFailed: it failed, or was not done in time. The end of what it said is shown.
    """
    try:
        done = subprocess.run(
            [str(word) for word in command],
            cwd=cwd,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_LIMIT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise StepFailed(f"{name}: not done after {_LIMIT_S} s") from error
    if done.returncode:
        lines = [line for line in done.stdout.splitlines() if line.strip()]
        print("\n".join(lines[-15:]), file=sys.stderr)
        raise StepFailed(f"{name}: {lines[-1] if lines else f'exit status {done.returncode}'}")
    return done.stdout


def make_environment(version: str, folder: Path) -> Path:
    """A new virtual environment in ``folder``; returns its interpreter."""
    found = interpreter(version)
    assert found is not None
    step("environment", found, "-m", "venv", folder, cwd=folder.parent)
    return folder / "bin" / "python"


def pip_install(python: Path, *packages: str | Path, name: str) -> None:
    quiet = ("--quiet", "--disable-pip-version-check")
    step(name, python, "-m", "pip", "install", *quiet, *packages, cwd=python.parent)


def clone(tree: Path) -> None:
    step("clone", "git", "clone", "--quiet", ROOT, tree, cwd=tree.parent)


def build(case: Case, tree: Path, folder: Path) -> Path:
    """Builds a wheel of a clone; returns the folder that it lies in."""
    wheels = folder / "wheels"
    python = make_environment(case.python, folder / "builder")
    variables = {} if case.compiler is None else {"CXX": case.compiler}
    command = (python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", wheels, tree)
    step("build", *command, cwd=folder, **variables)
    return wheels


def attempt(case: Case, wheels: Path, tree: Path, folder: Path) -> str:
    """Installs and tries a case in ``folder``; returns the version of torch, as torch says it.

    Args:
        case: The case.
        wheels: A folder with wheels, of which pip takes the one that fits.
        tree: The tests, without a package that they could import instead of what is installed.
        folder: An empty folder.
    """
    python = make_environment(case.python, folder / "environment")
    wanted = f"torch=={case.torch}"
    step("torch", "sh", ROOT / "tools" / "install_torch.sh", python, wanted, cwd=folder)
    pip_install(python, *NEEDED, *(["numpy"] if case.numpy else []), name="packages")
    # Of these wheels and no index, which may have another ringcomm; then what it depends on.
    given = ("--no-index", "--no-deps", "--only-binary=ringcomm", "--find-links", wheels)
    pip_install(python, *given, "ringcomm", name="install")
    pip_install(python, "ringcomm", name="dependencies")
    step("tests", python, "-m", "pytest", "-q", "-n", "2", *TESTS, cwd=tree)
    ringcomm = python.with_name("ringcomm")
    step("doctor", ringcomm, "doctor", cwd=folder)
    step("demo", ringcomm, "demo", cwd=folder)
    version = step("torch", python, "-c", "import torch; print(torch.__version__)", cwd=folder)
    # Without NumPy torch prints a warning before its version.
    return version.splitlines()[-1].strip()


def compiler_name(case: Case) -> str:
    """Names what compiles a case by its major version, such as "GCC 12"."""
    command = case.compiler or os.environ.get("CXX", "c++")
    said = step("compiler", command, "--version", cwd=ROOT).splitlines()[0]
    found = re.search(r"(\d+)\.\d+\.\d+", said)
    if found is None:
        raise SystemExit(f"matrix: no version in what {command} says: {said}")
    return f"{'Clang' if 'clang' in said else 'GCC'} {found[1]}"


class Row(NamedTuple):
    """A row of the table, as the page has it."""

    python: str
    torch: str
    compiler: str
    numpy: str
    system: str
    tried: str
    result: str

    @property
    def key(self) -> tuple[str, ...]:
        """What was tried: a later row with the same takes this one's place."""
        return (self.python, self.torch.partition("+")[0], *self[2:5])

    def __str__(self) -> str:
        return f"| {' | '.join(self)} |"


HEAD = (
    "| Python | torch | compiler | NumPy | system | tried on | |",
    "|---|---|---|---|---|---|---|",
)


def row(case: Case, compiler: str, torch: str, result: str) -> Row:
    """The row of a case that was tried here and now."""
    return Row(
        python=case.python,
        torch=torch,
        compiler=compiler,
        numpy="with" if case.numpy else "without",
        system=f"{platform.machine()}, {' '.join(platform.libc_ver())}",
        tried=time.strftime("%Y-%m-%d"),
        result=result.replace("|", "/"),
    )


def read_rows(text: str) -> list[Row]:
    """The rows that a page has between its marks."""
    _, begin, rest = text.partition(BEGIN)
    inside, end, _ = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{PAGE}: expected one {BEGIN} ... {END}")
    lines = [line for line in inside.splitlines() if line.startswith("|") and line not in HEAD]
    rows = [tuple(cell.strip() for cell in line[1:-1].split("|")) for line in lines]
    return [Row(*cells) for cells in rows]


def merge(before: Sequence[Row], tried: Sequence[Row]) -> list[Row]:
    """The rows of the page with what this run tried in its place, by version."""
    rows = {each.key: each for each in [*before, *tried]}
    order = [re.split(r"(\d+)", " ".join(key)) for key in rows]
    by_numbers = [[int(part) if part.isdigit() else part for part in each] for each in order]
    return [each for _, each in sorted(zip(by_numbers, rows.values(), strict=True))]


def write(tried: Sequence[Row]) -> None:
    """Puts rows into the page's table."""
    page = PAGE.read_text(encoding="utf-8")
    table = "\n".join([*HEAD, *map(str, merge(read_rows(page), tried))])
    before, _, rest = page.partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


def try_all(chosen: Sequence[Case], folder: Path, wheels: Path | None) -> Iterator[Row]:
    """Tries cases, each once; yields and prints what was found as soon as it is known.

    Args:
        chosen: The cases.
        folder: An empty folder for all that this needs.
        wheels: A folder with wheels to try instead of building.
    """
    built: dict[tuple[str, str], Path] = {}
    done = set()
    for case in chosen:
        missing = lacks(case)
        if missing:
            print(f"{case}: not tried: {missing}", flush=True)
            continue
        begin = time.monotonic()
        key = (case.python, OF_WHEELS if wheels else compiler_name(case))
        if (case.torch, case.numpy, *key) in done:  # this compiler is the system's own
            continue
        done.add((case.torch, case.numpy, *key))
        torch, result = case.torch, "ok"
        here = folder / "-".join(key).replace(" ", "-")
        try:
            if key not in built:
                shutil.rmtree(here, ignore_errors=True)
                here.mkdir()
                clone(here / "tree")
                built[key] = wheels or build(case, here / "tree", here)
                shutil.rmtree(here / "tree" / "ringcomm")
            with tempfile.TemporaryDirectory(dir=folder) as trial:
                torch = attempt(case, built[key], here / "tree", Path(trial))
        except StepFailed as error:
            result = str(error)
        print(f"{case}: {result}, {time.monotonic() - begin:.0f} s", flush=True)
        yield row(case, key[1], torch, result)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 when a case failed."""
    parser = argparse.ArgumentParser(prog="matrix", description=__doc__)
    parser.add_argument("--torch", default="", help="other versions of torch, by commas")
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose text has one of these")
    parser.add_argument(
        "--wheels", type=Path, metavar="FOLDER", help="tries the wheels there, and builds nothing"
    )
    parser.add_argument("--write", action="store_true", help="the rows into docs/versions.md")
    asked = parser.parse_args(arguments)
    chosen = [
        case
        for case in cases([each for each in asked.torch.split(",") if each])
        if any(text in str(case) for text in asked.only)
    ]
    results = []
    with tempfile.TemporaryDirectory(prefix="ringcomm-matrix-") as folder:
        for each in try_all(chosen, Path(folder), asked.wheels and asked.wheels.resolve()):
            results.append(each.result)
            if asked.write:
                write([each])
    return 1 if any(each != "ok" for each in results) else 0


if __name__ == "__main__":
    sys.exit(main())
