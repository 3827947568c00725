"""``ringcomm estimate``: memory, traffic and time of a step, before there is a machine for it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ringcomm.cli import estimate_disk, estimate_experts, estimate_network
from ringcomm.cli.estimate_figures import (
    Estimate,
    activation_times_s,
    as_json,
    network_step,
    outside_efficiency,
    total_bytes,
    work_out,
)
from ringcomm.cli.estimate_request import (
    DTYPES,
    OPTIMIZERS,
    has_model,
    parse_count,
    parse_positive,
    read_request,
)
from ringcomm.comm.options import WIRES
from ringcomm.errors import ArgumentError
from ringcomm.memory import Disk
from ringcomm.optim.options import PARAMETER_WIRES
from ringcomm.output import new_figure, write_figure
from ringcomm.zero.estimate import MASTERS, STAGES, World
from ringcomm.zero.estimate_activations import CHECKPOINTING
from ringcomm.zero.options import DEFAULT_BUCKET_ELEMS
from ringcomm.zero.precision import PRESETS

# The tables that ``ringcomm estimate`` prints.

GB = 1e9
LONGEST_NAME = 50


def as_text(report: Estimate) -> str:
    """All tables; no line is longer than 100 columns."""
    parts = [_headline(report), _memory_table(report), _traffic_table(report)]
    parts += [
        _disk_table(report),
        _params_table(report),
        _time_table(report),
        _budget_table(report),
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def number(value: float) -> str:
    """Three significant digits, or all digits before the point."""
    if value >= 99.95:
        return f"{value:.0f}"
    if value >= 9.995:
        return f"{value:.1f}"
    if value >= 0.9995:
        return f"{value:.2f}"
    return f"{value:.3g}"


def count(elems: int) -> str:
    """ "7.5 B": four digits, in the largest unit that leaves at least one."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if elems >= size:
            return f"{elems / size:.4g} {unit}"
    return str(elems)


def _gb(size_bytes: int) -> str:
    return number(size_bytes / GB)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]


def _headline(report: Estimate) -> list[str]:
    request, each = report.request, report.request.each
    frozen = f", {count(request.model.frozen)} of them frozen" if request.model.frozen else ""
    name = request.called
    if len(name) > LONGEST_NAME:
        name = f"...{name[3 - LONGEST_NAME :]}"
    return [
        f"{name}: {count(request.model.total)} parameters{frozen}; world {request.world.ranks}",
        *_sharing(request.world),
        request.precision,
        f"bytes per element: parameter {each.param}, gradient {each.grad}, reduced gradient "
        f"{each.reduced}, state {each.state_mean:.4g}",
    ]


def _sharing(world: World) -> list[str]:
    if world.nodes == 1:
        return []
    over = {"node": f"a node's {world.mates} ranks", "world": "all ranks"}
    params, state = over[world.params], over[world.state]
    return [f"{world.nodes} nodes: parameters (stage 3) sharded over {params}, state over {state}"]


def _memory_table(report: Estimate) -> list[str]:
    head = ["stage", "parameters", "gradients", "state", "model state"]
    rows = [[*head, "buckets", "units", "shard", "activations", "total"]]
    shapeless = not report.request.model.has_units
    for row in report.rows:
        state, working = row.state, row.working
        rows.append(
            [
                str(row.stage),
                *map(_gb, (state.params, state.grads, state.state, state.total)),
                _gb(working.buckets),
                "?" if shapeless and row.stage == 3 else _gb(working.units),
                _gb(working.grad_shard),
                "?" if report.activations is None else _gb(row.activation_bytes),
                _gb(row.total_bytes),
            ]
        )
    forward = report.request.forward
    title = "memory of a rank, GB = 1e9 bytes"
    if forward.shape is not None:
        title += f"; activations of {forward.micro_batch} x {forward.shape.context} tokens"
    lines = [title, *_aligned(rows)]
    if any("?" in cells for cells in rows):
        lines.append("?: not known without the model's sizes (see --layers), and not in the total")
    return lines + _activations_lines(report)


def _activations_lines(report: Estimate) -> list[str]:
    held = report.activations
    if report.request.activations_disk is None or held is None:
        return []
    times = activation_times_s(report)
    told = f"activations on a disk: a step writes {_gb(held.moved)} GB of a rank, and reads them"
    if times is not None:
        write_s, read_s = map(number, times)
        told += f"; {write_s} s and {read_s} s for a node's ranks"
    return [told]


def _traffic_table(report: Estimate) -> list[str]:
    world, trainable = report.request.world.ranks, report.request.model.trainable
    several = report.request.world.nodes > 1
    rows = [["stage", "volume", "elements", "sent by a rank", "GB"]]
    rows[0] += ["leaves a node, GB"] if several else []
    for row in report.rows:
        volume = row.moved.volume_elems
        times = f"{volume / trainable:.3g} P" if trainable else "-"
        sent, sent_bytes = row.moved.sent_elems(world), row.moved.sent_bytes(world)
        rows.append([str(row.stage), times, count(volume), count(sent), _gb(sent_bytes)])
        rows[-1] += [_gb(row.leaving_node_bytes)] if several else []
    what = "communication of a step; P: trained parameters; sent: (world - 1) / world of the volume"
    return [what, *_aligned(rows)]


def _disk_table(report: Estimate) -> list[str]:
    disk, mates = report.request.state_disk, report.request.world.mates
    if disk is None:
        return []
    where = "disk" if isinstance(disk.tier, Disk) else "host"
    rows = [["stage", "in memory", f"on {where}", "read and written"]]
    if disk.rates is not None:
        rows[0] += ["read s", "write s", "hidden", "added s", "efficiency", "90% needs"]
    for row in report.rows:
        assert row.disk is not None
        moved, time = row.disk.moved, row.disk.time
        sizes = (moved.buffers + moved.resident, moved.stored, moved.moved)
        rows.append([str(row.stage), *map(_gb, sizes)])
        if time is not None:
            rows[-1] += [
                number(time.read_s),
                number(time.write_s),
                _or_unknown(row.disk.hidden_share, "{:.1%}".format),
                _or_unknown(row.disk.added_s, number),
                _or_unknown(row.disk.efficiency, "{:.1%}".format),
                _or_unknown(row.disk.needed_gbps, number),
            ]
    lines = [f"state on a {where}, bytes of a rank, read and written in a step, GB = 1e9 bytes"]
    lines += _aligned(rows)
    if disk.rates is not None:
        read_gbps, write_gbps = disk.rates.read_gbps, disk.rates.write_gbps
        lines += [
            f"times: {mates} ranks share a disk of {read_gbps:g} GB/s read, {write_gbps:g} GB/s "
            "written, by turns",
            "hidden: behind forward and backward; efficiency: computing and disk in turns; needs: "
            "GB/s",
        ]
    return lines


def _params_table(report: Estimate) -> list[str]:
    disk = report.request.params_disk
    if disk is None:
        return []
    rows = [["stage", "in memory", "on disk", "read", "written"]]
    if disk.rates is not None:
        rows[0] += ["read s", "write s", "hidden", "added s"]
    for row in report.rows:
        if row.params_disk is None:
            continue
        moved, time = row.params_disk.moved, row.params_disk.time
        sizes = (moved.buffers + moved.resident, moved.stored, moved.read, moved.written)
        rows.append([str(row.stage), *map(_gb, sizes)])
        if time is not None:
            rows[-1] += [
                number(time.read_s),
                number(time.write_s),
                _or_unknown(row.params_disk.hidden_share, "{:.1%}".format),
                _or_unknown(row.params_disk.added_s, number),
            ]
    lines = ["parameters on a disk, bytes of a rank, moved in a step, GB = 1e9 bytes"]
    return lines + _aligned(rows)


def _or_unknown(value: float | None, worded: Callable[[float], str]) -> str:
    return "-" if value is None else worded(value)


def _time_table(report: Estimate) -> list[str]:
    request, timing = report.request, report.request.timing
    if timing is None:
        return []
    rows = [["stage", "compute ms", "communication ms", "in turns ms", "efficiency"]]
    rows[0] += ["overlapped ms", "efficiency"]
    for row in report.rows:
        if row.time is not None:
            seconds = (row.time.compute_s, row.time.communication_s, row.time.serial_s)
            cells = [number(1e3 * each) for each in seconds]
            cells += [f"{row.time.serial_efficiency:.1%}", number(1e3 * row.time.overlapped_s)]
            rows.append([str(row.stage), *cells, f"{row.time.overlapped_efficiency:.1%}"])
    kinds = ", ".join(f"{kind} {share:.1%}" for kind, share in outside_efficiency(request).items())
    return [
        f"time of a step of {timing.tokens} tokens per rank: 2 x "
        f"{4 if request.forward.recomputes else 3} x tokens x parameters at "
        f"{timing.peak_tflops:g} TFLOPS; {timing.gbps:g} GB/s",
        *_aligned(rows),
        f"efficiency with data kept outside the device: {kinds}",
    ]


def _budget_table(report: Estimate) -> list[str]:
    budget = report.request.budget_bytes
    if budget is None:
        return []
    rows = [["stage", "fits", "largest model"]]
    for row in report.rows:
        largest = "-" if row.largest_elems is None else count(row.largest_elems)
        rows.append([str(row.stage), "yes" if row.total_bytes <= budget else "no", largest])
    what = f"in {_gb(budget)} GB; the largest model: with the same buffers and activations"
    return [what, *_aligned(rows)]


# The picture of ``ringcomm estimate``: memory by stage, and over the world.

# Colours of the Okabe-Ito palette, told apart by all readers.
_PARTS = {
    "parameters": "#0072B2",
    "gradients": "#D55E00",
    "optimizer state": "#009E73",
    "working buffers": "#E69F00",
    "activations": "#CC79A7",
}
_STAGES = (("#000000", "o"), ("#0072B2", "s"), ("#D55E00", "^"), ("#009E73", "D"))
_SIZE_INCHES = (10.0, 4.2)
_LEAST_SHOWN_WORLD = 1024
# Sizes closer than this leave a logarithmic axis without two labels to read.
_LOG_FROM_RATIO = 20


def draw(report: Estimate, path: str) -> None:
    """Writes the picture; its format is the ending of ``path`` (png, svg, pdf).

    Raises:
        UnsupportedError: matplotlib is not installed.
        ArgumentError: the file cannot be written, or its ending names no format.
    """
    figure = new_figure(_SIZE_INCHES, path)
    by_stage, over_world = figure.subplots(1, 2)
    _draw_bars(by_stage, report)
    _draw_lines(over_world, report)
    request = report.request
    title = f"{count(request.model.total)} parameters, {request.precision}"
    write_figure(figure, (by_stage, over_world), title, path)


def _draw_bars(panel: Any, report: Estimate) -> None:
    labels = [f"stage {row.stage}" for row in report.rows]
    below = [0.0] * len(labels)
    for part, colour in _PARTS.items():
        heights = [
            {
                "parameters": row.state.params,
                "gradients": row.state.grads,
                "optimizer state": row.state.state,
                "working buffers": row.working.total,
                "activations": row.activation_bytes,
            }[part]
            / GB
            for row in report.rows
        ]
        if any(heights):
            panel.bar(labels, heights, bottom=below, color=colour, label=part, width=0.6)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    _draw_budget(panel, report)
    panel.use_sticky_edges = False
    panel.set_ylim(bottom=0.0)
    panel.set_ylabel("memory of a rank (GB = 1e9 bytes)")
    panel.set_title(f"world {report.request.world.ranks}", fontsize=10)


def _draw_lines(panel: Any, report: Estimate) -> None:
    last = max(_LEAST_SHOWN_WORLD, report.request.world.ranks)
    worlds = [1 << power for power in range(last.bit_length()) if 1 << power <= last]
    shown: list[float] = []
    for stage in report.request.stages:
        colour, marker = _STAGES[stage]
        sizes = [total_bytes(report, stage, world) / GB for world in worlds]
        panel.plot(worlds, sizes, color=colour, marker=marker, markersize=4, label=f"stage {stage}")
        shown += sizes
    _draw_budget(panel, report)
    panel.set_xscale("log", base=2)
    if max(shown) > _LOG_FROM_RATIO * min(shown):
        panel.set_yscale("log")
    else:
        panel.set_ylim(bottom=0.0)
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panel.set_xlabel("world (ranks)")
    panel.set_title("all of it, over the world", fontsize=10)


def _draw_budget(panel: Any, report: Estimate) -> None:
    budget = report.request.budget_bytes
    if budget is not None:
        label = f"budget {budget / GB:g} GB"
        panel.axhline(budget / GB, color="#777777", linestyle="--", linewidth=1.2, label=label)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``ringcomm estimate``."""
    parser.description = (
        "Memory of a rank, bytes that it sends in a step, and time of the step, by ZeRO stage; "
        "with --nodes, of collectives over a network. docs/estimate.md and docs/scaling.md have "
        "the formulas and where they come from."
    )
    _add_model(parser)
    _add_training(parser)
    estimate_disk.add_arguments(parser)
    estimate_experts.add_arguments(parser)
    estimate_network.add_arguments(parser)
    add = parser.add_argument
    add(
        "--bandwidth-gbps",
        type=parse_positive,
        metavar="GB/s",
        help="of a rank, each direction; with --peak-tflops, times are estimated, too",
    )
    add("--peak-tflops", type=parse_positive, help="1e12 operations/s that a rank reaches")
    add("--budget-gb", type=parse_positive, help="memory of a rank in 1e9 bytes: what fits into it")
    add("--json", action="store_true", help="print the estimate as JSON, in bytes and seconds")
    add("--plot", metavar="FILE", help="draw it, too: png, svg or pdf (needs matplotlib)")


def _add_model(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--params", type=parse_count, metavar="COUNT", help="trained parameters: 7.5B, 125M, 1.3e9"
    )
    which.add_argument(
        "--module", metavar="PACKAGE.MODULE:CALLABLE", help="gives the model; built with no memory"
    )
    add = parser.add_argument
    add("--world", type=int, help="ranks that share the state; with --nodes: all GPUs")
    for what, default in (("params", "node"), ("state", "world")):
        meaning = f"ranks that share them, with --nodes: ZeroOptions.{what} (default: {default})"
        add(f"--shard-{what}", choices=("node", "world"), help=meaning)
    add("--wire", choices=WIRES, help="of gradients between nodes, as zero.Wire (default: fp32)")
    add(
        "--error-feedback",
        action="store_true",
        help="what the codes of --wire lose is kept, as with zero.Wire(error_feedback=True)",
    )
    meaning = "of updated parameters, as zero.Wire (default: param, their dtype)"
    add("--wire-parameters", choices=PARAMETER_WIRES, help=meaning)
    add("--stage", type=int, choices=STAGES, help="default: all")
    add("--preset", choices=PRESETS, help="a preset of zero.Precision; docs/precision.md")
    add("--dtype", choices=DTYPES, help="of the parameters (default: bf16)")
    add("--reduce", choices=("fp32", "param"), help="of the reduced gradient (default: fp32)")
    add(
        "--master",
        choices=MASTERS,
        help="what is kept of 16-bit parameters in full precision (default: fp32)",
    )
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help="default: %(default)s")
    add("--amsgrad", action="store_true", help="keep the maximum of the second moment")
    add(
        "--accumulate",
        choices=("fp32", "param"),
        default="param",
        help="dtype in which gradients of several backwards add up (default: %(default)s)",
    )
    add("--clip", action="store_true", help="steps are clipped or scaled: they take two passes")
    add(
        "--update",
        choices=("in_step", "in_backward"),
        default="in_step",
        help="when buckets are updated at stages 2 and 3, as with AdamWOptions(update=)",
    )
    add(
        "--bucket-elems",
        type=parse_count,
        default=DEFAULT_BUCKET_ELEMS,
        metavar="COUNT",
        help="elements of a gradient bucket (default: %(default)s)",
    )


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("transformer", "sizes of a GPT, for its activations")
    add = group.add_argument
    for name, meaning in (
        ("layers", "decoder layers"),
        ("width", "channels of a token"),
        ("heads", "attention heads"),
        ("context", "tokens of a sequence; alone, for times"),
        ("vocab", "entries of the vocabulary"),
    ):
        add(f"--{name}", type=int, help=meaning)
    add("--untied", action="store_true", help="the output layer has weights of its own")
    add("--micro-batch", type=int, default=1, help="sequences of a forward (default: %(default)s)")
    add("--checkpointing", choices=CHECKPOINTING, default="none", help="default: %(default)s")
    add(
        "--checkpoint-every",
        type=int,
        default=1,
        metavar="LAYERS",
        help="of full checkpointing (default: %(default)s)",
    )
    group = parser.add_argument_group("model parallelism", "of a transformer; --world is then dp")
    add = group.add_argument
    add("--tp", type=int, default=1, help="ranks that share a matrix product (default: 1)")
    add("--pp", type=int, default=1, help="pipeline stages, as 1F1B runs them (default: 1)")
    add("--micro-batches", type=int, default=1, help="of a step, in a pipeline (default: 1)")
    add("--sequence-parallel", action="store_true", help="tp ranks share the tokens in between")
    add(
        "--partition-checkpoints",
        action="store_true",
        help="tp ranks divide the inputs of checkpointed layers (P_a)",
    )


def run(args: argparse.Namespace) -> int:
    """Prints the estimate; returns 2 for options that make no sense."""
    try:
        told = _answer(args)
    except ArgumentError as error:
        print(f"ringcomm estimate: {error}", file=sys.stderr)
        return 2
    print(told)
    return 0


def _answer(args: argparse.Namespace) -> str:
    """Works out what was asked, draws it if that was asked too, and words it."""
    if args.experts is not None:
        return estimate_experts.answer(args)
    question = estimate_network.read_question(args)
    if question is not None and question.num_bytes is not None and not has_model(args):
        prediction = estimate_network.predict(question, None)
        if args.plot is not None:
            estimate_network.draw(prediction, args.plot)
        told = {"network": estimate_network.as_json(prediction)}
        return json.dumps(told, indent=1) if args.json else estimate_network.as_text(prediction)
    report = work_out(read_request(args, None if question is None else question.cluster))
    if args.plot is not None:
        draw(report, args.plot)
    text, plain = as_text(report), as_json(report)
    if question is not None:
        prediction = estimate_network.predict(question, network_step(report))
        text += "\n\n" + estimate_network.as_text(prediction)
        plain["network"] = estimate_network.as_json(prediction)
    return json.dumps(plain, indent=1) if args.json else text
