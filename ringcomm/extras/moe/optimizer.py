"""One optimizer of both parts of a module with experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ringcomm.errors import ArgumentError, RingcommError, UnsupportedError
from ringcomm.extras.moe.sharding import parts_of
from ringcomm.memory import normal_tensors
from ringcomm.optim.agreement import Asked
from ringcomm.optim.clipping import NormBound, NormPart, agree_on_finite, clip_norm_of_parts
from ringcomm.optim.sharded import ShardedOptimizer

Tensor = torch.Tensor
_OPTIMIZER = "moe.Optimizer"


class Optimizer:
    """The optimizers of the dense part and of the experts, which step together.

    Norms are those of the whole model, and a step that ``check_finite`` skips is skipped for all of
    it. Schedules of learning rates are made for each of ``parts``::

        moe.shard(model, stage=2, comm=comm)
        optimizer = moe.Optimizer(model, lambda params: AdamW(params, lr=3e-4))
        schedulers = [LambdaLR(each, warmup) for each in optimizer.parts]

    Args:
        module: what :func:`ringcomm.moe.shard` returned.
        make: makes an optimizer of :mod:`ringcomm.optim` on a list of parameters; called for the
            dense part, and on ranks with experts for these. Equal on all ranks.

    Attributes:
        dense: the optimizer of the dense part.
        experts: that of the experts; None where there are none.

    Raises:
        ArgumentError: the module was not sharded, or ``make`` returns something else.
        UnsupportedError: an optimizer with a loss scaler, of which one is for one optimizer.
    """

    def __init__(self, module: nn.Module, make: Callable[[list[Tensor]], ShardedOptimizer]) -> None:
        self._parts = parts_of(module, _OPTIMIZER)
        experts = self._parts.experts
        of_experts: list[Tensor] = [] if experts is None else list(experts.parameters())
        known = set(map(id, of_experts))
        dense: list[Tensor] = [each for each in module.parameters() if id(each) not in known]
        self.dense = _made(make, dense)
        self.experts = _made(make, of_experts) if of_experts else None

    def __repr__(self) -> str:
        return f"<ringcomm.moe.Optimizer dense: {self.dense!r}, experts: {self.experts!r}>"

    @property
    def parts(self) -> list[ShardedOptimizer]:
        """The optimizers, that of the dense part first."""
        return [self.dense] if self.experts is None else [self.dense, self.experts]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all parts."""
        return [group for each in self.parts for group in each.param_groups]

    def prepare(self) -> None:
        """Prepares all parts; collective. See ``ShardedOptimizer.prepare``."""
        for each in self.parts:
            each.prepare()

    @normal_tensors()
    def step(self) -> None:
        """Takes one step of all parts; collective.

        Raises:
            Exception: as of ``ShardedOptimizer.step``. A hyper-parameter that cannot be used raises
                on all ranks before anything is changed.
        """
        parts = self._norm_parts()
        steps = [part.step for part in parts]
        if not any(each.updates_in_backward for each in steps):
            try:
                for each in steps:
                    each.check_hyper()
            except RingcommError as error:
                steps[0].agree(Asked(refusal=error))
                raise
            if any(each.two_passes for each in steps):
                agree_on_finite(parts, self._parts.stages)
        for part in self.parts:
            part.step()

    @normal_tensors()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scales the next step's gradient down to a norm of ``max_norm``; collective.

        Args:
            max_norm: as of ``ShardedOptimizer.clip_grad_norm_``.
            norm_type: as of ``ShardedOptimizer.clip_grad_norm_``.
            error_if_nonfinite: as of ``ShardedOptimizer.clip_grad_norm_``.

        Returns:
            The norm before, of the dense part once and of all experts; with stages of a pipeline
            ("pp" in the mesh of :func:`ringcomm.moe.shard`) of all stages.
        """
        bound_of = partial(NormBound.of, max_norm, norm_type, error_if_nonfinite)
        return clip_norm_of_parts(self._norm_parts(), self._parts.stages, bound_of)

    def clip_grad_value_(self, clip_value: float) -> None:
        """Limits each element of the gradient; see ``ShardedOptimizer.clip_grad_value_``."""
        for each in self.parts:
            each.clip_grad_value_(clip_value)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients of all parts."""
        for each in self.parts:
            each.zero_grad(set_to_none)

    def _norm_parts(self) -> list[NormPart]:
        dense = NormPart(self.dense.sharded_step())
        if self.experts is None:
            return [dense]
        return [dense, NormPart(self.experts.sharded_step(), self._parts.group)]


def _made(
    make: Callable[[list[Tensor]], ShardedOptimizer], params: list[Tensor]
) -> ShardedOptimizer:
    optimizer = make(params)
    if not isinstance(optimizer, ShardedOptimizer):
        raise ArgumentError(
            f"{_OPTIMIZER}: make: expected it to return an optimizer of ringcomm.optim, got a "
            f"{type(optimizer).__name__}"
        )
    if optimizer.scales_losses:
        raise UnsupportedError(
            f"{_OPTIMIZER}: make: expected an optimizer without loss_scaler=, which would adapt to "
            "the overflows of one part alone; train in bfloat16, which needs none"
        )
    return optimizer
