# SPDX-License-Identifier: Apache-2.0
"""The update rules of optimizers: hyper-parameters, state, and the backend of a step."""

from __future__ import annotations

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from ringcomm import _native
from ringcomm.comm.communicator import Communicator
from ringcomm.errors import ArgumentError, UnsupportedError, where
from ringcomm.optim.backends import (
    CLIP,
    FOUND_INF,
    INV_SCALE,
    SKIPPED,
    STEPS,
    Backend,
    DeviceBackend,
    HostBackend,
    StepTable,
    TritonBackend,
)
from ringcomm.optim.buckets import (
    Bucket,
    Buckets,
    empty_for_streams,
    gather_params,
    sharers_of,
)
from ringcomm.optim.gradients import make_reducer
from ringcomm.optim.layout import BucketLayout, ShardLayout
from ringcomm.optim.options import AdamWOptions

Tensor = torch.Tensor
Group = Mapping[str, Any]


@dataclass(frozen=True)
class ParamState:
    """A parameter's state: its numbers, and the names of its tensors, but not their elements.

    Tensors named in :attr:`tensors` are in the buckets. :meth:`UpdateRule.kept_whole` returns state
    tensors that are in no bucket.

    Attributes:
        numbers: numbers of the state by name, such as "step".
        tensors: names of the tensors that have the parameter's shape.
    """

    numbers: Mapping[str, float] = field(default_factory=dict)
    tensors: tuple[str, ...] = ()


def as_json(value: Any) -> Any:
    """Returns a hyper-parameter as JSON types."""
    if isinstance(value, Tensor):
        return value.tolist()
    return [as_json(each) for each in value] if isinstance(value, (tuple, list)) else value


def digest_of(hyper: Sequence[Mapping[str, Any]]) -> float:
    """Returns a digest below 2^52, equal in all processes for equal JSON values."""
    found = hashlib.sha256(json.dumps(list(map(dict, hyper))).encode()).digest()
    return float(int.from_bytes(found[:8], "big") & (1 << 52) - 1)


class UpdateRule(ABC):
    """The update rule of one optimizer: its hyper-parameters, its state, and its backend.

    Attributes:
        name: name of the optimizer, which ranks compare.
        hypers: hyper-parameters that ranks compare; lr is compared at each step.
        hyper_columns: number of columns of :attr:`StepTable.hyper`.
        factors_bytes: bytes in a row of :attr:`StepTable.factors`.
        keeps_more: True if the step number of a parameter does not determine its kinds of state.
        quantized_state: True if the tensors of the state are 8-bit moments (``QuantizedMoment``).
        elementwise: True if the update of an element does not depend on other elements, so that a
            bucket can be updated before other buckets have their gradients.
    """

    name: str
    hypers: tuple[str, ...] = ()
    hyper_columns = 0
    factors_bytes = 0
    keeps_more = False
    quantized_state = False
    elementwise = True

    @property
    def saved_as(self) -> str:
        """The name of the optimizer in a saved state."""
        return self.name

    @property
    def numbers(self) -> frozenset[str]:
        """Names of the numbers in a parameter's state."""
        return frozenset({"step"})

    @abstractmethod
    def check_hyper(self, group: Group, index: int, device: torch.device) -> None:
        """Checks a group's hyper-parameters; a tensor lr on a GPU is not read.

        Raises:
            ArgumentError: a hyper-parameter cannot be used.
            UnsupportedError: the optimizer cannot be sharded with these hyper-parameters.
        """

    def replaced(self, group: Group) -> dict[str, Any]:
        """Returns converted entries, such as betas, which replace the entries of a new group."""
        return {"betas": numbers(group["betas"])} if "betas" in group else {}

    def compared(self, group: Group) -> dict[str, Any]:
        """Returns the hyper-parameters that ranks compare, except lr, as JSON types."""
        return {name: as_json(group[name]) for name in self.hypers}

    def digest(self, groups: Sequence[Group]) -> float:
        """Returns a digest below 2^52, equal in all processes for equal hyper-parameters."""
        return digest_of([{"lr": float(group["lr"]), **self.compared(group)} for group in groups])

    def row(self, group: Group) -> list[float]:
        """Returns a checked group's row of :attr:`StepTable.hyper`, which begins with lr."""
        return []

    @abstractmethod
    def names(self, groups: Sequence[Group]) -> tuple[str, ...]:
        """Returns the names of the state tensors (FP32, flat) that steps of checked groups need."""

    def names_of(self, group: Group, groups: Sequence[Group]) -> tuple[str, ...]:
        """Returns the subset of :meth:`names` that the parameters of ``group`` need."""
        return self.names(groups)

    def names_in(
        self, bucket: BucketLayout, layout: ShardLayout, groups: Sequence[Group]
    ) -> tuple[str, ...]:
        """Returns the subset of :meth:`names` that a bucket of a layout needs."""
        return self.names(groups)

    def names_by_bucket(
        self, buckets: Sequence[BucketLayout], layout: ShardLayout, groups: Sequence[Group]
    ) -> list[tuple[str, ...]]:
        """Returns :meth:`names_in` for each of the buckets."""
        return [self.names(groups)] * len(buckets)

    def misfit(self, names: Sequence[str], groups: Sequence[Group]) -> str:
        """Returns "" if saved tensors' names fit, else the expected names, for an error.

        Args:
            names: names of the tensors that were saved, without masters.
            groups: the groups that would load the state.
        """
        known = self.names(groups)
        return "" if set(names) == set(known) else " and ".join(known)

    @abstractmethod
    def backend(
        self, comm: Communicator | None, options: AdamWOptions, table: StepTable
    ) -> Backend:
        """Makes the backend of a step.

        Args:
            comm: the communicator, or None for a world of one on the host.
            options: options of the optimizer.
            table: the table that :meth:`Backend.begin` will be called with.

        Raises:
            UnsupportedError: the device or options have no backend.
        """

    def bind(
        self,
        layout: ShardLayout,
        groups: Sequence[Group],
        buckets: Buckets,
        chunks: int,
        states: Sequence[ParamState | None] = (),
    ) -> None:
        """Gives the rule its buckets; called once they exist, and again when groups were added.

        Args:
            layout: layout of the parameters.
            groups: param groups of the optimizer.
            buckets: buckets of the parameters.
            chunks: number of chunks of each bucket; 1 if every rank keeps the whole state.
            states: the states of the parameters that existed before groups were added; the buckets
                have the states' tensors.
        """
        return

    def states(
        self, layout: ShardLayout, groups: Sequence[Group], steps: Sequence[float]
    ) -> list[ParamState | None]:
        """Returns each parameter's state; None if it has no state, as before its first step.

        Args:
            layout: layout of the parameters.
            groups: param groups of the optimizer.
            steps: by parameter, the number of steps that the parameter has taken.
        """
        # As in torch, a parameter has state from its first gradient on.
        return [
            self.state_at(step, groups[spec.group]) if step else None
            for spec, step in zip(layout.params, steps, strict=True)
        ]

    def state_at(self, step: float, group: Group) -> ParamState | None:
        """Returns the state of a parameter of ``group`` after ``step`` steps, at least 1."""
        return ParamState({"step": step}, self.names([group]))

    def kept_whole(self, index: int) -> Mapping[str, Tensor]:
        """Returns by name the tensors of a parameter's state that are in no bucket.

        All ranks have equal copies: float32, contiguous, with shapes that the rule chooses. Loading
        a state writes into these tensors.

        Args:
            index: index of the parameter in the layout that the rule is bound to.
        """
        return {}

    def take_states(self, states: Sequence[ParamState | None]) -> None:
        """Continues from saved states, whose tensors are already loaded into the buckets."""
        return

    def to_torch(self, name: str, number: float) -> Any:
        """Returns a number of a parameter's state in the form that torch's class keeps."""
        # The dtype in which torch keeps "step".
        wide = torch.get_default_dtype() == torch.float64
        dtype = torch.float64 if wide else torch.float32
        return torch.tensor(number, dtype=dtype, device="cpu")

    def from_torch(self, entry: Mapping[str, Any], group: Group) -> ParamState | None:
        """Returns a parameter's state, read from its entry in torch's format.

        Raises:
            ValueError: the entry is not this optimizer's; the message names the expected entries.
        """
        names = self.names([group])
        try:
            step = float(entry["step"])
            missing = next((name for name in names if name not in entry), None)
            if missing is not None:
                raise KeyError(missing)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"expected step, {', '.join(names)}, got {error!r}") from error
        return ParamState({"step": step}, names)


# ---- Rules that update by torch operations, and the backend that runs them ----------------------


@dataclass(frozen=True)
class StepControl:
    """The numbers of a step that Python code reads from a table; reading waits for the device.

    Attributes:
        skips: True if the step changes nothing.
        factors: numbers to multiply the gradient by, one after the other.
        active: by parameter, nonzero if the parameter takes the step.
    """

    skips: bool = False
    factors: tuple[float, ...] = ()
    active: Sequence[float] = ()

    @classmethod
    def read(cls, table: StepTable) -> StepControl:
        """Reads the numbers of a step from its table, when the step begins."""
        params = len(table.active)
        told = torch.cat([table.control[: FOUND_INF + 1], table.active]).tolist()
        factors = tuple(each for each in (told[INV_SCALE], told[CLIP]) if each != 1)
        return cls(told[FOUND_INF] != 0, factors, told[-params:] if params else [])

    def scaled(self, grad: Tensor) -> Tensor:
        """Returns a gradient as float32, multiplied by the factors."""
        found = grad.to(torch.float32)
        for factor in self.factors:
            found = found * factor
        return found


class TensorRule(UpdateRule):
    """A rule that updates by torch operations, which a :class:`TensorBackend` runs.

    A rule that is not elementwise first collects buckets, and updates them by the end of the step.
    A skipped step calls none of the methods.

    Attributes:
        writes_gradients: True if :meth:`update` changes the gradient that it is given.
    """

    writes_gradients = False

    def begin_updates(self, run: TensorBackend) -> None:
        """Begins the updates of a step."""
        return

    @abstractmethod
    def update(self, run: TensorBackend, bucket: Bucket, grad: Tensor) -> None:
        """Updates this rank's chunk of a bucket, or collects it for :meth:`end_updates`.

        Args:
            run: the backend of the current step.
            bucket: the bucket, or for elementwise rules a piece of it; its state is in memory.
            grad: float32 [chunk elements], multiplied by the step's factors; writable with
                ``writes_gradients``. A rule that is not elementwise gets the gradient without these
                factors, in memory that stays valid to the end of the step.
        """

    def end_updates(self, run: TensorBackend) -> None:
        """Updates the collected buckets."""
        return


class TensorBackend(Backend):
    """Runs the updates of a :class:`TensorRule`, between reducing and gathering.

    The host reads whether a step is skipped, and which parameters have gradients.

    Args:
        comm: the communicator, or None for a world of one on the host.
        options: options of the optimizer.
        table: table of the optimizer.
        rule: the rule.
        native: backend that counts steps, and updates the parameters that the rule does not update;
            None if the rule updates all parameters.

    Attributes:
        control: the numbers of the current step.
        table: the table that the step began with.
    """

    def __init__(
        self,
        comm: Communicator | None,
        options: AdamWOptions,
        table: StepTable,
        rule: TensorRule,
        native: Backend | None = None,
    ) -> None:
        reducer = make_reducer(comm, options, table.layout.size_bytes)
        alone = comm is None or comm.world_size == 1
        super().__init__(alone, reducer, options, sharers_of(comm, options.state), fused=False)
        self.defers = not rule.elementwise
        self.native = native
        self.table = table
        self.control = StepControl()
        self._rule = rule
        self._gathers = False

    def forget(self) -> None:
        if self.native is not None:
            self.native.forget()

    def begin(self, table: StepTable) -> None:
        self.table = table
        self.control = control = StepControl.read(table)
        if self.native is not None:
            self.native.begin(table)
        else:
            table.control[SKIPPED if control.skips else STEPS].add_(1)
            if not control.skips:
                table.step.add_(table.active != 0)
        if not control.skips:
            self._rule.begin_updates(self)

    def end(self) -> None:
        if not self.control.skips:
            self._rule.end_updates(self)

    def update_shard(self, bucket: Bucket, grad: Tensor) -> None:
        if self.control.skips:
            return
        if self.defers:
            self._gathers = False
            self._rule.update(self, bucket, grad)
        else:
            super().update_shard(bucket, grad)

    def update_gather(self, bucket: Bucket, grad: Tensor) -> None:
        if self.control.skips:
            return
        if self.defers:
            self._gathers = not self.alone
            self._rule.update(self, bucket, grad)
        else:
            super().update_gather(bucket, grad)

    def one_pass(self, bucket: Bucket, grads: Tensor) -> None:
        if not self.control.skips:
            super().one_pass(bucket, grads)

    def publish(self, buckets: Iterable[Bucket]) -> None:
        """Gathers on all ranks the parameters of buckets that were collected and then updated."""
        for bucket in buckets:
            if self._gathers and self.sharers is not None:
                gather_params(bucket, self.sharers)
            else:
                bucket.share()

    def _memory_for(self, bucket: Bucket) -> Tensor:
        if self.defers:  # the rule needs each gradient until the end of the step
            return empty_for_streams(bucket.chunk.elems, torch.float32, bucket.device)
        return super()._memory_for(bucket)

    def _update(self, bucket: Bucket, grad: Tensor) -> None:
        self._rule.update(self, bucket, self._writable(bucket, grad))

    def _writable(self, bucket: Bucket, grad: Tensor) -> Tensor:
        """Returns a gradient as float32, scaled; in writable memory if the update writes to it."""
        factors = self.control.factors
        if not (factors or self._rule.writes_gradients or grad.dtype is not torch.float32):
            return grad
        if not self._is_own(grad):
            grad = self._memory_for(bucket).copy_(grad)
        for factor in factors:
            grad.mul_(factor)
        return grad

    def _is_own(self, grad: Tensor) -> bool:
        own = self._own
        return own is not None and (
            own.untyped_storage().data_ptr() == grad.untyped_storage().data_ptr()
        )


# ---- The update rules AdamW and Adam, SGD and Lion, which the fused kernels implement -----------
# The kernels read structures with AdamW's fields. Other rules store their own numbers in these
# fields; ``kernels/include/ringcomm/optimizer/adamw.h`` lists the uses of each field.


_FLAGS = _native.ADAMW_FLAGS
MAXIMA = "max_exp_avg_sq"
MOMENTS = ("exp_avg", "exp_avg_sq")


def numbers(betas: Any) -> Any:
    """Returns betas with tensors of one element converted to numbers."""
    if not isinstance(betas, (tuple, list)):
        return betas
    return tuple(float(beta) if isinstance(beta, Tensor) else beta for beta in betas)


def fail(index: int, name: str, expected: str, got: Any) -> NoReturn:
    raise ArgumentError(f"param group {index}: {name}: expected {expected}, got {got!r}")


def _in(number: Any, low: float, below: float) -> bool:
    try:
        return bool(low <= number < below)
    except (TypeError, ValueError, RuntimeError):
        return False


def check_rate(group: Group, index: int, device: torch.device) -> None:
    lr = group["lr"]
    if isinstance(lr, Tensor):
        if lr.numel() != 1 or not lr.is_floating_point():
            fail(index, "lr", "a tensor of one floating-point element", lr)
        if lr.device != device:
            expected = f"a tensor on {device}, where the parameters are"
            fail(index, "lr", expected, f"one on {lr.device}")
    if not isinstance(lr, Tensor) or device.type == "cpu":
        number = lr.item() if isinstance(lr, Tensor) else lr
        if not _in(number, 0.0, math.inf):
            fail(index, "lr", "a number >= 0", lr)


def check_betas(group: Group, index: int) -> None:
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        fail(index, "betas", "two numbers", betas)
    for beta in betas:
        if not _in(beta, 0.0, 1.0):
            fail(index, "betas", "numbers from 0 to below 1", betas)


def check_positive(group: Group, index: int, *names: str) -> None:
    for name in names:
        if not _in(group[name], 0.0, math.inf):
            fail(index, name, "a number >= 0", group[name])


class FusedRule(UpdateRule):
    """A rule that the fused kernels implement.

    Attributes:
        moments: names of the tensors of the state, in the order of the kernels' moments.
        in_triton: True if Triton's kernels implement the rule as well.
    """

    hyper_columns = 6
    factors_bytes = _native.OPTIMIZER_STRUCTURES["factors"]
    moments: tuple[str, ...]
    in_triton = False

    @abstractmethod
    def columns(self, group: Group) -> tuple[float, float, float, float, int]:
        """Returns the values for AdamW's columns: beta1, beta2, eps, weight decay and flags."""

    def digest(self, groups: Sequence[Group]) -> float:
        rows = tuple((float(group["lr"]), *self.row(group)) for group in groups)
        return float(hash(rows) & (1 << 52) - 1)

    def row(self, group: Group) -> list[float]:
        lr, (*others, flags) = group["lr"], self.columns(group)
        flags |= _FLAGS["maximize"] if group["maximize"] else 0
        # -1.0 represents a tensor lr. No float lr is -1.0, so a float that replaces a tensor
        # changes the row.
        known_lr = -1.0 if isinstance(lr, Tensor) else float(lr)
        return [known_lr, *others, float(flags)]

    def backend(
        self, comm: Communicator | None, options: AdamWOptions, table: StepTable
    ) -> Backend:
        if options.kernels == "triton" and not self.in_triton:
            rank, world_size = (0, 1) if comm is None else (comm.rank, comm.world_size)
            raise UnsupportedError(
                f'{where("optimizer", rank, world_size)}: {self.name}: expected kernels="native", '
                'got "triton": Triton\'s kernels implement only AdamW and Adam. Pass '
                'AdamWOptions(kernels="native"), which runs on CPUs and, as CUDA, on GPUs'
            )
        native: Backend
        if comm is not None and comm.launches:
            native = DeviceBackend(comm, options, table, self.moments, self.quantized_state)
        else:
            native = HostBackend(comm, options, table, self.moments)
        if options.kernels == "native":
            return native
        return TritonBackend(comm, options, table, native, self.moments)


class AdamWRule(FusedRule):
    """The rule of AdamW, and of Adam for groups with ``decoupled_weight_decay=False``."""

    name = "AdamW"
    in_triton = True
    moments: tuple[str, ...] = (*MOMENTS, MAXIMA)
    hypers = ("betas", "eps", "weight_decay", "amsgrad", "maximize", "decoupled_weight_decay")

    def check_hyper(self, group: Group, index: int, device: torch.device) -> None:
        check_rate(group, index, device)
        check_betas(group, index)
        check_positive(group, index, "eps", "weight_decay")

    def columns(self, group: Group) -> tuple[float, float, float, float, int]:
        flags = 0 if group["decoupled_weight_decay"] else _FLAGS["l2"]
        flags |= _FLAGS["amsgrad"] if group["amsgrad"] else 0
        beta1, beta2 = group["betas"]
        return beta1, beta2, group["eps"], group["weight_decay"], flags

    def names(self, groups: Sequence[Group]) -> tuple[str, ...]:
        return self.moments if any(group["amsgrad"] for group in groups) else MOMENTS

    def misfit(self, names: Sequence[str], groups: Sequence[Group]) -> str:
        fits = set(names) - {MAXIMA} == set(MOMENTS)
        return "" if fits else " and ".join(MOMENTS)


class AdamW8bitRule(AdamWRule):
    """The rule of AdamW with 8-bit moments."""

    name = "AdamW8bit"
    in_triton = False
    moments = MOMENTS
    quantized_state = True

    @property
    def saved_as(self) -> str:
        # Saved moments are FP32, so that AdamW and AdamW8bit load each other's state.
        return AdamWRule.name

    def check_hyper(self, group: Group, index: int, device: torch.device) -> None:
        super().check_hyper(group, index, device)
        if group["amsgrad"]:
            fail(index, "amsgrad", "False, since its maxima are not kept in 8 bits", True)

    def columns(self, group: Group) -> tuple[float, float, float, float, int]:
        beta1, beta2, eps, decay, flags = super().columns(group)
        return beta1, beta2, eps, decay, flags | _FLAGS["quantized_state"]

    def misfit(self, names: Sequence[str], groups: Sequence[Group]) -> str:
        return "" if set(names) == set(MOMENTS) else " and ".join(MOMENTS)


class _OneMoment(FusedRule):
    """The base of the rules whose state is at most one tensor per parameter."""

    def _has(self, group: Group) -> bool:
        """True if the parameters of the group have the moment."""
        return True

    def names(self, groups: Sequence[Group]) -> tuple[str, ...]:
        return self.moments if any(map(self._has, groups)) else ()

    def misfit(self, names: Sequence[str], groups: Sequence[Group]) -> str:
        # Accept a saved moment that no group needs; the buckets then keep the moment.
        fits = set(self.names(groups)) <= set(names) <= set(self.moments)
        return "" if fits else self.moments[0]

    def state_at(self, step: float, group: Group) -> ParamState | None:
        return ParamState({}, self.moments) if self._has(group) else None

    def from_torch(self, entry: Mapping[str, Any], group: Group) -> ParamState | None:
        if not self._has(group):
            return None
        if entry.get(self.moments[0]) is None:
            raise ValueError(f"expected {self.moments[0]}, got {sorted(entry)}")
        return ParamState({}, self.moments)


class SgdRule(_OneMoment):
    """The rule of SGD, with or without momentum."""

    name = "SGD"
    moments = ("momentum_buffer",)
    hypers = ("momentum", "dampening", "weight_decay", "nesterov", "maximize")

    def check_hyper(self, group: Group, index: int, device: torch.device) -> None:
        check_rate(group, index, device)
        check_positive(group, index, "momentum", "weight_decay")
        dampening = group["dampening"]
        if not _in(dampening, -math.inf, math.inf):
            fail(index, "dampening", "a number", dampening)
        if group["nesterov"] and (group["momentum"] == 0.0 or dampening != 0.0):
            fail(index, "nesterov", "a momentum and no dampening beside it", group["nesterov"])

    def columns(self, group: Group) -> tuple[float, float, float, float, int]:
        flags = _FLAGS["sgd"] | _FLAGS["l2"]
        flags |= _FLAGS["momentum"] if self._has(group) else 0
        flags |= _FLAGS["nesterov"] if group["nesterov"] else 0
        return group["dampening"], group["momentum"], 0.0, group["weight_decay"], flags

    def _has(self, group: Group) -> bool:
        return bool(group["momentum"] != 0.0)


class LionRule(_OneMoment):
    """The rule of Lion."""

    name = "Lion"
    moments = ("exp_avg",)
    hypers = ("betas", "weight_decay", "maximize")

    def check_hyper(self, group: Group, index: int, device: torch.device) -> None:
        check_rate(group, index, device)
        check_betas(group, index)
        check_positive(group, index, "weight_decay")

    def columns(self, group: Group) -> tuple[float, float, float, float, int]:
        beta1, beta2 = group["betas"]
        return beta1, beta2, 0.0, group["weight_decay"], _FLAGS["lion"]
