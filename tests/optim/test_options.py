# SPDX-License-Identifier: Apache-2.0
"""Options are checked at construction, and can be written as JSON."""

from __future__ import annotations

import json

import pytest
import torch

from ringcomm.errors import ArgumentError
from ringcomm.optim import AdamWOptions


def test_the_defaults_describe_themselves():
    described = AdamWOptions().describe()
    assert json.loads(json.dumps(described)) == described
    assert described["reduce"] == "avg" and described["master"] == "fp32"
    assert AdamWOptions(accumulate_dtype=torch.float32).describe() != described


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("algorithm", "tree"),
        ("kernels", "numba"),
        ("reduce", "max"),
        ("master", True),
        ("rounding", "up"),
        ("unused", None),
        ("bucket_elems", 1000),
        ("bucket_elems", 0),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 0.5),
        ("accumulate_dtype", torch.bfloat16),
    ],
)
def test_a_bad_option_is_refused(name, value):
    with pytest.raises(ArgumentError, match=f"^{name}: expected"):
        AdamWOptions(**{name: value})


def test_no_master_needs_stochastic_rounding():
    with pytest.raises(ArgumentError, match='pass rounding="stochastic" too'):
        AdamWOptions(master="none")
    assert AdamWOptions(master="none", rounding="stochastic").master == "none"


def test_a_remainder_fixes_the_rounding():
    with pytest.raises(ArgumentError, match='"remainder" fixes how parameters are rounded'):
        AdamWOptions(master="remainder", rounding="stochastic")
