# SPDX-License-Identifier: Apache-2.0
"""Records which files of a tree any process opens, by inotify(7)."""

from __future__ import annotations

import ctypes
import os
import select
import struct
import threading
from pathlib import Path
from types import TracebackType

_OPEN, _OVERFLOW, _IS_FOLDER = 0x20, 0x4000, 0x40000000
_EVENT = struct.Struct("iIII")  # watch, mask, cookie, length of the name that follows
_libc = ctypes.CDLL(None, use_errno=True)


class Opened:
    """A context that records every file of a tree that any process opens.

    It watches only folders that exist when the context is entered. It sees the files of compilers,
    formatters and children of children as well. Byte code read from ``__pycache__`` counts as a
    read of its source.

    Attributes:
        files: names relative to the tree; complete when the context has ended.
    """

    def __init__(self, tree: Path) -> None:
        self.files: set[str] = set()
        self._tree = tree
        self._folders: dict[int, str] = {}

    def __enter__(self) -> Opened:
        self._descriptor = _libc.inotify_init1(os.O_CLOEXEC)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1")
        for folder, _, _ in os.walk(self._tree):
            watch = _libc.inotify_add_watch(self._descriptor, folder.encode(), _OPEN)
            if watch < 0:
                raise OSError(ctypes.get_errno(), "inotify_add_watch", folder)
            self._folders[watch] = os.path.relpath(folder, self._tree)
        self._leaves, self._leave = os.pipe()
        self._overflowed = False
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._leave)
        self._reader.join()
        os.close(self._leaves)
        os.close(self._descriptor)
        if self._overflowed:
            raise RuntimeError("the kernel has dropped events of inotify")

    def _read(self) -> None:
        while True:
            ready, _, _ = select.select([self._descriptor, self._leaves], [], [])
            if self._descriptor not in ready:
                return
            events, at = os.read(self._descriptor, 1 << 20), 0
            while at < len(events):
                watch, mask, _, length = _EVENT.unpack_from(events, at)
                at += _EVENT.size + length
                self._overflowed |= bool(mask & _OVERFLOW)
                if watch in self._folders and not mask & _IS_FOLDER:
                    name = events[at - length : at].rstrip(b"\0").decode()
                    self.files.add(_source(self._folders[watch], name))


def _source(folder: str, name: str) -> str:
    if os.path.basename(folder) == "__pycache__":
        folder, name = os.path.dirname(folder), name.partition(".")[0] + ".py"
    return os.path.normpath(os.path.join(folder, name))
