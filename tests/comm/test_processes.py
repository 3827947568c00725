"""Ranks as processes, whose calls are exact and whose groups are their own."""

import pytest
import torch

from ringcomm import CommOptions, Communicator
from tests.support.call_checks import CHECKS, REDUCTIONS, Case
from tests.support.exact import REDUCIBLE, ops_for
from tests.support.ranks import run_ranks

COUNTS = (1, 63, 40_007)


def _calls(comm: Communicator, place: str) -> None:
    last = comm.world_size - 1
    for name, check in CHECKS.items():
        for count in COUNTS:
            for in_place in (False, True):
                check(comm, Case(count, place=place, in_place=in_place, root=last))
        for dtype in REDUCIBLE:
            for op in ops_for(dtype) if name in REDUCTIONS else ("",):
                check(comm, Case(63, dtype, op, place, root=last))


def _rank(store, rank, world):
    for place, options in (("heap", CommOptions()), ("mixed", CommOptions(segment_bytes=1024))):
        with Communicator.from_store(
            store, rank, world, name=place, timeout=60, options=options
        ) as comm:
            _calls(comm, place)
            CHECKS["messages"](comm, Case(500_000, place=place))
            part = comm.new_group([0, world - 1])
            if part is not None:
                tensor = torch.ones(1000)
                part.all_reduce(tensor)
                assert tensor[-1] == part.world_size
                part.close()
            comm.barrier()
    return "done"


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_call(world_size):
    assert run_ranks(_rank, world_size, timeout_s=150) == ["done"] * world_size
