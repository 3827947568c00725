"""Curves and bars of what was measured: each picture has the rows of one run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ringcomm.bench.report import Report, Row, read
from ringcomm.bench.training_deepspeed import STAGES as DEEPSPEED
from tools.pictures.charts import Axis, Panel, legend
from tools.pictures.svg import Box, Sheet, Type

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
HOST = RESULTS / "2ranks-float-plain.csv"
GPU = RESULTS / "gpu-nvidia-h100-80gb-hbm3-2026-11-26.csv"
TRAINING = RESULTS / "training" / "2ranks-deepspeed.csv"
SMALL = Type(13, "muted")
KIB, MIB = 1 << 10, 1 << 20
# torch.distributed has all_reduce in place only.
CASES = (("reduce_scatter", "out"), ("all_gather", "out"), ("all_reduce", "in"))
Curve = tuple[str, str, bool]
HOST_CURVES: dict[str, Curve] = {
    "ringcomm": ("ringcomm", "blue", False),
    "gloo": ("Gloo", "orange", False),
    "mpi": ("MPICH", "green", False),
    "bare": ("bare loop", "muted", True),
}
GPU_CURVES: dict[str, Curve] = {
    "ringcomm": ("ringcomm", "blue", False),
    "ringcomm:ring": ("its ring", "violet", False),
    "triton:direct": ("its Triton kernels", "orange", False),
    "torch": ("torch's operations", "green", False),
    "copy": ("plain copy", "muted", True),
}


def _size(size_bytes: int) -> str:
    return f"{size_bytes // MIB}M" if size_bytes >= MIB else f"{size_bytes // KIB}K"


def _panels(
    sheet: Sheet, rows: Sequence[Row], curves: dict[str, Curve], y: Axis, every: int
) -> None:
    sizes = sorted({row.size_bytes for row in rows})
    ticks = [(float(size), _size(size)) for size in sizes[::every]]
    x = Axis(sizes[0] / 1.3, sizes[-1] * 1.3, ticks)
    for index, (collective, placement) in enumerate(CASES):
        panel = Panel(Box(70 + index * 240, 84, 220, 232), x, y)
        panel.draw(sheet, collective, has_numbers=index == 0)
        for system, (_, colour, dashed) in reversed(curves.items()):
            points = [
                (float(row.size_bytes), row.busbw_gbps)
                for row in rows
                if (row.collective, row.placement) == (collective, placement)
                and row.system == system
                and row.busbw_gbps
            ]
            panel.curve(sheet, sorted(points), colour, dashed)


def _machine(report: Report) -> str:
    facts = report.provenance
    return f"{facts.get('gpu', facts['cpu'])}, {facts['date']}"


def bandwidth() -> Sheet:
    """Bandwidth over size on the host, of all systems of one run."""
    report = read(HOST)
    rows = [row for row in report.rows if row.busbw_gbps]
    sheet = Sheet(
        800,
        404,
        "Bandwidth over size: 2 ranks on CPUs",
        "Bus bandwidth of reduce-scatter, all-gather and all-reduce from 4 KiB to 64 MiB, two "
        "ranks, FP32, plain tensors: ringcomm lies above Gloo and MPICH at every size, and from 1 "
        "MiB on at 0.6 to 1.2 times the bandwidth of a bare loop. "
        f"Measured on {_machine(report)}, all systems in one run.",
    )
    sheet.text(27, 34, "2 ranks, FP32, plain tensors: bus bandwidth, GB/s", Type(15, bold=True))
    ticks = [(0.001, "0.001"), (0.01, "0.01"), (0.1, "0.1"), (1.0, "1"), (10.0, "10")]
    _panels(sheet, rows, HOST_CURVES, Axis(0.0005, 30, ticks), 3)
    legend(sheet, 70, 364, list(HOST_CURVES.values()))
    sheet.text(70, 390, f"{_machine(report)}; one run, medians of rounds by turns", SMALL)
    return sheet


def bandwidth_gpu() -> Sheet:
    """The same of two ranks that share a GPU."""
    report = read(GPU)
    rows = [
        row
        for row in report.rows
        if row.busbw_gbps and row.ranks == 2 and not row.graph_calls and row.size_bytes >= MIB
    ]
    sheet = Sheet(
        800,
        404,
        "Bandwidth over size: 2 ranks that share an H100",
        "Bus bandwidth of reduce-scatter, all-gather and all-reduce from 1 to 256 MiB, two ranks "
        "that share one GPU. torch's sums and copies, and a plain copy, have 4 "
        "to 10 times the bandwidth of ringcomm at 1 MiB, and 1.1 to 1.5 times at 256 MiB. "
        f"Measured on {_machine(report)}.",
    )
    sheet.text(27, 34, "2 ranks on one GPU, FP32: bus bandwidth, GB/s", Type(15, bold=True))
    ticks = [(1.0, "1"), (10.0, "10"), (100.0, "100"), (1000.0, "1000")]
    _panels(sheet, rows, GPU_CURVES, Axis(1, 3000, ticks), 1)
    legend(sheet, 27, 364, list(GPU_CURVES.values()))
    sheet.text(27, 390, f"{_machine(report)}; one launch a call, heap tensors", SMALL)
    return sheet


BARS = (
    *((f"stage {stage}", f"ringcomm, stage {stage}", "blue") for stage in range(4)),
    ("ddp on ringcomm", "DDP on ringcomm", "violet"),
    ("ddp on gloo", "DDP on Gloo", "orange"),
    ("fsdp2 on ringcomm", "FSDP2 on ringcomm", "violet"),
    ("fsdp2 on gloo", "FSDP2 on Gloo", "orange"),
    *((name, f"DeepSpeed, ZeRO-{stage}", "green") for name, stage in DEEPSPEED.items()),
)


def _time_and_memory(row: Row) -> tuple[float, float]:
    """Milliseconds of a step, and megabytes that training adds to a rank."""
    if row.time_us is None or row.held_bytes is None:
        raise ValueError(f"{row.system}: not measured: {row.note}")
    return row.time_us / 1e3, row.held_bytes / 1e6


def training() -> Sheet:
    """Time and memory of a training step, side by side, of one run."""
    report = read(TRAINING)
    rows = {row.system: row for row in report.rows}
    pairs = {name: _time_and_memory(rows[name]) for name, _, _ in BARS}
    told = "; ".join(
        f"{name} {pairs[system][0]:.0f} ms and {pairs[system][1]:.0f} MB"
        for system, name, _ in BARS
    )
    first = next(iter(rows.values()))
    shape = first.placement.partition(",")[0]
    sheet = Sheet(
        800,
        560,
        "A training step: time and memory",
        f"One GPT of {first.count / 1e6:.0f} million FP32 parameters on {first.ranks} ranks, "
        f"AdamW, all systems in one run on {_machine(report)}. Time of a step and memory that "
        f"training adds to a rank: {told}.",
    )
    heading = f"GPT {shape}, {first.count / 1e6:.0f} M FP32 parameters, {first.ranks} ranks, AdamW"
    sheet.text(27, 34, heading, Type(15, bold=True))
    sheet.text(190, 66, "time of a step, ms", SMALL)
    sheet.text(500, 66, "memory of a rank, MB", SMALL)
    scales = [230 / max(pair[column] for pair in pairs.values()) for column in (0, 1)]
    for index, (system, name, colour) in enumerate(BARS):
        y = 80 + index * 35 + 8 * (index >= 4)
        sheet.text(178, y + 17, name, Type(13, anchor="end"))
        for x, value, scale in zip((190, 500), pairs[system], scales, strict=True):
            place = sheet.box(Box(x, y, value * scale, 24), f"{colour}-soft", colour, 2)
            sheet.text(place.right + 7, y + 17, f"{value:.0f}", Type(13, bold=True))
    load = report.provenance["load"].partition(" ")[0]
    told = f"One run, medians; load average {load}, of which 2 are the ranks"
    sheet.text(27, 526, f"{_machine(report)}; memory: what training adds.", SMALL)
    sheet.text(27, 546, f"{told}; DeepSpeed on Gloo.", SMALL)
    return sheet
