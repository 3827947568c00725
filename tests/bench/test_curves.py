# SPDX-License-Identifier: Apache-2.0
"""The program that compares losses trains all runs on the same text."""

from __future__ import annotations

import pytest

from ringcomm.bench.curves import CONTEXT, RUNS, curve
from ringcomm.examples.corpus import read_corpus
from ringcomm.examples.train_gpt import ModelConfig

MODEL = ModelConfig(16, 1, 4, CONTEXT, tied=True)


@pytest.fixture(scope="module")
def corpus():
    return read_corpus(None, CONTEXT)


def test_runs_begin_alike_and_part_by_what_is_rounded(corpus):
    runs = RUNS["optimizers"].values()
    wide, narrow, other = (curve(run, MODEL, corpus, (1, 4)) for run in runs)
    # The first step's rounding affects only losses after it.
    assert wide[0] == narrow[0] != other[0]
    assert 0.0 < abs(wide[1] - narrow[1]) < abs(wide[1] - other[1])
    assert wide[1] < wide[0]


def test_compression_to_fewer_bits_part_further(corpus):
    runs = RUNS["compression"]
    full, int8, int4 = (
        curve(runs[name], MODEL, corpus, (2,))[0] for name in ("fp32", "int8", "int4")
    )
    assert 0.0 < abs(full - int8) < abs(full - int4) < 0.01 * full
