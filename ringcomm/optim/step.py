"""The step of an optimizer whose parameters lie in buckets, in one pass or two."""

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

# ---- What an optimizer's steps work on: parameters in buckets, with state, table and plan -------

Tensor = torch.Tensor


@dataclass(frozen=True)
class Asked:
    """A rank's request to its step or clipping, which the ranks compare before they reduce.

    Attributes:
        operation: name of the request, compared with ``told`` and used in errors.
        told: arguments that must be equal on all ranks, as JSON types; empty for a step.
        refusal: why this rank cannot do it, or None.
    """

    operation: str = "optimizer.step"
    told: Mapping[str, Any] = field(default_factory=dict)
    refusal: Exception | None = None


#: A step without arguments.
STEP = Asked()


class PreparedStep:
    """The buckets, table, backend and plan of one optimizer on one rank.

    Building it is collective, and moves the parameters into the heap.
    """

    #: What builds it, named in errors.
    _operation = OPERATION
    #: The step of the same optimizer that this one takes the place of, while it is built.
    _before: PreparedStep | None = None
    #: The states that parameters of that one have.
    _states: Sequence[ParamState | None] = ()
    # The names of the state's tensors by bucket that the hyper-parameters asked for last.
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
        #: The mesh of all stages and parts, over which norms are taken, or None.
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
        #: How a step goes over the buckets.
        self.plan: StagePlan
        self._check_ranks()
        # Made once the ranks are known to want the same, since they agree on whether they can.
        self.offload: StateOffload = (
            make_offload(setting) if self._before is None else self._before.offload
        )
        #: Number of the chunk of the state here, and how many there are.
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
        """Raises MismatchError unless the ranks build the same; collective."""
        setting, rule, options = self.setting, self.rule, self.setting.options
        told = {"optimizer": rule.name, **options.describe()}
        compared = {"options": told, "groups": self._compared_groups()}
        check_ranks(self._operation, setting.comm, setting.others, self.mesh, self.layout, compared)
        if setting.others is not None:
            # What decides whether a step asks the other stages.
            asks = options.check_finite, setting.loss_scaler is not None
            told = dict(zip(("check_finite", "loss_scaler"), asks, strict=True))
            check_on_mesh(setting.comm, self.over, self._operation, {"options": told})
            assert self.over is not None
            divided = ModelRanks(None, self.over).exchange(self.mesh is not None)
            if setting.rank == 0:
                warn_of_idle_axis(self.over, divided)

    def _compared_groups(self) -> list[dict[str, Any]]:
        """Returns by group the hyper-parameters that ranks compare before the first step."""
        return [self.rule.compared(group) for group in self.groups]

    def _make_backend(self) -> Backend:
        """Makes the backend that options and device ask for.

        Raises:
            UnsupportedError: Triton's kernels cannot run here, or the ring's segments are too
                small; or each node shall have a copy of the state, and they have different numbers
                of ranks.
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
        """Has buckets keep state, of zeros; collective where state is offloaded.

        Raises:
            DiskError: a rank's disk has no room for it; on all ranks.
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
        """Has masters written for the first time, by a method of buckets.

        It is collective where state is offloaded.

        Raises:
            DiskError: a rank's disk fails; on all ranks.
        """
        with self._offload_agreement():
            for bucket in buckets:
                write(bucket)

    def _offload_agreement(self) -> AbstractContextManager[None]:
        """Has all ranks learn of an error inside, where offloaded state is read or written."""
        if self.offload.in_memory:
            return nullcontext()
        return all_or_none(self.setting.comm, self._operation, self.mesh)

    def check_growth(self) -> None:
        """Checks that the groups, of which some were added since, can be stepped together.

        Raises:
            ArgumentError: a parameter of another module, or of none, beside those of a sharded one;
                or one that was sharded since.
        """
        if find_placement(self.groups, grows=True) is not self._placement:
            raise ArgumentError(
                f"{self.setting.where('add_param_group')}: expected parameters of no sharded "
                "module, as the optimizer's others are; build another optimizer for these"
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
        """Takes the buckets in which a placement has put the parameters."""
        setting = self.setting
        placement.bind(self, self._before)
        self.shard_of = placement.shard_of
        self.plan = placement.stage_plan(self.backend)
        self.buckets = self._module_buckets(placement)
        self.gradients = placement.gradients(
            self.params, self.layout, self.buckets, setting.accumulator
        )

    def _module_buckets(self, placement: Placement) -> Buckets:
        """Returns the buckets of a placement, with state."""
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
        """True if writing masters changes the parameters, which are a part of them or quantized."""
        options = self.setting.options
        return options.master == "remainder" or options.compression.quantizes_parameters

    @property
    def ranks(self) -> ModelRanks | None:
        """The ranks that train the model together; None for this one alone."""
        return ranks_of(self.setting.comm, self.mesh)

    def _ensure_all(self) -> None:
        buckets = [bucket.layout for bucket in self.buckets]
        names = self.rule.names_by_bucket(buckets, self.layout, self.groups)
        if names != self._ensured:
            self.ensure(names)
            self._ensured = names

    def ensure(self, names: Sequence[Sequence[str]]) -> None:
        """Allocates each bucket's tensors of the state, where there are none of its names yet."""
        pairs = zip(self.buckets, names, strict=True)
        changed = [bucket.ensure(needed) for bucket, needed in pairs]
        if any(changed):
            self.backend.forget()
            if not self.offload.in_memory:
                self._bind_again()

    def _bind_again(self) -> None:
        """Has the rule take up pieces of the state that were laid out anew."""
        chunks, states = self.shard_of[1], self.states()
        self.rule.bind(self.layout, self.groups, self.buckets, chunks, states)

    def states(self) -> list[ParamState | None]:
        """Returns by parameter the state that it has, or None."""
        return self.rule.states(self.layout, self.groups, self.table.step.tolist())

    def _raise_faults(self, operation: str) -> None:
        """Raises the error of a rank's disk on all ranks, if there was any; collective."""
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
    """The scalars on the device that torch's GradScaler hands over, or None."""

    scale: Tensor | None = None
    found_inf: Tensor | None = None


@dataclass
class FirstPass:
    """The result of the first of two passes.

    Attributes:
        words: int64 [24], the norm words of all buckets and ranks.
        kind: "l2", "l1" or "inf".
        clip: float64, a scalar: the clip coefficient so far.
        mark: the mark of the gradients that were reduced.
        clipped: True if ``clip`` was asked for.
        written: True if the reduced gradients may have been written to, so that they must not be
            reduced again while the mark holds, and ``words`` may be of what was there before.
        seen: True if those who watch gradients have seen them.
        overflowed: float64, a scalar: not 0 if the gradient was not finite before it was clipped by
            value; None where that was not asked.
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
        #: With ``update="in_backward"``, True from the backward that takes the step to its end.
        self.under_way = False
        self.first_pass: FirstPass | None = None
        self._seen_skipped = 0
        # Whether the table's factors are those of a step that neither scales nor clips; None once a
        # step was captured, since a replay may have changed them.
        self._is_plain: bool | None = False
        # Which parameters the last step has changed, by the flags that said so.
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
        """Forgets the result of :meth:`clip`, since the gradients are new."""
        self.first_pass = None

    def begin_anew(self) -> None:
        """Clears the marks of earlier steps, after the whole state was replaced."""
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
        """Raises what this rank has against a step or clipping, which the others then learn."""
        if self._placement is not None and self._placement.lost is not None:
            raise self._placement.lost
        for index, group in enumerate(self.groups):
            self.rule.check_hyper(group, index, self.setting.device)

    def reduce_now(self, operation: str) -> None:
        """Reduces the gradients for an operation, if they are not reduced yet; collective.

        The plan has them afterwards (:meth:`StagePlan.reduced`), and the step takes them from
        there, unless gradients change meanwhile.
        """
        if self.still_reduced() is None:
            self.first_pass = self.reduce("l2", Asked(operation))

    def wrote_gradient(self, index: int) -> None:
        """Called after a parameter's reduced gradient was written to, on all ranks.

        The parameter takes the next step, and what was clipped is not any more.
        """
        before = self.first_pass
        assert before is not None
        self.table.active[index] = 1.0
        self.gradients.wrote(index)
        self.wrote(replace(before, clip=torch.ones_like(before.clip), clipped=False))

    def wrote(self, first_pass: FirstPass) -> None:
        """Keeps the result of a first pass whose reduced gradients were written to."""
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
            # The others learn it as they reduce.
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
            # p.grad is always None here, so only the step can tell that a new sum begins.
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
        """Returns by parameter a number, not 0 where the step changes it; None if unknown."""
        if self._launches:
            return None  # the host would have to wait for it
        active: list[float] = self.table.active.tolist()
        return [0.0] * len(active) if self.table.control[backends.FOUND_INF] else active

    def count_step(self) -> None:
        """Counts the step in the versions of the parameters that it has changed.

        A device decides which parameters step without the host, so all trainable ones count there.
        """
        table = self.table
        if self._launches:
            # Resharded parameters would be asked one by one in Python.
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
        """Counts a change of values in the versions of some of the optimizer's parameters."""
        if self._placement is None:
            count_change(params)
        else:
            self._placement.module.count_change(params)

    def _forget_losses_of_skipped(self) -> None:
        """Drops what quantization has lost of gradients that no parameter has seen.

        Beside an infinity there may be finite numbers that are as useless, and as large.
        """
        buffers = [
            bucket.error_feedback for bucket in self.buckets if bucket.error_feedback is not None
        ]
        if buffers and self.table.control[backends.FOUND_INF]:
            for each in buffers:
                each.forget()

    @property
    def updates_in_backward(self) -> bool:
        """True if backward updates the buckets, and :meth:`step` ends that."""
        return self.setting.options.update == "in_backward"

    def refuse_in_backward(self, operation: str) -> None:
        """Raises ArgumentError where gradients are gone before an operation could see them."""
        if self.updates_in_backward:
            raise ArgumentError(
                f"{self.setting.where(operation)}: backward uses each bucket's gradients as soon "
                'as they are reduced, since the optimizer has update="in_backward"; build it with '
                'update="in_step" for whatever needs all gradients before parameters change'
            )

    def refuse_under_way(self, operation: str) -> None:
        """Raises ArgumentError between a backward that takes the step and :meth:`step`."""
        if self.under_way:
            raise ArgumentError(
                f"{self.setting.where(operation)}: a backward has updated parameters already "
                '(update="in_backward"); call optimizer.step() first, which ends that'
            )

    def refuse_if_partly_updated(self, operation: str) -> None:
        """Raises RingcommError if an earlier step failed halfway, or one is under way."""
        self.refuse_under_way(operation)
        if self.partly_updated:
            raise RingcommError(
                f"{self.setting.where(operation)}: an earlier step failed halfway, so parameters "
                "and state may be of different steps. Load a checkpoint of the model and of the "
                "optimizer, into a new optimizer if the communicator is unusable too"
            )

    def _check_scaled(self, amp: Amp) -> None:
        """Raises ArgumentError if gradients that must be scaled cannot be."""
        expected = self._placement is not None and self._placement.scaled
        if expected and self.setting.loss_scaler is None and amp.found_inf is None:
            raise ArgumentError(
                f"{self.setting.where('step')}: the parameters were sharded with "
                'Precision(scaled=True), as the preset "fp16-scaled" has it, and their small '
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
        """Returns what is raised for a parameter that was frozen while it had a gradient."""
        head = where(operation, self.setting.rank, self.setting.world_size)
        return ArgumentError(
            f"{head}: {self.gradients.label(index)}: was frozen "
            "after its gradient had come; call zero_grad() in between"
        )

    def digest(self, asked: Asked, frozen: list[int]) -> float:
        """Returns the digest of what this rank compares; infinity if it refuses the step."""
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
        """Compares what was asked for where no other message carries its digest; collective.

        A mere step compares nothing there, nor does a device, for which the host would have to
        wait.
        """
        comm = self.setting.comm
        if comm is not None and asked.told and self.table.compares:
            self.refuse_differences(comm, asked, frozen)
        if asked.refusal is not None:
            raise asked.refusal

    def refuse_differences(self, comm: Communicator, asked: Asked, frozen: list[int]) -> None:
        """Raises a rank's refusal, or MismatchError that names what differs first; collective."""
        with all_or_none(comm, asked.operation):
            if asked.refusal is not None:
                raise asked.refusal
        groups, labels = self.groups, [self.gradients.label(index) for index in frozen]
        hyper = [{"lr": as_json(each.get("lr")), **self.rule.compared(each)} for each in groups]
        told = {"call": asked.operation, "frozen parameters": labels, **asked.told}
        check_agreement(comm, asked.operation, {"groups": hyper, "options": told})

    def agree(self, asked: Asked) -> None:
        """Compares what the ranks ask for, and determines which parameters step; collective."""
        before = self.still_reduced()
        if before is not None and before.written:
            # They are determined, and parameters whose gradient was set are among them.
            self._compare(asked, [])
        else:
            self._collect(asked)

    def reduce(self, kind: str, asked: Asked = STEP) -> FirstPass:
        """Runs the first of two passes, or sums gradients that were written since; collective."""
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
        """Sums the norm words of what a function gives of each bucket; collective.

        Args:
            kind: "l2", "l1" or "inf".
            gradient_of: returns the part that this rank sums, with :meth:`own_gradient`'s blocks;
                on all ranks None for a bucket of which nothing counts.

        Returns:
            int64 [24], of all buckets and ranks.
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
        """Shows all gradients that there are to those who watch them; collective."""
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
        """Returns the part of a bucket that this rank sums for the norm."""
        comm = self.setting.comm
        if comm is None or self.setting.options.state != "node":
            return bucket.layout.chunk(*self.setting.shard_of)
        return bucket.layout.chunk_of_copy(comm)

    def own_gradient(self, bucket: Bucket) -> Tensor:
        """Returns the part of the reduced gradient that this rank sums for the norm."""
        kept, own = bucket.layout.chunk(*self.setting.shard_of), self.own_chunk(bucket)
        return self.plan.reduced(bucket)[own.begin - kept.begin : own.end - kept.begin]

    def inv_scale(self) -> Tensor:
        """Returns the factor of the reduced gradient that a step takes, float64."""
        scaler, device = self.setting.loss_scaler, self.setting.device
        divisor = 1 if self._placement is None else self._placement.divisor
        inverse = torch.full((), 1 / divisor, dtype=torch.float64, device=device)
        if scaler is None:
            return inverse
        return inverse / scaler.current.to(device, torch.float64)

    def write_control(self, amp: Amp, reduced: FirstPass | None) -> None:
        """Writes the factors of the gradient, and whether the kernels skip the step."""
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
        """Logs on rank 0 that a step was skipped; on the host, where reading that costs nothing."""
        if self._launches:
            return
        skipped = int(self.table.control[backends.SKIPPED])
        if skipped > self._seen_skipped and self.setting.rank == 0:
            _log.warning(
                "optimizer: step skipped, its gradient is not finite (%d skipped so far)", skipped
            )
        self._seen_skipped = skipped
