"""Times of matrix products over ranks against the collective and the product, one after the other.

``torchrun --nproc-per-node 2 -m ringcomm.bench.products [N,K,M ...]``: ``all_gather_matmul`` of
[N, K] and [K, M], and ``matmul_reduce_scatter`` of [world N, K] and [K, M], one thread a rank. A
ratio is how many times as long the separate calls take, of plain tensors and of tensors in the
heap; "product" is the part of their time that the bare product takes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import torch

import ringcomm
from ringcomm import Communicator

Tensor = torch.Tensor
Call = Callable[[], object]
Shape = tuple[int, int, int]

SHAPES: tuple[Shape, ...] = (
    *((64, 256, 256), (256, 1024, 256), (1024, 256, 256), (1024, 1024, 256)),
    *((1024, 1024, 1024), (4096, 1024, 256), (1024, 256, 4096)),
)
WARM_UP_ROUNDS = 2


def in_heap(tensor: Tensor) -> Tensor:
    return ringcomm.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


def gathers(comm: Communicator, shape: Shape) -> dict[str, Call]:
    """The calls of all_gather_matmul and of what it is compared with, by name."""
    rows, inner, columns = shape
    own, weight = torch.randn(rows, inner), torch.randn(inner, columns)
    whole, shared = torch.randn(comm.world_size * rows, inner), in_heap(own)
    return {
        "product": lambda: whole @ weight,
        "apart": lambda: ringcomm.functional.all_gather(own, comm) @ weight,
        "together": lambda: ringcomm.functional.all_gather_matmul(own, weight, comm),
        "apart in the heap": lambda: ringcomm.functional.all_gather(shared, comm) @ weight,
        "together in the heap": lambda: ringcomm.functional.all_gather_matmul(shared, weight, comm),
    }


def scatters(comm: Communicator, shape: Shape) -> dict[str, Call]:
    """The calls of matmul_reduce_scatter and of what it is compared with, by name."""
    rows, inner, columns = shape
    whole, weight = torch.randn(comm.world_size * rows, inner), torch.randn(inner, columns)
    products = ringcomm.empty(comm.world_size * rows, columns)

    def through_the_heap() -> Tensor:
        torch.mm(whole, weight, out=products)
        return ringcomm.functional.reduce_scatter(products, group=comm)

    return {
        "product": lambda: whole @ weight,
        "apart": lambda: ringcomm.functional.reduce_scatter(whole @ weight, group=comm),
        "together": lambda: ringcomm.functional.matmul_reduce_scatter(whole, weight, comm),
        "apart in the heap": through_the_heap,
        "together in the heap": lambda: ringcomm.functional.matmul_reduce_scatter(
            whole, weight, comm
        ),
    }


def times_of(comm: Communicator, calls: Mapping[str, Call], rounds: int) -> dict[str, list[float]]:
    """Seconds of the slowest rank by call and round; the calls take turns, first another each."""
    names = list(calls)
    mine = torch.zeros(len(names), WARM_UP_ROUNDS + rounds, dtype=torch.float64)
    for number in range(mine.size(1)):
        for step in range(len(names)):
            index = (number + step) % len(names)
            comm.barrier()
            begin = time.perf_counter()
            calls[names[index]]()
            mine[index, number] = time.perf_counter() - begin
    comm.all_reduce(mine, ringcomm.ReduceOp.MAX)
    rows: list[list[float]] = mine[:, WARM_UP_ROUNDS:].tolist()
    return dict(zip(names, rows, strict=True))


def ratio(times: Mapping[str, Sequence[float]], one: str, other: str) -> float:
    """The median over rounds of how many times as long ``one`` takes as ``other``."""
    pairs = zip(times[one], times[other], strict=True)
    return statistics.median(each / reference for each, reference in pairs)


def line(name: str, shape: Shape, times: Mapping[str, Sequence[float]]) -> str:
    """One row of the table."""
    apart_ms = 1e3 * statistics.median(times["apart"])
    figures = (
        ratio(times, "product", "apart"),
        ratio(times, "apart", "together"),
        ratio(times, "apart in the heap", "together in the heap"),
    )
    sizes = "x".join(map(str, shape))
    return f"{name:22} {sizes:>14} {apart_ms:9.2f} " + " ".join(f"{each:8.2f}" for each in figures)


def shape_of(text: str) -> Shape:
    rows, inner, columns = map(int, text.split(","))
    return rows, inner, columns


def main(arguments: Sequence[str]) -> None:
    """Prints the table on rank 0."""
    parser = argparse.ArgumentParser(prog="python -m ringcomm.bench.products")
    parser.add_argument("shapes", nargs="*", type=shape_of, metavar="N,K,M", default=SHAPES)
    parser.add_argument("-n", "--rounds", type=int, default=15)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with Communicator.from_env() as comm:
        if comm.rank == 0:
            print(f"{comm.world_size} ranks, {os.cpu_count()} cores, torch {torch.__version__}")
            print(
                f"{'':22} {'N x K x M':>14} {'apart ms':>9} {'product':>8} {'plain':>8} {'heap':>8}"
            )
        for shape in options.shapes:
            for name, cases in (
                ("all_gather_matmul", gathers),
                ("matmul_reduce_scatter", scatters),
            ):
                times = times_of(comm, cases(comm, shape), options.rounds)
                if comm.rank == 0:
                    print(line(name, shape, times), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
