"""When an engine computes, communicates and waits: spans for a Chrome trace."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Span:
    """From ``begin_us`` to ``end_us`` of the process's clock.

    Attributes:
        name: what was done.
        kind: "communication", "wait" (the caller stands still for it) or "compute".
        thread: whose.
        size_bytes: what was moved; 0 where that says nothing.
    """

    name: str
    kind: str
    begin_us: float
    end_us: float
    thread: int
    size_bytes: int = 0


class StepProfile:
    """Records spans while it is on; costs nothing otherwise."""

    def __init__(self) -> None:
        self.on = False
        self.spans: list[Span] = []

    @contextmanager
    def span(self, name: str, size_bytes: int = 0, kind: str = "communication") -> Iterator[None]:
        """Records what happens inside."""
        if not self.on:
            yield
            return
        begin_us = time.perf_counter_ns() / 1000
        try:
            yield
        finally:
            end_us = time.perf_counter_ns() / 1000
            thread = threading.get_ident()
            self.spans.append(Span(name, kind, begin_us, end_us, thread, size_bytes))

    def waiting(self, name: str) -> AbstractContextManager[None]:
        """Records that the caller waits for communication."""
        return self.span(f"wait for {name}", kind="wait")

    def hidden_share(self) -> float:
        """How much of the communication's time no caller waited for; NaN when there was none.

        Communication on the caller's own thread is recorded as waiting, too.
        """
        moved = sum(s.end_us - s.begin_us for s in self.spans if s.kind == "communication")
        waited = sum(s.end_us - s.begin_us for s in self.spans if s.kind == "wait")
        return 1.0 - min(waited, moved) / moved if moved else float("nan")

    def write(self, path: str | Path, rank: int) -> None:
        """Writes the spans in the Trace Event Format, which Chrome and Perfetto show.

        Args:
            path: of a JSON file.
            rank: shown as the process.
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
