# SPDX-License-Identifier: Apache-2.0
"""Collectives follow the order of streams, and tensors live as long as their collectives."""

import pytest
import torch

from tests.gpu.device import (
    PLAIN,
    REAL,
    is_busy,
    keep_busy,
    kept_busy,
    new_stream,
    synchronize_stream,
)
from tests.gpu.worlds import ramp

COUNT = 1 << (20 if REAL else 13)


def test_a_call_is_ordered_on_the_current_stream(gpu_worlds):
    def body(comm):
        with new_stream():
            tensor = torch.zeros(COUNT, device=PLAIN)
            keep_busy()
            tensor += comm.rank + 1
            comm.all_reduce(tensor)
            tensor *= 2
            synchronize_stream()
        return tensor

    for tensor in gpu_worlds(2).run(body):
        assert bool((tensor == 6).all())


def test_wait_orders_the_stream_and_not_the_host(gpu_worlds):
    def body(comm):
        with new_stream():
            tensor = ramp(COUNT, comm.rank)
            with kept_busy():
                work = comm.all_reduce(tensor, async_op=True)
                work.wait()
                # wait() did not block the host: the stream still works on what was queued first.
                ahead = is_busy()
            result = tensor.clone()
            synchronize_stream()
            assert work.is_completed() and work.is_success()
        return result, ahead

    expected = ramp(COUNT, 0) + ramp(COUNT, 1)
    for result, ahead in gpu_worlds(2).run(body):
        assert torch.equal(result, expected)
        assert ahead


@pytest.mark.parametrize("algorithm", ["copy_engine", "one_shot"])
def test_a_gather_overlaps_matrix_work(gpu_worlds, algorithm):
    """Both results are right; tests elsewhere measure the time that overlapping saves."""

    def body(comm):
        part = ramp(COUNT, comm.rank)
        whole = torch.zeros(COUNT * comm.world_size, device=PLAIN)
        matrix = torch.eye(1024 if REAL else 64, device=PLAIN)
        work = comm.all_gather_into_tensor(whole, part, async_op=True, algorithm=algorithm)
        product = matrix
        for _ in range(10):
            product = product @ matrix
        work.wait()
        assert torch.equal(product, matrix)
        return whole

    expected = torch.cat([ramp(COUNT, 0), ramp(COUNT, 1)])
    for whole in gpu_worlds(2).run(body):
        assert torch.equal(whole, expected)
