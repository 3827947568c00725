# SPDX-License-Identifier: Apache-2.0
"""Translates settings of DeepSpeed and FSDP2 to ringcomm's; ``keys.ini`` lists the settings."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from configparser import RawConfigParser
from copy import deepcopy
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from ringcomm import optim
from ringcomm.c10d.comm_argument import CommArgument, find_communicator
from ringcomm.errors import ArgumentError, UnsupportedError
from ringcomm.integers import integer
from ringcomm.json_reader import read_bounded, read_json, shown
from ringcomm.module_names import matches
from ringcomm.optim.layout import TILE_ELEMS
from ringcomm.optim.options import Compression
from ringcomm.optim.sharded import Params, ShardedOptimizer
from ringcomm.zero.stages.options import Precision, UnitOptions, ZeroOptions

_LONGEST_NAME = 64

MAPPED = "mapped"
NO_EFFECT = "no effect here"
UNSUPPORTED = "unsupported"


@dataclass(frozen=True)
class Key:
    """A setting of another library; ``docs/migrating.md`` has a row for it.

    Attributes:
        name: the full name, with the enclosing sections: "zero_optimization.stage".
        fate: ``MAPPED``, ``NO_EFFECT`` or ``UNSUPPORTED``.
        text: if mapped, the setting of ringcomm that replaces it; else the reason and the remedy.
    """

    name: str
    fate: str
    text: str

    def note(self, value: Any) -> str:
        """Returns a sentence on how ringcomm treats the key if it has this value."""
        if self.fate == UNSUPPORTED:
            return f"{self.fate}, and {shown(value)} does not ask for it"
        return f"{self.fate}: {self.text}"


@cache
def _table() -> RawConfigParser:
    table = RawConfigParser(delimiters=("=",))
    table.optionxform = str  # type: ignore[assignment,method-assign]
    table.read_string(Path(__file__).with_name("keys.ini").read_text("utf-8"))
    return table


def section_of(name: str) -> Mapping[str, str]:
    """Returns a section of the table in ``keys.ini``."""
    return dict(_table()[name])


def keys_of(library: str) -> dict[str, Key]:
    """Returns the settings of a library by name, in the order of ``docs/migrating.md``."""
    parts = {name: each.partition(": ") for name, each in section_of(library).items()}
    return {name: Key(name, fate, text) for name, (fate, _, text) in parts.items()}


def refuse_unsupported(operation: str, asked: Iterable[tuple[str, str]]) -> None:
    """Raises UnsupportedError with each unsupported key and its reason, if there is any."""
    reasons = [f"{name}: {text}" for name, text in asked]
    if reasons:
        raise UnsupportedError(
            f"{operation}: {len(reasons)} of the keys request features that ringcomm lacks:\n  "
            + "\n  ".join(reasons)
        )


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns a text with the known names that are most similar to ``name``, for a message."""
    by_end: dict[str, list[str]] = {}
    for each in known:
        by_end.setdefault(each.rpartition(".")[2], []).append(each)
    # The comparison takes time that grows with the square of the length.
    ends = get_close_matches(name.rpartition(".")[2][:_LONGEST_NAME], by_end, n=3, cutoff=0.6)
    found = [each for end in ends for each in by_end[end]][:3]
    if not found:
        return "none is near it"
    return f"the nearest known ones are {', '.join(map(repr, found))}"


# ---- DeepSpeed's learning rates over steps, set by torch's ``LambdaLR`` -------------------------
# DeepSpeed counts iterations from -1: after t steps its formulas use t - 1. The rates before the
# first step are special: a scheduler sets them when it is built.

# Maps a scheduler's DeepSpeed name to its parameters and their defaults; "needed": no default.
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
        params: the scheduler's parameters; a rate is a number, or a list with one per param group.
    """

    kind: str
    params: Mapping[str, Any]

    def build(self, optimizer: Optimizer) -> LambdaLR:
        """Returns a scheduler that sets the rates of an optimizer, from its first step on."""
        groups = optimizer.param_groups
        lrs = [deepcopy(group.get("initial_lr", group["lr"])) for group in groups]
        rates = [self._rate(optimizer, number, float(lr)) for number, lr in enumerate(lrs)]
        # LambdaLR multiplies a returned rate by the initial rate; with 1 the rate keeps its bits.
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
    """Returns the schedule for DeepSpeed's name and parameters of a scheduler.

    Raises:
        ArgumentError: a parameter is missing, belongs to another scheduler, or is out of range.
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


# ---- DeepSpeed's formulas; p: parameters, lr: the group's own rate, t: number of steps taken ----


def _rise(p: Any, t: int) -> float | None:
    """Returns a warm-up's fraction of the full rate, from 0 to 1; None after the warm-up."""
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
    """Returns the rate's height in the cycle (0 to 1; None after it), and the steps after it."""
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


_DEEPSPEED = "from_deepspeed"
_LARGEST_FILE_BYTES = 1 << 20
_MOST_NAMED = 5  # most keys that one error names
_DTYPES = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), torch.float32),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), torch.bfloat16),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), torch.float16),
}
_ZERO, _ADAM, _SCHEDULE = "zero_optimization.", "optimizer.params.", "scheduler.params."
# Maps an optimizer's type to its parameters and their defaults.
_PARAMS_OF: dict[str, dict[str, Any]] = {
    kind: json.loads(text) for kind, text in section_of("optimizer parameters").items()
}
# Maps an optimizer's type to its class; for Adam, another key chooses between two classes.
_OPTIMIZERS: dict[str, Callable[..., ShardedOptimizer]] = {
    "lion": optim.Lion,
    "sgd": optim.SGD,
    "adagrad": partial(optim.Sharded, torch.optim.Adagrad),
}
DEEPSPEED_KEYS = keys_of("DeepSpeed")
#: Alternative names of DeepSpeed's keys.
ALIASES = section_of("aliases")
_AUTO = section_of("auto")
#: Maps the type of a DeepSpeed optimizer to the reason why ringcomm cannot build it.
OTHER_OPTIMIZERS = section_of("optimizers")
# Values that turn an unsupported key off; for some keys, _OFF_OF has other such values.
_OFF = (None, False, "none")
_OFF_OF = {name: json.loads(values) for name, values in section_of("off").items()}
_SWITCHES = section_of("switches")


@dataclass(frozen=True)
class DeepSpeedSetup:
    """The settings of a DeepSpeed configuration, translated for training with ringcomm.

    Attributes:
        stage: stage for ``zero.shard``.
        options: options for ``zero.shard``.
        optimizer_options: options for the optimizer; :meth:`build_optimizer` passes them.
        loss_scale: rules of the loss scale of FP16, or None.
        clip: bound for ``optimizer.clip_grad_norm_()``, or None.
        accumulation_steps: number of backwards per step; the loop divides each loss by it.
        micro_batch_size: samples per backward on a rank.
        train_batch_size: samples per step on all ranks.
        schedule: schedule of the learning rate, or None.
        notes: maps each key of the configuration to a sentence on how ringcomm treats it.
    """

    stage: int
    options: ZeroOptions
    optimizer_options: optim.AdamWOptions
    loss_scale: optim.LossScaleOptions | None
    clip: float | None
    accumulation_steps: int
    micro_batch_size: int
    train_batch_size: int
    schedule: Schedule | None
    notes: Mapping[str, str]
    _optimizer: Callable[..., ShardedOptimizer] | None = field(default=None, repr=False)
    _hyper: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def build_loss_scaler(self, device: torch.device | str = "cpu") -> optim.LossScaler | None:
        """Returns the scaler that FP16 needs, for :meth:`build_optimizer`; None otherwise."""
        return None if self.loss_scale is None else optim.LossScaler(self.loss_scale, device)

    def build_optimizer(
        self,
        params: Params,
        *,
        comm: CommArgument = None,
        mesh: DeviceMesh | None = None,
        loss_scaler: optim.LossScaler | None = None,
    ) -> ShardedOptimizer:
        """Returns the configuration's optimizer, on the parameters of the sharded module.

        Raises:
            ArgumentError: the configuration has no optimizer.
        """
        if self._optimizer is None:
            raise ArgumentError(
                f"{_DEEPSPEED}: the configuration has no optimizer; build "
                "ringcomm.optim.AdamW(params, options=setup.optimizer_options)"
            )
        return self._optimizer(
            params,
            **self._hyper,
            comm=comm,
            mesh=mesh,
            options=self.optimizer_options,
            loss_scaler=loss_scaler,
        )

    def build_scheduler(self, optimizer: Optimizer) -> LRScheduler:
        """Returns the configuration's scheduler for ``optimizer``, which may have any class.

        Raises:
            ArgumentError: the configuration has no scheduler.
        """
        if self.schedule is None:
            raise ArgumentError(f"{_DEEPSPEED}: the configuration has no scheduler; use torch's")
        return self.schedule.build(optimizer)


def from_deepspeed(
    config: Mapping[str, Any] | str | os.PathLike[str],
    *,
    world_size: int | None = None,
    comm: CommArgument = None,
) -> DeepSpeedSetup:
    """Reads a DeepSpeed configuration; ``docs/migrating.md`` explains the treatment of each key.

    Args:
        config: as ``deepspeed.initialize(config=)`` takes it: a dict, or the path of a JSON file.
        world_size: number of ranks among which the batches are divided; None means the size of
            ``comm``.
        comm: the ranks, as ``zero.shard`` takes them.

    Returns:
        The settings of ``zero.shard`` and the loop, and a note for each key.

    Raises:
        ArgumentError: the file cannot be read, or is not JSON; a key is unknown or has a bad value;
            values are "auto"; batch sizes do not fit the ranks; ``world_size`` is not a positive
            integer.
        UnsupportedError: keys request features that ringcomm lacks; the message names all of them.
    """
    given = _Given(_load(config))
    if world_size is None:
        found = find_communicator(comm, _DEEPSPEED, None)
        world_size = 1 if found is None else found.world_size
    ranks = integer(world_size)
    if ranks is None or ranks < 1:
        raise ArgumentError(
            f"{_DEEPSPEED}: world_size: expected a positive integer, got {shown(world_size)}"
        )
    stage = given.stage()
    dtype = given.param_dtype()
    precision = given.precision(dtype)
    micro, accumulation, batch = _batches(given, ranks)
    adds_wide = given.dtype("data_types.grad_accum_dtype") is torch.float32
    optimizer, hyper = given.optimizer()
    bf16 = dtype is torch.bfloat16
    return DeepSpeedSetup(
        stage=stage,
        options=given.options(stage, precision),
        optimizer_options=optim.AdamWOptions(
            check_finite=bf16 and given.flag("bf16.check_grad_overflow", True),
            accumulate_dtype=torch.float32 if adds_wide and dtype else None,
        ),
        loss_scale=given.loss_scale() if precision.scaled else None,
        clip=given.number("gradient_clipping", 0.0) or None,
        accumulation_steps=accumulation,
        micro_batch_size=micro,
        train_batch_size=batch,
        schedule=given.schedule(),
        notes={name: DEEPSPEED_KEYS[name].note(value) for name, value in given.values.items()},
        _optimizer=optimizer,
        _hyper=hyper,
    )


def _load(config: Mapping[str, Any] | str | os.PathLike[str]) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    if not isinstance(config, (str, os.PathLike)):
        raise ArgumentError(
            f"{_DEEPSPEED}: config: expected a dict or the path of a JSON file, got {shown(config)}"
        )
    path = Path(config)
    try:
        data = read_json(read_bounded(path, _LARGEST_FILE_BYTES))
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{_DEEPSPEED}: {path}: {error}") from error
    if not isinstance(data, dict):
        raise ArgumentError(f"{_DEEPSPEED}: {path}: expected an object, got {shown(data)}")
    return data


class _Given:
    """The values of a configuration by full key name; unknown keys are refused.

    Raises:
        ArgumentError: a key is unknown, or has the value "auto".
        UnsupportedError: keys request features that ringcomm lacks.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.values: dict[str, Any] = {}
        self._unknown: list[str] = []
        self._foreign = _foreign_types(config)
        if isinstance(config.get("zero_optimization"), bool):
            config = {**config, "zero_optimization": {"stage": int(config["zero_optimization"])}}
        for name, value in self._walk(config, ""):
            if name in self.values:
                raise ArgumentError(f"{_DEEPSPEED}: {name}: given twice, under two names")
            self.values[name] = value
        self._refuse_unknown()
        auto = [
            f"{name}: put {_AUTO.get(name, 'a value, or leave the key out')}"
            for name, value in self.values.items()
            if value == "auto" and DEEPSPEED_KEYS[name].fate != NO_EFFECT
        ]
        if auto:
            raise ArgumentError(
                f'{_DEEPSPEED}: "auto" is a value of Hugging Face\'s Trainer; {"; ".join(auto)}'
            )
        asked = [
            (name, DEEPSPEED_KEYS[name].text)
            for name, value in self.values.items()
            if _asks(name, value)
        ]
        refuse_unsupported(_DEEPSPEED, [*asked, *self._foreign])

    def _walk(self, section: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for own, value in section.items():
            name = f"{prefix}{own}"
            name = ALIASES.get(name, name)
            if name in DEEPSPEED_KEYS:
                yield name, value
            elif not any(known.startswith(f"{name}.") for known in DEEPSPEED_KEYS):
                self._unknown.append(name)
            elif value is not None and not isinstance(value, Mapping):
                raise _wrong(name, "an object", value)
            # The parameters of an unknown optimizer or scheduler cannot be checked.
            elif not (f"{name}." in (_ADAM, _SCHEDULE) and self._foreign):
                yield from self._walk(value or {}, f"{name}.")

    def _refuse_unknown(self) -> None:
        if self._unknown:
            known, few = [*DEEPSPEED_KEYS, *ALIASES], self._unknown[:_MOST_NAMED]
            said = [f"{name[:200]!r} ({nearest(name, known)})" for name in few]
            more = len(self._unknown) - len(few)
            said += [f"and {more} more"] if more else []
            raise ArgumentError(f"{_DEEPSPEED}: unknown keys: {'; '.join(said)}")

    # ---- values of a type -----------------------------------------------------------------------

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            raise _wrong(name, "true or false", value)
        return default if value is None else value

    def number(self, name: str, default: float, least: float = 0.0) -> float:
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= least:
            raise _wrong(name, f"a number >= {least:g}", value)
        return value

    def integer(self, name: str, least: int, default: int) -> int:
        value = self.values.get(name)
        if value is None:
            return default
        # JSON reads 5e8 as a float.
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int or value < least:
            raise _wrong(name, f"an integer >= {least}", self.values.get(name))
        return value

    def pair(self, name: str, default: list[float]) -> tuple[Any, ...]:
        value = self.values.get(name)
        if value is not None and not (isinstance(value, (list, tuple)) and len(value) == 2):
            raise _wrong(name, "two numbers", value)
        return tuple(default if value is None else value)

    def dtype(self, name: str) -> torch.dtype | None:
        value = self.values.get(name)
        if value is None:
            return None
        if value not in _DTYPES:
            raise _wrong(name, "fp32, fp16 or bf16", value)
        return _DTYPES[value]

    # ---- settings -------------------------------------------------------------------------------

    def stage(self) -> int:
        stage = self.integer(_ZERO + "stage", 0, 0)
        if stage > 3:
            raise _wrong(_ZERO + "stage", "0, 1, 2 or 3", stage)
        return stage

    def param_dtype(self) -> torch.dtype | None:
        """Returns the 16-bit dtype of the parameters, or None if they keep their dtype."""
        fp16, bf16 = self.flag("fp16.enabled", False), self.flag("bf16.enabled", False)
        if fp16 and bf16:
            raise ArgumentError(f"{_DEEPSPEED}: expected one of fp16 and bf16 enabled, got both")
        dtype = torch.float16 if fp16 else torch.bfloat16 if bf16 else None
        for name in ("data_types.param_dtype", "data_types.grad_accum_dtype"):
            allowed: tuple[torch.dtype | None, ...] = (None, dtype or torch.float32)
            if name.endswith("grad_accum_dtype"):
                allowed = (*allowed, torch.float32)
            if self.dtype(name) not in allowed:
                expected = "fp32" if dtype is None else "the dtype that is enabled"
                raise _wrong(name, expected, self.values.get(name))
        return dtype

    def precision(self, dtype: torch.dtype | None) -> Precision:
        adds = self.dtype("data_types.grad_accum_dtype")
        return Precision(
            param=dtype,
            reduce=adds if dtype is not None and adds is dtype else None,
            buffer=self.dtype("data_types.buffer_dtype"),
            cast_inputs=dtype is torch.float16 and self.flag("fp16.auto_cast", False),
            master=None if dtype is None else "fp32",
            scaled=dtype is torch.float16,
        )

    def options(self, stage: int, precision: Precision) -> ZeroOptions:
        overlap = self.values.get(_ZERO + "overlap_comm")
        copies = self.integer(_ZERO + "zero_hpz_partition_size", 0, 1) > 1
        most = ZeroOptions.bucket_elems
        elems = min(most, self.integer(_ZERO + "reduce_bucket_size", 0, most))
        quantized = self.flag(_ZERO + "zero_quantized_weights", False) and stage == 3
        op = self.values.get("gradient_allreduce_op")
        if op not in (None, "mean", "sum"):
            raise _wrong("gradient_allreduce_op", '"mean" or "sum"', op)
        return ZeroOptions(
            precision=precision,
            bucket_elems=max(1, elems // TILE_ELEMS) * TILE_ELEMS,
            overlap=None if overlap is None else self.flag(_ZERO + "overlap_comm", False),
            prefetch=min(1, self.integer(_ZERO + "stage3_prefetch_bucket_size", 0, 1)),
            reduce="sum" if op == "sum" else "avg",
            params="world" if stage == 3 and not copies else "node",
            compression=Compression(parameters="int8" if quantized else "param"),
        )

    def loss_scale(self) -> optim.LossScaleOptions:
        fixed = float(self.number("fp16.loss_scale", 0.0))
        if fixed:
            return optim.LossScaleOptions(
                fixed, growth_factor=1.0, backoff_factor=1.0, min_scale=fixed, max_scale=fixed
            )
        first = 2.0 ** self.integer("fp16.initial_scale_power", 0, 16)
        return optim.LossScaleOptions(
            init_scale=first,
            growth_interval=self.integer("fp16.loss_scale_window", 1, 1000),
            hysteresis=self.integer("fp16.hysteresis", 1, 2),
            min_scale=float(self.integer("fp16.min_loss_scale", 1, 1)),
            max_scale=max(optim.LossScaleOptions.max_scale, first),
        )

    def optimizer(self) -> tuple[Callable[..., ShardedOptimizer] | None, dict[str, Any]]:
        """Returns the class of the optimizer and its hyper-parameters; None if there is none."""
        kind = self.values.get("optimizer.type")
        if kind is None:
            return None, {}
        kind = kind.lower()
        hyper = self._hyper(kind)
        if kind in _OPTIMIZERS:
            return _OPTIMIZERS[kind], hyper
        decoupled = hyper.pop("adam_w_mode") or kind == "adamw"
        decays = self.values.get(_ADAM + "weight_decay") is not None
        if hyper.pop("torch_adam") and decoupled and not decays:
            hyper["weight_decay"] = 0.01
        return optim.AdamW if decoupled else optim.Adam, hyper

    def _hyper(self, kind: str) -> dict[str, Any]:
        """Returns an optimizer's hyper-parameters; refuses hyper-parameters of other optimizers."""
        defaults = _PARAMS_OF[kind]
        for name in self.values:
            mapped = name.startswith(_ADAM) and DEEPSPEED_KEYS[name].fate == MAPPED
            if mapped and name.removeprefix(_ADAM) not in defaults:
                told, known = self.values["optimizer.type"], ", ".join(defaults)
                raise ArgumentError(f"{_DEEPSPEED}: {name}: {told} has only {known}")
        read: dict[type, Callable[[str, Any], Any]] = {
            float: self.number,
            bool: self.flag,
            list: self.pair,
        }
        return {name: read[type(value)](_ADAM + name, value) for name, value in defaults.items()}

    def schedule(self) -> Schedule | None:
        kind = self.values.get("scheduler.type")
        if kind is None:
            return None
        params = {
            name.removeprefix(_SCHEDULE): value
            for name, value in self.values.items()
            if name.startswith(_SCHEDULE) and DEEPSPEED_KEYS[name].fate != UNSUPPORTED
        }
        try:
            return make_schedule(kind, params)
        except ArgumentError as error:
            raise ArgumentError(f"{_DEEPSPEED}: {error}") from error


def _foreign_types(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns unsupported types of optimizer and scheduler, each with the reason."""
    found = []
    for section, known in (("optimizer", _PARAMS_OF), ("scheduler", SCHEDULERS)):
        part = config.get(section)
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind is None:
            continue
        if not isinstance(kind, str):
            raise _wrong(f"{section}.type", "a name", kind)
        name, why = kind, "it is not known"
        if section == "optimizer":
            name = kind.lower()
            why = OTHER_OPTIMIZERS.get(name, why)
        if name not in known:
            found.append((f"{section}.type {shown(kind)}", f"{why}; there are {', '.join(known)}"))
    return found


def _asks(name: str, value: Any) -> bool:
    """True if a value turns on the feature of an unsupported key."""
    if DEEPSPEED_KEYS[name].fate != UNSUPPORTED:
        return False
    off, switch = _OFF_OF.get(name, _OFF), _SWITCHES.get(name)
    if not isinstance(value, Mapping):
        return _is_on(value, off)
    if switch is None:
        return bool(value)
    return _is_on(value.get(switch, True), off) and _turned_on(value, switch, off)


def _is_on(value: Any, off: Sequence[Any]) -> bool:
    # In Python True == 1, but in JSON true and 1 are different values.
    return not any(value == each and type(value) is type(each) for each in off)


def _turned_on(section: Mapping[str, Any], switch: str, off: Sequence[Any]) -> bool:
    return any(
        (name == switch and _is_on(value, off))
        or (isinstance(value, Mapping) and _turned_on(value, switch, off))
        for name, value in section.items()
    )


def _batches(given: _Given, world_size: int) -> tuple[int, int, int]:
    """Returns micro batch, accumulation steps and batch; computes the numbers that are missing."""
    # 0 means that a number is not given.
    batch = given.integer("train_batch_size", 1, 0)
    micro = given.integer("train_micro_batch_size_per_gpu", 1, 0)
    steps = given.integer("gradient_accumulation_steps", 1, 0)
    if not batch and not micro:
        raise ArgumentError(
            f"{_DEEPSPEED}: expected train_batch_size or train_micro_batch_size_per_gpu, got "
            "neither"
        )
    if not micro:
        steps = steps or 1
        micro = batch // world_size // steps
    elif not steps:
        steps = batch // micro // world_size if batch else 1
    whole = micro * steps * world_size
    if batch not in (0, whole) or not whole:
        raise ArgumentError(
            f"{_DEEPSPEED}: train_batch_size: expected micro batch x accumulation steps x ranks, "
            f"got {batch}, and {micro} x {steps} x {world_size} = {whole}"
        )
    return micro, steps, whole


def _wrong(name: str, expected: str, got: Any) -> ArgumentError:
    return ArgumentError(f"{_DEEPSPEED}: {name}: expected {expected}, got {shown(got)}")


# ---- The arguments of FSDP2's fully_shard, translated to ringcomm's ------------------------------

_FSDP2 = "from_fsdp2"

FSDP2_KEYS = keys_of("FSDP2")


@dataclass(frozen=True)
class FSDP2Setup:
    """The settings of ``zero.shard`` that correspond to FSDP2's arguments.

    Attributes:
        stage: the stage for ``zero.shard``, 3.
        options: options for ``zero.shard``.
        comm: the mesh, or None for the default group.
        notes: maps each argument to a sentence on how ringcomm treats it.
    """

    stage: int
    options: ZeroOptions
    comm: DeviceMesh | None
    notes: Mapping[str, str]

    def with_nested(self, nested: Mapping[str, Mapping[str, Any]]) -> FSDP2Setup:
        """Returns the settings with nested calls of ``fully_shard`` added; their modules are units.

        Args:
            nested: maps the name of an inner module (a ``*`` matches any characters but dots) to
                the arguments ``reshard_after_forward`` and ``mp_policy`` of its call. A module
                without ``param_dtype`` stays FP32 if other modules have a ``param_dtype``.

        Raises:
            ArgumentError: a nested call has another argument.
            UnsupportedError: see :func:`from_fsdp2`.
        """
        return replace(self, options=_with_units(self.options, nested))


def from_fsdp2(
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Collection[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> FSDP2Setup:
    """Translates arguments of ``torch.distributed.fsdp.fully_shard``, given under the same names.

    Returns:
        The settings of ``zero.shard``, and a note for each argument that was given.

    Raises:
        ArgumentError: an argument has the wrong type.
        UnsupportedError: arguments request features that ringcomm lacks; the message names all of
            them.
    """
    policy = MixedPrecisionPolicy() if mp_policy is None else mp_policy
    _check_kinds(
        mesh=(mesh, DeviceMesh),
        reshard_after_forward=(reshard_after_forward, int),
        mp_policy=(policy, MixedPrecisionPolicy),
        offload_policy=(offload_policy, OffloadPolicy),
    )
    asked = {
        "mesh": mesh is not None and mesh.ndim > 1,
        "reshard_after_forward": type(reshard_after_forward) is int,
        "offload_policy": isinstance(offload_policy, CPUOffloadPolicy),
        "shard_placement_fn": shard_placement_fn is not None,
        "ignored_params": bool(ignored_params),
        "dp_mesh_dims": dp_mesh_dims is not None,
    }
    refuse_unsupported(
        _FSDP2, [(name, FSDP2_KEYS[name].text) for name, asks in asked.items() if asks]
    )
    given: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": reshard_after_forward,
        "offload_policy": offload_policy,
        "ignored_params": ignored_params,
    }
    if mp_policy is not None:
        given |= {f"mp_policy.{name}": value for name, value in vars(mp_policy).items()}
    precision = Precision(
        param=policy.param_dtype,
        output=policy.output_dtype,
        cast_inputs=policy.cast_forward_inputs,
        master=None if policy.param_dtype is None else "fp32",
    )
    options = ZeroOptions(
        precision=precision,
        reshard_after_forward=reshard_after_forward is not False,
        params="world",
    )
    return FSDP2Setup(
        stage=3,
        options=options,
        comm=mesh,
        notes={name: FSDP2_KEYS[name].note(v) for name, v in given.items() if v is not None},
    )


def _check_kinds(**arguments: tuple[Any, type]) -> None:
    """Raises ArgumentError for an argument that is neither None nor of its type."""
    for name, (value, kind) in arguments.items():
        if value is not None and not isinstance(value, kind):
            raise ArgumentError(
                f"{_FSDP2}: {name}: expected {kind.__name__} or None, got {value!r}"
            )


def _with_units(options: ZeroOptions, nested: Mapping[str, Mapping[str, Any]]) -> ZeroOptions:
    """Returns the options with one unit for each module in ``nested``."""
    policies = {}
    for name, arguments in nested.items():
        unknown = sorted({*arguments} - {"reshard_after_forward", "mp_policy"})
        if unknown:
            raise ArgumentError(
                f"{_FSDP2}: nested: {name!r}: expected reshard_after_forward and mp_policy, "
                f"got {unknown[0]!r}; pass arguments for the whole module to from_fsdp2()"
            )
        policies[name] = arguments.get("mp_policy") or MixedPrecisionPolicy()
    precision = options.precision
    outside = precision.param
    if outside is None and any(each.param_dtype for each in policies.values()):
        outside = torch.float32
        precision = replace(precision, param=outside, master="fp32")
    asked = []
    for name, policy in policies.items():
        if policy.output_dtype not in (None, outside):
            text = f"a unit returns the dtype around it, {outside}; leave it out"
            asked.append((f"nested: {name}: mp_policy.output_dtype", text))
        if not policy.cast_forward_inputs:
            text = "arguments of a unit are cast to the dtype of its parameters; leave it out"
            asked.append((f"nested: {name}: mp_policy.cast_forward_inputs", text))
        if type(nested[name].get("reshard_after_forward")) is int:
            text = FSDP2_KEYS["reshard_after_forward"].text
            asked.append((f"nested: {name}: reshard_after_forward", text))
    refuse_unsupported(_FSDP2, asked)
    per_unit = {
        name: UnitOptions(
            param=None if outside is None else policy.param_dtype or torch.float32,
            reshard_after_forward=nested[name].get("reshard_after_forward") is not False,
        )
        for name, policy in policies.items()
    }

    def is_unit(name: str, module: nn.Module) -> bool:
        return any(matches(pattern, name) for pattern in nested)

    return replace(options, precision=precision, units=is_unit, per_unit=per_unit)
