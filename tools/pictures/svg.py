"""SVG by hand: boxes, lines, arrows and text on a sheet, with colours for light and dark screens.

A picture stands in a page as an image, so it sees the reader's preference for light or dark but
not the page's colours: it brings its own background. Every text is measured as it is set, roughly,
since the reader's font is not known: one that does not fit its place is an error here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

# On light and on dark screens. The strong colours are told apart by all readers, and legible on
# the paper; the soft ones are fills behind ink.
COLOURS = {
    "paper": ("#ffffff", "#161a22"),
    "panel": ("#f3f5f9", "#222834"),
    "ink": ("#1d2330", "#e8ebf2"),
    "muted": ("#596273", "#a4adbd"),
    "line": ("#aab2c0", "#525c6d"),
    "faint": ("#e2e6ed", "#2c3340"),
    "blue": ("#0b65c2", "#6cb2ff"),
    "blue-soft": ("#dcebfc", "#17355a"),
    "orange": ("#a34606", "#ffa562"),
    "orange-soft": ("#fde6d3", "#4d2d10"),
    "green": ("#0b7a55", "#58d3a2"),
    "green-soft": ("#d6f2e6", "#113f30"),
    "violet": ("#7a3fb0", "#c79bf5"),
    "violet-soft": ("#eee2f9", "#38244f"),
}
SANS = "system-ui,-apple-system,'Segoe UI',Roboto,Helvetica,Arial,sans-serif"
MONO = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"
# Widths of characters in sizes of the font: those of Verdana and DejaVu Sans, the widest
# of the usual fonts.
_NARROW, _WIDE = "iljtfI.,:;'|!()[] ", "mwMW%@"
_NARROW_EM, _WIDE_EM, _CAPITAL_EM, _OTHER_EM, _MONO_EM = 0.37, 0.95, 0.72, 0.62, 0.61
_BOLD = 1.1
LEAST_SIZE = 12.0


def text_width(text: str, size: float, bold: bool = False, mono: bool = False) -> float:
    """Roughly the width of a line of text."""
    if mono:
        return len(text) * _MONO_EM * size
    width = 0.0
    for each in text:
        if each in _NARROW:
            width += _NARROW_EM
        elif each in _WIDE:
            width += _WIDE_EM
        else:
            width += _CAPITAL_EM if each.isupper() else _OTHER_EM
    return width * size * (_BOLD if bold else 1)


def number(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")


@dataclass(frozen=True)
class Box:
    """A rectangle of the sheet."""

    x: float
    y: float
    width: float
    height: float

    @property
    def right(self) -> float:
        return self.x + self.width

    @property
    def bottom(self) -> float:
        return self.y + self.height

    @property
    def middle(self) -> tuple[float, float]:
        return self.x + self.width / 2, self.y + self.height / 2


@dataclass(frozen=True)
class Type:
    """How a text is set."""

    size: float = 14
    colour: str = "ink"
    bold: bool = False
    mono: bool = False
    anchor: str = "start"


@dataclass
class Sheet:
    """A picture that is being drawn; `svg` is its text."""

    width: int
    height: int
    title: str
    desc: str
    _parts: list[str] = field(default_factory=list)

    def box(
        self,
        place: Box,
        fill: str = "panel",
        stroke: str = "line",
        radius: float = 6,
        dashed: bool = False,
    ) -> Box:
        """Draws a rectangle, and returns it."""
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<rect class="{_classes(fill, stroke)}" x="{number(place.x)}" y="{number(place.y)}" '
            f'width="{number(place.width)}" height="{number(place.height)}" '
            f'rx="{number(radius)}"{dashes}/>'
        )
        return place

    def text(self, x: float, y: float, text: str, kind: Type | None = None) -> None:
        """Sets a line of text; y is its baseline.

        Raises:
            ValueError: it leaves the sheet, or is too small to be read.
        """
        kind = kind or Type()
        width = text_width(text, kind.size, kind.bold, kind.mono)
        left = x - width * {"start": 0, "middle": 0.5, "end": 1}[kind.anchor]
        if left < 0 or left + width > self.width or not kind.size <= y <= self.height - 2:
            raise ValueError(f"{self.title}: {text!r} at {x}, {y} leaves the sheet")
        if kind.size < LEAST_SIZE:
            raise ValueError(f"{self.title}: {text!r} is too small to be read")
        anchor = "" if kind.anchor == "start" else f' text-anchor="{kind.anchor}"'
        classes = f"f-{kind.colour}" + " b" * kind.bold + " m" * kind.mono
        self._parts.append(
            f'<text class="{classes}" x="{number(x)}" y="{number(y)}" '
            f'font-size="{number(kind.size)}"{anchor}>{escape(text, quote=False)}</text>'
        )

    def label(self, place: Box, *lines: str, kind: Type | None = None) -> None:
        """Sets lines in the middle of a box.

        Raises:
            ValueError: they do not fit.
        """
        kind = kind or Type()
        kind = Type(kind.size, kind.colour, kind.bold, kind.mono, "middle")
        step = kind.size * 1.3
        x, middle = place.middle
        first = middle - step * (len(lines) - 1) / 2 + kind.size * 0.35
        for line in lines:
            if text_width(line, kind.size, kind.bold, kind.mono) > place.width - 4:
                raise ValueError(f"{self.title}: {line!r} is wider than its box of {place.width}")
        if step * len(lines) > place.height + 4:
            raise ValueError(f"{self.title}: {lines} are higher than their box")
        for index, line in enumerate(lines):
            self.text(x, first + index * step, line, kind)

    def card(self, place: Box, colour: str, *lines: str, kind: Type | None = None) -> Box:
        """Draws a box in a soft colour with lines in it, and returns the box."""
        self.box(place, f"{colour}-soft", colour)
        self.label(place, *lines, kind=kind)
        return place

    def line(
        self,
        points: Sequence[tuple[float, float]],
        stroke: str = "line",
        width: float = 1.5,
        dashed: bool = False,
    ) -> None:
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        places = " ".join(f"{number(x)},{number(y)}" for x, y in points)
        self._parts.append(
            f'<polyline class="n s-{stroke}" stroke-width="{number(width)}"{dashes} '
            f'points="{places}"/>'
        )

    def arrow(
        self,
        points: Sequence[tuple[float, float]],
        stroke: str = "ink",
        width: float = 2,
        dashed: bool = False,
    ) -> None:
        """A line through points, of which the last one has a head."""
        (x0, y0), (x1, y1) = points[-2:]
        length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
        ux, uy = (x1 - x0) / length, (y1 - y0) / length
        head = 5 + 2 * width
        base = x1 - ux * head, y1 - uy * head
        self.line([*points[:-1], base], stroke, width, dashed)
        side = head * 0.45
        corners = (
            (x1, y1),
            (base[0] - uy * side, base[1] + ux * side),
            (base[0] + uy * side, base[1] - ux * side),
        )
        places = " ".join(f"{number(x)},{number(y)}" for x, y in corners)
        self._parts.append(f'<polygon class="f-{stroke}" points="{places}"/>')

    def dot(self, x: float, y: float, radius: float, fill: str) -> None:
        self._parts.append(
            f'<circle class="f-{fill}" cx="{number(x)}" cy="{number(y)}" r="{number(radius)}"/>'
        )

    def svg(self) -> str:
        """The file's text."""
        body = "\n".join(self._parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img" '
            f'aria-labelledby="title desc">\n'
            f'<title id="title">{escape(self.title, quote=False)}</title>\n'
            f'<desc id="desc">{escape(self.desc, quote=False)}</desc>\n'
            f"<style>\n{_style(body)}</style>\n"
            f'<rect class="f-paper" width="{self.width}" height="{self.height}" rx="10"/>\n'
            f"{body}\n</svg>\n"
        )


def _classes(fill: str, stroke: str) -> str:
    return (f"f-{fill}" if fill else "n") + (f" s-{stroke}" if stroke else "")


def _style(body: str) -> str:
    """The rules that a picture uses, for light screens and then for dark ones."""
    rules = [f"text{{font-family:{SANS}}}", f".m{{font-family:{MONO}}}", ".b{font-weight:600}"]
    rules.append(".n{fill:none}")
    themes: tuple[list[str], list[str]] = ([], [])
    for name, values in COLOURS.items():
        for short, what in (("f", "fill"), ("s", "stroke")):
            selector = f"{short}-{name}"
            uses = selector in body.replace('"', " ").split() or selector == "f-paper"
            if uses:
                for theme, value in zip(themes, values, strict=True):
                    theme.append(f".{selector}{{{what}:{value}}}")
    light, dark = ("".join(theme) for theme in themes)
    return "\n".join([*rules, light, f"@media (prefers-color-scheme:dark){{{dark}}}", ""])
