"""Learning rates over steps, as DeepSpeed's schedulers have them, as schedulers of torch.

A scheduler sets the rates of step 0 when it is built, and of step t at its t-th ``step()``, which
DeepSpeed's engine calls after each step that was not skipped. DeepSpeed counts iterations from -1,
so that its formulas are taken at t - 1, and step 0 has rates of its own.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ringcomm.errors import ArgumentError
from ringcomm.json_reader import shown

# One number for all param groups, or one for each.
Rates = float | Sequence[float]
_WARMUPS = ("log", "linear")


def _by_group(value: Rates, groups: int, name: str) -> list[float]:
    if not isinstance(value, Sequence):
        return [value] * groups
    if len(value) != groups:
        raise ArgumentError(
            f"scheduler.params.{name}: expected a number, or one for each of {groups} param "
            f"groups, got {len(value)}"
        )
    return list(value)


def _check_at_least(least: float, **numbers: float) -> None:
    for name, number in numbers.items():
        if number < least:
            raise ArgumentError(
                f"scheduler.params.{name}: expected a number >= {least:g}, got {shown(number)}"
            )


class Schedule(ABC):
    """The base of schedules, each a frozen dataclass of DeepSpeed's parameters."""

    @abstractmethod
    def rates(self, base: Sequence[float], t: int) -> list[float]:
        """Returns the learning rate of each param group.

        Args:
            base: the rates that the groups were built with.
            t: number of steps taken.
        """

    def momenta(self, groups: int, t: int) -> list[float] | None:
        """Returns the first beta of each group, with which the second is 0.99; None leaves both."""
        return None

    def build(self, optimizer: Optimizer) -> LRScheduler:
        """Returns a scheduler that sets the rates of an optimizer, from its first step on."""
        return ScheduledRates(optimizer, self)


class ScheduledRates(LRScheduler):
    """A scheduler of torch that sets the rates, and betas, of a schedule."""

    def __init__(self, optimizer: Optimizer, schedule: Schedule) -> None:
        self.schedule = schedule
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        """Returns the rates of the current step; called by torch."""
        groups = self.optimizer.param_groups
        momenta = self.schedule.momenta(len(groups), self.last_epoch)
        for group, momentum in zip(groups, momenta or (), strict=False):
            group["betas"] = (momentum, 0.99)
        return list(self.schedule.rates([float(each) for each in self.base_lrs], self.last_epoch))

    def state_dict(self) -> dict[str, Any]:
        """Returns torch's state, without the schedule, which is not part of it."""
        return {name: value for name, value in super().state_dict().items() if name != "schedule"}


@dataclass(frozen=True)
class _Warmup(Schedule):
    """The rise of the warm-ups: over ``warmup_num_steps``, as the logarithm or in a line."""

    def _check_warmup(self, steps: int, kind: str) -> None:
        if steps < 1:
            raise ArgumentError(
                f"scheduler.params.warmup_num_steps: expected an integer >= 1, got {shown(steps)}"
            )
        if kind not in _WARMUPS:
            raise ArgumentError(
                f"scheduler.params.warmup_type: expected one of {', '.join(_WARMUPS)}, got "
                f"{shown(kind)}"
            )


def _rise(kind: str, iteration: int, steps: int) -> float:
    if kind == "log":
        return 1.0 / math.log(steps) * math.log(iteration + 1)
    return iteration / steps


@dataclass(frozen=True)
class WarmupLR(_Warmup):
    """From a least rate to a largest one, which stays."""

    warmup_min_lr: Rates = 0.0
    warmup_max_lr: Rates | None = None
    warmup_num_steps: int = 1000
    warmup_type: str = "log"

    def __post_init__(self) -> None:
        self._check_warmup(self.warmup_num_steps, self.warmup_type)

    def _gamma(self, iteration: int) -> float:
        steps = max(2, self.warmup_num_steps)
        return _rise(self.warmup_type, iteration, steps) if iteration < steps else 1.0

    def rates(self, base: Sequence[float], t: int) -> list[float]:
        least = _by_group(self.warmup_min_lr, len(base), "warmup_min_lr")
        most = list(base)
        if self.warmup_max_lr is not None:
            most = _by_group(self.warmup_max_lr, len(base), "warmup_max_lr")
        if t == 0:
            return least
        gamma = self._gamma(t - 1)
        return [low + (high - low) * gamma for low, high in zip(least, most, strict=True)]


@dataclass(frozen=True)
class WarmupDecayLR(WarmupLR):
    """From a least rate to a largest one, and down to 0 in a line."""

    total_num_steps: int = 0
    warmup_max_lr: Rates | None = 0.001

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_at_least(1, total_num_steps=self.total_num_steps)

    def _gamma(self, iteration: int) -> float:
        steps = max(2, self.warmup_num_steps)
        if iteration < steps:
            return _rise(self.warmup_type, iteration, steps)
        left = float(self.total_num_steps - iteration)
        return max(0.0, left / float(max(1.0, self.total_num_steps - steps)))


@dataclass(frozen=True)
class WarmupCosineLR(_Warmup):
    """From a share of the optimizer's rate to all of it, and down along a cosine."""

    total_num_steps: int = 0
    warmup_min_ratio: float = 0.0
    warmup_num_steps: int = 1000
    cos_min_ratio: float = 0.0001
    warmup_type: str = "log"

    def __post_init__(self) -> None:
        self._check_warmup(self.warmup_num_steps, self.warmup_type)
        _check_at_least(1, total_num_steps=self.total_num_steps)

    def rates(self, base: Sequence[float], t: int) -> list[float]:
        ratio = self._ratio(t - 1) if t else 0.0
        return [rate * ratio for rate in base]

    def _ratio(self, iteration: int) -> float:
        steps = max(2, self.warmup_num_steps)
        if iteration < steps:
            rise = _rise(self.warmup_type, iteration, steps)
            return self.warmup_min_ratio + rise * (1.0 - self.warmup_min_ratio)
        progress = min(1.0, (iteration - steps + 1) / max(1, self.total_num_steps - steps))
        falling = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * falling)


@dataclass(frozen=True)
class LRRangeTest(Schedule):
    """A rate that grows without end, to find the largest one with which a model trains."""

    lr_range_test_min_lr: Rates = 1e-3
    lr_range_test_step_size: int = 2000
    lr_range_test_step_rate: float = 1.0
    lr_range_test_staircase: bool = False

    def __post_init__(self) -> None:
        _check_at_least(1, lr_range_test_step_size=self.lr_range_test_step_size)

    def rates(self, base: Sequence[float], t: int) -> list[float]:
        least = _by_group(self.lr_range_test_min_lr, len(base), "lr_range_test_min_lr")
        interval: float = float(t) / self.lr_range_test_step_size
        if self.lr_range_test_staircase:
            interval = math.floor(interval)
        return (
            [low * (1 + self.lr_range_test_step_rate * interval) for low in least] if t else least
        )


@dataclass(frozen=True)
class OneCycle(Schedule):
    """Up and down once, with the first beta the other way, and a decay from then on."""

    cycle_min_lr: Rates
    cycle_max_lr: Rates
    decay_lr_rate: float = 0.0
    cycle_first_step_size: float = 2000
    cycle_second_step_size: float | None = None
    cycle_first_stair_count: int = 0
    cycle_second_stair_count: int | None = None
    decay_step_size: float = 0
    cycle_momentum: bool = True
    cycle_min_mom: Rates = 0.8
    cycle_max_mom: Rates = 0.9
    decay_mom_rate: float = 0.0

    def __post_init__(self) -> None:
        if not self.cycle_first_step_size > 0:
            raise ArgumentError(
                "scheduler.params.cycle_first_step_size: expected a number > 0, got "
                f"{shown(self.cycle_first_step_size)}"
            )
        _check_at_least(0, cycle_second_step_size=self._second)

    @property
    def _second(self) -> float:
        second = self.cycle_second_step_size
        return float(self.cycle_first_step_size if second is None else second)

    @property
    def _total(self) -> float:
        return float(self.cycle_first_step_size) + self._second

    def _height(self, t: int) -> float:
        """Returns how far up in the cycle a step is, from 0 to 1."""
        first, total = float(self.cycle_first_step_size), self._total
        x = 1.0 + t / total - math.floor(1 + t / total)
        turn = first / total
        rises = x <= turn
        stairs = self.cycle_first_stair_count
        if not rises and self.cycle_second_stair_count is not None:
            stairs = self.cycle_second_stair_count
        if stairs > 0:
            at = t % total
            up = at * stairs / first if at <= first else (total - at) * stairs / self._second
            return math.floor(up) / stairs
        return x / turn if rises else (x - 1) / (turn - 1)

    def _decay(self, t: int, rate: float) -> float:
        """Returns the factor of a decay after the cycle."""
        if math.isclose(self.decay_step_size, 0) or math.isclose(rate, 0):
            return 1.0
        return 1 + rate * ((t - self._total) / self.decay_step_size)

    def rates(self, base: Sequence[float], t: int) -> list[float]:
        least = _by_group(self.cycle_min_lr, len(base), "cycle_min_lr")
        most = _by_group(self.cycle_max_lr, len(base), "cycle_max_lr")
        if t == 0:
            return least
        if t - 1 < self._total:
            height = self._height(t)
            return [low + (high - low) * height for low, high in zip(least, most, strict=True)]
        factor = self._decay(t, self.decay_lr_rate)
        return [low / factor for low in least]

    def momenta(self, groups: int, t: int) -> list[float] | None:
        if not self.cycle_momentum:
            return None
        least = _by_group(self.cycle_min_mom, groups, "cycle_min_mom")
        most = _by_group(self.cycle_max_mom, groups, "cycle_max_mom")
        if t == 0:
            return least
        if t - 1 < self._total:
            height = self._height(t)
            return [high - (high - low) * height for low, high in zip(least, most, strict=True)]
        factor = self._decay(t, self.decay_mom_rate)
        return [high * factor for high in most]


#: Schedules by DeepSpeed's names.
SCHEDULES: dict[str, Callable[..., Schedule]] = {
    kind.__name__: kind for kind in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}
_NEEDED = {
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
    "WarmupDecayLR": ("total_num_steps",),
    "WarmupCosineLR": ("total_num_steps",),
}


def make_schedule(kind: str, params: Mapping[str, Any]) -> Schedule:
    """Makes a schedule of DeepSpeed's name and parameters.

    Raises:
        ArgumentError: a parameter is missing, of another schedule, or of no use.
    """
    made = SCHEDULES[kind]
    known = [field.name for field in fields(made)]  # type: ignore[arg-type]
    for name in params:
        if name not in known:
            raise ArgumentError(
                f"scheduler.params.{name}: is no parameter of {kind}, which has {', '.join(known)}"
            )
    missing = [name for name in _NEEDED.get(kind, ()) if name not in params]
    if missing:
        raise ArgumentError(f"scheduler.params: {kind} needs {', '.join(missing)} too")
    return made(**params)
