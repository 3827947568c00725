# SPDX-License-Identifier: Apache-2.0
"""The native module reads torch's options objects; the results equal torch's own answers."""

import itertools
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    ReduceScatterOptions,
)

import ringcomm
from ringcomm import _native
from ringcomm.c10d import plain_options

KINDS = (AllgatherOptions, AllreduceOptions, ReduceScatterOptions)
OPS = {
    name: getattr(dist.ReduceOp, name)
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
}
UNSET = AllreduceOptions().timeout


@pytest.fixture(autouse=True, scope="module")
def read():
    plain_options.read_from_memory()


def made(kind, op=None, asynchronous=False, timeout=UNSET):
    options = kind()
    options.asyncOp = asynchronous
    options.timeout = timeout
    if op is not None:
        options.reduceOp = op
    return options


def test_all_classes_of_this_torch_are_read():
    assert plain_options.read_from_memory() == frozenset(KINDS)


@pytest.mark.parametrize("kind", [AllreduceOptions, ReduceScatterOptions])
def test_the_op_is_torchs_constant(kind):
    for op in OPS.values():
        assert _native.plain_op(made(kind, op)) is op


def test_options_without_an_op():
    assert _native.plain_op(made(AllgatherOptions)) is True


@pytest.mark.parametrize("kind", KINDS)
def test_other_options_are_left_to_python(kind):
    op = None if kind is AllgatherOptions else dist.ReduceOp.MAX
    timeouts = (UNSET, timedelta(milliseconds=1), timedelta(days=3), timedelta(0))
    for asynchronous, timeout in itertools.product((False, True), timeouts):
        is_plain = not asynchronous and timeout == UNSET
        options = made(kind, op, asynchronous, timeout)
        assert (_native.plain_op(options) is not False) == is_plain, (asynchronous, timeout)


def test_an_op_with_a_factor_is_left_to_python():
    factor = dist._make_nccl_premul_sum(2.0)
    assert _native.plain_op(made(AllreduceOptions, factor)) is False


@pytest.mark.parametrize("other", [None, 1, "sum", [], dist.BroadcastOptions(), dist.ReduceOp.SUM])
def test_other_objects_are_left_to_python(other):
    assert _native.plain_op(other) is False


@pytest.mark.parametrize("size", [8, 16, 40])
def test_offsets_are_found_only_if_all_are(size):
    # A value without its last fields, as with a torch that stores them elsewhere.
    assert plain_options._find(AllreduceOptions, size) is None


def test_a_class_of_pythons_is_not_read():
    class Options:
        asyncOp = False
        timeout = UNSET

    assert not plain_options._is_read(Options, 16)


NOT_LISTS = {
    "no list": lambda x: x,
    "two tensors": lambda x: [x, x],
    "none": lambda x: [],
    "a tuple": lambda x: (x,),
}


@pytest.mark.parametrize("name", NOT_LISTS)
def test_only_a_list_of_one_tensor_is_taken(name):
    with ringcomm.local_world(1) as world:
        fast = world[0].engine.fast
        x = torch.ones(3)
        assert fast.all_reduce_for_torch([x], made(AllreduceOptions)) == 0
        answer = fast.all_reduce_for_torch(NOT_LISTS[name](x), made(AllreduceOptions))
        assert answer == _native.NOT_FAST


def test_options_of_another_call_are_not_taken():
    with ringcomm.local_world(1) as world:
        fast = world[0].engine.fast
        x, y = torch.ones(3), torch.zeros(3)
        assert fast.all_gather_for_torch(y, x, made(AllgatherOptions)) == 0
        assert torch.equal(y, x)
        assert fast.all_gather_for_torch(y, x, made(AllreduceOptions)) == _native.NOT_FAST
        assert fast.all_reduce_for_torch([x], made(AllgatherOptions)) == _native.NOT_FAST
        assert fast.reduce_scatter_for_torch(y, x, made(AllgatherOptions)) == _native.NOT_FAST
