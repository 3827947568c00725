"""Times of collectives over nodes against Gloo's, and of exchanges for ``docs/scaling.md``.

``torchrun --nnodes N --nproc-per-node L -m ringcomm.bench.nodes --gbit-s RATE -o rows.csv``, under
any launcher that gives ranks their variables. Rank 0 adds rows; ``python -m
ringcomm.comm.topology.fit rows.csv`` compares them with the model.

Cases take turns: ringcomm's collectives ("rail-direct"), in the heap; Gloo's own over all ranks
("flat-ring"), of which its reduce-scatter is an all-reduce; and "exchange", a bare all-to-all of
the ranks of equal place in their nodes, by isend and irecv. Rank 0 prints how many times as long
Gloo takes, as medians over the rounds; with ``--wires``, also how many times as long ringcomm's own
FP32 sums take as its coded ones.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

import ringcomm

COLUMNS = (
    *("collective", "algorithm", "nodes", "ranks_per_node", "nics_per_node", "gbit_s", "bytes"),
    *("ms", "rounds", "wire"),
)
OURS, REDUCE_SCATTER = "rail-direct", "reduce_scatter"
CODED = "rail-direct on the wire "
DEFAULT_BYTES = (1 << 10, 4 << 20, 16 << 20)
WARM_UP_ROUNDS = 1


def cases(
    num_bytes: int, rail: dist.ProcessGroup, wires: Sequence[str]
) -> dict[tuple[str, str], Callable[[], object]]:
    """The exchanges of a buffer of ``num_bytes``, by collective and the model's algorithm."""
    world, nodes = dist.get_world_size(), dist.get_world_size(rail)
    whole = torch.zeros(num_bytes, dtype=torch.uint8)
    chunk = torch.zeros(num_bytes // world, dtype=torch.uint8)
    floats = torch.zeros(num_bytes // 4 // world * world)
    part_of_floats = torch.zeros(floats.numel() // world)
    in_heap = ringcomm.zeros(floats.numel())
    part_in_heap = ringcomm.zeros(part_of_floats.numel())
    peers = [rank for rank in dist.get_process_group_ranks(rail) if rank != dist.get_rank()]
    sent = [torch.zeros_like(chunk) for _ in peers]
    received = [torch.zeros_like(chunk) for _ in peers]

    def exchange() -> None:
        calls = [dist.irecv(to, peer) for to, peer in zip(received, peers, strict=True)]
        calls += [dist.isend(part, peer) for part, peer in zip(sent, peers, strict=True)]
        for call in calls:
            if call is not None:
                call.wait()

    def all_gather() -> None:
        dist.all_gather_into_tensor(whole[: chunk.numel() * world], chunk)

    def coded(wire: str) -> dict[tuple[str, str], Callable[[], object]]:
        return {
            ("all_reduce", CODED + wire): lambda: ringcomm.all_reduce(in_heap, wire=wire),
            (REDUCE_SCATTER, CODED + wire): lambda: ringcomm.reduce_scatter_tensor(
                part_in_heap, in_heap, wire=wire
            ),
        }

    assert len(peers) == nodes - 1
    return {
        **{name: call for wire in wires for name, call in coded(wire).items()},
        ("exchange", "rail-direct"): exchange,
        ("all_gather", "flat-ring"): all_gather,
        ("all_gather", OURS): lambda: ringcomm.all_gather_into_tensor(in_heap, part_in_heap),
        ("all_reduce", "flat-ring"): lambda: dist.all_reduce(floats),
        ("all_reduce", OURS): lambda: ringcomm.all_reduce(in_heap),
        (REDUCE_SCATTER, "flat-ring"): lambda: dist.reduce_scatter_tensor(part_of_floats, floats),
        (REDUCE_SCATTER, OURS): lambda: ringcomm.reduce_scatter_tensor(part_in_heap, in_heap),
    }


def ratios(times_ms: Mapping[tuple[int, str, str], list[float]]) -> list[str]:
    """How many times as long as ringcomm others take, a line for each size and collective."""
    lines = []

    def add(size: int, collective: str, algorithm: str, other: str, named: str) -> None:
        ours, theirs = (times_ms[size, collective, each] for each in (algorithm, other))
        ratio = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
        lines.append(
            f"{collective:15} {size:10} bytes: {algorithm} {statistics.median(ours):8.2f} ms, "
            f"{named} takes {ratio:.2f} times as long"
        )

    for size, collective, algorithm in times_ms:
        if algorithm == OURS and (size, collective, "flat-ring") in times_ms:
            add(size, collective, algorithm, "flat-ring", "Gloo")
        elif algorithm.startswith(CODED):
            add(size, collective, algorithm, OURS, "FP32")
    return lines


def group_store() -> dist.Store:
    """A part of the default group's store for ringcomm's own group."""
    group = dist.group.WORLD
    assert group is not None
    return dist.PrefixStore("ringcomm", group.get_group_store())


def slowest_ms(call: Callable[[], object]) -> float:
    """The time of the rank that takes longest, after a barrier."""
    dist.barrier()
    began = time.perf_counter()
    call()
    took_ms = torch.tensor([1e3 * (time.perf_counter() - began)], dtype=torch.float64)
    dist.all_reduce(took_ms, dist.ReduceOp.MAX)
    return float(took_ms)


def measure(args: argparse.Namespace) -> list[dict[str, object]]:
    """Times all cases in turns; returns a row of each, the same on every rank."""
    local_world = int(os.environ["LOCAL_WORLD_SIZE"])
    nodes = dist.get_world_size() // local_world
    rails = [
        dist.new_group([place + node * local_world for node in range(nodes)])
        for place in range(local_world)
    ]
    rail = rails[int(os.environ["LOCAL_RANK"])]
    every = [(size, *case) for size in args.bytes for case in cases(size, rail, args.wires).items()]
    times_ms: dict[tuple[int, str, str], list[float]] = {}
    for number in range(WARM_UP_ROUNDS + args.rounds):
        for size, name, call in every:
            took_ms = slowest_ms(call)
            if number >= WARM_UP_ROUNDS:
                times_ms.setdefault((size, *name), []).append(took_ms)
    if dist.get_rank() == 0:
        print("\n".join(ratios(times_ms)), flush=True)
    return [
        {
            "collective": collective,
            "algorithm": algorithm.partition(" ")[0],
            "nodes": nodes,
            "ranks_per_node": local_world,
            "nics_per_node": args.nics_per_node,
            "gbit_s": args.gbit_s,
            "bytes": size,
            "ms": round(statistics.median(times), 3),
            "rounds": args.rounds,
            "wire": algorithm.partition(CODED)[2],
        }
        for (size, collective, algorithm), times in times_ms.items()
    ]


def write(rows: Sequence[dict[str, object]], path: Path) -> None:
    """Adds rows to a CSV file, with a head if it is new."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="ringcomm.bench.nodes", description="Times collectives over nodes, against Gloo's."
    )
    add = parser.add_argument
    add("--gbit-s", type=float, required=True, help="rate of a node's link, headers included")
    add("--nics-per-node", type=int, default=1, help="links of a node (default: %(default)s)")
    add("--bytes", type=int, nargs="+", default=DEFAULT_BYTES, help="of the whole buffer")
    add("--wires", nargs="*", default=(), help="coded wires to time, too: int8, fp8, int4")
    add("--rounds", type=int, default=7, help="medians are of so many (default: %(default)s)")
    add("--init-method", default="env://", help="where ranks meet (default: %(default)s)")
    add("-o", "--output", type=Path, required=True, help="CSV file that rank 0 adds rows to")
    args = parser.parse_args(argv)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", args.init_method, rank=rank, world_size=world)
    try:
        ringcomm.init_process_group(store=group_store(), rank=rank, world_size=world)
        rows = measure(args)
        if dist.get_rank() == 0:
            write(rows, args.output)
        ringcomm.destroy_process_group()
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
