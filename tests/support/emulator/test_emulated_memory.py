# SPDX-License-Identifier: Apache-2.0
"""Memory of emulated devices is counted, mapped by other processes only, and has a device."""

from __future__ import annotations

import sys
import threading
import time

import pytest
import torch

from ringcomm.errors import UnsupportedError
from tests.support.emulator import DriverError, EmulatedRuntime
from tests.support.emulator.library import COMPILER
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

MIB = 1 << 20


def test_memory_is_counted_and_freed_once():
    runtime = EmulatedRuntime(devices=2, memory_bytes=8 * MIB)
    ptr = runtime.allocate(1, 6 * MIB)
    assert runtime.read(1, ptr + 5 * MIB, 4) == bytes(4)
    assert runtime.memory_info(1) == (2 * MIB, 8 * MIB)
    assert runtime.memory_info(0) == (8 * MIB, 8 * MIB)
    with pytest.raises(MemoryError):
        runtime.allocate(1, 3 * MIB)
    runtime.write(1, ptr, b"abc")
    tensor = runtime.tensor(1, ptr, MIB, None)
    assert bytes(tensor[:3].tolist()) == b"abc"
    assert (runtime.device_of(tensor), runtime.device_of(tensor[7:])) == (1, 1)
    assert runtime.device_of(torch.zeros(3)) == 0
    with runtime.assuming(1):
        assert runtime.is_device_tensor(torch.zeros(3), 1)
    with runtime.assuming(None):
        assert runtime.device_of(torch.zeros(3)) is None
    del tensor
    runtime.free(1, ptr)
    with pytest.raises(DriverError):
        runtime.free(1, ptr)
    assert runtime.allocated() == []


def test_a_tensor_keeps_its_owner():
    runtime = EmulatedRuntime()
    ptr, owner = runtime.allocate(0, MIB), threading.Event()
    references = sys.getrefcount(owner)
    tensor = runtime.tensor(0, ptr, MIB, owner)
    view = tensor[10:].view(torch.uint8)
    del tensor
    assert sys.getrefcount(owner) == references + 1
    del view
    assert sys.getrefcount(owner) == references


def _share(store, rank, world):
    runtime = EmulatedRuntime()
    mine = runtime.allocate(0, MIB)
    runtime.write(0, mine, bytes([rank + 1]))
    handle = runtime.export_handle(0, mine)
    assert len(handle) == 64
    store.set(f"handle/{rank}", handle.hex())
    with pytest.raises(UnsupportedError, match="invalid device context"):
        runtime.open_handle(0, handle)
    peer = runtime.open_handle(0, bytes.fromhex(store.get(f"handle/{1 - rank}").decode()))
    seen = runtime.read(0, peer, 1)[0]
    runtime.write(0, peer + 1, bytes([40 + rank]))
    store.add("written", 1)
    while store.add("written", 0) < world:
        time.sleep(0.001)
    told = runtime.read(0, mine + 1, 1)[0]
    with pytest.raises(DriverError):
        runtime.free(0, peer)
    runtime.close_handle(0, peer)
    with pytest.raises(DriverError):
        runtime.close_handle(0, peer)
    runtime.free(0, mine)
    return seen, told


def test_other_processes_map_memory():
    assert run_ranks(_share, 2) == [(2, 41), (1, 40)]


def test_peer_access_between_devices():
    runtime = EmulatedRuntime(devices=2, unreachable=frozenset({(1, 0)}))
    runtime.enable_peer(0, 1)
    assert runtime.peers == {(0, 1)}
    with pytest.raises(UnsupportedError, match="no peer access from 1 to 0"):
        runtime.enable_peer(1, 0)


def test_identities_are_those_of_the_gpus():
    one, two = EmulatedRuntime(devices=2, physical=(3, 1)), EmulatedRuntime(physical=(1,))
    assert one.identity(1).uuid == two.identity(0).uuid != one.identity(0).uuid
    assert one.identity(1).pci_bus_id == two.identity(0).pci_bus_id == "0000:11:00.0"
