# SPDX-License-Identifier: Apache-2.0
"""``torch.func`` on a sharded module: at stage 3 only inside ``unsharded()``."""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap

from ringcomm import zero
from ringcomm.errors import UnsupportedError
from ringcomm.optim import AdamW
from tests.support.covering import covering, in_test_all
from tests.zero.models import assert_same_bits

Tensor = torch.Tensor
STAGES = [1, 3, *in_test_all(0, 2)]
SMALL = zero.ZeroOptions(bucket_elems=512)
ROW = torch.linspace(-1, 1, 4)
X = torch.linspace(-2, 2, 12).view(3, 4)


def model() -> Any:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


def here(module: Any, stage: int) -> Any:
    return zero.unsharded(module) if stage == 3 else nullcontext()


def values(module: Any) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in module.named_parameters()}


def of_samples(module: Any, params: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the gradients of each row's loss."""

    def loss(given: dict[str, Tensor], row: Tensor) -> Tensor:
        return functional_call(module, given, (row[None],)).square().sum()

    found = vmap(grad(loss), in_dims=(None, 0))(params, X)
    assert isinstance(found, dict)
    return found


TRANSFORMS: dict[str, Any] = {
    "grad": lambda m: grad(lambda x: m(x).sum())(ROW),
    "grad of others": lambda m: grad(lambda p: functional_call(m, p, (X,)).sum())(
        {name: torch.ones(param.shape) for name, param in m.named_parameters()}
    )["0.weight"],
    "vjp": lambda m: vjp(m, ROW)[1](torch.ones(1))[0],
    "jvp": lambda m: jvp(m, (ROW,), (torch.ones(4),))[1],
    "jacrev": lambda m: jacrev(m)(ROW),
    "hessian": lambda m: hessian(lambda x: m(x).sum())(ROW),
}


@covering(strength=1, stage=range(4), name=[*TRANSFORMS])
def test_transforms_give_what_they_give_of_the_unsharded_module(worlds, stage, name):
    """One rank only, because torch shares the levels of forward differentiation among threads."""
    base, transform = model(), TRANSFORMS[name]

    def work(comm):
        module = zero.shard(deepcopy(base), stage, comm=comm, options=SMALL)
        if stage == 3:
            with pytest.raises(
                UnsupportedError, match=r"module '0', .* inside ringcomm\.zero\.unsharded"
            ):
                transform(module)
        with here(module, stage):
            found = transform(module)
        # A transform leaves no state behind: a step still works.
        optimizer = AdamW(module.parameters(), lr=1e-2)
        module(X).square().sum().backward()
        optimizer.step()
        return found, zero.full_state_dict(module)

    def untransformed(comm):
        module = zero.shard(deepcopy(base), 1, comm=comm, options=SMALL)
        optimizer = AdamW(module.parameters(), lr=1e-2)
        module(X).square().sum().backward()
        optimizer.step()
        return zero.full_state_dict(module)

    ((found, state),) = worlds(1).run(work)
    assert torch.equal(found, transform(base))
    assert_same_bits(state, worlds(1).run(untransformed)[0])


@pytest.mark.parametrize("stage", STAGES)
def test_one_rank_may_transform_alone_since_nothing_is_reduced(worlds, stage):
    base = model()

    def work(comm):
        module = zero.shard(deepcopy(base), stage, comm=comm, options=SMALL)
        found = None
        if comm.rank == 1:
            with here(module, stage):
                found = of_samples(module, values(module))["2.weight"], jacrev(module)(X[0])
        comm.barrier()
        return found

    _, found = worlds(2).run(work)
    assert torch.equal(found[0], of_samples(base, values(base))["2.weight"])
    assert torch.equal(found[1], jacrev(base)(X[0]))


@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_through_other_parameters_reduces_nothing_of_the_modules(worlds, stage):
    base = model()

    def work(comm):
        module: Any = zero.shard(deepcopy(base), stage, comm=comm, options=SMALL)
        others = {name: each.requires_grad_() for name, each in values(base).items()}
        functional_call(module, others, (X,)).square().sum().backward()
        optimizer = AdamW(module.parameters(), lr=1e-2)
        optimizer.step()
        return others["0.weight"].grad, zero.full_state_dict(module)

    base(X).square().sum().backward()
    for found, state in worlds(2).run(work):
        assert torch.equal(found, base[0].weight.grad)
        assert_same_bits(state, base.state_dict())
