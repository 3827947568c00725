# SPDX-License-Identifier: Apache-2.0
"""Recorders of devices with different sizes, recorders that cannot be mapped, and forged ones."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

import ringcomm
from ringcomm import MismatchError, RingcommError
from ringcomm.cli.trace import report
from ringcomm.comm.device import core as recorder
from ringcomm.errors import RendezvousError, UnsupportedError
from ringcomm.memory import host_heap
from tests.support.device_worlds import with_options


def test_the_number_of_records_is_equal_on_all_ranks(devices):
    store, errors = torch.distributed.HashStore(), []

    def rank(index):
        try:
            ringcomm.Communicator.from_store(
                store, index, 2, device="cuda:0", options=with_options(records=8 * (index + 1))
            )
        except RingcommError as error:
            errors.append(error)

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert any(isinstance(error, MismatchError) for error in errors)
    assert any("records=8" in str(error) and "records=16" in str(error) for error in errors)


def test_a_recorder_that_cannot_be_mapped_is_missing_and_said_to_be(devices, monkeypatch):
    """The communicator works: the driver maps device memory, and the kernel only the recorder."""
    real = host_heap.map_heap

    def refuses(address, own, operation):
        if address.rank == 1:
            raise UnsupportedError("not this one")
        return real(address, own, operation)

    monkeypatch.setattr(recorder, "map_heap", refuses)
    world = devices.new_world(2)
    tensors = [torch.ones(64, device=comm.device) for comm in world]
    world.all_reduce(tensors)
    recorded = world[0].recording()
    assert [each.rank for each in recorded.ranks] == [0]
    assert "no recorder of rank 1 could be read" in report(recorded, 0)
    devices.runtime.synchronize(0)
    world.close()


@pytest.mark.parametrize("wrong", ["odd", "outside", "at the header"])
def test_a_recorder_that_cannot_be_where_it_is_said_to_be_is_refused(devices, monkeypatch, wrong):
    real = vars(recorder.DeviceRecorder)["address"].fget

    def forged(recorder):
        address = real(recorder)
        offsets = {
            "odd": address.offset_bytes + 1,
            "outside": address.capacity_bytes - 64,
            "at the header": 0,
        }
        return replace(address, offset_bytes=offsets[wrong])

    monkeypatch.setattr(recorder.DeviceRecorder, "address", property(forged))
    with pytest.raises(RendezvousError, match="announced a flight recorder of"):
        devices.new_world(1)
