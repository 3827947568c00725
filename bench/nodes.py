"""Collectives over nodes against Gloo's, and bare exchanges.

ringcomm's collectives, in the heap, beside Gloo's own over all ranks, whose reduce-scatter is an
all-reduce; and "exchange", a bare all-to-all by isend and irecv of the ranks of equal place in
their nodes. Ratios are over ringcomm. With ``--wires`` its coded sums are beside its FP32 ones.

Alone it starts ranks of this machine that stand for ``--nodes``; torchrun starts ranks on nodes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist

import ringcomm

from .options import option, parse_size, positive
from .peers.torch_groups import bind_group
from .report import row_of
from .run import Bench, Run
from .timing import Call

OURS, GLOO, EXCHANGE = "ringcomm", "gloo", "isend and irecv"
DEFAULT_BYTES = (1 << 10, 4 << 20, 16 << 20)


def rail_of(comm: ringcomm.Communicator) -> list[int]:
    """The ranks of this rank's place in their nodes, by node."""
    nodes: list[list[int]] = [[] for _ in range(comm.num_nodes)]
    for rank in range(comm.world_size):
        nodes[comm.node_of(rank)].append(rank)
    rails = [list(ranks) for ranks in zip(*nodes, strict=True)]
    return next(ranks for ranks in rails if comm.rank in ranks)


def cases(
    num_bytes: int, comm: ringcomm.Communicator, wires: Sequence[str]
) -> Mapping[str, dict[str, Call]]:
    """The calls on a buffer of ``num_bytes``, by collective and system."""
    world = comm.world_size
    whole = torch.zeros(num_bytes, dtype=torch.uint8)
    chunk = torch.zeros(num_bytes // world, dtype=torch.uint8)
    floats = torch.zeros(num_bytes // 4 // world * world)
    part_of_floats = torch.zeros(floats.numel() // world)
    in_heap = ringcomm.zeros(floats.numel())
    part_in_heap = ringcomm.zeros(part_of_floats.numel())
    gloo = bind_group(None)
    peers = [rank for rank in rail_of(comm) if rank != comm.rank]
    sent = [torch.zeros_like(chunk) for _ in peers]
    received = [torch.zeros_like(chunk) for _ in peers]

    def exchange() -> None:
        calls = [dist.irecv(to, peer) for to, peer in zip(received, peers, strict=True)]
        calls += [dist.isend(part, peer) for part, peer in zip(sent, peers, strict=True)]
        for call in calls:
            if call is not None:
                call.wait()

    def coded(call: Callable[..., object]) -> dict[str, Call]:
        return {f"{OURS}, wire {wire}": partial(call, wire=wire) for wire in wires}

    all_reduce = partial(comm.all_reduce, in_heap)
    reduce_scatter = partial(comm.reduce_scatter_tensor, part_in_heap, in_heap)
    return {
        "exchange": {EXCHANGE: exchange},
        "all_gather": {
            OURS: lambda: comm.all_gather_into_tensor(in_heap, part_in_heap),
            GLOO: lambda: gloo.all_gather_into_tensor(whole[: chunk.numel() * world], chunk),
        },
        "all_reduce": {
            OURS: all_reduce,
            GLOO: lambda: gloo.all_reduce(floats),
            **coded(all_reduce),
        },
        "reduce_scatter": {
            OURS: reduce_scatter,
            GLOO: lambda: gloo.reduce_scatter_tensor(part_of_floats, floats),
            **coded(reduce_scatter),
        },
    }


def measure(run: Run) -> None:
    asked, comm = run.options, run.connect("gloo")
    links = f"{asked.nics_per_node} x {asked.gbit_s:g} Gbit/s" if asked.gbit_s else "links unknown"
    for num_bytes in asked.bytes:
        for name, calls in cases(num_bytes, comm, asked.wires).items():
            case = row_of(name, links, run.world, num_bytes, torch.uint8, nodes=comm.num_nodes)
            subject = OURS if OURS in calls else EXCHANGE
            run.compare(case, calls, subject)


def check(parser: argparse.ArgumentParser, asked: argparse.Namespace) -> None:
    if (asked.ranks or BENCH.ranks) % asked.nodes:
        parser.error(f"--nodes {asked.nodes}: nodes have as many ranks as each other")


BENCH = Bench(
    "nodes",
    __doc__,
    measure,
    (
        option("--nodes", type=positive, default=2, help="that ranks of this machine stand for"),
        option("--gbit-s", type=float, help="rate of a node's link, headers included"),
        option("--nics-per-node", type=positive, default=1, help="links of a node (default 1)"),
        option("--bytes", type=parse_size, nargs="+", default=DEFAULT_BYTES, help="of a buffer"),
        option("--wires", nargs="*", default=(), help="coded wires to time, too: int8, fp8, int4"),
    ),
    rounds=7,
    on_nodes=True,
    check=check,
)
