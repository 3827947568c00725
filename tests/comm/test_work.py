# SPDX-License-Identifier: Apache-2.0
import gc
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch

import ringcomm
from ringcomm import AbortedError, CollectiveTimeout, RingcommError, Work


def test_async_calls_end_in_order(worlds):
    def body(comm):
        tensor = torch.ones(500)
        works = [comm.all_reduce(tensor, async_op=True) for _ in range(20)]
        assert all(isinstance(work, Work) for work in works)
        assert works[-1].wait()
        assert all(work.is_completed() and work.is_success() for work in works)
        assert torch.equal(tensor, torch.full((500,), 2.0**20))
        assert works[3].result() == [tensor]
        assert works[3].exception() is None

    worlds(2).run(body)


def test_every_collective_has_an_async_form(worlds):
    def body(comm):
        rank, one = comm.rank, torch.ones(2)
        pair, four = [torch.zeros(2), torch.zeros(2)], torch.zeros(4)
        works = [
            comm.all_reduce(one.clone(), async_op=True),
            comm.reduce(one.clone(), 0, async_op=True),
            comm.reduce_scatter(torch.zeros(2), [one, one], async_op=True),
            comm.reduce_scatter_tensor(torch.zeros(2), torch.ones(4), async_op=True),
            comm.all_gather(pair, one, async_op=True),
            comm.all_gather_into_tensor(four, one, async_op=True),
            comm.broadcast(one.clone(), 1, async_op=True),
            comm.gather(one, [torch.zeros(2)] if rank > 1 else None, 5 % 2, async_op=True)
            if rank != 1
            else comm.gather(one, [torch.zeros(2), torch.zeros(2)], 1, async_op=True),
            comm.scatter(torch.zeros(2), [one, one.clone()] if rank == 0 else None, async_op=True),
            comm.all_to_all_single(torch.zeros(4), torch.ones(4), async_op=True),
            comm.all_to_all([torch.zeros(2), torch.zeros(2)], [one, one], async_op=True),
            comm.barrier(async_op=True),
        ]
        for work in works:
            assert work.wait()
        assert torch.equal(four, torch.ones(4))
        assert torch.equal(pair[1], one)
        assert [len(work.result()) for work in works[:6]] == [1, 1, 1, 1, 2, 1]

    worlds(2).run(body)


def test_sync_call_waits_for_what_is_queued(worlds):
    def body(comm):
        tensor = torch.ones(4)
        work = comm.all_reduce(tensor, async_op=True)
        comm.all_reduce(tensor)
        assert work.is_completed()
        assert torch.equal(tensor, torch.full((4,), 4.0))

    worlds(2).run(body)


def test_future_carries_the_tensors(worlds):
    def body(comm):
        tensor = torch.ones(4)
        early = comm.all_reduce(tensor, async_op=True)
        doubled = early.get_future().then(lambda done: done.value()[0] * 10)
        assert torch.equal(doubled.wait(), torch.full((4,), 20.0))
        early.wait()
        late = early.get_future()
        assert late.done()
        assert late.value()[0] is tensor

    worlds(2).run(body)


def test_tensors_live_until_their_call_is_done(worlds):
    """Rank 0 drops the tensor and the Work before rank 1 takes part."""
    forgotten = threading.Event()

    def body(comm):
        if comm.rank == 0:
            comm.broadcast(torch.arange(50_000.0), 0, async_op=True)
            gc.collect()
            spoiler = [torch.zeros(50_000) for _ in range(4)]
            forgotten.set()
            comm.barrier()
            del spoiler
        else:
            forgotten.wait(30)
            got = torch.zeros(50_000)
            comm.broadcast(got, 0)
            comm.barrier()
            assert torch.equal(got, torch.arange(50_000.0))

    worlds(2).run(body)


def test_wait_with_a_timeout_leaves_the_call_going(worlds):
    release = threading.Event()

    def body(comm):
        tensor = torch.ones(3)
        if comm.rank == 1:
            release.wait(30)
        work = comm.all_reduce(tensor, async_op=True)
        if comm.rank == 0:
            with pytest.raises(CollectiveTimeout, match=r"all_reduce: not done after 0\.05 s"):
                work.wait(timedelta(milliseconds=50))
            assert not work.is_completed()
            assert not work.is_success()
            release.set()
        assert work.wait(timeout=30)
        assert torch.equal(tensor, torch.full((3,), 2.0))

    worlds(2).run(body)


def test_error_reaches_wait_exception_and_future():
    with ringcomm.local_world(2, timeout=60) as world:
        done = threading.Event()

        def body(comm):
            if comm.rank == 1:
                done.wait()
                return
            try:
                errors_reach(comm)
            finally:
                done.set()

        def errors_reach(comm):
            work = comm.all_reduce(torch.ones(3), async_op=True)
            future = work.get_future()
            late = comm.barrier(async_op=True)
            time.sleep(0.05)
            comm.abort("enough")
            with pytest.raises(AbortedError, match="enough"):
                work.wait()
            with pytest.raises(AbortedError, match="enough"):
                work.wait()
            assert isinstance(work.exception(), AbortedError)
            assert work.is_completed()
            assert not work.is_success()
            with pytest.raises(RuntimeError, match="enough"):
                future.wait()
            with pytest.raises(AbortedError, match="barrier on rank 0 of 2"):
                late.wait()

        world.run(body)


def test_submit_runs_in_order_and_may_call_collectives(worlds):
    def body(comm):
        order = []
        tensor = torch.ones(3)

        def step():
            order.append("submitted")
            comm.all_reduce(tensor)
            comm.barrier()
            return [tensor]

        first = comm.engine.submit(step, "step", timeout=30)
        comm.barrier()
        order.append("after")
        assert first.result() == [tensor]
        assert order == ["submitted", "after"]
        assert comm.timeout.total_seconds() == 60
        assert torch.equal(tensor, torch.full((3,), 2.0))
        failing = comm.engine.submit(lambda: [1 / 0], "failing")
        with pytest.raises(ZeroDivisionError):
            failing.wait()

    worlds(2).run(body)


def test_callback_may_call_a_collective(worlds):
    def body(comm):
        results = []

        def then(done):
            tensor = done.value()[0].clone()
            comm.all_reduce(tensor)
            results.append(tensor)
            return tensor

        future = comm.all_reduce(torch.ones(2), async_op=True).get_future().then(then)
        assert torch.equal(future.wait(), torch.full((2,), 4.0))
        assert len(results) == 1

    worlds(2).run(body)


def test_async_calls_on_the_worker_thread_run_at_once(worlds):
    """DDP's PowerSGD hook waits inside a callback for the future of such a call."""

    def body(comm):
        def step():
            tensor = torch.ones(2)
            work = comm.all_reduce(tensor, async_op=True)
            assert work.is_completed()
            assert work.get_future().wait() == [tensor]
            inner = comm.engine.submit(lambda: [tensor], "inner")
            assert inner.result() == [tensor]
            return [tensor]

        # If a future is already done, its callback runs in the thread that adds it.
        added = threading.Event()
        work = comm.engine.submit(lambda: step() if added.wait(60) else [], "step")
        chained = work.get_future().then(lambda done: step()[0] + done.value()[0])
        added.set()
        assert torch.equal(chained.wait(), torch.full((2,), 4.0))
        comm.barrier()

    worlds(2).run(body)


def test_waiting_for_what_stands_behind_is_refused(worlds):
    def body(comm):
        later: list[Any] = []
        ready = threading.Event()

        def step():
            ready.wait(30)
            with pytest.raises(RingcommError, match="would never end"):
                later[0].wait()
            return []

        first = comm.engine.submit(step, "step")
        later.append(comm.barrier(async_op=True))
        ready.set()
        first.wait()
        later[0].wait()

    worlds(2).run(body)


def test_only_receives_have_a_source(worlds):
    def body(comm):
        work = comm.barrier(async_op=True)
        work.wait()
        with pytest.raises(RingcommError, match="only known for a receive"):
            work.source_rank()
        with pytest.raises(ringcomm.ArgumentError, match="timeout >= 0"):
            comm.barrier(async_op=True).wait(-1)
        comm.barrier()
        assert "barrier" in repr(work)

    worlds(2).run(body)
