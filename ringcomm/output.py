"""The pictures of the commands: matplotlib, if it is there, their look and their files."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from ringcomm.errors import ArgumentError, UnsupportedError

PLOT_SUFFIXES = (".png", ".svg", ".pdf")

# A progress bar on stderr: redrawn in place on a terminal, a line every tenth elsewhere.

REDRAW_S = 0.1
BAR_CHARS = 24
LOG_LINES = 10


class ProgressBar:
    """Shows ``label |####----| done/total note``; use as a context manager.

    Draws nothing before the first ``show``. On a terminal the line is redrawn at most ten times a
    second and wiped at the end. In a pipe or file, where a carriage return would only make
    clutter, about ten plain lines are written.
    """

    def __init__(self, label: str, total: int, stream: TextIO | None = None) -> None:
        self._label = label
        self._total = max(total, 1)
        self._done = 0
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        self._drawn_at = 0.0
        self._logged = 0

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._terminal and self._drawn_at:
            self._write("\r\x1b[K")

    def show(self, done: int, note: str | Callable[[], str] = "") -> None:
        """Set the bar to ``done`` steps, with ``note`` (loss, speed) behind it.

        A note that takes time to find out is better a function, called when a line is drawn.
        """
        self._done = done
        if self._terminal:
            now = time.monotonic()
            if now - self._drawn_at >= REDRAW_S or self._done >= self._total:
                self._drawn_at = now
                columns = shutil.get_terminal_size().columns
                self._write("\r" + self._line(note)[: columns - 1] + "\x1b[K")
            return
        tenth = LOG_LINES * self._done // self._total
        if tenth > self._logged:
            self._logged = tenth
            self._write(self._line(note) + "\n")

    def _line(self, note: str | Callable[[], str]) -> str:
        filled = BAR_CHARS * min(self._done, self._total) // self._total
        bar = "#" * filled + "-" * (BAR_CHARS - filled)
        told = note() if callable(note) else note
        return f"{self._label} |{bar}| {self._done}/{self._total}  {told}"

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def new_figure(size_inches: tuple[float, float], path: str) -> Any:
    """An empty figure of matplotlib.

    Args:
        size_inches: width and height.
        path: of the picture, named in the error.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"--plot {path}: expected matplotlib, got {error}; install it with pip install "
            "'ringcomm[bench]', or leave --plot out"
        ) from error
    return Figure(figsize=size_inches, layout="constrained")


def write_figure(figure: Any, panels: Sequence[Any], title: str, path: str) -> None:
    """Finishes a figure and writes it; its format is the ending of ``path`` (png, svg, pdf).

    Raises:
        ArgumentError: the file cannot be written, or its ending names no format.
    """
    for panel in panels:
        panel.grid(True, axis="y", color="#dddddd", linewidth=0.7)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(fontsize=8, framealpha=0.9, edgecolor="none")
    figure.suptitle(title, fontsize=10)
    try:
        figure.savefig(Path(path), dpi=150)
    except (OSError, ValueError) as error:
        raise ArgumentError(f"--plot {path}: cannot be written: {error}") from error
