# SPDX-License-Identifier: Apache-2.0
"""Objects that can be sent; nothing is unpickled unless the caller asks for it."""

import enum
import math
import sys
from collections import Counter, OrderedDict, defaultdict, namedtuple
from typing import Any
from unittest.mock import Mock

import numpy
import pytest
import torch

import ringcomm
from ringcomm import CommOptions, UnsupportedError
from ringcomm.comm.objects import Codec, Parcel, pack, unpack
from ringcomm.errors import ArgumentError

VALUES: tuple[Any, ...] = (
    None,
    True,
    -(2**63),
    2**200,
    -0.0,
    math.inf,
    1 + 2j,
    "ä\ud800",
    b"\x00\xff",
    bytearray(b"x"),
    [],
    (1, [2, (3,)]),
    {1: "a", (2, 3): None, "": {4}},
    frozenset({1, 2}),
    OrderedDict(b=1, a=OrderedDict()),
    Counter("aab"),
    defaultdict(list, {"a": [1]}),
    defaultdict(None, {1: 2}),
    torch.Size([2, 0, 3]),
    torch.bfloat16,
    torch.device("cuda", 1),
    torch.device("cpu"),
    numpy.float64(0.1),
    numpy.bool_(True),
    numpy.int8(-3),
)


def _round(value: Any) -> Any:
    return unpack(memoryview(pack(value, "op")), "op", 1)


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_come_back(value):
    found = _round(value)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_tensors_come_back(dtype):
    for tensor in (torch.ones(3, 4).to(dtype).t(), torch.empty(0, 5, dtype=dtype)):
        found = _round({"t": tensor})["t"]
        assert found.dtype == dtype
        assert torch.equal(found, tensor)


def test_a_defaultdict_keeps_its_factory():
    assert _round(defaultdict(list))["x"] == []
    with pytest.raises(UnsupportedError, match=r"the object\[1\]: a defaultdict's factory is code"):
        pack([0, defaultdict(lambda: 0)], "op")


@pytest.mark.parametrize("kind", [torch.Tensor, torch.nn.Parameter])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_tensors_keep_what_they_require(kind, requires_grad):
    tensor = torch.rand(2, 3)
    if kind is torch.nn.Parameter:
        tensor = torch.nn.Parameter(tensor, requires_grad)
    found = _round(tensor.requires_grad_(requires_grad))
    assert type(found) is kind
    assert found.requires_grad == requires_grad and found.is_leaf
    assert torch.equal(found, tensor)


def test_the_state_of_a_module_comes_back():
    state = torch.nn.Linear(2, 3).state_dict()
    found = _round(state)
    assert type(found) is OrderedDict and list(found) == list(state)
    assert torch.equal(found["weight"], state["weight"])


@pytest.mark.parametrize("dtype", ["bool", "uint16", "float16", "complex128"])
def test_arrays_of_numpy_come_back(dtype):
    for array in (numpy.arange(6).reshape(2, 3).astype(dtype).T, numpy.empty((0, 2), dtype)):
        found = _round(array)
        assert type(found) is numpy.ndarray
        assert found.dtype == array.dtype
        assert numpy.array_equal(found, array)
        assert found.flags.writeable
    assert _round(numpy.array(3, dtype)).shape == ()


def test_bools_of_memory_that_nobody_wrote_come_back():
    odd = bytearray(b"\x00\x01\x07")
    assert _round(torch.frombuffer(odd, dtype=torch.bool)).tolist() == [False, True, True]
    assert _round(numpy.frombuffer(odd, "bool")).tolist() == [False, True, True]


def test_without_numpy_its_arrays_are_refused_in_words(monkeypatch):
    raw = memoryview(pack(numpy.zeros(2), "op"))
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert _round([1]) == [1]
    with pytest.raises(UnsupportedError, match=r"rank 1: .* NumPy, which is not installed"):
        unpack(raw, "op", 1)


def test_nan_comes_back():
    assert math.isnan(_round(math.nan))


class Other:
    """Not data."""


ODD = (Other(), Other, len, range(3))


@pytest.mark.parametrize("value", ODD, ids=["object", "class", "function", "range"])
def test_what_is_not_data_is_named(value):
    with pytest.raises(UnsupportedError, match=r"the object\[0\].*CommOptions\(objects="):
        pack([value], "op")


class Colour(enum.IntEnum):
    RED = 1


class Flag(int):
    """A subclass of a data type."""


class Odd(torch.Tensor):
    """A subclass of a tensor."""


class OddArray(numpy.ndarray):
    """A subclass of an array."""


Point = namedtuple("Point", "x y")
FREED = torch.ones(2)
FREED.untyped_storage().resize_(0)
LOSES = (
    (Colour.RED, r"enum .*Colour would lose its type: send value\.value"),
    (Point(1, 2), r"Point would lose its names: send tuple\(value\)"),
    (Flag(), r"Flag would arrive as int: send int\(value\)"),
    (torch.ones(2).as_subclass(Odd), "Odd would arrive as torch.Tensor"),
    (numpy.zeros(2).view(OddArray), "OddArray would arrive as NumPy's own"),
    (numpy.zeros(2, ">f4"), r"NumPy's '>f4' cannot be sent: convert it with astype"),
    (numpy.array(["a"]), r"NumPy's '<U1' cannot be sent"),
    (torch.ones(2).to_sparse(), "layout torch.sparse_coo: send value.to_dense"),
    (torch.empty(2, device="meta"), "has no data"),
    (torch.zeros([1] * 65), "has more than 64 dimensions"),
    (FREED, "has no memory"),
)


@pytest.mark.parametrize(("value", "words"), LOSES, ids=lambda each: type(each).__name__)
def test_what_would_be_lost_is_said(value, words):
    with pytest.raises(UnsupportedError, match=rf"^op: the object\['a'\]: .*{words}"):
        pack({"a": value}, "op")


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns when it makes these tensors
def test_nested_and_quantised_tensors_are_refused_in_words():
    parts = [torch.ones(2), torch.ones(1)]
    for layout in (torch.strided, torch.jagged):
        with pytest.raises(UnsupportedError, match=r"is nested: send value\.unbind\(\)"):
            pack(torch.nested.nested_tensor(parts, layout=layout), "op")
    with pytest.raises(UnsupportedError, match=r"is quantised: send value\.dequantize\(\)"):
        pack(torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8), "op")


def test_the_place_is_named():
    for value, path in (
        ({"a": [1, {"b": (0, len)}]}, r"the object\['a'\]\[1\]\['b'\]\[1\]: "),
        ({("x", len): 1}, r"the object, in a key\[1\]: "),
        ({(1, 2): len}, r"the object\[a tuple\]: "),
        ({"k" * 10**6: len}, r"the object\['k+\.\.\.k+'\]: "),
    ):
        with pytest.raises(UnsupportedError, match=path) as raised:
            pack(value, "op")
        assert len(str(raised.value)) < 1000


def test_what_holds_itself_is_refused():
    value: list[Any] = []
    value.append(value)
    with pytest.raises(UnsupportedError, match="nested deeper"):
        pack(value, "op")


def _gathers(comm, objects):
    found: list[Any] = [None, None]
    ringcomm.all_gather_object(found, objects[comm.rank])
    return [type(each) for each in found]


def test_pickles_are_opted_in():
    assert CommOptions().objects == "data"
    with pytest.raises(ArgumentError, match="objects: expected data or pickle"):
        CommOptions(objects="yaml")
    with ringcomm.local_world(2, options=CommOptions(objects="pickle", timeout=20)) as world:
        assert world.run(_gathers, [Other(), 1]) == [[Other, int]] * 2


def test_a_pickle_that_was_not_asked_for_is_not_read():
    raw = memoryview(bytearray(b"RCK1" + b"\x80\x04K\x01."))

    class Rank:
        rank, world_size, options = 0, 2, CommOptions()
        engine = Mock()

    codec = Codec(Rank, "op")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="expected data, got a pickle from rank 1"):
        codec.unpack(Parcel(bytearray(raw)), 1)
