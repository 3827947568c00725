# SPDX-License-Identifier: Apache-2.0
"""Compiles the C++ programs of tests, at low priority since other tests have timeouts."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.support import ROOT

# `make aarch64-check` sets this variable: programs are then compiled for that machine and run under
# qemu. Sanitizers do not run there, so the programs find wrong results but no races.
_MACHINE = os.environ.get("RINGCOMM_TEST_MACHINE")
EMULATOR = f"qemu-{_MACHINE}-static" if _MACHINE else None
COMPILER = (
    (f"{_MACHINE}-linux-gnu-g++" if _MACHINE else os.environ.get("CXX"))
    or shutil.which("g++")
    or shutil.which("clang++")
)
LOW_PRIORITY = ("nice", "-n", "10")
NEEDS_COMPILER = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

# -g1 has the line numbers that sanitizers report; full debug information takes a fifth longer.
_USUAL = ("-std=c++20", "-g1", "-ffp-contract=off", "-pthread", f"-I{ROOT}")
OPTIMISED = (*_USUAL, "-O1")
_RACES = ("-fsanitize=thread", "-Wno-tsan")
# Most programs take longer to compile than to run.
UNOPTIMISED = (*_USUAL, "-O0")
THREAD_SANITIZER: tuple[str, ...] = (*UNOPTIMISED, *_RACES)
ADDRESS_SANITIZER: tuple[str, ...] = (
    *UNOPTIMISED,
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
)
if EMULATOR is not None:
    THREAD_SANITIZER = ADDRESS_SANITIZER = OPTIMISED


def compile_to(
    output: Path,
    include: Path,
    *sources: object,
    flags: Sequence[str] = THREAD_SANITIZER,
    extra: Sequence[str] = (),
) -> Path:
    """Compiles and links the sources; with ``-c`` among the ``extra`` flags it only compiles.

    Args:
        output: the file to make.
        include: the folder of ringcomm's headers.
        sources: C++ files, and objects to link.
        flags: the flags of all programs of a kind.
        extra: flags placed before ``flags``, such as folders whose headers take precedence.
    """
    program = EMULATOR is not None and "-c" not in extra
    made = output.with_name(f"{output.name}.elf") if program else output
    words = [*extra, *flags, f"-I{include}", *sources, "-o", made]
    if program:
        words.append("-static")
    command = [*LOW_PRIORITY, str(COMPILER), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr[-4000:]}"
    if program:
        output.write_text(f'#!/bin/sh\nexec {EMULATOR} "{made}" "$@"\n')
        output.chmod(0o755)
    return output


def shared_by_workers(
    factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]
) -> Path:
    """Returns a folder that the first worker to need it fills, by ``make``, once per test run."""
    own = factory.getbasetemp()
    # With pytest-xdist, a worker's own temporary folder is inside the folder of the test run.
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / name
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = folder / "made"
        if not done.exists():
            make(folder)
            done.touch()
    return folder


def skip_without_sanitizer(folder: Path, flags: Sequence[str] = THREAD_SANITIZER) -> None:
    """Skips the test if a program compiled with these flags does not run here."""
    (folder / "probe.cpp").write_text("int main() { return 0; }\n")
    include = ROOT / "kernels/include"
    probe = compile_to(folder / "probe", include, folder / "probe.cpp", flags=flags)
    if subprocess.run([str(probe)], capture_output=True, check=False).returncode != 0:
        pytest.skip("the sanitizer does not run on this machine")
