# SPDX-License-Identifier: Apache-2.0
"""Ranks with different numbers of batches: a rank without a batch counts as zero gradients."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.join import Join

import ringcomm
from ringcomm import zero
from ringcomm.errors import ArgumentError, RingcommError, UnsupportedError
from ringcomm.optim import AdamW
from tests.zero.models import MODELS, SMALL_BUCKET_ELEMS, assert_same_bits, new_model

Tensor = torch.Tensor
STAGES = [0, 1, 2, 3]
OPTIONS = zero.ZeroOptions(bucket_elems=SMALL_BUCKET_ELEMS)
BATCHES = (3, 1, 2)


def batches(model: str, rank: int, count: int) -> list[Any]:
    generator = torch.Generator().manual_seed(70 + rank)
    return [MODELS[model][1](generator, turn) for turn in range(count)]


def prepared(comm: Any, base: Any, stage: int) -> tuple[Any, Any, Any]:
    module = zero.shard(deepcopy(base), stage, comm=comm, options=OPTIONS)
    optimizer = AdamW(module.parameters(), lr=1e-2)
    return module, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def train_unevenly(comm, base, model, stage, initial=True):
    module, optimizer, schedule = prepared(comm, base, stage)
    weights = []
    own = batches(model, comm.rank, BATCHES[comm.rank])
    for batch, weight in zero.uneven(own, comm=comm, divide_by_initial_world_size=initial):
        (module(*batch) * weight).backward()
        optimizer.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        weights.append(weight)
    return zero.full_state_dict(module), weights


def train_with_zeros(comm, base, model):
    """Trains at stage 1 on the same batches; a rank that runs no backward contributes zeros."""
    module, optimizer, schedule = prepared(comm, base, 1)
    own = batches(model, comm.rank, BATCHES[comm.rank])
    for turn in range(max(BATCHES)):
        if turn < len(own):
            module(*own[turn]).backward()
        optimizer.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return zero.full_state_dict(module)


def test_a_rank_without_batches_brings_zeros_at_every_stage(worlds):
    base = new_model("reaching")
    wanted = worlds(3).run(train_with_zeros, base, "reaching")[0]
    for stage in STAGES:
        outcomes = worlds(3).run(train_unevenly, base, "reaching", stage)
        for rank, (state, weights) in enumerate(outcomes):
            assert weights == [1.0] * BATCHES[rank] + [0.0] * (3 - BATCHES[rank])
            assert_same_bits(state, wanted)


def test_a_parameter_that_only_a_repeated_batch_uses_steps_with_zeros_at_every_stage(worlds):
    base = new_model("wandering")
    (wanted, _), *_ = worlds(3).run(train_unevenly, base, "wandering", 1)
    for stage in STAGES:
        for state, _ in worlds(3).run(train_unevenly, base, "wandering", stage):
            assert_same_bits(state, wanted)


@pytest.mark.parametrize("stage", STAGES)
def test_weights_make_the_mean_of_the_ranks_that_have_batches(worlds, stage):
    base = new_model("mlp")
    outcomes = worlds(3).run(train_unevenly, base, "mlp", stage, False)
    assert [weights for _, weights in outcomes] == [[1.0, 1.5, 3.0], [1.0, 0, 0], [1.0, 1.5, 0]]


def test_batches_of_one_rank_are_all_there_is():
    assert list(zero.uneven("ab", comm="alone")) == [("a", 1.0), ("b", 1.0)]


def test_no_rank_has_any_batch(worlds):
    assert worlds(2).run(lambda comm: list(zero.uneven([], comm=comm))) == [[], []]


def test_a_rank_that_never_had_a_batch_is_told_to_all(worlds):
    def work(comm):
        with pytest.raises(ArgumentError, match="at least one on each rank, got none on 1 of 2"):
            list(zero.uneven([1] * comm.rank, comm=comm))

    worlds(2).run(work)


def test_batches_that_raise_end_the_loop_on_all_ranks(worlds):
    def broken():
        yield 1
        raise ValueError("damaged file")

    def work(comm):
        seen: list[int] = []
        mine: Any = broken() if comm.rank else [1, 2, 3]
        kind, text = (ValueError, "damaged") if comm.rank else (RingcommError, "another rank")
        with pytest.raises(kind, match=text):
            for batch, _ in zero.uneven(mine, comm=comm):
                seen.append(batch)
        return seen

    assert worlds(2).run(work) == [[1], [1]]


def test_torchs_join_is_refused_with_the_way_out():
    module = zero.shard(torch.nn.Linear(2, 2), 1, comm=ringcomm.local_world(1)[0])
    optimizer: Any = AdamW(module.parameters())
    joined: Any
    for joined in (module, optimizer):
        with pytest.raises(UnsupportedError, match=r"ringcomm\.zero\.uneven"):
            Join([joined])
    zero.remove_sharding(module)
    with pytest.raises(AttributeError):
        Join([module])  # type: ignore[list-item]
