# SPDX-License-Identifier: Apache-2.0
"""Shared libraries from the tests' C++ sources, built under ``build/`` when the sources change."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tests.support import ROOT, together

COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
OPTIONS = ["-std=c++20", "-Wall", "-Wextra", "-ffp-contract=off"]
FOLDER = ROOT / "build" / "emulator"


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _run(command: Sequence[str], target: Path) -> None:
    unfinished = target.with_suffix(f".{os.getpid()}")
    done = subprocess.run([*command, "-o", str(unfinished)], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{target.name} does not compile:\n{done.stderr}")
    unfinished.rename(target)


@dataclass(frozen=True)
class Unit:
    """Sources that are compiled together, so that their common headers are parsed once.

    Attributes:
        optimise: the compiler's option. Optimising may take longer than all calls in the tests.
        sources: names below the folder of the library.
    """

    optimise: str
    sources: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class SharedLibrary:
    """A library that is built at its first use, unless a build of the same sources exists.

    Attributes:
        name: of the file, before its digest.
        folder: the folder of its sources.
        units: by their names.
        headers: folders with all headers that the sources include.
        includes: folders that the compiler searches for headers.
        needs: libraries that it calls; each is loaded with it, from the same folder.
    """

    name: str
    folder: Path
    units: Mapping[str, Unit]
    headers: tuple[Path, ...]
    includes: tuple[Path, ...]
    needs: tuple[SharedLibrary, ...] = ()

    @cached_property
    def path(self) -> Path:
        """The path of the library; builds it unless a build of the same sources exists.

        Raises:
            RuntimeError: no compiler is installed, or the sources do not compile.
        """
        if COMPILER is None:
            raise RuntimeError(f"the {self.name} needs a C++20 compiler: set CXX")
        needed = [library.path for library in self.needs]
        headers = self._headers_digest()
        texts = [path.read_bytes() for unit in self.units.values() for path in self._sources(unit)]
        names = [path.name.encode() for path in needed]
        FOLDER.mkdir(parents=True, exist_ok=True)
        target = FOLDER / f"{self.name}-{_digest(headers, *names, *texts)}.so"
        with (FOLDER / f"{self.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # several ranks may start at once
            if not target.exists():
                with ThreadPoolExecutor(os.cpu_count()) as pool:
                    objects = list(pool.map(lambda unit: self._compile(unit, headers), self.units))
                for older in FOLDER.glob(f"{self.name}-*.so"):
                    older.unlink()  # processes that have loaded it keep it
                own = ["-shared", "-pthread", f"-Wl,-soname,{target.name}", "-Wl,-rpath,$ORIGIN"]
                _run([COMPILER, *own, *map(str, objects), *map(str, needed)], target)
        return target

    def _sources(self, unit: Unit) -> list[Path]:
        return [self.folder / name for name in unit.sources]

    def _headers_digest(self) -> bytes:
        included = sorted(path for folder in self.headers for path in folder.rglob("*.h"))
        return _digest(
            " ".join([str(COMPILER), *OPTIONS, repr(self.units)]).encode(),
            *(str(path.relative_to(ROOT)).encode() + path.read_bytes() for path in included),
        ).encode()

    def _compile(self, name: str, headers: bytes) -> Path:
        """Returns the object file of a unit; compiles it unless the same sources were compiled."""
        unit = self.units[name]
        one, *more = self._sources(unit)
        texts = [source.read_bytes() for source in (one, *more)]
        prefix = f"{self.name}-{name}"
        target = FOLDER / f"{prefix}-{_digest(headers, *texts)}.o"
        if not target.exists():
            for older in FOLDER.glob(f"{prefix}-*.o"):
                older.unlink()
            whole = together(FOLDER / f"{prefix}.cpp", [one, *more]) if more else one
            includes = [f"-I{folder}" for folder in self.includes]
            flags = [*OPTIONS, unit.optimise, "-fPIC", "-pthread", *includes]
            _run([str(COMPILER), *flags, "-c", str(whole)], target)
        return target
