"""What an optimizer's steps work on: parameters in buckets, with state, table and kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from ringcomm.comm.arguments import ALGORITHMS
from ringcomm.errors import ArgumentError, UnsupportedError
from ringcomm.memory.freed import give_back_freed
from ringcomm.optim.agreement import CommRanks, MeshRanks, all_or_none, check_on_mesh, ranks_of
from ringcomm.optim.buckets import Bucket, BucketDevice, Buckets
from ringcomm.optim.dtensors import find_mesh
from ringcomm.optim.gradients import AccumulatedGradients, Gradients
from ringcomm.optim.kernels import Kernels, PiecedKernels, StepTable
from ringcomm.optim.layout import ShardLayout
from ringcomm.optim.meshes import over_mesh, warn_of_idle_axis, with_all_stages
from ringcomm.optim.outside_writes import OutsideWrites
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
    share_params,
    specs_of,
)
from ringcomm.optim.reduction import make_residual
from ringcomm.optim.rules import ParamState
from ringcomm.optim.setting import Setting
from ringcomm.optim.tiers import PiecedTier, make_tier

Tensor = torch.Tensor


class PreparedStep:
    """The buckets, table and kernels of one optimizer on one rank.

    Building it is collective, and moves the parameters into the heap.
    """

    #: What builds it, named in errors.
    _operation = OPERATION
    #: The step of the same optimizer that this one takes the place of, while it is built.
    _before: PreparedStep | None = None
    #: The states that parameters of that one have.
    _states: Sequence[ParamState | None] = ()

    def __init__(self, groups: Sequence[dict[str, Any]], setting: Setting) -> None:
        placement = find_placement(groups, grows=self._before is not None)
        if placement is not None:
            setting = replace(setting, options=placement.options(setting.options))
        elif setting.options.wire.codes_parameters:
            codes = setting.options.wire.parameters
            raise UnsupportedError(
                f"{setting.where('prepare')}: wire: parameters={codes!r}: expected parameters of a "
                "module that zero.shard() has sharded, which keeps their masters, got plain ones; "
                "pass ZeroOptions(wire=) to shard(module, 1)"
            )
        self.setting = setting
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
        self.kernels = self._make_kernels()
        self._check_ranks()
        # Made once the ranks are known to want the same, since they agree on whether they can.
        self.tier: PiecedTier | None = (
            make_tier(setting) if self._before is None else self._before.tier
        )
        #: Number of the chunk of the state here, and how many there are.
        self.shard_of = setting.shard_of
        if placement is None:
            self._take_over()
        else:
            self._join(placement)
        with self._tier_agreement():
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
            divided = MeshRanks(None, self.over).exchange(self.mesh is not None)
            if setting.rank == 0:
                warn_of_idle_axis(self.over, divided)

    def _compared_groups(self) -> list[dict[str, Any]]:
        """Returns by group the hyper-parameters that ranks compare before the first step."""
        return [self.rule.compared(group) for group in self.groups]

    def _make_kernels(self) -> Kernels:
        """Makes the kernels that options and device ask for.

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
            if options.wire.error_feedback:
                check_even(comm, "optimizer", "error_feedback=True", "error_feedback=False")
            check_segments(comm, ALGORITHMS[options.algorithm])
        made = self.rule.kernels(comm, options, self.table)
        pieces = options.tier is not None or options.wire.codes_parameters
        if not pieces or self.rule.goes_by_parts:
            return made
        return PiecedKernels(made, self.setting.sharers)

    def keep_state(self, buckets: Sequence[Bucket]) -> None:
        """Has buckets keep state, of zeros; with a tier collective.

        Raises:
            DiskError: a rank's disk has no room for it; on all ranks.
        """
        rule, setting = self.rule, self.setting
        for bucket in buckets:
            bucket.keep_state(setting.options.master, rule.eight_bits, self.tier)
            bucket.ensure(rule.names_in(bucket.layout, self.layout, self.groups))
            if bucket.residual is None:
                bucket.residual = make_residual(setting.comm, setting.options, bucket.layout.elems)
            if bucket.residual is not None:
                bucket.residual.scale_by(setting.loss_scale)
        with self._tier_agreement():
            if self.tier is not None:
                self.tier.reserve()

    def write_masters(self, buckets: Sequence[Bucket], write: Callable[[Bucket], None]) -> None:
        """Has masters written for the first time, by a method of buckets; with a tier collective.

        Raises:
            DiskError: a rank's disk fails; on all ranks.
        """
        with self._tier_agreement():
            for bucket in buckets:
                write(bucket)

    def _tier_agreement(self) -> AbstractContextManager[None]:
        """Has all ranks learn of an error inside, where state in a tier is read or written."""
        if self.tier is None:
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
        return ShardLayout.plan(specs_of(self.groups), self.setting.options.bucket_elems)

    def _take_over(self) -> None:
        """Moves the parameters into the optimizer's own buckets."""
        setting, options, comm = self.setting, self.setting.options, self.setting.comm
        self.buckets = Buckets.make(self.layout, *setting.shard_of, options, BucketDevice.of(comm))
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
        self.kernels = placement.kernels(self.kernels)
        self.buckets = self._placed_buckets(placement)
        self.gradients = placement.gradients(
            self.params, self.layout, self.buckets, setting.accumulator
        )

    def _placed_buckets(self, placement: Placement) -> Buckets:
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
            placement.count_change()
        return buckets

    @property
    def masters_decide(self) -> bool:
        """True if writing masters changes the parameters, which are a part or a code of them."""
        options = self.setting.options
        return options.master == "remainder" or options.wire.codes_parameters

    @property
    def ranks(self) -> CommRanks | MeshRanks | None:
        """The ranks that train the model together; None for this one alone."""
        return ranks_of(self.setting.comm, self.mesh)

    def _ensure_all(self) -> None:
        rule = self.rule
        self.ensure([rule.names_in(b.layout, self.layout, self.groups) for b in self.buckets])

    def ensure(self, names: Sequence[Sequence[str]]) -> None:
        """Allocates each bucket's tensors of the state, where there are none of its names yet."""
        pairs = zip(self.buckets, names, strict=True)
        changed = [bucket.ensure(needed) for bucket, needed in pairs]
        if any(changed):
            self.kernels.forget()
            if self.tier is not None:
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
        if self.tier is None and store is None:
            return
        with all_or_none(self.setting.comm, operation, self.mesh):
            for each in (self.tier, store):
                if each is not None:
                    each.raise_fault()
