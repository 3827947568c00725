"""Curves and bars on a sheet, with axes that are linear or logarithmic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tools.pictures.svg import Box, Sheet, Type, text_width

SMALL = Type(12, "muted")
CENTRED = Type(12, "muted", anchor="middle")
RIGHT = Type(12, "muted", anchor="end")


@dataclass(frozen=True)
class Axis:
    """The range of an axis, its ticks with their texts, and whether it is logarithmic."""

    least: float
    most: float
    ticks: Sequence[tuple[float, str]]
    is_log: bool = True

    def share(self, value: float) -> float:
        """Where a value lies between the ends, 0 to 1."""
        if not self.is_log:
            return (value - self.least) / (self.most - self.least)
        return math.log(value / self.least) / math.log(self.most / self.least)


@dataclass(frozen=True)
class Panel:
    """A place for curves, and its axes."""

    place: Box
    x: Axis
    y: Axis

    def at(self, x: float, y: float) -> tuple[float, float]:
        place = self.place
        return place.x + self.x.share(x) * place.width, place.bottom - self.y.share(
            y
        ) * place.height

    def draw(self, sheet: Sheet, title: str, has_numbers: bool = True) -> None:
        """Draws grid, ticks and title; the numbers of the y axis stand left of the place."""
        place = self.place
        sheet.text(place.x, place.y - 12, title, Type(14, bold=True))
        for value, text in self.y.ticks:
            y = self.at(self.x.least, value)[1]
            sheet.line([(place.x, y), (place.right, y)], "faint", 1)
            if has_numbers:
                sheet.text(place.x - 8, y + 4, text, RIGHT)
        for value, text in self.x.ticks:
            x = self.at(value, self.y.least)[0]
            sheet.line([(x, place.bottom), (x, place.bottom + 5)], "line", 1)
            sheet.text(x, place.bottom + 20, text, CENTRED)
        sheet.line([(place.x, place.bottom), (place.right, place.bottom)], "line", 1.2)

    def curve(
        self,
        sheet: Sheet,
        points: Sequence[tuple[float, float]],
        colour: str,
        dashed: bool = False,
    ) -> None:
        places = [self.at(*point) for point in points]
        sheet.line(places, colour, 2.2, dashed)
        if not dashed:
            for x, y in places:
                sheet.dot(x, y, 3, colour)


def legend(sheet: Sheet, x: float, y: float, names: Sequence[tuple[str, str, bool]]) -> None:
    """A line of (text, colour, dashed), from x on."""
    for text, colour, dashed in names:
        sheet.line([(x, y - 4), (x + 26, y - 4)], colour, 2.6, dashed)
        sheet.text(x + 32, y, text, Type(13))
        x += 32 + text_width(text, 13) + 22
