"""Builds the emulated driver: ``python -m tests.support.emulated_driver`` before the tests begin.

It takes a compiler and nothing that is installed, so ``make test`` does it while pip installs.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from tests.support import ROOT, together

FOLDER = ROOT / "tests" / "support" / "emulator"
COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
INTERPRETER = ROOT / "tests" / "ptx_interpreter" / "source"
OPTIONS = ["-std=c++20", "-Wall", "-Wextra", "-ffp-contract=off"]
# What is compiled at once, so that common headers are read once, and how it is optimised. To
# optimise the kernels takes longer than all their calls in the tests; the interpreter is worth it.
UNITS: dict[str, tuple[str, tuple[str, ...]]] = {
    "integers": ("-O0", ("kernels_integer.cpp",)),
    "instructions": ("-O1", ("../../ptx_interpreter/source/instructions.cpp",)),
    "floats": (
        "-O0",
        (
            "kernels.cpp",
            "kernels_float.cpp",
            "kernels_half.cpp",
            "kernels_rows.cpp",
            "kernels_wires.cpp",
        ),
    ),
    "interpreter": (
        "-O1",
        tuple(f"../../ptx_interpreter/source/{name}.cpp" for name in ("history", "kernel", "memory", "rows", "warp")),
    ),
    "parser": ("-O1", ("../../ptx_interpreter/source/parse.cpp",)),
    "optimizer": ("-O0", ("kernels_optimizer.cpp",)),
    "driver": (
        "-O1",
        (
            "device.cpp",
            "driver.cpp",
            "graph.cpp",
            "memory.cpp",
            "multicast.cpp",
            "test_kernels.cpp",
        ),
    ),
}
INCLUDES = [ROOT, ROOT / "kernels" / "include"]


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _sources(unit: str) -> list[Path]:
    return [FOLDER / name for name in UNITS[unit][1]]


def _compile(unit: str, headers: bytes, folder: Path) -> Path:
    """The object file, made now unless one of these very sources exists."""
    texts = [source.read_bytes() for source in _sources(unit)]
    target = folder / f"{unit}-{_digest(headers, *texts)}.o"
    if not target.exists():
        for older in folder.glob(f"{unit}-*.o"):
            older.unlink()
        one, *more = _sources(unit)
        whole = together(folder / f"{unit}.cpp", [one, *more]) if more else one
        options = [
            *OPTIONS,
            UNITS[unit][0],
            "-fPIC",
            "-pthread",
            *(f"-I{each}" for each in INCLUDES),
        ]
        _run([str(COMPILER), *options, "-c", str(whole)], target)
    return target


def _run(command: list[str], target: Path) -> None:
    unfinished = target.with_suffix(f".{os.getpid()}")
    done = subprocess.run([*command, "-o", str(unfinished)], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"the emulated driver does not compile:\n{done.stderr}")
    unfinished.rename(target)


@cache
def library_path() -> Path:
    """The library, built now unless one of these very sources exists."""
    if COMPILER is None:
        raise RuntimeError("the emulated driver needs a C++20 compiler: set CXX")
    sources = [source for unit in UNITS for source in _sources(unit)]
    headers_of = [ROOT / "kernels", FOLDER, INTERPRETER]
    included = sorted(path for folder in headers_of for path in folder.rglob("*.h"))
    headers = _digest(
        " ".join([COMPILER, *OPTIONS, repr(UNITS)]).encode(),
        *(str(path.relative_to(ROOT)).encode() + path.read_bytes() for path in included),
    ).encode()
    folder = ROOT / "build" / "emulator"
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"driver-{_digest(headers, *(path.read_bytes() for path in sources))}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several ranks start at once
        if not target.exists():
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = list(pool.map(lambda unit: _compile(unit, headers, folder), UNITS))
            for older in folder.glob("driver-*.so"):
                older.unlink()  # whoever has loaded it keeps it
            link = [str(COMPILER), "-shared", "-pthread", *map(str, objects)]
            _run(link, target)
    return target


if __name__ == "__main__":
    library_path()
