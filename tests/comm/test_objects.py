"""What objects travel, and that nothing is unpickled that was not asked for."""

import math
from typing import Any

import pytest
import torch

import ringcomm
from ringcomm import CommOptions, UnsupportedError
from ringcomm.comm.plain_objects import pack, unpack
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
)


def _round(value: Any) -> Any:
    return unpack(memoryview(pack(value, "op")), "op", 1)


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_plain_values_come_back(value):
    found = _round(value)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_tensors_come_back(dtype):
    for tensor in (torch.ones(3, 4).to(dtype).t(), torch.empty(0, 5, dtype=dtype)):
        found = _round({"t": tensor})["t"]
        assert found.dtype == dtype
        assert torch.equal(found, tensor)


def test_nan_comes_back():
    assert math.isnan(_round(math.nan))


class Other:
    """Not plain."""


ODD = (Other(), Other, len, torch.nn.Parameter(torch.ones(1)), range(3))


@pytest.mark.parametrize("value", ODD, ids=repr)
def test_what_is_not_plain_is_named(value):
    with pytest.raises(UnsupportedError, match=r"the object\[0\].*CommOptions\(objects="):
        pack([value], "op")


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
    assert CommOptions().objects == "plain"
    with pytest.raises(ArgumentError, match="objects: expected plain or pickle"):
        CommOptions(objects="yaml")
    with ringcomm.local_world(2, options=CommOptions(objects="pickle", timeout=20)) as world:
        assert world.run(_gathers, [Other(), 1]) == [[Other, int]] * 2


def test_a_pickle_that_was_not_asked_for_is_not_read():
    raw = memoryview(bytearray(b"RCK1" + b"\x80\x04K\x01."))

    class Rank:
        rank, world_size, options = 0, 2, CommOptions()

    from ringcomm.comm.objects import _Buffer, _Codec

    codec = _Codec(Rank, "op")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="expected plain data, got a pickle from rank 1"):
        codec.unpack(_Buffer(bytearray(raw)), len(raw), 1)
