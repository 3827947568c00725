"""Steps of a GPT in three kinds of parts: all systems train alike, and take turns."""

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
    times = bench.times_of({name: lambda: None for name in trained}, rounds=2)
    assert list(times) == list(trained) and all(len(each) == 2 for each in times.values())


def test_all_systems_train_alike(rank_pools: Any) -> None:
    rank_pools(8).run(steps)


def test_ratios_are_those_of_a_round() -> None:
    times = {bench.HERE: [1.0, 10.0, 2.0], bench.ON_GLOO: [2.0, 30.0, 8.0]}
    shape = bench.GptShape()
    first, second = bench.rows_of(shape, times, dict.fromkeys(times, 0), parameters=5, ranks=8)
    assert (first.ratio, second.ratio, second.time_us) == (1.0, 3.0, 8.0)
    assert (second.system, second.placement) == (bench.ON_GLOO, str(shape))
