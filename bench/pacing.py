# SPDX-License-Identifier: Apache-2.0
"""Progress of a benchmark: the number of measured cases, and about how much time is left."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence

from ringcomm.cli.progress import TERMINAL_VARIABLE, Progress, columns_of, time_left

# Rounds change the line at most once in this time, because every write takes a core for a moment.
# No other values were tried.
_ROUND_S = 1.0


def terminal_variable() -> dict[str, str]:
    """Returns the variable for ranks whose output is piped to this process's terminal, if any.

    The ranks write progress to stdout if stdout is a terminal too. The launcher passes on each
    stream in order, but not the two streams: progress on stderr could end up between parts of rows.
    """
    if not sys.stderr.isatty():
        return {}
    name = "stdout" if sys.stdout.isatty() else "stderr"
    return {TERMINAL_VARIABLE: f"{name}:{columns_of(sys.stderr)}"}


def progress_of_rank() -> Progress | None:
    """Returns this rank's progress output, on the terminal of :func:`terminal_variable` if set.

    None if the command that started the harness shows progress itself.
    """
    name, _, columns = os.environ.get(TERMINAL_VARIABLE, "").partition(":")
    if name == "none":
        return None
    if not name:
        return Progress()
    return Progress(sys.stdout if name == "stdout" else sys.stderr, columns=int(columns))


class Pacing:
    """Shows the state of a benchmark on rank 0.

    Args:
        title: the beginning of each line, such as "ringcomm bench moe".
        progress: the output; None if this process shows nothing, as all ranks but rank 0.
        now: the clock, in seconds.
    """

    def __init__(
        self, title: str, progress: Progress | None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._title, self._progress, self._now = title, progress, now
        self._weights: Sequence[float] = ()
        self._about_s = 0.0
        self._began_s = self._shown_at_s = now()
        self._done = 0

    def expect(self, weights: int | Sequence[float], about_s: float = 0.0) -> None:
        """Announces the cases, also off a terminal; call it before the first case is set up.

        Args:
            weights: the number of cases, or the work of each case in any unit.
            about_s: seconds that all cases may take; 0 if unknown.
        """
        self._weights = [1.0] * weights if isinstance(weights, int) else weights
        self._about_s = about_s
        self._began_s = self._now()
        count = len(self._weights)
        cases = f"{count} case{'s' * (count != 1)}"
        about = f", about {about_s:.0f} s" if about_s else ""
        self._show(f"{cases}{about}", at_once=True)

    def begin(self) -> None:
        """Shows the state before a case is set up."""
        self._show(", ".join(filter(None, (self._case(), self._left(0.0)))))

    def show_round(self, index: int, rounds: int) -> None:
        """Shows the state before round ``index`` of the current case, at most once a second."""
        if self._now() - self._shown_at_s >= _ROUND_S:
            where = f"round {index + 1} of {rounds}"
            self._show(", ".join(filter(None, (self._case(), where, self._left(index / rounds)))))

    def end(self) -> None:
        """Counts a finished case."""
        self._done += 1
        self.clear()

    def clear(self) -> None:
        """Erases the line on a terminal; call it before other output."""
        if self._progress is not None:
            self._progress.clear()

    def _case(self) -> str:
        count = len(self._weights)
        return f"case {self._done + 1} of {count}" if count else f"case {self._done + 1}"

    def _left(self, part: float) -> str:
        """Returns the time left if ``part`` of the current case is done, or "" if unknown."""
        if self._about_s and self._done == 0:
            # The first rounds include the set-up of the systems, so they predict too long a time.
            return f"about {self._about_s:.0f} s left"
        here = self._weights[self._done : self._done + 1]
        done = sum(self._weights[: self._done]) + part * sum(here)
        return time_left(self._now() - self._began_s, done, sum(self._weights))

    def _show(self, text: str, *, at_once: bool = False) -> None:
        if self._progress is not None:
            self._progress.show(f"{self._title}: {text}", at_once=at_once)
            self._shown_at_s = self._now()
