# SPDX-License-Identifier: Apache-2.0
"""The fused kernels in Triton's interpreter, one process per rank, compared with torch."""

import itertools
import time
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from ringcomm import ArgumentError, CollectiveTimeout, UnsupportedError
from tests.tl.interpreter import LIMIT_S, Ranks, no_wait, open_context, run_ranks

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Half the distance between 1 and the next number: the largest relative error of one rounding.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def _small(shape, seed, dtype, most=2):
    """Returns whole numbers so small that sums of their products are exact in FP32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=generator).to(dtype)


# ---- all_gather_matmul --------------------------------------------------------------------------


def _product(context, rc, m, k, n, dtype, *, transposed=False):
    """Makes a call whose result is exact: sums of these products are whole and fit into FP32."""
    rank, world = context.comm.rank, context.comm.world_size
    a = context.empty((m, k), dtype)
    b = _small((n, k), 1000 + rank, dtype).T if transposed else _small((k, n), 50 + rank, dtype)
    shards = [_small((m, k), 2 * peer, dtype) for peer in range(world)]
    a.tensor.copy_(shards[rank])
    out = rc.all_gather_matmul(context, a, b)
    a.tensor.fill_(float("nan"))  # the call is over, so the user may overwrite the tensor
    want = (torch.cat(shards).double() @ b.double()).to(dtype)
    assert torch.equal(out, want), (m, k, n, dtype)


def _rounded_product(context, rc):
    """Multiplies random factors: FP32 sums of k products, rounded once."""
    m, k, n, dtype = 20, 100, 24, torch.bfloat16
    a = context.empty((m, k), dtype)
    torch.manual_seed(context.comm.rank)
    a.tensor.copy_(torch.randn(m, k))
    b = torch.randn(k, n).to(dtype)
    whole = torch.empty(context.comm.world_size * m, k, dtype=dtype)
    context.comm.all_gather_into_tensor(whole, a.tensor.clone())
    out = rc.all_gather_matmul(context, a, b)
    exact = whole.double() @ b.double()
    magnitude = whole.double().abs() @ b.double().abs()
    bound = exact.abs() * ROUNDING[dtype] + magnitude * (k + 1) * 2.0**-24
    assert ((out.double() - exact).abs() <= bound * 1.01).all()


def _products(store, rank, world):
    comm, context, rc = open_context(store, rank, world, blocks=4)
    with comm, context:
        # Ragged tiles; more tiles than chunks; other columns on each rank; an empty product.
        _product(context, rc, 33, 70, 37, torch.float32)
        _product(context, rc, 260, 5, 3, torch.float16)
        _product(context, rc, 20, 64, 1 + 2 * rank, torch.bfloat16, transposed=True)
        _product(context, rc, 4, 0, 3, torch.float32)
        _product(context, rc, 0, 4, 3, torch.float32)
        _rounded_product(context, rc)


@pytest.mark.parametrize("world", [1, 3])
def test_all_gather_matmul_is_that_of_torch(world):
    run_ranks(_products, world)


def _without_arrivals(store, rank, world):
    """Tells whether a rank with a late peer gets the right product, with waits and without."""
    comm, context, rc = open_context(store, rank, world, blocks=4)
    from ringcomm._tl import fused_compute as module

    a = context.empty((64, 16))
    rc.all_gather_matmul(context, a, torch.ones(16, 8))  # the first call synchronizes all ranks
    right = []
    for wait in (vars(module)["wait_acquire_sys"], no_wait):
        vars(module)["wait_acquire_sys"] = wait
        a.tensor.fill_(0.0)
        comm.barrier()
        time.sleep(0.4 * rank)
        a.tensor.fill_(1.0 + rank)  # data that a peer may read only now
        out = rc.all_gather_matmul(context, a, torch.ones(16, 8))
        comm.barrier()
        right.append(
            torch.equal(out, torch.tensor([16.0] * 64 + [32.0] * 64)[:, None].expand(128, 8))
        )
    return right


def test_without_its_waits_the_product_is_wrong():
    first, second = run_ranks(_without_arrivals, 2)
    assert first == [True, False]
    assert second[0]


def _alone(store, rank, world, name):
    comm, context, rc = open_context(store, rank, world, blocks=4)
    a = context.empty((8, 8))
    b = torch.ones(8, 8)
    words, operands = {
        "all_gather_matmul": (lambda: rc.context._words_of_gather(context, 2), (a, b)),
        "matmul_reduce_scatter": (lambda: rc.context._words_of_scatter(context, 2), (b, b, a)),
        "reduce_scatter_rms_norm": (
            lambda: context.zeros((context.blocks, world), torch.int32),
            (a, b[0]),
        ),
    }[name]
    context.keep(name, words)
    comm.timeout = 1.0
    if rank == 0:
        try:
            getattr(rc, name)(context, *operands)
        finally:
            store.set("over", "1")
    store.wait(["over"])


@pytest.mark.parametrize(
    "name", ["all_gather_matmul", "matmul_reduce_scatter", "reduce_scatter_rms_norm"]
)
def test_a_rank_that_does_not_come_is_named(name):
    with Ranks(_alone, 2, name) as ranks:
        outcome = ranks.wait(LIMIT_S)[0]
    assert isinstance(outcome.error, CollectiveTimeout), outcome.describe()
    assert f"{name}_kernel on rank 0 of 2" in str(outcome.error)
    assert "for rank 1" in str(outcome.error)


# ---- matmul_reduce_scatter ----------------------------------------------------------------------


def _sum_of_products(context, rc, m, k, n, dtype, *, transposed=False):
    """Makes a call, which must have the bits of reduce_scatter_tensor of rounded products."""
    comm = context.comm
    rank, world = comm.rank, comm.world_size
    inbox = context.empty((world * m, n), dtype)
    a = _small((world * m, k), 2 * rank, dtype)
    b = _small((n, k), 70 + rank, dtype).T if transposed else _small((k, n), 70 + rank, dtype)
    # Makes the 16-bit products large, so that sums over ranks are rounded.
    b = b * 51
    inbox.tensor.fill_(float("nan"))
    comm.barrier()
    out = rc.matmul_reduce_scatter(context, a, b, inbox)
    want = torch.empty(m, n, dtype=dtype)
    comm.reduce_scatter_tensor(want, (a.double() @ b.double()).to(dtype))
    assert torch.equal(out, want), (m, k, n, dtype)


def _sums_of_products(store, rank, world):
    comm, context, rc = open_context(store, rank, world, blocks=4)
    with comm, context:
        # Ragged tiles; more tiles than chunks; another k per rank; an empty product; an empty sum.
        _sum_of_products(context, rc, 33, 70, 37, torch.float32)
        _sum_of_products(context, rc, 260, 5, 3, torch.float16)
        _sum_of_products(context, rc, 20, 1 + 2 * rank, 64, torch.bfloat16, transposed=True)
        _sum_of_products(context, rc, 4, 0, 3, torch.float32)
        _sum_of_products(context, rc, 0, 4, 3, torch.float32)


@pytest.mark.parametrize("world", [1, 3])
def test_matmul_reduce_scatter_is_that_of_the_collective(world):
    run_ranks(_sums_of_products, world)


def _without_products_of_a_peer(store, rank, world):
    """Tells whether a rank with a late peer gets the right sum, with waits and without."""
    comm, context, rc = open_context(store, rank, world, blocks=4)
    from ringcomm._tl import fused_compute as module

    inbox = context.zeros((2 * 16, 8))
    a = torch.ones(2 * 16, 4)
    rc.matmul_reduce_scatter(context, a, torch.zeros(4, 8), inbox)
    right = []
    for wait in (vars(module)["wait_acquire_sys"], no_wait):
        vars(module)["wait_acquire_sys"] = wait
        inbox.tensor.fill_(0.0)
        comm.barrier()
        time.sleep(0.7 * rank)
        out = rc.matmul_reduce_scatter(context, a, torch.ones(4, 8), inbox)
        comm.barrier()
        right.append(out.eq(8.0).all().item())
    return right


def test_without_its_waits_the_sum_of_products_is_wrong():
    first, second = run_ranks(_without_products_of_a_peer, 2)
    assert first == [True, False]
    assert second[0]


def _with_a_reader_that_is_late(store, rank, world):
    """A rank begins the next call, whose products must not get into its late peer's sum."""
    comm, context, rc = open_context(store, rank, world, blocks=4)
    from ringcomm._tl import fused_compute as module

    # Eight chunks of one tile each; before the sum of the last, a rank has sent all its signals.
    inbox = context.zeros((2 * 256, 8))
    ones = torch.ones(2 * 256, 4)
    own_sum = vars(module)["sum_rows"]
    calls = itertools.count(1)

    def late(*arguments):
        if next(calls) % 8 == 0:
            time.sleep(1.0)
        own_sum(*arguments)

    if rank == 1:
        vars(module)["sum_rows"] = late
    found = []
    for step in range(1, 4):
        out = rc.matmul_reduce_scatter(context, ones, step * torch.ones(4, 8), inbox)
        found.append(out.eq(8.0 * step).all().item())
    comm.barrier()
    return found


def test_what_a_late_peer_reads_stays_until_it_has():
    assert run_ranks(_with_a_reader_that_is_late, 2) == [[True] * 3] * 2


# ---- reduce_scatter_rms_norm --------------------------------------------------------------------


def _norm(context, n, d, dtype, *, adds=False, summed="no", eps=1e-5):
    from ringcomm import tl as rc

    rank, world = context.comm.rank, context.comm.world_size
    x = context.empty((world * n, d), dtype)
    weight = _small((d,), 7, dtype, most=4)
    residual = _small((n, d), 900 + rank, dtype, most=8) if adds else None
    partials = [_small((world * n, d), peer, dtype, most=8) for peer in range(world)]
    x.tensor.copy_(partials[rank])
    want = torch.stack(partials).double().sum(0)[rank * n : (rank + 1) * n]
    if residual is not None:
        want = want + residual.double()
    added_to = {"no": None, "new": torch.empty(n, d, dtype=dtype), "residual": residual}
    summed = added_to[summed]
    out = rc.reduce_scatter_rms_norm(context, x, weight, eps=eps, residual=residual, summed=summed)
    x.tensor.fill_(float("nan"))
    if summed is not None:
        assert torch.equal(summed, want.to(dtype)), (n, d, dtype)
    normal = want * (want.square().mean(1, keepdim=True) + eps).rsqrt() * weight.double()
    # The sum is exact. The mean of its squares has d FP32 roundings, halved by the root; then
    # follow a quotient, a root of 2 ulp, two products and the last rounding.
    bound = normal.abs() * (ROUNDING[dtype] + (d / 2 + 8) * 2.0**-24)
    assert ((out.double() - normal).abs() <= bound * 1.01 + 1e-40).all(), (n, d, dtype)


def _norms(store, rank, world):
    comm, context, _ = open_context(store, rank, world, blocks=3)
    with comm, context:
        for dtype in DTYPES[:2]:
            _norm(context, 4, 96, dtype)
        for dtype in DTYPES[1:]:
            _norm(context, 5, 33, dtype, adds=True, summed="new")
        _norm(context, 2, 16384, torch.bfloat16, adds=True, summed="residual")
        _norm(context, 1, 1, torch.float32, summed="new")
        _norm(context, 0, 8, torch.float32, summed="new")


@pytest.mark.parametrize("world", [1, 3])
def test_reduce_scatter_rms_norm_is_that_of_torch(world):
    run_ranks(_norms, world)


def _late_partials(store, rank, world):
    """Tells whether a rank with a late peer gets the right sum, with waits and without."""
    comm, context, rc = open_context(store, rank, world, blocks=4)
    from ringcomm._tl import device

    x = context.zeros((2, 4))
    rc.reduce_scatter_rms_norm(context, x, torch.ones(4))  # the first call synchronizes all ranks
    right = []
    for wait in (device.wait_acquire_sys, no_wait):
        vars(device)["wait_acquire_sys"] = wait
        x.tensor.fill_(0.0)
        comm.barrier()
        time.sleep(0.7 * rank)
        x.tensor.fill_(3.0)
        summed = torch.empty(1, 4)
        rc.reduce_scatter_rms_norm(context, x, torch.ones(4), summed=summed)
        comm.barrier()
        right.append(summed.eq(6).all().item())
    return right


def test_without_its_waits_the_sum_is_wrong():
    first, second = run_ranks(_late_partials, 2)
    assert first == [True, False]
    assert second[0]


# ---- what is refused ----------------------------------------------------------------------------


def _refusals(store, rank, world):
    comm, context, rc = open_context(store, rank, world, blocks=4)
    a = context.empty((4, 8))
    b, weight = torch.ones(8, 3), torch.ones(8)
    gather, scatter, norm = (
        partial(each, context)
        for each in (rc.all_gather_matmul, rc.matmul_reduce_scatter, rc.reduce_scatter_rms_norm)
    )
    cases: list[Any] = [
        ("a: expected a result of Context.empty", gather, b, b),
        ("8 rows, the columns of a", gather, a, b.T),
        ("8 rows, the columns of a", gather, a, b.half()),
        ("context: expected more than 2 blocks", rc.all_gather_matmul, rc.Context(comm, 2), a, b),
        ("inbox: expected a result of Context.empty", scatter, b, b, b),
        (r"a: expected a contiguous tensor \(4, 4\)", scatter, torch.ones(4, 8)[:, ::2], b, a),
        ("a: expected a matrix of 4 rows", scatter, weight, b, a),
        (r"b: expected a matrix \(3, 8\) of torch.float32", scatter, torch.ones(4, 3), b, a),
        ("x: expected a matrix", norm, context.empty(4), weight),
        ("x: expected rows of at least one element", norm, context.empty((3, 0)), weight),
        ("weight: expected a contiguous tensor", norm, a, b),
    ]
    for text, call, *operands in cases:
        with pytest.raises(ArgumentError, match=text):
            call(*operands)
    with pytest.raises(UnsupportedError, match="at most 16384 elements, got 16385"):
        norm(context.empty((1, 16385)), weight)
    context.close()
    comm.close()


def test_arguments_that_do_not_fit_are_refused():
    run_ranks(_refusals, 1)
