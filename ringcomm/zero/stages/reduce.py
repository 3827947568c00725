"""Reduction of gradient buckets at stages 2 and 3, while backward fills the next bucket.

NOTE [What is left over]
A gradient stays in ``p.grad`` if no backward has reduced it: it came under ``no_sync``, or after
its bucket had gone (a reentrant checkpoint runs backwards inside backwards). The next backward
reduces such gradients too, or at the latest the step. Where there may be any, which is so on all
ranks or on none, the ranks agree on the buckets that have some.

NOTE [Sums in FP32]
With ``accumulate_dtype`` such a gradient does not stay in ``p.grad``: the optimizer's accumulator
adds it to a sum in FP32, which ends in the bucket's buffer. Buffers are FP32 then, so that neither
the sum nor what this backward adds to it is rounded before it is reduced.

NOTE [Kept for the step]
On a host, the last buckets of a backward cannot be reduced behind computation, since none is left.
So stage 2 leaves as many of them unreduced as there are buffers, and the step reduces, updates and
gathers them in one pass, which moves less memory than reducing them first. Whatever needs them
reduced (another backward that adds to them, a norm, a look at the gradients) reduces them first.
The bits are the same.

NOTE [Gradients cleared one by one]
``p.grad = None``, and so ``zero_grad()`` of a container or of a part, clears the gradient of one
parameter on this rank. It must not change which collectives follow, since another rank may have no
gradient of that parameter and clear nothing. So a cleared parameter's part of the shard, and of a
bucket kept for the step, is filled with zeros before its next use, and the bucket still holds a
gradient.
"""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from ringcomm import _native
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.host.engine import Work
from ringcomm.comm.nodes.wires import Residual
from ringcomm.errors import ArgumentError, where
from ringcomm.memory import empty
from ringcomm.optim.buckets import empty_for_streams
from ringcomm.optim.dtensors import grad_of, local_gradient, other_shape, plainly, set_grad
from ringcomm.optim.gradients import NORM_WORDS, Accumulator, Into, make_reducer, make_residual
from ringcomm.zero.stages.buckets import ParamBucket
from ringcomm.zero.stages.options import ZeroOptions
from ringcomm.zero.stages.order import BucketOrder, StepProfile, any_of
from ringcomm.zero.stages.updates import BackwardUpdates

Tensor = torch.Tensor


@dataclass(eq=False)
class GradientBucket:
    """One bucket's gradients, from the parameters to this rank's shard.

    Attributes:
        stored: the bucket of the parameters.
        shard: [state chunk elements], float32 or 16 bits; the sum since :meth:`Reduction.drop`.
        words: int64 [24], the norm words of the last reduction.
        residual: what the codes of gradients have lost; None where nothing keeps that.
        holds: True if anything was reduced into the shard.
        active: by parameter, True if a gradient was reduced since :meth:`Reduction.drop`.
        missing: indices of parameters whose gradient this backward has not brought yet.
        taken: indices of parameters whose gradient is in ``buffer``.
        cleared: indices of parameters whose gradient is to be filled with zeros; see NOTE
            [Gradients cleared one by one].
        zeroed: indices of parameters whose gradient was set to zero since a step used it.
        brought: with ``update="in_backward"``, ``active`` as it was when the bucket was updated.
        buffer: [elements], in the heap, while the bucket is filled.
        accumulator: see NOTE [Sums in FP32]; None without ``accumulate_dtype``.
        gone: True if this backward has had the bucket's turn.
        summed: True if the last reduction computed ``words``.
        version: version of ``shard`` after the last reduction.
    """

    stored: ParamBucket
    shard: Tensor
    words: Tensor
    residual: Residual | None
    holds: bool = False
    active: list[bool] = field(init=False)
    missing: set[int] = field(default_factory=set)
    taken: set[int] = field(default_factory=set)
    cleared: set[int] = field(default_factory=set)
    zeroed: set[int] = field(default_factory=set)
    brought: list[bool] = field(default_factory=list)
    buffer: Tensor | None = None
    accumulator: weakref.ref[Accumulator] | None = None
    gone: bool = False
    summed: bool = False
    version: int = -1

    def __post_init__(self) -> None:
        self.active = [False] * len(self.stored.params)

    def take(self, index: int) -> None:
        """Moves a parameter's gradient, if it has one, into the buffer."""
        placed, buffer = self.stored.params[index], self.buffer
        if buffer is None:
            return
        sums = self._sums
        if sums is not None and sums.has(placed.param):
            self._move(index, sums.take(placed.param))
        with plainly():
            if grad_of(placed.param) is not None:
                self._move(index, local_gradient(placed.param, f"parameter {placed.name}"))
                set_grad(placed.param, None)

    def _move(self, index: int, grad: Tensor) -> None:
        assert self.buffer is not None
        view = self.stored.params[index].view(self.buffer)
        try:
            if index in self.taken:
                view.add_(grad)
            else:
                view.copy_(grad)
                self.taken.add(index)
        except RuntimeError as error:
            if grad.shape == view.shape:
                raise
            called = f"parameter {self.stored.params[index].name}"
            raise other_shape(called, view, grad) from error

    @property
    def _sums(self) -> Accumulator | None:
        return None if self.accumulator is None else self.accumulator()

    def fill_up(self, buffer: Tensor) -> None:
        """Makes ``buffer`` the bucket's, holding all its gradients and zeros elsewhere."""
        self.buffer = buffer
        with plainly():
            for index, placed in enumerate(self.stored.params):
                self.take(index)
                if index not in self.taken:
                    placed.view(buffer).zero_()

    @property
    def has_more(self) -> bool:
        """True if the bucket has gradients that were not reduced."""
        sums = self._sums
        if sums is not None and any(sums.has(placed.param) for placed in self.stored.params):
            return True
        with plainly():
            return bool(self.taken) or any(grad_of(p.param) is not None for p in self.stored.params)

    @property
    def is_active(self) -> bool:
        """True if a gradient was reduced that is neither cleared nor zero."""
        return any(on and index not in self.zeroed for index, on in enumerate(self.active))

    def piece(self, index: int) -> Tensor:
        """Returns the part of the shard that is of one parameter."""
        placed, chunk = self.stored.params[index], self.stored.state_chunk
        begin, end = max(placed.begin, chunk.begin), min(placed.end, chunk.end)
        return self.shard[begin - chunk.begin : max(begin, end) - chunk.begin]

    def clear(self, index: int) -> None:
        """Forgets the gradient of one parameter; see NOTE [Gradients cleared one by one]."""
        sums, param = self._sums, self.stored.params[index].param
        self.active[index] = False
        self.taken.discard(index)
        self.cleared.add(index)
        if sums is not None and sums.has(param):
            sums.take(param)

    def unreduced(self, index: int) -> Iterator[Tensor]:
        """Yields what this rank has of a parameter's gradient besides ``p.grad`` and the shard."""
        sums, placed = self._sums, self.stored.params[index]
        if sums is not None and sums.has(placed.param):
            yield sums.sum_of(placed.param)
        if index in self.taken and self.buffer is not None:
            yield placed.view(self.buffer)

    def drop(self) -> None:
        """Forgets gradients that were not reduced."""
        self.taken.clear()
        self.cleared.clear()
        sums = self._sums
        with plainly():
            for placed in self.stored.params:
                set_grad(placed.param, None)
                if sums is not None and sums.has(placed.param):
                    sums.take(placed.param)


class Buffers:
    """The reused heap buffers of buckets that are being filled or reduced.

    Args:
        stored: all buckets; a buffer is as large as the largest of its dtype.
        count: number of buffers that there should be of each dtype.
        device: device of the heap.
        dtype: of all buffers; None for that of the bucket's parameters.
    """

    def __init__(
        self,
        stored: Sequence[ParamBucket],
        count: int,
        device: torch.device,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._count = count
        self._device = device
        self._dtype = dtype
        self._most_elems: dict[torch.dtype, int] = {}
        for layout in (each.layout for each in stored):
            kind = dtype or layout.dtype
            self._most_elems[kind] = max(self._most_elems.get(kind, 0), layout.elems)
        self._made = dict.fromkeys(self._most_elems, 0)
        self._free: dict[torch.dtype, list[Tensor]] = {dtype: [] for dtype in self._most_elems}

    def get(self, stored: ParamBucket, must: bool) -> Tensor | None:
        """Returns a buffer [bucket elements], zero in the padding; None if all are in use.

        Args:
            stored: the bucket that the buffer is for.
            must: make one more if all are in use.
        """
        dtype, elems = self._dtype or stored.layout.dtype, stored.layout.elems
        free = self._free[dtype]
        if not free and self._made[dtype] >= self._count and not must:
            return None
        if free:
            whole = free.pop()
        else:
            self._made[dtype] += 1
            whole = empty(self._most_elems[dtype], dtype=dtype, device=self._device)
        # The padding is reduced, too, and nothing else writes it.
        end = 0
        for placed in stored.params:
            if end < placed.begin:
                whole[end : placed.begin].zero_()
            end = placed.end
        whole[end:elems].zero_()
        return whole[:elems]

    def give(self, buffer: Tensor) -> None:
        """Takes a buffer back."""
        whole = buffer.as_strided((self._most_elems[buffer.dtype],), (1,), 0)
        self._free[buffer.dtype].append(whole)


class Reduction:
    """The gradients of all buckets of one rank, and their reductions.

    Attributes:
        buckets: the buckets, by number.
        reducer: the kernels that reduce them.
        updates: what updates a bucket as soon as it is reduced; None where the step does.
        has_left_over: see NOTE [What is left over].
        kept: unreduced gradients by bucket number; see NOTE [Kept for the step].
        generation: count of changes of the gradients, by which results computed from the shards
            are known to be stale.
    """

    def __init__(
        self,
        stored: Sequence[ParamBucket],
        comm: Communicator,
        options: ZeroOptions,
        profile: StepProfile,
        number: int,
        keeps: bool = False,
    ) -> None:
        self._comm = comm
        self._number = number
        self._backwards = 0
        self._options = options
        self._profile = profile
        step_bytes = sum(each.layout.elems * each.layout.dtype.itemsize for each in stored)
        self.reducer = make_reducer(comm, options, step_bytes)
        self.updates: BackwardUpdates | None = None
        reduced = options.precision.reduced_dtype
        self.buckets = [
            GradientBucket(
                each,
                empty_for_streams(each.state_chunk.elems, reduced(each.layout.dtype), comm.device),
                torch.zeros(NORM_WORDS, dtype=torch.int64, device=comm.device),
                make_residual(comm, options, each.layout.elems),
            )
            for each in stored
        ]
        self._buffers = Buffers(stored, options.in_flight, comm.heap_device)
        self._order = BucketOrder(len(self.buckets))
        self.has_left_over = False
        # Whether a step has used the current gradients, a backward has then added to them, and the
        # user was warned of that.
        self._used, self._added_to, self._warned = False, False, False
        self.kept: dict[int, Tensor] = {}
        self._keeps = self._kept_at_most = options.in_flight if keeps else 0
        # Whether a norm was asked for since the gradients were last dropped, and in the period
        # before that. A program that clips does so at each step, and others need not pay for sums
        # of squares.
        self._asked, self._sums = False, False
        self._flying: deque[tuple[GradientBucket, Tensor, Work | None]] = deque()
        self.generation = 0
        self.begin()

    def update_by(self, updates: BackwardUpdates | None) -> None:
        """Has buckets updated as they are reduced, without a shard of the gradient, or in the step.

        Raises:
            ArgumentError: there are gradients already.
        """
        if updates is None and self.updates is None:
            return
        if self.kept or any(bucket.holds for bucket in self.buckets):
            raise ArgumentError(
                f"{where('optimizer', self._comm.rank, self._comm.world_size)}: update: a backward "
                "has begun to reduce gradients for a step; build the optimizer before the first "
                "backward, or call zero_grad() of the module"
            )
        self.wait()
        self.updates = updates
        self._keeps = 0 if updates is not None else self._kept_at_most
        for bucket in self.buckets:
            elems = 0 if updates is not None else bucket.stored.state_chunk.elems
            if bucket.shard.numel() != elems:
                bucket.shard = empty_for_streams(elems, bucket.shard.dtype, self._comm.device)

    def accumulate(self, accumulator: Accumulator) -> None:
        """Adds up in FP32 what stays unreduced from now on; see NOTE [Sums in FP32].

        Raises:
            ArgumentError: there are gradients already, in buffers of another dtype.
        """
        if self.kept or any(bucket.holds for bucket in self.buckets):
            raise ArgumentError(
                f"{where('optimizer', self._comm.rank, self._comm.world_size)}: accumulate_dtype: "
                "a backward has begun to reduce gradients in their own dtype; build the optimizer "
                "before the first backward, or call zero_grad() of the module"
            )
        self.wait()
        place = self._comm.heap_device
        stored = [bucket.stored for bucket in self.buckets]
        self._buffers = Buffers(stored, self._options.in_flight, place, torch.float32)
        for bucket in self.buckets:
            bucket.accumulator = weakref.ref(accumulator)

    def begin_backward(self) -> None:
        """Begins a backward, which also reduces the gradients that earlier ones have left."""
        if self.updates is not None:
            self.updates.begin("backward", self._order.numbers)
        self.has_left_over = False
        if self._used:
            self._used = self._added_to = any(bucket.is_active for bucket in self.buckets)
        self.settle()
        self._backwards += 1
        self.begin()

    def used(self) -> None:
        """Called after a step; warns if an earlier step has used some of its gradients."""
        if self._added_to and not self._warned:
            self._warned = True
            warnings.warn(
                "zero: this step's gradients are added to those that an earlier step has used. "
                "Call zero_grad() of the optimizer, or of the sharded module, after each step",
                stacklevel=2,
            )
        self._used, self._added_to = True, False
        for bucket in self.buckets:
            bucket.zeroed.clear()

    def begin(self) -> None:
        """Marks all buckets as not reduced in this backward."""
        with plainly():
            for bucket in self.buckets:
                # Parameters may have been frozen since shard(), and bring no gradients then.
                params = enumerate(bucket.stored.params)
                bucket.missing = {n for n, placed in params if placed.param.requires_grad}
                bucket.gone = False
        self._order.begin()

    # ---- during backward ------------------------------------------------------------------------

    def arrived(self, number: int, index: int) -> bool:
        """Takes the gradient that this backward has put into ``p.grad`` of a bucket's parameter.

        Returns:
            Whether the bucket is full now, and may have its turn.
        """
        bucket = self.buckets[number]
        if bucket.gone and self.updates is not None:
            self.updates.refuse_another("backward")
        if bucket.gone:
            self.has_left_over = True
            return False
        bucket.missing.discard(index)
        # Buckets further behind would take buffers from those whose turn comes first.
        if bucket.buffer is None and self._order.is_soon(number, self._options.in_flight):
            # A gradient that moves now is still in the cache, and frees its memory for the next.
            # A device's events are not queried: that is an error while a graph is captured.
            if not self._comm.launches:
                self._land_ended()
            bucket.buffer = self._buffers.get(bucket.stored, must=False)
        bucket.take(index)
        if bucket.missing:
            return False
        self._order.filled(number)
        return True

    def advance(self) -> bool:
        """Reduces the full buckets whose turn it is; returns whether all buckets have gone."""
        while (number := self._order.turn) is not None:
            bucket = self.buckets[number]
            if bucket.missing:
                return False
            bucket.gone = True
            buffer = self._filled_buffer(bucket)
            if self._order.left <= self._keeps and not bucket.holds:
                self.kept[number] = buffer
            else:
                self._launch(number, buffer)
            self._order.advance()
        return True

    def reduce_rest(self) -> None:
        """Reduces the buckets that have not had their turn, in order; collective."""
        for bucket in self.buckets:
            bucket.missing.clear()
        self.advance()

    def end_backward(self) -> None:
        """Ends a backward whose buckets have all gone; collective."""
        self._order.learn(self._comm)
        self.begin()
        if self.updates is not None:
            self.wait()
            self.updates.end_backward()

    def _filled_buffer(self, bucket: GradientBucket) -> Tensor:
        """Returns a buffer with all gradients of a bucket, and removes them from the bucket."""
        buffer = bucket.buffer if bucket.buffer is not None else self._buffer_for(bucket)
        bucket.fill_up(buffer)
        for index in bucket.taken:
            bucket.active[index] = True
        bucket.buffer = None
        bucket.taken.clear()
        self.generation += 1
        return buffer

    def tag(self, number: int) -> int:
        """Returns a tag that tells a reduction from those of other buckets, backwards, modules."""
        return _native.grad_tag(self._number, self._backwards, number)

    def _launch(self, number: int, buffer: Tensor) -> None:
        """Starts one reduction; collective."""
        bucket = self.buckets[number]
        if self.updates is not None:
            self._flying.append((bucket, buffer, self._update(self.updates, number, buffer)))
            return
        self._flying.append((bucket, buffer, self._reduce(bucket, buffer, self.tag(number))))
        bucket.holds = True

    def _update(self, updates: BackwardUpdates, number: int, buffer: Tensor) -> Work | None:
        bucket = self.buckets[number]
        wanted = updates.close(number, bucket.active)
        bucket.brought = bucket.active
        bucket.active = [False] * len(bucket.stored.params)

        def run() -> list[Tensor]:
            with self._profile.span("reduce and update", buffer.nbytes):
                updates.update(number, buffer, wanted)
            return []

        if self._options.overlap:
            return self._comm.submit(run, "reduce_scatter_update")
        with self._profile.waiting("reduce and update"):
            run()
        return None

    def _reduce(self, bucket: GradientBucket, buffer: Tensor, tag: int) -> Work | None:
        # The norm is that of the FP32 sum: a shard that was rounded to 16 bits has another one.
        rounded = bucket.shard.dtype is not torch.float32
        bucket.summed = self._sums or rounded or self._comm.launches
        words = bucket.words if bucket.summed else None
        into = Into(bucket.shard, "l2", words, bucket.holds, tag, bucket.residual)

        def run() -> list[Tensor]:
            with self._profile.span("reduce_scatter", buffer.nbytes):
                self._reduce_now(buffer, into)
            return [into.out]

        if not self._options.overlap:
            with self._profile.waiting("reduce_scatter"):
                run()
        elif not self._comm.launches:
            return self._comm.submit(run, "reduce_scatter_norm")
        elif bucket.shard.dtype is torch.float32:
            return self.reducer.reduce(buffer, into, async_op=True)
        else:
            run()
        return None

    def _reduce_now(self, buffer: Tensor, into: Into) -> None:
        shard = into.out
        if shard.dtype is torch.float32:
            self.reducer.reduce(buffer, into)
            return
        exact = torch.empty_like(shard, dtype=torch.float32)
        if into.accumulate:
            exact.copy_(shard)
        self.reducer.reduce(buffer, replace(into, out=exact))
        shard.copy_(exact)

    def _buffer_for(self, bucket: GradientBucket) -> Tensor:
        """Returns a buffer; waits for the oldest reductions while all buffers are in use."""
        buffer = self._buffers.get(bucket.stored, must=not self._flying)
        while buffer is None:
            self._land()
            buffer = self._buffers.get(bucket.stored, must=not self._flying)
        return buffer

    def _land_ended(self) -> None:
        while self._flying:
            *_, work = self._flying[0]
            if work is not None and not work.is_completed():
                return
            self._land()

    def _land(self) -> None:
        """Waits for the oldest reduction."""
        bucket, buffer, work = self._flying.popleft()
        if work is not None:
            with self._profile.span("wait for reduce_scatter", kind="wait"):
                work.wait()
        bucket.version = bucket.shard._version
        self._buffers.give(buffer)

    # ---- at the step ----------------------------------------------------------------------------

    def finish(self, keep: bool = False) -> list[list[bool]]:
        """Reduces all remaining gradients into the shards, and waits for that; collective.

        Args:
            keep: leave the gradients in ``kept`` unreduced.

        Returns:
            By bucket and parameter, whether this rank has had a gradient for it.
        """
        left = self._left_over()
        if left or not keep:
            self.settle()
        self._fill_cleared()
        for number in left:
            self._launch(number, self._filled_buffer(self.buckets[number]))
        self.has_left_over = False
        self.begin()
        self.wait()
        for number, bucket in enumerate(self.buckets):
            if not bucket.holds and number not in self.kept:
                bucket.shard.zero_()
        return [bucket.active for bucket in self.buckets]

    def finish_updates(self) -> None:
        """Updates what no backward has updated yet, in the step; collective.

        Raises:
            ArgumentError, RingcommError: see :meth:`BackwardUpdates.begin`, or all ranks know that
                a backward has failed.
        """
        updates = self.updates
        assert updates is not None
        updates.raise_failure()
        if not updates.under_way:
            updates.begin("step", self._order.numbers)
        for number in updates.left(self._left_over()):
            self._launch(number, self._filled_buffer(self.buckets[number]))
        self.has_left_over = False
        self.begin()
        self.wait()

    def _left_over(self) -> list[int]:
        """Returns the buckets for which some rank has unreduced gradients."""
        mine = [bucket.has_more for bucket in self.buckets]
        # Nothing is left over, but the user may have set p.grad by hand.
        if not self.has_left_over and not any(mine):
            return []
        return any_of(self._comm, range(len(mine)), mine)

    def settle(self) -> None:
        """Reduces the buckets in ``kept``; collective."""
        self._fill_cleared()
        for number in sorted(self.kept, reverse=True):
            self._launch(number, self.kept.pop(number))

    def norm(self, number: int, kind: str, words: Tensor) -> None:
        """Sums a shard for the norm, and overwrites ``words`` (int64 [24]); collective."""
        self._asked = True
        self.settle()
        self.wait()
        bucket = self.buckets[number]
        known = bucket.holds and bucket.summed and bucket.version == bucket.shard._version
        if kind == "l2" and known:
            words.copy_(bucket.words)
        else:
            self.reducer.norm(bucket.stored.own_part(bucket.shard), kind, words)

    def wrote(self, number: int, index: int) -> None:
        """Notes that the shard of a bucket was written to, where parameter ``index`` has its part.

        The bucket holds a gradient from now on, even if no backward has brought one.
        """
        bucket = self.buckets[number]
        bucket.holds = True
        bucket.active[index] = True
        self.generation += 1

    def shows(self, number: int, index: int) -> bool:
        """Returns whether a parameter has a gradient on this rank that is not in ``p.grad``."""
        bucket = self.buckets[number]
        if self.updates is not None and self.updates.has_begun(number):
            return bucket.brought[index]
        if bucket.active[index]:
            return True
        may = index in bucket.taken or bucket.accumulator is not None
        if may and any(True for _ in bucket.unreduced(index)):
            return True
        if not bucket.holds or index in bucket.cleared:
            return False
        # Another rank may have brought one.
        self.wait()
        return bool(bucket.piece(index).count_nonzero())

    def clear(self, number: int, index: int) -> None:
        """Forgets the gradient of one parameter, on this rank.

        Raises:
            ArgumentError: it has updated its parameter already.
        """
        if self.updates is not None:
            self.updates.forget()
        self.buckets[number].clear(index)
        self.generation += 1

    def zero_one(self, number: int, index: int) -> None:
        """Called before the gradient of one parameter becomes zero.

        Raises:
            ArgumentError: it has updated its parameter already.
        """
        if self.updates is not None:
            self.updates.forget()
        self.buckets[number].zeroed.add(index)

    def parts(self, number: int, index: int) -> list[Tensor]:
        """Returns all that this rank has of a parameter's gradient besides ``p.grad``.

        Their sum over the ranks, each element being in one shard, is the gradient.
        """
        self._fill_cleared()
        self.wait()
        bucket = self.buckets[number]
        parts = list(bucket.unreduced(index))
        if number in self.kept:
            parts.append(bucket.stored.params[index].view(self.kept[number]))
        if bucket.holds:
            parts.append(bucket.piece(index))
        return parts

    def _fill_cleared(self) -> None:
        """Fills what was cleared with zeros; see NOTE [Gradients cleared one by one]."""
        if not any(bucket.cleared for bucket in self.buckets):
            return
        self.wait()
        for number, bucket in enumerate(self.buckets):
            kept = self.kept.get(number)
            for index in bucket.cleared:
                if bucket.holds:
                    bucket.piece(index).zero_()
                if kept is not None:
                    bucket.stored.params[index].view(kept).zero_()
            bucket.cleared.clear()

    def drop(self) -> None:
        """Forgets all gradients."""
        self.zero()
        for bucket in self.buckets:
            bucket.active = [False] * len(bucket.stored.params)

    def zero(self) -> None:
        """Forgets all gradients; parameters that had one then have a gradient of zero.

        Raises:
            ArgumentError: they have updated parameters already.
        """
        if self.updates is not None:
            self.updates.forget()
        for bucket in self.buckets:
            bucket.holds = False
            bucket.drop()
        while self.kept:
            self._buffers.give(self.kept.popitem()[1])
        self._sums, self._asked = self._asked, False
        self._used, self._added_to = False, False
        self.generation += 1

    def wait(self) -> None:
        """Waits for all reductions under way."""
        while self._flying:
            self._land()
