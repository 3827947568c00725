"""The correctness pass: exact inputs, one call, every element looked at. Nothing is timed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .board import Board
from .cases import POISON, count_wrong, input_values
from .devices import Device
from .peers import Prepared


def wrong_elements(
    board: Board, device: Device, prepared: Mapping[str, Sequence[Prepared]]
) -> dict[str, int | None]:
    """Wrong elements over all ranks and sets of buffers, by system; None where none are checked.

    Collective; every rank gets the sums.
    """
    mine = {
        name: (_wrong_here(board, device, sets), len(sets[0].buffers))
        for name, sets in prepared.items()
    }
    by_rank = board.exchange(mine)
    checked = {name: any(here[name][1] for here in by_rank) for name in prepared}
    return {
        name: sum(here[name][0] for here in by_rank) if checked[name] else None for name in prepared
    }


def _wrong_here(board: Board, device: Device, sets: Sequence[Prepared]) -> int:
    # The same rank's buffers of all sets: they share its case.
    columns = list(zip(*(prepared.buffers for prepared in sets), strict=True))
    # The poison comes first: in place it lies where the input goes.
    for buffers in (each for column in columns for each in column):
        buffers.output.fill_(POISON)
    for column in columns:
        case = column[0].case
        if case.holds_input:
            values = input_values(case, case.rank)
            for buffers in column:
                buffers.input.copy_(values)
    device.synchronize()
    board.barrier()
    for prepared in sets:
        prepared.call()
    device.synchronize()
    board.barrier()
    return sum(count_wrong(each[0].case, (buffers.output for buffers in each)) for each in columns)
