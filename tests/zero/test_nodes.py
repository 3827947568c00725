"""Sharded training over several nodes, which here are processes that say so of themselves."""

from __future__ import annotations

import os
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed import Store

import ringcomm
from ringcomm import CommOptions, Communicator, zero
from ringcomm.errors import UnsupportedError
from ringcomm.optim import AdamW, AdamWOptions
from tests.support.ranks import run_ranks
from tests.zero.models import Run, assert_same_bits, new_model, train

NODES = ((0, 1), (2, 3))


BF16 = zero.Precision(param=torch.bfloat16, buffer=torch.bfloat16)
RUNS = (
    Run("mlp", 0, steps=3, backwards=2, clip=0.3),
    Run("gpt", 0, steps=2, precision=BF16, adamw=AdamWOptions(master="remainder")),
    Run("partial", 0, steps=2, precision=replace(BF16, reduce=torch.bfloat16)),
)


def join(
    store: Store, rank: int, world_size: int, nodes: Any, options: CommOptions | None = None
) -> Communicator:
    """Builds the communicator of ranks on these nodes."""
    node = next(number for number, ranks in enumerate(nodes) if rank in ranks)
    os.environ["RINGCOMM_NODE_ID"] = f"node{node}"
    torch.set_num_threads(1)
    return Communicator.from_store(store, rank, world_size, timeout=60, options=options)


def train_on_nodes(store: Store, rank: int, world_size: int, nodes: Any) -> list[Any]:
    with join(store, rank, world_size, nodes) as comm:
        assert comm.num_nodes == len(nodes)
        results = []
        for run in RUNS:
            base = new_model(run.model)
            for stage in range(4):
                options = {**run.options, "overlap": stage == 3}
                results.append(train(comm, base, replace(run, stage=stage, options=options)))
        return results


def test_all_stages_end_with_the_bits_of_one_node():
    by_rank = run_ranks(train_on_nodes, 4, NODES, timeout_s=240)
    with ringcomm.local_world(4, options=CommOptions(sum_blocks=2)) as world:
        for number, run in enumerate(RUNS):
            base = new_model(run.model)
            wanted, norms = world.run(train, base, replace(run, stage=1))[0]
            for results in by_rank:
                for state, their_norms in results[4 * number : 4 * number + 4]:
                    assert their_norms == norms
                    assert_same_bits(state, wanted)
