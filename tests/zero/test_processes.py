# SPDX-License-Identifier: Apache-2.0
"""Ranks as processes have the same bits as threads; the survivors of a rank can still read."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import ringcomm
from ringcomm import Communicator, RingcommError, zero
from ringcomm.optim import AdamW
from tests.support.faults import die, shared_memory_files
from tests.support.ranks import Ranks, run_ranks
from tests.zero.models import (
    SMALL_BUCKET_ELEMS,
    Run,
    assert_same_bits,
    new_model,
    train,
    train_world,
)

TIMEOUT_S = 60.0


def _train(store, rank, world, run):
    torch.set_num_threads(1)
    with Communicator.from_store(store, rank, world, timeout=TIMEOUT_S) as comm:
        return train(comm, new_model(run.model), run)


def test_processes_train_as_threads_do(worlds):
    before = shared_memory_files()
    run = Run("wandering", 3, backwards=2, clip=0.3)
    wanted, norms = train_world(worlds(2), run)
    for state, their_norms in run_ranks(_train, 2, run):
        assert_same_bits(state, wanted)
        assert their_norms == norms
    assert shared_memory_files() <= before


def _lose_a_rank(store, rank, world, stage):
    torch.set_num_threads(1)
    comm = Communicator.from_store(store, rank, world, timeout=TIMEOUT_S)
    module: Any = zero.shard(
        new_model("narrow gpt"),
        stage,
        comm=comm,
        options=zero.ZeroOptions(bucket_elems=SMALL_BUCKET_ELEMS),
    )
    optimizer = AdamW(module.parameters(), lr=1e-2)
    tokens = torch.arange(34).view(2, 17)
    for turn in range(3):
        loss = module(tokens[:, :-1], tokens[:, 1:])
        if turn == 2 and rank == 1:
            die()
        try:
            loss.backward()
            optimizer.step()
        except RingcommError as error:
            said = str(error)
            # Survivors can read shared memory of the dead rank, and can build a new world.
            saved = zero.full_state_dict(module) if stage < 3 else {}
            comm.close()
            return said, all(each.isfinite().all() for each in saved.values())
        optimizer.zero_grad()
    return None


@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_that_dies_is_named_by_the_others(stage):
    before = shared_memory_files()
    began = time.monotonic()
    with Ranks(_lose_a_rank, 3, stage) as ranks:
        outcomes = ranks.wait(TIMEOUT_S)
    for rank in (0, 2):
        assert outcomes[rank].ok, outcomes[rank].describe()
        said, finite = outcomes[rank].value
        assert "rank 1" in said
        assert finite
    assert time.monotonic() - began < TIMEOUT_S  # the error comes before any call's timeout
    assert shared_memory_files() <= before


def _one_sided(store, rank, world):
    """Rank 0 evaluates while the other ranks sleep."""
    torch.set_num_threads(1)
    with Communicator.from_store(store, rank, world, timeout=TIMEOUT_S) as comm:
        module: Any = zero.shard(new_model("narrow gpt"), 3, comm=comm)
        tokens = torch.arange(34).view(2, 17)
        loss = None
        if rank == 0:
            with torch.no_grad():
                loss = module(tokens[:, :-1], tokens[:, 1:]).item()
            store.set("evaluated", "yes")
        else:
            store.wait(["evaluated"])  # waits outside of any ringcomm call
        comm.barrier()
        return loss, ringcomm.heap_stats()["used_bytes"] > 0


def test_a_rank_unshards_while_its_peers_are_away():
    reference = new_model("narrow gpt")
    tokens = torch.arange(34).view(2, 17)
    with torch.no_grad():
        wanted = reference(tokens[:, :-1], tokens[:, 1:]).item()
    told = run_ranks(_one_sided, 2)
    assert told[0][0] == wanted
