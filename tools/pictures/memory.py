"""The heap and who maps it; slots, epochs and the life of an all-reduce."""

from __future__ import annotations

from ringcomm import _native
from ringcomm.comm.options import CommOptions
from tools.pictures.svg import Box, Sheet, Type

BOLD = Type(15, bold=True)
SMALL = Type(13, "muted")
MIDDLE = Type(13, "muted", anchor="middle")
CODE = Type(13, mono=True)
KIB = 1 << 10
SLOTS = CommOptions().slots
# Two ranks on the host: they have one channel, and this is their default segment.
WORLD, SEGMENT = 2, 256 * KIB
SIZES = (WORLD, 1, SLOTS, SEGMENT)


def _offset(what: str) -> int:
    return int(_native.layout_offset(SIZES, what))


def heap() -> Sheet:
    """Two processes, their heaps, and what lies in a region."""
    sheet = Sheet(
        800,
        446,
        "The heap, and how peers map it",
        "Process A and process B each own one heap without a name. Each opens the other's through "
        "/proc/pid/fd and maps it. A heap holds a header, a region for each communicator, and "
        "tensors. A region has a control page, signals, epochs, headers of calls and staging "
        f"slots; with two ranks and segments of {SEGMENT // KIB} KiB its words take "
        f"{_offset('staging')} bytes before the first slot.",
    )
    for x, name, peer in ((27, "A", "B"), (413, "B", "A")):
        sheet.box(Box(x, 16, 360, 228), "panel", "line", 10)
        sheet.text(x + 14, 40, f"process {name}, rank {'AB'.index(name)}", BOLD)
        own = sheet.box(Box(x + 14, 54, 154, 176), "green-soft", "green")
        sheet.label(Box(own.x, 60, 154, 22), "its own heap", kind=Type(14, bold=True))
        parts = (("header", 24), ("regions", 30), ("tensors", 72))
        y = 86.0
        for part, height in parts:
            place = sheet.box(Box(own.x + 10, y, 134, height), "paper", "green", 4)
            sheet.label(place, part, kind=Type(13))
            y += height + 6
        mapped = sheet.box(Box(x + 192, 54, 154, 176), "blue-soft", "blue", dashed=True)
        sheet.label(Box(mapped.x, 60, 154, 22), f"{peer}'s, mapped", kind=Type(14, bold=True))
        sheet.label(Box(mapped.x, 90, 154, 84), "through", f"/proc/{peer}/fd/n", kind=CODE)
        sheet.label(
            Box(mapped.x, 168, 154, 52), "loads and stores", "like its own", kind=Type(13, "muted")
        )
    # What A maps is B's own heap, and the other way around.
    sheet.arrow([(373, 142), (427, 142)], "blue")
    sheet.arrow([(682, 230), (682, 258), (118, 258), (118, 230)], "blue")
    sheet.text(27, 292, "A region: what one communicator takes of a rank's heap", BOLD)
    _region(sheet)
    return sheet


def _region(sheet: Sheet) -> None:
    begins = ("signal", "epoch", "header", "staging")
    offsets = [0, *(_offset(each) for each in begins)]
    parts = (
        ("control page", "faults, waits", "orange"),
        ("signals", "ready, consumed", "blue"),
        ("epochs", "sent, seen", "violet"),
        ("headers", "one a slot", "blue"),
        (f"slots, {SLOTS} a stream", f"segments of {SEGMENT // KIB} KiB", "green"),
    )
    x = 27.0
    for offset, (name, told, colour), width in zip(
        offsets, parts, (146, 146, 126, 126, 202), strict=True
    ):
        place = sheet.box(Box(x, 306, width, 66), f"{colour}-soft", colour, 2)
        sheet.label(Box(x, 312, width, 26), name, kind=Type(14, bold=True))
        sheet.label(Box(x, 338, width, 26), told, kind=Type(12, "muted"))
        sheet.line([(x, 372), (x, 382)], "line")
        sheet.text(x, 398, f"{offset:,}", Type(12, "muted"))
        x = place.right
    sheet.text(
        27,
        426,
        f"offsets in bytes, for {WORLD} ranks on the host; every rank computes the same",
        SMALL,
    )


def all_reduce() -> Sheet:
    """Two ranks, two hops, and the words by which they wait."""
    sheet = Sheet(
        800,
        636,
        "The life of an all-reduce",
        "Two ranks in time, downwards. Rank 0 copies its part of chunk 1 into a slot of its pair "
        "stream and stores ready in rank 1's region. Rank 1 awaits ready, reads the slot, adds its "
        "own chunk 1 in FP32, shares the sum in a slot of its shared stream, stores consumed and "
        "ready. Rank 0 awaits that, copies the sum out and stores consumed. The same happens with "
        f"chunk 0 the other way. Below, items and slots: item e lies in slot (e - 1) mod {SLOTS}.",
    )
    left, right = 230, 570
    for x, rank in ((left, 0), (right, 1)):
        sheet.card(Box(x - 60, 16, 120, 32), "blue", f"rank {rank}", kind=Type(15, bold=True))
        sheet.line([(x, 48), (x, 424)], "line", 2)
    sheet.text(400, 37, "chunk 1, whose owner is rank 1", MIDDLE)
    _act(sheet, left, 70, "orange", "copies chunk 1", "into a pair slot")
    _send(sheet, (left, 124), (right, 146), "orange", "ready = e, a release")
    _act(sheet, right, 140, "green", "awaits ready, reads", "the slot, adds in FP32")
    _send(sheet, (right, 198), (left, 220), "green", "consumed = e: the slot is free")
    _act(sheet, right, 212, "green", "the sum lies in", "a shared slot")
    _send(sheet, (right, 270), (left, 292), "blue", "ready = e', for every reader")
    _act(sheet, left, 286, "blue", "awaits ready,", "copies the sum out")
    _send(sheet, (left, 344), (right, 366), "blue", "consumed = e'")
    _act(sheet, left, 372, "violet", "done: its slots", "have come back")
    _act(sheet, right, 372, "violet", "done: its slots", "have come back")
    sheet.text(400, 446, "Chunk 0 takes the same way from rank 1 to rank 0, meanwhile.", MIDDLE)
    _slots(sheet)
    return sheet


def _act(sheet: Sheet, x: float, y: float, colour: str, *lines: str) -> None:
    """What a rank does, on the outer side of its line."""
    outer = Box(x - 206, y, 188, 44) if x < 400 else Box(x + 18, y, 188, 44)
    sheet.card(outer, colour, *lines, kind=Type(13))
    inner = outer.right if x < 400 else outer.x
    sheet.line([(inner, y + 22), (x, y + 22)], colour, 2)
    sheet.dot(x, y + 22, 4.5, colour)


def _send(
    sheet: Sheet, begin: tuple[float, float], end: tuple[float, float], colour: str, told: str
) -> None:
    sheet.arrow([begin, end], colour)
    sheet.text(400, (begin[1] + end[1]) / 2 - 10, told, Type(13, colour, anchor="middle"))


def _slots(sheet: Sheet) -> None:
    """A stream of which two items are read, and two wait for their reader."""
    sent, consumed = SLOTS + 2, SLOTS
    sheet.text(
        27, 484, f"A stream has {SLOTS} slots; item e lies in slot (e - 1) mod {SLOTS}", BOLD
    )
    most = consumed + SLOTS
    width = 66.0
    for epoch in range(1, most + 2):
        place = Box(27 + (epoch - 1) * (width + 8), 500, width, 50)
        if epoch <= consumed:
            sheet.box(place, "panel", "line")
        elif epoch <= sent:
            sheet.box(place, "orange-soft", "orange")
        else:
            sheet.box(place, "paper", "green" if epoch <= most else "line", dashed=True)
        sheet.label(place, f"item {epoch}", f"slot {(epoch - 1) % SLOTS}", kind=Type(13))
    step = width + 8
    ranges = (
        (0, consumed, "muted", "read: consumed = " + str(consumed)),
        (consumed, sent, "orange", "lie there: sent = " + str(sent)),
        (sent, most, "green", "may be written"),
        (most, most + 1, "muted", "must wait"),
    )
    for begin, end, colour, told in ranges:
        x0, x1 = 27 + begin * step, 27 + end * step - 8
        sheet.line([(x0, 562), (x1, 562)], colour, 3)
        sheet.text((x0 + x1) / 2, 582, told, Type(12, colour, anchor="middle"))
    sheet.text(
        27,
        616,
        f"Item {most + 1} waits until consumed is {most + 1 - SLOTS} or more. "
        "Epochs only grow: no word is ever reset.",
        SMALL,
    )
