# SPDX-License-Identifier: Apache-2.0
"""Tries wheels in environments that contain nothing else."""

from __future__ import annotations

import platform
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tools.commands import PYTHONS, interpreter, make_environment, run

BARE_USE = Path(__file__).with_name("bare_use.py")


def architecture_of(wheel: Path) -> str:
    """Returns the machine that a wheel's tag names."""
    return wheel.stem.rpartition("manylinux_2_28_")[2]


def fitting_wheel(wheels: Sequence[Path], version: str, architecture: str) -> Path | None:
    """Returns the wheel that CPython ``version``, such as "3.13", would install on a machine."""
    own = f"cp{version.replace('.', '')}"
    fit = [wheel for wheel in wheels if architecture_of(wheel) == architecture]
    for wheel in fit:
        if f"-{own}-{own}-" in wheel.name:
            return wheel
    for wheel in fit:
        oldest = re.search(r"-cp3(\d+)-abi3-", wheel.name)
        if oldest and int(version.partition(".")[2]) >= int(oldest[1]):
            return wheel
    return None


def choose_wheel(wheels: Sequence[Path], version: str, architecture: str) -> Path:
    """Returns the wheel that fits.

    Raises:
        SystemExit: no wheel fits.
    """
    wheel = fitting_wheel(wheels, version, architecture)
    if wheel is None:
        raise SystemExit(f"no wheel for CPython {version} on {architecture}")
    return wheel


def try_bare(python: Path, wheel: Path) -> str:
    """Installs a wheel alone and runs ``bare_use.py``, which adds numbers on two ranks; returns its
    output.
    """
    with tempfile.TemporaryDirectory() as folder:
        alone = ("--no-index", "--no-deps", wheel)
        own = make_environment(python, Path(folder, "environment"), *alone)
        return run(own, BARE_USE, cwd=Path(folder)).strip()


def python_of(root: Path) -> Path:
    """Returns the interpreter below the root of another Linux, such as ``usr/bin/python3.11``.

    Raises:
        SystemExit: there is none, or more than one.
    """
    pythons = list((root / "usr" / "bin").glob("python3.[0-9]*[0-9]"))
    if len(pythons) != 1:
        raise SystemExit(f"wheels: {root}/usr/bin has {len(pythons)} interpreters, not one")
    return pythons[0]


def try_foreign(wheels: Sequence[Path], root: Path) -> tuple[Path, str]:
    """Runs the wheel for another machine under qemu; returns the wheel and its output.

    Args:
        wheels: Wheels of one machine. The fitting wheel is unpacked as pip does; pip is not run.
        root: The root of a Linux of that machine, with Python in ``usr/bin``.

    Raises:
        SystemExit: qemu or Python is missing.
    """
    architecture = architecture_of(wheels[0])
    emulator = shutil.which(f"qemu-{architecture}-static")
    if emulator is None:
        raise SystemExit(f"qemu-{architecture}-static is missing: apt-get install qemu-user-static")
    python = python_of(root)
    wheel = choose_wheel(wheels, python.name.removeprefix("python"), architecture)
    with tempfile.TemporaryDirectory() as folder:
        shutil.unpack_archive(wheel, folder, "zip")
        command = (emulator, "-L", root, python, BARE_USE)
        return wheel, run(*command, cwd=Path(folder), PYTHONPATH=folder).strip()


def try_all(wheels: Sequence[Path], foreign_root: Path | None) -> None:
    """Tries the wheels that can run here, and prints their output.

    Raises:
        SystemExit: a wheel failed, or their sums have different bits.
    """
    said: dict[str, str] = {}
    here = [wheel for wheel in wheels if architecture_of(wheel) == platform.machine()]
    for version in PYTHONS:
        python = interpreter(version)
        if python is None:
            print(f"CPython {version}: not here, not tried")
            continue
        wheel = fitting_wheel(here, version, platform.machine())
        if wheel is None:
            print(f"CPython {version}: no wheel for it was built, not tried")
            continue
        said[f"CPython {version}, {wheel.name}"] = try_bare(python, wheel)
    foreign = [wheel for wheel in wheels if wheel not in here]
    if foreign and foreign_root is not None:
        wheel, told = try_foreign(foreign, foreign_root)
        said[f"under qemu, {wheel.name}"] = told
        foreign.remove(wheel)
    sums = {}
    for name, text in said.items():
        told, sums[name] = text.splitlines()
        print(f"{name}: {told}", flush=True)
    for wheel in foreign:
        print(f"{wheel.name}: another machine's, or interpreter's: checked, not run")
    if len(set(sums.values())) > 1:
        raise SystemExit(f"wheels: their sums have different bits: {sums}")
