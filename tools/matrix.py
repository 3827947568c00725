# SPDX-License-Identifier: Apache-2.0
"""``make matrix``: tries ringcomm with each interpreter, compiler and torch of this machine.

The tool builds a clone of the committed tree once for each interpreter and compiler, since one
build serves every torch. It installs each case into its own virtual environment, and runs exact
tests, ``ringcomm doctor`` and the demo there. It lists a case without interpreter or compiler as
not tried. It prints rows for the table of docs/versions.md. ``--wheels`` tries the wheels of ``make
wheels``, and builds nothing.
"""

from __future__ import annotations

import argparse
import platform
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.commands import PYTHONS, ROOT, CommandFailed, interpreter, make_environment, run

TORCH = "2.13.0"
COMPILERS = ("g++-11", "g++-12", "g++-13", "clang++-14", "clang++-16", "clang++-18")
# Exact tests of the compiled code: collectives, messages, quantization, the optimizer and the
# stages.
TESTS = (
    *("comm/test_collectives.py", "comm/test_messages.py"),
    *("comm/test_quantization.py", "optim/test_adamw.py", "zero/test_uneven.py"),
)
NEEDED = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "expecttest")


@dataclass(frozen=True)
class Case:
    """A row of the table: a Python to build and run with, and a compiler ("c++": the system's)."""

    python: str
    torch: str = TORCH
    compiler: str = "c++"
    numpy: bool = True

    def __str__(self) -> str:
        numpy = "NumPy" if self.numpy else "no NumPy"
        return f"Python {self.python}, torch {self.torch}, {self.compiler}, {numpy}"

    @property
    def lacks(self) -> str:
        """The program that the case needs and this machine lacks, as "no ... here"; or ""."""
        if interpreter(self.python) is None:
            return f"no Python {self.python} here"
        return "" if shutil.which(self.compiler) else f"no {self.compiler} here"


def cases(torch_versions: Sequence[str]) -> list[Case]:
    """Returns cases for all interpreters, compilers and torch versions, and one without NumPy."""
    made = [Case(version) for version in PYTHONS]
    made += [Case("3.11", compiler=compiler) for compiler in COMPILERS]
    made += [Case("3.11", numpy=False)]
    return made + [Case("3.12", torch=version) for version in torch_versions]


def compiler_name(command: str) -> str:
    """Names a compiler by its major version, such as "GCC 12"."""
    said = run(command, "--version").splitlines()[0]
    found = re.search(r"(\d+)\.\d+\.\d+", said)
    if found is None:
        raise SystemExit(f"matrix: no version in the output of {command}: {said}")
    return f"{'Clang' if 'clang' in said else 'GCC'} {found[1]}"


def build(case: Case, folder: Path) -> Path:
    """Builds a wheel from the clone in ``folder`` and returns the folder of the wheel."""
    python = interpreter(case.python)
    assert python is not None
    builder, wheels = make_environment(python, folder / "builder"), folder / "wheels"
    command = (builder, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", wheels)
    run(*command, folder / "tree", CXX=case.compiler)
    return wheels


def attempt(case: Case, wheels: Path, tests: Path, folder: Path) -> str:
    """Installs and tries a case in an empty folder; returns the version of torch.

    pip selects the fitting wheel of ``wheels``. ``tests`` is a tree without the package.
    """
    found = interpreter(case.python)
    assert found is not None
    # Install ringcomm from these wheels alone, since an index may have another ringcomm; afterwards
    # install its requirements.
    given = ("--no-index", "--no-deps", "--only-binary=ringcomm", "--find-links", wheels)
    python = make_environment(found, folder / "environment", *given, "ringcomm")
    run("sh", ROOT / "tools" / "install_torch.sh", python, f"torch=={case.torch}")
    packages = (*NEEDED, *(["numpy"] if case.numpy else []), "ringcomm")
    run(python, "-m", "pip", "install", "--quiet", *packages)
    run(python, "-m", "pytest", "-q", "-n", "2", *(f"tests/{each}" for each in TESTS), cwd=tests)
    for command in ("doctor", "demo"):
        run(python.with_name("ringcomm"), command, cwd=folder)
    version = run(python, "-c", "import torch; print(torch.__version__)", cwd=folder)
    # Without NumPy torch prints a warning before its version.
    return version.splitlines()[-1].strip()


def try_all(
    chosen: Sequence[Case], folder: Path, given_wheels: Path | None
) -> Iterator[tuple[str, ...]]:
    """Tries each case once in an empty folder; yields its row as soon as it is known."""
    built: dict[tuple[str, str], Path] = {}
    done = set()
    for case in chosen:
        if case.lacks:
            print(f"{case}: not tried: {case.lacks}", flush=True)
            continue
        compiler = "wheel" if given_wheels else compiler_name(case.compiler)
        key = (case.python, compiler)
        if (case.torch, case.numpy, *key) in done:  # already tried, as "c++"
            continue
        done.add((case.torch, case.numpy, *key))
        begin, torch, result = time.monotonic(), case.torch, "ok"
        here = folder / "-".join(key).replace(" ", "-")
        try:
            if key not in built:
                shutil.rmtree(here, ignore_errors=True)
                here.mkdir()
                run("git", "clone", "--quiet", ROOT, here / "tree")
                built[key] = given_wheels or build(case, here)
                shutil.rmtree(here / "tree" / "ringcomm")
            with tempfile.TemporaryDirectory(dir=folder) as trial:
                torch = attempt(case, built[key], here / "tree", Path(trial))
        except CommandFailed as error:
            result = str(error).replace("|", "/")
        print(f"{case}: {time.monotonic() - begin:.0f} s", flush=True)
        system = f"{platform.machine()}, {' '.join(platform.libc_ver())}"
        numpy = "with" if case.numpy else "without"
        yield (case.python, torch, compiler, numpy, system, time.strftime("%Y-%m-%d"), result)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if a case failed."""
    parser = argparse.ArgumentParser(prog="matrix", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--torch", default="", help="other versions of torch, separated by commas")
    add("--only", nargs="+", default=[""], help="only cases whose text contains one of these")
    add("--wheels", type=Path, metavar="FOLDER", help="tries the wheels there, and builds nothing")
    asked = parser.parse_args(arguments)
    every = cases([each for each in asked.torch.split(",") if each])
    chosen = [case for case in every if any(text in str(case) for text in asked.only)]
    wheels, results = asked.wheels and asked.wheels.resolve(), []
    with tempfile.TemporaryDirectory(prefix="ringcomm-matrix-") as folder:
        for row in try_all(chosen, Path(folder), wheels):
            results.append(row[-1])
            print(f"| {' | '.join(row)} |", flush=True)
    return 1 if any(each != "ok" for each in results) else 0


if __name__ == "__main__":
    sys.exit(main())
