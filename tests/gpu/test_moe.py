# SPDX-License-Identifier: Apache-2.0
"""Experts on a device: rows, sums and gradients have the host's bits, for each number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import pytest
import torch

import ringcomm
from ringcomm import Communicator
from ringcomm.comm.host.arguments import DTYPE_CODES
from ringcomm.extras import moe
from ringcomm.extras.moe.rows import run_native
from tests.extras.moe.cases import (
    Case,
    Learned,
    case,
    combined,
    dense,
    dispatched,
    joined,
    learn,
    seeded,
)
from tests.extras.moe.test_training import LR, OPTIONS, STEPS, Model, adamw, told, values
from tests.gpu.device import DEVICE, PLAIN, REAL, capture, on_host, synchronize
from tests.gpu.test_quantization import seconds_of
from tests.gpu.worlds import connect, one_launch_world, run_ranks
from tests.support.covering import covering

Tensor = torch.Tensor
T = TypeVar("T")
Worlds = Callable[[int], Any]

EXPERTS, HIDDEN = 8, 40
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RANKS = [1, 2, 4]
# Tokens, elements per token, and rows per token; larger than the caches of a GPU.
RATE_SHAPE = (16384, 4096, 4) if REAL else (8, 64, 4)


def cases_of(ranks: int, k: int, hidden: int = HIDDEN, dtype: torch.dtype = torch.float32) -> Any:
    """Returns a case per rank, each with another number of tokens; of several the last has none."""
    sizes = [0 if 0 < rank == ranks - 1 else 9 + 5 * rank for rank in range(ranks)]
    return [case(rank, k, tokens, hidden, dtype=dtype) for rank, tokens in enumerate(sizes)]


def on_device(given: Case) -> Case:
    weights = None if given.weights is None else given.weights.to(PLAIN)
    return Case(given.x.to(PLAIN), given.idx.to(PLAIN), weights)


def to_host(tensor: Tensor) -> Tensor:
    synchronize()
    return tensor.cpu()


def own(ys: list[Tensor], comm: Communicator) -> list[Tensor]:
    here = len(ys) // comm.world_size
    return ys[comm.rank * here : (comm.rank + 1) * here]


def in_heap(tensor: Tensor) -> Tensor:
    return ringcomm.empty(tensor.shape, dtype=tensor.dtype, device=DEVICE).copy_(tensor)


def assert_alike(found: Tensor, expected: Tensor, atol: float = 1e-5) -> None:
    """Compares bits; on a GPU with a tolerance, since its matrix products and tanh differ."""
    if REAL:
        # Sums of some 40 products, each with a relative error of 2^-24, forward and backward.
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=atol)
    else:
        assert torch.equal(found, expected)


def on_one_thread(body: Callable[[Communicator], T]) -> Callable[[Communicator], T]:
    """Wraps ``body`` for a rank's thread, so that backward runs on this thread.

    Ranks that share a GPU would otherwise share autograd's thread, and wait for each other there.
    """

    def call(comm: Communicator) -> T:
        with torch.autograd.set_multithreading_enabled(False):
            return body(comm)

    return call


# Rows of one hidden size are vectors of 16 bytes; rows of the other one are not aligned.
@covering(strength=2 if REAL else 1, ranks=RANKS, dtype=DTYPES, hidden=[HIDDEN, 37])
def test_rows_and_sums_have_the_bits_of_loops(
    gpu_worlds: Worlds, ranks: int, dtype: torch.dtype, hidden: int
) -> None:
    for k in (1, 2, 8):
        cases = cases_of(ranks, k, hidden, dtype)
        rows_of = dispatched(cases, EXPERTS)
        ys = [rows * (expert + 1) / 3 for expert, rows in enumerate(rows_of)]

        def body(comm: Communicator, cases: Any = cases, ys: Any = ys) -> tuple[Tensor, ...]:
            mine = on_device(cases[comm.rank])
            y = torch.cat(own(ys, comm)).to(PLAIN)
            rows, counts, handle = moe.dispatch(mine.x, mine.idx, mine.weights, EXPERTS, comm)
            # A handle is used twice, and a tensor in the heap is read in place.
            sums = moe.combine(y, handle), moe.combine(in_heap(y), handle)
            return tuple(map(to_host, (rows, counts, *sums)))

        world = gpu_worlds(ranks)
        for comm, (rows, counts, *sums) in zip(world, world.run(body), strict=True):
            expected = own(rows_of, comm)
            assert counts.tolist() == [len(each) for each in expected]
            assert torch.equal(rows, torch.cat(expected))
            for found in sums:
                assert torch.equal(found, combined(cases, ys, comm.rank))


@covering(strength=2 if REAL else 1, ranks=RANKS, weighted=[True, False])
def test_ranks_learn_what_one_rank_learns_on_the_host(
    gpu_worlds: Worlds, ranks: int, weighted: bool
) -> None:
    cases = cases_of(ranks, 2)
    if not weighted:
        cases = [each._replace(weights=None) for each in cases]
    experts = torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=seeded(7)) / 6
    whole = joined(cases)
    target = torch.randn(whole.x.shape, generator=seeded(8))
    with on_host():
        expected = dense(whole, experts, target)
    targets = target.split([len(each.x) for each in cases])

    def body(comm: Communicator) -> Learned:
        mine, rank = on_device(cases[comm.rank]), comm.rank
        found = learn(comm, mine, experts.to(PLAIN), targets[rank].to(PLAIN))
        return Learned(*map(to_host, found))

    found = gpu_worlds(ranks).run(on_one_thread(body))
    for name, whole_one in zip(Learned._fields, expected, strict=True):
        of_ranks = torch.cat([getattr(each, name) for each in found])
        assert_alike(of_ranks, whole_one)


def test_rows_of_nothing_have_gradients_of_nothing(gpu_worlds: Worlds) -> None:
    def body(comm: Communicator) -> Learned:
        mine = on_device(case(comm.rank, 2, hidden=0))
        none = torch.empty(EXPERTS, 0, 0, device=PLAIN)
        return Learned(*map(to_host, learn(comm, mine, none, torch.zeros_like(mine.x))))

    for found in gpu_worlds(2).run(on_one_thread(body)):
        assert found.out.shape == (13, 0)
        assert torch.equal(found.of_weights, torch.zeros(13, 2))


def _process(store: Any, rank: int, world_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    cases = cases_of(world_size, 2, dtype=dtype)
    with connect(store, rank, world_size) as comm:
        # The heaps differ in size and contents, so each rank's rows have other offsets.
        kept = ringcomm.empty(1000 * rank, device=DEVICE)
        mine = on_device(cases[rank])
        rows, _, handle = moe.dispatch(in_heap(mine.x), mine.idx, mine.weights, EXPERTS, comm)
        found = to_host(rows), to_host(moe.combine(rows, handle))
        del kept
        return found


def test_processes_exchange_what_threads_do() -> None:
    dtype = torch.bfloat16
    cases = cases_of(2, 2, dtype=dtype)
    rows_of = dispatched(cases, EXPERTS)
    for rank, (rows, sums) in enumerate(run_ranks(_process, 2, dtype)):
        assert torch.equal(rows, torch.cat(rows_of[4 * rank : 4 * rank + 4]))
        assert torch.equal(sums, combined(cases, rows_of, rank))


@pytest.mark.parametrize("compression", ["int8", "fp8"])
def test_quantized_rows_are_those_of_the_host(gpu_worlds: Worlds, compression: str) -> None:
    cases = cases_of(2, 2, hidden=256, dtype=torch.bfloat16)

    def body(comm: Communicator, here: Callable[[Case], Case]) -> Tensor:
        x, idx, _ = here(cases[comm.rank])
        return moe.dispatch(x, idx, None, EXPERTS, comm, compression=compression, max_rows=80)[0]

    with on_host(), ringcomm.local_world(2) as world:
        expected = world.run(body, lambda given: given)
    found = gpu_worlds(2).run(lambda comm: to_host(body(comm, on_device)))
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)


def test_an_expert_that_there_is_not_is_refused_on_all_ranks(gpu_worlds: Worlds) -> None:
    def body(comm: Communicator) -> ringcomm.RingcommError:
        mine = on_device(case(comm.rank, 2))
        idx = mine.idx.clone()
        if comm.rank == 0:
            idx[3, 1] = EXPERTS
            idx[5, 0] = -2
        with pytest.raises(ringcomm.RingcommError) as raised:
            moe.dispatch(mine.x, idx, mine.weights, EXPERTS, comm)
        moe.dispatch(mine.x, mine.idx, None, EXPERTS, comm)
        return raised.value

    here, there = gpu_worlds(2).run(body)
    assert isinstance(here, ringcomm.ArgumentError) and "topk_idx[3, 1]" in str(here)
    assert f"from 0 to {EXPERTS - 1}, or -1 for none, got {EXPERTS}" in str(here)
    assert isinstance(there, ringcomm.MismatchError) and "rank 0 refused" in str(there)


def test_memory_of_the_heap_is_free_behind_a_call(gpu_worlds: Worlds) -> None:
    """Later work on the stream may overwrite tensors that the rank lent: peers have read them."""

    def body(comm: Communicator) -> list[Tensor]:
        mine, found = on_device(case(comm.rank, 2, hidden=1024)), []
        for _ in range(5):
            x = in_heap(mine.x)
            rows, _, handle = moe.dispatch(x, mine.idx, None, EXPERTS, comm)
            x.fill_(float("nan"))
            y = in_heap(rows)
            out = moe.combine(y, handle)
            y.fill_(float("nan"))
            found += [to_host(rows), to_host(out)]
        return found

    assert all(each.isfinite().all() for found in gpu_worlds(2).run(body) for each in found)


def test_outboxes_are_written_by_turns(gpu_worlds: Worlds) -> None:
    """Calls follow each other without a collective between them, with rows of growing size."""

    def body(comm: Communicator) -> bool:
        good = []
        for turn in range(12):
            mine = on_device(case(comm.rank, 2, tokens=1 + turn, hidden=8 + 8 * turn))
            rows, _, handle = moe.dispatch(mine.x + turn, mine.idx, None, EXPERTS, comm)
            out = moe.combine(rows, handle)
            times = (mine.idx >= 0).sum(1, keepdim=True)
            wanted = torch.where(times == 2, 2 * (mine.x + turn), out)
            good.append(torch.equal(to_host(out), to_host(wanted)))
        return all(good)

    assert all(gpu_worlds(2).run(body))


def test_a_layer_trains_on_a_device(gpu_worlds: Worlds) -> None:
    def body(comm: Communicator) -> list[float]:
        torch.manual_seed(0)
        router = torch.nn.Linear(16, EXPERTS, bias=False)
        experts = torch.nn.ModuleList(
            torch.nn.Linear(16, 16) for _ in range(EXPERTS // comm.world_size)
        )
        layer = moe.MoE(router, experts, comm, counted_over=comm).to(PLAIN)
        x = torch.randn(32, 16, generator=seeded(comm.rank)).to(PLAIN)
        losses: list[float] = []
        for _ in range(4):
            loss = (layer(x) - x).square().mean()
            assert layer.auxiliary_loss is not None
            loss = loss + 0.01 * layer.auxiliary_loss
            loss.backward()
            with torch.no_grad():
                for each in layer.experts.parameters():
                    assert each.grad is not None
                    each.sub_(0.5 * each.grad)
                    each.grad = None
            losses.append(to_host(loss.detach()).item())
        return losses

    for losses in gpu_worlds(2).run(on_one_thread(body)):
        assert losses == sorted(losses, reverse=True) and losses[-1] < 0.9 * losses[0]


def test_it_trains_sharded_as_on_the_host(gpu_worlds: Worlds) -> None:
    """Trains 3 steps at stage 3, with experts over 2 of 4 ranks, and compares with the host."""

    def body(comm: Communicator) -> list[Tensor]:
        with comm.split(comm.rank // 2) as group:
            model: Any = Model(group).to(comm.device)
            moe.shard(model, 3, comm=comm, options=OPTIONS)
            optimizer = moe.Optimizer(model, adamw)
            found = [torch.tensor(told(model, optimizer, [comm.rank]))]
            return [*found, *map(to_host, values(model).values())]

    with on_host(), ringcomm.local_world(4) as world:
        expected = world.run(body)
    found = gpu_worlds(4).run(on_one_thread(body))
    # A gradient near 0 may have the other sign on a GPU; AdamW then steps the other way.
    most = 2 * LR * STEPS
    for mine, theirs in zip(found, expected, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert_alike(one, other, atol=most)


def test_rates(gpu_worlds: Worlds, record_property: Callable[[str, object], None]) -> None:
    """Records the rates of the kernels in bytes per second, and that of a copy of the rows."""
    [comm] = gpu_worlds(1)
    tokens, hidden, k = RATE_SHAPE
    seed = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, hidden, generator=seed).bfloat16().to(PLAIN)
    at = torch.randperm(tokens * k, generator=seed) % tokens
    entries = torch.stack([torch.zeros_like(at), at], 1).to(PLAIN)
    sources = torch.cat([entries, entries], 1)
    rows, sums = x.new_empty((tokens * k, hidden)), torch.empty_like(x)
    weights = torch.rand(tokens * k, generator=seed).to(PLAIN)
    dots, scaled, target = torch.empty_like(weights), torch.empty_like(rows), rows.clone()
    run, code = partial(run_native, comm, "rates"), DTYPE_CODES[x.dtype]
    ptrs, rows_ptrs = [x.data_ptr()], [rows.data_ptr()]
    figures: dict[str, tuple[int, Callable[[], object]]] = {
        "copy": (2 * rows.nbytes, lambda: target.copy_(rows)),
        "rows copied": (
            2 * rows.nbytes,
            lambda: run(
                "copy_rows", *(entries.data_ptr(), 2, len(rows), ptrs, 2 * hidden, rows.data_ptr())
            ),
        ),
        f"sums of {k} rows": (
            rows.nbytes + x.nbytes,
            lambda: run(
                "sum_rows",
                *(entries.data_ptr(), rows_ptrs, tokens, k, weights.data_ptr(), code, hidden),
                sums.data_ptr(),
            ),
        ),
        "rows scaled": (
            3 * rows.nbytes,
            lambda: run(
                "scale_rows",
                *(sources.data_ptr(), len(rows), ptrs, weights.data_ptr(), rows.data_ptr(), code),
                *(hidden, scaled.data_ptr(), dots.data_ptr()),
            ),
        ),
    }
    for name, (moved_bytes, call) in figures.items():
        call()
        synchronize()
        if REAL:
            record_property(f"GB/s, {name}", f"{moved_bytes / seconds_of(call) / 1e9:.0f}")
    # The product of a row with itself sums `hidden` positive numbers, so in any order the relative
    # error is at most hidden * 2^-24.
    squares = rows.float().square().sum(1)
    torch.testing.assert_close(to_host(dots), to_host(squares), rtol=2 * hidden / 2**24, atol=0)
    assert torch.equal(to_host(rows), to_host(x[at.to(PLAIN)]))


def test_a_closed_communicator_says_so() -> None:
    mine = on_device(case(0, 2))
    with one_launch_world(1) as world:
        [comm] = world
    with pytest.raises(ringcomm.AbortedError, match="closed"):
        moe.dispatch(mine.x, mine.idx, None, EXPERTS, comm)


def test_a_graph_is_refused(gpu_worlds: Worlds) -> None:
    mine = on_device(case(0, 2))
    [comm] = gpu_worlds(1)
    with pytest.raises(ringcomm.UnsupportedError, match="is capturing a graph"), capture():
        moe.dispatch(mine.x, mine.idx, None, EXPERTS, comm)
