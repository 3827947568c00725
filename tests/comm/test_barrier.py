# SPDX-License-Identifier: Apache-2.0
import threading
import time

import pytest

import ringcomm
from tests.support.faults import leaving_together


@pytest.mark.parametrize("world_size", [1, 2, 5, 16])
def test_nobody_leaves_before_all_have_come(worlds, world_size):
    guard = threading.Lock()
    arrived = [0]

    def body(comm):
        for turn in range(1, 20):
            with guard:
                arrived[0] += 1
            comm.barrier()
            with guard:
                assert arrived[0] >= turn * world_size
            comm.barrier()

    worlds(world_size).run(body)
    assert arrived[0] == 19 * world_size


def test_a_timeout_of_its_own():
    with ringcomm.local_world(2, timeout=60) as world:

        def body(comm):
            comm.barrier(timeout=30)
            assert comm.timeout.total_seconds() == 60
            if comm.rank == 0:
                comm.barrier(timeout=0.2)

        with pytest.raises(ringcomm.CollectiveTimeout, match=r"barrier on rank 0 of 2.*rank 1"):
            world.run(leaving_together(body, 2))


def test_who_waits_leaves_the_core(worlds):
    """Measures CPU time: it must be less than a twentieth of the second that the peer is late."""

    def body(comm):
        if comm.rank == 1:
            time.sleep(1)
        before = time.thread_time()
        comm.barrier()
        return time.thread_time() - before

    assert max(worlds(2).run(body)) < 0.05
