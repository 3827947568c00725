# SPDX-License-Identifier: Apache-2.0
"""Which communicator serves a process group's call, as seen in the calls that stand-ins record."""

import datetime
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.distributed_c10d import (
    AllreduceOptions,
    BarrierOptions,
    _get_object_coll_device,
)

from ringcomm import cuda
from ringcomm.c10d.communicators import Communicators
from ringcomm.errors import AbortedError, ArgumentError, UnsupportedError
from tests.c10d.stand_ins import OPTIONS, TIMEOUT, NotedGroup, on_device

Make = Callable[..., torch.Tensor]


def pair(make: Make) -> list[torch.Tensor]:
    return [make(2), make(2)]


# By the communicator's method that must be called, the call of the group.
CALLS: dict[str, Callable[[Any, Make], Any]] = {
    "all_reduce": lambda group, make: group.allreduce([make(4)]),
    "broadcast": lambda group, make: group.broadcast([make(4)], root=0),
    "reduce": lambda group, make: group.reduce([make(4)], root=0),
    "all_gather": lambda group, make: group.allgather([pair(make)], [make(2)]),
    "all_gather_into_tensor": lambda group, make: group.all_gather_single(make(4), make(2)),
    "gather": lambda group, make: group.gather([pair(make)], [make(2)], root=1),
    "scatter": lambda group, make: group.scatter([make(2)], [pair(make)], root=1),
    "reduce_scatter": lambda group, make: group.reduce_scatter([make(2)], [pair(make)]),
    "reduce_scatter_tensor": lambda group, make: group.reduce_scatter_single(make(2), make(4)),
    "all_to_all": lambda group, make: group.alltoall(pair(make), pair(make)),
    "all_to_all_single": lambda group, make: group.all_to_all_single(make(4), make(4), [], []),
    "all_reduce_coalesced": lambda group, make: group.allreduce_coalesced(pair(make)),
    "all_gather_coalesced": lambda group, make: group.all_gather_single_coalesced(
        [make(4)], [make(2)]
    ),
    "reduce_scatter_coalesced": lambda group, make: group.reduce_scatter_single_coalesced(
        [make(2)], [make(4)]
    ),
    "isend": lambda group, make: group.send([make(4)], 0, 3),
    "irecv": lambda group, make: group.recv([make(4)], 0, 3),
}


@pytest.mark.parametrize("method", CALLS)
def test_a_call_goes_where_its_tensors_are(method):
    noted = NotedGroup()
    CALLS[method](noted.group, torch.empty).wait()
    assert noted.host.methods == [method] and not noted.devices
    CALLS[method](noted.group, on_device).wait()
    CALLS[method](noted.group, lambda *shape: on_device(*shape, device=3)).wait()
    CALLS[method](noted.group, on_device).wait()
    assert noted.host.methods == [method]
    assert [device.methods for device in noted.devices] == [[method, method], [method]]


def test_several_calls_as_one_go_where_their_tensors_are():
    noted = NotedGroup()
    lists = [[on_device(2)], [on_device(2)]]
    noted.group.allgather_coalesced(lists, [on_device(2)]).wait()
    assert noted.devices[0].methods == ["all_gather_lists_coalesced"] and not noted.host.calls
    opts = AllreduceOptions()
    opts.timeout = datetime.timedelta(seconds=3)
    noted.group.allreduce([on_device(2)], opts).wait()
    assert noted.devices[0].calls[1] == ("submit", ("all_reduce", opts.timeout))


def test_a_device_is_connected_once_with_what_the_group_has():
    noted = NotedGroup()
    for device in (5, 2, 5):
        noted.group.allreduce([on_device(4, device=device)])
    common = {"options": replace(OPTIONS, timeout=TIMEOUT)}
    assert noted.connected == [
        {"name": "group/device0", "device": torch.device("cuda:5"), **common},
        {"name": "group/device1", "device": torch.device("cuda:2"), **common},
    ]
    assert noted.group.communicator is noted.host
    noted.group.set_timeout(datetime.timedelta(seconds=5))
    everyone: list[Any] = [noted.host, *noted.devices]
    assert [each.timeout.total_seconds() for each in everyone] == [5, 5, 5]
    assert noted.group.communicator_on("cpu") is noted.host


@pytest.mark.parametrize(
    ("method", "mixed"),
    [
        ("all_gather_single", (torch.empty(4), on_device(2))),
        ("all_gather_single", (on_device(4), torch.empty(2))),
        ("allgather", ([[on_device(2), torch.empty(2)]], [on_device(2)])),
        ("alltoall", ([torch.empty(2), torch.empty(2)], [torch.empty(2), on_device(2)])),
        ("allreduce_coalesced", ([torch.empty(2), on_device(2)],)),
    ],
)
def test_tensors_of_several_devices_are_refused(method, mixed):
    noted = NotedGroup()
    with pytest.raises(ArgumentError, match=rf"{method} on rank 1 of 2: .* on cpu and meta; copy"):
        getattr(noted.group, method)(*mixed)
    assert not noted.connected and not noted.host.calls


def test_two_devices_in_one_call_are_refused():
    noted = NotedGroup()
    with pytest.raises(ArgumentError, match="all_to_all_single on rank 1 of 2: expected tensors"):
        noted.group.all_to_all_single(on_device(4), on_device(4, device=1), [], [])
    assert not noted.connected


def test_devices_of_other_kinds_are_refused():
    noted = NotedGroup(Communicators)
    with pytest.raises(ArgumentError, match="of the CPU or of a GPU, got one on meta"):
        noted.group.allreduce([torch.empty(4, device="meta")])
    with pytest.raises(UnsupportedError, match="No backend type associated with device type xpu"):
        noted.group._get_backend(torch.device("xpu"))
    assert not noted.group.supports_tensor_alloc("xpu")
    assert noted.group.supports_tensor_alloc("cuda:1")


def test_objects_stay_on_the_host():
    group = NotedGroup().group
    assert _get_object_coll_device(group) == "cpu"
    assert group._get_backend(torch.device("cuda")) is group


# ---- works ------------------------------------------------------------------------------------


def asynchronous(is_async: bool) -> AllreduceOptions:
    opts = AllreduceOptions()
    opts.asyncOp = is_async
    return opts


def test_an_asynchronous_call_waits_for_the_work_of_its_device():
    noted = NotedGroup()
    tensor = on_device(4)
    work = noted.group.allreduce([tensor], asynchronous(True))
    inner = noted.devices[0].works[0]
    assert not inner.waits
    work.wait()
    # torch's C++ code passes zero if there is no timeout.
    work.wait(datetime.timedelta(0))
    work.wait(datetime.timedelta(seconds=2))
    assert inner.waits == [None, None, datetime.timedelta(seconds=2)]
    assert work.result() == [tensor]


def test_a_synchronous_call_leaves_nothing_to_wait_for():
    noted = NotedGroup()
    work = noted.group.allreduce([on_device(4)], asynchronous(False))
    assert work.is_completed() and work.wait() and not noted.devices[0].works


# ---- barriers ---------------------------------------------------------------------------------


class NotCapturing:
    def is_capturing(self, device: int) -> bool:
        return False


@pytest.fixture
def runtime():
    before = cuda.use(NotCapturing())  # type: ignore[arg-type]
    yield
    cuda.use(before)


def barrier_options(**fields: Any) -> BarrierOptions:
    opts = BarrierOptions()
    opts.asyncOp = False
    for name, value in fields.items():
        setattr(opts, name, value)
    return opts


def test_a_barrier_is_on_the_host_unless_a_device_is_meant(runtime):
    noted = NotedGroup()
    noted.group.barrier(barrier_options())
    noted.group.barrier(barrier_options(device=torch.device("cpu")))
    noted.group.barrier(barrier_options(device=torch.device("cpu", 0), device_ids=[0]))
    noted.group.allreduce([on_device(2)])
    noted.group.barrier(barrier_options())
    assert noted.host.calls == [("barrier", (False,))] * 4
    noted.group.barrier(barrier_options(device=torch.device("cuda:2"), device_ids=[2]))
    noted.group.barrier(barrier_options(device_ids=[2]))
    assert noted.devices[1].calls == [("barrier", (True,))] * 2
    assert noted.connected[1]["device"] == torch.device("cuda:2")


def test_a_bound_device_takes_the_barriers(runtime):
    noted = NotedGroup()
    found = []
    for device in (torch.device("cpu"), None, torch.device("cuda:1")):
        noted.group.eager_connect_single_device(device)
        found.append(noted.group.bound_device_id)
    assert found == [None, None, torch.device("cuda:1")] and len(noted.connected) == 1
    assert noted.connected[0]["device"] == torch.device("cuda:1")
    noted.group.barrier(barrier_options())
    assert noted.devices[0].methods == ["barrier"] and not noted.host.calls


def test_a_barrier_on_a_device_blocks_its_caller(runtime):
    noted = NotedGroup()
    limit = datetime.timedelta(seconds=3)
    noted.group.barrier(barrier_options(device_ids=[0]))
    noted.group.barrier(barrier_options(device_ids=[0], timeout=limit))
    called = [("barrier", (True,)), ("submit", ("barrier", limit)), ("barrier", ())]
    assert noted.devices[0].calls == called
    waits = [work.waits[0] for work in noted.devices[0].works]
    # Longer than the barrier's own timeout, so that its kernel can give up and report why.
    noted_timeout = noted.devices[0].timeout
    assert noted_timeout < waits[0] < noted_timeout + datetime.timedelta(minutes=1)
    assert limit < waits[1] < limit + datetime.timedelta(minutes=1)


# ---- the end ----------------------------------------------------------------------------------


def test_an_end_is_one_of_all_communicators():
    noted = NotedGroup()
    for device in (0, 1):
        noted.group.allreduce([on_device(2, device=device)])
    noted.group.shutdown()
    assert [each.methods[-1] for each in (noted.host, *noted.devices)] == ["close"] * 3


def test_one_that_cannot_be_closed_keeps_no_other_open():
    noted = NotedGroup()
    noted.group.allreduce([on_device(2)])

    def fail() -> None:
        raise UnsupportedError("stays")

    vars(noted.devices[0])["close"] = fail
    with pytest.raises(UnsupportedError, match="stays"):
        noted.group.shutdown()
    assert noted.host.methods[-1] == "close"


def test_an_aborted_group_connects_no_device_any_more():
    noted = NotedGroup()
    noted.group.allreduce([on_device(2)])
    noted.group.abort()
    assert noted.host.aborted and noted.devices[0].aborted
    with pytest.raises(AbortedError, match="allreduce on rank 1 of 2: the process group was"):
        noted.group.allreduce([on_device(2, device=1)])
    assert len(noted.connected) == 1
