"""Ranks as processes: the same bits as alone, and a rank that dies tears the others' step."""

from __future__ import annotations

import torch

from ringcomm import Communicator, RingcommError
from ringcomm.optim import AdamWOptions
from tests.optim.problems import Problem
from tests.support.faults import die, shared_memory_files
from tests.support.ranks import Ranks, run_ranks

TIMEOUT_S = 60.0
OPTIONS = {
    "one pass": AdamWOptions(bucket_elems=1024),
    "two passes": AdamWOptions(bucket_elems=1024, check_finite=True),
    "fp32 sums": AdamWOptions(bucket_elems=1024, accumulate_dtype=torch.float32),
    "ring": AdamWOptions(bucket_elems=1024, algorithm="ring"),
}


def _steps(store, rank, world, dtype):
    """Parameters and norms by option, as plain lists."""
    told = {}
    with Communicator.from_store(store, rank, world, timeout=TIMEOUT_S) as comm:
        for name, options in OPTIONS.items():
            problem = Problem(dtype)
            params = problem.params()
            optimizer = problem.ours(params, comm, options)
            norms = []
            for step in range(3):
                optimizer.zero_grad()
                problem.give(params, step, rank)
                if name == "two passes":
                    norms.append(optimizer.clip_grad_norm_(50.0).item())
                optimizer.step()
            told[name] = [param.tolist() for param in params], norms
    return told


def _alone(world, dtype, clips):
    problem = Problem(dtype)
    params = problem.params()
    optimizer = problem.ours(params, None)
    norms = []
    for step in range(3):
        problem.give_mean(params, step, world)
        if clips:
            norms.append(optimizer.clip_grad_norm_(50.0).item())
        optimizer.step()
    return [param.tolist() for param in params], norms


def test_processes_step_as_one_rank_does():
    before = shared_memory_files()
    for world, dtype in ((2, torch.float32), (3, torch.bfloat16)):
        for told in run_ranks(_steps, world, dtype):
            for name in OPTIONS:
                assert told[name] == _alone(world, dtype, name == "two passes"), (world, name)
    assert shared_memory_files() <= before


def _dies(store, rank, world):
    comm = Communicator.from_store(store, rank, world, timeout=TIMEOUT_S)
    problem = Problem()
    params = problem.params()
    optimizer = problem.ours(params, comm, OPTIONS["one pass"])
    problem.give(params, 0, rank)
    optimizer.step()
    if rank == world - 1:
        die()
    kept = [param.tolist() for param in params]
    try:
        optimizer.step()
    except RingcommError as error:
        # Before the update the ranks compare which parameters are active: nothing has changed.
        return type(error).__name__, [param.tolist() for param in params] == kept
    raise AssertionError("the step ended")


def test_a_rank_that_dies_before_the_update_leaves_the_others_whole():
    with Ranks(_dies, 3) as ranks:
        outcomes = ranks.wait(60.0, [0, 1])
    assert [outcome.value for outcome in outcomes] == [("PeerLost", True)] * 2, outcomes
