"""What ringcomm is, on one sheet: the layers of a rank, and how ranks reach each other."""

from __future__ import annotations

from tools.pictures.svg import Box, Sheet, Type

BOLD = Type(15, bold=True)
SMALL = Type(13, "muted")
CODE = Type(13, mono=True)
RANKS = 3


def overview() -> Sheet:
    """Layers above, two nodes below."""
    sheet = Sheet(
        800,
        508,
        "What ringcomm is",
        "Above, what a training step goes through: your model in PyTorch, zero.shard for stages 0 "
        "to 3, optim for the step, and the collectives. Below, two nodes of three ranks. Each rank "
        "has a heap that all ranks of its node map, so collectives read and store in peers' "
        "memory. Between the nodes rails join the ranks of equal place over Gloo or NCCL.",
    )
    steps = (
        ("blue", "your model", "torch.nn", "unchanged"),
        ("violet", "sharded", "zero.shard", "stages 0 to 3"),
        ("green", "stepped", "optim.AdamW", "all of it in one pass"),
        ("orange", "exchanged", "reduce_scatter", "out of peers' memory"),
    )
    width, gap = 176, 14
    for index, (colour, name, code, told) in enumerate(steps):
        place = Box(27 + index * (width + gap), 46, width, 92)
        sheet.box(place, f"{colour}-soft", colour, 10)
        sheet.label(Box(place.x, 54, width, 26), name, kind=Type(15, bold=True))
        sheet.label(Box(place.x, 80, width, 24), code, kind=Type(13, colour, mono=True))
        sheet.label(Box(place.x, 106, width, 24), told, kind=Type(12, "muted"))
        if index:
            sheet.arrow([(place.x - gap + 1, 92), (place.x, 92)], "muted", 1.4)
    sheet.text(27, 30, "A training step", BOLD)
    sheet.text(27, 176, "The ranks that it runs on", BOLD)
    nodes = [Box(27, 190, 352, 246), Box(421, 190, 352, 246)]
    heaps = [_node(sheet, place, index) for index, place in enumerate(nodes)]
    for rail in range(RANKS):
        left, right = heaps[0][rail], heaps[1][rail]
        y = 452 + rail * 12
        colour = ("blue", "green", "violet")[rail]
        points = [(left, 414), (left, y), (right, y), (right, 414)]
        sheet.line(points, colour, 2)
        for x in (left, right):
            sheet.dot(x, 414, 4, colour)
    sheet.text(
        400,
        500,
        "rails: ranks of equal place, over Gloo or NCCL",
        Type(13, "muted", anchor="middle"),
    )
    return sheet


def _node(sheet: Sheet, place: Box, node: int) -> list[float]:
    """Draws a node; returns the middles of its heaps."""
    sheet.box(place, "panel", "line", 10)
    sheet.text(place.x + 14, place.y + 24, f"node {node}", BOLD)
    sheet.text(place.x + 82, place.y + 24, "shared memory, or GPUs over NVLink", SMALL)
    middles = []
    for index in range(RANKS):
        x = place.x + 16 + index * 112
        rank = sheet.card(Box(x, place.y + 40, 96, 34), "blue", f"rank {node * RANKS + index}")
        heap = sheet.card(Box(x, place.y + 176, 96, 48), "green", "heap")
        middles.append(heap.middle[0])
        sheet.line([(rank.middle[0], rank.bottom), (rank.middle[0], place.y + 102)], "blue", 2)
        sheet.arrow([(heap.middle[0], place.y + 142), (heap.middle[0], heap.y)], "blue", 2)
    bus = Box(place.x + 16, place.y + 102, 320, 40)
    sheet.card(bus, "blue", "every rank maps every heap", kind=Type(14))
    return middles
