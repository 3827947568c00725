# SPDX-License-Identifier: Apache-2.0
"""Batch normalisation over the batches of all ranks, which keeps buffers equal on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from ringcomm import zero
from ringcomm.errors import ArgumentError, MismatchError, UnsupportedError
from ringcomm.optim import AdamW
from tests.support.covering import covering
from tests.zero.models import SMALL_BUCKET_ELEMS, ConvNet, assert_same_bits

Tensor = torch.Tensor
#: Rows of each rank's batch; the statistics weigh each rank by its number of rows.
ROWS = (5, 2, 3)


SMALL = zero.ZeroOptions(bucket_elems=SMALL_BUCKET_ELEMS)


def rows(rank: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(20 + rank)
    return torch.randn(ROWS[rank], *shape, generator=generator) * 3 + 100 * rank


def close(found: Tensor | None, wanted: Tensor | None) -> None:
    assert found is not None and wanted is not None
    torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-5)


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d": (lambda: nn.BatchNorm1d(6), (6,)),
    "cumulative": (lambda: nn.BatchNorm1d(6, momentum=None), (6, 4)),
    "2d": (lambda: nn.BatchNorm2d(6, affine=False), (6, 2, 3)),
    "3d": (lambda: nn.BatchNorm3d(6, track_running_stats=False), (6, 2, 1, 2)),
}


@covering(strength=1, kind=[*LAYERS], world_size=[3, 2])
def test_ranks_have_the_statistics_and_gradients_of_the_whole_batch(worlds, kind, world_size):
    make, shape = LAYERS[kind]
    reference: Any = make()
    whole = torch.cat([rows(rank, *shape) for rank in range(world_size)]).requires_grad_()
    factors = torch.arange(whole.numel(), dtype=torch.float32).view(whole.shape).sin()

    def work(comm):
        norm: Any = zero.convert_sync_batchnorm(deepcopy(make()), comm)
        assert isinstance(norm, zero.SyncBatchNorm)
        begin = sum(ROWS[: comm.rank])
        mine = factors[begin : begin + ROWS[comm.rank]]
        own = rows(comm.rank, *shape).requires_grad_()
        for _ in range(2):
            out = norm(own)
        (out * mine).sum().backward()
        norm.eval()
        return out, own.grad, norm, norm(own.detach())

    for _ in range(2):
        wanted = reference(whole)
    (wanted * factors).sum().backward()
    reference.eval()
    outs, grads, norms, evaluated = zip(*worlds(world_size).run(work), strict=True)
    close(torch.cat(outs), wanted)
    close(torch.cat(grads), whole.grad)
    if reference.track_running_stats:
        close(torch.cat(evaluated), reference(whole))
    for norm in norms:
        assert norm.state_dict().keys() == reference.state_dict().keys()
        for name, buffer in reference.named_buffers():
            close(norm.get_buffer(name), buffer)
            assert torch.equal(norm.get_buffer(name), norms[0].get_buffer(name))
    for name, param in reference.named_parameters():
        close(sum(norm.get_parameter(name).grad for norm in norms), param.grad)


def test_a_rank_with_an_empty_batch_takes_part(worlds):
    def work(comm):
        norm: Any = zero.convert_sync_batchnorm(nn.BatchNorm1d(6), comm)
        own = rows(0, 6)[: 0 if comm.rank else None].requires_grad_()
        out = norm(own)
        out.square().sum().backward()
        return out, norm.running_var

    reference = nn.BatchNorm1d(6)
    wanted = reference(rows(0, 6))
    (out, var), (nothing, other) = worlds(2).run(work)
    close(out, wanted)
    close(var, reference.running_var)
    assert nothing.shape == (0, 6) and torch.equal(var, other)


def trained(comm, base, stage, converts=True):
    module: Any = deepcopy(base)
    if converts:
        module = zero.convert_sync_batchnorm(module, comm)
    zero.shard(module, stage, comm=comm, options=SMALL)
    optimizer = AdamW(module.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(comm.rank)
    for _ in range(3):
        module(torch.randn(4, 3, generator=generator)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return module


def test_all_stages_end_with_the_same_bits_on_all_ranks(worlds):
    torch.manual_seed(1)
    base = ConvNet()

    def work(comm, stage):
        return zero.full_state_dict(trained(comm, base, stage))

    wanted = worlds(2).run(work, 0)[0]
    for stage in (2, 3):
        for state in worlds(2).run(work, stage):
            assert_same_bits(state, wanted)


@pytest.mark.parametrize("stage", [0, 3])
def test_buffers_are_made_equal(worlds, stage):
    torch.manual_seed(1)
    base: Any = ConvNet()
    base.register_buffer("table", torch.full((3,), 0.1), persistent=False)

    def work(comm):
        module = trained(comm, base, stage, converts=False)
        own = {name: each.clone() for name, each in module.named_buffers()}
        module.normal.num_batches_tracked += comm.rank
        zero.sync_buffers(module)
        mean = {name: each.clone() for name, each in module.named_buffers()}
        module.normal.running_mean += comm.rank
        zero.sync_buffers(module, "rank0")
        last = {name: each.clone() for name, each in module.named_buffers()}
        with pytest.raises(ArgumentError, match='expected "mean" or "rank0"'):
            zero.sync_buffers(module, "max" if comm.rank else "mean")
        with pytest.raises(MismatchError, match="Option how"):
            zero.sync_buffers(module, "mean" if comm.rank else "rank0")
        return own, mean, last

    outcomes = worlds(3).run(work)
    owns, means, lasts = zip(*outcomes, strict=True)
    for name in ("normal.running_mean", "normal.running_var"):
        assert not torch.equal(owns[0][name], owns[1][name])
        wanted = torch.stack([own[name] for own in owns]).mean(0)
        torch.testing.assert_close(means[0][name], wanted, rtol=1e-6, atol=0.0)
    assert torch.equal(means[0]["table"], base.table), "the mean of equal values is not rounded"
    for mean, last in zip(means, lasts, strict=True):
        assert_same_bits(mean, means[0])
        assert_same_bits(last, means[0])
        assert mean["normal.num_batches_tracked"].item() == 3


def test_torchs_layer_is_refused_where_it_would_fail_or_take_one_ranks_batch(worlds):
    def work(comm):
        module = nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4))
        with pytest.raises(UnsupportedError, match=r"module '1': .*zero\.convert_sync_batchnorm"):
            zero.shard(module, 1, comm=comm)
        zero.shard(zero.convert_sync_batchnorm(module, comm), 1, comm=comm)
        with pytest.raises(ArgumentError, match="convert it before shard"):
            zero.convert_sync_batchnorm(module, comm)
        return type(module[1])

    assert worlds(2).run(work) == [zero.SyncBatchNorm] * 2
    alone = nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4))
    assert zero.convert_sync_batchnorm(alone, "alone") is alone
    zero.shard(alone, 1, comm=worlds(1)[0])


def test_a_layer_that_is_there_twice_stays_one(worlds):
    def work(comm):
        norm = nn.BatchNorm1d(4)
        module = zero.convert_sync_batchnorm(nn.Sequential(norm, nn.Linear(4, 4), norm), comm)
        assert isinstance(module, nn.Sequential)
        assert module[0] is module[2] is not norm and module[0].weight is norm.weight

    worlds(2).run(work)


def test_a_compiled_module_is_one_graph_with_the_statistics_of_all_ranks(worlds):
    torch.manual_seed(1)
    base = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    torch._dynamo.reset()

    def work(comm, compiles):
        module: Any = zero.convert_sync_batchnorm(deepcopy(base), comm)
        zero.shard(module, 2, comm=comm, options=SMALL)
        called: Any = module
        if compiles:
            called = torch.compile(module, backend="aot_eager", fullgraph=True)
        called(rows(comm.rank, 3)).square().sum().backward()
        AdamW(module.parameters(), lr=1e-2).step()
        return zero.full_state_dict(module)

    wanted = worlds(2).run(work, False)[0]
    for state in worlds(2).run(work, True):
        for name, tensor in state.items():
            close(tensor, wanted[name])
    torch._dynamo.reset()
