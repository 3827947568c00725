"""The step profile: spans in which an engine computes, communicates or waits."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TimedSpan:
    """An interval from ``begin_us`` to ``end_us`` of the process's clock.

    Attributes:
        name: name of the work.
        kind: "communication", "wait" (the caller waits for communication) or "compute".
        thread: identifier of the thread that did it.
        size_bytes: bytes moved, or 0 where that does not apply.
    """

    name: str
    kind: str
    begin_us: float
    end_us: float
    thread: int
    size_bytes: int = 0


class StepProfile:
    """The spans of an engine, which are recorded while ``on`` is set and cost nothing otherwise."""

    def __init__(self) -> None:
        self.on = False
        self.spans: list[TimedSpan] = []

    def __repr__(self) -> str:
        state = "on" if self.on else "off"
        return f"<ringcomm.zero.StepProfile {state}, {len(self.spans)} spans>"

    @contextmanager
    def span(self, name: str, size_bytes: int = 0, kind: str = "communication") -> Iterator[None]:
        """Records the body of the ``with`` as a span."""
        if not self.on:
            yield
            return
        begin_us = time.perf_counter_ns() / 1000
        try:
            yield
        finally:
            end_us = time.perf_counter_ns() / 1000
            thread = threading.get_ident()
            self.spans.append(TimedSpan(name, kind, begin_us, end_us, thread, size_bytes))

    def waiting(self, name: str) -> AbstractContextManager[None]:
        """Records the body of the ``with`` as waiting for communication."""
        return self.span(f"wait for {name}", kind="wait")

    def hidden_share(self) -> float:
        """Returns the fraction of the communication's time that no caller waited for.

        NaN when there was no communication. Communication on the caller's own thread is recorded
        as waiting, too.
        """
        moved = sum(s.end_us - s.begin_us for s in self.spans if s.kind == "communication")
        waited = sum(s.end_us - s.begin_us for s in self.spans if s.kind == "wait")
        return 1.0 - min(waited, moved) / moved if moved else float("nan")

    def write(self, path: str | Path, rank: int) -> None:
        """Writes the spans in the Trace Event Format, which Chrome and Perfetto show.

        Args:
            path: path of the JSON file.
            rank: the rank, which is shown as the process.
        """
        events = [
            {
                "name": span.name,
                "cat": span.kind,
                "ph": "X",
                "ts": span.begin_us,
                "dur": span.end_us - span.begin_us,
                "pid": rank,
                "tid": span.thread,
                "args": {"bytes": span.size_bytes},
            }
            for span in self.spans
        ]
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
