"""Deadlines of waits that poll, which move on while this process does not run."""

from __future__ import annotations

import time

__all__ = ["LONGEST_LOOK_S", "Deadline"]

# A waiter that has not looked at the clock for so long did not run: its process was stopped, or the
# machine was suspended. kLongestLookNs of protocol/signal.h is the same for native waits.
LONGEST_LOOK_S = 0.25


class Deadline:
    """The end of a wait that asks often whether it is over.

    Time in which nobody asked does not count: the peers were mostly stopped with this process, and
    have had no chance to come meanwhile.

    Args:
        timeout_s: seconds from now on.
        longest_look_s: the longest time between two looks of a waiter that runs, in seconds.
            Longer than the default where a look itself blocks, as a connection does.

    Attributes:
        timeout_s: as given.
    """

    __slots__ = ("_begin_s", "_longest_look_s", "_looked_s", "timeout_s")

    def __init__(self, timeout_s: float, longest_look_s: float = LONGEST_LOOK_S) -> None:
        self.timeout_s = timeout_s
        self._longest_look_s = longest_look_s
        self._begin_s = self._looked_s = time.monotonic()

    def waited_s(self) -> float:
        """Returns the seconds that have passed, without those in which this process did not run."""
        now_s = time.monotonic()
        if now_s - self._looked_s > self._longest_look_s:
            self._begin_s += now_s - self._looked_s
        self._looked_s = now_s
        return now_s - self._begin_s

    def left_s(self) -> float:
        """Returns the seconds that are left, at least 0."""
        return max(self.timeout_s - self.waited_s(), 0.0)

    def is_over(self) -> bool:
        """True when the time has passed."""
        return self.waited_s() >= self.timeout_s
