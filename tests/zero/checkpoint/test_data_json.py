# SPDX-License-Identifier: Apache-2.0
"""JSON data returns with equal values and types, and any other value is refused."""

from __future__ import annotations

import collections
import enum
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringcomm.errors import UnsupportedError
from ringcomm.json_reader import decode, encode, text_of

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.sampled_from(["$tuple", "$dict", "$"]), inner)
        | st.dictionaries(scalars | st.tuples(scalars), inner)
    ),
    max_leaves=12,
)


class Colour(enum.IntEnum):
    RED = 1


def typed(value):
    """Returns the value with its types, because 1 == True == 1.0 in Python."""
    if isinstance(value, dict):
        return [(typed(key), typed(each)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [typed(each) for each in value]
    return type(value), repr(value)


@settings(max_examples=40)
@given(values)
def test_a_value_comes_back_as_it_was(value):
    back = decode(json.loads(text_of(encode(value, "data"))))
    assert typed(back) == typed(value)


def test_nan_and_infinity_come_back():
    back = decode(json.loads(text_of(encode([math.nan, math.inf, -math.inf], "data"))))
    assert math.isnan(back[0]) and back[1:] == [math.inf, -math.inf]


@pytest.mark.parametrize(
    "value",
    [
        {1, 2},
        b"bytes",
        torch.tensor(1),
        torch.float32,
        torch.Size([1]),
        collections.OrderedDict(a=1),
        Colour.RED,
        object(),
    ],
)
def test_what_is_not_data_is_refused_with_its_path(value):
    with pytest.raises(UnsupportedError, match=r"^data\['a'\]\[1\]: expected None, .* no pickle"):
        encode({"a": [0, value]}, "data")


@pytest.mark.parametrize(
    "foreign",
    [
        {"$other": []},
        {"$tuple": [], "more": 1},
        {"$tuple": 1},
        {"$dict": {"a": 1}},
        {"$dict": [[[], 1]]},
        {"$dict": [[1, 2, 3]]},
    ],
)
def test_what_was_never_encoded_is_refused(foreign):
    with pytest.raises((ValueError, TypeError)):
        decode([foreign])
