# SPDX-License-Identifier: Apache-2.0
"""torch's sums and copies on one GPU over the same bytes, and a plain copy as upper bound.

The setting favours torch: the ranks' buffers are consecutive in one tensor, and of several ways to
write an operation the fastest at this size is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..cases import REDUCTIONS, Case, CaseBuffers, Prepared, needed_buffers
from ..devices import ONE_GPU_MODES
from ..timing import Call, Device
from .systems import PeerSetup, System, Unavailable

Tensor = torch.Tensor

_TRIALS = 5
_PAIRS: dict[str, Callable[..., Any]] = {
    "sum": torch.add,
    "prod": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}
# By default these operations widen small integers.
_WIDENING = ("sum", "prod")


def needed_bytes(collective: str, size_bytes: int, world: int) -> int:
    """Converts :func:`needed_buffers` to bytes, with buffers of ``size_bytes``.

    Raises :class:`Unavailable` for a collective whose bytes are not counted.
    """
    buffers = needed_buffers(collective, world)
    if buffers is None:
        raise Unavailable(f"the bytes of {collective} are not counted")
    return buffers * size_bytes


class Copies(System):
    """A copy by the process of rank 0; the other ranks do nothing."""

    version = "one copy_ of torch, half of the needed bytes read and half written"

    def __init__(self, setup: PeerSetup) -> None:
        self._setup = setup

    def prepare(self, case: Case) -> Prepared:
        if self._setup.mode not in ONE_GPU_MODES:
            raise Unavailable("only for ranks that share a GPU")
        made = self._make(case)
        return made() if self._setup.rank == 0 else Prepared((), lambda: None)

    def _make(self, case: Case) -> Callable[[], Prepared]:
        copied_bytes = needed_bytes(case.collective.name, case.size_bytes, case.world) // 2

        def make() -> Prepared:
            source = torch.empty(copied_bytes, dtype=torch.uint8, device=self._setup.device.tensors)
            source.random_(0, 256)
            return Prepared((), partial(torch.zeros_like(source).copy_, source))

        return make


class TorchOps(Copies):
    """torch's operations by the process of rank 0; the other ranks do nothing."""

    version = f"operations of torch {torch.__version__}"

    def _make(self, case: Case) -> Callable[[], Prepared]:
        cells = {
            ("reduce_scatter", False): self._reduce_scatter,
            ("all_gather", False): self._all_gather,
            ("all_reduce", True): self._all_reduce,
        }
        cell = cells.get((case.collective.name, case.in_place))
        if cell is None:
            placement = "in" if case.in_place else "out of"
            raise Unavailable(f"not in torch: {case.collective.name}, {placement} place")
        return partial(cell, [replace(case, rank=rank) for rank in range(case.world)])

    def _zeros(self, case: Case, elems: int) -> Tensor:
        """Returns a zeroed buffer with one row per rank."""
        size = (case.world, elems)
        return torch.zeros(size, dtype=case.dtype, device=self._setup.device.tensors)

    def _reduce_scatter(self, cases: Sequence[Case]) -> Prepared:
        case = cases[0]
        inputs, outputs = (self._zeros(case, n) for n in (case.total_elems, case.chunk_elems))
        call = fastest(self._setup.device, ways_to_reduce(case.op, inputs, outputs.view(-1)))
        return Prepared(tuple(map(CaseBuffers, cases, inputs, outputs)), call)

    def _all_gather(self, cases: Sequence[Case]) -> Prepared:
        case = cases[0]
        inputs, outputs = (self._zeros(case, n) for n in (case.chunk_elems, case.total_elems))
        call = fastest(self._setup.device, ways_to_copy(outputs, inputs.view(-1)))
        return Prepared(tuple(map(CaseBuffers, cases, inputs, outputs)), call)

    def _all_reduce(self, cases: Sequence[Case]) -> Prepared:
        case, device = cases[0], self._setup.device
        tensors = self._zeros(case, case.total_elems)
        scratch = torch.zeros_like(tensors[0])
        reduce = fastest(device, ways_to_reduce(case.op, tensors, scratch))
        copy = fastest(device, ways_to_copy(tensors, scratch))
        return Prepared(
            tuple(map(CaseBuffers, cases, tensors, tensors)), lambda: (reduce(), copy())
        )


def ways_to_reduce(op: str, rows: Tensor, out: Tensor) -> list[Call]:
    """Returns ways to combine the rows element by element; 16-bit floats are added in FP32."""
    extra = {"dtype": rows.dtype} if op in _WIDENING else {}
    ways: list[Call] = [partial(REDUCTIONS[op], rows, dim=0, out=out, **extra)]
    if len(rows) == 2 and op in _PAIRS:
        ways.append(partial(_PAIRS[op], rows[0], rows[1], out=out))
    return ways


def ways_to_copy(rows: Tensor, source: Tensor) -> list[Call]:
    """Returns ways to copy ``source`` into every row."""
    each = list(rows)
    return [
        partial(rows.copy_, source.expand_as(rows)),
        lambda: [row.copy_(source) for row in each],
    ]


def fastest(device: Device, ways: Sequence[Call]) -> Call:
    """Returns the fastest way in a few trials, after one warm-up call of each way."""
    if len(ways) == 1:
        return ways[0]

    def taken_us(way: Call) -> float:
        device.elapsed_us([way])
        return min(device.elapsed_us([way] * 2) for _ in range(_TRIALS))

    return min(ways, key=taken_us)
