"""The pictures of the documents are what `make pictures` draws, have texts, and are shown."""

import itertools
import re
import xml.etree.ElementTree as ET

import pytest

import ringcomm
from ringcomm.comm.topology.fit import Measured
from tests.packaging.documents import DOCS, DOCUMENTS
from tools.pictures import memory, wires
from tools.pictures.__main__ import FOLDER, PICTURES
from tools.pictures.svg import COLOURS, LEAST_SIZE, Box, Sheet, Type, text_width

SVG = "{http://www.w3.org/2000/svg}"
# What WCAG asks of text (AA).
LEAST_CONTRAST = 4.5


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_what_the_data_and_the_library_say(name):
    """Else run make pictures."""
    assert (FOLDER / f"{name}.svg").read_text() == PICTURES[name]().svg()


def test_every_picture_is_shown_with_a_text_alternative():
    shown = {}
    for path in DOCUMENTS:
        for alternative, link in re.findall(r"!\[([^]]*)\]\(([^)\s]+)\)", path.read_text()):
            if link.endswith(".svg"):
                shown[(path.parent / link).resolve()] = alternative
    assert {path.resolve() for path in FOLDER.iterdir()} == set(shown)
    assert {path.stem for path in shown} == set(PICTURES)
    assert all(len(alternative) > 20 for alternative in shown.values())
    assert FOLDER.is_relative_to(DOCS)


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_has_title_and_description_and_texts_that_lie_apart(name):
    root = ET.parse(FOLDER / f"{name}.svg").getroot()
    assert len(root.findtext(f"{SVG}title", "")) > 5 and len(root.findtext(f"{SVG}desc", "")) > 80
    assert root.get("aria-labelledby") == "title desc"
    places = [place_of(each) for each in root.iter(f"{SVG}text")]
    width, height = int(root.get("width", "")), int(root.get("height", ""))
    for text, place in places:
        assert place.x >= 0 and place.right <= width and 0 <= place.y < place.bottom < height, text
    overlaps = [
        (one[0], other[0])
        for one, other in itertools.combinations(places, 2)
        if one[1].x < other[1].right
        and other[1].x < one[1].right
        and one[1].y < other[1].bottom
        and other[1].y < one[1].bottom
    ]
    assert overlaps == []


def place_of(element):
    """A text and roughly where it lies."""
    size, classes = float(element.get("font-size")), element.get("class").split()
    assert size >= LEAST_SIZE
    width = text_width(element.text, size, "b" in classes, "m" in classes)
    share = {None: 0, "middle": 0.5, "end": 1}[element.get("text-anchor")]
    x, baseline = float(element.get("x")), float(element.get("y"))
    return element.text, Box(x - width * share, baseline - size * 0.75, width, size)


def test_a_text_that_does_not_fit_is_refused():
    sheet = Sheet(100, 50, "a sheet", "nothing is drawn on it")
    with pytest.raises(ValueError, match="leaves the sheet"):
        sheet.text(40, 20, "wider than sixty")
    with pytest.raises(ValueError, match="wider than its box"):
        sheet.label(Box(0, 0, 60, 30), "wider than sixty")
    with pytest.raises(ValueError, match="higher than their box"):
        sheet.label(Box(0, 0, 60, 30), "a", "b", "c")
    with pytest.raises(ValueError, match="too small"):
        sheet.text(0, 20, "a", Type(8))


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_texts_stand_out_from_what_is_behind_them(theme):
    colours = {name: luminance(values[theme]) for name, values in COLOURS.items()}
    strong = ("ink", "muted", "blue", "orange", "green", "violet")
    soft = [name for name in colours if name.endswith("-soft")]
    pairs = [*itertools.product(strong, ("paper", "panel"))]
    pairs += itertools.product(("ink", "muted"), soft)
    # A rank's or a step's own colour on its own fill.
    pairs += [(name.removesuffix("-soft"), name) for name in soft]
    low = {
        pair: round(contrast, 2)
        for pair in pairs
        if (contrast := contrast_of(*(colours[name] for name in pair))) < LEAST_CONTRAST
    }
    assert low == {}


def luminance(colour):
    """The relative luminance that WCAG defines."""
    shares = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
    return sum(w * s for w, s in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast_of(one, other):
    return (max(one, other) + 0.05) / (min(one, other) + 0.05)


def test_the_region_that_is_drawn_is_that_of_two_ranks():
    with ringcomm.local_world(memory.WORLD) as world:
        geometry = world[0]._core.geometry
        assert (geometry["channels"], geometry["slots"]) == (1, memory.SLOTS)
        assert geometry["segment_bytes"] == memory.SEGMENT
        assert geometry["staging_bytes"] == memory._offset("staging")


def test_the_wires_that_are_drawn_are_sums_of_the_largest_buffer():
    mib = 1 << 20
    rows = [
        Measured(collective, algorithm, 2, 2, 1, rate, num_bytes, 1.0, wire=wire)
        for collective in ("all_reduce", "reduce_scatter", "all_gather")
        for algorithm, wire in (("rail-direct", ""), ("rail-direct", "int8"), ("flat-ring", ""))
        for rate in (0.1, 1.0, 10.0)
        for num_bytes in (mib, 4 * mib)
        if not (collective == "all_gather" and wire)
    ]
    shown = wires.wire_rows(rows)
    assert {row.bytes for row in shown} == {4 * mib}
    assert len(shown) == 2 * 2 * 3
    # Half of 4 MiB leaves a node in a reduce-scatter, and as much again in an all-reduce.
    for row in shown:
        halves = 2 if row.collective == "all_reduce" else 1
        sent_bytes = halves * 2 * mib * (131 / 512 if row.wire else 1)
        assert wires.link_ms(row) == pytest.approx(sent_bytes * 8 / (row.gbit_s * 1e6))
