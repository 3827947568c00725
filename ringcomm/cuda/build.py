# SPDX-License-Identifier: Apache-2.0
"""Finds the machine code of a kernel unit in the package or a cache on disk, or compiles it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import stat
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from ringcomm.cuda import units
from ringcomm.cuda.units import NVRTC_OPTIONS, Target, UnitSource
from ringcomm.errors import UnsupportedError

# ---- Compiled kernels on disk, shared by the processes of one user ------------------------------
# Entries are executable code: anybody who can write an entry can run code as this user. So the
# folder must belong to this user and be writable by nobody else. Each access checks and uses one
# descriptor, so that nobody can exchange the folder in between. If the cache cannot be used,
# kernels are compiled again; a warning gives each reason once per process.

CACHE_DIR_VARIABLE = "RINGCOMM_CACHE_DIR"
# A compilation takes up to a minute. If a process holds a lock for longer than this, it seems to be
# suspended, and others compile without the lock, which only saves work.
LOCK_TIMEOUT_S = 300.0
_POLL_S = 0.05
_MAGIC = b"ringcomm kernel 1\n"
_DIGEST_BYTES = hashlib.sha256().digest_size
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH

_warned: set[str] = set()
_warned_lock = threading.Lock()


def default_folder() -> Path | None:
    """Returns ``RINGCOMM_CACHE_DIR``, ``$XDG_CACHE_HOME/ringcomm`` or ``~/.cache/ringcomm``.

    Returns None if this user has no home directory.
    """
    chosen = os.environ.get(CACHE_DIR_VARIABLE, "")
    if chosen:
        return Path(chosen).absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # The XDG specification ignores relative paths.
        return Path(base, "ringcomm")
    try:
        return Path.home() / ".cache" / "ringcomm"
    except RuntimeError:
        return None


def _warn_once(message: str) -> None:
    with _warned_lock:
        if message in _warned:
            return
        _warned.add(message)
    warnings.warn(
        f"{message}. Every process compiles its kernels instead; set {CACHE_DIR_VARIABLE} to a "
        "folder of yours",
        RuntimeWarning,
        stacklevel=2,
    )


def _why_not_trusted(status: os.stat_result) -> str:
    # A folder of root, as in a container image, is also trusted: root may write everything anyway.
    if status.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {status.st_uid}, and this process runs as {os.geteuid()}"
    if status.st_mode & _OTHERS_MAY_WRITE:
        return f"others may write to it (mode {stat.S_IMODE(status.st_mode):o})"
    return ""


class KernelCache:
    """A folder of compiled kernels, which several threads and processes may use at once.

    Args:
        folder: the folder, made at first use, for this user alone; None: nothing is kept.
        lock_timeout_s: how long to wait for another process that makes the same entry.
    """

    def __init__(self, folder: Path | None, lock_timeout_s: float = LOCK_TIMEOUT_S) -> None:
        self.folder = folder
        self._lock_timeout_s = lock_timeout_s

    def get(self, name: str, make: Callable[[], bytes]) -> bytes:
        """Returns the entry ``name``; if it is missing, makes it with ``make`` and keeps it.

        If several processes need the entry at once, one makes it. A damaged entry is made again.

        Args:
            name: file name; contains a digest of everything that the contents depend on.
            make: makes the entry's contents; called at most once. Its errors are not caught.
        """
        folder = self._open_folder()
        if folder is None:
            return make()
        try:
            found = _read(folder, name)
            if found is not None:
                return found
            with self._lock(folder, name):
                # Another process may have made the entry while this process waited.
                found = _read(folder, name)
                if found is None:
                    found = make()
                    self._write(folder, name, found)
                return found
        finally:
            os.close(folder)

    def why_unusable(self) -> str:
        """Returns why the cache cannot be used, or ""; makes the folder if it is missing."""
        try:
            folder = self._try_to_open()
        except OSError as error:
            return str(error)
        os.close(folder)
        return ""

    def _open_folder(self) -> int | None:
        try:
            return self._try_to_open()
        except OSError as error:
            _warn_once(f"CUDA kernels: the cache {self.folder} is not used: {error}")
            return None

    def _try_to_open(self) -> int:
        if self.folder is None:
            raise OSError("this user has no home directory")
        os.makedirs(self.folder, mode=0o700, exist_ok=True)
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        reason = _why_not_trusted(os.fstat(folder))
        if reason:
            os.close(folder)
            raise PermissionError(f"{reason}, so its contents cannot be trusted")
        return folder

    @contextmanager
    def _lock(self, folder: int, name: str) -> Iterator[None]:
        """Holds a lock that excludes other threads and processes; a holder's death frees it."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            lock = os.open(f"{name}.lock", flags, 0o600, dir_fd=folder)
        except OSError as error:
            _warn_once(f"CUDA kernels: cannot write to the cache {self.folder}: {error}")
            yield
            return
        try:
            give_up_at = time.monotonic() + self._lock_timeout_s
            while not _try_lock(lock) and time.monotonic() < give_up_at:
                time.sleep(_POLL_S)
            yield
        finally:
            os.close(lock)

    def _write(self, folder: int, name: str, data: bytes) -> None:
        # Written under another name and renamed when complete: nobody sees half an entry.
        unfinished = f"{name}.{secrets.token_hex(8)}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            with open(os.open(unfinished, flags, 0o600, dir_fd=folder), "wb") as file:
                file.write(_MAGIC + _digest(name, data) + data)
            os.replace(unfinished, name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError as error:
            with suppress(OSError):
                os.unlink(unfinished, dir_fd=folder)
            _warn_once(f"CUDA kernels: cannot write to the cache {self.folder}: {error}")


def _digest(name: str, data: bytes) -> bytes:
    # The digest includes the name, so that an entry copied over another entry is detected.
    return hashlib.sha256(name.encode() + b"\0" + data).digest()


def _read(folder: int, name: str) -> bytes | None:
    """Returns the contents of an entry, or None unless the entry is complete and trusted."""
    try:
        # O_NONBLOCK: somebody may have put a pipe, which would block, in the entry's place.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(name, flags, dir_fd=folder), "rb") as file:
            # Others may have put the file here before the folder was closed to them.
            if _why_not_trusted(os.fstat(file.fileno())):
                return None
            entry = file.read()
    except OSError:
        return None
    begin = len(_MAGIC) + _DIGEST_BYTES
    data = entry[begin:]
    return data if entry[:begin] == _MAGIC + _digest(name, data) else None


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # Some network file systems have no locks: then each process makes the entry.
        return True
    return True


# NVRTC, the CUDA compiler as a library, called through CuPy. Compiling needs no driver.
#
# CuPy is imported at first use, never earlier: ``import ringcomm`` works without it.

_LOG_LINES = 12
_ADVICE = (
    "Install what is missing (pip install cupy-cuda13x nvidia-cuda-nvrtc), or install ringcomm "
    "where nvcc is on the PATH, which compiles the kernels beforehand"
)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip()


class Nvrtc:
    """The NVRTC library that CuPy finds.

    Attributes:
        identity: version and build; an NVRTC of another identity may make other machine code.

    Raises:
        UnsupportedError: CuPy is missing or finds no NVRTC; the message says which, and why.
    """

    def __init__(self) -> None:
        try:
            from cupy_backends.cuda.libs import nvrtc
        except Exception as error:  # A broken installation fails in many ways, all with one remedy.
            raise UnsupportedError(
                "CUDA kernels: none are compiled for this device, and compiling them needs CuPy, "
                f"which cannot be imported: {_words(error)}. {_ADVICE}"
            ) from error
        self._nvrtc: Any = nvrtc
        try:
            version = ".".join(map(str, nvrtc.getVersion()))
            # The version has no patch number, but a comment at the top of the PTX has the build.
            head = self.compile("", "identity.cu", {}, ("-arch=compute_90",))
        except UnsupportedError:
            raise
        except Exception as error:
            raise UnsupportedError(
                "CUDA kernels: none are compiled for this device, and CuPy finds no NVRTC to "
                f"compile them: {_words(error)}. {_ADVICE}"
            ) from error
        builds = [line[2:].strip() for line in head.decode().splitlines() if "Build ID" in line]
        self.identity = " ".join(["NVRTC", version, *builds])

    def architectures(self) -> Sequence[int]:
        """Returns the architectures for which NVRTC makes machine code: 80, 90, ..."""
        return tuple(self._nvrtc.getSupportedArchs())

    def compile(
        self, text: str, name: str, headers: Mapping[str, str], options: Sequence[str]
    ) -> bytes:
        """Compiles to machine code, or to PTX if ``options`` name a ``compute_`` architecture.

        Args:
            text: the source.
            name: the source's name in the compiler's messages.
            headers: texts by the names in ``#include``; the compiler finds no other headers.
            options: options of the compiler, with one ``-arch=``.

        Raises:
            UnsupportedError: the source does not compile; shows the first lines of the log.
        """
        nvrtc = self._nvrtc
        texts = tuple(header.encode() for header in headers.values())
        program = nvrtc.createProgram(text, name, texts, tuple(map(str.encode, headers)))
        try:
            try:
                nvrtc.compileProgram(program, tuple(options))
            except nvrtc.NVRTCError as error:
                log = nvrtc.getProgramLog(program).rstrip("\0\n").splitlines()
                head = f"CUDA kernels: {name} does not compile with {' '.join(options)}: {error}"
                raise UnsupportedError("\n".join([head, *log[:_LOG_LINES]])) from error
            as_ptx = any(option.startswith("-arch=compute_") for option in options)
            result: bytes = nvrtc.getPTX(program) if as_ptx else nvrtc.getCUBIN(program)
            return result
        finally:
            nvrtc.destroyProgram(program)


# The choice between the package's binaries and compilation at run time.
#
# A build with nvcc leaves binaries in the package (``ringcomm/_kernels``). If there are none, or
# they were built from other sources or for other GPUs, NVRTC compiles the sources at first use, and
# the cache keeps the result.

Capability = tuple[int, int]
PREBUILT_FOLDER = Path(__file__).resolve().parent.parent / "_kernels"
MANIFEST = "units.json"


class Compiler(Protocol):
    """The interface of :class:`ringcomm.cuda.build.Nvrtc`, which tests also implement."""

    identity: str

    def architectures(self) -> Sequence[int]: ...

    def compile(
        self, text: str, name: str, headers: Mapping[str, str], options: Sequence[str]
    ) -> bytes: ...


@dataclass(frozen=True)
class Prebuilt:
    """The binaries that a build left in ``folder``, as its manifest describes them."""

    folder: Path
    compiler: str
    targets: Sequence[Target]
    sources: Mapping[str, str]

    @classmethod
    def read(cls, folder: Path) -> Prebuilt | None:
        """Reads the manifest in ``folder``; returns None if the build had no nvcc.

        Raises:
            UnsupportedError: the manifest is damaged.
        """
        path = folder / MANIFEST
        try:
            record = json.loads(path.read_text())
            targets = [Target.parse(text) for text in record["targets"]]
            return cls(folder, record["compiler"], targets, record["sources"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UnsupportedError(
                f"CUDA kernels: {path} is damaged: {type(error).__name__}: {error}. "
                "Install ringcomm again"
            ) from error

    def target(self, source: UnitSource, capability: Capability) -> Target | None:
        """Returns the target in a unit's binary that a device of ``capability`` loads, or None."""
        # In a source tree, the sources may have changed since the binaries were built.
        if self.sources.get(source.unit.name) != source.fingerprint():
            return None
        if not self._path(source).is_file():
            return None
        return units.best_target(self.targets, capability)

    def load(self, source: UnitSource) -> bytes:
        return self._path(source).read_bytes()

    def _path(self, source: UnitSource) -> Path:
        return self.folder / f"{source.unit.name}.fatbin"


@dataclass(frozen=True)
class KernelBuilder:
    """Finds or compiles units.

    Attributes:
        root: folder of the sources.
        prebuilt: the build's binaries, if any.
        compiler: makes the compiler; called only when it is needed, and raises UnsupportedError
            if there is no compiler.
        cache: keeps compiled units.
        loops: the variant of the kernels' loops, "batched" or "serial" (``units.LOOPS_VARIABLE``),
            with which all units are compiled; the build's binaries have batched loops.
    """

    root: Path
    prebuilt: Prebuilt | None
    compiler: Callable[[], Compiler]
    cache: KernelCache
    loops: str = units.BATCHED

    def prebuilt_by(self, unit: str, capability: Capability) -> str | None:
        """See :func:`prebuilt_by`."""
        source = units.read_source(self.root, units.unit(unit, self.loops))
        if self.prebuilt is None or self.prebuilt.target(source, capability) is None:
            return None
        return self.prebuilt.compiler

    def load(self, unit: str, capability: Capability, prebuilt: bool = True) -> bytes:
        """See :func:`load_unit`."""
        source = units.read_source(self.root, units.unit(unit, self.loops))
        if capability < source.unit.since:
            raise UnsupportedError(
                f"CUDA kernels: expected a device of compute capability "
                f"{'.'.join(map(str, source.unit.since))} or later for unit {unit!r}, got "
                f"{'.'.join(map(str, capability))}, which lacks the unit's instructions"
            )
        there = self.prebuilt if prebuilt else None
        if there is not None and there.target(source, capability) is not None:
            return there.load(source)
        compiler = self.compiler()
        target = self._compiled_target(compiler, capability)
        macros = [f"-D{macro}" for macro in source.unit.macros]
        options = (*NVRTC_OPTIONS, f"-arch={target}", *macros)
        key = [source.fingerprint(), compiler.identity, *options]
        digest = hashlib.sha256("\n".join(key).encode()).hexdigest()
        return self.cache.get(
            f"{unit}.{target}.{digest}",
            lambda: compiler.compile(source.text, units.SOURCE, source.headers, options),
        )

    def load_all(self, units: Iterable[str], capability: Capability) -> dict[str, bytes]:
        """See :func:`load_units`."""
        names = list(units)
        # NVRTC compiles in the calling thread, but releases Python's lock: threads run in parallel.
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            codes = pool.map(lambda name: self.load(name, capability), names)
            return dict(zip(names, codes, strict=True))

    def describe(self, capability: Capability) -> str:
        """See :func:`describe_source`."""
        targets: set[Target | None] = {None}
        stale = ""
        if self.prebuilt is not None:
            known = [units.unit(name, self.loops) for name in units.UNITS]
            sources = [units.read_source(self.root, unit) for unit in known]
            targets = {self.prebuilt.target(source, capability) for source in sources}
            if None not in targets:
                made = ", ".join(sorted(map(str, targets)))
                return f"{made}, compiled with the package by {self.prebuilt.compiler}"
            stale = "; the package's binaries are for other GPUs or from other sources"
        if self.loops != units.BATCHED:
            stale = f"; no binaries have {self.loops} loops ({units.LOOPS_VARIABLE})"
        compiler = self.compiler()
        target = self._compiled_target(compiler, capability)
        reason = self.cache.why_unusable()
        kept = f"not kept: {reason}" if reason else f"kept in {self.cache.folder}"
        return f"{target}, compiled by {compiler.identity} at first use, {kept}{stale}"

    def _compiled_target(self, compiler: Compiler, capability: Capability) -> Target:
        known = compiler.architectures()
        target = units.compiler_target(known, capability)
        if target is None:
            raise UnsupportedError(
                f"CUDA kernels: the GPU has compute capability {capability[0]}.{capability[1]}, "
                f"and {compiler.identity} compiles for {', '.join(map(str, sorted(known)))} and "
                "later architectures: use an older CUDA toolkit, or a newer GPU"
            )
        return target


@cache
def _compiler() -> Compiler:
    return Nvrtc()


def _builder() -> KernelBuilder:
    return KernelBuilder(
        units.source_root(),
        Prebuilt.read(PREBUILT_FOLDER),
        _compiler,
        KernelCache(default_folder()),
        units.chosen_loops(),
    )


def prebuilt_by(unit: str, capability: Capability) -> str | None:
    """Returns the compiler of the package's binary of a unit; None if there is no such binary."""
    return _builder().prebuilt_by(unit, capability)


def load_unit(unit: str, capability: Capability, prebuilt: bool = True) -> bytes:
    """Returns code of one unit that a device can load: a fatbin, a cubin, or PTX.

    The first call on a machine may compile for seconds; if ranks call at once, only one compiles.

    Args:
        unit: a name in :data:`ringcomm.cuda.units.UNITS`.
        capability: compute capability of the device, such as ``(9, 0)``.
        prebuilt: whether to use the build's binaries; if not, the unit is compiled.

    Raises:
        ArgumentError: there is no such unit, or ``RINGCOMM_KERNELS`` is invalid.
        UnsupportedError: no binary covers the device, and the unit cannot be compiled: no CuPy, no
            NVRTC, an architecture that NVRTC does not support, or an error of the compiler, whose
            first lines the message shows.
    """
    return _builder().load(unit, capability, prebuilt)


def load_units(units: Iterable[str], capability: Capability) -> dict[str, bytes]:
    """Returns code of several units by name, as :func:`load_unit`; compiles on all cores at once.

    Raises:
        ArgumentError: as :func:`load_unit`.
        UnsupportedError: as :func:`load_unit`, for the first unit that fails.
    """
    return _builder().load_all(units, capability)


def describe_source(capability: Capability) -> str:
    """Describes where :func:`load_unit` would take kernels from; compiles none.

    Raises:
        ArgumentError: ``RINGCOMM_KERNELS`` names no variant of the loops.
        UnsupportedError: as :func:`load_unit`.
    """
    return _builder().describe(capability)
