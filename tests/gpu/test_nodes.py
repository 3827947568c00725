# SPDX-License-Identifier: Apache-2.0
"""A communicator over nodes, with NCCL between them, where GPUs of one machine act as the nodes.

With four GPUs there are two nodes of two ranks, else two nodes of one rank.
"""

import pytest
import torch

from ringcomm import CommOptions
from tests.gpu.worlds import TIMEOUT_S, run_ranks
from tests.support.call_checks import CHECKS, Case
from tests.support.ranks import join_nodes

# One element, a partial vector, and several segments of every channel.
COUNTS = (1, 1000, 300_001)
LIMIT_S = 100.0


def _everything(store, rank, world):
    nodes = [range(world // 2), range(world // 2, world)]
    torch.cuda.set_device(rank)
    options = CommOptions(timeout=TIMEOUT_S)
    device = f"cuda:{rank}"
    with join_nodes(store, rank, world, nodes, device=device, options=options) as comm:
        for turn, count in enumerate(COUNTS):
            for dtype in (torch.float32, torch.bfloat16, torch.int32):
                case = Case(count, dtype, async_op=turn == 1, root=turn % world)
                for name, check in CHECKS.items():
                    if name != "messages":
                        check(comm, case)
        comm.barrier()
        return comm.num_nodes


@pytest.mark.timeout(LIMIT_S + 20)
def test_every_collective_over_nodes():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs: NCCL gives each rank one of its own")
    world = 4 if torch.cuda.device_count() >= 4 else 2
    assert run_ranks(_everything, world, timeout_s=LIMIT_S) == [2] * world
