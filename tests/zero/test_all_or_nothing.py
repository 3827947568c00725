# SPDX-License-Identifier: Apache-2.0
"""A ``shard()`` that fails leaves the module and the heap as they were."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ringcomm
from ringcomm import zero
from ringcomm.errors import ArgumentError, CollectiveTimeout, HeapError, RingcommError
from ringcomm.optim import AdamW
from ringcomm.zero.stages import sharding
from ringcomm.zero.stages import sharding as prepare
from ringcomm.zero.stages.buckets import ParamBucket, ReplicatedBucket, ShardedBucket
from ringcomm.zero.stages.sharding import Rollback
from tests.support.covering import covering, in_test_all
from tests.support.faults import leaving_together
from tests.support.heap_use import settled_heap_bytes
from tests.zero.models import assert_same_bits

Tensor = torch.Tensor
STAGES = [1, 3, *in_test_all(0, 2)]
OPTIONS = zero.ZeroOptions(
    bucket_elems=512,
    precision=zero.Precision(param=torch.bfloat16, buffer=torch.bfloat16),
)


class Mixed(nn.Module):
    """Every kind of tensor, with different values on each rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.layers[2].bias = self.layers[0].bias
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.loose = nn.Parameter(torch.ones(3, dtype=torch.float64), requires_grad=False)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("positions", torch.zeros(3).expand(2, -1))
        with torch.no_grad():
            for number, each in enumerate((*self.parameters(), *self.buffers())):
                if 0 not in each.stride():
                    each.copy_(torch.linspace(rank, number + 1, each.numel()).view_as(each))
        turned: Any = self.layers[1]
        turned.weight.data = turned.weight.data.t()


def known(module: nn.Module) -> dict[str, Any]:
    """Returns all that must stay: values by name, and the identity and layout of each tensor."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {
        "values": {name: each.detach().clone() for name, each in tensors.items()},
        "tensors": {
            name: (id(each), type(each), each.data_ptr(), each.dtype, each.device, each.stride())
            for name, each in tensors.items()
        },
        "hooks": [
            (
                type(each._parameters),
                len(each._forward_hooks),
                len(each._forward_pre_hooks),
                len(each._state_dict_pre_hooks),
                sorted(vars(each)),
            )
            for each in module.modules()
        ],
        "gradients": [each._post_accumulate_grad_hooks or {} for each in module.parameters()],
    }


def same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert_same_bits(found["values"], wanted["values"])
    for key in ("tensors", "hooks", "gradients"):
        assert found[key] == wanted[key]


class Broken(RuntimeError):
    """An error that the tests raise on purpose."""


def is_last(bucket: ParamBucket) -> bool:
    return bucket.params[-1].name == "layers.2.weight"


# Where the failing function is, its name, which calls fail, whether after their work, and how.
FAILURES: dict[str, tuple[list[Any], str, Callable[..., bool], bool, Exception]] = {
    "no room on rank 1": (
        [sharding],
        "make_bucket",
        lambda parts, plan, number: parts.comm.rank == 1 and number == 2,
        False,
        HeapError("no room"),
    ),
    "a later unit": (
        [ReplicatedBucket, ShardedBucket],
        "take",
        lambda bucket, *_, **__: is_last(bucket),
        True,
        Broken("on purpose"),
    ),
    "the buffers": ([sharding], "settle_rest", lambda *_: True, True, Broken("on purpose")),
    "the hooks of rank 1": (
        [sharding],
        "hook_modules",
        lambda engine, _: engine.comm.rank == 1,
        True,
        Broken("on purpose"),
    ),
}


def break_it(patch: pytest.MonkeyPatch, failure: str) -> type[Exception]:
    """Makes ``shard()`` fail; returns the error type on ranks where another rank failed."""
    owners, name, is_time, is_done, error = FAILURES[failure]
    for owner in owners:
        patch.setattr(owner, name, failing(getattr(owner, name), is_time, is_done, error))
    return type(error) if isinstance(error, HeapError) else RingcommError


def failing(
    real: Callable[..., Any], is_time: Callable[..., bool], is_done: bool, error: Exception
) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if not is_time(*args, **kwargs):
            return real(*args, **kwargs)
        if is_done:
            real(*args, **kwargs)
        raise type(error)(*error.args)

    return call


@covering(strength=1, stage=range(4), failure=[*FAILURES])
def test_a_module_is_as_it_was(worlds, monkeypatch, stage, failure):
    def work(comm):
        module = Mixed(comm.rank)
        before = known(module)
        with pytest.raises(Exception) as raised:
            zero.shard(module, stage, comm=comm, options=OPTIONS)
        same(known(module), before)
        comm.barrier()
        used = ringcomm.heap_stats()["used_bytes"]
        comm.barrier()
        return module, raised, used

    worlds(3).run(lambda comm: zero.remove_sharding(zero.shard(Mixed(0), stage, comm=comm)))
    used = settled_heap_bytes()
    with monkeypatch.context() as patch:
        others = break_it(patch, failure)
        ends = worlds(3).run(work)
    # The memory is free even while the errors and their tracebacks exist.
    assert [each for _, _, each in ends] == [used] * 3
    own = type(FAILURES[failure][-1])
    for rank, (_, raised, _) in enumerate(ends):
        if "rank 1" not in failure or rank == 1:
            assert raised.type is own
        else:
            assert raised.type is others
            assert "rank 1 of 3 failed, so no rank goes on: " in str(raised.value)
            assert raised.value.repeats
    modules = [module for module, _, _ in ends]
    again = worlds(3).run(_trained, modules, stage)
    fresh = worlds(3).run(_trained, [Mixed(rank) for rank in range(3)], stage)
    for mine, theirs in zip(again, fresh, strict=True):
        assert_same_bits(mine, theirs)


def _trained(comm, modules, stage):
    module: Any = zero.shard(modules[comm.rank], stage, comm=comm, options=OPTIONS)
    optimizer = AdamW([each for each in module.parameters() if each.requires_grad])
    x = torch.full((2, 6), 1.0 + comm.rank, dtype=torch.bfloat16)
    for layer in module.layers:
        x = layer(x)
    x.square().sum().backward()
    optimizer.step()
    return zero.full_state_dict(module)


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_not_put_back_is_seen(worlds, monkeypatch, stage):
    """Negative control: the checks notice each undo action of the rollback that is left out."""
    missed: set[str] = set()
    real = Rollback.call

    def forget(before: Rollback, undo: Callable[..., object], *args: Any) -> None:
        missed.add(undo.__name__)
        if undo.__name__ != forgotten:
            real(before, undo, *args)

    def work(comm):
        module = Mixed(comm.rank)
        before = known(module)
        with pytest.raises(RingcommError if comm.rank != 1 else Broken):
            zero.shard(module, stage, comm=comm, options=OPTIONS)
        try:
            same(known(module), before)
        except (AssertionError, ArgumentError, RuntimeError):  # raised by resharded parameters
            return True
        return False

    break_it(monkeypatch, "the hooks of rank 1")
    monkeypatch.setattr(Rollback, "call", forget)
    forgotten = "nothing"
    assert worlds(3).run(work) == [False] * 3
    # tests/zero/checkpoint/test_pretrained.py covers unshow(): shown parameters cannot be swapped.
    unseen = {"give_back", "unshow"} if stage < 2 else {"give_back", "unshow", "leave"}
    seen = {"_put_back", "copy_", "__setitem__", "close", "forget_engine", "restore_params"}
    assert missed == {*seen, *unseen}
    for forgotten in sorted(missed - unseen):
        # Rank 0's values do not change, because the other ranks receive them.
        assert worlds(3).run(work)[1:] == [True] * 2, forgotten


def test_heap_memory_that_is_not_given_back_is_seen(worlds, monkeypatch):
    """Negative control: heap memory that only tracebacks refer to counts as in use."""

    def work(comm):
        with pytest.raises(Broken) as raised:
            zero.shard(Mixed(comm.rank), 1, comm=comm, options=OPTIONS)
        return raised

    used = settled_heap_bytes()
    break_it(monkeypatch, "a later unit")
    monkeypatch.setattr(ReplicatedBucket, "give_back", lambda bucket: None)
    errors = worlds(2).run(work)
    assert ringcomm.heap_stats()["used_bytes"] > used
    del errors
    gc.collect()


@pytest.mark.parametrize("stage", [3, *in_test_all(1)])
def test_a_rank_that_is_lost_meanwhile(stage):
    """If a rank is lost during shard(), the other ranks time out with their modules unchanged."""

    def work(comm):
        module = Mixed(comm.rank)
        before = known(module)
        with pytest.raises(Broken if comm.rank == 1 else CollectiveTimeout):
            zero.shard(module, stage, comm=comm, options=OPTIONS)
        same(known(module), before)
        return True

    with pytest.MonkeyPatch.context() as patch, ringcomm.local_world(2, timeout=1.0) as world:
        real = prepare._values

        def leave(parts, unit, *rest):
            if unit.name == "layers.1" and parts.comm.rank == 1:
                raise Broken("on purpose")
            return real(parts, unit, *rest)

        patch.setattr(prepare, "_values", leave)
        assert world.run(leaving_together(work, 2)) == [True, True]


@pytest.mark.parametrize("stage", STAGES)
def test_what_was_on_the_meta_device_goes_back_there(worlds, stage):
    with torch.device("meta"):
        modules: list[Any] = [
            nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)) for _ in range(2)
        ]
    for module in modules:
        module[2].weight = module[0].weight
        # init() fills this parameter together with the bias beside it, which is on the meta device.
        module[2].register_parameter("filled", nn.Parameter(torch.full((3,), 2.0)))

    def init(module):
        for each in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            with torch.no_grad():
                each.fill_(1.0)

    def refuse(module):
        init(module)
        if "filled" in module._parameters:
            raise Broken("on purpose")

    def work(comm):
        module = modules[comm.rank]
        filled = module[2].filled
        before = {name: each.device for name, each in module.state_dict().items()}
        ids = [id(each) for each in module.parameters()]
        with pytest.raises(Broken):
            zero.shard(module, stage, comm=comm, init=refuse)
        assert [id(each) for each in module.parameters()] == ids
        assert {name: each.device for name, each in module.state_dict().items()} == before
        assert module[0].weight is module[2].weight
        assert module[2].filled is filled
        assert filled.tolist() == [2.0] * 3
        zero.shard(module, stage, comm=comm, init=init)
        found = zero.full_state_dict(module)
        return all((each == 1).all() for each in found.values())

    assert worlds(2).run(work) == [True, True]
