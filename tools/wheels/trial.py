"""Installs wheels into bare environments, and tries them there.

``try_bare`` needs nothing but the interpreter, and runs wheels for AArch64, too, under qemu.
``try_with_torch`` fetches torch, and runs ``ringcomm doctor``, the quick demo and exact tests.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

from tools.matrix import NEEDED, TORCH
from tools.wheels.build import ROOT
from tools.wheels.commands import run

BARE_USE = Path(__file__).with_name("bare_use.py")
# Equality by bits of what is compiled: the loops of every instruction set, and the optimizer's.
EXACT_TESTS = (
    "tests/comm/test_all_reduce.py",
    "tests/comm/test_reduce_scatter.py",
    "tests/comm/test_all_gather.py",
    "tests/comm/test_partial.py",
    "tests/comm/test_wire_codes.py",
    "tests/optim/test_adamw.py",
)
TORCH_SPEC = f"torch=={TORCH}"


def choose_wheel(wheels: list[Path], version: str, architecture: str) -> Path:
    """The wheel that CPython ``version``, such as "3.13", installs on this machine."""
    own = f"cp{version.replace('.', '')}"
    fit = [wheel for wheel in wheels if wheel.stem.endswith(architecture)]
    for wheel in fit:
        if f"-{own}-{own}-" in wheel.name:
            return wheel
    for wheel in fit:
        oldest = re.search(r"-cp3(\d+)-abi3-", wheel.name)
        if oldest and int(version.partition(".")[2]) >= int(oldest[1]):
            return wheel
    raise SystemExit(f"no wheel for CPython {version} on {architecture}")


def architecture_of(wheel: Path) -> str:
    """The machine that a wheel's tag names."""
    return wheel.stem.rpartition("manylinux_2_28_")[2]


def make_environment(python: Path, folder: Path) -> Path:
    """A new virtual environment; returns its interpreter."""
    run(python, "-m", "venv", folder)
    return folder / "bin" / "python"


def try_bare(python: Path, wheel: Path) -> str:
    """Installs a wheel alone, and adds numbers on two ranks; returns what was printed."""
    with tempfile.TemporaryDirectory() as folder:
        interpreter = make_environment(python, Path(folder, "environment"))
        run(interpreter, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", wheel)
        return run(interpreter, BARE_USE, cwd=Path(folder)).strip()


def try_foreign(wheel: Path, root: Path) -> str:
    """Runs a wheel for another machine under qemu, in a tree of that machine's programs.

    Args:
        wheel: The wheel. It is unpacked as pip would; pip itself is not run.
        root: The root of a Linux of that machine, with Python in ``usr/bin``.
    """
    architecture = architecture_of(wheel)
    emulator = shutil.which(f"qemu-{architecture}-static")
    if emulator is None:
        raise SystemExit(f"qemu-{architecture}-static is missing: apt-get install qemu-user-static")
    with tempfile.TemporaryDirectory() as folder:
        shutil.unpack_archive(wheel, folder, "zip")
        python = foreign_python(root)
        return run(
            emulator, "-L", root, python, BARE_USE, cwd=Path(folder), PYTHONPATH=folder
        ).strip()


def foreign_python(root: Path) -> Path:
    """The interpreter of another machine's tree."""
    pythons = list((root / "usr" / "bin").glob("python3.[0-9]*[0-9]"))
    if len(pythons) != 1:
        raise SystemExit(f"wheels: {root}/usr/bin has {len(pythons)} interpreters, not one")
    return pythons[0]


def try_with_torch(python: Path, wheel: Path, folder: Path) -> list[str]:
    """Installs a wheel and torch into a new environment in ``folder``, and uses both there.

    Returns:
        What was tried, each with the last line of what it printed.
    """
    interpreter = make_environment(python, folder / "environment")
    run("sh", ROOT / "tools" / "install_torch.sh", interpreter, TORCH_SPEC)
    run(interpreter, "-m", "pip", "install", "--quiet", wheel, *NEEDED, "numpy")
    bin_folder = interpreter.parent
    variables = {"PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"}
    commands = [("doctor",), ("demo", "--quick")]
    said = []
    for command in commands:
        output = run(bin_folder / "ringcomm", *command, cwd=folder, **variables)
        said.append(f"ringcomm {' '.join(command)}: {output.strip().splitlines()[-1]}")
    # The tests look for sources of kernels, but the package that they import is the installed one.
    tests = folder / "tree"
    for name in ("tests", "kernels"):
        shutil.copytree(ROOT / name, tests / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tests)
    output = run(interpreter, "-m", "pytest", "-q", "--durations=0", *EXACT_TESTS, cwd=tests)
    said.append(f"tests: {output.strip().splitlines()[-1]}")
    return said
