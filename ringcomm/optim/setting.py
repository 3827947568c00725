# SPDX-License-Identifier: Apache-2.0
"""The settings of an optimizer: ranks, device, rule, options, and loss scaler."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ringcomm.comm.communicator import Communicator
from ringcomm.errors import ArgumentError, CheckpointError, where
from ringcomm.json_reader import DAMAGE, shown
from ringcomm.memory import normal_tensors
from ringcomm.optim.buckets import sharers_of
from ringcomm.optim.gradients import Accumulator
from ringcomm.optim.options import AdamWOptions
from ringcomm.optim.rules import UpdateRule

# ---- The loss scaler, which keeps 16-bit gradients in range by an adaptive scale ----------------

Tensor = torch.Tensor


@dataclass(frozen=True)
class LossScaleOptions:
    """The rules by which a loss scale changes; the defaults are common in mixed precision.

    Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2; hysteresis as in
    Megatron-LM's DynamicGradScaler.

    Attributes:
        init_scale: initial scale.
        growth_factor: factor by which the scale grows after ``growth_interval`` clean steps.
        backoff_factor: factor by which an overflow lowers the scale.
        growth_interval: number of clean steps in a row after which the scale grows.
        hysteresis: number of overflows, counted since the scale last grew, that lowers the scale;
            each further overflow lowers it again.
        min_scale: lower bound of the scale; steps that overflow at this scale are still skipped.
        max_scale: upper bound of the scale.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    min_scale: float = 1.0
    max_scale: float = 2.0**32

    def __post_init__(self) -> None:
        rules = {
            "growth_factor": (self.growth_factor >= 1.0, "a factor >= 1"),
            "backoff_factor": (0.0 < self.backoff_factor <= 1.0, "a factor in (0, 1]"),
            "growth_interval": (self.growth_interval >= 1, "a number of steps >= 1"),
            "hysteresis": (self.hysteresis >= 1, "a number of overflows >= 1"),
            "min_scale": (self.min_scale > 0.0, "a scale > 0"),
            "max_scale": (self.min_scale <= self.max_scale < float("inf"), "a scale >= min_scale"),
            "init_scale": (
                self.min_scale <= self.init_scale <= self.max_scale,
                f"a scale from {self.min_scale:g} to {self.max_scale:g}",
            ),
        }
        for name, (holds, expected) in rules.items():
            if not holds:
                raise ArgumentError(f"{name}: expected {expected}, got {getattr(self, name)!r}")


class LossScaler:
    """A loss scaler, whose scale adapts to overflows in the optimizer's steps.

    Pass it to one optimizer (``loss_scaler=``), which divides the gradients by the scale, skips
    steps that overflowed on any rank, and updates the scale, all on the device::

        scaler = LossScaler()
        optimizer = AdamW(params, loss_scaler=scaler)
        scaler.scale(loss).backward()
        optimizer.step()
    """

    def __init__(
        self, options: LossScaleOptions | None = None, device: torch.device | str = "cpu"
    ) -> None:
        self.options = options or LossScaleOptions()
        scale, hysteresis = self.options.init_scale, self.options.hysteresis
        with normal_tensors():
            self._scale = torch.full((), scale, dtype=torch.float32, device=device)
            # The number of clean steps in a row, and the number of overflows until the scale falls.
            self._clean = torch.zeros((), dtype=torch.int64, device=device)
            self._credit = torch.full((), hysteresis, dtype=torch.int64, device=device)
        self._owner: weakref.ref[object] | None = None

    def __repr__(self) -> str:
        # Do not show the scale, since reading it would wait for the device.
        return f"<ringcomm.optim.LossScaler on {self._scale.device}, {self.options}>"

    @property
    def current(self) -> Tensor:
        """The scale: float32, a scalar on the device, which steps update in place."""
        return self._scale

    def scale(self, loss: Tensor) -> Tensor:
        """Returns ``loss`` times the scale, differentiable; a scalar loss becomes float32."""
        return loss * self._scale

    def bind(self, owner: object) -> None:
        """Makes one optimizer the owner, whose steps update the scale.

        Raises:
            ArgumentError: another optimizer already owns the scaler.
        """
        before = self._owner() if self._owner is not None else None
        if before not in (None, owner):
            raise ArgumentError(
                "loss_scaler: belongs to another optimizer, whose steps change its scale; give "
                "each optimizer a loss scaler of its own"
            )
        self._owner = weakref.ref(owner)

    def update(self, found_inf: Tensor) -> None:
        """Updates the scale after a step, with no host synchronisation.

        Args:
            found_inf: a scalar on the scaler's device; not 0 when the step overflowed.
        """
        options = self.options
        overflow = found_inf != 0
        clean = torch.where(overflow, 0, self._clean + 1)
        credit = self._credit - overflow.to(torch.int64)
        lower = overflow & (credit <= 0)
        higher = clean >= options.growth_interval
        down = (self._scale * options.backoff_factor).clamp(min=options.min_scale)
        up = (self._scale * options.growth_factor).clamp(max=options.max_scale)
        self._scale.copy_(torch.where(lower, down, torch.where(higher, up, self._scale)))
        self._clean.copy_(torch.where(higher, 0, clean))
        # Keep the credit at 0 or above: a negative credit acts like 0, but cannot be loaded.
        self._credit.copy_(torch.where(higher, options.hysteresis, credit.clamp(min=0)))

    def state_dict(self) -> dict[str, Any]:
        """Returns the state: "scale", "clean_steps", "overflows_left" and "options"."""
        return {
            "scale": self._scale.item(),
            "clean_steps": int(self._clean.item()),
            "overflows_left": int(self._credit.item()),
            "options": asdict(self.options),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads the state that :meth:`state_dict` returned.

        Raises:
            CheckpointError: ``state`` is not a scaler's state; the scaler is unchanged.
        """
        names = {field.name for field in fields(LossScaleOptions)}
        try:
            scale, clean = float(state["scale"]), int(state["clean_steps"])
            credit, given = int(state["overflows_left"]), dict(state["options"])
            if set(given) != names or not 0.0 < scale < math.inf:
                raise ValueError("unexpected entries")
            if not (0 <= clean < 2**53 and 0 <= credit < 2**53):
                raise ValueError("invalid numbers of steps")
            options = LossScaleOptions(**given)
        except DAMAGE as error:
            raise CheckpointError(
                f"LossScaler.load_state_dict: expected the state of a LossScaler, got "
                f"{shown(state)} ({error})"
            ) from error
        self.options = options
        self._scale.fill_(scale)
        self._clean.fill_(clean)
        self._credit.fill_(credit)


@dataclass(frozen=True)
class Setting:
    """The settings with which an optimizer was built.

    Attributes:
        comm: the communicator, or None for a world of one.
        device: device of the parameters.
        rule: the update rule of the optimizer.
        options: options that torch's optimizer does not have.
        loss_scaler: the loss scaler, or None.
        accumulator: with ``options.accumulate_dtype``, the sums that backwards add to; else None.
        others: the mesh of other stages and shards of the model, or None.
    """

    comm: Communicator | None
    device: torch.device
    rule: UpdateRule
    options: AdamWOptions
    loss_scaler: LossScaler | None = None
    accumulator: Accumulator | None = None
    others: DeviceMesh | None = None

    @property
    def rank(self) -> int:
        return 0 if self.comm is None else self.comm.rank

    @property
    def sharers(self) -> Communicator | None:
        """The ranks that share the state: all ranks, or the ranks of this rank's node."""
        return sharers_of(self.comm, self.options.state)

    @property
    def shard_of(self) -> tuple[int, int]:
        """The index of the chunk that this rank keeps state for, and the number of chunks."""
        sharers = self.sharers
        return (0, 1) if sharers is None else (sharers.steps.shard_index, sharers.world_size)

    @property
    def launches(self) -> bool:
        """True if the kernels run on a device; the host must wait before it reads results."""
        return self.comm is not None and self.comm.launches

    @property
    def world_size(self) -> int:
        return 1 if self.comm is None else self.comm.world_size

    def loss_scale(self) -> float:
        """Returns the loss scale for the next backward."""
        return 1.0 if self.loss_scaler is None else float(self.loss_scaler.current)

    def unwatch(self, param: torch.Tensor) -> None:
        """Stops adding a parameter's gradients to the accumulator."""
        if self.accumulator is not None:
            self.accumulator.unwatch(param)

    def where(self, operation: str) -> str:
        """Returns the beginning of a message about an operation, which names it and this rank."""
        return where(f"optimizer.{operation}", self.rank, self.world_size)
