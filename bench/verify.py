"""The correctness pass: exact inputs, one call, every element looked at. Nothing is timed."""

from __future__ import annotations

from collections.abc import Mapping

from .board import Board
from .cases import POISON, Case, count_wrong, input_values
from .peers import Prepared


def wrong_elements(board: Board, case: Case, prepared: Mapping[str, Prepared]) -> dict[str, int]:
    """Wrong elements over all ranks, by system. Collective; every rank gets the sums."""
    mine = {name: _wrong_here(board, case, prepared[name]) for name in prepared}
    by_rank = board.exchange(mine)
    return {name: sum(wrong[name] for wrong in by_rank) for name in prepared}


def _wrong_here(board: Board, case: Case, prepared: Prepared) -> int:
    # The poison comes first: in place it lies where the input goes.
    prepared.output.fill_(POISON)
    if case.holds_input:
        prepared.input.copy_(input_values(case, case.rank))
    board.barrier()
    prepared.call()
    board.barrier()
    return count_wrong(case, prepared.output)
