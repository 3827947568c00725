# SPDX-License-Identifier: Apache-2.0
"""Progress of a long command: a line that changes on a terminal, a line every 30 s elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import TextIO

__all__ = ["TERMINAL_VARIABLE", "Progress", "columns_of", "time_left"]

# Names the stream of a benchmark's ranks that leads to a terminal, and the width of this terminal;
# "none": the ranks show no progress. MPI's launcher reads the output of its ranks from pipes, so
# that ranks cannot see the terminal.
TERMINAL_VARIABLE = "RINGCOMM_BENCH_TERMINAL"

# A log grows by at most one line in this time, and shows that the command still runs.
HEARTBEAT_S = 30.0


def time_left(elapsed_s: float, done: float, total: float) -> str:
    """Returns "about 40 s left", or "" before any work is done.

    Args:
        elapsed_s: seconds that the finished work has taken.
        done: the finished work, in any unit.
        total: all work, in the unit of ``done``.
    """
    if done <= 0 or elapsed_s <= 0:
        return ""
    left_s = elapsed_s * max(total - done, 0) / done
    return f"about {left_s:.0f} s left" if left_s < 120 else f"about {left_s / 60:.0f} min left"


class Progress:
    """Shows the state of a command on stderr, without disturbing its output on stdout.

    Args:
        stream: the stream; None for stderr.
        now: the clock, in seconds.
        columns: the width of a terminal behind the stream, which may be a pipe to it; None if the
            stream itself may be a terminal.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        now: Callable[[], float] = time.monotonic,
        *,
        columns: int | None = None,
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._now = now
        self._columns = columns
        self._on_terminal = columns is not None or self._stream.isatty()
        self._shown_at_s = now()
        self._is_shown = False

    def show(self, text: str, *, at_once: bool = False) -> None:
        """Replaces the line on a terminal; elsewhere prints a line if 30 s have passed.

        With ``at_once`` it always prints the line.
        """
        if self._on_terminal:
            # The escape sequence erases the rest of the longer line before.
            columns = columns_of(self._stream) if self._columns is None else self._columns
            self._write(f"\r{text[: columns - 1]}\x1b[K")
            self._is_shown = True
        elif at_once or self._now() - self._shown_at_s >= HEARTBEAT_S:
            self._write(f"{text}\n")
            self._shown_at_s = self._now()

    def clear(self) -> None:
        """Erases the line; call it before other output."""
        if self._is_shown:
            self._write("\r\x1b[K")
            self._is_shown = False

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def columns_of(stream: TextIO) -> int:
    """Returns the width of the stream's terminal, or 80 without a terminal."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):  # not a terminal of the system
        return 80
