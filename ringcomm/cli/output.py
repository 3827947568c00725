# SPDX-License-Identifier: Apache-2.0
"""Checks a command's output files and folders before its work, and writes files at its end."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path

from ringcomm.errors import ArgumentError
from ringcomm.json_reader import reason

__all__ = ["why_no_file", "why_no_folder", "write_file"]


def why_no_file(path: str) -> str | None:
    """Returns why a file cannot be written at ``path``, or None; leaves no file."""
    mode, why = _look_at(path)
    if why is not None:
        return why
    if mode is not None:
        told = f"cannot be written: {os.strerror(errno.EISDIR)}"
        return told if stat.S_ISDIR(mode) else _refusal(path)
    folder = os.path.dirname(os.path.abspath(path))
    return _refusal(folder) if os.path.isdir(folder) else "its folder does not exist"


def why_no_folder(path: str, *, with_parents: bool) -> str | None:
    """Returns why files cannot be written in a folder that may not exist yet, or None.

    Args:
        path: the path of the folder; this function does not make it.
        with_parents: True if the command can also make the folders above it.
    """
    mode, why = _look_at(path)
    if mode is None and why is None and not with_parents:
        return why_no_file(path)  # needs the same permissions as a new file
    while mode is None and why is None:
        path = os.path.dirname(os.path.abspath(path))
        mode, why = _look_at(path)
    if mode is None:
        return why
    return _refusal(path) if stat.S_ISDIR(mode) else "expected a folder, or nothing yet, got a file"


def write_file(option: str, path: str | os.PathLike[str], text: str) -> None:
    """Writes the file that an option names.

    Raises:
        ArgumentError: the file cannot be written.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{option} {path}: cannot be written: {reason(error)}") from error


def _look_at(path: str) -> tuple[int | None, str | None]:
    """Returns the mode of the file at ``path``, if any, and the reason if it cannot be checked."""
    try:
        return os.stat(path).st_mode, None
    except FileNotFoundError:
        return None, None
    except OSError as error:
        return None, f"cannot be written: {error.strerror}"
    except ValueError as error:  # the path is not a valid file name
        return None, f"cannot be written: {error}"


def _refusal(path: str) -> str | None:
    """Returns why this user may not write the file, or into the folder; or None."""
    rights = os.W_OK | os.X_OK if os.path.isdir(path) else os.W_OK
    # Files are opened with the permissions of the effective user.
    if not os.access(path, rights, effective_ids=os.access in os.supports_effective_ids):
        return f"cannot be written: {os.strerror(errno.EACCES)}"
    if os.path.isdir(path):
        try:
            # Some file systems, such as /proc, have no new files although the permissions allow it.
            with tempfile.TemporaryFile(dir=path):
                pass
        except OSError as error:
            return f"cannot be written: no file can be made in {path}: {error.strerror}"
    return None
