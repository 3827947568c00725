# SPDX-License-Identifier: Apache-2.0
"""The updates of buckets while backward runs, with ``AdamWOptions(update="in_backward")``.

NOTE [Updates in backward]
A bucket is updated right after the reduction of its gradients, in the communicator's order of
calls, so that no rank keeps a reduced gradient: at stage 2 reduction, update and gathering are one
pass, and at stage 3 there is one buffer for the gradient of one bucket's chunk. The idea to use a
gradient as soon as it has arrived is from Lv et al., "Full Parameter Fine-tuning for Large Language
Models with Limited Resources" (LOMO), 2023.

Code that still reads the old values is safe. A reduction ends when all ranks have contributed their
gradients. A rank contributes only after all graph nodes that compute gradients of the bucket have
run, and after :meth:`BackwardUpdates.close`. At stage 3 ``close`` ends a running unsharding of
the bucket and refuses further ones until the step, so that the reduction replaces the first of the
step's two barriers; copies that were unsharded before keep the old values. At stage 2 ``close``
advances the parameters' versions, so that an autograd node that has saved a parameter raises, and
makes Python code that computes with a parameter raise; see NOTE [Updated parameters] in
``zero/stages/resharded.py``.

NOTE [What the ranks agree on]
Which parameters take the step becomes known bucket by bucket. So a small all-reduce before each
update sends a flag for each parameter of the bucket, and the digest of the hyper-parameters; an
ordinary step sends these once, for all parameters. A rank that refuses the step, or whose backward
raised, sends infinity as the digest: all ranks see this at the same bucket, update no further
buckets, and raise in ``optimizer.step()``. If earlier buckets were updated, the optimizer is partly
updated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from ringcomm.comm.agreement import all_or_none
from ringcomm.comm.host.arguments import ReduceOp
from ringcomm.errors import ArgumentError, RingcommError, where
from ringcomm.memory import normal_tensors
from ringcomm.optim.backends import STEPS
from ringcomm.optim.buckets import with_local
from ringcomm.optim.dtensors import without_torch_function
from ringcomm.optim.step import Amp, Asked, ShardedStep
from ringcomm.zero.stages.buckets import ParamBucket, ShardedBucket
from ringcomm.zero.stages.resharded import advance_versions, end_update, make_updated
from ringcomm.zero.stages.unshard import Unsharder

Tensor = torch.Tensor

_OPERATION = "optimizer.step"


class BackwardUpdates:
    """The step of one optimizer that a backward takes, bucket by bucket, on one rank.

    All methods are for the thread that runs backward, except :meth:`update`, which runs in the
    communicator's order of calls. While :meth:`update` may be running, only :meth:`close` and
    :meth:`abandon` may be called.

    Args:
        stored: the module's buckets.
        find_owner: returns the optimizer's step, or None if the optimizer is gone.
        check: called when the step begins; raises if parameters are not in their slots or buckets.
        unsharder: unshards parameters at stage 3; None at stage 2.
    """

    def __init__(
        self,
        stored: Sequence[ParamBucket],
        find_owner: Callable[[], ShardedStep | None],
        check: Callable[[str], None],
        unsharder: Unsharder | None = None,
    ) -> None:
        self._stored = stored
        self._find_owner = find_owner
        self._check = check
        self._unsharder = unsharder
        # Set from the first backward of a step to its end, so that the collectives which other
        # ranks wait for can be made even if the optimizer is gone.
        self._step: ShardedStep | None = None
        # Numbers of the buckets whose update this step has begun.
        self._closed: set[int] = set()
        # By bucket, the parameters' indices in the optimizer; None for a parameter in no group.
        self._indices: list[list[int | None]] = []
        self._frozen: list[int] = []
        self._asked = Asked(_OPERATION)
        self._digest = 0.0
        # Per parameter: 1.0 if it is known to take this step; and whether it took the last step.
        self._active: list[float] = []
        self._last_active: list[float] | None = None
        # This rank's failure. _all_failed: some rank failed, and all noticed it at the same bucket.
        self._failure: Exception | None = None
        self._all_failed = False
        self._counted = False

    # ---- the step -------------------------------------------------------------------------------

    @property
    def under_way(self) -> bool:
        """True from the first backward of a step to its end."""
        return self._step is not None

    @property
    def _owner(self) -> ShardedStep:
        owner = self._find_owner() if self._step is None else self._step
        if owner is None:
            raise ArgumentError(
                'zero: the optimizer with update="in_backward" that was built on the sharded '
                "module is gone, so nothing would update the parameters; build another one"
            )
        return owner

    @property
    def changed(self) -> bool:
        """True if a bucket was updated in the step that is under way."""
        return self._step is not None and self._step.partly_updated

    def has_begun(self, number: int) -> bool:
        """Returns whether the step that is under way has begun to update a bucket."""
        return self.under_way and number in self._closed

    def begin(self, operation: str, order: Sequence[int]) -> None:
        """Begins a step, and decides everything that is equal for all buckets.

        Args:
            operation: name of the operation in errors.
            order: the buckets' numbers in the order of the updates.

        Raises:
            ArgumentError: a step is under way, to which another backward would add.
            RingcommError: an earlier step failed halfway.
        """
        if self.changed and self._failure is None:
            self.refuse_another(operation)
        if self.under_way:
            self.reset()
        owner = self._owner
        owner.refuse_if_partly_updated(operation)
        self._asked = Asked(_OPERATION)
        try:
            owner.take_hyper()
            self._check(_OPERATION)
            owner.written.take_over()
        except RingcommError as error:
            self._asked = Asked(_OPERATION, refusal=error)
        with without_torch_function():
            self._frozen = owner.gradients.frozen()
        if self._asked.refusal is None:
            self._digest = owner.digest(self._asked, self._frozen)
        self._find_indices(owner)
        owner.write_control(Amp(), None)
        self._step, owner.under_way = owner, True
        owner.offload.begin_step(lambda: self._last_active, order)

    def _find_indices(self, owner: ShardedStep) -> None:
        """Finds the parameters' indices in the optimizer, which may have new parameters."""
        self._active = [0.0] * len(owner.params)
        if self._last_active is not None and len(self._last_active) != len(owner.params):
            self._last_active = None
        self._indices = []
        for layout, stored in zip(owner.layout.buckets, self._stored, strict=True):
            index_at = {segment.begin: segment.param for segment in layout.segments}
            self._indices.append([index_at.get(entry.begin) for entry in stored.params])

    def refuse_another(self, operation: str) -> None:
        """Raises ArgumentError for gradients that come after a backward has taken the step."""
        comm = self._stored[0].comm
        raise ArgumentError(
            f"{where(operation, comm.rank, comm.world_size)}: gradients come after a backward has "
            'updated parameters with earlier gradients (update="in_backward"). Call '
            "optimizer.step() after each backward, or run all but the last one of a step under "
            "ringcomm.zero.no_sync(module), which adds gradients up; where one backward brings a "
            "parameter's gradient in parts, as reentrant checkpoints of a layer that runs twice "
            'do, build the optimizer with update="in_step"'
        )

    def abandon(self) -> None:
        """Called after this rank's backward raised, before the rank makes missing reductions."""
        if self.under_way and len(self._closed) < len(self._stored):
            comm = self._stored[0].comm
            refusal = RingcommError(
                f"{where('backward', comm.rank, comm.world_size)}: the backward raised before its "
                "end, so its gradients are incomplete and update no more parameters"
            )
            self._asked = Asked(_OPERATION, refusal=self._asked.refusal or refusal)

    def close(self, number: int, brought: Sequence[bool]) -> list[float]:
        """Called before a bucket's gradients are sent to ranks that may update the bucket.

        Args:
            number: number of the bucket.
            brought: by parameter of the bucket, whether this rank has a gradient.

        Returns:
            By parameter, 1.0 if this rank wants it to take the step.

        Raises:
            ArgumentError: a parameter was written to, and the change would be lost; or the bucket
                was updated in this step already.
        """
        if number in self._closed:
            self.refuse_another("backward")
        owner, stored = self._owner, self._stored[number]
        indices = self._indices[number]
        zero = owner.setting.options.unused == "zero"
        wanted = []
        for index, has in zip(indices, brought, strict=True):
            if index is not None and has and index in self._frozen:
                late = owner.frozen_late(index, _OPERATION)
                self._asked = Asked(_OPERATION, refusal=self._asked.refusal or late)
            steps = index is not None and (zero or has) and index not in self._frozen
            wanted.append(float(steps))
        if self._asked.refusal is not None:
            pass  # the refusal keeps all ranks from updating the bucket
        elif isinstance(stored, ShardedBucket):
            assert self._unsharder is not None
            self._unsharder.close_bucket(stored)
        else:
            self._mark(owner, number)
        self._closed.add(number)
        return wanted

    def _mark(self, owner: ShardedStep, number: int) -> None:
        """Makes the parameters that may change raise when they are used."""
        marked = [
            entry
            for entry, index in zip(self._stored[number].params, self._indices[number], strict=True)
            if index is not None and index not in self._frozen
        ]
        params = [entry.param for entry in marked]
        if owner.written.found(params):
            comm = self._stored[number].comm
            raise ArgumentError(
                f"{where('backward', comm.rank, comm.world_size)}: a parameter of the bucket of "
                f"{marked[0].name} was changed in place while backward ran, and its update would "
                'undo the change (update="in_backward"); change parameters between steps'
            )
        make_updated(params, [entry.name for entry in marked])
        with without_torch_function():
            advance_versions(with_local(params)[len(params) :], 1)
            owner.written.expect(params)

    @normal_tensors()
    def update(self, number: int, grads: Tensor, wanted: Sequence[float]) -> None:
        """Reduces a bucket's gradients, and updates it; collective.

        Errors are kept for :meth:`end`, since the other ranks continue.

        Args:
            number: number of the bucket.
            grads: [bucket elements], in the heap.
            wanted: the result of :meth:`close`.
        """
        if self._all_failed:
            return
        asked = self._asked  # read once, since another thread may refuse the step
        try:
            owner = self._owner
            found = self._agree(owner, wanted, asked)
            if any(found):
                self._take(owner, number, grads, found)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        # The agreement before the next bucket reports the failure to the other ranks.
        self._asked = Asked(_OPERATION, refusal=self._failure)

    def _agree(self, owner: ShardedStep, wanted: Sequence[float], asked: Asked) -> list[float]:
        """Returns, for each parameter of a bucket, whether it takes the step; collective.

        Raises:
            RingcommError: some rank refuses the step; raised on all ranks.
        """
        comm = owner.setting.comm
        found = list(wanted)
        if comm is not None:
            digest = self._digest if asked.refusal is None else math.inf
            told = torch.tensor([*wanted, digest, -digest], dtype=torch.float64, device="cpu")
            comm.all_reduce(told, ReduceOp.MAX)
            *found, high, low = told.tolist()
            if high != -low:
                self._all_failed = True
                owner.refuse_differences(comm, asked, self._frozen)
        if asked.refusal is not None:
            self._all_failed = True
            raise asked.refusal
        return found

    def _take(self, owner: ShardedStep, number: int, grads: Tensor, found: Sequence[float]) -> None:
        active = [0.0] * len(self._active)
        for index, steps in zip(self._indices[number], found, strict=True):
            if index is not None and steps:
                active[index] = self._active[index] = 1.0
        owner.partly_updated = True
        self._advance(owner, active)
        owner.offload.update_only(active)
        owner.plan.reduce_update_from(owner.buckets[number], grads)

    def _advance(self, owner: ShardedStep, active: Sequence[float]) -> None:
        """Advances parameters' step numbers, and in the first call the optimizer's step number."""
        table = owner.table
        table.active.copy_(torch.tensor(active, dtype=torch.float64, device="cpu"))
        if self._counted:
            table.control[STEPS].sub_(1)
        self._counted = True
        owner.plan.begin(table)

    def end_backward(self) -> None:
        """Called at the end of a backward, when all its updates have ended."""
        if self._step is not None:
            self._step.offload.end_step()

    # ---- its end --------------------------------------------------------------------------------

    def raise_failure(self) -> None:
        """If all ranks have noticed a failure, ends the step and raises it."""
        failure = self._failure
        if failure is not None and (self._all_failed or self._stored[0].comm.aborted):
            self.reset()
            raise failure

    def left(self, some: Sequence[int]) -> list[int]:
        """Returns the numbers of the buckets that the step still has to update.

        Args:
            some: numbers of the buckets for which at least one rank has gradients.
        """
        if any(number in self._closed for number in some):
            try:
                self.refuse_another("step")
            except ArgumentError as error:
                self._fail(error)
            return []
        if self._owner.setting.options.unused == "zero":
            return [number for number in range(len(self._stored)) if number not in self._closed]
        return list(some)

    def end(self, empty: Sequence[int], brought: Sequence[float]) -> None:
        """Ends the step, after all of its updates; collective.

        Args:
            empty: parameters without elements, which are in no bucket.
            brought: for each of these, 1.0 if this rank has a gradient.

        Raises:
            RingcommError: a bucket could not be updated, on this rank or another.
        """
        owner = self._owner
        try:
            self._end(owner, empty, brought)
        finally:
            self.reset()
        owner.partly_updated = False
        owner.forget_reduced()
        if owner.setting.accumulator is not None:
            owner.setting.accumulator.clear()

    def _end(self, owner: ShardedStep, empty: Sequence[int], brought: Sequence[float]) -> None:
        comm = owner.setting.comm
        owner.offload.end_step()
        with all_or_none(comm, _OPERATION, owner.mesh):
            if self._asked.refusal is not None:
                raise self._asked.refusal
            owner.offload.raise_fault()
        if owner.setting.options.unused == "zero":
            brought = [float(index not in self._frozen) for index in empty]
        found = torch.tensor(brought, dtype=torch.float64, device="cpu")
        if comm is not None and empty:
            comm.all_reduce(found, ReduceOp.MAX)
        active = [0.0] * len(self._active)
        for index, steps in zip(empty, found.tolist(), strict=True):
            active[index] = self._active[index] = steps
        if any(active) or not self._counted:
            self._advance(owner, active)
        owner.plan.end()
        self._last_active = self._active

    def forget(self) -> None:
        """Called when gradients are about to be dropped.

        Raises:
            ArgumentError: the gradients have updated parameters.
        """
        if not self.under_way:
            return
        if self.changed and self._failure is None:
            comm = self._stored[0].comm
            raise ArgumentError(
                f"{where('zero_grad', comm.rank, comm.world_size)}: the gradients of the last "
                'backward have updated parameters already (update="in_backward"), and cannot be '
                "forgotten; call optimizer.step() first"
            )
        self.reset()

    def refuse_under_way(self, operation: str) -> None:
        """Raises ArgumentError while a step is under way; ends a step that has failed.

        The optimizer of a failed step is partly updated, if parameters have changed.
        """
        if self.under_way and self._failure is None and self.changed:
            self._owner.refuse_under_way(operation)
        elif self.under_way:
            self.reset()

    def reset(self) -> None:
        """Ends the step on this rank, whether or not it is complete."""
        self.end_backward()
        if self._step is not None:
            if self._unsharder is not None:
                # At stage 2, close() has advanced the parameters' versions already.
                active = zip(self._step.params, self._active, strict=True)
                self._step.count_change([param for param, steps in active if steps])
            self._step.under_way = False
        self._step, self._failure = None, None
        self._all_failed = self._counted = False
        self._closed.clear()
        if self._unsharder is None:
            end_update([entry.param for stored in self._stored for entry in stored.params])
        else:
            self._unsharder.reopen()
