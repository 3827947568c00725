# SPDX-License-Identifier: Apache-2.0
"""Ranks as processes: their calls are exact, and groups do not mix."""

import pytest
import torch

from ringcomm import CommOptions, Communicator
from tests.support.call_checks import CHECKS, Case
from tests.support.ranks import run_ranks

COUNTS = (1, 63, 40_007, 9_001)


def _calls(comm: Communicator, memory: str) -> None:
    last = comm.world_size - 1
    for check in CHECKS.values():
        for number, count in enumerate(COUNTS):
            check(comm, Case(count, memory=memory, in_place=number % 2 == 1, root=last))


def _rank(store, rank, world):
    for memory, options in (("heap", CommOptions()), ("mixed", CommOptions(segment_bytes=1024))):
        with Communicator.from_store(
            store, rank, world, name=memory, timeout=60, options=options
        ) as comm:
            _calls(comm, memory)
            CHECKS["messages"](comm, Case(500_000, memory=memory))
            part = comm.new_group([0, world - 1])
            if part is not None:
                tensor = torch.ones(1000)
                part.all_reduce(tensor)
                assert tensor[-1] == part.world_size
                part.close()
            comm.barrier()
    return "done"


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_call(world_size):
    assert run_ranks(_rank, world_size, timeout_s=150) == ["done"] * world_size
