"""How many calls of the native end a collective on a device makes."""

from collections import Counter
from typing import Any

import pytest
import torch

from ringcomm.comm.device import launch, sharing


class Counted:
    """A native end that counts the calls of its methods."""

    def __init__(self, native: Any) -> None:
        object.__setattr__(self, "native", native)
        object.__setattr__(self, "calls", Counter())

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.native, name)
        if not callable(found):
            return found

        def call(*args: Any) -> Any:
            self.calls[name] += 1
            return found(*args)

        return call

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.native, name, value)


def calls_of(comm: Any, call: Any) -> Counter[str]:
    """Returns the native calls that a call makes."""
    core = comm.engine.device_core
    core.native = counted = Counted(core.native)
    try:
        call()
    finally:
        core.native = counted.native
    return counted.calls


def all_reduce(devices: Any, comm: Any) -> None:
    with devices.as_on_gpu(comm):
        tensor = torch.ones(64, device=comm.device)
        comm.all_reduce(tensor)
        assert tensor.tolist() == [1.0] * 64


@pytest.fixture(autouse=True)
def taken(monkeypatch):
    """The launches that Python makes, as how many ranks each carries."""
    made = []

    def launch_counted(prepared, stream):
        natives = [getattr(each, "native", each) for each in prepared]
        made.append(len(natives))
        sharing.launch_prepared(natives, stream)

    monkeypatch.setattr(launch, "launch_prepared", launch_counted)
    return made


def test_an_all_reduce_of_the_only_rank_is_one_native_call(devices):
    with devices.new_world(1) as (comm,):
        assert calls_of(comm, lambda: all_reduce(devices, comm)) == {"all_reduce": 1}
        assert calls_of(comm, comm.barrier) == {"barrier": 1}


def test_communicators_that_share_a_device_take_launches_over(devices, taken):
    with devices.new_world(1) as (comm,), devices.new_world(1) as (other,):
        first = calls_of(comm, lambda: all_reduce(devices, comm))
        assert first == {"all_reduce": 1, "set_submit": 1} and taken == [1]
        assert calls_of(other, other.barrier) == {"barrier": 1, "set_submit": 1}
        assert calls_of(comm, comm.barrier) == {"barrier": 1} and taken == [1, 1, 1]
        other.close()
        assert calls_of(comm, comm.barrier) == {"barrier": 1, "set_submit": 1}
        assert calls_of(comm, comm.barrier) == {"barrier": 1} and taken == [1, 1, 1]


def test_launches_that_pass_through_python_are_seen(devices, monkeypatch):
    """The mutant: a communicator that has the device for itself takes its launches over."""
    monkeypatch.setattr(sharing.DeviceOrder, "is_shared", True)
    with devices.new_world(1) as (comm,):
        assert calls_of(comm, comm.barrier) != {"barrier": 1}
