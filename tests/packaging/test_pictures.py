# SPDX-License-Identifier: Apache-2.0
"""Charts equal the output of `make pictures`; every picture has legible text and is shown."""

import itertools
import re
import xml.etree.ElementTree as ET
from typing import cast

import pytest

import ringcomm
from ringcomm import _native
from tests.packaging.documents import DOCUMENTS
from tools.pictures import COLOURS, FOLDER, PICTURES

SVG = "{http://www.w3.org/2000/svg}"
# WCAG (AA) requires this contrast for text.
LEAST_CONTRAST = 4.5
LEAST_SIZE = 12
# Widths of characters in units of the font size, as in Verdana and DejaVu Sans, the widest of the
# usual fonts.
WIDTHS = {**dict.fromkeys("iljtfI.,:;'|!()[] ", 0.37), **dict.fromkeys("mwMW%@", 0.95)}


@pytest.mark.parametrize("name", PICTURES)
def test_a_chart_is_what_the_results_say(name):
    """If this fails, run make pictures."""
    assert (FOLDER / f"{name}.svg").read_text() == PICTURES[name]().svg()


def test_every_picture_is_shown_with_a_text_alternative():
    shown = {}
    for path in DOCUMENTS:
        for alternative, link in re.findall(r"!\[([^]]*)\]\(([^)\s]+)\)", path.read_text()):
            if link.endswith(".svg"):
                shown[(path.parent / link).resolve()] = alternative
    assert {path.resolve() for path in FOLDER.iterdir()} == set(shown)
    assert len(shown) >= 12 and all(len(alternative) > 20 for alternative in shown.values())


def text_width(text, size, classes):
    if "m" in classes:
        return len(text) * 0.61 * size
    ems = sum(WIDTHS.get(each, 0.72 if each.isupper() else 0.62) for each in text)
    return ems * size * (1.1 if "b" in classes else 1)


def box_of(element):
    """Returns the approximate left, right, top and bottom of a text."""
    size, classes = float(element.get("font-size")), element.get("class").split()
    assert size >= LEAST_SIZE
    width = text_width(element.text, size, classes)
    left = (
        float(element.get("x"))
        - width * {None: 0, "middle": 0.5, "end": 1}[element.get("text-anchor")]
    )
    top = float(element.get("y")) - size * 0.75
    return left, left + width, top, top + size


def overlap(one, other):
    (left, right, top, bottom), (left2, right2, top2, bottom2) = one, other
    return left < right2 and left2 < right and top < bottom2 and top2 < bottom


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.stem)
def test_a_picture_has_title_and_description_and_texts_that_lie_apart(path):
    root = ET.parse(path).getroot()
    assert len(root.findtext(f"{SVG}title", "")) > 5 and len(root.findtext(f"{SVG}desc", "")) > 80
    assert root.get("aria-labelledby") == "title desc"
    boxes = {each: box_of(each) for each in root.iter(f"{SVG}text")}
    width, height = int(root.get("width", "")), int(root.get("height", ""))
    for element, (left, right, top, bottom) in boxes.items():
        assert left >= 0 and right <= width and 0 <= top < bottom < height, element.text
    pairs = itertools.combinations(boxes.items(), 2)
    assert [(a.text, b.text) for (a, x), (b, y) in pairs if overlap(x, y)] == []


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.stem)
def test_a_picture_has_the_colours_of_both_themes(path):
    style = ET.parse(path).getroot().findtext(f"{SVG}style", "")
    themes = style.split("@media (prefers-color-scheme:dark)")
    assert len(themes) == 2
    for index, theme in enumerate(themes):
        found = re.findall(r"\.[fs]-([a-z-]+){\w+:(#\w+)}", theme)
        assert found and all(COLOURS[name][index] == colour for name, colour in found)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_texts_stand_out_from_what_is_behind_them(theme):
    colours = {name: luminance(values[theme]) for name, values in COLOURS.items()}
    strong = ("ink", "muted", "blue", "orange", "green", "violet")
    soft = [name for name in colours if name.endswith("-soft")]
    pairs = [*itertools.product(strong, ("paper", "panel"))]
    pairs += itertools.product(("ink", "muted"), soft)
    # The colour of a rank or step on its own soft fill.
    pairs += [(name.removesuffix("-soft"), name) for name in soft]
    low = {
        pair: round(contrast, 2)
        for pair in pairs
        if (contrast := contrast_of(*(colours[name] for name in pair))) < LEAST_CONTRAST
    }
    assert low == {}


def luminance(colour):
    """Returns the relative luminance as WCAG defines it."""
    shares = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
    return sum(w * s for w, s in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast_of(one, other):
    return (max(one, other) + 0.05) / (min(one, other) + 0.05)


def test_the_region_that_is_drawn_is_that_of_two_ranks():
    texts = [each.text for each in ET.parse(FOLDER / "heap.svg").getroot().iter(f"{SVG}text")]
    with ringcomm.local_world(2) as world:
        geometry = cast(_native.Comm, world[0].engine.core).geometry
    assert geometry["channels"] == 1
    assert f"slots, {geometry['slots']} a stream" in texts
    assert f"segments of {geometry['segment_bytes'] >> 10} KiB" in texts
    assert f"{geometry['staging_bytes']:,}" in texts
