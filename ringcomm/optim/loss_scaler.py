"""The scale of the loss that keeps 16-bit gradients in range, found while training."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from ringcomm.errors import ArgumentError, CheckpointError

Tensor = torch.Tensor


@dataclass(frozen=True)
class LossScaleOptions:
    """How a loss scale moves; the defaults are those of mixed-precision practice.

    Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2; hysteresis as in
    Megatron-LM's DynamicGradScaler.

    Attributes:
        init_scale: where it starts.
        growth_factor: what a long time without overflow multiplies it by.
        backoff_factor: what an overflow multiplies it by.
        growth_interval: how many clean steps in a row are a long time.
        hysteresis: so many overflows, since the scale last grew, it takes until one lowers it; 1:
            the first does.
        min_scale: it goes no lower; the steps are still skipped.
        max_scale: it goes no higher.
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
    """Scales losses, and learns from the optimizer's steps how far.

    Pass it to one optimizer (``loss_scaler=``), which divides the gradients by the scale, skips
    steps that overflowed on any rank, and moves the scale, all on the device::

        scaler = LossScaler()
        optimizer = AdamW(params, loss_scaler=scaler)
        scaler.scale(loss).backward()
        optimizer.step()
    """

    def __init__(
        self, options: LossScaleOptions | None = None, device: torch.device | str = "cpu"
    ) -> None:
        self.options = options or LossScaleOptions()
        self._scale = torch.full((), self.options.init_scale, dtype=torch.float32, device=device)
        # Clean steps in a row, and overflows to come before one lowers the scale.
        self._clean = torch.zeros((), dtype=torch.int64, device=device)
        self._credit = torch.full((), self.options.hysteresis, dtype=torch.int64, device=device)
        self._owner: weakref.ref[object] | None = None

    @property
    def current(self) -> Tensor:
        """The scale, float32, a scalar on the device; it changes with each step."""
        return self._scale

    def scale(self, loss: Tensor) -> Tensor:
        """``loss`` times the scale, differentiable; a scalar becomes float32, as torch promotes."""
        return loss * self._scale

    def bind(self, owner: object) -> None:
        """Makes one optimizer the owner, whose steps move the scale.

        Raises:
            ArgumentError: another one owns it.
        """
        before = self._owner() if self._owner is not None else None
        if before not in (None, owner):
            raise ArgumentError(
                "loss_scaler: belongs to another optimizer, whose steps move its scale; give each "
                "optimizer its own"
            )
        self._owner = weakref.ref(owner)

    def update(self, found_inf: Tensor) -> None:
        """Moves the scale after a step, with no host synchronisation.

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
        # Not below 0, where it would count for nothing.
        self._credit.copy_(torch.where(higher, options.hysteresis, credit.clamp(min=0)))

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers: "scale", "clean_steps", "overflows_left" and "options"."""
        return {
            "scale": self._scale.item(),
            "clean_steps": int(self._clean.item()),
            "overflows_left": int(self._credit.item()),
            "options": asdict(self.options),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a :meth:`state_dict`.

        Raises:
            CheckpointError: it is not one; the scaler is unchanged.
        """
        names = {field.name for field in fields(LossScaleOptions)}
        try:
            scale, clean = float(state["scale"]), int(state["clean_steps"])
            credit, given = int(state["overflows_left"]), dict(state["options"])
            if set(given) != names or not scale > 0.0 or clean < 0 or credit < 0:
                raise ValueError("unexpected entries")
            options = LossScaleOptions(**given)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"LossScaler.load_state_dict: expected the state of a LossScaler, got {state!r} "
                f"({error})"
            ) from error
        self.options = options
        self._scale.fill_(scale)
        self._clean.fill_(clean)
        self._credit.fill_(credit)
