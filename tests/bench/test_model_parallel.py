# SPDX-License-Identifier: Apache-2.0
"""Steps of a GPT sharded in three ways: all systems train equally."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from ringcomm.bench import model_parallel as bench
from tests.support.covering import in_test_all


def steps(axes: dict[str, int], rank: int, world_size: int) -> None:
    _clear_sharding_prop_cache()  # the cache knows equal meshes, whose groups are gone
    with mock.patch.dict(bench.AXES, axes):
        check(world_size)


def check(world_size: int) -> None:
    shape = bench.GptShape(width=64, depth=2, sequences=16, context=8)
    trained = bench.entrants(shape)
    for each in trained.values():
        each()
    assert bench.unequal(trained) == dict.fromkeys(trained, 0)
    # All ranks notice a difference that only some ranks have.
    last = trained[bench.ON_GLOO]
    last.losses = [2 * loss for loss in last.losses]
    wrong = bench.unequal(trained)
    # Only the ranks of the second stage have losses.
    assert wrong.pop(bench.ON_GLOO) == world_size // 2 and not any(wrong.values())


# docs/examples/gpt_3d.py is tested with two stages and tensor parallelism.
@pytest.mark.parametrize(
    ("ranks", "axes"), [(4, {"pp": 2, "dp": 2, "tp": 1}), *in_test_all((8, bench.AXES))]
)
def test_all_systems_train_alike(rank_pools: Any, ranks: int, axes: dict[str, int]) -> None:
    rank_pools(ranks).run(partial(steps, axes))
