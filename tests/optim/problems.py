# SPDX-License-Identifier: Apache-2.0
"""Parameters with scripted gradients, for ringcomm in any world and for torch on the mean."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ringcomm import Communicator
from ringcomm.optim import SGD, Adam, AdamW, AdamW8bit, AdamWOptions, Lion, Sharded
from ringcomm.optim.sharded import ShardedOptimizer

Tensor = torch.Tensor
# Several buckets of 512 and of 1024 elements; shapes cross chunks, or are scalar or empty.
SHAPES = ((3, 5), (700,), (), (0, 4), (33, 40), (64,), (1,))
SMALL_BUCKETS = AdamWOptions(bucket_elems=1024)


def values(shape: Sequence[int], seed: int) -> Tensor:
    """Returns float32 numbers around 1 in magnitude, the same on every rank and in every thread."""
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))


def whole_gradient(shape: Sequence[int], index: int, step: int, rank: int) -> Tensor:
    """Returns multiples of 12: sums and means over 1, 2, 3, 4 or 6 ranks are exact in 16 bits."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * index + rank)
    return 12.0 * torch.randint(-2, 3, tuple(shape), generator=generator)


class TorchLion(torch.optim.Optimizer):
    """Algorithm 2 of Chen et al., "Symbolic Discovery of Optimization Algorithms", in torch."""

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: Any = (0.9, 0.99),
        weight_decay: float = 0.0,
        **rest: Any,
    ) -> None:
        maximize = rest.get("maximize", False)
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                m = state["exp_avg"] = state.get("exp_avg", torch.zeros_like(p))
                g = -p.grad if group["maximize"] else p.grad
                p.mul_(1 - lr * group["weight_decay"])
                p.add_(m.mul(beta1).add_(g, alpha=1 - beta1).sign_(), alpha=-lr)
                m.mul_(beta2).add_(g, alpha=1 - beta2)


OURS: dict[type[torch.optim.Optimizer], Any] = {
    torch.optim.Adam: Adam,
    torch.optim.AdamW: AdamW,
    torch.optim.SGD: SGD,
    TorchLion: Lion,
    AdamW8bit: AdamW8bit,  # torch has no 8-bit AdamW
}


@dataclass
class Problem:
    """A small model and its data, for an optimizer.

    Attributes:
        dtype: dtype of the parameters.
        groups: further entries of each group; parameters are dealt to the groups in turn.
        gradient: function of shape, index, step and rank; returns None for no gradient.
        settings: arguments of the optimizer.
        torch_class: the class to compare with.
        sharded: the optimizer is ``torch_class`` itself, sharded.
    """

    dtype: torch.dtype = torch.float32
    groups: tuple[dict[str, Any], ...] = ({},)
    gradient: Callable[..., Tensor | None] = whole_gradient
    settings: dict[str, Any] = field(default_factory=dict)
    torch_class: type[torch.optim.Optimizer] = torch.optim.AdamW
    sharded: bool = False
    shapes: tuple[tuple[int, ...], ...] = SHAPES

    def params(self) -> list[Tensor]:
        """Makes new parameters, equal on all ranks."""
        return [
            values(shape, index).to(self.dtype).requires_grad_()
            for index, shape in enumerate(self.shapes)
        ]

    def dealt(self, params: list[Tensor]) -> list[dict[str, Any]]:
        """Returns the param groups."""
        count = len(self.groups)
        return [
            {**_copied(extra), "params": params[index::count]}
            for index, extra in enumerate(self.groups)
        ]

    def ours(
        self, params: list[Tensor], comm: Communicator | None, options: AdamWOptions = SMALL_BUCKETS
    ) -> ShardedOptimizer:
        settings = {"comm": comm, "options": options, **_copied(self.settings)}
        if self.sharded:
            return Sharded(self.torch_class, self.dealt(params), **settings)
        name = self.torch_class.__name__
        assert self.torch_class in OURS, f"{name}: add it to OURS in tests/optim/problems.py"
        made = OURS[self.torch_class](self.dealt(params), **settings)
        assert isinstance(made, ShardedOptimizer)
        return made

    def torch(self, params: list[Tensor]) -> torch.optim.Optimizer:
        make: Any = self.torch_class
        known = () if self.sharded else inspect.signature(make).parameters
        loops = {name: False for name in ("fused", "foreach") if name in known}
        return make(self.dealt(params), **loops, **_copied(self.settings))

    def give(self, params: list[Tensor], step: int, rank: int, scale: float = 1.0) -> None:
        """Sets the gradients of a step, as a backward after zero_grad() would."""
        for index, param in enumerate(params):
            grad = self.gradient(tuple(param.shape), index, step, rank)
            param.grad = None if grad is None else (grad * scale).to(param.dtype)

    def give_mean(self, params: list[Tensor], step: int, world: int, reduce: str = "avg") -> None:
        """Sets the sum or mean of ``world`` ranks' gradients, in the parameters' dtype."""
        for index, param in enumerate(params):
            grads = [self.gradient(tuple(param.shape), index, step, rank) for rank in range(world)]
            known = [grad.to(self.dtype).float() for grad in grads if grad is not None]
            total = sum(known[1:], known[0]) if known else None
            if total is not None and reduce == "avg":
                total = total / world
            param.grad = None if total is None else total.to(param.dtype)


def _copied(entries: dict[str, Any]) -> dict[str, Any]:
    """Copies entries, so that no two optimizers share a tensor lr."""
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in entries.items()}


def train(
    comm: Communicator | None, problem: Problem, steps: int, options: AdamWOptions = SMALL_BUCKETS
) -> tuple[list[Tensor], dict[str, Any]]:
    """Takes steps; returns the parameters and the full state."""
    params = problem.params()
    optimizer = problem.ours(params, comm, options)
    for step in range(steps):
        problem.give(params, step, 0 if comm is None else comm.rank)
        optimizer.step()
    return [param.detach().clone() for param in params], optimizer.full_state_dict()


def go_on(
    optimizer: ShardedOptimizer, problem: Problem, params: list[Tensor], first: int, steps: int
) -> None:
    """Takes further steps with the same gradient on every rank, so that all worlds step equally."""
    for step in range(first, first + steps):
        problem.give(params, step, 0)
        optimizer.step()


def started(
    comm: Communicator | None,
    problem: Problem,
    options: AdamWOptions = SMALL_BUCKETS,
    steps: int = 3,
) -> tuple[list[Tensor], ShardedOptimizer]:
    """Returns an optimizer after some steps, with its parameters."""
    params = problem.params()
    optimizer = problem.ours(params, comm, options)
    go_on(optimizer, problem, params, 0, steps)
    return params, optimizer


def assert_same_state(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Asserts that two full states are equal bit for bit."""
    assert a.keys() == b.keys() and a["state"].keys() == b["state"].keys()
    for index, entry in a["state"].items():
        assert entry.keys() == b["state"][index].keys()
        for name, tensor in entry.items():
            mine, other = torch.as_tensor(tensor), torch.as_tensor(b["state"][index][name])
            assert mine.dtype == other.dtype
            assert torch.equal(mine, other), (index, name)
    for index, master in a.get("master", {}).items():
        assert torch.equal(master, b["master"][index])


def model(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Makes a model with the same values on every rank."""
    made = torch.nn.Sequential(torch.nn.Linear(6, 40), torch.nn.Tanh(), torch.nn.Linear(40, 3))
    with torch.no_grad():
        for index, param in enumerate(made.parameters()):
            param.copy_(values(param.shape, index) * 0.3)
    return made.to(dtype)


def loss_of(net: torch.nn.Module, step: int) -> Tensor:
    dtype = next(net.parameters()).dtype
    return net(values((8, 6), 100 + step).to(dtype)).float().square().mean()
