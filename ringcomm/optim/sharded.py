# SPDX-License-Identifier: Apache-2.0
"""The base class of optimizers whose state is sharded over a communicator."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy

from ringcomm.c10d.comm_argument import CommArgument, find_communicator, find_device_type
from ringcomm.comm.agreement import all_or_none
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.host.arguments import ReduceOp, admit_keys, intercepting_keys
from ringcomm.comm.local_world import local_world
from ringcomm.errors import ArgumentError, UnsupportedError
from ringcomm.memory import normal_tensors
from ringcomm.optim import backends, state, torch_state
from ringcomm.optim.buckets import Bucket, Buckets, heap_device_of, make_bucket
from ringcomm.optim.clipping import NormBound, clip_norm, clip_norm_of, clip_value_of
from ringcomm.optim.dtensors import MeshView, check_placements, find_mesh, grad_of, local_of
from ringcomm.optim.gradients import Accumulator
from ringcomm.optim.layout import DTYPE_NAMES, DTYPES, ShardLayout
from ringcomm.optim.options import AdamWOptions
from ringcomm.optim.placement import (
    ModelMesh,
    Placement,
    all_params,
    check_order,
    move_parameters,
    over_mesh,
    placement_of,
    read_mesh,
    specs_of,
)
from ringcomm.optim.rules import FusedRule, UpdateRule, as_json
from ringcomm.optim.setting import LossScaler, Setting
from ringcomm.optim.step import Amp, ShardedStep

# ---- Adding a param group to an optimizer whose buckets are already laid out --------------------
# NOTE [Growth] The earlier parameters, gradients and states stay in their buckets, whose layout
# does not change. New parameters of a sharded module have been in the module's buckets since
# ``shard()``, but without segments; other new parameters get new buckets. As in torch, new
# parameters begin at step 0. Tables with an entry per parameter are made again, and get the numbers
# of the old tables.


class GrownStep(ShardedStep):
    """A step with added groups, which replaces an earlier step; building it is collective.

    Args:
        before: the earlier step, which stays unchanged if the constructor raises.
        groups: the groups of the earlier step, followed by the added groups.
    """

    _operation = "optimizer.add_param_group"

    def __init__(self, before: ShardedStep, groups: Sequence[dict[str, Any]]) -> None:
        before.written.take_over()
        self._before: ShardedStep = before
        self._count = len(before.layout.params)
        self._states = before.states()
        super().__init__(groups, before.setting)
        del self._before, self._states
        self.table.control.copy_(before.table.control)
        self.table.step[: self._count].copy_(before.table.step)
        if self.setting.device.type == "cpu":
            self._seen_skipped = int(self.table.control[backends.SKIPPED])

    def _compared_groups(self) -> list[dict[str, Any]]:
        """Adds the new group's lr to the compared values: ranks with different lr raise at once."""
        *known, added = super()._compared_groups()
        # On a device the lr may be a device tensor, and reading it would wait.
        rate = {"lr": as_json(self.groups[-1].get("lr"))} if self.table.compares else {}
        return [*known, {**rate, **added}]

    def _lay_out(self) -> ShardLayout:
        return self._before.layout.extended(specs_of(self.groups)[self._count :])

    def _take_over(self) -> None:
        setting, options, comm = self.setting, self.setting.options, self.setting.comm
        device, known = heap_device_of(comm), len(self._before.buckets)
        more = [
            make_bucket(number, bucket, bucket.chunk(*setting.shard_of), options, device)
            for number, bucket in enumerate(self.layout.buckets)
            if number >= known
        ]
        added = Buckets(self.layout, more)
        self.keep_state(added)
        move_parameters(self.params, added, comm, options.broadcast_parameters)
        self.write_masters(added, Bucket.refresh_master)
        self.buckets = Buckets(self.layout, [*self._before.buckets, *more])
        self.gradients = self._make_gradients()

    def _module_buckets(self, placement: Placement) -> Buckets:
        buckets: list[Bucket] = list(self._before.buckets)
        for bucket, layout in zip(buckets, self.layout.buckets, strict=True):
            bucket.lay_out(layout)
        return Buckets(self.layout, buckets)


# ---- A GradScaler that makes all ranks take a step, or all ranks skip the step ------------------

Tensor = torch.Tensor


class GradScaler(torch.amp.GradScaler):
    """A ``torch.amp.GradScaler`` that skips a step on all ranks if one rank's gradient overflows.

    So the ranks' scales stay equal. It works with any optimizer; with a ringcomm optimizer it uses
    the optimizer's communicator. It also checks gradients that ``accumulate_dtype`` has moved from
    ``p.grad`` to FP32 sums. In a pipeline only the last stage calls :meth:`scale`; every stage
    makes the other calls.

    Args:
        device: "cpu" or "cuda"; None means the communicator's device.
        comm: the ranks that agree on the steps of optimizers that are not ringcomm's, in a form
            that :class:`AdamW` takes. It is first used when gradients of such an optimizer are
            unscaled.
        settings: torch's further arguments: init_scale, growth_factor, backoff_factor,
            growth_interval, enabled.
    """

    def __init__(
        self, device: str | None = None, *, comm: CommArgument = None, **settings: Any
    ) -> None:
        found = find_device_type(comm, "GradScaler")
        self._comm = comm
        super().__init__(device or found, **settings)

    def __repr__(self) -> str:
        # Do not show the scale, since reading it would wait for the device.
        state = "enabled" if self.is_enabled() else "not enabled"
        return f"<ringcomm.optim.GradScaler on {self._device}, {state}>"

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients by the scale; collective."""
        self._begin(optimizer)
        super().unscale_(optimizer)

    def _begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Sets the initial scale on pipeline stages without a loss, which do not call scale()."""
        if (
            not self._enabled
            or self._scale is not None
            or not isinstance(optimizer, ShardedOptimizer)
        ):
            return
        mesh = optimizer.mesh
        if isinstance(mesh, ModelMesh) and mesh.has_stages:
            self._lazy_init_scale_growth_tracker(torch.device(self._device))

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        sums: list[Tensor] | None = None
        mesh, asks = None, False
        if isinstance(optimizer, ShardedOptimizer):
            comm, sums, mesh = optimizer.communicator, optimizer._gradient_flats(), optimizer.mesh
            # If the step itself will unscale, only check for infinities here, with the scale 1.
            asks = sums is None and mesh is None and allow_fp16
            if sums is None:
                if not allow_fp16:
                    _check_not_fp16(optimizer)
                sums = _local_gradients(optimizer)
        else:
            comm = find_communicator(self._comm, "GradScaler", found_inf.device)
        if sums is not None:
            local = found_inf.clone()
            for dtype in {each.dtype for each in sums}:
                alike = [each for each in sums if each.dtype is dtype]
                torch._amp_foreach_non_finite_check_and_unscale_(alike, local, inv_scale)
                # A step finds changed gradients by version, which the operator does not increment.
                if not asks:
                    torch.autograd.graph.increment_version(alike)
            found = {local.device: local}
        else:
            found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        # A rank without gradients still takes part in the collective.
        found = found or {found_inf.device: found_inf.clone()}
        if comm is not None and comm.world_size > 1:
            for each in found.values():
                comm.all_reduce(each, ReduceOp.MAX)
        if mesh is not None:
            for each in found.values():
                mesh.all_reduce(each, ReduceOp.MAX)
        return found

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Steps the optimizer unless a gradient overflowed on some rank; collective."""
        if not self._enabled or not isinstance(optimizer, ShardedOptimizer):
            return super().step(optimizer, *args, **kwargs)
        self._begin(optimizer)
        optimizer._found_inf_agreed = True
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            optimizer._found_inf_agreed = False


def _local_gradients(optimizer: ShardedOptimizer) -> list[Tensor]:
    """Returns this rank's local gradients: torch refuses a list that mixes tensors and DTensors."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [local_of(grad) for grad in map(grad_of, params) if grad is not None]


def _check_not_fp16(optimizer: ShardedOptimizer) -> None:
    for group in optimizer.param_groups:
        for grad in map(grad_of, group["params"]):
            if grad is not None and grad.dtype is torch.float16:
                raise ArgumentError(
                    "GradScaler.unscale_: expected FP32 gradients, got float16, whose small "
                    "values unscaling would lose. To clip them, build the optimizer with "
                    "loss_scaler=ringcomm.optim.LossScaler() in place of a GradScaler: its "
                    "clip_grad_norm_() takes the scale into account"
                )


def listed(params: Any) -> Any:
    """Returns parameters or groups with generators turned into lists, to read them repeatedly."""
    if isinstance(params, (Tensor, set, str)):
        return params  # torch raises its own error
    return [
        {**each, "params": listed(each["params"])}
        if isinstance(each, dict) and "params" in each
        else each
        for each in params
    ]


def first_device(params: Any) -> torch.device | None:
    """Returns the device of the first parameter, or None if there is none."""
    first = next(iter(params), None) if isinstance(params, list) else None
    while isinstance(first, (dict, tuple, list)):
        inside = first["params"] if isinstance(first, dict) else first[1:]
        first = inside if isinstance(inside, Tensor) else next(iter(inside), None)
    return first.device if isinstance(first, Tensor) else None


def check_param(entry: Any, called: str, device: torch.device) -> None:
    """Checks an entry of "params": a tensor, or a pair of a name and a tensor.

    Raises:
        ArgumentError: the tensor's class, dtype, layout or device cannot be used.
    """
    param = entry[1] if isinstance(entry, tuple) else entry
    if not isinstance(param, Tensor):
        return  # torch raises its own error
    check_placements(param, called)
    if param.dtype not in DTYPE_NAMES:
        way_out = "use torch.optim for it"
        if not param.requires_grad:
            way_out = (
                "it is frozen, so leave it out: pass "
                "[p for p in module.parameters() if p.requires_grad]"
            )
        raise ArgumentError(
            f"{called}: expected dtype {', '.join(DTYPES)}, got {param.dtype}; {way_out}"
        )
    if not is_lazy(param) and param.is_inference():
        raise ArgumentError(
            f"{called}: was made under torch.inference_mode(), and such a tensor cannot be "
            "trained; build or copy the module outside of it"
        )
    if param.layout is not torch.strided:
        raise ArgumentError(f"{called}: expected a dense tensor, got layout {param.layout}")
    if param.device != device:
        raise ArgumentError(
            f"{called}: expected a tensor on {device}, the device of the communicator or of the "
            f"first parameter, got one on {param.device}; all parameters must be on one device"
        )


Params: TypeAlias = "Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]"


@dataclass(frozen=True)
class Sharing:
    """The optimizer arguments that torch's classes do not have; see :class:`AdamW`."""

    comm: CommArgument = None
    options: AdamWOptions | None = None
    loss_scaler: LossScaler | None = None
    mesh: DeviceMesh | None = None


class ShardedOptimizer(torch.optim.Optimizer):
    """The base class of optimizers with sharded state; subclasses add a rule and its defaults.

    The parameters are replicated and the state is sharded: rank r keeps the state of chunk r of
    every bucket. At the first step (or :meth:`prepare`) the parameters move into the heap, where
    their ``.data`` are views of the buckets; each step moves the gradients into the buckets.
    """

    # Makes torch.amp.GradScaler pass grad_scale and found_inf, and let step() unscale and skip.
    _step_supports_amp_scaling = True
    # True while ringcomm's GradScaler calls step().
    _found_inf_agreed = False

    def __init__(
        self,
        params: Params,
        defaults: dict[str, Any],
        sharing: Sharing,
        rule: UpdateRule,
    ) -> None:
        if defaults.get("differentiable"):
            raise UnsupportedError(
                f"{type(self).__name__}: differentiable=True: the step is a kernel that autograd "
                "does not see; use torch.optim for it"
            )
        if defaults.get("fused") and defaults.get("foreach"):
            raise ArgumentError(f"{type(self).__name__}: expected one of fused and foreach")
        loss_scaler = sharing.loss_scaler
        options = AdamWOptions() if sharing.options is None else sharing.options
        if not isinstance(options, AdamWOptions):
            raise ArgumentError(
                f"{type(self).__name__}: options: expected AdamWOptions, got {options!r}"
            )
        params = listed(params)
        self.placement = placement_of(params)
        comm, others = self._chosen_mesh(sharing.comm, sharing.mesh)
        if others is not None and params == []:
            params = [{"params": []}]  # a stage without parameters still takes part in norms
        found = self._chosen_comm(comm, params)
        device = torch.device("cpu") if found is None else found.device
        self.communicator = found
        if options.update == "in_backward":
            _check_in_backward(type(self).__name__, self.placement, rule, loss_scaler)
        # On a device a communicator launches the kernels, even in a world of one.
        alone = found is None or (found.world_size == 1 and not found.launches)
        accumulator = None if options.accumulate_dtype is None else Accumulator()
        if accumulator is not None and self.placement is not None:
            self.placement.accumulate(accumulator)
        self._setting = Setting(
            None if alone else found, device, rule, options, loss_scaler, accumulator, others
        )
        self._sharded: ShardedStep | None = None
        chosen_for_user = comm is None and self.placement is None and self._setting.world_size > 1
        self._built_on: list[Tensor] | None = [] if chosen_for_user else None
        defaults.update(rule.replaced(defaults))
        super().__init__(params, defaults)
        if self.placement is not None:
            self.placement.optimizer = weakref.ref(self)
        if loss_scaler is not None:
            if loss_scaler.current.device != device:
                raise ArgumentError(
                    f"{type(self).__name__}: loss_scaler: expected one on {device}, got one on "
                    f"{loss_scaler.current.device}; pass it device="
                )
            loss_scaler.bind(self)
        # torch.distributed.checkpoint takes a step if the state is empty. This state would be empty
        # after the step as well, so it gets an entry here.
        for param in self.param_groups[0]["params"][:1]:
            self.state[param] = {}
        if options.update == "in_backward":
            self.prepare()  # the first backward already updates buckets, so they must exist

    def _chosen_mesh(
        self, comm: CommArgument, mesh: DeviceMesh | None
    ) -> tuple[CommArgument, DeviceMesh | None]:
        """Returns the argument ``comm``, and the mesh of other stages and shards, or None."""
        comm, others = read_mesh(mesh, comm, type(self).__name__)
        if self.placement is None:
            return comm, others
        if mesh is not None and others != self.placement.others:
            raise ArgumentError(
                f"{type(self).__name__}: mesh: the parameters were sharded over another mesh; "
                "pass the same mesh to shard(), or omit mesh= here"
            )
        return comm, self.placement.others

    def _chosen_comm(self, comm: CommArgument, params: Any) -> Communicator | None:
        """Returns the communicator of the placement, else of ``comm``, else of this rank alone."""
        operation, device = type(self).__name__, first_device(params)
        if self.placement is not None:
            own = self.placement.comm
            if comm is None or _same_ranks(find_communicator(comm, operation, device), own):
                return own
            raise ArgumentError(
                f"{operation}: comm: the parameters were sharded over another communicator; omit "
                "comm="
            )
        found = find_communicator(comm, operation, device)
        if found is None and device is not None and device.type == "cuda":
            return local_world(1, device=device)[0]
        return found

    @property
    def options(self) -> AdamWOptions:
        """The options with which the optimizer was built."""
        return self._setting.options

    @property
    def mesh(self) -> MeshView | None:
        """The mesh of stages and DTensors over which norms are taken, or None."""
        params = (param for group in self.param_groups for param in group["params"])
        operation = type(self).__name__
        return over_mesh(self._setting.others, find_mesh(params, operation), operation)

    @property
    def scales_losses(self) -> bool:
        """True if the optimizer was built with a loss scaler."""
        return self._setting.loss_scaler is not None

    @property
    def accumulator(self) -> Accumulator | None:
        """The FP32 sums of gradients with ``accumulate_dtype``; None without it."""
        return self._setting.accumulator

    @property
    def steps_taken(self) -> Tensor:
        """Number of steps that were not skipped: float64, a scalar on the device."""
        return self._count(backends.STEPS)

    @property
    def skipped_steps(self) -> Tensor:
        """Number of steps skipped for an overflow: float64, a scalar on the device."""
        return self._count(backends.SKIPPED)

    def _gradient_flats(self) -> list[Tensor] | None:
        """Returns the tensors that a GradScaler unscales; None for ``p.grad``."""
        self.refuse_scaler()
        flats = None if self.placement is None else self.sharded_step().gradients.flats()
        return self.accumulator.flats() if flats is None and self.accumulator else flats

    def refuse_scaler(self) -> None:
        """Raises ArgumentError if a GradScaler would unscale gradients too late."""
        if self.options.update == "in_backward":
            self.sharded_step().refuse_in_backward("step by a GradScaler")
        options = self.options
        if self.placement is not None:
            options = self.placement.options(options)
        if options.compression.error_feedback:
            raise ArgumentError(
                f"{self._setting.where('step')}: expected loss_scaler=ringcomm.optim.LossScaler() "
                "with Compression(error_feedback=True), got a GradScaler. It may unscale gradients "
                "before or after they are quantized, but the stored quantization errors must all "
                "have one scale"
            )

    def _count(self, column: int) -> Tensor:
        # Do not prepare the optimizer here: preparing is collective, but reading a count is not.
        if self._sharded is None:
            return torch.zeros((), dtype=torch.float64, device=self._setting.device)
        return self._sharded.table.control[column].clone()

    def prepare(self) -> None:
        """Lays out the buckets and moves the parameters into them; collective.

        Without this call, the first :meth:`step`, :meth:`clip_grad_norm_` or
        :meth:`load_state_dict` prepares the optimizer.

        Raises:
            ArgumentError: two parameters share memory.
            MismatchError: the ranks' parameters or options differ; the message names two ranks.
            HeapError: the heap has too little free memory.
            UnsupportedError: there are no kernels for the parameters' device.
        """
        self.sharded_step()

    def sharded_step(self) -> ShardedStep:
        """Returns the optimizer's step, and builds it at the first call; internal to ringcomm."""
        if self._sharded is None:
            check_order(self.placement, self.param_groups)
            self._check_own_params()
            self._check_values("prepare")
            with normal_tensors():
                self._sharded = ShardedStep(self.param_groups, self._setting)
        return self._sharded

    def uncapturable(self) -> str | None:
        """Returns why a graph cannot capture a step, or None; internal to ringcomm."""
        options = self.options
        if self.placement is not None:
            options = self.placement.options(options)
        if not isinstance(self._setting.rule, FusedRule):
            return f"{type(self).__name__} reads on the host whether a step is skipped"
        if options.offload_state is not None:
            return f"offload_state={options.offload_state!r} moves state by the host"
        if options.compression.error_feedback:
            return "error_feedback=True reads on the host whether a step is skipped"
        if self.placement is not None and self.placement.store is not None:
            return "offload_params= moves parameters by the host"
        if self.mesh is not None:
            return "its parameters are divided over a mesh, whose ranks meet on the host"
        return None

    def _check_own_params(self) -> None:
        """Checks that the optimizer still has the parameters on which it was built.

        A library that replaces an optimizer's parameters, as DeepSpeed does, may replace them by
        shards that differ between ranks. The optimizer must not combine the shards over a default
        group that the user did not pass.
        """
        if self._built_on is None:
            return
        own = set(map(id, self._built_on))
        for index, group in enumerate(self.param_groups):
            for number, param in enumerate(group["params"]):
                if id(param) not in own:
                    raise ArgumentError(
                        f"{self._setting.where('prepare')}: param group {index}, parameter "
                        f"{number}: expected a parameter that the optimizer was built on. If "
                        "DeepSpeed, or another library that shards or reduces by itself, has "
                        'replaced it, pass comm="alone"; otherwise pass a communicator as comm='
                    )
        self._built_on = None

    def _check_values(self, operation: str) -> None:
        """Raises ArgumentError if parameters temporarily have values other than their own."""
        if self.placement is not None:
            self.placement.module.check_values(f"optimizer.{operation}")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as torch does; collective once the optimizer is prepared.

        The group's parameters begin at step 0, and the state of other parameters is kept. If
        several parameters were unfrozen, several calls may add them, all before the next step. See
        NOTE [Growth] in ``optim/sharded.py``.

        Raises:
            ArgumentError: hyper-parameters or parameters cannot be used.
            MismatchError: the ranks add different groups; on a CPU also if only ``lr`` differs.

        If the optimizer is prepared and one rank fails, all ranks raise, and no rank has the group.
        """
        # torch's constructor calls this method before self.param_groups is complete.
        before = self._sharded
        if before is None:
            self._add_group(param_group)
            return
        count = len(self.param_groups)
        try:
            with all_or_none(before.setting.comm, "optimizer.add_param_group", before.over):
                before.refuse_if_partly_updated("add_param_group")
                self._add_group(param_group)
                before.check_growth()
            with normal_tensors():
                self._sharded = GrownStep(before, self.param_groups)
        except Exception:
            for param in all_params(self.param_groups[count:]):
                self._setting.unwatch(param)
            del self.param_groups[count:]
            raise

    def _add_group(self, param_group: dict[str, Any]) -> None:
        if isinstance(param_group, dict) and "params" in param_group:
            param_group = {**param_group, "params": listed(param_group["params"])}
            group = {**self.defaults, **param_group}
            index = len(self.param_groups)
            replaced = self._setting.rule.replaced(group)
            param_group.update(replaced)
            self._setting.rule.check_hyper({**group, **replaced}, index, self._setting.device)
            for number, param in enumerate(param_group["params"]):
                called = f"param group {index}, parameter {number}"
                check_param(param, called, self._setting.device)
        super().add_param_group(param_group)
        if self._built_on is not None:
            self._built_on.extend(self.param_groups[-1]["params"])
        accumulator = self._setting.accumulator
        if accumulator is not None:
            for number, param in enumerate(self.param_groups[-1]["params"]):
                if param.requires_grad:
                    called = f"param group {len(self.param_groups) - 1}, parameter {number}"
                    accumulator.watch(param, called)

    @normal_tensors()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one step on all ranks; collective.

        Args:
            closure: function that computes the loss and its gradients again; called first.

        Returns:
            The result of ``closure``, or None.

        Raises:
            ArgumentError: a gradient or hyper-parameter cannot be used; nothing was changed.
            UnsupportedError: a gradient is sparse; or torch's GradScaler is used with several
                ranks; or a torch trace or transform is active, which could not record the step.
            MismatchError: on all ranks, if their hyper-parameters differ; nothing was changed.
            RingcommError: a fault; see ``ringcomm.errors``. Further steps are refused then.
        """
        if intercepting_keys():
            admit_keys(self._setting.where("step"))
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.sharded_step().step(self._amp())
        return loss

    def _amp(self) -> Amp:
        """Returns the scalars that a GradScaler set before it called :meth:`step`."""
        if not hasattr(self, "found_inf"):
            return Amp()
        self.refuse_scaler()
        scale, found_inf = getattr(self, "grad_scale", None), self.found_inf
        agreed = self._found_inf_agreed
        alone = self._setting.world_size == 1 and self.mesh is None
        if not agreed and not (alone and self._gradient_flats() is None):
            raise UnsupportedError(
                f"{self._setting.where('step')}: torch.amp.GradScaler looks at this rank's p.grad "
                "only; use ringcomm.optim.GradScaler in its place, or loss_scaler="
            )
        if self._setting.loss_scaler is not None:
            raise ArgumentError(
                f"{self._setting.where('step')}: expected either a GradScaler or loss_scaler=, got "
                "both"
            )
        return Amp(scale, found_inf if isinstance(found_inf, Tensor) else None)

    @normal_tensors()
    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        *,
        params: Tensor | Iterable[Tensor] | None = None,
    ) -> Tensor:
        """Scales the gradient of the next step down to a norm of at most ``max_norm``; collective.

        The gradients of all ranks are reduced now; ``p.grad`` itself is not scaled. If gradients
        change afterwards, the clipping is discarded. Exception: with ``params``, at stages 2 and 3
        of ZeRO, later backwards add to the scaled gradients.

        Args:
            max_norm: bound of the norm of the reduced gradient of all parameters, after unscaling.
            norm_type: 2.0, 1.0 or ``math.inf``.
            error_if_nonfinite: True to read the norm on the host, and raise if it is not finite.
            params: the parameters, equal on all ranks, whose gradients count in the norm and are
                scaled; None means all. Frozen parameters that are in no group are ignored.

        Returns:
            The norm before clipping: float32, a scalar on the device, with bits that do not depend
            on the world size. NaN if the gradient is not finite.

        Raises:
            ArgumentError: a bad norm, a gradient that cannot be used, or ``params`` has a trainable
                parameter or another tensor that is not the optimizer's. On a CPU all ranks refuse
                bad arguments of any rank.
            MismatchError: on a CPU, if the ranks passed different bounds or ``params``.
            UnsupportedError: ``params`` was passed with Triton's kernels and several ranks.
            RingcommError: a fault; or the norm is not finite, with ``error_if_nonfinite``.
        """
        bound_of = partial(NormBound.of, max_norm, norm_type, error_if_nonfinite)
        sharded = self.sharded_step()
        if params is None:
            return clip_norm(sharded, bound_of)
        return clip_norm_of(sharded, params, bound_of)

    @normal_tensors()
    def clip_grad_value_(
        self, clip_value: float, *, params: Tensor | Iterable[Tensor] | None = None
    ) -> None:
        """Limits each element of the next step's gradient to a magnitude; collective.

        The gradients of all ranks are reduced now. Their mean is clipped, after any earlier
        clipping by norm, with the bits of ``torch.nn.utils.clip_grad_value_`` on the whole
        gradient. ``p.grad`` does not change. Later backwards reduce everything again at stages 0
        and 1 of ZeRO, and add to the clipped gradients at stages 2 and 3. If a loss scaler or
        ``check_finite`` would skip the step for an overflow, the step is still skipped.

        Args:
            clip_value: the largest magnitude of an element, after unscaling.
            params: see :meth:`clip_grad_norm_`.

        Raises:
            ArgumentError, MismatchError, UnsupportedError: as :meth:`clip_grad_norm_` with
                ``params``; on a CPU all ranks raise. Nothing was changed.
        """
        clip_value_of(self.sharded_step(), clip_value, params)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients, as torch does.

        With ``set_to_none=False`` gradients stay in the buckets: this call runs one memset per
        bucket, and the next step copies no gradients.
        """
        sharded = self._sharded
        if self.accumulator is not None:
            self.accumulator.clear()
        if self.placement is not None:
            self.placement.lost = None
        if sharded is None:
            if self.placement is not None:
                self.placement.module.forget_gradients(set_to_none)
            super().zero_grad(set_to_none)
            return
        sharded.forget_reduced()
        forget = sharded.gradients.drop if set_to_none else sharded.gradients.zero
        if not torch.autograd._profiler_enabled():
            forget()
            return
        with torch.autograd.profiler.record_function(f"Optimizer.zero_grad#{type(self).__name__}"):
            forget()

    def refresh_master_weights(self) -> None:
        """Sets the FP32 masters to the parameters, after other code has changed the parameters."""
        self._check_values("refresh_master_weights")
        for bucket in self.sharded_step().buckets:
            bucket.refresh_master()

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's shard of the state, in the format of :mod:`ringcomm.optim.state`.

        As in torch, its tensors are not copies. Collective before the first step.
        """
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        saved = state.save(self.sharded_step())
        for post in self._optimizer_state_dict_post_hooks.values():
            saved = post(self, saved) or saved
        return saved

    def load_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Loads results of :meth:`state_dict`; collective: all ranks load, or no rank does.

        Args:
            state_dict: this rank's saved state, if as many ranks saved as load; or a list with the
                states of all ranks that saved, any number of them in any order.

        Raises:
            CheckpointError: the state is damaged, incomplete or of another model; nothing was
                changed.
        """
        self._check_values("load_state_dict")
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict  # type: ignore[arg-type]
        several = isinstance(state_dict, Sequence)
        shards: list[Any] = list(state_dict) if several else [state_dict]
        with normal_tensors():
            state.load(self.sharded_step(), shards)
        for post in self._optimizer_load_state_dict_post_hooks.values():
            post(self)

    @normal_tensors()
    def full_state_dict(self, dst: int | None = None) -> dict[str, Any]:
        """Returns the state in the format of ``state_dict()`` of torch's class; collective.

        The additional entry "master" has the masters of 16-bit parameters, by parameter.

        Args:
            dst: the rank that gets the state; the other ranks get an empty dict. None means all.
        """
        self._check_values("full_state_dict")
        return torch_state.gather_torch(self.sharded_step(), dst)

    @normal_tensors()
    def load_torch_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a result of :meth:`full_state_dict`, or of ``state_dict()`` of torch's class.

        Missing masters are set to the parameters. Collective: all ranks load, or no rank does.

        Raises:
            CheckpointError: the state does not fit the parameters; nothing was changed.
        """
        self._check_values("load_torch_state_dict")
        torch_state.load_torch(self.sharded_step(), state_dict)

    def join_hook(self, **kwargs: Any) -> NoReturn:
        """Refuses ``torch.distributed.algorithms.Join``; see :func:`refuse_join`."""
        refuse_join(**kwargs)

    def __getstate__(self) -> NoReturn:
        raise UnsupportedError(
            f"{type(self).__name__}: cannot be copied or pickled, since its parameters are in this "
            "process's heap; save state_dict()"
        )


def _check_in_backward(
    name: str, placement: Placement | None, rule: UpdateRule, loss_scaler: LossScaler | None
) -> None:
    """Raises ArgumentError unless a backward can update the buckets one by one."""
    if placement is None:
        raise ArgumentError(
            f'{name}: update: "in_backward": expected parameters that zero.shard() has sharded at '
            "stage 2 or 3, got other parameters, whose gradients are reduced by step()"
        )
    if not rule.elementwise:
        raise ArgumentError(
            f'{name}: update: expected "in_step", got "in_backward": the update of an element '
            "depends on others: on elements of its parameter, or on elements of several buckets"
        )
    if loss_scaler is not None:
        raise ArgumentError(
            f'{name}: loss_scaler: expected None with update="in_backward": whether a gradient '
            "overflows is known only once all gradients are reduced, but parameters change earlier"
        )


def refuse_join(**kwargs: Any) -> NoReturn:
    """Raises UnsupportedError when ``torch.distributed.algorithms.Join`` requests its hook.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(
        "Join: a rank that has no batches left must still update its shards, with the clipping, "
        "loss scale and learning rate of other ranks, but torch's Join does not do this; iterate "
        "over ringcomm.zero.uneven(batches, comm=...) instead, which gives such a rank its last "
        "batch again with the weight 0"
    )


def _same_ranks(one: Communicator | None, other: Communicator | None) -> bool:
    """True if two communicators are one object, or each is None or has only this rank."""
    return one is other or all(each is None or each.world_size == 1 for each in (one, other))
