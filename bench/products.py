# SPDX-License-Identifier: Apache-2.0
"""Times matrix products over ranks, against the collective followed by the product.

It runs ``all_gather_matmul`` of [N, K] and [K, M], and ``matmul_reduce_scatter`` of [world N, K]
and [K, M], with one thread per rank, on plain tensors or on tensors in the heap. "apart" makes the
two calls separately, and its ratio is relative to "together". "product" is the product alone, and
its ratio is relative to "apart".
"""

from __future__ import annotations

import torch

import ringcomm
from ringcomm import Communicator

from .options import tuples
from .report import row_of
from .run import Bench, Run
from .timing import Call

Tensor = torch.Tensor
Shape = tuple[int, int, int]

SHAPES: tuple[Shape, ...] = (
    *((64, 256, 256), (256, 1024, 256), (1024, 256, 256), (1024, 1024, 256)),
    *((1024, 1024, 1024), (4096, 1024, 256), (1024, 256, 4096)),
)
# Each system, and the system to which its ratio is relative.
SUBJECTS = {
    "product": "apart",
    "apart": "together",
    "together": "together",
    "apart in the heap": "together in the heap",
    "together in the heap": "together in the heap",
}


def gathers(comm: Communicator, shape: Shape) -> dict[str, Call]:
    """Returns the calls of all_gather_matmul and of the compared systems, by name."""
    rows, inner, columns = shape
    own, weight = torch.randn(rows, inner), torch.randn(inner, columns)
    whole = torch.randn(comm.world_size * rows, inner)
    shared = ringcomm.empty(own.shape, dtype=own.dtype).copy_(own)
    of = ringcomm.functional
    return {
        "product": lambda: whole @ weight,
        "apart": lambda: of.all_gather(own, comm) @ weight,
        "together": lambda: of.all_gather_matmul(own, weight, comm),
        "apart in the heap": lambda: of.all_gather(shared, comm) @ weight,
        "together in the heap": lambda: of.all_gather_matmul(shared, weight, comm),
    }


def scatters(comm: Communicator, shape: Shape) -> dict[str, Call]:
    """Returns the calls of matmul_reduce_scatter and of the compared systems, by name."""
    rows, inner, columns = shape
    whole, weight = torch.randn(comm.world_size * rows, inner), torch.randn(inner, columns)
    products = ringcomm.empty(comm.world_size * rows, columns)
    of = ringcomm.functional

    def through_the_heap() -> Tensor:
        torch.mm(whole, weight, out=products)
        return of.reduce_scatter(products, group=comm)

    return {
        "product": lambda: whole @ weight,
        "apart": lambda: of.reduce_scatter(whole @ weight, group=comm),
        "together": lambda: of.matmul_reduce_scatter(whole, weight, comm),
        "apart in the heap": through_the_heap,
        "together in the heap": lambda: of.matmul_reduce_scatter(whole, weight, comm),
    }


CASES = {"all_gather_matmul": gathers, "matmul_reduce_scatter": scatters}


def measure(run: Run) -> None:
    comm = run.connect()
    run.pacing.expect(len(run.options.shapes) * len(CASES))
    for shape in run.options.shapes:
        for name, calls in CASES.items():
            elems = comm.world_size * shape[0] * shape[1]
            row = row_of(name, "x".join(map(str, shape)), run.world, elems)
            run.compare(row, calls(comm, shape), SUBJECTS)


BENCH = Bench("products", __doc__, measure, [tuples("shapes", "N,K,M", SHAPES)], rounds=15)
BENCH.run_as_main(__name__)
