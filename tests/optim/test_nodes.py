"""AdamW over several nodes, which here are processes that say that they are on some."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import Store

import ringcomm
from ringcomm import CommOptions, Communicator
from ringcomm.optim import AdamWOptions
from tests.optim.problems import Problem, assert_same_state, values
from tests.support.ranks import join_nodes, run_ranks


def gradient(shape: tuple[int, ...], index: int, step: int, rank: int) -> torch.Tensor:
    """Numbers whose sum depends on its order."""
    return values(shape, 1000 * step + 10 * index + rank)


PROBLEMS = (
    (Problem(gradient=gradient), AdamWOptions(bucket_elems=1024)),
    (Problem(torch.bfloat16, gradient=gradient), AdamWOptions(bucket_elems=2048)),
    (
        Problem(torch.bfloat16, gradient=gradient),
        AdamWOptions(bucket_elems=1024, accumulate_dtype=torch.float32, reduce="sum"),
    ),
)


def step(comm: Communicator, problem: Problem, options: AdamWOptions) -> Any:
    """Takes steps with and without clipping, and goes on from a saved shard in another optimizer.

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


def step_on_nodes(store: Store, rank: int, world_size: int, nodes: Any) -> list[Any]:
    with join_nodes(store, rank, world_size, nodes) as comm:
        return [step(comm, *each) for each in PROBLEMS]


def test_steps_have_the_bits_of_one_node_that_sums_in_blocks():
    by_rank = run_ranks(step_on_nodes, 4, ((0, 1), (2, 3)), timeout_s=120)
    with ringcomm.local_world(4, options=CommOptions(sum_blocks=2)) as world:
        for number, each in enumerate(PROBLEMS):
            wanted, norms, state = world.run(step, *each)[0]
            for params, their_norms, their_state in (results[number] for results in by_rank):
                assert their_norms == norms
                assert all(map(torch.equal, params, wanted))
                assert_same_state(their_state, state)
