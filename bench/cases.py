"""The measured cases: collectives, sizes, bandwidth factors and exact inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch

DTYPES = {
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "half": torch.float16,
    "double": torch.float64,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
}
OPS = ("sum", "prod", "min", "max", "avg")
IN_PLACE = "in"
OUT_OF_PLACE = "out"

# A period that no power-of-two chunk or segment divides, so that misplaced data shows.
_PATTERN_PERIOD = 10007
# Inputs are 0, 1, ... below these.
_MOVED_VALUES = 64
_SUMMED_VALUES = 8
# Every dtype above holds the sum of this many ranks' inputs exactly.
MOST_RANKS_CHECKED = 16
# Exact in every dtype above, and larger than any right answer for that many ranks.
POISON = 113


@dataclass(frozen=True)
class Collective:
    """One operation; the larger of its two buffers has ``size`` bytes on each rank that holds it.

    ``input_is_chunk`` and ``output_is_chunk`` say that a buffer holds 1/world of that size;
    ``usual`` is the placement that ``torch.distributed`` has.
    """

    name: str
    busbw_factor: Callable[[int], Fraction]
    placements: tuple[str, ...]
    reduces: bool = False
    rooted: bool = False
    input_is_chunk: bool = False
    output_is_chunk: bool = False
    output_at_root_only: bool = False
    usual: str = OUT_OF_PLACE


def _one(world: int) -> Fraction:
    return Fraction(1)


def _others(world: int) -> Fraction:
    return Fraction(world - 1, world)


_BOTH = (OUT_OF_PLACE, IN_PLACE)
_OUT, _IN = (OUT_OF_PLACE,), (IN_PLACE,)
_ROOT: dict[str, Any] = {"rooted": True, "output_at_root_only": True}
_COLLECTIVES = (
    Collective("reduce_scatter", _others, _BOTH, reduces=True, output_is_chunk=True),
    Collective("all_gather", _others, _BOTH, input_is_chunk=True),
    Collective("all_reduce", lambda world: 2 * _others(world), _BOTH, reduces=True, usual=IN_PLACE),
    Collective("broadcast", _one, _IN, rooted=True, usual=IN_PLACE),
    Collective("reduce", _one, _BOTH, reduces=True, usual=IN_PLACE, **_ROOT),
    Collective("gather", _others, _OUT, input_is_chunk=True, **_ROOT),
    Collective("scatter", _others, _OUT, rooted=True, output_is_chunk=True),
    Collective("all_to_all", _others, _OUT),
    Collective("send_recv", _one, _OUT),
)
COLLECTIVES = {collective.name: collective for collective in _COLLECTIVES}


@dataclass(frozen=True)
class Case:
    """One cell of the table as one rank sees it. ``requested_bytes`` is what was asked for.

    ``tensors`` is the torch device on which exact inputs and expected values are made.
    """

    collective: Collective
    requested_bytes: int
    dtype_name: str
    op: str
    root: int
    rank: int
    world: int
    placement: str
    tensors: str = "cpu"

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.dtype_name]

    @property
    def chunk_elems(self) -> int:
        return self.requested_bytes // self.dtype.itemsize // self.world

    @property
    def total_elems(self) -> int:
        """Elements of the larger buffer; a whole number of chunks where there are chunks."""
        if self._has_chunks:
            return self.chunk_elems * self.world
        return self.requested_bytes // self.dtype.itemsize

    @property
    def size_bytes(self) -> int:
        """Bytes of the larger buffer: the size column, and S of the bandwidth formulas."""
        return self.total_elems * self.dtype.itemsize

    @property
    def count_elems(self) -> int:
        """The count column: what a caller passes as the count, per rank where there are chunks."""
        return self.chunk_elems if self._has_chunks else self.total_elems

    @property
    def input_elems(self) -> int:
        return self.chunk_elems if self.collective.input_is_chunk else self.total_elems

    @property
    def output_elems(self) -> int:
        return self.chunk_elems if self.collective.output_is_chunk else self.total_elems

    @property
    def in_place(self) -> bool:
        return self.placement == IN_PLACE

    @property
    def _has_chunks(self) -> bool:
        kind = self.collective
        return kind.input_is_chunk or kind.output_is_chunk or kind.name == "all_to_all"

    def algbw_gbps(self, time_us: float) -> float:
        """Bytes of the larger buffer per time, in 1e9 bytes per second."""
        return self.size_bytes / time_us / 1e3

    def busbw_gbps(self, time_us: float) -> float:
        """algbw scaled to what crosses the busiest link, comparable between rank counts."""
        return self.algbw_gbps(time_us) * float(self.collective.busbw_factor(self.world))

    @property
    def holds_input(self) -> bool:
        return self.rank == self.root or self.collective.name not in ("broadcast", "scatter")

    @property
    def has_output(self) -> bool:
        return self.rank == self.root or not self.collective.output_at_root_only


def input_values(case: Case, rank: int) -> torch.Tensor:
    """The exact input of ``rank``: small integers, so that every order of summing agrees."""
    if not case.collective.reduces:
        return _tiled(case, _pattern(case, rank + 1, _MOVED_VALUES), case.input_elems)
    return _tiled(case, _reduction_pattern(case, rank), case.input_elems)


def expected_values(case: Case) -> torch.Tensor:
    """Computes what the output of ``case.rank`` must be, without any communication."""
    name, rank, chunk = case.collective.name, case.rank, case.chunk_elems
    own, ranks = slice(rank * chunk, (rank + 1) * chunk), range(case.world)
    if case.collective.reduces:
        whole = _tiled(case, _reduced_pattern(case), case.total_elems)
        return whole[own] if name == "reduce_scatter" else whole
    if name in ("all_gather", "gather"):
        return torch.cat([input_values(case, source) for source in ranks])
    if name == "all_to_all":
        return torch.cat([input_values(case, source)[own] for source in ranks])
    if name == "send_recv":
        return input_values(case, (rank - 1) % case.world)
    whole = input_values(case, case.root)
    return whole[own] if name == "scatter" else whole


def count_wrong(case: Case, outputs: Iterable[torch.Tensor]) -> int:
    """Elements of ``outputs`` that differ from what they must be; 0 on a rank without output."""
    if not case.has_output:
        return 0
    expected = expected_values(case)
    return sum(int(torch.count_nonzero(output != expected)) for output in outputs)


def _pattern(case: Case, seed: int, values: int) -> torch.Tensor:
    index = torch.arange(_PATTERN_PERIOD, dtype=torch.int64)
    # The upper bits of a product look random; the lowest would repeat with a short period.
    mixed = (index + seed * _PATTERN_PERIOD) * 2654435761 >> 20
    return mixed.remainder(values).to(case.dtype)


def _reduction_pattern(case: Case, rank: int) -> torch.Tensor:
    index = torch.arange(_PATTERN_PERIOD, dtype=torch.int64)
    if case.op == "prod":  # at most one rank contributes a two: no dtype overflows
        return torch.where(index.remainder(case.world + 1) == rank, 2, 1).to(case.dtype)
    if case.op == "avg":  # ranks differ, and their mean is 2^k: exact for any way of dividing
        mean = torch.bitwise_left_shift(torch.ones_like(index), index.remainder(3))
        return (mean + 2 * rank - (case.world - 1)).to(case.dtype)
    return _pattern(case, rank + 1, _SUMMED_VALUES if case.op == "sum" else _MOVED_VALUES)


def _reduced_pattern(case: Case) -> torch.Tensor:
    parts = torch.stack(
        [_reduction_pattern(case, rank).to(torch.float64) for rank in range(case.world)]
    )
    reduce: dict[str, Any] = {"sum": torch.sum, "prod": torch.prod, "min": torch.amin}
    reduce |= {"max": torch.amax}
    found: torch.Tensor = reduce.get(case.op, torch.mean)(parts, 0)
    return found.to(case.dtype)


def _tiled(case: Case, pattern: torch.Tensor, count_elems: int) -> torch.Tensor:
    copies = -(-count_elems // _PATTERN_PERIOD)
    return pattern.to(case.tensors).repeat(max(copies, 1))[:count_elems]
