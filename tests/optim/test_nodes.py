# SPDX-License-Identifier: Apache-2.0
"""AdamW over several nodes, which are simulated by threads here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import ringcomm
from ringcomm import CommOptions, Communicator
from ringcomm.optim import AdamWOptions
from ringcomm.optim.state import reshard
from tests.optim.problems import Problem, assert_same_state, values


def gradient(shape: tuple[int, ...], index: int, step: int, rank: int) -> torch.Tensor:
    """Returns numbers whose sum depends on its order."""
    return values(shape, 1000 * step + 10 * index + rank)


PROBLEMS = (
    (Problem(gradient=gradient), AdamWOptions(bucket_elems=1024)),
    (
        Problem(torch.bfloat16, gradient=gradient),
        AdamWOptions(bucket_elems=1024, accumulate_dtype=torch.float32, reduce="sum"),
    ),
    (
        Problem(
            torch.bfloat16,
            gradient=gradient,
            settings={"lr": 0.1, "momentum": 0.9},
            torch_class=torch.optim.SGD,
            sharded=True,
        ),
        AdamWOptions(bucket_elems=1024),
    ),
)


def step(comm: Communicator, problem: Problem, options: AdamWOptions) -> Any:
    """Takes steps with and without clipping, and resumes from a saved shard in another optimizer.

    Returns:
        The parameters, the norm and the full state.
    """
    params = problem.params()
    optimizer = problem.ours(params, comm, options)

    def take(number: int) -> None:
        for part in range(2):
            total = sum(
                (
                    param.float()
                    * gradient(tuple(param.shape), index, 2 * number + part, comm.rank)
                ).sum()
                for index, param in enumerate(params)
            )
            total.backward()
        if number:
            norms.append(optimizer.clip_grad_norm_(0.5).item())
            norms.append(optimizer.clip_grad_norm_(0.2, params=params[1::2]).item())
            optimizer.clip_grad_value_(0.01, params=params[:4])
        optimizer.step()
        optimizer.zero_grad()

    norms: list[float] = []
    take(0)
    take(1)
    shard = optimizer.state_dict()
    optimizer = problem.ours(params, comm, options)
    optimizer.load_state_dict(shard)
    take(2)
    return [param.detach().clone() for param in params], norms, optimizer.full_state_dict()


@pytest.mark.parametrize(
    ("nodes", "sum_group_size", "states"),
    [
        ([2, 2], 2, ("world", "node")),
        # The sum is (r0 + r1) + r2, as on one node.
        ([2, 1], 0, ("world",)),
    ],
)
def test_steps_have_the_bits_of_one_node_that_sums_in_groups(nodes, sum_group_size, states):
    world_size = sum(nodes)
    with ringcomm.local_world(
        world_size, options=CommOptions(sum_group_size=sum_group_size)
    ) as world:
        wanted = [world.run(step, *each)[0] for each in PROBLEMS]
    with ringcomm.local_world(world_size, nodes=nodes, timeout=60) as world:
        for (problem, options), (params, norms, state) in zip(PROBLEMS, wanted, strict=True):
            for shared in states:
                chosen = replace(options, state=shared)
                for theirs, their_norms, their_state in world.run(step, problem, chosen):
                    assert their_norms == norms
                    assert all(map(torch.equal, theirs, params))
                    assert_same_state(their_state, state)


def take_shards(comm: Communicator, options: AdamWOptions) -> Any:
    problem = PROBLEMS[0][0]
    optimizer = problem.ours(problem.params(), comm, options)
    optimizer.prepare()
    return optimizer.state_dict()


def test_each_node_has_all_shards_of_the_state_that_it_has_a_copy_of():
    options = AdamWOptions(bucket_elems=1024, state="node")
    with ringcomm.local_world(4, nodes=[2, 2], timeout=60) as world:
        shards = world.run(take_shards, options)
    assert [(each["shard"]["rank"], each["shard"]["world_size"]) for each in shards] == [
        *((0, 2), (1, 2)),
        *((0, 2), (1, 2)),
    ]
    # The shards of one node form the state of a whole world.
    assert len(reshard(shards[2:], 3)) == 3
