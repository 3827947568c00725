# SPDX-License-Identifier: Apache-2.0
"""Messages whose peer is killed or stopped, or takes back memory that it lent."""

import os
import signal
import time

import pytest
import torch

import ringcomm
from ringcomm import CollectiveTimeout, CommOptions, Communicator, PeerLost, RingcommError, _native
from tests.support.faults import is_stopped
from tests.support.ranks import Ranks

pytestmark = pytest.mark.deadlines

LONG_S = 60.0
SHORT_S = 1.0


def _stopped_in_a_wait(store, rank, world):
    """Rank 0 waits for 1, 1 for 2, and 2 for 3 when rank 3 stops rank 2; then rank 3 sends."""
    comm = Communicator.from_store(store, rank, world, timeout=LONG_S)
    store.set(f"pid/{rank}", str(os.getpid()))
    comm.barrier()
    if rank == 3:
        # Rank 2's barrier, in which it also waits for 3, has ended once it records a message.
        while not comm.recording().ranks[2].messages:
            time.sleep(0.01)
        while comm.recording().ranks[2].waits_for != 3:
            time.sleep(0.01)
        os.kill(int(store.get("pid/2")), signal.SIGSTOP)
    if rank in (0, 3):
        while not is_stopped(int(store.get("pid/2"))):
            time.sleep(0.01)
    if rank == 0:
        comm.timeout = SHORT_S
    if rank == 3:
        comm.send(torch.ones(4), 2)
        store.wait(["learnt/0", "learnt/1"])
        # The test needs this: the recorded chain of waits leads past rank 2, to this rank.
        return [each.waits_for for each in comm.recording().ranks]
    try:
        comm.recv(torch.ones(4), rank + 1)
    except CollectiveTimeout as error:
        store.set(f"learnt/{rank}", "")
        return str(error)
    raise AssertionError("the call returned")


def test_a_stopped_rank_is_named_whatever_it_last_waited_for():
    with Ranks(_stopped_in_a_wait, 4) as ranks:
        outcomes = ranks.wait(LONG_S / 2, [0, 1, 3])
    for outcome in outcomes:
        assert outcome.ok, outcome.describe()
    *texts, waits_for = [outcome.value for outcome in outcomes]
    assert waits_for[2:] == [3, -1]
    for text in texts:
        assert "for rank 2" in text


SEGMENT_BYTES = 256
TEN_SEGMENTS = 10 * SEGMENT_BYTES // 4


def _killed_sender(store, rank, world, passage):
    options = CommOptions(timeout=LONG_S, segment_bytes=SEGMENT_BYTES)
    comm = Communicator.from_store(store, rank, world, options=options)
    comm.barrier()
    if rank == 1:
        _native.arm_fault("kill", passage=passage)
        comm.send(torch.ones(TEN_SEGMENTS), 0)
    with pytest.raises(PeerLost) as raised:
        comm.recv(torch.zeros(TEN_SEGMENTS), 1)
    return str(raised.value)


@pytest.mark.parametrize("published", [0, 3])
def test_the_error_names_the_item_that_did_not_come(published):
    with Ranks(_killed_sender, 2, published + 1) as ranks:
        (outcome,) = ranks.wait(LONG_S / 2, [0])
    assert outcome.ok, outcome.describe()
    assert f" s at item {published})" in outcome.value


def test_what_a_sender_took_back_is_not_received():
    """The sender times out and changes its buffer before the receiver reads the buffer."""
    got = torch.zeros(20_000)

    def body(comm):
        if comm.rank == 1:
            with pytest.raises(RingcommError, match=r"waited .* for rank 1"):
                comm.recv(got, 0)
            return
        while _native.fault_passages()["await"] == 0:  # rank 1 sleeps before it looks
            time.sleep(0.001)
        comm.timeout = SHORT_S / 4
        mine = ringcomm.zeros(20_000)
        with pytest.raises(CollectiveTimeout):
            comm.send(mine, 1)
        mine.fill_(99)

    with ringcomm.local_world(2, timeout=LONG_S) as world:
        _native.arm_fault("delay", passage=1, seconds=SHORT_S, rank=1)
        try:
            world.run(body)
        finally:
            _native.disarm_fault()
    # This shows that the receiver has read memory that was no longer lent.
    assert torch.equal(got, torch.full((20_000,), 99.0))
