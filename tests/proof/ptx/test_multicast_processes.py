"""Ranks in processes hand each other the multicast object.

Apart from ``test_multicast.py``: ranks are forks of a server that has imported all of ringcomm.
"""

import pytest
import torch

from ringcomm import Communicator
from tests.proof.ptx.multicast_job import every_call, multicast_kernels
from tests.proof.ptx.test_multicast import WITH_WINDOW
from tests.support import nvrtc
from tests.support.device_worlds import Devices
from tests.support.emulator.library import library
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.skipif(nvrtc.library_path() is None, reason="no NVRTC")


def _process(store, rank, world):
    kernels = multicast_kernels(strict=False)
    devices = Devices("emulated", devices=1, physical=(rank,), ptx=kernels)
    with (
        Communicator.from_store(store, rank, world, device="cuda:0", options=WITH_WINDOW) as comm,
        devices.as_on_gpu(comm),
    ):
        every_call(comm, torch.float32, ("mixed",))
    # What a rank has lent comes back when its peer has closed, too.
    store.set(f"closed/{rank}", "")
    store.wait([f"closed/{each}" for each in range(world)])
    devices.close()
    return library().emu_vmm_in_use()


def test_ranks_in_processes_hand_each_other_the_object():
    assert run_ranks(_process, 2, timeout_s=100.0) == [0, 0]
