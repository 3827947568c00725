"""``Sharded``, which is any elementwise optimizer: instances of its class step the shards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ringcomm.c10d.comm_argument import CommArgument
from ringcomm.comm.communicator import Communicator
from ringcomm.errors import ArgumentError, UnsupportedError
from ringcomm.optim.buckets import Bucket, Buckets, empty_for_streams, gather_params
from ringcomm.optim.elementwise import OptimizerClass, TriedClass, hyper_of, name_of
from ringcomm.optim.instances import ChunkPart, Instance, parts_of, to_number
from ringcomm.optim.kernels import CLIP, FOUND_INF, INV_SCALE, SKIPPED, STEPS, Kernels, StepTable
from ringcomm.optim.layout import ShardLayout
from ringcomm.optim.loss_scaler import LossScaler
from ringcomm.optim.options import AdamWOptions
from ringcomm.optim.placement import sharers_of
from ringcomm.optim.reduction import DeviceReducer, HostReducer, Into
from ringcomm.optim.rules import Group, ParamState, UpdateRule, digest_of, plain
from ringcomm.optim.sharded import Params, ShardedOptimizer, Sharing

Tensor = torch.Tensor


# Options that ask for kernels of AdamW's, with the only values that other optimizers take.
_OF_ANY_CLASS = {"master": "fp32", "rounding": "nearest", "kernels": "native"}


def refuse_kernels_of_adamw(options: AdamWOptions | None) -> None:
    """Raises UnsupportedError unless the options are those that torch's classes can have."""
    for name, value in _OF_ANY_CLASS.items():
        asked = getattr(options, name, value)
        if asked != value:
            raise UnsupportedError(
                f"Sharded: {name}={asked!r} is what the kernels of ringcomm.optim.AdamW can; "
                f"expected {value!r}"
            )


class TorchRule(UpdateRule):
    """A class of torch optimizers, whose instances step the parts of parameters in each bucket.

    Args:
        made: the class, with its arguments.
    """

    keeps_more = True

    def __init__(self, made: OptimizerClass) -> None:
        self.name = name_of(made.kind)
        self._tried = TriedClass(made)
        self._place = torch.device("cpu")
        # By the key of a part of a bucket; and that of parameters without elements here.
        self._instances: dict[tuple[int, int], Instance] = {}
        self._bare: Instance | None = None
        self._buckets: Sequence[Bucket] = ()

    @property
    def numbers(self) -> frozenset[str]:
        return frozenset(self._tried.numbers)

    @property
    def writes_gradients(self) -> bool:
        """True if a step changes the gradients that it is given."""
        return self._tried.writes_gradients

    def check_hyper(self, group: Group, index: int, place: torch.device) -> None:
        for name, value in hyper_of(group).items():
            if isinstance(value, float) and math.isnan(value):
                raise ArgumentError(
                    f"param group {index}: {name}: expected a number, got {value!r}"
                )
        if group.get("differentiable"):
            raise UnsupportedError(
                f"param group {index}: differentiable=True: autograd does not see the step of "
                "shards; use torch.optim for it"
            )
        self._place = place
        self._tried.kinds(group, place)

    def replaced(self, group: Group) -> dict[str, Any]:
        return {}

    def compared(self, group: Group) -> dict[str, Any]:
        hyper = hyper_of(group)
        return {name: _told(hyper[name]) for name in sorted(hyper) if name != "lr"}

    def digest(self, groups: Sequence[Group]) -> float:
        return digest_of(
            [{"lr": plain(group.get("lr")), **self.compared(group)} for group in groups]
        )

    def names(self, groups: Sequence[Group]) -> tuple[str, ...]:
        found = [self._tried.kinds(group, self._place).tensors for group in groups]
        return tuple(dict.fromkeys(name for names in found for name in names))

    def misfit(self, names: Sequence[str], groups: Sequence[Group]) -> str:
        # A tensor of earlier hyper-parameters stays where it is, as in torch.
        return ""

    def kernels(
        self, comm: Communicator | None, options: AdamWOptions, table: StepTable
    ) -> Kernels:
        # A sharded module's precision has chosen some of them.
        refuse_kernels_of_adamw(options)
        return TorchKernels(comm, options, table, self)

    def bind(
        self,
        layout: ShardLayout,
        groups: Sequence[Group],
        buckets: Buckets,
        chunks: int,
        states: Sequence[ParamState | None] = (),
    ) -> None:
        states = [*states, *[None] * (len(layout.params) - len(states))]
        self._instances.clear()
        self._bare = None
        self._buckets = buckets
        here: set[int] = set()
        for bucket in (part for whole in buckets for part in whole.parts()):
            parts = parts_of(bucket.layout, bucket.chunk, lambda index: layout.params[index].group)
            here.update(part.index for part in parts)
            if parts:
                made = self._instances[bucket.key] = self._instance(groups, bucket, parts)
                made.take_states(states)
        # Their steps are counted on every rank, whether or not it has elements of them.
        bare = [
            ChunkPart(index, spec.group)
            for index, spec in enumerate(layout.params)
            if spec.trainable and spec.tied_to is None and index not in here
        ]
        if bare:
            nothing = torch.empty(0, dtype=torch.float32, device=self._place)
            self._bare = Instance(
                self._tried, groups, bare, nothing, lambda name: torch.empty_like(nothing)
            )
            self._bare.take_states(states)

    def _instance(
        self, groups: Sequence[Group], bucket: Bucket, parts: list[ChunkPart]
    ) -> Instance:
        def moment(name: str) -> Tensor:
            bucket.ensure([name])
            return bucket.state.moments[name]

        master = bucket.state.master
        values = bucket.own_memory if master is None else master
        return Instance(self._tried, groups, parts, values, moment)

    def _all_instances(self) -> list[Instance]:
        bare = [] if self._bare is None else [self._bare]
        return [*self._instances.values(), *bare]

    def begin(self, active: Sequence[float]) -> None:
        """Steps the parameters without elements."""
        if self._bare is not None:
            self._bare.step(torch.empty(0, dtype=torch.float32, device=self._place), active)

    def update(self, bucket: Bucket, grad: Tensor, active: Sequence[float]) -> None:
        """Updates this rank's chunk of a bucket.

        Args:
            bucket: the bucket.
            grad: float32 [chunk elements].
            active: by parameter, not 0 where the parameter takes the step.
        """
        if bucket.key not in self._instances:
            return  # none of its parameters is in a group
        self._instances[bucket.key].step(grad, active)
        if bucket.state.master is not None:
            bucket.own_params.copy_(bucket.state.master)

    def states(
        self, layout: ShardLayout, groups: Sequence[Group], steps: Sequence[float]
    ) -> list[ParamState | None]:
        found: dict[int, ParamState | None] = {}
        for instance in self._all_instances():
            found.update(instance.states())
        return [found.get(index) for index in range(len(layout.params))]

    def take_states(self, states: Sequence[ParamState | None]) -> None:
        for bucket in (part for whole in self._buckets for part in whole.parts()):
            if bucket.key in self._instances:
                self._instances[bucket.key].take_states(states)
        if self._bare is not None:
            self._bare.take_states(states)

    def to_torch(self, name: str, number: float) -> Any:
        return to_number(self._tried.numbers[name], number)

    def from_torch(self, entry: Mapping[str, Any], group: Group) -> ParamState | None:
        kinds = self._tried.kinds(group, self._place)
        there = {name: value for name, value in entry.items() if value is not None}
        wanted = [*kinds.numbers, *kinds.tensors]
        if not there or not wanted:
            return None
        missing = [name for name in wanted if name not in there]
        if missing:
            raise ValueError(f"expected {', '.join(wanted)}, got no {missing[0]}")
        try:
            numbers = {name: float(there[name]) for name in kinds.numbers}
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"expected numbers as {', '.join(kinds.numbers)}: {error}") from error
        return ParamState(numbers, kinds.tensors)


def _told(value: Any) -> Any:
    """Returns a hyper-parameter as JSON knows it, or the name of its class."""
    told = plain(value)
    if isinstance(told, list):
        return [_told(each) for each in told]
    return told if isinstance(told, (bool, int, float, str, type(None))) else type(told).__name__


@dataclass(frozen=True)
class StepControl:
    """The numbers of a step that torch's code needs on the host; to read them waits for a device.

    Attributes:
        skips: the step changes nothing.
        factors: numbers that the gradient is to be multiplied by, one after the other.
        active: by parameter, not 0 where the parameter takes the step.
    """

    skips: bool = False
    factors: tuple[float, ...] = ()
    active: Sequence[float] = ()

    @classmethod
    def read(cls, table: StepTable) -> StepControl:
        """Reads the table of a step that begins."""
        params = len(table.active)
        told = torch.cat([table.control[: FOUND_INF + 1], table.active]).tolist()
        factors = tuple(each for each in (told[INV_SCALE], told[CLIP]) if each != 1)
        return cls(told[FOUND_INF] != 0, factors, told[-params:] if params else [])


class TorchKernels(Kernels):
    """The step of a :class:`TorchRule`: a reduction, torch's update of the chunk, and a gathering.

    It reads on the host whether a step is skipped, and which parameters have gradients.
    """

    def __init__(
        self,
        comm: Communicator | None,
        options: AdamWOptions,
        table: StepTable,
        rule: TorchRule,
    ) -> None:
        if comm is not None and comm.launches:
            super().__init__(comm.world_size == 1, DeviceReducer(comm, options))
        else:
            super().__init__(comm is None, HostReducer(comm, options, table.layout.size_bytes))
        self._rule = rule
        self._sharers = sharers_of(comm, options.state)
        # float32 [elements of the largest chunk so far], for gradients of one bucket at a time.
        self._scratch: Tensor | None = None
        self._control = StepControl()

    def forget(self) -> None:
        return

    def begin(self, table: StepTable) -> None:
        self._control = control = StepControl.read(table)
        table.control[SKIPPED if control.skips else STEPS].add_(1)
        if not control.skips:
            table.step.add_(table.active != 0)
            self._rule.begin(control.active)

    def _own(self, bucket: Bucket) -> Tensor:
        """Returns memory for a gradient: float32 [chunk elements]."""
        elems = bucket.chunk.elems
        if self._scratch is None or self._scratch.numel() < elems:
            place = bucket.device
            self._scratch = empty_for_streams(elems, torch.float32, place)
        return self._scratch[:elems]

    def update_shard(self, bucket: Bucket, grad: Tensor) -> None:
        if self._control.skips:
            return
        grad = grad[: bucket.chunk.elems]
        if self._control.factors or self._rule.writes_gradients or grad.dtype is not torch.float32:
            grad = self._own(bucket).copy_(grad)
        self._update_from(bucket, grad)

    def _update_from(self, bucket: Bucket, grad: Tensor) -> None:
        """Updates this rank's chunk from a gradient, which is scaled in place if it has to be."""
        for factor in self._control.factors:
            grad.mul_(factor)
        self._rule.update(bucket, grad, self._control.active)

    def update_gather(self, bucket: Bucket, grad: Tensor) -> None:
        self.update_shard(bucket, grad)
        if not self._control.skips:
            assert self._sharers is not None
            gather_params(bucket, self._sharers)

    def one_pass(self, bucket: Bucket, grads: Tensor) -> None:
        if self._control.skips:
            return
        own = self._own(bucket)
        into = Into(own, "l2", None, tag=bucket.tag(), residual=bucket.residual)
        self.reducer.reduce(grads, into)
        self._update_from(bucket, own)
        assert self._sharers is not None
        gather_params(bucket, self._sharers)


class Sharded(ShardedOptimizer):
    """Any elementwise optimizer, sharded: its own class steps FP32 shards on each rank.

    It ends with the bits of the class in one process, on the mean of the ranks' gradients; 16-bit
    parameters are rounded FP32 masters. Everything else is as with :class:`AdamW`::

        optimizer = Sharded(torch.optim.SGD, model.parameters(), lr=0.1, momentum=0.9)

    Args:
        kind: the class, torch's or another, such as ``torch.optim.SGD``.
        params: as of :class:`AdamW`.
        comm: as of :class:`AdamW`.
        options: as of :class:`AdamW`.
        loss_scaler: as of :class:`AdamW`.
        mesh: as of :class:`AdamW`.
        settings: arguments of the class.

    Raises:
        ArgumentError: ``kind`` is no class of optimizers, or does not take ``settings``; and as of
            :class:`AdamW`.
        UnsupportedError: the class is not elementwise, or the options need AdamW's kernels.
    """

    def __init__(
        self,
        kind: type[torch.optim.Optimizer],
        params: Params,
        *,
        comm: CommArgument = None,
        options: AdamWOptions | None = None,
        loss_scaler: LossScaler | None = None,
        mesh: DeviceMesh | None = None,
        **settings: Any,
    ) -> None:
        if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer):
            raise ArgumentError(
                f"Sharded: expected a class of optimizers, such as torch.optim.SGD, got {kind!r}"
            )
        if issubclass(kind, ShardedOptimizer):
            raise ArgumentError(f"Sharded: {kind.__name__} is sharded by itself; use it directly")
        refuse_kernels_of_adamw(options)
        made = OptimizerClass(kind, settings)
        sharing = Sharing(comm, options, loss_scaler, mesh)
        super().__init__(params, made.defaults(), sharing, TorchRule(made))
