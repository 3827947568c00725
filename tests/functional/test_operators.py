# SPDX-License-Identifier: Apache-2.0
"""``torch.ops.ringcomm``: opcheck, symbolic shapes, and the keys that identify groups."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.library import opcheck

import ringcomm
from ringcomm import ArgumentError, Communicator, RingcommError
from ringcomm import functional as F
from ringcomm.functional import collectives as traced_groups

ops = torch.ops.ringcomm
# The arguments between the tensor and the group.
ARGUMENTS = (
    ("all_gather", ()),
    ("all_reduce", ("AVG", 1.0)),
    ("all_to_all", (None, None)),
    ("broadcast", (0,)),
    ("reduce", (0,)),
    ("reduce_scatter", ("PREMUL_SUM", 2.0)),
)


def alone(name: str = "alone") -> Communicator:
    return Communicator.from_store(dist.HashStore(), 0, 1, name=name)


@pytest.mark.parametrize(
    ("name", "arguments", "dtype"),
    [
        *((name, arguments, torch.float32) for name, arguments in ARGUMENTS),
        ("all_to_all", ([4], [4]), torch.float32),
        ("reduce_scatter", ("AVG", 1.0), torch.complex64),
        ("all_gather", (), torch.int32),
    ],
)
def test_opcheck(name, arguments, dtype):
    operator = getattr(ops, name).default
    with alone() as comm:
        key = traced_groups.key_of(comm)
        tensor = torch.arange(12).view(4, 3).to(dtype)
        opcheck(operator, (tensor, *arguments, key, 1))
        if dtype is not torch.int32:
            strided = tensor.t().contiguous().t().requires_grad_()
            opcheck(operator, (strided, *arguments, key, 1))


@pytest.mark.parametrize(("name", "arguments"), ARGUMENTS)
def test_shapes_are_those_of_the_kernels(worlds, name, arguments):
    operator = getattr(ops, name)

    def body(comm):
        key = traced_groups.key_of(comm)
        tensor = torch.ones(4, 3)
        return operator(tensor, *arguments, key, 2), operator(tensor.to("meta"), *arguments, key, 2)

    for real, fake in worlds(2).run(body):
        assert (real.shape, real.stride(), real.dtype) == (fake.shape, fake.stride(), fake.dtype)


def symbolic(rows: int) -> torch.Tensor:
    """Returns a fake tensor whose first size is a symbol."""
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment)
    tensor = torch.empty(rows, 3)
    torch._dynamo.mark_dynamic(tensor, 0)
    return mode.from_tensor(tensor)


def expression(size: object) -> object:
    assert isinstance(size, torch.SymInt)
    return size.node.expr


@pytest.mark.parametrize(
    ("name", "arguments", "rows"),
    [
        ("all_gather", (), "4*s"),
        ("all_reduce", ("SUM", 1.0), "s"),
        ("all_to_all", (None, None), "s"),
        ("broadcast", (0,), "s"),
        ("reduce", (0,), "s"),
        ("reduce_scatter", ("SUM", 1.0), "s//4"),
    ],
)
def test_symbolic_sizes(name, arguments, rows):
    tensor = symbolic(8)
    output = getattr(ops, name)(tensor, *arguments, "nobody", 4)
    given, got = tensor.shape[0], output.shape[0]
    want = {"4*s": 4 * given, "s": given, "s//4": given // 4}[rows]
    assert expression(got) == expression(want)
    assert output.shape[1] == 3


def test_symbolic_splits():
    tensor = symbolic(8)
    rows = tensor.shape[0]
    output = ops.all_to_all(tensor, [rows, 2 * rows], [rows, 0], "nobody", 2)
    assert expression(output.shape[0]) == expression(3 * rows)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("all_gather", (), "got a scalar"),
        ("all_to_all", (None, None), "got a scalar"),
        ("reduce_scatter", ("SUM", 1.0), "got a scalar"),
    ],
)
def test_bad_shapes_show_while_tracing(name, arguments, message):
    with pytest.raises(RuntimeError, match=message):
        getattr(ops, name)(torch.ones((), device="meta"), *arguments, "nobody", 2)
    with pytest.raises(RuntimeError, match="not divisible by world_size 2"):
        ops.reduce_scatter(torch.ones(3, device="meta"), "SUM", 1.0, "nobody", 2)


# ---- NOTE [Group keys] --------------------------------------------------------------------------


def test_a_key_says_the_same_in_every_process(worlds):
    def body(comm):
        with comm.new_group([0, 2]) or comm.new_group([1]) as group:
            return traced_groups.key_of(comm), traced_groups.key_of(group)

    keys = worlds(3).run(body)
    assert keys == [
        ("local:0/3", "local/group:0.2:0/2"),
        ("local:1/3", "local/group:1:0/1"),
        ("local:2/3", "local/group:0.2:1/2"),
    ]


def test_of_two_with_one_name_each_has_its_key():
    with alone("twin") as first, alone("twin") as second:
        keys = [traced_groups.key_of(each) for each in (first, second, first, second)]
        assert keys == ["twin:0/1", "twin:0/1#1"] * 2
        assert traced_groups.find("twin:0/1", 1, "test") is first
        assert traced_groups.find("twin:0/1#1", 1, "test") is second


def test_a_key_goes_to_the_next_one_of_its_name():
    first = alone("heir")
    key = traced_groups.key_of(first)
    first.close()
    with alone("heir") as second:
        assert traced_groups.key_of(second) == key
        assert traced_groups.find(key, 1, "test") is second
        # The old communicator is not mistaken for the new one.
        assert traced_groups.key_of(first) != key
        with pytest.raises(ringcomm.AbortedError, match="was closed"):
            F.all_gather(torch.ones(1), first)
        assert traced_groups.key_of(second) == key
    third = alone("heir")
    assert traced_groups.key_of(third) == key
    del third
    with pytest.raises(RingcommError, match=r"test: the communicator 'heir:0/1' is gone"):
        traced_groups.find(key, 1, "test")


def test_keys_are_handed_out_once():
    """Keys stay unique when many threads request them at once."""
    group = [alone("crowd") for _ in range(8)]
    start = threading.Barrier(8)
    keys: list[str] = []

    def ask(comm):
        start.wait()
        keys.extend(traced_groups.key_of(comm) for _ in range(50))

    threads = [threading.Thread(target=ask, args=(comm,)) for comm in group]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(set(keys)) == sorted(traced_groups.key_of(comm) for comm in group)
    assert len(set(keys)) == 8
    for comm in group:
        comm.close()


def test_the_empty_key_is_the_default_group(worlds):
    def body(comm):
        assert traced_groups.find("", 2, "test") is comm
        with pytest.raises(ArgumentError, match="expected the default group to have 3 ranks"):
            traced_groups.find("", 3, "test")
        output = ops.all_gather(torch.tensor([comm.rank]), "", 2)
        assert output.tolist() == [0, 1]

    worlds(2).run(body)
    with pytest.raises(RingcommError, match="expected a default group"):
        traced_groups.find("", 2, "test")
