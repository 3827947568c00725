# SPDX-License-Identifier: Apache-2.0
"""Sharded training on the GPU: the same bits at every stage, in one process and in several."""

from dataclasses import replace

import pytest
import torch

from ringcomm import zero
from tests.gpu.device import REAL
from tests.gpu.worlds import connect, one_launch_world, run_ranks
from tests.zero.models import Run, assert_same_bits, new_model, train

LIMIT_S = 100.0
STEPS = 4 if REAL else 2
BF16 = zero.Precision(param=torch.bfloat16, buffer=torch.bfloat16)
RUNS = {
    "clipped": Run("gpt", 0, STEPS, clip=0.3, options={"algorithm": "one_shot"}),
    "bfloat16": Run("gpt", 0, STEPS, precision=BF16, options={"algorithm": "one_shot"}),
    "wandering": Run("wandering", 0, STEPS, backwards=2, options={"algorithm": "one_shot"}),
    "partial": Run("partial", 0, STEPS, options={"algorithm": "one_shot"}),
}


@pytest.fixture(autouse=True)
def deterministic():
    """With deterministic algorithms torch adds up gradients of embeddings in a fixed order."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def _on_gpu(comm, base, run):
    with torch.autograd.set_multithreading_enabled(False):
        state, norms = train(comm, base.to(comm.device), run)
    return {name: tensor.cpu() for name, tensor in state.items()}, norms


# tests/zero/test_devices.py tests the other runs on an emulated device with fewer multiprocessors.
@pytest.mark.parametrize("name", RUNS if REAL else ["wandering", "partial"])
def test_all_stages_end_with_the_same_bits(name):
    base = new_model(RUNS[name].model)
    wanted = None
    for stage in range(4):
        with one_launch_world(2) as world:
            outcomes = world.run(_on_gpu, base, replace(RUNS[name], stage=stage))
        for state, norms in outcomes:
            wanted = wanted or (state, norms)
            assert norms == wanted[1]
            assert_same_bits(state, wanted[0])


def _process(store, rank, world, runs):
    with connect(store, rank, world) as comm:
        return [_on_gpu(comm, new_model(run.model), run) for run in runs]


@pytest.mark.timeout(LIMIT_S)
def test_processes_train_as_one_does():
    # On an emulated device only stage 3, which uses all of the collectives;
    # tests/zero/test_processes.py tests the other stages on the host.
    runs = [replace(RUNS["clipped"], stage=stage) for stage in ((1, 2, 3) if REAL else (3,))]
    with one_launch_world(2) as world:
        wanted = [world.run(_on_gpu, new_model(run.model), run)[0] for run in runs]
    for outcomes in run_ranks(_process, 2, runs, timeout_s=LIMIT_S - 10):
        for (state, their_norms), (wanted_state, norms) in zip(outcomes, wanted, strict=True):
            assert their_norms == norms
            assert_same_bits(state, wanted_state)
