# SPDX-License-Identifier: Apache-2.0
"""Several sharded modules in one backward, and ranks that use different parameters of them."""

import gc
import re
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ringcomm
from ringcomm import functional, zero
from ringcomm.comm.agreement import any_rank
from ringcomm.errors import ArgumentError, MismatchError
from ringcomm.optim import AdamW
from ringcomm.zero.stages import order
from ringcomm.zero.stages.sharding import engine_of
from tests.support.covering import covering

OPTIONS = (
    zero.ZeroOptions(bucket_elems=512, overlap=False),
    zero.ZeroOptions(bucket_elems=512, overlap=True),
)


class Discriminator(nn.Module):
    """Three layers that all ranks use, and a layer that only some ranks use."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        self.b = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, more: bool) -> torch.Tensor:
        return self.b(self.body(x)) if more else self.body(x)


def _generator() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))


def _whole(module: nn.Module) -> nn.Module:
    """Makes parameters whole numbers, so that sums are exact in any order."""
    for param in module.parameters():
        param.data = torch.randint(-1, 2, param.shape).float()
    return module


def two_modules() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return _whole(_generator()), _whole(Discriminator())


def _norm(optimizer: AdamW) -> float:
    return float(optimizer.clip_grad_norm_(float("inf")))


def norms_of_two(comm, modules, stage, options, backward, turns=3):
    """Returns the norms of both modules' gradients per turn, with a learning rate of 0."""
    g, d = (
        zero.shard(deepcopy(each).to(comm.device), stage, comm=comm, options=options)
        for each in modules
    )
    optimizers = [AdamW(each.parameters(), lr=0.0, weight_decay=0.0) for each in (g, d)]
    found = []
    for turn in range(turns):
        backward(comm, g, d, turn)
        found.append([_norm(optimizer) for optimizer in optimizers])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return found


def _rows(comm, turn):
    generator = torch.Generator().manual_seed(10 * turn + comm.rank)
    return torch.randint(-1, 2, (2, 8), generator=generator).float().to(comm.device)


def one_uses_more(comm, g, d, turn):
    d(g(_rows(comm, turn)), comm.rank == 0).sum().backward()


def _by_turns(comm, g, d, turn):
    """Trains as adversaries do: first the discriminator alone, then both modules."""
    if turn % 2 == 0:
        d(g(_rows(comm, turn)).detach(), comm.rank == turn % 3).sum().backward()
    else:
        d(g(_rows(comm, turn)), comm.rank == turn % 3).sum().backward()


def _one_leaves_one_out(comm, g, d, turn):
    """Rank 0 uses both modules; rank 1 uses one module, a different one each turn."""
    x = _rows(comm, turn)
    if comm.rank == 0:
        d(g(x), True).sum().backward()
    elif turn % 2:
        d(x, False).sum().backward()
    else:
        g(x).sum().backward()


def _in_other_order(comm, g, d, turn):
    """The ranks run the modules in opposite orders, so autograd does as well."""
    x = _rows(comm, turn)
    first, then = (g, d) if comm.rank == 0 else (d, g)

    def run(module):
        return module(x, comm.rank == 0) if module is d else module(x)

    (run(first).sum() + run(then).sum()).backward()


def _checkpointed(comm, g, d, turn):
    """Reentrant checkpoints: the outer backward cannot see these parameters."""
    x = _rows(comm, turn).requires_grad_()
    h = checkpoint(g, x, use_reentrant=True)
    checkpoint(d, h, comm.rank == 0, use_reentrant=True).sum().backward()


BACKWARDS = (one_uses_more, _by_turns, _one_leaves_one_out, _in_other_order, _checkpointed)


@covering(
    strength=1, backward=BACKWARDS, options=dict(zip(("waits", "overlaps"), OPTIONS, strict=True))
)
def test_gradients_are_right_whatever_ranks_use(worlds, backward, options):
    """Norms equal those of stage 0; stages 0 and 1 reduce at the step, in the order of buckets."""
    modules = two_modules()
    wanted = worlds(2).run(norms_of_two, modules, 0, options, backward)
    assert any(norm > 0 for norm, _ in wanted[0])
    for stage in (1, 2, 3):
        assert worlds(2).run(norms_of_two, modules, stage, options, backward) == wanted


@pytest.mark.parametrize("stage", [2, 3])
def test_three_modules_on_three_ranks_under_no_sync(worlds, stage):
    """Each rank uses a different pair of modules; one module's gradients accumulate."""
    torch.manual_seed(0)
    bases = [_whole(_generator()) for _ in range(3)]

    def work(comm, stage):
        modules = [
            zero.shard(deepcopy(base), stage, comm=comm, options=OPTIONS[0]) for base in bases
        ]
        optimizers = [AdamW(each.parameters(), lr=0.0, weight_decay=0.0) for each in modules]
        with zero.no_sync(modules[0]):
            sum(module(_rows(comm, 0)).sum() for module in modules).backward()
        used = [modules[(comm.rank + shift) % 3] for shift in (1, 0)]
        used[0](used[1](_rows(comm, 1))).sum().backward()
        return [_norm(optimizer) for optimizer in optimizers]

    assert worlds(3).run(work, stage) == worlds(3).run(work, 1)


@pytest.mark.parametrize("stage", [2, 3])
def test_one_rank_may_run_backwards_alone_under_no_sync(worlds, stage):
    """This works although the communicator also reduces for another module."""

    bases = two_modules()

    def work(comm, stage):
        modules = [
            zero.shard(deepcopy(base), stage, comm=comm, options=OPTIONS[0]) for base in bases
        ]
        optimizer = AdamW(modules[0].parameters(), lr=0.0, weight_decay=0.0)
        with zero.no_sync(modules[0]):
            if comm.rank == 1:
                modules[0](_rows(comm, 0)).sum().backward()
        return _norm(optimizer)

    assert worlds(2).run(work, stage) == worlds(2).run(work, 1)


@pytest.mark.parametrize("stage", [2, 3])
def test_one_rank_may_take_gradients_alone(worlds, stage):
    """Forces are gradients of an energy by positions, which add nothing to the parameters."""
    g, d = two_modules()

    def work(comm):
        modules = [zero.shard(deepcopy(each), stage, comm=comm) for each in (g, d)]
        x = _rows(comm, 0).requires_grad_()
        found = []
        if comm.rank == 1:
            energy = modules[1](modules[0](x), True).sum()
            found = [*torch.autograd.grad(energy, x)]
            energy = modules[1](modules[0](x), True).sum()
            energy.backward(inputs=[x])
            found.append(x.grad)
        comm.barrier()
        return found

    x = _rows(worlds(2)[1], 0).requires_grad_()
    wanted = torch.autograd.grad(d(g(x), True).sum(), x)[0]
    found = worlds(2).run(work)[1]
    assert torch.equal(found[0], wanted)
    assert torch.equal(found[1], wanted)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_backward_that_raises_on_one_rank(worlds, stage):
    """The other ranks have reduced the backward's buckets; this rank catches up in its step."""
    base = _whole(_generator())

    def work(comm, breaks):
        module: Any = zero.shard(deepcopy(base), stage, comm=comm, options=OPTIONS[1])
        optimizer = AdamW(module.parameters(), lr=1e-2)
        for turn in range(2):
            if breaks and turn == 1:
                if comm.rank == 1:
                    handle = module[3].register_full_backward_pre_hook(_raise)
                    with pytest.raises(ValueError, match="on purpose"):
                        module(_rows(comm, 5)).sum().backward()
                    handle.remove()
                else:
                    module(_rows(comm, 5)).sum().backward()
                optimizer.zero_grad()
            module(_rows(comm, turn)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return zero.full_state_dict(module)

    broken, whole = (worlds(2).run(work, breaks)[0] for breaks in (True, False))
    assert all(torch.equal(broken[name], value) for name, value in whole.items())


def _raise(*_):
    raise ValueError("on purpose")


class Mixing(nn.Module):
    """Sums over the ranks between two layers; after the sum, only some ranks use an extra layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.some, self.last = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor, more: bool, group: ringcomm.Communicator) -> torch.Tensor:
        x = functional.all_reduce(self.first(x), group=group)
        return self.last(self.some(x) if more else x)


@pytest.mark.parametrize("stage", [2, 3])
def test_collectives_of_the_model_go_over_a_communicator_of_their_own(stage):
    base = _whole(Mixing())
    options = replace(OPTIONS[1], in_flight=1)  # with more, stage 2 would keep two for the step

    def work(comm, stage, owns):
        group = comm.new_group(range(2)) if owns else comm
        module = zero.shard(deepcopy(base), stage, comm=comm, options=options)
        optimizer = AdamW(module.parameters(), lr=0.0, weight_decay=0.0)
        module(_rows(comm, 0), comm.rank == 0, group).sum().backward()
        return _norm(optimizer)

    with ringcomm.local_world(2) as world:
        assert world.run(work, stage, True) == world.run(work, 1, True)
        with pytest.raises(MismatchError, match=r"bucket 1 of module \d in backward 1"):
            world.run(work, stage, False)


def test_reductions_that_are_out_of_order_are_named():
    """All buckets have one size, so that only their tags can tell them apart."""
    base = _whole(_generator())

    def work(comm):
        module = zero.shard(deepcopy(base), 2, comm=comm, options=OPTIONS[0])
        if comm.rank == 1:
            engine_of(module, "test").reduction.order.reverse()
        module(_rows(comm, 0)).sum().backward()

    with ringcomm.local_world(2) as world, pytest.raises(MismatchError) as caught:
        world.run(work)
    assert "512 elements, one_shot, bucket 5 of module 1 in backward 1, call" in str(caught.value)
    assert "512 elements, one_shot, bucket 0 of module 1 in backward 1, call" in str(caught.value)


def test_a_mismatch_names_the_last_backward_of_each_rank():
    base = _whole(_generator())

    def work(comm):
        module = zero.shard(deepcopy(base), 2, comm=comm, options=OPTIONS[0])
        module(_rows(comm, 0)).sum().backward()
        AdamW(module.parameters()).step()
        comm.all_reduce(torch.ones(3 + comm.rank))

    with ringcomm.local_world(2) as world, pytest.raises(MismatchError) as caught:
        world.run(work)
    for rank in range(2):
        assert re.search(
            rf"Rank {rank}'s last reduction of gradients is of bucket \d of module 1 in "
            r"backward 1\. ",
            str(caught.value),
        )


def _agreements(monkeypatch, work):
    calls = []

    def counting(*args):
        calls.append(args)
        return any_rank(*args)

    with monkeypatch.context() as patched:
        patched.setattr(order, "any_rank", counting)
        work()
    return len(calls)


def test_ranks_agree_only_where_there_are_several_modules(monkeypatch):
    comm = ringcomm.local_world(1)[0]

    def backward(module):
        return _agreements(monkeypatch, lambda: module(torch.ones(1, 8)).sum().backward())

    first = zero.shard(_generator(), 2, comm=comm)
    assert backward(first) == 0
    second = zero.shard(_generator(), 3, comm=comm)
    # Two agreements: one at the beginning, and one about the other module at the end.
    assert backward(first) == 2
    with zero.no_sync(first), zero.no_sync(second):
        assert backward(first) == 0
    assert torch.autograd.grad(first(torch.ones(1, 8)).sum(), [*first.parameters()])
    zero.remove_sharding(second)
    assert backward(first) == 0
    with pytest.raises(ArgumentError, match="meta"):
        zero.shard(nn.Linear(8, 8, device="meta"), 2, comm=comm, init=_raise_argument)
    assert backward(first) == 0
    third = zero.shard(_generator(), 2, comm=comm)
    del third
    gc.collect()
    assert backward(first) == 2
    # A module that was dropped is found when another module is sharded.
    fourth = zero.shard(_generator(), 2, comm=comm)
    zero.remove_sharding(fourth)
    assert backward(first) == 0


def _raise_argument(_):
    raise ArgumentError("meta")


def test_a_module_that_one_rank_has_dropped(worlds):
    g, d = two_modules()

    def work(comm):
        kept = [zero.shard(deepcopy(each), 2, comm=comm) for each in (g, d)]
        x = _rows(comm, 0)
        if comm.rank == 1:
            del kept[1]
            gc.collect()
            with pytest.raises(ArgumentError, match=r"sharded module 2 .* has dropped"):
                kept[0](x).sum().backward()
            raise ArgumentError("as expected")
        kept[1](kept[0](x), True).sum().backward()

    with ringcomm.local_world(2) as world, pytest.raises(ArgumentError, match="as expected"):
        world.run(work)
