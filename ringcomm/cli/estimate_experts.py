"""``ringcomm estimate --experts``: a layer of experts, by where they are and by wire."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from typing import Any

import torch

from ringcomm.cli.estimate_request import DTYPES, has_model, parse_count
from ringcomm.errors import ArgumentError
from ringcomm.extras.moe.estimate import (
    ExpertLayer,
    ExpertPlacement,
    between_nodes,
    gradients_between_nodes,
    of_experts,
    placements,
    read_from_mates,
    rows_memory,
)
from ringcomm.extras.moe.rows import WIRES
from ringcomm.zero.estimate import BytesPerElement, World

_GB, _MB = 1e9, 1e6
_STAGE = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of a layer of experts."""
    group = parser.add_argument_group("experts", "of one layer, in place of a model")
    add = group.add_argument
    add("--experts", type=int, help="of all ranks: what a layer of them takes and moves")
    add("--top-k", type=int, default=2, help="experts of a token (default: %(default)s)")
    add("--hidden", type=int, help="elements of a token")
    add("--tokens", type=int, help="of a rank, in a forward")
    add(
        "--expert-params",
        type=parse_count,
        metavar="COUNT",
        help="elements of an expert (default: 8 x hidden x hidden)",
    )
    add(
        "--expert-parallel",
        type=int,
        metavar="RANKS",
        help="that share the experts, beside those of a node and all",
    )


def answer(args: argparse.Namespace) -> str:
    """Works out and words what a layer takes.

    Raises:
        ArgumentError: options are missing, or do not go together.
    """
    if has_model(args) or args.bytes is not None or args.plot is not None:
        raise ArgumentError("--experts: expected neither a model nor --bytes nor --plot with it")
    for name in ("wire", "wire_parameters", "error_feedback", "coding_gbps"):
        if getattr(args, name) not in (None, False):
            raise ArgumentError(
                f"--experts: expected no --{name.replace('_', '-')}: the table has every wire of "
                "dispatch, and the other is of gradients and parameters"
            )
    if args.hidden is None or args.tokens is None:
        raise ArgumentError("--experts: expected --hidden and --tokens with it")
    mates = (args.gpus_per_node or 8) if args.nodes else args.world
    if mates is None:
        raise ArgumentError("--experts: expected --world, or --nodes and --gpus-per-node, with it")
    world = World(mates * (args.nodes or 1), mates)
    dtype = DTYPES[args.dtype or "bf16"]
    layer = ExpertLayer(
        args.experts,
        args.top_k,
        args.hidden,
        args.tokens,
        args.expert_params or 8 * args.hidden**2,
        dtype.itemsize,
    )
    each = BytesPerElement.of(dtype, torch.float32, "fp32" if dtype.itemsize == 2 else "none")
    stage = _STAGE if args.stage is None else args.stage
    places = list(placements(world))
    if args.expert_parallel is not None:
        chosen = ExpertPlacement(args.expert_parallel, world)
        places = [(f"over {chosen.group}", chosen), *places]
    rows = [_figures(layer, place, stage, each) for _, place in places]
    for (name, _), row in zip(places, rows, strict=True):
        row["placement"] = name
    if args.json:
        told = {"stage": stage, "layer": asdict(layer), "placements": rows}
        return json.dumps({"experts": told}, indent=1)
    return _as_text(layer, world, stage, rows)


def _figures(
    layer: ExpertLayer, place: ExpertPlacement, stage: int, each: BytesPerElement
) -> dict[str, Any]:
    """The figures of a placement, in bytes."""
    wires = {wire or "none": replace(layer, wire=wire) for wire in (None, *WIRES)}
    return {
        "group": place.group,
        "nodes_of_a_group": place.nodes,
        "experts_of_a_rank": layer.experts // place.group,
        "state_bytes": of_experts(layer, place, stage, each).total,
        "rows_bytes": rows_memory(layer),
        "read_from_mates_bytes": {name: read_from_mates(one, place) for name, one in wires.items()},
        "between_nodes_bytes": {
            name: {**asdict(between_nodes(one, place)), "total": between_nodes(one, place).total}
            for name, one in wires.items()
        },
        "gradients_between_nodes_bytes": gradients_between_nodes(layer, place, each),
    }


def _as_text(layer: ExpertLayer, world: World, stage: int, rows: list[dict[str, Any]]) -> str:
    table = [["experts", "a rank's", "state GB", "rows GB", "wire", "dispatch", "combine"]]
    table[0] += ["backward", "gradients", "mates"]
    for row in rows:
        for wire, moved in row["between_nodes_bytes"].items():
            back = moved["combine_backward"] + moved["dispatch_backward"]
            sent = (moved["dispatch"], moved["combine"], back, row["gradients_between_nodes_bytes"])
            table.append(
                [
                    row["placement"],
                    str(row["experts_of_a_rank"]),
                    *(f"{row[name] / _GB:.3g}" for name in ("state_bytes", "rows_bytes")),
                    wire,
                    *(f"{each / _MB:.4g}" for each in (*sent, row["read_from_mates_bytes"][wire])),
                ]
            )
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    aligned = (
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in table
    )
    return "\n".join(
        [
            f"a layer of {layer.experts} experts of {layer.params / 1e6:.4g} M parameters, top "
            f"{layer.top_k}; {layer.tokens} tokens x {layer.hidden} a rank; {world.nodes} nodes of "
            f"{world.mates} ranks",
            f"state: of a rank's experts at stage {stage}; rows: and two outboxes; GB = 1e9",
            "dispatch to gradients: MB that a rank sends to other nodes in a step",
            "mates: MB that it reads of its node's memory",
            *aligned,
        ]
    )
