# SPDX-License-Identifier: Apache-2.0
"""Parameters, gradients and sums of gradients are in buckets, whose memory is freed later."""

from __future__ import annotations

import pytest
import torch

import ringcomm
from ringcomm.errors import ArgumentError
from ringcomm.memory.host_heap import process_heap
from ringcomm.optim import AdamW, AdamWOptions
from tests.optim.problems import Problem, loss_of, model
from tests.support.heap_use import settled_heap_bytes

Tensor = torch.Tensor
FP32_SUMS = AdamWOptions(bucket_elems=1024, accumulate_dtype=torch.float32)


def test_gradients_live_in_the_buckets_and_zeroing_keeps_them_there():
    net = model()
    optimizer = AdamW(net.parameters())
    loss_of(net, 0).backward()
    optimizer.step()
    addresses = [param.grad.data_ptr() for param in net.parameters()]
    optimizer.zero_grad(set_to_none=False)
    assert not any(param.grad.any() for param in net.parameters())
    loss_of(net, 1).backward()
    assert [param.grad.data_ptr() for param in net.parameters()] == addresses
    by_hand = [param.grad.clone() for param in net.parameters()]
    optimizer.step()
    for param, grad in zip(net.parameters(), by_hand, strict=True):
        torch.testing.assert_close(param.grad, grad, rtol=0.0, atol=0.0)
    next(net.parameters()).grad = torch.ones(40, 6)
    optimizer.zero_grad(set_to_none=False)
    assert not any(param.grad.any() for param in net.parameters())
    optimizer.zero_grad()
    assert all(param.grad is None for param in net.parameters())


def test_a_missing_gradient_is_not_the_last_steps():
    problem = Problem()
    params = problem.params()
    optimizer = problem.ours(params, None, AdamWOptions(unused="zero"))
    problem.give(params, 0, 0)
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.clip_grad_norm_(1.0).item() == 0.0


def test_parameters_move_to_the_heap_with_their_values_and_strides():
    net = torch.nn.Conv2d(3, 4, 3)
    net.weight.data = net.weight.detach().contiguous(memory_format=torch.channels_last)
    values_before = net.weight.detach().clone()
    optimizer = AdamW(net.parameters())
    optimizer.prepare()
    assert process_heap().contains(net.weight.data_ptr(), net.weight.nbytes)
    assert torch.equal(net.weight, values_before)
    assert net.weight.is_contiguous(memory_format=torch.channels_last)
    net(torch.ones(1, 3, 5, 5)).sum().backward()
    optimizer.step()
    assert net.weight.grad.stride() == net.weight.stride()


def test_all_ranks_start_from_rank_0s_parameters(worlds):
    def work(comm, options):
        params = [torch.full((5,), float(comm.rank + 1)).requires_grad_()]
        optimizer = AdamW(params, comm=comm, options=options)
        optimizer.prepare()
        return params[0].tolist(), optimizer

    told = [each[0] for each in worlds(3).run(work, AdamWOptions())]
    assert told == [[1.0] * 5] * 3
    kept = [each[0] for each in worlds(3).run(work, AdamWOptions(broadcast_parameters=False))]
    assert kept == [[1.0] * 5, [2.0] * 5, [3.0] * 5]


def test_frozen_and_tied_parameters():
    tied, frozen = torch.ones(3).requires_grad_(), torch.ones(3)
    net = torch.nn.ParameterList([torch.nn.Parameter(tied)])
    weight = net[0]
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = AdamW([weight, weight, frozen])
    weight.grad = torch.ones(3)
    optimizer.step()
    assert weight[0].item() == pytest.approx(1 - 1e-3 - 1e-5)
    assert torch.equal(frozen, torch.ones(3))
    full = optimizer.full_state_dict()
    assert list(full["state"]) == [0]
    assert full["param_groups"][0]["params"] == [0, 0, 2]


def test_a_parameter_that_left_its_bucket_is_found():
    weight = torch.ones(3).requires_grad_()
    optimizer = AdamW([weight])
    weight.grad = torch.ones(3)
    optimizer.step()
    weight.data = torch.zeros(3)
    with pytest.raises(ArgumentError, match="parameter 0: its memory was replaced"):
        optimizer.step()


def test_masters_follow_parameters_when_told():
    weight = torch.ones(600, dtype=torch.bfloat16).requires_grad_()
    optimizer = AdamW([weight], lr=0.0)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    with torch.no_grad():
        weight.fill_(3.0)
    optimizer.refresh_master_weights()
    optimizer.step()
    assert weight[0].item() == 3.0


@pytest.mark.parametrize("world", [1, 2])
def test_sums_in_fp32_keep_what_bfloat16_loses(worlds, world):
    """In bfloat16, 256 + 1 is 256."""

    def work(comm, options):
        weight = torch.zeros(600, dtype=torch.bfloat16).requires_grad_()
        optimizer = AdamW([weight], comm=comm, options=options)
        for part in (256.0, 1.0):
            (weight * part).sum().backward()
        norm = optimizer.clip_grad_norm_(1.0, float("inf"))
        optimizer.step()
        assert (weight.grad is None) == (options.accumulate_dtype is not None)
        return norm.item()

    assert worlds(world).run(work, AdamWOptions()) == [256.0] * world
    assert worlds(world).run(work, FP32_SUMS) == [257.0] * world


def test_fp32_sums_begin_before_the_buckets_exist_and_anew_after_zero_grad():
    weight = torch.zeros(5, dtype=torch.bfloat16).requires_grad_()
    optimizer = AdamW([weight], options=FP32_SUMS)
    (weight * 100).sum().backward()
    optimizer.zero_grad()
    for part in (256.0, 1.0):
        (weight * part).sum().backward()
    assert optimizer.clip_grad_norm_(1.0, float("inf")).item() == 257.0
    (weight * 1.0).sum().backward()
    assert optimizer.clip_grad_norm_(1.0, float("inf")).item() <= 258.0
    optimizer.step()
    optimizer.zero_grad()
    (weight * 3.0).sum().backward()
    assert optimizer.clip_grad_norm_(1.0, float("inf")).item() == 3.0


def test_hooks_do_not_outlive_the_optimizer():
    weight = torch.zeros(5, dtype=torch.bfloat16).requires_grad_()
    optimizer = AdamW([weight], options=FP32_SUMS)
    del optimizer
    (weight * 2).sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize("world", [1, 4])
@pytest.mark.parametrize(
    ("dtype", "options", "heap_bytes", "state_bytes"),
    [
        (torch.float32, AdamWOptions(), 8, 8),
        (torch.bfloat16, AdamWOptions(), 4, 12),
        (torch.float16, AdamWOptions(), 4, 12),
        (torch.bfloat16, AdamWOptions(master="remainder"), 4, 10),
        (torch.bfloat16, AdamWOptions(master="none", rounding="stochastic"), 4, 8),
        (torch.bfloat16, FP32_SUMS, 6, 12),
    ],
)
def test_it_takes_the_memory_that_it_says(worlds, world, dtype, options, heap_bytes, state_bytes):
    elems = 1 << 20

    def work(comm):
        return AdamW([torch.zeros(elems, dtype=dtype).requires_grad_()], comm=comm, options=options)

    made = worlds(world).run(work)
    before = settled_heap_bytes()
    worlds(world).run(lambda comm: made[comm.rank].prepare())
    assert ringcomm.heap_stats()["used_bytes"] - before == world * heap_bytes * elems
    for optimizer in made:
        (bucket,) = optimizer.sharded_step().buckets
        own = sum(tensor.nbytes for tensor in bucket.state.tensors().values())
        assert own == state_bytes * elems // world


def test_the_memory_comes_back(worlds):
    world = worlds(2)  # keeps its own memory
    before = settled_heap_bytes()

    def work(comm):
        weight = torch.zeros(100_000).requires_grad_()
        optimizer = AdamW([weight], comm=comm)
        weight.grad = torch.ones(100_000)
        optimizer.step()

    world.run(work)
    assert ringcomm.heap_stats()["used_bytes"] == before


def test_one_pass_has_no_gradient_shard_and_two_have_one(worlds):
    def work(comm, clip):
        weight = torch.zeros(3000).requires_grad_()
        optimizer = AdamW([weight], comm=comm)
        weight.grad = torch.ones(3000)
        if clip:
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        (bucket,) = optimizer.sharded_step().buckets
        return None if bucket.grad_shard is None else bucket.grad_shard.numel()

    assert worlds(2).run(work, False) == [None, None]
    assert worlds(2).run(work, True) == [1536, 1536]
