"""A DeepSpeed configuration, read as what a trainer on ringcomm needs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ringcomm.c10d.comm_argument import CommArgument, find_communicator
from ringcomm.errors import ArgumentError
from ringcomm.extras.migrate.deepspeed_keys import ALIASES, KEYS, OTHER_OPTIMIZERS
from ringcomm.extras.migrate.keys import (
    MAPPED,
    NO_EFFECT,
    UNSUPPORTED,
    Key,
    nearest,
    refuse_unsupported,
)
from ringcomm.extras.migrate.schedules import SCHEDULES, Schedule, make_schedule
from ringcomm.integers import integer
from ringcomm.json_reader import read_bounded, read_json, shown
from ringcomm.optim import (
    SGD,
    Adam,
    AdamW,
    AdamWOptions,
    Lion,
    LossScaleOptions,
    LossScaler,
    Sharded,
)
from ringcomm.optim.layout import BLOCK_ELEMS
from ringcomm.optim.options import Wire
from ringcomm.optim.sharded import Params, ShardedOptimizer
from ringcomm.zero.options import DEFAULT_BUCKET_ELEMS, ZeroOptions
from ringcomm.zero.precision import Precision

_OPERATION = "from_deepspeed"
_LARGEST_FILE_BYTES = 1 << 20
_MOST_NAMED = 5  # keys in an error
_DTYPES = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), torch.float32),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), torch.bfloat16),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), torch.float16),
}
_STAGES = (0, 1, 2, 3)
_ZERO = "zero_optimization."
_ADAM = "optimizer.params."
_SCHEDULE = "scheduler.params."
# The parameters that an optimizer's type has.
_ADAMS = ("lr", "betas", "eps", "weight_decay", "amsgrad", "adam_w_mode", "torch_adam")
_PARAMS_OF = {
    "adam": _ADAMS,
    "adamw": _ADAMS,
    "sgd": ("lr", "momentum", "dampening", "weight_decay", "nesterov"),
    "lion": ("lr", "betas", "weight_decay"),
    "adagrad": ("lr", "eps", "weight_decay"),
}
# What Hugging Face's Trainer would put in place of "auto".
_AUTO = {
    "train_batch_size": "micro batch x accumulation steps x ranks",
    "train_micro_batch_size_per_gpu": "TrainingArguments.per_device_train_batch_size",
    "gradient_accumulation_steps": "TrainingArguments.gradient_accumulation_steps",
    "gradient_clipping": "TrainingArguments.max_grad_norm",
    "fp16.enabled": "TrainingArguments.fp16, true or false",
    "bf16.enabled": "TrainingArguments.bf16, true or false",
    _ADAM + "lr": "TrainingArguments.learning_rate",
    _ADAM + "betas": "[TrainingArguments.adam_beta1, TrainingArguments.adam_beta2]",
    _ADAM + "eps": "TrainingArguments.adam_epsilon",
    _ADAM + "weight_decay": "TrainingArguments.weight_decay",
    _SCHEDULE + "warmup_min_lr": "0",
    _SCHEDULE + "warmup_max_lr": "TrainingArguments.learning_rate",
    _SCHEDULE + "warmup_num_steps": "TrainingArguments.warmup_steps",
    _SCHEDULE + "total_num_steps": "the number of steps of the whole training",
}


@dataclass(frozen=True)
class DeepSpeedSetup:
    """The settings of a DeepSpeed configuration, for a trainer on ringcomm.

    Attributes:
        stage: for ``zero.shard``.
        options: for ``zero.shard``.
        optimizer_options: for the optimizer; :meth:`build_optimizer` takes them.
        loss_scale: rules of the loss scale of FP16, or None.
        clip: for ``optimizer.clip_grad_norm_()``, or None.
        accumulation_steps: backwards of a step, each of a loss that is divided by their number.
        micro_batch_size: samples of a backward on a rank.
        train_batch_size: samples of a step on all ranks.
        schedule: of the learning rate, or None.
        notes: by key that the configuration has, what became of it.
    """

    stage: int
    options: ZeroOptions
    optimizer_options: AdamWOptions
    loss_scale: LossScaleOptions | None
    clip: float | None
    accumulation_steps: int
    micro_batch_size: int
    train_batch_size: int
    schedule: Schedule | None
    notes: Mapping[str, str]
    _optimizer: Callable[..., ShardedOptimizer] | None = field(default=None, repr=False)
    _hyper: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def build_loss_scaler(self, device: torch.device | str = "cpu") -> LossScaler | None:
        """Returns the scaler that FP16 needs, for :meth:`build_optimizer`; None otherwise."""
        return None if self.loss_scale is None else LossScaler(self.loss_scale, device)

    def build_optimizer(
        self,
        params: Params,
        *,
        comm: CommArgument = None,
        mesh: DeviceMesh | None = None,
        loss_scaler: LossScaler | None = None,
    ) -> ShardedOptimizer:
        """Returns the configuration's optimizer, on the parameters of the sharded module.

        Raises:
            ArgumentError: the configuration has no optimizer.
        """
        if self._optimizer is None:
            raise ArgumentError(
                f"{_OPERATION}: the configuration has no optimizer; build "
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
        """Returns the configuration's scheduler, on its optimizer or another.

        Raises:
            ArgumentError: the configuration has no scheduler.
        """
        if self.schedule is None:
            raise ArgumentError(f"{_OPERATION}: the configuration has no scheduler; use torch's")
        return self.schedule.build(optimizer)


def from_deepspeed(
    config: Mapping[str, Any] | str | os.PathLike[str],
    *,
    world_size: int | None = None,
    comm: CommArgument = None,
) -> DeepSpeedSetup:
    """Reads a DeepSpeed configuration; ``docs/migrating.md`` says what becomes of each key.

    Args:
        config: as ``deepspeed.initialize(config=)`` takes it: a dict, or the path of a JSON file.
        world_size: number of ranks that the batches are divided among; None takes that of ``comm``.
        comm: the ranks, as ``zero.shard`` takes them.

    Returns:
        What ``zero.shard`` and the loop need, and a note for each key.

    Raises:
        ArgumentError: the file cannot be read, or is no JSON; a key is unknown or has a bad value;
            values are "auto"; batch sizes do not fit the ranks; ``world_size`` is not a positive
            integer.
        UnsupportedError: names all keys that ask for what ringcomm does not have.
    """
    given = _GivenEntries(_load(config))
    if world_size is None:
        found = find_communicator(comm, _OPERATION, None)
        world_size = 1 if found is None else found.world_size
    ranks = integer(world_size)
    if ranks is None or ranks < 1:
        raise ArgumentError(
            f"{_OPERATION}: world_size: expected a positive integer, got {shown(world_size)}"
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
        optimizer_options=AdamWOptions(
            check_finite=bf16 and given.flag("bf16.check_grad_overflow", True),
            accumulate_dtype=torch.float32 if adds_wide and dtype else None,
        ),
        loss_scale=given.loss_scale() if precision.scaled else None,
        clip=given.number("gradient_clipping", 0.0) or None,
        accumulation_steps=accumulation,
        micro_batch_size=micro,
        train_batch_size=batch,
        schedule=given.schedule(),
        notes={name: key.note(value) for name, (key, value) in given.entries.items()},
        _optimizer=optimizer,
        _hyper=hyper,
    )


def _load(config: Mapping[str, Any] | str | os.PathLike[str]) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    if not isinstance(config, (str, os.PathLike)):
        raise ArgumentError(
            f"{_OPERATION}: config: expected a dict or the path of a JSON file, got {shown(config)}"
        )
    path = Path(config)
    try:
        plain = read_json(read_bounded(path, _LARGEST_FILE_BYTES))
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{_OPERATION}: {path}: {error}") from error
    if not isinstance(plain, dict):
        raise ArgumentError(f"{_OPERATION}: {path}: expected an object, got {shown(plain)}")
    return plain


class _Entry(NamedTuple):
    key: Key
    value: Any


class _GivenEntries:
    """The entries of a configuration, by name, of which all are known and none is unsupported.

    Raises:
        ArgumentError: a key is unknown, or "auto".
        UnsupportedError: some keys ask for what there is not.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.entries: dict[str, _Entry] = {}
        self._unknown: list[str] = []
        self._foreign = _foreign_params(config)
        if isinstance(config.get("zero_optimization"), bool):
            config = {**config, "zero_optimization": {"stage": int(config["zero_optimization"])}}
        for name, key, value in self._walk(config, ""):
            if name in self.entries:
                raise ArgumentError(f"{_OPERATION}: {name}: given twice, under two names")
            self.entries[name] = _Entry(key, value)
        if self._unknown:
            known, few = [*KEYS, *ALIASES], self._unknown[:_MOST_NAMED]
            said = [f"{name[:200]!r} ({nearest(name, known)})" for name in few]
            more = len(self._unknown) - len(few)
            said += [f"and {more} more"] if more else []
            raise ArgumentError(f"{_OPERATION}: unknown keys: {'; '.join(said)}")
        self._refuse_auto()
        asked = [
            (name, key.text)
            for name, (key, value) in self.entries.items()
            if key.fate == UNSUPPORTED and key.asks(value)
        ]
        refuse_unsupported(_OPERATION, [*asked, *self._foreign])

    def _walk(self, section: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Key, Any]]:
        for own, value in section.items():
            name = f"{prefix}{own}"
            name = ALIASES.get(name, name)
            key = KEYS.get(name)
            if key is not None:
                yield name, key, value
            elif not any(known.startswith(f"{name}.") for known in KEYS):
                self._unknown.append(name)
            elif value is not None and not isinstance(value, Mapping):
                raise _wrong(name, "an object", value)
            elif f"{name}." in (_ADAM, _SCHEDULE) and self._foreign:
                continue  # parameters of something that is not known here
            else:
                yield from self._walk(value or {}, f"{name}.")

    def _refuse_auto(self) -> None:
        auto = [
            f"{name}: put {_AUTO.get(name, 'a value, or leave the key away')}"
            for name, (key, value) in self.entries.items()
            if value == "auto" and key.fate != NO_EFFECT
        ]
        if auto:
            raise ArgumentError(
                f'{_OPERATION}: "auto" is what Hugging Face\'s Trainer replaces; {"; ".join(auto)}'
            )

    # ---- values of one kind ---------------------------------------------------------------------

    def value(self, name: str) -> Any:
        """Returns a value, or None if there is none."""
        entry = self.entries.get(name)
        return None if entry is None else entry.value

    def flag(self, name: str, default: bool) -> bool:
        value = self.value(name)
        if value is not None and not isinstance(value, bool):
            raise _wrong(name, "true or false", value)
        return default if value is None else value

    def number(self, name: str, default: float, least: float = 0.0) -> float:
        value = self.value(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= least:
            raise _wrong(name, f"a number >= {least:g}", value)
        return value

    def integer(self, name: str, least: int) -> int | None:
        value = self.value(name)
        if value is None:
            return None
        # 5e8 is a float to JSON.
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int or value < least:
            raise _wrong(name, f"an integer >= {least}", self.value(name))
        return value

    def dtype(self, name: str) -> torch.dtype | None:
        value = self.value(name)
        if value is None:
            return None
        if value not in _DTYPES:
            raise _wrong(name, "fp32, fp16 or bf16", value)
        return _DTYPES[value]

    # ---- what they say together -----------------------------------------------------------------

    def stage(self) -> int:
        stage = self.integer(_ZERO + "stage", 0) or 0
        if stage not in _STAGES:
            raise _wrong(_ZERO + "stage", "0, 1, 2 or 3", stage)
        return stage

    def param_dtype(self) -> torch.dtype | None:
        """Returns the 16-bit dtype of the parameters, or None where they stay as they are."""
        fp16, bf16 = self.flag("fp16.enabled", False), self.flag("bf16.enabled", False)
        if fp16 and bf16:
            raise ArgumentError(f"{_OPERATION}: expected one of fp16 and bf16 enabled, got both")
        dtype = torch.float16 if fp16 else torch.bfloat16 if bf16 else None
        for name in ("data_types.param_dtype", "data_types.grad_accum_dtype"):
            allowed: tuple[torch.dtype | None, ...] = (None, dtype or torch.float32)
            if name.endswith("grad_accum_dtype"):
                allowed = (*allowed, torch.float32)
            if self.dtype(name) not in allowed:
                expected = "fp32" if dtype is None else "the dtype that is enabled"
                raise _wrong(name, expected, self.value(name))
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
        overlap = self.value(_ZERO + "overlap_comm")
        ahead = self.integer(_ZERO + "stage3_prefetch_bucket_size", 0)
        copies = (self.integer(_ZERO + "zero_hpz_partition_size", 0) or 1) > 1
        elems = self.integer(_ZERO + "reduce_bucket_size", 0)
        if elems is None or elems >= DEFAULT_BUCKET_ELEMS:
            elems = DEFAULT_BUCKET_ELEMS
        codes = self.flag(_ZERO + "zero_quantized_weights", False) and stage == 3
        ops = {None: "avg", "mean": "avg", "sum": "sum"}
        op = self.value("gradient_allreduce_op")
        if op not in ops:
            raise _wrong("gradient_allreduce_op", '"mean" or "sum"', op)
        return ZeroOptions(
            precision=precision,
            bucket_elems=max(1, elems // BLOCK_ELEMS) * BLOCK_ELEMS,
            overlap=None if overlap is None else self.flag(_ZERO + "overlap_comm", False),
            prefetch=0 if ahead == 0 else 1,
            reduce=ops[op],
            params="world" if stage == 3 and not copies else "node",
            wire=Wire(parameters="int8" if codes else "param"),
        )

    def loss_scale(self) -> LossScaleOptions:
        fixed = float(self.number("fp16.loss_scale", 0.0))
        if fixed:
            return LossScaleOptions(
                fixed, growth_factor=1.0, backoff_factor=1.0, min_scale=fixed, max_scale=fixed
            )
        power = self.integer("fp16.initial_scale_power", 0)
        window = self.integer("fp16.loss_scale_window", 1)
        hysteresis = self.integer("fp16.hysteresis", 1)
        first = 2.0 ** (16 if power is None else power)
        return LossScaleOptions(
            init_scale=first,
            growth_interval=1000 if window is None else window,
            hysteresis=2 if hysteresis is None else hysteresis,
            min_scale=float(self.integer("fp16.min_loss_scale", 1) or 1),
            max_scale=max(LossScaleOptions.max_scale, first),
        )

    def optimizer(self) -> tuple[Callable[..., ShardedOptimizer] | None, dict[str, Any]]:
        """Returns what builds the optimizer, and its hyper-parameters; None if there is none."""
        kind = self.value("optimizer.type")
        if kind is None:
            return None, {}
        self._check_params_of(kind)
        if kind.lower() == "lion":
            return Lion, self._numbers({"lr": 1e-3, "weight_decay": 0.0}) | self._betas(0.9, 0.99)
        if kind.lower() == "adagrad":
            hyper = self._numbers({"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0})
            return partial(Sharded, torch.optim.Adagrad), hyper
        if kind.lower() == "sgd":
            names = ("momentum", "dampening", "weight_decay")
            hyper = self._numbers({"lr": 1e-3, **dict.fromkeys(names, 0.0)})
            return SGD, {**hyper, "nesterov": self.flag(_ADAM + "nesterov", False)}
        return self._adam(kind)

    def _check_params_of(self, kind: str) -> None:
        """Raises ArgumentError for a parameter that the optimizer has not."""
        of_type = _PARAMS_OF[kind.lower()]
        for name, (key, _) in self.entries.items():
            param = name.removeprefix(_ADAM)
            if name.startswith(_ADAM) and key.fate == MAPPED and param not in of_type:
                known = ", ".join(of_type)
                raise ArgumentError(f"{_OPERATION}: {name}: {kind} has none; it has {known}")

    def _numbers(self, defaults: Mapping[str, float]) -> dict[str, Any]:
        return {name: self.number(_ADAM + name, value) for name, value in defaults.items()}

    def _betas(self, *default: float) -> dict[str, Any]:
        betas = self.value(_ADAM + "betas")
        if betas is not None and not (isinstance(betas, (list, tuple)) and len(betas) == 2):
            raise _wrong(_ADAM + "betas", "two numbers", betas)
        return {"betas": default if betas is None else tuple(betas)}

    def _adam(self, kind: str) -> tuple[type[ShardedOptimizer], dict[str, Any]]:
        decoupled = kind.lower() == "adamw" or self.flag(_ADAM + "adam_w_mode", True)
        torchs = self.flag(_ADAM + "torch_adam", False)
        decay = 0.01 if torchs and decoupled else 0.0
        hyper = {
            **self._numbers({"lr": 1e-3, "eps": 1e-8, "weight_decay": decay}),
            **self._betas(0.9, 0.999),
            "amsgrad": self.flag(_ADAM + "amsgrad", False),
        }
        return AdamW if decoupled else Adam, hyper

    def schedule(self) -> Schedule | None:
        kind = self.value("scheduler.type")
        if kind is None:
            return None
        params = {
            name.removeprefix(_SCHEDULE): value
            for name, (key, value) in self.entries.items()
            if name.startswith(_SCHEDULE) and key.fate != UNSUPPORTED
        }
        try:
            return make_schedule(kind, params)
        except ArgumentError as error:
            raise ArgumentError(f"{_OPERATION}: {error}") from error


def _foreign_params(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns reasons why the optimizer or scheduler of the configuration is not supported."""
    found = []
    for section, known, reasons in (
        ("optimizer", tuple(_PARAMS_OF), OTHER_OPTIMIZERS),
        ("scheduler", tuple(SCHEDULES), {}),
    ):
        part = config.get(section)
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind is None:
            continue
        if not isinstance(kind, str):
            raise _wrong(f"{section}.type", "a name", kind)
        name = kind.lower() if section == "optimizer" else kind
        if name not in known:
            there = f"there are {', '.join(known)}"
            found.append(
                (
                    f"{section}.type {shown(kind)}",
                    f"{reasons.get(name, 'it is not known')}; {there}",
                )
            )
    return found


def _batches(given: _GivenEntries, world_size: int) -> tuple[int, int, int]:
    """Returns micro batch, accumulation steps and batch, of which some may be given."""
    batch = given.integer("train_batch_size", 1)
    micro = given.integer("train_micro_batch_size_per_gpu", 1)
    steps = given.integer("gradient_accumulation_steps", 1)
    if batch is None and micro is None:
        raise ArgumentError(
            f"{_OPERATION}: expected train_batch_size or train_micro_batch_size_per_gpu, got "
            "neither"
        )
    if batch is not None and micro is None:
        steps = steps or 1
        micro = batch // world_size // steps
    assert micro is not None
    if batch is not None and steps is None:
        steps = batch // micro // world_size
    steps = 1 if steps is None else steps
    whole = micro * steps * world_size
    if batch not in (None, whole) or not whole:
        raise ArgumentError(
            f"{_OPERATION}: train_batch_size: expected micro batch x accumulation steps x ranks, "
            f"got {batch}, and {micro} x {steps} x {world_size} = {whole}"
        )
    return micro, steps, whole


def _wrong(name: str, expected: str, got: Any) -> ArgumentError:
    return ArgumentError(f"{_OPERATION}: {name}: expected {expected}, got {shown(got)}")
