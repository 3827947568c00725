# SPDX-License-Identifier: Apache-2.0
"""Ranks in processes hand each other the multicast object.

Separate from ``test_multicast.py``, since ranks are forks of a server that has imported ringcomm.
"""

from typing import cast

import pytest
import torch

import ringcomm
from ringcomm import Communicator, PeerLost
from ringcomm.comm.device.launch import DeviceCallEngine
from tests.proof.ptx.multicast_job import MULTICAST, every_call, multicast_kernels
from tests.proof.ptx.test_multicast import WITH_WINDOW
from tests.support import nvrtc
from tests.support.device_worlds import Devices, on_host
from tests.support.emulator.library import library
from tests.support.faults import die
from tests.support.ranks import Ranks, run_ranks

pytestmark = pytest.mark.skipif(nvrtc.library_path() is None, reason="no NVRTC")


MARK = b"\x5a" * 64
COUNT = 560  # whole vectors, so the end of a tensor is aligned


def _grown(comm):
    """All-reduces a tensor of a new chunk in place, and checks that no window is written."""
    core = cast(DeviceCallEngine, comm.engine).device_core
    window = core._window
    before = core.heap.memory.committed_bytes
    tensor = ringcomm.zeros(1 << 20, device="cuda")[-COUNT:-5]
    assert core.heap.memory.committed_bytes == window.bound_heap_bytes > before
    comm.barrier()
    core.runtime.synchronize(core.device)
    core.runtime.write(core.device, window.own_ptr, MARK)
    tensor.copy_(torch.arange(COUNT - 5.0) * (comm.rank + 1))
    comm.all_reduce(tensor, algorithm=MULTICAST)
    assert torch.equal(on_host(tensor), torch.arange(COUNT - 5.0) * 3)
    assert core.runtime.read(core.device, window.own_ptr, len(MARK)) == MARK


def _process(store, rank, world):
    kernels = multicast_kernels(strict=False)
    devices = Devices("emulated", devices=1, physical=(rank,), ptx=kernels)
    with (
        Communicator.from_store(store, rank, world, device="cuda:0", options=WITH_WINDOW) as comm,
        devices.as_on_gpu(comm),
    ):
        _grown(comm)
        every_call(comm, torch.float32, ("mixed",))
    # Memory that a rank lent is freed when its peer has closed, too.
    store.set(f"closed/{rank}", "")
    store.wait([f"closed/{each}" for each in range(world)])
    devices.close()
    return library().emu_vmm_in_use()


def test_ranks_in_processes_hand_each_other_the_object():
    assert run_ranks(_process, 2, timeout_s=100.0) == [0, 0]


def _survivor(store, rank, world):
    kernels = multicast_kernels(strict=False)
    devices = Devices("emulated", devices=1, physical=(rank,), ptx=kernels)
    with (
        Communicator.from_store(store, rank, world, device="cuda:0", options=WITH_WINDOW) as comm,
        devices.as_on_gpu(comm),
    ):
        kept = [ringcomm.zeros(1 << 20, device="cuda")]
        comm.all_reduce(kept[0][-COUNT:], algorithm=MULTICAST)
        on_host(kept[0])
        if rank == 1:
            die()
        with pytest.raises(PeerLost, match="rank 1"):
            while True:
                comm.barrier()
                devices.runtime.synchronize(0)
        kept.clear()
    devices.close()
    return library().emu_vmm_in_use()


def test_a_peer_that_dies_while_its_heap_is_bound():
    """The survivor's call ends, and its close() frees everything."""
    with Ranks(_survivor, 2) as ranks:
        survivor, dead = ranks.wait(100.0)
    assert survivor.ok and survivor.value == 0, survivor.describe()
    assert not dead.ok
