# SPDX-License-Identifier: Apache-2.0
"""Collectives in graphs: captured once, replayed often, mixed with other calls, after faults."""

from __future__ import annotations

import functools
import gc
import os
import signal
import threading
import time
import weakref
from contextlib import ExitStack
from typing import Any

import pytest
import torch

import ringcomm
from ringcomm import AbortedError, ArgumentError, CollectiveTimeout, PeerLost, UnsupportedError
from ringcomm.algorithms import spelled
from ringcomm.optim import AdamW, AdamWOptions
from tests.proof.faults.device.conftest import Rigs
from tests.proof.faults.device.rig import DEVICE, LONG_S, Gate, Rig, error_of, until
from tests.support.emulator import DriverError
from tests.support.emulator.capture import CapturedOperations
from tests.support.emulator.ptx import from_environment
from tests.support.faults import die
from tests.support.ranks import Ranks, run_ranks

# A replay takes 20 ms on an emulated device; this many replays use every slot several times.
REPLAYS = {"emulated": 24, "cuda": 1000}
GRACE_S = 0.05
UNJOINED = 904
# Numbers of elements: a small message, and a message of several segments.
SMALL, LARGE = 60, 3001


class Chain:
    """All kinds of collectives in one graph, on static tensors of all ranks."""

    def __init__(self, rig: Rig, world: Any, large: int = LARGE, in_heap: bool = False) -> None:
        self.rig, self.world, self.n = rig, world, len(world)
        self._in_heap = in_heap
        self.inputs = {how: self._tensors(count) for how, count in self._counts(large).items()}
        self.scattered = self._tensors(SMALL)
        self.gathered = self._tensors(SMALL * self.n)

    def _counts(self, large: int) -> dict[str, int]:
        return {"ll": SMALL, "one_shot": large, "ring": large, "scatter": SMALL * self.n}

    def _tensors(self, count: int) -> list[torch.Tensor]:
        if self._in_heap:
            return [ringcomm.zeros(count, device=DEVICE) for _ in range(self.n)]
        return [self.rig.full(count, 0.0) for _ in range(self.n)]

    def call(self) -> None:
        for how in ("ll", "one_shot", "ring"):
            self.world.all_reduce(self.inputs[how], algorithm=spelled(how, "all_reduce"))
        self.world.reduce_scatter_tensor(self.scattered, self.inputs["scatter"], algorithm="ring")
        self.world.all_gather_into_tensor(self.gathered, self.scattered, algorithm="one_shot")

    def fill(self, turn: int) -> None:
        for k, tensors in enumerate(self.inputs.values()):
            for rank, tensor in enumerate(tensors):
                tensor.fill_(turn % 13 + rank + k)
        for tensor in (*self.scattered, *self.gathered):
            tensor.fill_(-9)

    def check(self, turn: int) -> None:
        others = sum(range(self.n))
        for k, (how, tensors) in enumerate(self.inputs.items()):
            total = self.n * (turn % 13 + k) + others
            outputs = [*self.scattered, *self.gathered] if how == "scatter" else tensors
            for tensor in outputs:
                assert int((tensor != total).sum()) == 0, (how, turn, tensor, total)


@pytest.mark.parametrize("n", [2, 3])
def test_many_replays(rig: Rig, n: int) -> None:
    world = rig.world(n)
    with rig.ordered():
        chain = Chain(rig, world, large=LARGE if n == 2 else SMALL, in_heap=n == 3)
        chain.call()
        rig.synchronize()
        with rig.capture() as replay:
            chain.call()
        for turn in range(REPLAYS[rig.kind] if n == 2 else 12):
            chain.fill(turn)
            replay()
            chain.check(turn)


def test_other_calls_before_between_and_after_replays(rig: Rig) -> None:
    """Mixes replays with eager calls (from one or several threads) and with a second graph."""
    world = rig.world(2)
    with rig.ordered():
        chain, other = Chain(rig, world), Chain(rig, world)
        chain.fill(0)
        chain.call()
        chain.check(0)
        with rig.capture() as replay:
            chain.call()
        with rig.capture() as replay_other:
            other.call()
        for turn in range(REPLAYS[rig.kind] // 3):
            for each, again in ((chain, replay), (other, replay_other)):
                each.fill(turn)
                if turn % 3 == 0:
                    each.call()
                else:
                    again()
                each.check(turn)
            if turn % 5 == 0:
                rig.synchronize()
                assert world.run(lambda comm: eager_sum(rig, comm)) == [2.0, 2.0]
                rig.synchronize()


def eager_sum(rig: Rig, comm: Any) -> float:
    with rig.ordered():
        tensor = rig.full(LARGE, 1.0)
        comm.all_reduce(tensor, async_op=True).wait()
        return float(tensor.mean().item())


def replays_alone(store: Any, rank: int, n: int, kind: str, replays: int) -> float:
    rig = Rig(kind)
    comm = rig.connect(store, rank, n)
    counts = (SMALL, LARGE, LARGE, LARGE, LARGE * n)
    with rig.ordered():
        tensors = [rig.full(count, 0.0) for count in counts]
        eager = rig.full(SMALL, 1.0)
        comm.all_reduce(eager)
        replay = record_steps(rig, comm, tensors)
        others = sum(range(n))
        for turn in range(replays):
            for tensor in tensors:
                tensor.fill_(turn + rank)
            replay()
            total = n * turn + others
            *sums, _, whole = tensors
            for tensor in sums:
                assert int((tensor != total).sum()) == 0, (turn, tensor, total)
            wanted = torch.arange(turn, turn + n).repeat_interleave(LARGE).to(whole)
            assert int((whole != wanted).sum()) == 0
            if turn % 10 == 0:
                eager.fill_(turn)
                comm.all_reduce(eager, async_op=turn % 20 == 0)
                comm.barrier()
                assert int((eager != n * turn).sum()) == 0
        mean = float(eager.mean().item())
    comm.close()
    rig.close()
    return mean


def record_steps(rig: Rig, comm: Any, tensors: list[torch.Tensor]) -> Any:
    """Captures LL, a joined asynchronous call, a ring and a gather by copies, on one rank."""
    small, beside, ring, part, whole = tensors
    with rig.capture() as replay:
        comm.all_reduce(small, algorithm="ll")
        work = comm.all_reduce(beside, algorithm="two_shot", async_op=True)
        comm.all_reduce(ring, algorithm="ring")
        work.wait()
        comm.all_gather_into_tensor(whole, part, algorithm="copy_engine")
    return replay


def test_every_process_captures_its_own_part(kind: str) -> None:
    turns = 40
    assert run_ranks(replays_alone, 2, kind, turns) == [2.0 * (turns - 10)] * 2


def replays_steps(store: Any, rank: int, n: int, kind: str) -> tuple[list[float], bool]:
    """Takes steps of a sharded optimizer with clipping; the rate changes between replays."""
    rig = Rig(kind)
    comm = rig.connect(store, rank, n)
    with rig.ordered(), ExitStack() as end:
        eager, optimizer = (_optimizer(rig, comm) for _ in range(2))
        recorded = optimizer.param_groups[0]
        operations = None
        with rig.capture() as replay:
            if rig.emulated:
                record = functools.partial(
                    rig.runtime.run_on_stream, 0, rig.runtime.current_stream(0)
                )
                operations = end.enter_context(CapturedOperations(record, [recorded["lr"]]))
            _step(optimizer)
            end.close()
        for turn in range(1, 4):
            for each in (eager, optimizer):
                each.param_groups[0]["lr"].fill_(0.1 / turn)
                for param in each.param_groups[0]["params"]:
                    param.grad.fill_(turn * (1 + rank))
            replay()
            _step(eager)
        rig.synchronize()
        (one, two), (same, alike) = recorded["params"], eager.param_groups[0]["params"]
        ends = [float(one[0].item()), float(two[-1].item())]
        equal = torch.equal(one, same) and torch.equal(two, alike)
        if operations is not None:
            assert operations.errors == []
            operations.forget()
        del eager, optimizer, recorded, one, two, same, alike, param, each
    comm.close()
    rig.close()
    return ends, equal


def _optimizer(rig: Rig, comm: Any) -> AdamW:
    """Returns an optimizer after its first step, which allocates the memory that steps need."""
    params = [rig.full(count, 1.0).requires_grad_() for count in (LARGE, SMALL)]
    lr, options = rig.full(1, 0.1), AdamWOptions(algorithm="one_shot")
    optimizer = AdamW(params, lr=lr, comm=comm, options=options)
    for param in params:
        param.grad = torch.ones_like(param)
    _step(optimizer)
    return optimizer


def _step(optimizer: AdamW) -> None:
    optimizer.clip_grad_norm_(0.5)
    optimizer.clip_grad_value_(0.005)
    optimizer.step()


def test_every_process_replays_its_part_of_a_step(kind: str) -> None:
    (ends, equal), others = run_ranks(replays_steps, 2, kind)
    assert others == (ends, True) and equal
    assert all(end < 1.0 for end in ends)


def test_an_asynchronous_call_must_be_joined(emulated: Rigs) -> None:
    rig = emulated()
    comm = rig.world(1)[0]
    tensor = rig.full(SMALL, 1.0)
    with pytest.raises(DriverError) as caught, rig.capture():
        work = comm.all_reduce(tensor, async_op=True)
    assert caught.value.code == UNJOINED
    del work
    with rig.capture() as replay:
        comm.all_reduce(tensor, async_op=True).wait()
    replay()
    rig.synchronize()


def test_calls_of_one_capture_follow_each_other(emulated: Rigs) -> None:
    """The order holds on whichever streams of the capture the calls are made."""
    rig = emulated()
    comm, runtime = rig.world(1)[0], rig.runtime
    tensor, order = rig.full(SMALL, 1.0), []
    other = runtime.make_stream(0)

    def first() -> None:
        time.sleep(GRACE_S)
        order.append("first")

    with rig.capture() as replay:
        main = runtime.current_stream(0)
        runtime.wait_event(0, other.handle, runtime.record_event(0, main))
        runtime.run_on_stream(0, main, first)
        comm.all_reduce(tensor)
        with runtime.on_stream(other):
            comm.all_reduce(tensor)
        runtime.run_on_stream(0, other.handle, lambda: order.append("second"))
        runtime.wait_event(0, main, runtime.record_event(0, other.handle))
    for _ in range(2):
        replay()
        rig.synchronize()
    assert order == ["first", "second"] * 2


def test_a_capture_between_does_not_loosen_the_order(emulated: Rigs) -> None:
    rig = emulated()
    comm, runtime = rig.world(1)[0], rig.runtime
    tensor = rig.full(SMALL, 1.0)
    streams = [runtime.make_stream(0) for _ in range(2)]
    gate = Gate(rig, streams[0].handle)
    with runtime.on_stream(streams[0]):
        comm.all_reduce(tensor)
    with rig.capture():
        comm.all_reduce(tensor)
    with runtime.on_stream(streams[1]):
        comm.all_reduce(tensor)
    done = runtime.record_event(0, streams[1].handle)
    time.sleep(GRACE_S)
    assert not done.query()
    gate.open()
    until(done.query)


def test_tensors_of_a_capture_live_as_long_as_it(emulated: Rigs) -> None:
    """Otherwise a later part of the same graph would get the tensors' memory."""
    rig = emulated()
    comm = rig.world(1)[0]
    with rig.capture():
        tensor = rig.full(SMALL, 1.0)
        ref = weakref.ref(tensor)
        comm.all_reduce(tensor, async_op=True).wait()
        del tensor
        assert ref() is not None
    comm.barrier(async_op=True)
    assert ref() is None


def test_copies_of_all_ranks_from_one_thread_are_refused(rig: Rig) -> None:
    world = rig.world(2)
    inputs = [rig.full(SMALL, 1.0) for _ in world]
    outputs = [rig.full(2 * SMALL, 1.0) for _ in world]
    with pytest.raises(ArgumentError, match='expected any but "copy_engine"'):
        world.all_gather_into_tensor(outputs, inputs, algorithm="copy_engine")


def test_replays_of_an_aborted_communicator_do_nothing(rig: Rig) -> None:
    world = rig.world(2)
    with rig.ordered():
        chain = Chain(rig, world)
        chain.call()
        with rig.capture() as replay:
            chain.call()
        chain.fill(1)
        world[0].abort("no more")
        replay()
        replay()
        rig.synchronize()
        error = error_of(chain.call)
    assert isinstance(error, AbortedError)
    assert "no more" in str(error)


def one_replays(store: Any, rank: int, n: int, kind: str, end: str) -> tuple[Any, str]:
    """Replays on all ranks twice; the last rank does not join the third replay."""
    rig = Rig(kind)
    comm = rig.connect(store, rank, n)
    with rig.ordered():
        tensor = rig.full(LARGE, 0.0)
        comm.all_reduce(tensor)
        rig.synchronize()
        if end == "stop":
            comm.timeout = 2.0
        with rig.capture() as replay:
            comm.all_reduce(tensor)
        for _ in range(2):
            replay()
        rig.synchronize()
        if rank == n - 1:
            if end == "die":
                die()
            os.kill(os.getpid(), signal.SIGSTOP)
        replay()
        rig.synchronize()
        error = error_of(comm.barrier)
        replay()  # returns at once
        rig.synchronize()
    comm.close()
    rig.close()
    return type(error), str(error)


@pytest.mark.parametrize(("end", "expected"), [("die", PeerLost), ("stop", CollectiveTimeout)])
def test_a_fault_in_a_replay_is_reported(kind: str, end: str, expected: type) -> None:
    with Ranks(one_replays, 3, kind, end) as ranks:
        outcomes = ranks.wait(2 * LONG_S, [0, 1])
    for outcome in outcomes:
        assert outcome.ok, outcome.describe()
        error, text = outcome.value
        assert error is expected, text
        assert "rank 2" in text


# ---- a capture while the peers are eager -------------------------------------------------------


def one_captures(store: Any, rank: int, n: int, kind: str, replays: bool) -> tuple[str, str, bool]:
    """Rank 0 captures a call, and may replay it later; its peers make the same call eagerly."""
    rig = Rig(kind)
    comm = rig.connect(store, rank, n, timeout=LONG_S if replays else 2.0)
    error: Exception | None = None
    with rig.ordered():
        tensor = rig.full(LARGE, 1.0)
        comm.all_reduce(rig.full(LARGE, 0.0))
        rig.synchronize()
        try:
            if rank == 0:
                with rig.capture() as replay:
                    comm.all_reduce(tensor)
                if replays:
                    replay()
                else:
                    store.wait(["given up"])
            else:
                comm.all_reduce(tensor)
            for _ in range(2):
                rig.synchronize()
                comm.barrier()
        except ringcomm.RingcommError as raised:
            error = raised
        store.set("given up", b"")
        right = bool((tensor == n).all())
    comm.close()
    rig.close()
    return type(error).__name__, str(error), right


def test_a_capture_takes_no_part_in_the_peers_eager_call_before_its_replay(kind: str) -> None:
    assert run_ranks(one_captures, 2, kind, True) == [("NoneType", "None", True)] * 2
    (first, said, _), (error, text, _) = run_ranks(one_captures, 2, kind, False)
    assert error == "CollectiveTimeout" and "rank 0" in text, text
    # Rank 0's next call either meets the peer's abandoned call, or sees that the peer has given up.
    assert first in ("CollectiveTimeout", "MismatchError") and "rank 1" in said, said


# ---- a replay beside an eager call --------------------------------------------------------------


def overlaps(store: Any, rank: int, n: int, kind: str, blind: bool) -> tuple[str, str, bool]:
    """Rank 0 replays and calls at once, on two streams, before the other ranks do either.

    Args:
        blind: the words by which a kernel detects another kernel are cleared between the two.
    """
    rig = Rig(kind)
    comm = rig.connect(store, rank, n, timeout=5.0 if blind else LONG_S)
    with rig.ordered():
        replayed, eager = rig.full(LARGE, 1.0), rig.full(LARGE, 10.0)
        comm.all_reduce(rig.full(LARGE, 0.0), algorithm="two_shot")
        with rig.capture() as replay:
            comm.all_reduce(replayed, algorithm="two_shot")
        rig.synchronize()
        error: Exception | None = None
        try:
            if rank == 0:
                with rig.runtime.on_stream(rig.runtime.make_stream(0)):
                    replay()
                until(lambda: running(rig, comm) != {0})
                if blind:
                    clear_running(rig, comm)
                comm.all_reduce(eager, algorithm="two_shot")
                time.sleep(GRACE_S)
                store.set("overlapped", b"")
            else:
                store.wait(["overlapped"])
                replay()
                comm.all_reduce(eager, algorithm="two_shot")
            rig.synchronize()
            comm.barrier()
            rig.synchronize()
            comm.barrier()
        except ringcomm.RingcommError as raised:
            error = raised
        finally:
            store.set("overlapped", b"")
        right = bool((replayed == n).all()) and bool((eager == 10 * n).all())
    comm.close()
    rig.close()
    return type(error).__name__, str(error), right


def running_ptrs(comm: Any) -> list[int]:
    """Returns the addresses of the words by which a kernel marks its channels' lines as in use."""
    core = comm.engine.device_core
    first = core.heap.base_ptr + core.region[0] + core.native.sequence_offset_bytes + 12
    return [first + 64 * channel for channel in range(core.native.channels)]


def running(rig: Rig, comm: Any) -> set[int]:
    return {int.from_bytes(rig.runtime.read(0, ptr, 4), "little") for ptr in running_ptrs(comm)}


def clear_running(rig: Rig, comm: Any) -> None:
    time.sleep(GRACE_S)  # the other blocks begin in this time, too
    for ptr in running_ptrs(comm):
        rig.runtime.write(0, ptr, bytes(4))


def test_a_replay_beside_an_eager_call_raises_on_all_ranks(kind: str) -> None:
    if kind == "emulated" and from_environment() is not None:
        pytest.skip("the execution of PTX may report the two kernels' races first")
    for error, text, _ in run_ranks(overlaps, 2, kind, False):
        assert error == "ArgumentError", text
        assert "rank 0 began all_reduce" in text
        assert "a replay of a graph beside an eager call" in text


def test_without_the_words_such_calls_mix_their_data(kind: str) -> None:
    """The negative control: some data are wrong, or a rank waits until its deadline."""
    outcomes = run_ranks(overlaps, 2, kind, True)
    assert not all(error == "NoneType" and right for error, _, right in outcomes), outcomes
    assert not any(error == "ArgumentError" for error, _, _ in outcomes), outcomes


def test_close_waits_for_replays_under_way(emulated: Rigs) -> None:
    """The replays run on a stream that the communicator does not know."""
    rig = emulated()
    world = rig.world(2)
    chain = Chain(rig, world)
    chain.fill(3)
    chain.call()
    rig.synchronize()
    with rig.capture() as replay:
        chain.call()
    chain.fill(3)
    stream = rig.runtime.make_stream(0)
    gate = Gate(rig, stream.handle)
    with rig.runtime.on_stream(stream):
        for _ in range(3):
            replay()
    closing = threading.Thread(target=world.close)
    closing.start()
    time.sleep(GRACE_S)
    assert closing.is_alive()
    chain.fill(3)
    gate.open()
    closing.join(LONG_S)
    assert not closing.is_alive()
    # Three all-reduces: the first sums the ranks' values, the others sum equal values.
    total = 2 * 2 * (2 * 3 + 1)
    assert all(torch.equal(each, rig.full(SMALL, total)) for each in chain.inputs["ll"])


def test_a_graph_outlives_the_communicators_that_it_uses(emulated: Rigs) -> None:
    """The graph keeps the memory of its calls, as long as nobody closes the communicators."""
    rig = emulated()
    world = rig.world(2)
    rig.forget()
    with rig.ordered():
        chain = Chain(rig, world)
        chain.call()
        rig.synchronize()
        with rig.capture() as replay:
            chain.call()
        refs = [weakref.ref(comm) for comm in world]
        del world
        chain.world = ()
        gc.collect()
        assert [ref() for ref in refs] == [None, None]
        for turn in range(5):
            chain.fill(turn)
            replay()
            chain.check(turn)
    assert rig.used_bytes() > 256


def test_threads_cannot_capture_a_launch_that_they_share(rig: Rig) -> None:
    """They get an error before any of them waits for the others, and the world still works."""
    world = rig.world(2)
    with rig.ordered():
        chain = Chain(rig, world)
        chain.call()
        rig.synchronize()
        with rig.capture(), pytest.raises(UnsupportedError, match="from one thread"):
            world[0].all_reduce(chain.inputs["one_shot"][0])
        chain.fill(2)
        chain.call()
        chain.check(2)
