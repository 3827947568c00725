"""The stages with their bytes, and the optimizer's step in one pass."""

from __future__ import annotations

import torch

from ringcomm.zero.estimate import STAGES, BytesPerElement, model_state
from ringcomm.zero.estimate_model import ModelElems
from ringcomm.zero.estimate_time import traffic
from tools.pictures.svg import Box, Sheet, Type

BOLD = Type(15, bold=True)
SMALL = Type(13, "muted")
GB = 1e9
PARAMS, WORLD = 10**9, 8
PARTS = (("params", "blue"), ("grads", "orange"), ("state", "green"))
NAMES = {"params": "parameters", "grads": "gradients", "state": "optimizer state"}
SHARDED = ("nothing", "state", "state, gradients", "state, gradients, parameters")


def _gb(value: float) -> str:
    return f"{value / GB:.3g} GB"


def stages() -> Sheet:
    """Bars of what a rank keeps, by stage."""
    model, each = ModelElems(PARAMS), BytesPerElement.of()
    held = [model_state(model, stage, WORLD, each) for stage in STAGES]
    sent = [traffic(model, stage, each).sent_bytes(WORLD) for stage in STAGES]
    told = ", ".join(
        f"stage {stage} {_gb(one.total)}" for stage, one in zip(STAGES, held, strict=True)
    )
    sheet = Sheet(
        800,
        372,
        "What a rank keeps at stages 0 to 3",
        f"Model state of each rank for {PARAMS / GB:g} billion bfloat16 parameters with AdamW on "
        f"{WORLD} ranks: {told}. Stage 1 divides the optimizer's state, stage 2 the gradients too, "
        "stage 3 the parameters too.",
    )
    sheet.text(
        27,
        34,
        f"{PARAMS / GB:g} B parameters in bfloat16, AdamW, {WORLD} ranks: bytes a rank",
        BOLD,
    )
    x = 27.0
    for part, colour in PARTS:
        sheet.box(Box(x, 50, 18, 14), f"{colour}-soft", colour, 3)
        sheet.text(x + 25, 62, NAMES[part], Type(13))
        x += 140
    left, right = 106.0, 560.0
    scale = (right - left) / held[0].total
    for stage, one in zip(STAGES, held, strict=True):
        y = 84 + stage * 62
        sheet.text(27, y + 21, f"stage {stage}", Type(14, bold=True))
        x = left
        for part, colour in PARTS:
            bytes_ = getattr(one, part)
            place = sheet.box(Box(x, y, bytes_ * scale, 30), f"{colour}-soft", colour, 2)
            if place.width > 62:
                sheet.label(place, _gb(bytes_), kind=Type(12))
            x = place.right
        sheet.text(x + 10, y + 21, _gb(one.total), Type(16, bold=True))
        sheet.text(left, y + 47, f"divided: {SHARDED[stage]}", Type(12, "muted"))
        sheet.text(690, y + 21, _gb(sent[stage]), Type(14, anchor="middle"))
    sheet.text(690, 62, "sent in a step", Type(13, "muted", anchor="middle"))
    sheet.text(
        27,
        350,
        "From ringcomm estimate. Buckets, gathered units and activations come on top.",
        SMALL,
    )
    return sheet


def _bytes_of_pass(each: BytesPerElement, is_16_bit: bool) -> list[tuple[str, int, str]]:
    """What one pass reads and stores for a parameter of the shard, with two ranks."""
    moments = each.exp_avg + each.exp_avg_sq
    own = [("moments, read and stored", 2 * moments, "green")]
    if is_16_bit:
        own.append(("master, read and stored", 2 * each.master, "violet"))
        own.append(("own parameter, stored", each.param, "blue"))
    else:
        own.append(("own parameter, read, stored", 2 * each.param, "blue"))
    gradients = ("2 gradients, read", 2 * each.grad, "orange")
    return [gradients, *own, ("peer's parameter, stored", each.param, "blue")]


def one_pass() -> Sheet:
    """The path of an element's gradient to all ranks' parameters."""
    fp32 = _bytes_of_pass(BytesPerElement.of(torch.float32), False)
    bf16 = _bytes_of_pass(BytesPerElement.of(torch.bfloat16), True)
    totals = [sum(size for _, size, _ in parts) for parts in (fp32, bf16)]
    sheet = Sheet(
        800,
        470,
        "A step in one pass",
        "The owner of a chunk reads its gradients out of all ranks' memory, sums them in rank "
        "order in registers or the first-level cache, updates moments and parameter there, and "
        "stores the new parameter into every rank's bucket. The reduced gradient is never written "
        f"to memory. With two ranks this moves {totals[0]} bytes for an FP32 parameter and "
        "{totals[1]} for a bfloat16 one.",
    )
    sheet.text(
        27, 34, "reduce-scatter, update and all-gather of chunk r, by its owner, rank r", BOLD
    )
    for row, rank in enumerate(("0", "r", "W-1")):
        y = 64 + row * 70
        colour = "orange" if rank != "r" else "violet"
        sheet.card(Box(27, y, 150, 46), colour, f"rank {rank}'s", "gradients", kind=Type(13))
        sheet.arrow([(177, y + 23), (232, y + 23), (286, 157 + (row - 1) * 26)], colour)
        sheet.arrow([(524, 157 + (row - 1) * 26), (568, y + 23), (620, y + 23)], "blue")
        sheet.card(Box(620, y, 153, 46), "blue", f"rank {rank}'s", "parameters", kind=Type(13))
    core = sheet.box(Box(286, 62, 238, 190), "green-soft", "green", 12)
    sheet.label(
        Box(core.x, 70, core.width, 128),
        "sum in rank order, FP32",
        "moments m and v",
        "new parameter",
        "rounded once",
        kind=Type(14),
    )
    sheet.label(
        Box(core.x, 204, core.width, 38), "in registers, or the L1 cache", kind=Type(13, "muted")
    )
    sheet.text(
        400,
        282,
        "The reduced gradient never visits memory.",
        Type(14, "green", True, anchor="middle"),
    )
    sheet.text(27, 322, "Bytes that move for a parameter of the shard, with 2 ranks", BOLD)
    for row, (name, parts, total) in enumerate(
        (("FP32", fp32, totals[0]), ("bfloat16", bf16, totals[1]))
    ):
        _bar(sheet, 338 + row * 60, name, parts, total, max(totals))
    return sheet


def _bar(
    sheet: Sheet, y: float, name: str, parts: list[tuple[str, int, str]], total: int, most: int
) -> None:
    sheet.text(27, y + 21, name, Type(14, bold=True))
    x, scale = 100.0, 610 / most
    for told, size, colour in parts:
        place = sheet.box(Box(x, y, size * scale, 30), f"{colour}-soft", colour, 2)
        sheet.label(place, str(size), kind=Type(13))
        short = told.split(",")[0]
        sheet.text(place.middle[0], y + 46, SHORT[short], Type(12, "muted", anchor="middle"))
        x = place.right
    sheet.text(x + 10, y + 21, str(total), Type(16, bold=True))


SHORT = {
    "2 gradients": "gradients",
    "moments": "moments, read and stored",
    "master": "master",
    "own parameter": "own",
    "peer's parameter": "peer",
}
