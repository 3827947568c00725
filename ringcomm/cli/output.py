"""Files and folders that a command writes at its end: refused before its work, told at the end."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from ringcomm.errors import ArgumentError

__all__ = ["why_no_file", "why_no_folder", "write_file"]


def why_no_file(path: str) -> str | None:
    """Says why no file can be written at ``path``, or returns None; writes nothing."""
    mode, why = _look_at(path)
    if why is not None:
        return why
    if mode is not None:
        told = f"cannot be written: {os.strerror(errno.EISDIR)}"
        return told if stat.S_ISDIR(mode) else _refusal(path)
    folder = os.path.dirname(os.path.abspath(path))
    return _refusal(folder) if os.path.isdir(folder) else "its folder does not exist"


def why_no_folder(path: str, *, with_parents: bool) -> str | None:
    """Says why files cannot be written in a folder that may have to be made, or returns None.

    Args:
        path: of the folder; nothing is made.
        with_parents: whether those above it may have to be made, too.
    """
    mode, why = _look_at(path)
    if mode is None and why is None and not with_parents:
        return why_no_file(path)  # a folder is made where a file can be
    while mode is None and why is None:
        path = os.path.dirname(os.path.abspath(path))
        mode, why = _look_at(path)
    if mode is None:
        return why
    return _refusal(path) if stat.S_ISDIR(mode) else "expected a folder, or nothing yet, got a file"


def write_file(option: str, path: str | os.PathLike[str], text: str) -> None:
    """Writes the file that an option names.

    Raises:
        ArgumentError: it cannot be written.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{option} {path}: cannot be written: {error}") from error


def _look_at(path: str) -> tuple[int | None, str | None]:
    """Returns the mode of what is there, if anything, or else why nobody can look."""
    try:
        return os.stat(path).st_mode, None
    except FileNotFoundError:
        return None, None
    except OSError as error:
        return None, f"cannot be written: {error.strerror}"
    except ValueError as error:  # no name that a file can have
        return None, f"cannot be written: {error}"


def _refusal(path: str) -> str | None:
    """Says that this user may not write a file, or into a folder, or returns None."""
    rights = os.W_OK | os.X_OK if os.path.isdir(path) else os.W_OK
    # Files are opened with the rights of the effective user.
    if os.access(path, rights, effective_ids=os.access in os.supports_effective_ids):
        return None
    return f"cannot be written: {os.strerror(errno.EACCES)}"
