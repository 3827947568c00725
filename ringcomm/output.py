"""The pictures of the commands: matplotlib, if it is there, their look and their files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ringcomm.errors import ArgumentError, UnsupportedError


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
