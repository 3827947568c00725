"""Folders that appear whole or not at all.

A folder is written under a hidden name beside its own, every file and then the folder itself is
synced, and one rename gives it its name. POSIX rename() is atomic to whoever looks. What a crash of
the machine leaves of it is the file system's matter, and so is what it leaves of all that was not
synced: Pillai et al., "All File Systems Are Not Created Equal" (OSDI'14).
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ringcomm.errors import CheckpointError

# Hidden names: "partial" was never renamed, "removed" is on its way out.
_PARTIAL, _REMOVED = ".partial-", ".removed-"
_NONCE_BYTES = 8


def sync_folder(folder: Path) -> None:
    """Waits until the names in a folder are on the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(folder: Path) -> None:
    """Makes it and those above it, for good."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    try:
        os.mkdir(folder)
    except FileExistsError:
        # Another process makes it, too: stages of a pipeline save below one folder.
        if not folder.is_dir():
            raise
    sync_folder(folder.parent)


def begin(target: Path) -> Path:
    """The hidden folder, new and empty, that will be ``target``.

    Raises:
        CheckpointError: there is a ``target``.
        OSError: it cannot be made.
    """
    if target.exists():
        raise CheckpointError(
            f"{target}: expected no such file or folder, but there is one, and none is written "
            "over; save elsewhere, or remove it"
        )
    make_folder(target.parent)
    partial = target.with_name(f"{_PARTIAL}{target.name}-{secrets.token_hex(_NONCE_BYTES)}")
    os.mkdir(partial)
    return partial


def commit(partial: Path, target: Path) -> None:
    """Gives a folder whose files are all synced its name."""
    sync_folder(partial)
    os.rename(partial, target)
    sync_folder(target.parent)


@contextmanager
def whole(target: Path) -> Iterator[Path]:
    """The hidden folder that becomes ``target`` at the end, or is removed if anything is raised."""
    partial = begin(target)
    try:
        yield partial
        commit(partial, target)
    except BaseException:
        # It may have its name already; what cannot be removed stays hidden.
        with suppress(OSError):
            discard(partial)
        raise


def discard(folder: Path) -> None:
    """Removes a folder, which is never seen half removed."""
    if not folder.name.startswith(_REMOVED):
        removed = folder.with_name(f"{_REMOVED}{secrets.token_hex(_NONCE_BYTES)}")
        os.rename(folder, removed)
        folder = removed
    shutil.rmtree(folder)


def leftovers(parent: Path, name: str | None = None) -> list[Path]:
    """Hidden folders of saves and removals that were cut short, sorted.

    Args:
        parent: where to look; need not exist.
        name: of the folder that was to be saved; default all, and removals too.
    """
    if not parent.is_dir():
        return []
    ours = (
        f"({re.escape(_PARTIAL)}.+-|{re.escape(_REMOVED)})"
        if name is None
        else re.escape(f"{_PARTIAL}{name}-")
    )
    hidden = re.compile(ours + rf"[0-9a-f]{{{2 * _NONCE_BYTES}}}")
    return sorted(each for each in parent.iterdir() if hidden.fullmatch(each.name))
