# SPDX-License-Identifier: Apache-2.0
"""The host time of a call: ``make gpu-check`` records it in its results; no test asserts it."""

import statistics
import time

import pytest
import torch

import ringcomm
from tests.gpu.device import DEVICE, PLAIN, REAL, synchronize
from tests.gpu.worlds import one_launch_world

pytestmark = pytest.mark.deadlines

# Times of an emulated device mean nothing: there the test only checks that the calls succeed.
CALLS, ROUNDS = (200, 7) if REAL else (2, 1)


def host_us(call):
    """Returns the median microseconds until a call returns; waits for the device once per round."""
    taken = []
    for _ in range(ROUNDS):
        synchronize()
        begin = time.perf_counter_ns()
        for _ in range(CALLS):
            call()
        taken.append((time.perf_counter_ns() - begin) / CALLS / 1e3)
        synchronize()
    return statistics.median(taken)


def test_launches_from_python(gpu_worlds, record_property):
    world = gpu_worlds(2)
    tensors = [ringcomm.zeros(256, device=DEVICE) for _ in range(2)]
    one = torch.zeros(256, device=PLAIN)
    with one_launch_world(1) as alone:
        figures = {
            "host us per one-launch all_reduce of 2 ranks": lambda: world.all_reduce(tensors),
            "host us per all_reduce of a communicator": lambda: alone[0].all_reduce(one),
            "host us per all_reduce with async_op": lambda: alone[0].all_reduce(one, async_op=True),
            "host us per all_reduce with async_op and wait()": lambda: (
                alone[0].all_reduce(one, async_op=True).wait()
            ),
            "host us per barrier of a communicator": alone[0].barrier,
            "host us per torch add_, for comparison": lambda: one.add_(0.0),
        }
        for name, call in figures.items():
            call()
            taken_us = host_us(call)
            if REAL:
                record_property(name, f"{taken_us:.2f}")
    assert all(bool((tensor == 0).all()) for tensor in [*tensors, one])
