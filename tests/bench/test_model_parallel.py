"""Steps of a GPT in three kinds of parts: all systems train alike."""

from __future__ import annotations

from typing import Any

from ringcomm.bench import model_parallel as bench


def steps(rank: int, world_size: int) -> None:
    shape = bench.GptShape(width=64, depth=2, sequences=16, context=8)
    trained = bench.entrants(shape)
    for each in trained.values():
        each()
    assert bench.unequal(trained) == dict.fromkeys(trained, 0)
    # What one of them has lost is noticed on all ranks.
    last = trained[bench.ON_GLOO]
    last.losses = [2 * loss for loss in last.losses]
    wrong = bench.unequal(trained)
    assert wrong.pop(bench.ON_GLOO) == 4 and not any(wrong.values())


def test_all_systems_train_alike(rank_pools: Any) -> None:
    rank_pools(8).run(steps)
