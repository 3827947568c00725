# SPDX-License-Identifier: Apache-2.0
"""Calls run by several threads of a rank: their bits, the number of threads, and their end."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import FileStore, HashStore, ReduceOp

import ringcomm
from ringcomm import (
    ArgumentError,
    CommOptions,
    Communicator,
    PeerLost,
    RendezvousError,
    RingcommError,
    _native,
)
from ringcomm.cli import doctor
from ringcomm.comm.host import threads as policy
from ringcomm.comm.host.arguments import DTYPE_CODES
from ringcomm.optim import AdamW, AdamWOptions
from tests.comm.test_no_threads import no_native_threads
from tests.support.exact import same
from tests.support.ranks import Ranks, run_ranks

Tensor = torch.Tensor
pytestmark = pytest.mark.usefixtures("workers")
# (channels, threads): includes several channels on one thread, and more threads than cores.
TEAMS = ((2, 1), (2, 2), (3, 3), (5, 2), (5, 5), (8, 3), (8, 8))
MOST = 8
# From this size on all eight channels have work; odd, so that the last part ends at an odd place.
ELEMS = MOST * (128 << 10) + 1
LONG_S = 60.0


@pytest.fixture(scope="module")
def workers() -> Iterator[None]:
    """Makes workers run even if the machine has fewer cores than the ranks have threads."""
    _native.wake_workers(True)
    yield
    _native.wake_workers(False)


def values(elems: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(elems, generator=generator).to(dtype)


def native(comm: Communicator) -> _native.Comm:
    core = comm.engine.core
    assert isinstance(core, _native.Comm)
    return core


def collectives(comm: Communicator) -> list[Tensor]:
    """Returns the results of every collective of tensors on this rank."""
    world, rank = comm.world_size, comm.rank
    each = ELEMS // world
    x, results = values(ELEMS, rank), []

    def keep(tensor: Tensor) -> None:
        results.append(tensor.clone())

    for algorithm in ("auto", "ring"):
        for source in (x, x.bfloat16(), (x * 100).to(torch.int64)):
            reduced = source.clone()
            op = ReduceOp.AVG if source.is_floating_point() else ReduceOp.MAX
            comm.all_reduce(reduced, op, algorithm=algorithm)
            keep(reduced)
        part = torch.empty(each)
        comm.reduce_scatter_tensor(part, x[: each * world].clone(), algorithm=algorithm)
        keep(part)
        whole = torch.empty(ELEMS * world)
        comm.all_gather_into_tensor(whole, x, algorithm=algorithm)
        keep(whole)
    heap = ringcomm.empty(ELEMS).copy_(x)
    comm.all_reduce(heap)
    keep(heap)
    for root in {0, world - 1}:
        sent = x.clone()
        comm.broadcast(sent, root)
        keep(sent)
        one = x.clone()
        comm.reduce(one, root)
        keep(one if rank == root else x)
        lists = [torch.zeros_like(x) for _ in range(world)] if rank == root else None
        comm.gather(x, lists, root)
        for got in lists or ():
            keep(got)
        got = torch.zeros_like(x)
        sources = [values(ELEMS, 10 + p) for p in range(world)] if rank == root else None
        comm.scatter(got, sources, root)
        keep(got)
    # Pieces of all sizes: large ones are split over the channels, others use the first channel.
    sizes = [(rank + p) % 3 * ELEMS // 2 + p for p in range(world)]
    takes = [(rank + p) % 3 * ELEMS // 2 + rank for p in range(world)]
    out = [torch.zeros(n) for n in takes]
    comm.all_to_all(out, [values(n, rank * world + p) for p, n in enumerate(sizes)])
    results += out
    return results


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_collectives_have_the_same_bits_with_any_team(world_size: int) -> None:
    with ringcomm.local_world(world_size, timeout=LONG_S) as alone:
        expected = alone.run(collectives)
    for channels, threads in TEAMS:
        options = CommOptions(timeout=LONG_S, channels=channels, threads=threads)
        with ringcomm.local_world(world_size, options=options) as world:
            assert native(world[0]).threads == threads
            for ours, theirs in zip(world.run(collectives), expected, strict=True):
                for one, other in zip(ours, theirs, strict=True):
                    assert same(one, other), (channels, threads)


STEPS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "one pass": (torch.float32, {}),
    "two passes": (torch.float32, {"check_finite": True}),
    "ring": (torch.bfloat16, {"algorithm": "ring", "check_finite": True}),
    "remainders": (torch.bfloat16, {"master": "remainder"}),
    "stochastic": (torch.bfloat16, {"master": "none", "rounding": "stochastic"}),
}


def steps(comm: Communicator, case: str) -> list[Tensor]:
    """Returns the parameters and norms after two optimizer steps."""
    dtype, choices = STEPS[case]
    params = [torch.nn.Parameter(values(n, n, dtype)) for n in (ELEMS * comm.world_size, 7, 700)]
    options = AdamWOptions(bucket_elems=512 * (ELEMS // 512 + 2) * comm.world_size, **choices)
    optimizer = AdamW(params, lr=1e-2, comm=comm, options=options)
    results = []
    for step in range(2):
        for i, param in enumerate(params):
            param.grad = values(param.numel(), 100 * step + 10 * i + comm.rank, dtype)
        if options.check_finite:
            results.append(optimizer.clip_grad_norm_(1.0).clone())
        optimizer.step()
    return [*results, *(param.detach().clone() for param in params)]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("case", STEPS)
def test_steps_have_the_same_bits_with_any_team(world_size: int, case: str) -> None:
    def run(channels: int, threads: int) -> list[list[Tensor]]:
        options = CommOptions(timeout=LONG_S, channels=channels, threads=threads)
        with ringcomm.local_world(world_size, options=options) as world:
            return world.run(steps, case)

    expected = run(1, 1)
    for channels, threads in ((1, 3), (2, 2), (5, 3), (8, 8)):
        for ours, theirs in zip(run(channels, threads), expected, strict=True):
            for one, other in zip(ours, theirs, strict=True):
                assert same(one, other), (channels, threads)


# ---- calls without a communicator ---------------------------------------------------------------


@contextmanager
def threads_of_local_calls(threads: int) -> Iterator[None]:
    options = CommOptions(timeout=LONG_S, threads=threads)
    with Communicator.from_store(HashStore(), 0, 1, options=options):
        assert _native.threads() == threads
        yield


def local_calls() -> list[Tensor]:
    """Returns the results of the native loops that need no communicator."""
    x, words = values(ELEMS, 1), torch.zeros(_native.GRAD_NORM_WORDS, dtype=torch.int64)
    f32, results = DTYPE_CODES[torch.float32], []
    for kind in _native.GRAD_NORM_KINDS.values():
        _native.grad_norm(x.data_ptr(), f32, ELEMS, kind, words.data_ptr())
        results.append(words.clone())
    for code in _native.QUANT_FORMATS.values():
        quantized = torch.zeros(_native.quantized_bytes(code, ELEMS), dtype=torch.uint8)
        lost, back = values(ELEMS, 2) / 8, torch.empty(ELEMS)
        _native.quantize(code, x.data_ptr(), f32, quantized.data_ptr(), ELEMS, lost.data_ptr())
        _native.dequantize_and_sum(code, [quantized.data_ptr()] * 2, back.data_ptr(), f32, ELEMS, 3)
        results += [quantized, lost, back]
    total, sources = torch.empty(ELEMS, dtype=torch.bfloat16), [x, values(ELEMS, 3)]
    _native.combine_partials(
        [each.data_ptr() for each in sources],
        f32,
        total.data_ptr(),
        DTYPE_CODES[torch.bfloat16],
        ELEMS,
        _native.OPS["SUM"],
        2,
    )
    return [*results, total, *rows()]


def rows(count: int = 2063, elems: int = 1027, k: int = 2) -> list[Tensor]:
    """Returns copies, sums, products and quantized forms of rows that are not adjacent."""
    generator = torch.Generator().manual_seed(5)
    bases = [values(count * elems, 20 + i).view(count, elems) for i in range(2)]
    ptrs, f32 = [base.data_ptr() for base in bases], DTYPE_CODES[torch.float32]
    entries = torch.randint(0, count, (count * k, 4), generator=generator)
    entries[:, 0] %= 2
    entries[::7, 0] = -1
    entries[:, 2:] = entries[:, :2]
    weights = values(count * k, 6)
    copied, dots = torch.empty(count * k, elems), torch.empty(count * k)
    scaled, summed = torch.empty_like(copied), torch.empty(count, elems)
    _native.copy_rows(entries.data_ptr(), 4, count * k, ptrs, 4 * elems, copied.data_ptr())
    _native.scale_rows(
        *(entries.data_ptr(), count * k, ptrs, weights.data_ptr(), copied.data_ptr()),
        *(f32, elems, scaled.data_ptr(), dots.data_ptr()),
    )
    pairs = entries[:, :2].contiguous()
    _native.sum_rows(
        *(pairs.data_ptr(), ptrs, count, k, weights.data_ptr(), f32, elems, summed.data_ptr())
    )
    code = _native.QUANT_FORMATS["fp8"]
    row_bytes = _native.quantized_bytes(code, elems)
    small = torch.zeros(count, row_bytes, dtype=torch.uint8)
    back = torch.empty(count * k, elems)
    _native.quantize_rows(code, bases[0].data_ptr(), f32, count, elems, small.data_ptr())
    entries[:, 0].clamp_(max=0)
    _native.dequantize_rows(
        *(code, entries.data_ptr(), 4, count * k, [small.data_ptr()], f32, elems, back.data_ptr())
    )
    return [copied, dots, scaled, summed, small, back]


def test_local_calls_have_the_same_bits_with_any_number_of_threads() -> None:
    with threads_of_local_calls(1):
        expected = local_calls()
    for threads in (2, 3, 5, 8):
        with threads_of_local_calls(threads):
            for i, (one, other) in enumerate(zip(local_calls(), expected, strict=True)):
                assert same(one, other), (threads, i)


# ---- how many threads ---------------------------------------------------------------------------


@pytest.fixture
def torch_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_torch_is_asked_at_each_call(torch_threads: Callable[[int], None]) -> None:
    assert policy.COUNTS_TORCHS_THREADS
    with Communicator.from_store(HashStore(), 0, 1, timeout=LONG_S) as comm:
        core = native(comm)
        core.use_threads(6, False, 1)
        for number in (1, 5, 3, 9):
            torch_threads(number)
            assert core.threads == min(number, 6)
        assert _native.threads() <= 6


class Facts:
    """The facts that one rank reports: its CPUs, cores, torch's threads, and its own option."""

    def __init__(self, cpus: str, cores: int, torch_threads: int, threads: int = 0) -> None:
        self.cpus, self.cores = cpus, cores
        self.torch_threads, self.threads = torch_threads, threads


SHARED = "ffff"


@pytest.mark.parametrize(
    ("facts", "channels", "expected"),
    [
        ([Facts(SHARED, 16, 16)] * 2, 8, (8, False, 8, False)),
        ([Facts(SHARED, 16, 16)] * 4, 8, (4, False, 4, False)),
        ([Facts(SHARED, 16, 3)] * 2, 8, (8, False, 3, False)),
        ([Facts(SHARED, 2, 2)] * 3, 8, (1, False, 1, True)),
        # Bound to separate cores, or to one socket of two.
        ([Facts("f", 4, 4), Facts("f0", 4, 4)], 8, (4, False, 4, False)),
        ([Facts("ff", 8, 8), Facts("ff", 8, 8), Facts("ff00", 8, 8)], 8, (4, False, 8, False)),
        # The limit of a control group is lower than the mask allows.
        ([Facts(SHARED, 3, 16)] * 2, 8, (1, False, 1, False)),
        # The option sets 5 threads: more than cores and torch's threads, and unlike the peer's.
        ([Facts(SHARED, 2, 1, 5), Facts(SHARED, 2, 1)], 8, (5, True, 5, True)),
        ([Facts(SHARED, 2, 1), Facts(SHARED, 2, 1, 5)], 8, (1, False, 5, True)),
        ([Facts(SHARED, 64, 64)], 4, (64, False, 4, False)),
    ],
)
def test_ranks_share_the_cores(
    facts: list[Facts], channels: int, expected: tuple[int, bool, int, bool]
) -> None:
    shared = policy.share_threads(facts, 0, channels)
    found = (shared.most, shared.is_exact, shared.channels, shared.is_crowded)
    assert found == expected


def test_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(policy.THREADS_VARIABLE, "3")
    assert policy.named_threads(CommOptions()) == 3
    assert policy.named_threads(CommOptions(threads=2)) == 2
    with Communicator.from_store(HashStore(), 0, 1, timeout=LONG_S) as comm:
        assert native(comm).threads == 3
    for wrong in ("0", "-1", "two", "65", "9" * 30):
        monkeypatch.setenv(policy.THREADS_VARIABLE, wrong)
        with pytest.raises(ArgumentError, match=policy.THREADS_VARIABLE):
            Communicator.from_store(HashStore(), 0, 1, timeout=LONG_S)
    with pytest.raises(ArgumentError, match="threads"):
        CommOptions(threads=65)


def test_channels_beyond_the_most_are_refused() -> None:
    with pytest.raises(ArgumentError, match="channels: expected 0 to 64 on the host, got 65"):
        Communicator.from_store(HashStore(), 0, 1, options=CommOptions(channels=65))


def test_the_doctor_says_what_sets_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(policy.THREADS_VARIABLE, raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(doctor, "available_cores", lambda: 4)
    found = doctor.check_threads()
    assert found.verdict == doctor.OK
    alone, _, shared = found.value.partition(" in large calls; ")
    assert re.fullmatch(r"a process alone uses \d+ threads?", alone)
    assert shared == "ranks that share cores divide them"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as torchrun does
    assert doctor.check_threads().verdict == doctor.NOTE
    monkeypatch.setenv(policy.THREADS_VARIABLE, "3")
    assert doctor.check_threads().value == "large calls use 3, by RINGCOMM_THREADS"
    monkeypatch.setenv(policy.THREADS_VARIABLE, "0")
    found = doctor.check_threads()
    assert found.verdict == doctor.FAIL and "RINGCOMM_THREADS: expected 1 to 64" in found.advice


def with_threads(store: Any, rank: int, world: int) -> list[Tensor]:
    _native.wake_workers(True)
    options = CommOptions(timeout=LONG_S, channels=5, threads=(1, 4, 3)[rank])
    with Communicator.from_store(store, rank, world, options=options) as comm:
        return collectives(comm)


def test_ranks_may_have_different_numbers_of_threads() -> None:
    with ringcomm.local_world(3, timeout=LONG_S) as alone:
        expected = alone.run(collectives)
    for ours, theirs in zip(run_ranks(with_threads, 3), expected, strict=True):
        assert all(map(same, ours, theirs))


# ---- how threads start and end ------------------------------------------------------------------


def test_a_pool_that_cannot_start_names_the_limits() -> None:
    # More workers than any earlier test has started, so that new threads must start.
    options = CommOptions(timeout=LONG_S, channels=32, threads=32)
    with no_native_threads(), pytest.raises(RendezvousError, match=r"RLIMIT_NPROC.*threads=1"):
        Communicator.from_store(HashStore(), 0, 1, options=options)
    with Communicator.from_store(HashStore(), 0, 1, options=options) as comm:
        comm.all_reduce(torch.ones(ELEMS))


def test_a_forked_child_has_workers_of_its_own() -> None:
    with threads_of_local_calls(4):
        expected, ended = local_calls(), threading.Event()

        def keep_busy() -> None:
            while not ended.is_set():
                local_calls()

        caller = threading.Thread(target=keep_busy)
        caller.start()
        try:
            for _ in range(5):
                pid = os.fork()
                if pid == 0:
                    os._exit(0 if all(map(same, local_calls(), expected)) else 1)
                assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        finally:
            ended.set()
            caller.join()


def killed_in_a_call(store: Any, rank: int, world: int) -> str:
    _native.wake_workers(True)
    options = CommOptions(timeout=LONG_S, channels=4, threads=3)
    comm = Communicator.from_store(store, rank, world, options=options)
    x = torch.ones(ELEMS)
    comm.all_reduce(x)
    store.set(f"ready{rank}", "1")
    try:
        while True:
            comm.all_reduce(x)
            store.set("running", "1")
    except PeerLost as error:
        assert "rank 1" in str(error)
        comm.close()
        with Communicator.from_store(store, rank - rank // 2, 2, name="again") as rest:
            rest.all_reduce(x)
        return "lost"


def test_a_rank_that_dies_while_its_team_works() -> None:
    with Ranks(killed_in_a_call, 3) as ranks:
        FileStore(ranks.store_path, 3).wait(["running"], timedelta(seconds=LONG_S))
        ranks.signal(1, signal.SIGKILL)
        outcomes = ranks.wait(LONG_S, [0, 2])
    assert [each.value for each in outcomes] == ["lost", "lost"]


def interrupted_call(store: Any, rank: int, world: int) -> str:
    _native.wake_workers(True)
    options = CommOptions(timeout=LONG_S, channels=4, threads=3)
    comm = Communicator.from_store(store, rank, world, options=options)
    x = torch.ones(ELEMS)
    comm.all_reduce(x)
    if rank == 0:
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        try:
            comm.all_reduce(x)  # rank 1 makes no call
        except KeyboardInterrupt:
            store.set("interrupted", "1")
            return "interrupted"
        return "not interrupted"
    store.wait(["interrupted"], timedelta(seconds=LONG_S))
    with pytest.raises(RingcommError, match="interrupted"):
        comm.all_reduce(x)
    return "told"


def test_ctrl_c_ends_a_call_of_a_team() -> None:
    assert run_ranks(interrupted_call, 2) == ["interrupted", "told"]
