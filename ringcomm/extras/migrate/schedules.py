"""DeepSpeed's learning rates over steps, set by torch's ``LambdaLR``.

DeepSpeed counts iterations from -1: after t steps its formulas hold at t - 1. Step 0 has rates of
its own, which a scheduler sets when it is built.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ringcomm.errors import ArgumentError
from ringcomm.extras.migrate.keys import section_of
from ringcomm.json_reader import shown

# By DeepSpeed's name, the parameters of a scheduler and their defaults; "needed" is none.
SCHEDULERS = {kind: json.loads(text) for kind, text in section_of("schedulers").items()}
_EXPECTED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "warmup_num_steps": ("an integer >= 1", lambda value: value >= 1),
    "warmup_type": ("one of log, linear", lambda value: value in ("log", "linear")),
    "total_num_steps": ("a number >= 1", lambda value: value >= 1),
    "lr_range_test_step_size": ("a number >= 1", lambda value: value >= 1),
    "cycle_first_step_size": ("a number > 0", lambda value: value > 0),
    "cycle_second_step_size": ("a number >= 0", lambda value: value is None or value >= 0),
}


@dataclass(frozen=True)
class Schedule:
    """A learning rate over steps, as a scheduler of DeepSpeed sets it.

    Attributes:
        kind: DeepSpeed's name of the scheduler.
        params: its parameters; a rate is one number, or a list with one for each param group.
    """

    kind: str
    params: Mapping[str, Any]

    def build(self, optimizer: Optimizer) -> LambdaLR:
        """Returns a scheduler that sets the rates of an optimizer, from its first step on."""
        groups = optimizer.param_groups
        lrs = [deepcopy(group.get("initial_lr", group["lr"])) for group in groups]
        rates = [self._rate(optimizer, number, float(lr)) for number, lr in enumerate(lrs)]
        # LambdaLR multiplies the initial rate. Times 1 a rate keeps its bits.
        for group in groups:
            group["initial_lr"] = 1.0
        made = LambdaLR(optimizer, rates)
        for group, lr in zip(groups, lrs, strict=True):
            group["initial_lr"] = lr
        return made

    def _rate(self, optimizer: Optimizer, number: int, lr: float) -> Callable[[int], float]:
        """Returns the rate of a param group as a function of the steps taken."""
        p, formula = SimpleNamespace(**self.params), _FORMULAS[self.kind]
        for name, value in self.params.items():
            if isinstance(value, Sequence) and not isinstance(value, str):
                if len(value) != len(optimizer.param_groups):
                    raise ArgumentError(
                        f"scheduler.params.{name}: expected a number, or one for each of "
                        f"{len(optimizer.param_groups)} param groups, got {len(value)}"
                    )
                setattr(p, name, value[number])

        def rate(t: int) -> float:
            if self.params.get("cycle_momentum"):
                optimizer.param_groups[number]["betas"] = (_cycle_beta(p, t), 0.99)
            return float(formula(p, lr, t))

        return rate


def make_schedule(kind: str, given: Mapping[str, Any]) -> Schedule:
    """Returns the schedule of DeepSpeed's name and parameters.

    Raises:
        ArgumentError: a parameter is missing, of another scheduler, or out of range.
    """
    known = SCHEDULERS[kind]
    params = {**known, **given}
    missing = [name for name in known if params[name] == "needed"]
    for name, value in params.items():
        expected, fits = _EXPECTED.get(name, ("", lambda _: True))
        wrong = ""
        if name not in known:
            wrong = f".{name}: is no parameter of {kind}, which has {', '.join(known)}"
        elif missing:
            wrong = f": {kind} needs {', '.join(missing)} too"
        elif not fits(value):
            wrong = f".{name}: expected {expected}, got {shown(value)}"
        if wrong:
            raise ArgumentError(f"scheduler.params{wrong}")
    return Schedule(kind, params)


# ---- DeepSpeed's formulas: parameters, the group's own rate and steps taken ---------------------


def _rise(p: Any, t: int) -> float | None:
    """Returns the height of a warm-up, from 0 to 1; None when it is over."""
    steps = max(2, p.warmup_num_steps)
    if t > steps:
        return None
    return 1.0 / math.log(steps) * math.log(t) if p.warmup_type == "log" else (t - 1) / steps


def _warmup(p: Any, lr: float, t: int) -> Any:
    low, high = p.warmup_min_lr, lr if p.warmup_max_lr is None else p.warmup_max_lr
    height = _rise(p, t) if t else 0.0
    if height is None and hasattr(p, "total_num_steps"):
        falling = max(1.0, p.total_num_steps - max(2, p.warmup_num_steps))
        height = max(0.0, (p.total_num_steps - (t - 1)) / falling)
    return low + (high - low) * (1.0 if height is None else height)


def _warmup_cosine(p: Any, lr: float, t: int) -> Any:
    height = _rise(p, t) if t else None
    if height is not None:
        return lr * (p.warmup_min_ratio + height * (1.0 - p.warmup_min_ratio))
    steps = max(2, p.warmup_num_steps)
    progress = min(1.0, (t - steps) / max(1, p.total_num_steps - steps))
    height = (1 + math.cos(math.pi * progress)) / 2
    return lr * (max(0.0, p.cos_min_ratio + (1.0 - p.cos_min_ratio) * height) if t else 0.0)


def _range_test(p: Any, lr: float, t: int) -> Any:
    interval = t / p.lr_range_test_step_size
    interval = math.floor(interval) if p.lr_range_test_staircase else interval
    return p.lr_range_test_min_lr * (1 + p.lr_range_test_step_rate * interval)


def _cycle(p: Any, t: int) -> tuple[float | None, float]:
    """Returns the height in the cycle, 0 to 1 or None after it, and the steps since its end."""
    first = float(p.cycle_first_step_size)
    second = first if p.cycle_second_step_size is None else float(p.cycle_second_step_size)
    total = first + second
    if t - 1 >= total:
        return None, t - total
    x, turn = 1.0 + t / total - math.floor(1 + t / total), first / total
    stairs, at = p.cycle_first_stair_count, t % total
    if x > turn and p.cycle_second_stair_count is not None:
        stairs = p.cycle_second_stair_count
    if stairs > 0:
        up = at * stairs / first if at <= first else (total - at) * stairs / second
        return math.floor(up) / stairs, 0.0
    return x / turn if x <= turn else (x - 1) / (turn - 1), 0.0


def _decay(p: Any, rate: float, since: float) -> float:
    still = math.isclose(p.decay_step_size, 0) or math.isclose(rate, 0)
    return 1.0 if still else 1 + rate * (since / p.decay_step_size)


def _one_cycle(p: Any, lr: float, t: int) -> Any:
    height, since = _cycle(p, t)
    if height is None:
        return p.cycle_min_lr / _decay(p, p.decay_lr_rate, since)
    return p.cycle_min_lr + (p.cycle_max_lr - p.cycle_min_lr) * height


def _cycle_beta(p: Any, t: int) -> Any:
    height, since = _cycle(p, t)
    if height is None:
        return p.cycle_max_mom * _decay(p, p.decay_mom_rate, since)
    return p.cycle_max_mom - (p.cycle_max_mom - p.cycle_min_mom) * height if t else p.cycle_min_mom


_FORMULAS: dict[str, Callable[[Any, float, int], Any]] = {
    "LRRangeTest": _range_test,
    "OneCycle": _one_cycle,
    "WarmupLR": _warmup,
    "WarmupDecayLR": _warmup,
    "WarmupCosineLR": _warmup_cosine,
}
