"""Updates while backward runs: the bits of updates in the step, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ringcomm.optim import AdamWOptions
from tests.zero.models import Run, assert_same_bits, train_world

EARLY = AdamWOptions(update="in_backward")


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("model", ["mlp", "gpt", "partial", "wandering", "reaching", "conv"])
def test_smoke(worlds, stage, overlap, model):
    run = Run(model, stage, options={"overlap": overlap})
    wanted, _ = train_world(worlds(2), run)
    found, _ = train_world(worlds(2), replace(run, adamw=EARLY))
    assert_same_bits(found, wanted)
