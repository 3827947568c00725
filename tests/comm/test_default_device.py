# SPDX-License-Identifier: Apache-2.0
"""Default groups and their sub-groups on a device: which device they use, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as torch_dist

import ringcomm as dist
from ringcomm import ArgumentError, cuda
from ringcomm.memory import device_heap
from tests.support.emulator import EmulatedRuntime
from tests.support.emulator.library import COMPILER

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


class TwoDevices(EmulatedRuntime):
    """Reports its devices as torch's CUDA devices, as a runtime for GPUs does."""

    def torch_device(self, device: int) -> torch.device:
        return torch.device("cuda", device)


@pytest.fixture
def runtime(monkeypatch) -> Iterator[EmulatedRuntime]:
    monkeypatch.setenv("RINGCOMM_CUDA_HEAP_BYTES", "16M")
    runtime = TwoDevices(devices=2, memory_bytes=64 << 20)
    before = cuda.use(runtime)
    yield runtime
    if dist.is_initialized():
        dist.destroy_process_group()
    device_heap.close_heaps()
    cuda.use(before)


def start(**arguments: object) -> None:
    store = torch_dist.HashStore()
    dist.init_process_group(store=store, rank=0, world_size=1, **arguments)  # type: ignore[arg-type]


def device_of_the_group() -> int:
    return dist.new_group().heap_device.index


@pytest.mark.parametrize("device_id", [1, "cuda:1", torch.device("cuda:1")])
def test_a_group_is_on_the_device_that_it_is_given(runtime, device_id):
    start(device_id=device_id)
    assert device_of_the_group() == 1
    dist.barrier()


def test_a_backend_may_name_the_current_device(runtime):
    with runtime.on_device(1):
        start(backend="cuda:ringcomm")
    assert device_of_the_group() == 1


@pytest.mark.parametrize(
    "arguments",
    [
        {"device_id": 2},
        {"device_id": "cuda:7"},
        {"device_id": "cuda:0", "backend": "cpu:ringcomm"},
        {"device_id": "cpu", "backend": "cuda:ringcomm"},
        {"device_id": "meta"},
    ],
)
def test_a_device_that_is_not_there_or_not_of_the_backend_is_refused(runtime, arguments):
    with pytest.raises(ArgumentError, match="init_process_group: device"):
        start(**arguments)
    assert not dist.is_initialized() and not runtime.allocated()


def test_sub_groups_are_where_their_parent_is(runtime):
    start()
    assert dist.new_group(device_id="cpu", backend="cpu:ringcomm").device.type == "cpu"
    for backend in ("cuda:ringcomm", "gloo"):
        with pytest.raises(ArgumentError, match="new_group: backend"):
            dist.new_group(backend=backend)
    dist.destroy_process_group()
    start(device_id=0)
    dist.new_group(device_id=0)
    with pytest.raises(ArgumentError, match="new_group on rank 0 of 1: device_id: expected None"):
        dist.new_group(device_id=1)


def test_a_barrier_takes_the_device_of_its_group(runtime):
    start()
    with pytest.raises(ArgumentError, match="device_ids: expected None on CPU"):
        dist.barrier(device_ids=[0])
    dist.destroy_process_group()
    start(device_id=1)
    dist.barrier(device_ids=[1])
    with pytest.raises(ArgumentError, match=r"device_ids: expected None or \[1\], got \[0\]"):
        dist.barrier(device_ids=[0])
