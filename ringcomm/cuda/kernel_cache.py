"""Compiled kernels on disk, shared by the processes of one user.

Entries are executable code, and whoever can write them can run code as this user: the folder must
belong to this user and be writable by nobody else, and is looked at through one descriptor, so
that no other folder can be put in its place meanwhile. A cache that cannot be used costs time and
not the result: each reason is said once per process.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import stat
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CACHE_DIR_VARIABLE = "RINGCOMM_CACHE_DIR"
# A compilation takes up to a minute. Whoever holds a lock for this long is stopped, and need not
# be waited for: the lock saves work, and correctness does not hang on it.
LOCK_TIMEOUT_S = 300.0
_POLL_S = 0.05
_MAGIC = b"ringcomm kernel 1\n"
_DIGEST_BYTES = hashlib.sha256().digest_size
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH

_warned: set[str] = set()
_warned_lock = threading.Lock()


def default_folder() -> Path | None:
    """``RINGCOMM_CACHE_DIR``, ``$XDG_CACHE_HOME/ringcomm`` or ``~/.cache/ringcomm``.

    None where this user has no home.
    """
    chosen = os.environ.get(CACHE_DIR_VARIABLE, "")
    if chosen:
        return Path(chosen).absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # The specification ignores relative ones.
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
        f"{message}. Kernels are compiled in every process meanwhile; set {CACHE_DIR_VARIABLE} to "
        "a folder of yours",
        RuntimeWarning,
        stacklevel=2,
    )


def _why_not_trusted(status: os.stat_result) -> str:
    # Root may write everything anyhow: a folder that it made, in a container image, is as good.
    if status.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {status.st_uid}, and this process runs as {os.geteuid()}"
    if status.st_mode & _OTHERS_MAY_WRITE:
        return f"others may write to it (mode {stat.S_IMODE(status.st_mode):o})"
    return ""


class KernelCache:
    """One folder of entries. Several threads and processes may use it at once.

    Args:
        folder: made at first use, for this user alone; None keeps nothing.
        lock_timeout_s: how long to wait for another process that makes the same entry.
    """

    def __init__(self, folder: Path | None, lock_timeout_s: float = LOCK_TIMEOUT_S) -> None:
        self.folder = folder
        self._lock_timeout_s = lock_timeout_s

    def get(self, name: str, make: Callable[[], bytes]) -> bytes:
        """The entry ``name``, or what ``make`` returns, kept from then on.

        Of the processes that ask at once, one makes it. An entry that is damaged is made anew.

        Args:
            name: file name; holds a digest of everything that the contents depend on.
            make: called at most once; its errors pass through.
        """
        folder = self._open_folder()
        if folder is None:
            return make()
        try:
            found = _read(folder, name)
            if found is not None:
                return found
            with self._lock(folder, name):
                # Another process may have made it while this one waited.
                found = _read(folder, name)
                if found is None:
                    found = make()
                    self._write(folder, name, found)
                return found
        finally:
            os.close(folder)

    def why_unusable(self) -> str:
        """Says why nothing can be kept, or an empty string; makes the folder if there is none."""
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
        """Held by one thread of one process at a time; freed by the kernel when that one dies."""
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
        # Under another name first, and renamed when whole: nobody sees half an entry.
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
    # With the name, so that an entry that was copied over another one is recognised, too.
    return hashlib.sha256(name.encode() + b"\0" + data).digest()


def _read(folder: int, name: str) -> bytes | None:
    """The contents of an entry, or None if there is none that is whole and trusted."""
    try:
        # An entry is a plain file that this module made; a pipe would block.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(name, flags, dir_fd=folder), "rb") as file:
            # Others may have put it here before the folder was closed to them.
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
