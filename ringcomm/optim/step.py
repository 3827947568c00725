# SPDX-License-Identifier: Apache-2.0
"""The step of a sharded optimizer: one pass over buckets, or two to clip, scale or check first."""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ringcomm.comm.agreement import (
    ModelRanks,
    all_or_none,
    check_agreement,
    check_on_mesh,
    ranks_of,
)
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.host.arguments import ALGORITHMS, ReduceOp
from ringcomm.errors import ArgumentError, RingcommError, UnsupportedError, where
from ringcomm.memory.host_heap import give_back_freed
from ringcomm.optim import backends
from ringcomm.optim.backends import Backend, OwnPlan, StagePlan, StepTable
from ringcomm.optim.buckets import (
    Bucket,
    Buckets,
    OutsideWrites,
    StateOffload,
    count_change,
    heap_device_of,
)
from ringcomm.optim.dtensors import find_mesh, without_torch_function
from ringcomm.optim.gradients import (
    NORM_WORDS,
    AccumulatedGradients,
    Gradients,
    combine,
    found_non_finite,
    leave_to_replica,
    make_error_feedback,
)
from ringcomm.optim.layout import Chunk, ShardLayout, within
from ringcomm.optim.placement import (
    OPERATION,
    Placement,
    all_params,
    check_axis,
    check_even,
    check_masters,
    check_memory,
    check_nodes,
    check_ranks,
    check_segments,
    find_placement,
    move_parameters,
    over_mesh,
    share_params,
    specs_of,
    warn_of_idle_axis,
    with_all_stages,
)
from ringcomm.optim.rules import ParamState, as_json
from ringcomm.optim.setting import Setting
from ringcomm.optim.state_offload import make_offload

# ---- The data of a step: buckets of parameters with their state, the table and the plan ---------

Tensor = torch.Tensor


@dataclass(frozen=True)
class Asked:
    """A rank's request to step or to clip; the ranks compare requests before they reduce.

    Attributes:
        operation: name of the request; ranks compare it, and errors name it.
        told: arguments that must be equal on all ranks, as JSON types; empty for a step.
        refusal: the error for which this rank refuses the request, or None.
    """

    operation: str = "optimizer.step"
    told: Mapping[str, Any] = field(default_factory=dict)
    refusal: Exception | None = None


#: The request of a step, which has no arguments.
STEP = Asked()


class PreparedStep:
    """The buckets, table, backend and plan of one optimizer on one rank.

    Building it is collective, and moves the parameters into the heap.
    """

    #: Name of the operation that builds the step, for errors.
    _operation = OPERATION
    #: While this object is built: the optimizer's previous step, which this object will replace.
    _before: PreparedStep | None = None
    #: The states of the previous step's parameters.
    _states: Sequence[ParamState | None] = ()
    # By bucket, the names of the state tensors that the latest hyper-parameters need.
    _ensured: Sequence[Sequence[str]] = ()

    def __init__(self, groups: Sequence[dict[str, Any]], setting: Setting) -> None:
        placement = find_placement(groups, grows=self._before is not None)
        if placement is not None:
            setting = replace(setting, options=placement.options(setting.options))
        elif setting.options.compression.quantizes_parameters:
            asked = setting.options.compression.parameters
            raise UnsupportedError(
                f"{setting.where('prepare')}: compression: parameters={asked!r}: expected "
                "parameters of a "
                "module that zero.shard() has sharded, which keeps their masters, got others; "
                "pass ZeroOptions(compression=) to shard(module, 1)"
            )
        self.setting = setting
        self._launches = setting.launches
        self._placement = placement
        self.groups = groups
        self.params = all_params(groups)
        options, comm = setting.options, setting.comm
        #: The mesh of DTensor parameters, or None.
        self.mesh = find_mesh(self.params, setting.where("prepare"))
        #: The mesh of all stages and shards, over which norms are taken, or None.
        self.over = over_mesh(setting.others, self.mesh, setting.where("prepare"))
        with with_all_stages(comm, setting.others, self._operation):
            check_axis(comm, self.mesh, self._operation)
        if placement is None:
            self.layout = self._lay_out()
            check_memory(self.params, self.layout)
        else:
            self.layout = placement.layout(self.params, groups)
        check_masters(self.layout, options)
        self.rule = rule = setting.rule
        hyper_shape = (len(groups), rule.hyper_columns)
        self.table = StepTable(
            self.layout, hyper_shape, rule.factors_bytes, setting.device, setting.launches
        )
        self.backend = self._make_backend()
        #: The way in which a step reduces, updates and gathers each bucket.
        self.plan: StagePlan
        self._check_ranks()
        # Making the offload is collective, so the ranks have to compare their options first.
        self.offload: StateOffload = (
            make_offload(setting) if self._before is None else self._before.offload
        )
        #: Index of this rank's chunk of the state, and the number of chunks.
        self.shard_of = setting.shard_of
        if placement is None:
            self.plan = OwnPlan(self.backend)
            self._take_over()
        else:
            self._join(placement)
        with self._offload_agreement():
            rule.bind(self.layout, groups, self.buckets, self.shard_of[1], self._states)
        left_out = [] if placement is None else placement.left_out(groups)
        self.written = OutsideWrites(self.params, self.buckets, options, left_out)

    def _check_ranks(self) -> None:
        """Raises MismatchError unless all ranks build equal optimizers; collective."""
        setting, rule, options = self.setting, self.rule, self.setting.options
        told = {"optimizer": rule.name, **options.describe()}
        compared = {"options": told, "groups": self._compared_groups()}
        check_ranks(self._operation, setting.comm, setting.others, self.mesh, self.layout, compared)
        if setting.others is not None:
            # With these options a step communicates with other pipeline stages.
            asks = options.check_finite, setting.loss_scaler is not None
            told = dict(zip(("check_finite", "loss_scaler"), asks, strict=True))
            check_on_mesh(setting.comm, self.over, self._operation, {"options": told})
            assert self.over is not None
            divided = ModelRanks(None, self.over).exchange(self.mesh is not None)
            if setting.rank == 0:
                warn_of_idle_axis(self.over, divided)

    def _compared_groups(self) -> list[dict[str, Any]]:
        """Returns the hyper-parameters of each group that ranks compare before the first step."""
        return [self.rule.compared(group) for group in self.groups]

    def _make_backend(self) -> Backend:
        """Makes the backend for the options and the device.

        Raises:
            UnsupportedError: Triton's kernels cannot run here, the ring's segments are too small,
                or an option needs equally many ranks on all nodes.
        """
        comm, options = self.setting.comm, self.setting.options
        if comm is not None and comm.world_size > 1:
            check_nodes(comm, "optimizer", options.algorithm, options.kernels)
            if options.state == "node":
                check_even(comm, "optimizer", 'state="node"', 'state="world"')
            if options.compression.error_feedback:
                check_even(comm, "optimizer", "error_feedback=True", "error_feedback=False")
            check_segments(comm, ALGORITHMS[options.algorithm])
        return self.rule.backend(comm, options, self.table)

    def keep_state(self, buckets: Sequence[Bucket]) -> None:
        """Allocates the buckets' state, as zeros; collective if state is offloaded.

        Raises:
            DiskError: on all ranks, if a rank's disk has too little space for the state.
        """
        rule, setting = self.rule, self.setting
        for bucket in buckets:
            bucket.keep_state(setting.options.master, rule.quantized_state, self.offload)
            bucket.ensure(rule.names_in(bucket.layout, self.layout, self.groups))
            if bucket.error_feedback is None:
                bucket.error_feedback = make_error_feedback(
                    setting.comm, setting.options, bucket.layout.elems
                )
            if bucket.error_feedback is not None:
                bucket.error_feedback.scale_by(setting.loss_scale)
        with self._offload_agreement():
            self.offload.reserve()

    def write_masters(self, buckets: Sequence[Bucket], write: Callable[[Bucket], None]) -> None:
        """Writes the buckets' masters for the first time, by calling ``write`` on each bucket.

        This method is collective if state is offloaded.

        Raises:
            DiskError: on all ranks, if a rank's disk fails.
        """
        with self._offload_agreement():
            for bucket in buckets:
                write(bucket)

    def _offload_agreement(self) -> AbstractContextManager[None]:
        """Returns a context that raises one rank's error on all ranks, if state is offloaded."""
        if self.offload.in_memory:
            return nullcontext()
        return all_or_none(self.setting.comm, self._operation, self.mesh)

    def check_growth(self) -> None:
        """Checks that added param groups can be stepped together with the earlier groups.

        Raises:
            ArgumentError: only some parameters belong to the sharded module, or parameters were
                sharded after the optimizer was built.
        """
        if find_placement(self.groups, grows=True) is not self._placement:
            raise ArgumentError(
                f"{self.setting.where('add_param_group')}: expected parameters of no sharded "
                "module, like the optimizer's other parameters; build another optimizer for them"
            )

    def _lay_out(self) -> ShardLayout:
        """Lays the parameters out in the optimizer's own buckets."""
        return ShardLayout.assign(specs_of(self.groups), self.setting.options.bucket_elems)

    def _take_over(self) -> None:
        """Moves the parameters into the optimizer's own buckets."""
        setting, options, comm = self.setting, self.setting.options, self.setting.comm
        self.buckets = Buckets.make(self.layout, *setting.shard_of, options, heap_device_of(comm))
        self.keep_state(self.buckets)
        move_parameters(self.params, self.buckets, comm, options.broadcast_parameters)
        self.write_masters(self.buckets, Bucket.refresh_master)
        self.gradients = self._make_gradients()

    def _make_gradients(self) -> Gradients:
        accumulator = self.setting.accumulator
        if accumulator is None:
            return Gradients(self.params, self.layout, self.buckets)
        return AccumulatedGradients(self.params, self.layout, self.buckets, accumulator)

    def _join(self, placement: Placement) -> None:
        """Uses the buckets of ``placement``, which already have the parameters."""
        setting = self.setting
        placement.bind(self, self._before)
        self.shard_of = placement.shard_of
        self.plan = placement.stage_plan(self.backend)
        self.buckets = self._module_buckets(placement)
        self.gradients = placement.gradients(
            self.params, self.layout, self.buckets, setting.accumulator
        )

    def _module_buckets(self, placement: Placement) -> Buckets:
        """Returns a placement's buckets, after allocating their state."""
        setting = self.setting
        buckets = placement.buckets(self.layout, setting.options)
        self.keep_state(buckets)
        store = placement.store
        with nullcontext() if store is None else store.keeping_faults():
            self.write_masters(buckets, Bucket.take_wide)
        if store is not None:
            self._raise_faults(self._operation)
        give_back_freed()
        sharers = setting.sharers
        if self.masters_decide:
            if sharers and self.shard_of[1] > 1:
                assert setting.comm is not None
                share_params(setting.comm, sharers, buckets)
            placement.module.count_change()
        return buckets

    @property
    def masters_decide(self) -> bool:
        """True if masters determine the parameters, as their high halves or quantized values."""
        options = self.setting.options
        return options.master == "remainder" or options.compression.quantizes_parameters

    @property
    def ranks(self) -> ModelRanks | None:
        """The ranks that train the model together; None if this rank trains alone."""
        return ranks_of(self.setting.comm, self.mesh)

    def _ensure_all(self) -> None:
        buckets = [bucket.layout for bucket in self.buckets]
        names = self.rule.names_by_bucket(buckets, self.layout, self.groups)
        if names != self._ensured:
            self.ensure(names)
            self._ensured = names

    def ensure(self, names: Sequence[Sequence[str]]) -> None:
        """Allocates missing state tensors; ``names`` lists the needed names by bucket."""
        pairs = zip(self.buckets, names, strict=True)
        changed = [bucket.ensure(needed) for bucket, needed in pairs]
        if any(changed):
            self.backend.forget()
            if not self.offload.in_memory:
                self._bind_again()

    def _bind_again(self) -> None:
        """Binds the rule to the buckets again, after offloaded state was divided again."""
        chunks, states = self.shard_of[1], self.states()
        self.rule.bind(self.layout, self.groups, self.buckets, chunks, states)

    def states(self) -> list[ParamState | None]:
        """Returns the state of each parameter, or None for a parameter without state."""
        return self.rule.states(self.layout, self.groups, self.table.step.tolist())

    def _raise_faults(self, operation: str) -> None:
        """Raises on all ranks if a rank's disk has failed; collective."""
        store = None if self._placement is None else self._placement.store
        if self.offload.in_memory and store is None:
            return
        with all_or_none(self.setting.comm, operation, self.mesh):
            self.offload.raise_fault()
            if store is not None:
                store.raise_fault()


_log = logging.getLogger("ringcomm.optim")


@dataclass(frozen=True)
class Amp:
    """The device scalars that torch's GradScaler passes to a step; None without a GradScaler."""

    scale: Tensor | None = None
    found_inf: Tensor | None = None


@dataclass
class FirstPass:
    """The result of a step's first pass, which reduces the gradients and sums their norm.

    Attributes:
        words: int64 [24], the norm words of all buckets and ranks.
        kind: "l2", "l1" or "inf".
        clip: float64, a scalar: the clip coefficient so far.
        mark: the mark of the gradients that were reduced.
        clipped: True if a call has clipped the gradients.
        written: True if code may have written to the reduced gradients. They must then not be
            reduced again while ``mark`` is valid, and ``words`` may describe the earlier values.
        seen: True if the module's watchers have received the gradients.
        overflowed: float64, a scalar: not 0 if the gradient was not finite before it was clipped by
            value; None if no call has checked this.
    """

    words: Tensor
    kind: str
    clip: Tensor
    mark: object
    clipped: bool = False
    written: bool = False
    seen: bool = False
    overflowed: Tensor | None = None


class ShardedStep(PreparedStep):
    """The step of one optimizer on one rank; building it is collective."""

    def __init__(self, groups: Sequence[dict[str, Any]], setting: Setting) -> None:
        super().__init__(groups, setting)
        self.partly_updated = False
        #: With ``update="in_backward"``, True from the updating backward until :meth:`step`.
        self.under_way = False
        self.first_pass: FirstPass | None = None
        self._seen_skipped = 0
        # True if the table has the factors of a step that neither scales nor clips; None once a
        # graph has captured a step, since a replay may change the factors.
        self._is_plain: bool | None = False
        # The last step's flags, one per parameter, and the parameters with a nonzero flag.
        self._stepped: tuple[list[float], list[Tensor]] = ([], [])

    @property
    def two_passes(self) -> bool:
        """True if every step must check the whole gradient before it changes anything."""
        return self.setting.options.check_finite or self.setting.loss_scaler is not None

    def still_reduced(self) -> FirstPass | None:
        """Returns the result of the first pass, or None if the gradients have changed since."""
        reduced = self.first_pass
        if reduced is not None and reduced.mark != self.gradients.mark():
            reduced = self.first_pass = None
        return reduced

    def forget_reduced(self) -> None:
        """Forgets the result of the first pass; called when there are new gradients."""
        self.first_pass = None

    def begin_anew(self) -> None:
        """Forgets earlier steps' results and failures, after the whole state was replaced."""
        self.partly_updated = False
        self.first_pass = None
        if self.masters_decide:
            self.count_change(self.params)
        self.written.accept()
        if not self._launches:
            self._seen_skipped = int(self.table.control[backends.SKIPPED])

    def take_hyper(self) -> None:
        """Reads the groups' hyper-parameters, which schedulers change.

        Raises:
            ArgumentError: a hyper-parameter cannot be used; nothing was changed.
        """
        self.check_hyper()
        if self.rule.hyper_columns:
            rows = [self.rule.row(group) for group in self.groups]
            self.table.write_hyper(rows, [group["lr"] for group in self.groups])
        self._ensure_all()

    def check_hyper(self) -> None:
        """Raises if this rank must refuse a step or clipping; callers tell the other ranks."""
        if self._placement is not None and self._placement.lost is not None:
            raise self._placement.lost
        for index, group in enumerate(self.groups):
            self.rule.check_hyper(group, index, self.setting.device)

    def reduce_now(self, operation: str) -> None:
        """Reduces the gradients for an operation, if they are not reduced yet; collective.

        Afterwards :meth:`StagePlan.reduced` returns the reduced gradients. The next step uses them
        unless gradients change before the step.
        """
        if self.still_reduced() is None:
            self.first_pass = self.reduce("l2", Asked(operation))

    def wrote_gradient(self, index: int) -> None:
        """Records that a parameter's reduced gradient was written to; called on all ranks.

        The parameter takes the next step, and the earlier clip coefficient no longer applies.
        """
        before = self.first_pass
        assert before is not None
        self.table.active[index] = 1.0
        self.gradients.wrote(index)
        self.wrote(replace(before, clip=torch.ones_like(before.clip), clipped=False))

    def wrote(self, first_pass: FirstPass) -> None:
        """Stores a first pass whose reduced gradients were written to, with a new mark."""
        self.first_pass = replace(first_pass, mark=self.gradients.mark(), written=True)

    def step(self, amp: Amp) -> None:
        """Takes one step; if it fails halfway, the optimizer is partly updated.

        Raises:
            ArgumentError, UnsupportedError, MismatchError: nothing was changed.
            RingcommError: a fault; see ``ringcomm.errors``.
        """
        if self.updates_in_backward:
            assert self._placement is not None
            self._placement.end_step()
            return
        self.refuse_if_partly_updated("step")
        self._check_scaled(amp)
        before = self.still_reduced()
        if amp.scale is not None and before is not None and before.clipped:
            raise ArgumentError(
                f"{self.setting.where('step')}: the gradient was clipped while it was still "
                "scaled; call scaler.unscale_(optimizer) before clip_grad_norm_()"
            )
        asked = STEP
        try:
            self.take_hyper()
            self.plan.ready()
        except RingcommError as error:
            if before is not None:
                raise
            # The other ranks receive the refusal when they reduce.
            asked = Asked(refusal=error)
        if before is None:
            first = self.two_passes or self._is_watched
        else:
            first = self.two_passes and before.written
        if first:
            self.first_pass = self.reduce("l2", asked)
        reduced = self.first_pass
        if reduced is None:
            self._collect(asked)
        elif self._placement is not None:
            self._placement.check(asked.operation)
        self.write_control(amp, reduced)
        self.written.take_over()
        self.partly_updated = True
        try:
            update = self.plan.reduce_update if reduced is None else self.plan.update
            self._update_buckets(update)
        finally:
            self.count_step()
        if not self._launches:
            self._raise_faults(asked.operation)
        self._forget_losses_of_skipped()
        self.partly_updated = False
        self.first_pass = None
        if self.setting.accumulator is not None:
            # With an accumulator p.grad is always None, so the step itself begins the new sums.
            self.setting.accumulator.clear()
        if self.setting.loss_scaler is not None:
            self.setting.loss_scaler.update(self.table.control[backends.FOUND_INF])
        self._report()

    def _update_buckets(self, update: Callable[[Bucket], None]) -> None:
        self.plan.begin(self.table)
        self.offload.begin_step(self._find_active)
        for bucket in self.buckets:
            update(bucket)
        self.plan.end()
        self.offload.end_step()

    def _find_active(self) -> list[float] | None:
        """Returns a number per parameter, nonzero if the step changes it; None if unknown."""
        if self._launches:
            return None  # the host would have to wait for the device
        active: list[float] = self.table.active.tolist()
        return [0.0] * len(active) if self.table.control[backends.FOUND_INF] else active

    def count_step(self) -> None:
        """Increments the versions of the parameters that the step has changed.

        On a device the host cannot see which parameters step: all trainable ones get new versions.
        """
        table = self.table
        if self._launches:
            # Save time: otherwise torch calls __torch_function__ of each resharded parameter.
            with without_torch_function():
                stepped = [param for param in self.params if param.requires_grad]
        elif table.control[backends.FOUND_INF]:
            return
        else:
            active = table.active.tolist()
            if active != self._stepped[0]:
                each = zip(self.params, active, strict=True)
                self._stepped = active, [param for param, steps in each if steps]
            stepped = self._stepped[1]
        self.count_change(stepped)
        self.written.expect(stepped)

    def count_change(self, params: Sequence[Tensor]) -> None:
        """Increments the versions of ``params``, whose values have changed."""
        if self._placement is None:
            count_change(params)
        else:
            self._placement.module.count_change(params)

    def _forget_losses_of_skipped(self) -> None:
        """Clears the error-feedback buffers if the step was skipped.

        If a gradient has infinities, its finite elements and errors may be far too large as well.
        """
        buffers = [
            bucket.error_feedback for bucket in self.buckets if bucket.error_feedback is not None
        ]
        if buffers and self.table.control[backends.FOUND_INF]:
            for each in buffers:
                each.forget()

    @property
    def updates_in_backward(self) -> bool:
        """True if backward updates the buckets, and :meth:`step` only ends the step."""
        return self.setting.options.update == "in_backward"

    def refuse_in_backward(self, operation: str) -> None:
        """Raises ArgumentError if backward updates parameters, since gradients are then dropped."""
        if self.updates_in_backward:
            raise ArgumentError(
                f"{self.setting.where(operation)}: backward uses each bucket's gradients as soon "
                'as they are reduced, since the optimizer has update="in_backward"; build it with '
                'update="in_step" for whatever needs all gradients before parameters change'
            )

    def refuse_under_way(self, operation: str) -> None:
        """Raises ArgumentError after a backward has updated parameters and before :meth:`step`."""
        if self.under_way:
            raise ArgumentError(
                f"{self.setting.where(operation)}: a backward has updated parameters already "
                '(update="in_backward"); call optimizer.step() first, which ends the step'
            )

    def refuse_if_partly_updated(self, operation: str) -> None:
        """Raises RingcommError if an earlier step failed halfway, or if a step is under way."""
        self.refuse_under_way(operation)
        if self.partly_updated:
            raise RingcommError(
                f"{self.setting.where(operation)}: an earlier step failed halfway, so parameters "
                "and state may be of different steps. Load a checkpoint of the model and of the "
                "optimizer, into a new optimizer if the communicator is unusable too"
            )

    def _check_scaled(self, amp: Amp) -> None:
        """Raises ArgumentError if the loss must be scaled, but the step has no scaler."""
        expected = self._placement is not None and self._placement.scaled
        if expected and self.setting.loss_scaler is None and amp.found_inf is None:
            raise ArgumentError(
                f"{self.setting.where('step')}: the parameters were sharded with "
                'Precision(scaled=True), as in the preset "fp16-scaled", and their small '
                "gradients are lost unless the loss is scaled; build the optimizer with "
                "loss_scaler=ringcomm.optim.LossScaler(), or step it by a ringcomm.optim.GradScaler"
            )

    def _collect(self, asked: Asked) -> None:
        """Moves gradients into the buckets, and determines which parameters step; collective."""
        if self._placement is not None and asked.refusal is None:
            self._placement.check(asked.operation)
        self.gradients.check()
        options, comm = self.setting.options, self.setting.comm
        active = self.gradients.collect()
        frozen = [] if self._placement is None else self.gradients.frozen()
        late = [index for index in frozen if active[index]]
        if late and asked.refusal is None:
            asked = replace(asked, refusal=self.frozen_late(late[0], asked.operation))
        if options.unused == "zero":
            active = [
                1.0 if spec.trainable and spec.tied_to is None and index not in frozen else 0.0
                for index, spec in enumerate(self.layout.params)
            ]
        if comm is None or options.unused != "skip":
            self._compare(asked, frozen)
            self.table.write_active(active, 0.0)
            return
        self.table.write_active(active, self.digest(asked, frozen))
        comm.all_reduce(self.table.told, ReduceOp.MAX)
        if self.table.hyper_differ:
            self.refuse_differences(comm, asked, frozen)
        if asked.refusal is not None:
            raise asked.refusal

    def frozen_late(self, index: int, operation: str) -> ArgumentError:
        """Returns the error for a parameter that was frozen while it had a gradient."""
        head = where(operation, self.setting.rank, self.setting.world_size)
        return ArgumentError(
            f"{head}: {self.gradients.label(index)}: was frozen after its gradient had come; call "
            "zero_grad() before you freeze a parameter"
        )

    def digest(self, asked: Asked, frozen: list[int]) -> float:
        """Returns the digest that ranks compare; infinity if this rank refuses the step."""
        if not self.table.compares:
            if asked.refusal is not None:
                raise asked.refusal
            return 0.0
        if asked.refusal is not None:
            return math.inf
        digest = self.rule.digest(self.groups)
        if not frozen and not asked.told:
            return digest
        asks = repr((frozen, asked.operation, asked.told))
        return float(int(digest) ^ zlib.crc32(asks.encode()))

    def _compare(self, asked: Asked, frozen: list[int]) -> None:
        """Compares the ranks' requests if no other message carries their digest; collective.

        A step has no arguments, so it is not compared here. On a device nothing is compared, since
        the host would have to wait for the device.
        """
        comm = self.setting.comm
        if comm is not None and asked.told and self.table.compares:
            self.refuse_differences(comm, asked, frozen)
        if asked.refusal is not None:
            raise asked.refusal

    def refuse_differences(self, comm: Communicator, asked: Asked, frozen: list[int]) -> None:
        """Raises a rank's refusal, or MismatchError with the first difference; collective."""
        with all_or_none(comm, asked.operation):
            if asked.refusal is not None:
                raise asked.refusal
        groups, labels = self.groups, [self.gradients.label(index) for index in frozen]
        hyper = [{"lr": as_json(each.get("lr")), **self.rule.compared(each)} for each in groups]
        told = {"call": asked.operation, "frozen parameters": labels, **asked.told}
        check_agreement(comm, asked.operation, {"groups": hyper, "options": told})

    def agree(self, asked: Asked) -> None:
        """Compares the ranks' requests, and determines which parameters step; collective."""
        before = self.still_reduced()
        if before is not None and before.written:
            # The earlier pass and wrote_gradient() have already determined which parameters step.
            self._compare(asked, [])
        else:
            self._collect(asked)

    def reduce(self, kind: str, asked: Asked = STEP) -> FirstPass:
        """Runs the first pass; if gradients were written to, only sums their norm; collective."""
        before = self.still_reduced()
        sums = before is not None and before.written
        self.agree(asked)
        device = self.setting.device
        words = torch.zeros(len(self.buckets), NORM_WORDS, dtype=torch.int64, device=device)
        if not sums:
            for bucket, row in zip(self.buckets, words, strict=True):
                self.plan.reduce_norm(bucket, kind, row)
        seen = self._is_watched and not (before is not None and before.seen)
        if seen:
            self._show_gradients(asked.operation)
        total = (
            self.norm_words(kind, self.own_gradient) if sums or seen else self._total(words, kind)
        )
        if before is None:
            one = torch.ones((), dtype=torch.float64, device=device)
            before = FirstPass(total, kind, one, mark=None)
        written, seen = before.written or seen, before.seen or seen
        mark = self.gradients.mark()
        return replace(before, words=total, kind=kind, mark=mark, written=written, seen=seen)

    def norm_words(self, kind: str, gradient_of: Callable[[Bucket], Tensor | None]) -> Tensor:
        """Returns the norm words of the gradients that ``gradient_of`` returns; collective.

        Args:
            kind: "l2", "l1" or "inf".
            gradient_of: returns a gradient of a bucket, for the same elements as
                :meth:`own_gradient`; or None, on all ranks, to leave the bucket out.

        Returns:
            int64 [24], the sum over all buckets and ranks.
        """
        device = self.setting.device
        words = torch.zeros(len(self.buckets), NORM_WORDS, dtype=torch.int64, device=device)
        for bucket, row in zip(self.buckets, words, strict=True):
            gradient = gradient_of(bucket)
            if gradient is not None:
                self.plan.reducer.norm(gradient, kind, row)
        return self._total(words, kind)

    def _total(self, words: Tensor, kind: str) -> Tensor:
        """Combines the buckets' norm words of all ranks; collective."""
        if self.over is not None:
            for bucket, row in zip(self.buckets, words, strict=True):
                if not self.over.counts(bucket.layout.mesh_dims):
                    leave_to_replica(row)
        total, op = combine(words, kind), ReduceOp.MAX if kind == "inf" else ReduceOp.SUM
        if self.setting.comm is not None:
            self.setting.comm.all_reduce(total, op)
        if self.over is not None:
            self.over.all_reduce(total, op)
        return total

    @property
    def _is_watched(self) -> bool:
        return self._placement is not None and bool(self._placement.module.watchers)

    def _show_gradients(self, operation: str) -> None:
        """Passes this rank's part of each gradient to the module's watchers; collective."""
        placement, active = self._placement, self.table.active.tolist()
        assert placement is not None
        with all_or_none(self.setting.comm, operation, self.mesh):
            for bucket in self.buckets:
                reduced = self.plan.reduced(bucket)
                chunk = bucket.layout.chunk(*self.setting.shard_of)
                for segment in bucket.layout.segments:
                    piece = within(reduced, chunk, segment)
                    if active[segment.param] and piece.numel():
                        begin = max(segment.begin, chunk.begin) - segment.begin
                        name = placement.name_of(self.params[segment.param])
                        for see in list(placement.module.watchers.values()):
                            see(name, piece, begin)

    def own_chunk(self, bucket: Bucket) -> Chunk:
        """Returns the elements of a bucket that this rank sums for the norm."""
        comm = self.setting.comm
        if comm is None or self.setting.options.state != "node":
            return bucket.layout.chunk(*self.setting.shard_of)
        return bucket.layout.chunk_of_copy(comm)

    def own_gradient(self, bucket: Bucket) -> Tensor:
        """Returns the elements of the reduced gradient that this rank sums for the norm."""
        kept, own = bucket.layout.chunk(*self.setting.shard_of), self.own_chunk(bucket)
        return self.plan.reduced(bucket)[own.begin - kept.begin : own.end - kept.begin]

    def inv_scale(self) -> Tensor:
        """Returns the factor by which a step multiplies the reduced gradient, float64."""
        scaler, device = self.setting.loss_scaler, self.setting.device
        divisor = 1 if self._placement is None else self._placement.divisor
        inverse = torch.full((), 1 / divisor, dtype=torch.float64, device=device)
        if scaler is None:
            return inverse
        return inverse / scaler.current.to(device, torch.float64)

    def write_control(self, amp: Amp, reduced: FirstPass | None) -> None:
        """Writes into the table the gradient's factors, and whether the kernels skip the step."""
        scaled = self.setting.loss_scaler is not None or amp.scale is not None
        plain = not scaled and amp.found_inf is None and reduced is None
        if self._launches:
            assert self.setting.comm is not None
            if self.setting.comm.engine.is_capturing():
                self._is_plain = None
        if plain and self._is_plain:
            return
        if self._is_plain is not None:
            self._is_plain = plain
        control = self.table.control
        inverse = self.inv_scale()
        if amp.scale is not None:
            inverse = inverse / amp.scale.to(torch.float64).view(())
        control[backends.INV_SCALE].copy_(inverse)
        control[backends.CLIP].fill_(1.0) if reduced is None else control[backends.CLIP].copy_(
            reduced.clip
        )
        found = control[backends.FOUND_INF]
        found.zero_()
        if amp.found_inf is not None:
            found.copy_(amp.found_inf.view(()))
        if reduced is not None and self.two_passes:
            found.add_(found_non_finite(reduced.words))
            if reduced.overflowed is not None:
                found.add_(reduced.overflowed)

    def _report(self) -> None:
        """Logs on rank 0 that a step was skipped; not on a device, where the host would wait."""
        if self._launches:
            return
        skipped = int(self.table.control[backends.SKIPPED])
        if skipped > self._seen_skipped and self.setting.rank == 0:
            _log.warning(
                "optimizer: step skipped, its gradient is not finite (%d skipped so far)", skipped
            )
        self._seen_skipped = skipped
