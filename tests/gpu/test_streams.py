"""Collectives are ordered on streams, and tensors live as long as their collectives."""

import pytest
import torch

from tests.gpu.worlds import DEVICE, ramp

COUNT = 1 << 20
# Long enough that a collective queued behind it has not begun when the host goes on.
BUSY_CYCLES = 400_000_000


def keep_busy():
    torch.cuda._sleep(BUSY_CYCLES)


def test_a_call_is_ordered_on_the_current_stream(gpu_worlds):
    def body(comm):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            tensor = torch.zeros(COUNT, device=DEVICE)
            keep_busy()
            tensor += comm.rank + 1
            comm.all_reduce(tensor)
            tensor *= 2
        stream.synchronize()
        return tensor

    for tensor in gpu_worlds(2).run(body):
        assert bool((tensor == 6).all())


def test_wait_orders_the_stream_and_not_the_host(gpu_worlds):
    def body(comm):
        with torch.cuda.stream(torch.cuda.Stream()):
            keep_busy()
            tensor = ramp(COUNT, comm.rank)
            work = comm.all_reduce(tensor, async_op=True)
            work.wait()
            result = tensor.clone()
            # The host has come here while the stream is still busy with what came first.
            ahead = not torch.cuda.current_stream().query()
            torch.cuda.current_stream().synchronize()
            assert work.is_completed() and work.is_success()
        return result, ahead

    expected = ramp(COUNT, 0) + ramp(COUNT, 1)
    for result, ahead in gpu_worlds(2).run(body):
        assert torch.equal(result, expected)
        assert ahead


def test_a_tensor_freed_during_an_async_call_is_not_used_again_too_early(gpu_worlds):
    """In place, the collective would write into whatever gets the memory next."""

    def body(comm):
        others, works = [], []
        # torch gives freed memory to the next tensor of the same stream.
        with torch.cuda.stream(torch.cuda.Stream()):
            for turn in range(50):
                tensor = torch.full((4 * COUNT,), float(turn), device=DEVICE)
                works.append(comm.all_reduce(tensor, async_op=True))
                del tensor
                others.append(torch.full((4 * COUNT,), -5.0, device=DEVICE))
            torch.cuda.synchronize()
            for work in works:
                work.wait()
        return others

    for others in gpu_worlds(2).run(body):
        assert all(bool((other == -5).all()) for other in others)


def test_async_calls_complete_in_order(gpu_worlds):
    def body(comm):
        tensor = torch.full((COUNT,), float(comm.rank), device=DEVICE)
        works = [comm.all_reduce(tensor, async_op=True) for _ in range(10)]
        for work in works:
            work.wait()
        return tensor

    for tensor in gpu_worlds(2).run(body):
        assert bool((tensor == 2**9).all())


@pytest.mark.parametrize("algorithm", ["copy", "direct"])
def test_a_gather_overlaps_matrix_work(gpu_worlds, algorithm):
    """Both come out right; what overlapping gains is measured elsewhere."""

    def body(comm):
        part = ramp(COUNT, comm.rank)
        whole = torch.zeros(COUNT * comm.world_size, device=DEVICE)
        matrix = torch.eye(1024, device=DEVICE)
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
