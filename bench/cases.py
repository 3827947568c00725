# SPDX-License-Identifier: Apache-2.0
"""The measured cases: collectives, sizes, bandwidth factors, exact inputs and expected outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch

from .report import IN_PLACE, OUT_OF_PLACE, Row

if TYPE_CHECKING:
    from .board import Board
    from .timing import Device

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
REDUCTIONS: dict[str, Callable[..., Any]] = {
    "sum": torch.sum,
    "prod": torch.prod,
    "min": torch.amin,
    "max": torch.amax,
    "avg": torch.mean,
}
OPS = tuple(REDUCTIONS)

# The period of the inputs; not a multiple of a chunk or segment, so misplaced data are found.
_PATTERN_PERIOD = 10007
# Inputs are whole numbers from 0 to these values minus 1.
_MOVED_VALUES = 64
_SUMMED_VALUES = 8
# Every dtype above holds the sum of this many ranks' inputs exactly.
MOST_RANKS_CHECKED = 16
# Exact in every dtype above, and larger than any correct result of MOST_RANKS_CHECKED ranks.
POISON = 113


@dataclass(frozen=True)
class Collective:
    """A collective; the larger of its two buffers has ``size`` bytes on each rank with this buffer.

    ``crossings`` is how often (world - 1) / world of ``size`` crosses the busiest link; 0: ``size``
    crosses it once. ``input_is_chunk`` is true if the input has only 1/world of ``size``, and
    ``output_is_chunk`` if the output has. ``usual`` is the placement in ``torch.distributed``.
    """

    name: str
    crossings: int
    placements: tuple[str, ...]
    reduces: bool = False
    rooted: bool = False
    input_is_chunk: bool = False
    output_is_chunk: bool = False
    usual: str = OUT_OF_PLACE

    def busbw_factor(self, world: int) -> Fraction:
        return Fraction(self.crossings * (world - 1), world) if self.crossings else Fraction(1)


_BOTH, _OUT, _IN = (OUT_OF_PLACE, IN_PLACE), (OUT_OF_PLACE,), (IN_PLACE,)
_COLLECTIVES = (
    Collective("reduce_scatter", 1, _BOTH, reduces=True, output_is_chunk=True),
    Collective("all_gather", 1, _BOTH, input_is_chunk=True),
    Collective("all_reduce", 2, _BOTH, reduces=True, usual=IN_PLACE),
    Collective("broadcast", 0, _IN, rooted=True, usual=IN_PLACE),
    Collective("reduce", 0, _BOTH, reduces=True, rooted=True, usual=IN_PLACE),
    Collective("gather", 1, _OUT, rooted=True, input_is_chunk=True),
    Collective("scatter", 1, _OUT, rooted=True, output_is_chunk=True),
    Collective("all_to_all", 1, _OUT),
    Collective("send_recv", 0, _OUT),
)
COLLECTIVES = {collective.name: collective for collective in _COLLECTIVES}


@dataclass(frozen=True)
class Case:
    """One cell of the table for one rank. ``requested_bytes`` is the size on the command line.

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
        """Elements of the larger buffer; a multiple of the world size if buffers have chunks."""
        asked = self.requested_bytes // self.dtype.itemsize
        return self.chunk_elems * self.world if self._has_chunks else asked

    @property
    def size_bytes(self) -> int:
        """Bytes of the larger buffer: the size column, and S of the bandwidth formulas."""
        return self.total_elems * self.dtype.itemsize

    @property
    def count_elems(self) -> int:
        """The count column: the count that a caller passes, per rank if buffers have chunks."""
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
        """Bytes of the larger buffer divided by the time, in 1e9 bytes per second."""
        return self.size_bytes / time_us / 1e3

    def busbw_gbps(self, time_us: float) -> float:
        """algbw scaled to the bytes on the busiest link; comparable between numbers of ranks."""
        return self.algbw_gbps(time_us) * float(self.collective.busbw_factor(self.world))

    @property
    def holds_input(self) -> bool:
        return self.rank == self.root or self.collective.name not in ("broadcast", "scatter")

    @property
    def has_output(self) -> bool:
        return self.rank == self.root or self.collective.name not in ("reduce", "gather")

    @property
    def row(self) -> Row:
        """Returns the row of this cell, without a system and without measurements."""
        kind = self.collective
        return Row(
            kind.name,
            *(self.size_bytes, self.count_elems, self.dtype_name),
            op=self.op if kind.reduces else "none",
            root=self.root if kind.rooted else -1,
            ranks=self.world,
            system="",
            placement=self.placement,
        )


@dataclass(frozen=True)
class CaseBuffers:
    """One rank's tensors; ``case`` is the cell as that rank sees it."""

    case: Case
    input: torch.Tensor
    output: torch.Tensor


@dataclass(frozen=True)
class Prepared:
    """The buffers of the ranks in this process, and the call that uses them.

    On the CPU ``call`` returns when the result is complete; on a GPU it may return when the work is
    queued on the current stream. Without buffers the call is timed and never checked.
    """

    buffers: tuple[CaseBuffers, ...]
    call: Callable[[], object]


def input_values(case: Case, rank: int) -> torch.Tensor:
    """Returns the exact input of ``rank``: small integers, whose sums are exact in any order."""
    return _tiled(case, _pattern(case, rank), case.input_elems)


def expected_values(case: Case) -> torch.Tensor:
    """Computes the correct output of ``case.rank``, without any communication."""
    name, rank, chunk = case.collective.name, case.rank, case.chunk_elems
    own, ranks = slice(rank * chunk, (rank + 1) * chunk), range(case.world)
    if case.collective.reduces:
        parts = torch.stack([_pattern(case, source).to(torch.float64) for source in ranks])
        reduced = REDUCTIONS[case.op](parts, 0).to(case.dtype)
        whole = _tiled(case, reduced, case.total_elems)
        if name == "reduce_scatter":
            return whole[own]
        if name in ("all_reduce", "reduce"):
            return whole
    if name in ("all_gather", "gather"):
        return torch.cat([input_values(case, source) for source in ranks])
    if name == "all_to_all":
        return torch.cat([input_values(case, source)[own] for source in ranks])
    if name == "send_recv":
        return input_values(case, (rank - 1) % case.world)
    if name in ("broadcast", "scatter"):
        whole = input_values(case, case.root)
        return whole[own] if name == "scatter" else whole
    raise NotImplementedError(f"expected_values() of bench/cases.py has no case for {name}")


def needed_buffers(collective: str, world: int) -> int | None:
    """Returns the memory traffic, in buffers, of a collective whose ranks share one GPU.

    The unit is the larger of a rank's two buffers. Each rank reads the data for its result once,
    and writes its result once. reduce_scatter reads a chunk of every rank and writes one chunk.
    all_gather reads and writes the same number of bytes. all_reduce, in place, is a reduce-scatter,
    and then reads and writes the other chunks. Returns None for other collectives.
    """
    counts = {"reduce_scatter": world + 1, "all_gather": 2 * world, "all_reduce": 3 * world - 1}
    return counts.get(collective)


def count_wrong(case: Case, outputs: Iterable[torch.Tensor]) -> int:
    """Counts wrong elements of ``outputs``; 0 on a rank without output."""
    if not case.has_output:
        return 0
    expected = expected_values(case)
    return sum(int(torch.count_nonzero(output != expected)) for output in outputs)


def _pattern(case: Case, rank: int) -> torch.Tensor:
    index = torch.arange(_PATTERN_PERIOD, dtype=torch.int64)
    op = case.op if case.collective.reduces else ""
    if op == "prod":  # at most one rank contributes a 2, so no dtype overflows
        return torch.where(index.remainder(case.world + 1) == rank, 2, 1).to(case.dtype)
    if op == "avg":  # inputs differ between ranks; their mean is a power of 2, so it is exact
        mean = torch.bitwise_left_shift(torch.ones_like(index), index.remainder(3))
        return (mean + 2 * rank - (case.world - 1)).to(case.dtype)
    # Use the upper bits of a product, which look random; the lowest bits have a short period.
    mixed = (index + (rank + 1) * _PATTERN_PERIOD) * 2654435761 >> 20
    return mixed.remainder(_SUMMED_VALUES if op == "sum" else _MOVED_VALUES).to(case.dtype)


def _tiled(case: Case, pattern: torch.Tensor, count_elems: int) -> torch.Tensor:
    copies = -(-count_elems // _PATTERN_PERIOD)
    return pattern.to(case.tensors).repeat(max(copies, 1))[:count_elems]


def wrong_elements(
    board: Board, device: Device, prepared: Mapping[str, Sequence[Prepared]]
) -> dict[str, int | None]:
    """Counts wrong elements over all ranks and buffer sets, by system; None for unchecked calls.

    Collective; every rank gets the sums.
    """
    mine = {name: _wrong_here(board, device, sets) for name, sets in prepared.items()}
    by_rank = board.exchange(mine)
    counts = {name: [here[name] for here in by_rank if here[name] is not None] for name in mine}
    return {name: sum(each) if each else None for name, each in counts.items()}


def _wrong_here(board: Board, device: Device, sets: Sequence[Prepared]) -> int | None:
    # In all sets, the buffers of a rank belong to the same case.
    columns = list(zip(*(prepared.buffers for prepared in sets), strict=True))
    for column in columns:
        case = column[0].case
        values = input_values(case, case.rank) if case.holds_input else None
        for buffers in column:
            # Write the poison before the input: in place, both use the same memory.
            buffers.output.fill_(POISON)
            if values is not None:
                buffers.input.copy_(values)
    device.synchronize()
    board.barrier()
    for prepared in sets:
        prepared.call()
    device.synchronize()
    board.barrier()
    wrong = [count_wrong(each[0].case, (buffers.output for buffers in each)) for each in columns]
    return sum(wrong) if columns else None
