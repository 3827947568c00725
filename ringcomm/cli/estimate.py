# SPDX-License-Identifier: Apache-2.0
"""``ringcomm estimate``: memory, traffic and time of a step; docs/estimate.md has the formulas."""

from __future__ import annotations

import argparse
import json
import math
import operator
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from decimal import Decimal, InvalidOperation
from importlib import import_module
from typing import Any

import torch
from torch import nn

from ringcomm.cli import table_lines
from ringcomm.comm.host.options import COMPRESSIONS
from ringcomm.errors import ArgumentError, UnsupportedError
from ringcomm.extras import estimate as forms
from ringcomm.memory import Disk
from ringcomm.optim import AdamWOptions
from ringcomm.optim.options import PARAMETER_COMPRESSIONS
from ringcomm.zero import Compression, Precision, ZeroOptions

GB, MIB = 10**9, 1 << 20
SUFFIXES = {"K": 3, "M": 6, "B": 9, "T": 12}
PRESETS = ("fp32", "bf16-mixed", "bf16-remainder", "bf16-pure-sr", "fp16-scaled")
SIZES = ("layers", "width", "heads", "context", "vocab")
Row = dict[str, Any]


def parse_count(text: str) -> int:
    """Reads "7.5B", "125M", "1.3e9" or "124439808" exactly; raises ArgumentTypeError."""
    exponent = SUFFIXES.get(text[-1:].upper(), 0)
    try:
        count = Decimal(text[:-1] if exponent else text).scaleb(exponent)
        whole = count == count.to_integral_value() and 0 < count < 10**18
    except InvalidOperation:
        whole = False
    if not whole:
        raise argparse.ArgumentTypeError(
            f"expected a positive whole number such as 7.5B, 125M or 1.3e9, got {text!r}"
        )
    return int(count)


def parse_ranks(text: str) -> int:
    """Reads a positive whole number; raises ArgumentTypeError."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a positive whole number, got {text!r}")
    return int(text)


def parse_positive(text: str) -> float:
    """Reads a finite number above 0; raises ArgumentTypeError."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return number


# Options by name: reader or choices (None for a flag), default (``...``: required), help.
Options = dict[str, tuple[Any, Any, str]]
MODEL: Options = {
    "params": (parse_count, None, "trained parameters, such as 7.5B, 125M or 1.3e9"),
    "module": (str, None, "PACKAGE.MODULE:CALLABLE that returns the model, built without memory"),
    "layers": (parse_count, None, "decoder layers of a GPT-2"),
    "width": (parse_count, None, "channels of a token"),
    "heads": (parse_count, None, "attention heads"),
    "context": (parse_count, None, "tokens per sequence"),
    "vocab": (parse_count, None, "entries of the vocabulary"),
    "untied": (None, False, "the output layer of the GPT-2 has a matrix of its own"),
    "world": (parse_ranks, None, "ranks on all nodes; required"),
    "nodes": (parse_ranks, 1, "nodes, with equally many ranks each"),
    "stage": (forms.STAGES, None, "ZeRO stage; default: all stages"),
    "preset": (PRESETS, "bf16-mixed", "dtypes, as in zero.Precision.preset()"),
    "reduce": (("fp32", "param"), None, "dtype of reduced gradients; default: the preset's"),
    "optimizer": (
        ("adamw", "amsgrad", "adamw8bit"),
        "adamw",
        "optimizer whose state the ranks keep",
    ),
    "accumulate": (("fp32", "param"), "param", "dtype of accumulated gradients"),
    "clip": (None, False, "steps are clipped or scaled, so they take two passes"),
    "update": (("in_step", "in_backward"), "in_step", "as in AdamWOptions(update=)"),
    "bucket-elems": (parse_count, ZeroOptions().bucket_elems, "elements of a gradient bucket"),
    "shard-params": (("node", "world"), "node", "over nodes, as in ZeroOptions(params=)"),
    "shard-state": (("node", "world"), "world", "over nodes, as in ZeroOptions(state=)"),
    "compression": (
        COMPRESSIONS,
        "none",
        "gradients between nodes, as in zero.Compression(gradients=)",
    ),
    "compression-parameters": (
        PARAMETER_COMPRESSIONS,
        "param",
        "parameters between nodes, as in zero.Compression(parameters=)",
    ),
    "error-feedback": (
        None,
        False,
        "keep the quantization errors of gradients, as in zero.Compression",
    ),
    "offload-state": (("memory", "cpu", "disk"), "memory", "as in AdamWOptions(offload_state=)"),
    "offload-params": (("memory", "disk"), "memory", "ZeroOptions(offload_params=), stage 3 only"),
    "buffer-mib": (parse_positive, 64, "buffers of each disk, in 2^20 bytes"),
    "resident-gb": (parse_positive, 0, "state of each disk that stays in memory, in 1e9 bytes"),
    "json": (None, False, "print bytes and seconds as JSON"),
}
MEMORY: Options = {
    "micro-batch": (parse_count, 1, "sequences per forward"),
    "checkpointing": (forms.CHECKPOINTING, "none", "activations to recompute in backward"),
    "checkpoint-every": (parse_count, 1, "layers between two full checkpoints"),
    "activations-on": (("memory", "disk"), "memory", "as in zero.activations_on()"),
    "budget-gb": (parse_positive, None, "memory of a rank, in 1e9 bytes"),
}
STEP: Options = {
    "tokens": (parse_count, None, "tokens per rank and step; needed for times"),
    "peak-tflops": (parse_positive, None, "1e12 operations/s of a rank; needed for times"),
    "bandwidth": (parse_positive, None, "GB/s of a rank within its node; needed for times"),
    "network": (parse_positive, None, "GB/s of a rank to other nodes; needed for times"),
    "recompute": (None, False, "full checkpointing runs the forward twice"),
    "disk-read": (parse_positive, None, "GB/s of a node's disk; needed for its times"),
    "disk-write": (parse_positive, None, "GB/s of a node's disk; needed for its times"),
}
EXPERTS: Options = {
    "experts": (parse_count, ..., "experts on all ranks"),
    "top-k": (parse_count, 2, "experts per token"),
    "hidden": (parse_count, ..., "elements of a token"),
    "tokens": (parse_count, ..., "tokens per rank and forward"),
    "expert-params": (parse_count, None, "elements per expert; default: 8 x hidden x hidden"),
    "group": (parse_count, None, "ranks that share the experts; default: a node's, and all"),
    "world": (parse_ranks, ..., "ranks on all nodes"),
    **{name: MODEL[name] for name in ("nodes", "stage", "preset", "json")},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the subjects of the estimate and their options."""
    parser.description = "Closed-form estimates, listed in docs/estimate.md; GB means 1e9 bytes."
    subjects = parser.add_subparsers(dest="subject", required=True, metavar="SUBJECT")
    for name, told, options in (
        ("memory", "memory of a rank, by stage", MODEL | MEMORY),
        ("step", "traffic and time of a step, by stage", MODEL | STEP),
        ("experts", "memory and traffic of a layer of experts", EXPERTS),
    ):
        subject = subjects.add_parser(name, help=told, description=told)
        for option, (kind, default, meaning) in options.items():
            how: dict[str, Any] = {"action": "store_true"}
            if kind is not None:
                how = {"choices": kind} if isinstance(kind, tuple) else {"type": kind}
                how |= {"required": True} if default is ... else {"default": default}
                meaning += "" if default in (None, ...) else " (default: %(default)s)"
            if option == "stage":
                how["type"] = int
            subject.add_argument(f"--{option}", help=meaning, **how)


def run(args: argparse.Namespace) -> int:
    """Prints the estimate.

    Raises:
        ArgumentError: an option is missing, or options exclude each other.
    """
    try:
        tables = {"memory": _memory, "step": _step, "experts": _experts}[args.subject](args)
    except UnsupportedError as error:  # options that exclude each other
        raise ArgumentError(str(error)) from error
    shown = {title: rows for title, rows in tables.items() if rows}
    if args.json:
        print(json.dumps(shown, indent=1))
    else:
        print("\n\n".join(_table(title, rows) for title, rows in shown.items()))
    return 0


def _table(title: str, rows: list[Row]) -> str:
    """Returns a title and rows, aligned in columns."""
    names = [name.replace("_bytes", "").replace("_", " ") for name in rows[0]]
    cells = [names, *([_cell(*each) for each in row.items()] for row in rows)]
    has_bytes = any(name.endswith("_bytes") for name in rows[0])
    lines = [title + (", GB = 1e9 bytes" if has_bytes else "")]
    lines += table_lines(cells, right=True)
    if any("?" in line for line in cells):
        lines.append("?: unknown without the model's sizes (--layers ...), not included in totals")
    return "\n".join(lines)


def _cell(name: str, value: Any) -> str:
    """Formats a value: three significant digits, or all digits before the decimal point."""
    if value is None or isinstance(value, bool):
        return {None: "?", True: "yes", False: "no"}[value]
    if name.endswith("_bytes"):
        value /= GB
    if isinstance(value, float):
        return f"{value:.0f}" if value >= 99.95 else f"{value:.3g}"
    return str(value)


def _bytes(sizes: Mapping[str, float | None]) -> Row:
    return {f"{name}_bytes": size for name, size in sizes.items()}


def _disk(args: argparse.Namespace) -> Disk:
    return Disk("disk", round(args.buffer_mib * MIB), round(args.resident_gb * GB))


def _check_required(args: argparse.Namespace) -> None:
    """Raises ArgumentError that names all missing options together."""
    absent = _absent_sizes(args)
    missing = []
    if args.params is args.module is None and len(absent) == len(SIZES) and not args.untied:
        missing.append(f"--params, --module, or all of {', '.join(absent)}")
    elif 0 < len(absent) < len(SIZES) or args.untied:
        missing += absent
    if args.world is None:
        missing.append("--world")
    if missing:
        example = "ringcomm estimate memory --params 7B --world 8"
        raise ArgumentError(f"expected {'; and '.join(missing)}, as in: {example}")


def _absent_sizes(args: argparse.Namespace) -> list[str]:
    return [f"--{name}" for name in SIZES if getattr(args, name) is None]


def _training(args: argparse.Namespace) -> forms.Training:
    _check_required(args)
    precision = Precision.preset(args.preset)
    if args.reduce is not None:
        precision = replace(precision, reduce=precision.param if args.reduce == "param" else None)
    compression = Compression(args.compression, args.compression_parameters, args.error_feedback)
    options = ZeroOptions(
        precision,
        args.bucket_elems,
        params=args.shard_params,
        state=args.shard_state,
        compression=compression,
        offload_params=_disk(args) if args.offload_params == "disk" else None,
    )
    optimizer = AdamWOptions(
        **precision.optimizer_defaults,
        accumulate_dtype=torch.float32 if args.accumulate == "fp32" else None,
        state=args.shard_state,
        compression=compression,
        offload_state={"memory": None, "cpu": "cpu", "disk": _disk(args)}[args.offload_state],
        update=args.update,
    )
    return forms.Training(
        _model(args),
        args.world,
        args.nodes,
        options,
        optimizer,
        amsgrad=args.optimizer == "amsgrad",
        quantized_state=args.optimizer == "adamw8bit",
        two_passes=args.clip or precision.scaled,
    )


def _shape(args: argparse.Namespace) -> forms.Transformer | None:
    if _absent_sizes(args):  # all sizes: see _check_required()
        return None
    return forms.Transformer(**{name: getattr(args, name) for name in SIZES}, tied=not args.untied)


def _model(args: argparse.Namespace) -> forms.ModelElems:
    shape = _shape(args)
    if args.module is not None and args.params is None:
        return forms.ModelElems.of_module(build_on_meta(args.module))
    if args.module is not None:
        raise ArgumentError("expected --params or --module, got both")
    if shape is None:
        return forms.ModelElems(args.params)
    return replace(shape.model, trainable=args.params or shape.model.trainable)


def build_on_meta(named: str) -> nn.Module:
    """Calls ``package.module:callable`` on the meta device; searches the current folder first."""
    module, _, name = named.partition(":")
    if not (module and name):
        raise ArgumentError(f"--module: expected PACKAGE.MODULE:CALLABLE, got {named!r}")
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        with torch.device("meta"):
            built = operator.attrgetter(name)(import_module(module))()
    except Exception as error:  # the user's callable can raise anything
        first_line = str(error).strip().partition("\n")[0]
        raise ArgumentError(f"--module {named}: {type(error).__name__}: {first_line}") from error
    finally:
        sys.path.remove(folder)
    if not isinstance(built, nn.Module):
        found = type(built).__name__
        raise ArgumentError(f"--module {named}: expected a torch.nn.Module, got {found}")
    return built


def _activations(args: argparse.Namespace, elem_bytes: int) -> forms.ActivationBytes | None:
    shape = _shape(args)
    if shape is None:
        if args.activations_on == "disk":
            raise ArgumentError("--activations-on disk: expected --layers and the other sizes")
        return None
    how = (args.checkpointing, args.checkpoint_every, elem_bytes)
    held = shape.activations(args.micro_batch, *how)
    if args.activations_on == "memory":
        return held
    return held.kept_on(_disk(args), shape.layer_bytes(args.micro_batch, elem_bytes))


def _memory(args: argparse.Namespace) -> dict[str, list[Row]]:
    training = _training(args)
    held = _activations(args, training.each.param)
    rows: list[Row] = []
    for stage in _stages(args):
        sizes = {**training.state(stage)._asdict(), **training.buffers(stage)._asdict()}
        sizes["activations"] = sum(held[:3]) if held else 0
        unknown = {"units"} if stage == 3 and not training.model.has_units else set()
        unknown |= {"activations"} if held is None else set()
        total = sum(sizes.values())
        row = {"stage": stage, **_bytes(sizes | dict.fromkeys(unknown)), "total_bytes": total}
        if args.budget_gb is not None:
            row["fits"] = False if total > args.budget_gb * GB else None if unknown else True
        rows.append(row)
    moved = held.moved if held else 0
    kept = [_bytes({"written": moved, "read": moved})] if moved else []
    return {
        **_model_row(training),
        "memory of a rank": rows,
        "outside memory": _outside(args, training),
        "activations on disk in a step": kept,
    }


def _model_row(training: forms.Training) -> dict[str, list[Row]]:
    model = {"trained": training.model.trainable, "frozen": training.model.frozen}
    return {"elements, and bytes of one": [{**model, **training.each._asdict()}]}


def _stages(args: argparse.Namespace) -> tuple[int, ...]:
    if args.offload_params == "disk" and args.stage not in (None, 3):
        raise ArgumentError(f"--offload-params disk: expected --stage 3, got {args.stage}")
    return forms.STAGES if args.stage is None else (args.stage,)


def _outside(
    args: argparse.Namespace, training: forms.Training, compute_s: float | None = None
) -> list[Row]:
    """Returns a rank's bytes outside memory, its disk traffic per step, and the traffic's times."""
    rates = (args.disk_read, args.disk_write) if args.subject == "step" else (None, None)
    if None in rates and rates != (None, None):
        raise ArgumentError("--disk-read and --disk-write: expected both or none")
    rows: list[Row] = []
    for stage in _stages(args):
        offloaded = (
            {} if args.offload_state == "memory" else {"state": training.offloaded_state(stage)}
        )
        if args.offload_params == "disk" and stage == 3:
            offloaded["parameters"] = training.offloaded_params()
        for kind, moved in offloaded.items():
            sizes = list(moved._asdict().items())
            shown = sizes[:3] if args.subject == "memory" else sizes[3:]
            rows.append({"stage": stage, "of": kind, **_bytes(dict(shown))})
            if None not in rates:
                time = moved.time(training.ranks_per_node, *rates)
                rows[-1] |= {"read_s": time.read_s, "write_s": time.write_s}
                rows[-1] |= {} if compute_s is None else {"added_s": time.added_s(compute_s)}
    return rows


def _step(args: argparse.Namespace) -> dict[str, list[Row]]:
    training, compute_s = _training(args), None
    given = (args.tokens, args.peak_tflops, args.bandwidth)
    _check_network(args)
    if None not in given:
        compute_s = training.flops(args.tokens, args.recompute) / (args.peak_tflops * 1e12)
    elif given != (None, None, None):
        raise ArgumentError("times need --tokens, --peak-tflops and --bandwidth")
    sent: list[Row] = []
    times: list[Row] = []
    for stage in _stages(args):
        row = {"stage": stage, "a_rank_sends_bytes": training.sent_bytes(stage)}
        sent.append(row | {"leaves_a_node_bytes": training.leaving_node_bytes(stage)})
        if compute_s is not None:
            communication_s = training.communication_s(stage, args.bandwidth, args.network)
            both = {"compute_s": compute_s, "communication_s": communication_s}
            bounds = {"in_turns_s": sum(both.values()), "overlapped_s": max(both.values())}
            times.append({"stage": stage} | both | bounds)
    return {
        **_model_row(training),
        "traffic of a step": sent,
        "time of a step": times,
        "outside memory, in a step": _outside(args, training, compute_s),
    }


def _check_network(args: argparse.Namespace) -> None:
    """Raises ArgumentError if the rate between nodes is missing, or has no effect."""
    if args.network is None:
        if args.nodes > 1 and args.bandwidth is not None:
            raise ArgumentError(
                "--network: expected the rate of the network between nodes, in GB/s, for times "
                f"over {args.nodes} nodes, got none"
            )
    elif args.nodes == 1:
        told = "expected none on one node, whose ranks send nothing to other nodes"
        raise ArgumentError(f"--network: {told}, got {args.network:g}; drop it, or add --nodes")
    elif args.bandwidth is None:
        raise ArgumentError(
            "--network: is for times, which need --tokens, --peak-tflops and --bandwidth"
        )


def _experts(args: argparse.Namespace) -> dict[str, list[Row]]:
    precision, rows = Precision.preset(args.preset), []
    stage = 2 if args.stage is None else args.stage
    params = args.expert_params or 8 * args.hidden**2
    sizes = (args.experts, args.top_k, args.hidden, args.tokens, params)
    groups = [args.group] if args.group else sorted({args.world // args.nodes, args.world})
    elem_bytes = (precision.param or torch.float32).itemsize
    for group in groups:
        for compression in (None, "int8", "fp8"):
            shared = (group, args.world, args.nodes, elem_bytes, compression)
            layer = forms.ExpertLayer(*sizes, *shared)
            training = layer.training(ZeroOptions(precision))
            held = {"state": sum(training.state(stage)), "rows": layer.memory_bytes}
            gradients = {"gradients": training.leaving_node_bytes(stage) / training.ranks_per_node}
            told = {**held, **layer.between_nodes()._asdict(), **gradients}
            rows.append({"group": group, "compression": compression or "none", **_bytes(told)})
    return {"a rank's share of a layer of experts": rows}
