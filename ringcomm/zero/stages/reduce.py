# SPDX-License-Identifier: Apache-2.0
"""Reduction of gradient buckets at stages 2 and 3, while backward fills the next bucket.

The gradients of a bucket take these steps in a backward:

1. They arrive one by one in ``p.grad``, and the hook of each parameter counts them; see
   NOTE [Hooks count] in ``zero/stages/engine.py``.
2. When the last gradient has arrived, or the waiting gradients reach ``BATCH_BYTES``,
   :meth:`Reduction.arrived` moves them all into a buffer at once and clears ``p.grad``.
3. When it is the full bucket's turn, :meth:`Reduction.advance` starts its reduction, or keeps the
   buffer for the step. Gradients that are missing at the end of backward count as zeros.
4. When the reduction has ended, the buffer is free for a later bucket.

NOTE [Order of reductions]
Reductions are collective, so all ranks must call them in one order, although their backwards may
run in different orders. A module's buckets are reduced in a fixed order. This is the reverse of the
layout's order until the first backward has ended, and afterwards the order in which rank 0 filled
its buckets. A bucket that is full early waits for its turn. By the end of backward every bucket has
had its turn, even a bucket without gradients, since another rank may have some.

NOTE [What is left over]
A gradient stays in ``p.grad`` if no backward has reduced it: it came under ``no_sync``, or after
its bucket's turn (a reentrant checkpoint runs backwards inside backwards). The next backward, or at
the latest the step, also reduces these gradients. ``has_left_over``, equal on all ranks, is True if
a rank may have left-over gradients; the ranks then agree on the buckets that have some.

NOTE [Sums in FP32]
With ``accumulate_dtype``, a gradient that is left over does not stay in ``p.grad``: the optimizer's
accumulator adds it to a sum in FP32, which moves into the bucket's buffer at the end. The buffers
are then FP32, so that neither the sum nor this backward's gradients are rounded before the
reduction.

NOTE [Kept for the step]
On a host, no computation is left that could hide the reduction of a backward's last buckets. So
stage 2 leaves as many of the last buckets unreduced as there are buffers. The step reduces, updates
and gathers them in one pass, which moves less memory than reducing them first. Operations that need
reduced gradients (another backward that adds to them, a norm, a read of a gradient) reduce these
buckets first. The bits are the same.

NOTE [Gradients cleared one by one]
``p.grad = None``, and so ``zero_grad()`` of a container or of a part of the module, clears the
gradient of one parameter on this rank. The clearing must not change which collectives follow: other
ranks may have no gradient of this parameter and clear nothing. So the cleared parameter's part of
the shard, and of a bucket kept for the step, is filled with zeros before its next use, and the
bucket still counts as holding a gradient.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from ringcomm import _native
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.device.launch import DeviceCallEngine
from ringcomm.comm.host.engine import Work
from ringcomm.comm.nodes.compressed_sums import ErrorFeedback
from ringcomm.cuda.runtime import DeviceRuntime
from ringcomm.errors import ArgumentError, where
from ringcomm.memory import empty
from ringcomm.optim.buckets import empty_for_streams
from ringcomm.optim.dtensors import (
    grad_of,
    local_gradient,
    other_shape,
    set_grad,
    without_torch_function,
)
from ringcomm.optim.gradients import (
    NORM_WORDS,
    Accumulator,
    Into,
    make_error_feedback,
    make_reducer,
)
from ringcomm.optim.layout import TILE_ELEMS
from ringcomm.zero.stages.buckets import SMALL_BYTES, ParamBucket
from ringcomm.zero.stages.options import ZeroOptions
from ringcomm.zero.stages.order import StepProfile, any_of, order_of_rank_0
from ringcomm.zero.stages.updates import BackwardUpdates

Tensor = torch.Tensor


#: A bucket's gradients wait in ``p.grad`` until they have this number of bytes, and then move into
#: the buffer together. 1 MiB is not tuned: it still fits in a core's caches, needs little memory
#: beside the buffers, and lets the small gradients of a typical layer move at once.
BATCH_BYTES = 1 << 20


class BufferView(NamedTuple):
    """A buffer as seen by one bucket.

    Attributes:
        flat: [bucket elements], in the heap.
        views: for each parameter, the memory of its gradient.
        gaps: the memory between and after the parameters, which is also reduced.
        zeros: the zeros that fill the gaps, one tensor per gap.
    """

    flat: Tensor
    views: tuple[Tensor, ...]
    gaps: tuple[Tensor, ...]
    zeros: tuple[Tensor, ...]


@dataclass(eq=False)
class GradientBucket:
    """The gradients of one bucket, from the parameters to this rank's shard.

    Attributes:
        number: number of the bucket.
        stored: the parameters' bucket.
        shard: [state chunk elements], float32 or 16 bits; gradients summed since the last drop().
        words: int64 [24], the norm of the last reduction, as a sum in fixed point ("norm words").
        error_feedback: the quantization errors of gradients; None if errors are not kept.
        holds: True if a reduction has written a gradient to the shard.
        active: for each parameter, True if a gradient was reduced since :meth:`Reduction.drop`.
        waiting: indices of parameters whose gradients have arrived, and are still to be processed.
        left: number of further gradients after which the engine looks at the bucket.
        room: bytes of further gradients after which the engine looks at the bucket.
        missing: indices of parameters whose gradients had not arrived in this backward when the
            engine last looked at the bucket.
        trained: number of parameters for which this backward may bring gradients.
        pending: number of gradients after which backward no longer needs the parameters; see NOTE
            [When a bucket can be resharded in backward] in ``zero/stages/hooks.py``.
        taken: indices of parameters whose gradients are in ``buffer``.
        cleared: indices of parameters whose gradients have to be filled with zeros; see NOTE
            [Gradients cleared one by one].
        zeroed: indices of parameters whose gradients were set to zero since a step used them.
        brought: with ``update="in_backward"``, a copy of ``active`` made at the bucket's update.
        buffer: the buffer into which gradients move while the bucket is being filled.
        accumulator: see NOTE [Sums in FP32]; None without ``accumulate_dtype``.
        gone: True if the bucket has had its turn to be reduced in this backward.
        summed: True if the last reduction computed ``words``.
        version: version of ``shard`` after the last reduction.
        params: the parameters.
        sizes: for each parameter, the bytes of its gradient.
        only_in_grad: True if all gradients are in ``p.grad`` alone, and none is a DTensor.
    """

    number: int
    stored: ParamBucket
    shard: Tensor
    words: Tensor
    error_feedback: ErrorFeedback | None
    holds: bool = False
    active: list[bool] = field(init=False)
    waiting: list[int] = field(default_factory=list)
    left: int = 0
    room: int = 0
    missing: set[int] = field(default_factory=set)
    trained: int = 0
    pending: int = 0
    taken: set[int] = field(default_factory=set)
    cleared: set[int] = field(default_factory=set)
    zeroed: set[int] = field(default_factory=set)
    brought: list[bool] = field(default_factory=list)
    buffer: BufferView | None = None
    accumulator: weakref.ref[Accumulator] | None = None
    gone: bool = False
    summed: bool = False
    version: int = -1
    params: tuple[torch.nn.Parameter, ...] = field(init=False)
    sizes: tuple[int, ...] = field(init=False)
    only_in_grad: bool = field(init=False)

    def __post_init__(self) -> None:
        entries = self.stored.params
        self.active = [False] * len(entries)
        self.params = self.stored.tensors
        item_bytes = self.stored.layout.dtype.itemsize
        self.sizes = tuple((each.end - each.begin) * item_bytes for each in entries)
        self.only_in_grad = not self.stored.has_dtensors
        self._like = self.stored.layout.dtype, self.stored.comm.device

    def count(self, to_fill: bool, to_reshard: bool) -> None:
        """Sets how many gradients the hooks count before the engine looks at the bucket again.

        Args:
            to_fill: look when the bucket may be full.
            to_reshard: look when backward no longer needs the bucket's parameters.
        """
        if to_fill:
            self.left = len(self.missing)
            self.room = BATCH_BYTES if self.accumulator is None else 0
        else:
            self.left, self.room = len(self.params) + 1, sys.maxsize
        if to_reshard and 0 < self.pending < self.left:
            self.left = self.pending

    def take(self, indices: Iterable[int], with_gaps: bool = False) -> None:
        """Moves gradients of parameters into the buffer, in one call where possible.

        Args:
            indices: indices of the parameters.
            with_gaps: also fill the buffer's gaps.
        """
        buffer = self.buffer
        if buffer is None:
            return
        dtype, device = self._like
        moved: list[torch.nn.Parameter] = []
        views: list[Tensor] = []
        grads: list[Tensor] = []
        others: list[int] = []
        with without_torch_function():
            for index in indices:
                param, view = self.params[index], buffer.views[index]
                grad = grad_of(param)
                if (
                    type(grad) is Tensor
                    and grad.dtype is dtype
                    and grad.layout is torch.strided
                    and not grad.requires_grad
                    and grad.shape == view.shape
                    and grad.device == device
                    and self.only_in_grad
                    and index not in self.taken
                ):
                    moved.append(param)
                    views.append(view)
                    grads.append(grad)
                    self.taken.add(index)
                elif grad is not None or not self.only_in_grad:
                    others.append(index)
            if with_gaps:
                views += buffer.gaps
                grads += buffer.zeros
            if views:
                torch._foreach_copy_(views, grads)
            for param in moved:
                set_grad(param, None)
            for index in others:
                self._take_one(buffer, index)

    def _take_one(self, buffer: BufferView, index: int) -> None:
        param, sums = self.params[index], self._sums
        if sums is not None and sums.has(param):
            self._move(buffer, index, sums.take(param))
        if grad_of(param) is not None:
            name = self.stored.params[index].name
            self._move(buffer, index, local_gradient(param, f"parameter {name}"))
            set_grad(param, None)

    def _move(self, buffer: BufferView, index: int, grad: Tensor) -> None:
        view = buffer.views[index]
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

    def fill_up(self, buffer: BufferView) -> Tensor:
        """Moves all gradients into ``buffer``, and zeros elsewhere; returns the buffer's memory."""
        self.buffer = buffer
        self.take(range(len(self.params)), with_gaps=True)
        for index in self.taken:
            self.active[index] = True
        if len(self.taken) < len(self.params):
            empty = [view for index, view in enumerate(buffer.views) if index not in self.taken]
            torch._foreach_zero_(empty)
        self.buffer = None
        self.taken.clear()
        return buffer.flat

    @property
    def has_more(self) -> bool:
        """True if the bucket has unreduced gradients.

        Must be called in :func:`without_torch_function`.
        """
        for param in self.params:
            if grad_of(param) is not None:
                return True
        if self.accumulator is not None:
            sums = self._sums
            return bool(self.taken) or any(sums is not None and sums.has(p) for p in self.params)
        return bool(self.taken)

    @property
    def is_active(self) -> bool:
        """True if there is a reduced gradient that was neither cleared nor set to zero."""
        return any(on and index not in self.zeroed for index, on in enumerate(self.active))

    def local_shard_of(self, index: int) -> Tensor:
        """Returns the elements of the shard that belong to one parameter."""
        entry, chunk = self.stored.params[index], self.stored.state_chunk
        begin, end = max(entry.begin, chunk.begin), min(entry.end, chunk.end)
        return self.shard[begin - chunk.begin : max(begin, end) - chunk.begin]

    def clear(self, index: int) -> None:
        """Drops the gradient of one parameter; see NOTE [Gradients cleared one by one]."""
        sums, param = self._sums, self.stored.params[index].param
        self.active[index] = False
        self.taken.discard(index)
        self.cleared.add(index)
        if sums is not None and sums.has(param):
            sums.take(param)

    def unreduced(self, index: int) -> Iterator[Tensor]:
        """Yields this rank's parts of a gradient that are not in ``p.grad`` or the shard."""
        sums, entry = self._sums, self.stored.params[index]
        if sums is not None and sums.has(entry.param):
            yield sums.sum_of(entry.param)
        if index in self.taken and self.buffer is not None:
            yield self.buffer.views[index]

    def drop(self) -> None:
        """Drops the bucket's unreduced gradients."""
        self.taken.clear()
        self.cleared.clear()
        with without_torch_function():
            for param in self.params:
                set_grad(param, None)
        sums = None if self.accumulator is None else self._sums
        if sums is not None:
            for param in self.params:
                if sums.has(param):
                    sums.take(param)


class Buffers:
    """The reused heap buffers of buckets that are being filled or reduced.

    Args:
        stored: all buckets; a buffer is as large as the largest bucket of its dtype.
        count: number of buffers of each dtype, unless more are needed.
        device: device of the heap.
        dtype: dtype of all buffers; None for the dtype of each bucket's parameters.
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
        # All buffers by address, and their views by (address, bucket number).
        self._whole: dict[int, Tensor] = {}
        # By dtype, a tensor of zeros that all gaps share, at least as large as the largest gap.
        self._zeros: dict[torch.dtype, Tensor] = {}
        self._views: dict[tuple[int, int], BufferView] = {}

    def get(self, bucket: GradientBucket, must: bool) -> BufferView | None:
        """Returns a buffer with undefined values, or None if all are in use.

        Args:
            bucket: the bucket that the buffer is for.
            must: make another buffer if all are in use.
        """
        dtype = self._dtype or bucket.stored.layout.dtype
        free = self._free[dtype]
        if free:
            whole = free.pop()
        elif self._made[dtype] < self._count or must:
            self._made[dtype] += 1
            whole = empty(self._most_elems[dtype], dtype=dtype, device=self._device)
            self._whole[whole.data_ptr()] = whole
            if dtype not in self._zeros:
                self._zeros[dtype] = whole.new_zeros(TILE_ELEMS)
        else:
            return None
        key = whole.data_ptr(), bucket.number
        if key not in self._views:
            self._views[key] = _view_of(whole, bucket.stored, self._zeros[dtype])
        return self._views[key]

    def give(self, buffer: Tensor) -> None:
        """Returns a buffer to the free buffers."""
        self._free[buffer.dtype].append(self._whole[buffer.data_ptr()])


def _view_of(whole: Tensor, stored: ParamBucket, zeros: Tensor) -> BufferView:
    flat = whole[: stored.layout.elems]
    begins = [*(each.begin for each in stored.params), len(flat)]
    ends = [0, *(each.end for each in stored.params)]
    gaps = [flat[end:begin] for end, begin in zip(ends, begins, strict=True) if end < begin]
    return BufferView(
        flat,
        tuple(each.view(flat) for each in stored.params),
        tuple(gaps),
        tuple(zeros[: len(gap)] for gap in gaps),
    )


class Reduction:
    """The gradients of all buckets on one rank, and their reductions.

    Attributes:
        buckets: the buckets, by number.
        reducer: the object that reduces them.
        order: the bucket numbers, in the order of the buckets' turns.
        updates: updates each bucket as soon as it is reduced; None if the step does this.
        has_left_over: see NOTE [What is left over].
        kept: unreduced gradients by bucket number; see NOTE [Kept for the step].
        generation: number of changes of the gradients; a result computed from the shards is stale
            once this number has changed.
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
        self._launches = comm.launches
        self._number = number
        self._backwards = 0
        self._options = options
        self._profile = profile
        sizes_bytes = [each.layout.elems * each.layout.dtype.itemsize for each in stored]
        self.reducer = make_reducer(comm, options, sum(sizes_bytes))
        self.updates: BackwardUpdates | None = None
        reduced = options.precision.reduced_dtype
        #: int64 [buckets, 24], the norm words of all buckets.
        self._words = torch.zeros(len(stored), NORM_WORDS, dtype=torch.int64, device=comm.device)
        # The device, if reductions send little or nothing: they then run on the caller's stream,
        # and their buffers are free at once. None: reductions overlap the caller's work.
        engine: object = comm.engine
        self._device_ref: tuple[DeviceRuntime, int] | None = None
        is_small = comm.world_size == 1 or max(sizes_bytes, default=0) <= SMALL_BYTES
        if is_small and isinstance(engine, DeviceCallEngine):
            self._device_ref = engine.device_ref
        # The stream of the last reductions on a caller's stream, until wait() has made the current
        # stream wait for it. None with overlap=False: the caller itself orders these streams.
        self._stream: int | None = None
        # Numbers of the buckets whose norm words are zeros now.
        self._zeroed: set[int] = set()
        self.buckets = [
            GradientBucket(
                number,
                each,
                empty_for_streams(each.state_chunk.elems, reduced(each.layout.dtype), comm.device),
                self._words[number],
                make_error_feedback(comm, options, each.layout.elems),
            )
            for number, each in enumerate(stored)
        ]
        self._buffers = Buffers(stored, options.in_flight, comm.heap_device)
        self.order = list(range(len(self.buckets)))[::-1]
        self._learned = False
        # The position in ``order`` of the next turn, and the full buckets in the order of filling.
        self._turn = 0
        self._filled: list[int] = []
        self._begun = False
        self.has_left_over = False
        # Whether a step has used the current gradients, whether a backward has then added to these
        # gradients, and whether the user was warned of this.
        self._used, self._added_to, self._warned = False, False, False
        self.kept: dict[int, Tensor] = {}
        self._keeps = self._kept_at_most = options.in_flight if keeps else 0
        # _asked: a norm was requested since the gradients were last dropped; _sums: the value of
        # _asked at that drop. Programs that do not clip request no norm, and need no sums for it.
        self._asked, self._sums = False, False
        self._flying: deque[tuple[GradientBucket, Tensor, Work | None]] = deque()
        self.generation = 0

    def update_by(self, updates: BackwardUpdates | None) -> None:
        """Makes ``updates`` update each bucket after its reduction; None: the step updates.

        Raises:
            ArgumentError: gradients were reduced already.
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
        """Adds up in FP32 the gradients that are left over from now on; see NOTE [Sums in FP32].

        Raises:
            ArgumentError: gradients were reduced already, in buffers of another dtype.
        """
        if self.kept or any(bucket.holds for bucket in self.buckets):
            raise ArgumentError(
                f"{where('optimizer', self._comm.rank, self._comm.world_size)}: accumulate_dtype: "
                "a backward has begun to reduce gradients in their own dtype; build the optimizer "
                "before the first backward, or call zero_grad() of the module"
            )
        self.wait()
        device = self._comm.heap_device
        stored = [bucket.stored for bucket in self.buckets]
        self._buffers = Buffers(stored, self._options.in_flight, device, torch.float32)
        for bucket in self.buckets:
            bucket.accumulator, bucket.only_in_grad = weakref.ref(accumulator), False

    def begin_backward(self) -> None:
        """Begins a backward, which also reduces gradients that earlier backwards have left over."""
        if self.updates is not None:
            self.updates.begin("backward", self.order)
        self.has_left_over = False
        if self._used:
            self._used = self._added_to = any(bucket.is_active for bucket in self.buckets)
        self.settle()
        if self._launches:
            # Zero all words at once: every bucket will have a turn, and then adds to its words.
            self.wait()
            self._words.zero_()
            self._zeroed.update(range(len(self.buckets)))
        self._backwards += 1
        self._begin()

    def used(self) -> None:
        """Called after a step; warns if an earlier step had already used some of the gradients."""
        if self._added_to and not self._warned:
            self._warned = True
            warnings.warn(
                "zero: this step's gradients are added to gradients that an earlier step has used. "
                "Call zero_grad() of the optimizer, or of the sharded module, after each step",
                stacklevel=2,
            )
        self._used, self._added_to = True, False
        for bucket in self.buckets:
            bucket.zeroed.clear()

    def _begin(self) -> None:
        """Resets all buckets for a new backward, which has reduced none of them yet."""
        with without_torch_function():
            for bucket in self.buckets:
                bucket.missing.clear()
                # Parameters that were frozen since shard() bring no gradients.
                for index, param in enumerate(bucket.params):
                    if param.requires_grad:
                        bucket.missing.add(index)
                bucket.trained = len(bucket.missing)
                bucket.gone = False
        self._turn, self._filled = 0, []
        self._begun = True

    # ---- during backward ------------------------------------------------------------------------

    def count(self, reduces: bool, to_reshard: bool) -> None:
        """Starts the hooks' counts, at a backward's first gradient.

        Args:
            reduces: False if this backward leaves the gradients in ``p.grad``.
            to_reshard: also look at a bucket when backward no longer needs its parameters.
        """
        if not (reduces and self._begun):
            self._begin()
        if not reduces:
            self.has_left_over = True
        for bucket in self.buckets:
            bucket.pending = bucket.trained
            bucket.count(reduces, to_reshard)

    def stop_counting(self) -> None:
        """Drops counts and waiting gradients at the end of a backward."""
        self._begun = False
        for bucket in self.buckets:
            bucket.waiting.clear()

    def arrived(self, bucket: GradientBucket, indices: Sequence[int]) -> bool:
        """Takes the gradients that this backward has put into ``p.grad`` of a bucket's parameters.

        Returns:
            True if the bucket is full now, so that its turn may come.
        """
        if bucket.gone and self.updates is not None:
            self.updates.refuse_another("backward")
        if bucket.gone:
            self.has_left_over = True
            return False
        bucket.missing.difference_update(indices)
        turns = self.order[self._turn : self._turn + self._options.in_flight]
        full = not bucket.missing
        if full:
            if bucket.number not in self._filled:
                self._filled.append(bucket.number)
            if bucket.number == turns[0]:
                return True  # advance() takes the gradients
        # Only buckets whose turn is near get buffers: later buckets could take all buffers.
        if bucket.buffer is None and bucket.number in turns:
            # A gradient that moves now is still in the cache, and the next gradient can reuse its
            # memory. A device's events are not queried: a query fails while a graph is captured.
            if self._flying and not self._launches:
                self._land_ended()
            if self._stream is not None:
                self._follow()
            bucket.buffer = self._buffers.get(bucket, must=False)
        bucket.take(indices)
        return full

    def advance(self) -> bool:
        """Reduces the full buckets whose turn it is; returns whether all turns are over."""
        while self._turn < len(self.order):
            number = self.order[self._turn]
            bucket = self.buckets[number]
            if bucket.missing:
                return False
            bucket.gone = True
            buffer = self._filled_buffer(bucket)
            if len(self.order) - self._turn <= self._keeps and not bucket.holds:
                self.kept[number] = buffer
            else:
                self._launch(number, buffer)
            self._turn += 1
        return True

    def reduce_rest(self) -> None:
        """Reduces the buckets that have not had their turn, in order; collective."""
        for bucket in self.buckets:
            bucket.missing.clear()
        self.advance()

    def end_backward(self) -> None:
        """Ends a backward in which all buckets have had their turns; collective."""
        if not self._learned:
            self.order = order_of_rank_0(self._comm, self._filled, self.order)
            self._learned = True
        self._begun = False
        if self.updates is not None:
            self.wait()
            self.updates.end_backward()

    def abandon(self) -> None:
        """Called after a backward raised, before this rank makes the missing reductions."""
        if self.updates is not None:
            self.updates.abandon()

    def _filled_buffer(self, bucket: GradientBucket) -> Tensor:
        """Returns a buffer with all gradients of a bucket; waits while all buffers are in use."""
        buffer = bucket.buffer
        if buffer is None and self._flying and not self._launches:
            self._land_ended()
        if buffer is None and self._stream is not None:
            self._follow()
        while buffer is None:
            buffer = self._buffers.get(bucket, must=not self._flying)
            if buffer is None:
                self._land()
        self.generation += 1
        return bucket.fill_up(buffer)

    def tag(self, number: int) -> int:
        """Returns the tag of a reduction, unique among buckets, backwards and modules."""
        return _native.grad_tag(self._number, self._backwards, number)

    def _launch(self, number: int, buffer: Tensor) -> None:
        """Starts one reduction; collective."""
        bucket = self.buckets[number]
        if self.updates is not None:
            work = self._update(self.updates, number, buffer)
        else:
            work = self._reduce(bucket, buffer, self.tag(number))
            bucket.holds = True
        if work is not None or (self._launches and self._device_ref is None):
            self._flying.append((bucket, buffer, work))
        else:
            self._landed(bucket, buffer)

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
            return self._comm.engine.submit(run, "reduce_scatter_update")
        with self._profile.waiting("reduce and update"):
            run()
        return None

    def _reduce(self, bucket: GradientBucket, buffer: Tensor, tag: int) -> Work | None:
        # The norm must be the FP32 sum's norm, which differs from the norm of a rounded shard.
        rounded = bucket.shard.dtype is not torch.float32
        bucket.summed = self._sums or rounded or self._launches
        words = bucket.words if bucket.summed else None
        zeroed = bucket.number in self._zeroed
        self._zeroed.discard(bucket.number)
        into = Into(bucket.shard, "l2", words, bucket.holds, tag, bucket.error_feedback, zeroed)
        if self._device_ref is not None and self._options.overlap:
            runtime, device = self._device_ref
            self._stream = runtime.current_stream(device)

        def run() -> list[Tensor]:
            with self._profile.span("reduce_scatter", buffer.nbytes):
                if rounded:
                    self._reduce_rounding(buffer, into)
                else:
                    self.reducer.reduce(buffer, into)
            return [into.out]

        if not self._options.overlap:
            with self._profile.waiting("reduce_scatter"):
                run()
        elif not self._launches:
            return self._comm.engine.submit(run, "reduce_scatter_norm")
        elif bucket.shard.dtype is torch.float32:
            return self.reducer.reduce(buffer, into, async_op=self._device_ref is None)
        else:
            run()
        return None

    def _follow(self) -> None:
        """Makes the current stream wait for this module's reductions on another stream, if any."""
        assert self._device_ref is not None and self._stream is not None
        runtime, device = self._device_ref
        current, last = runtime.current_stream(device), self._stream
        if last != current:
            with runtime.on_device(device):
                runtime.wait_event(device, current, runtime.record_event(device, last))
            self._stream = current

    def _reduce_rounding(self, buffer: Tensor, into: Into) -> None:
        """Reduces to a 16-bit shard, through an FP32 shard."""
        shard = into.out
        exact = torch.empty_like(shard, dtype=torch.float32)
        if into.accumulate:
            exact.copy_(shard)
        self.reducer.reduce(buffer, replace(into, out=exact))
        shard.copy_(exact)

    def _land_ended(self) -> None:
        while self._flying:
            *_, work = self._flying[0]
            if work is not None and not work.is_completed():
                return
            self._land()

    def _land(self) -> None:
        """Waits for the oldest running reduction, and frees its buffer."""
        bucket, buffer, work = self._flying.popleft()
        if work is not None:
            with self._profile.span("wait for reduce_scatter", kind="wait"):
                work.wait()
        self._landed(bucket, buffer)

    def _landed(self, bucket: GradientBucket, buffer: Tensor) -> None:
        bucket.version = bucket.shard._version
        self._buffers.give(buffer)

    # ---- at the step ----------------------------------------------------------------------------

    def finish(self, keep: bool = False) -> list[list[bool]]:
        """Reduces all remaining gradients into the shards, and waits for the end; collective.

        Args:
            keep: leave the gradients in ``kept`` unreduced.

        Returns:
            For each bucket and parameter, whether this rank has had a gradient.
        """
        left = self._left_over()
        if left or not keep:
            self.settle()
        self._fill_cleared()
        for number in left:
            self._launch(number, self._filled_buffer(self.buckets[number]))
        self.has_left_over = False
        self.wait()
        for number, bucket in enumerate(self.buckets):
            if not bucket.holds and number not in self.kept:
                bucket.shard.zero_()
        return [bucket.active for bucket in self.buckets]

    def finish_updates(self) -> None:
        """Updates, in the step, all buckets that no backward has updated yet; collective.

        Raises:
            ArgumentError, RingcommError: see :meth:`BackwardUpdates.begin`; or a backward has
                failed on a rank, and all ranks raise.
        """
        updates = self.updates
        assert updates is not None
        updates.raise_failure()
        if not updates.under_way:
            updates.begin("step", self.order)
        for number in updates.left(self._left_over()):
            self._launch(number, self._filled_buffer(self.buckets[number]))
        self.has_left_over = False
        self.wait()

    def _left_over(self) -> list[int]:
        """Returns the numbers of buckets for which some rank has unreduced gradients."""
        with without_torch_function():
            mine = [bucket.has_more for bucket in self.buckets]
        # Even if no backward left gradients over, the user may have set p.grad by hand.
        if not self.has_left_over and not any(mine):
            return []
        return any_of(self._comm, range(len(mine)), mine)

    def settle(self) -> None:
        """Reduces the buckets in ``kept``; collective."""
        self._fill_cleared()
        for number in sorted(self.kept, reverse=True):
            self._launch(number, self.kept.pop(number))

    def norm(self, number: int, kind: str, words: Tensor) -> None:
        """Writes the norm sums of a bucket's shard to ``words`` (int64 [24]); collective."""
        self._asked = True
        self.settle()
        self.wait()
        bucket = self.buckets[number]
        known = bucket.holds and bucket.summed and bucket.version == bucket.shard._version
        if kind == "l2" and known:
            words.copy_(bucket.words)
        else:
            self.reducer.norm(bucket.stored.own_chunk_of(bucket.shard), kind, words)

    def wrote(self, number: int, index: int) -> None:
        """Notes that the user wrote to the part of parameter ``index`` in a bucket's shard.

        From now on the bucket holds a gradient, even if no backward has brought one.
        """
        bucket = self.buckets[number]
        bucket.holds = True
        bucket.active[index] = True
        self.generation += 1

    def shows(self, number: int, index: int) -> bool:
        """True if this rank has a gradient of the parameter outside of ``p.grad``."""
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
        # Another rank may have brought a gradient.
        self.wait()
        return bool(bucket.local_shard_of(index).count_nonzero())

    def clear(self, number: int, index: int) -> None:
        """Drops the gradient of one parameter, on this rank.

        Raises:
            ArgumentError: the gradient has updated its parameter already.
        """
        if self.updates is not None:
            self.updates.forget()
        self.buckets[number].clear(index)
        self.generation += 1

    def zero_one(self, number: int, index: int) -> None:
        """Called before the gradient of one parameter is set to zero.

        Raises:
            ArgumentError: the gradient has updated its parameter already.
        """
        if self.updates is not None:
            self.updates.forget()
        self.buckets[number].zeroed.add(index)

    def terms(self, number: int, index: int) -> list[Tensor]:
        """Returns this rank's parts of a parameter's gradient, except ``p.grad``.

        No two ranks' shards overlap, so the parts of all ranks add up to the gradient.
        """
        self._fill_cleared()
        self.wait()
        bucket = self.buckets[number]
        found = list(bucket.unreduced(index))
        if number in self.kept:
            found.append(bucket.stored.params[index].view(self.kept[number]))
        if bucket.holds:
            found.append(bucket.local_shard_of(index))
        return found

    def _fill_cleared(self) -> None:
        """Fills cleared gradients with zeros; see NOTE [Gradients cleared one by one]."""
        for bucket in self.buckets:
            if bucket.cleared:
                break
        else:
            return
        self.wait()
        for number, bucket in enumerate(self.buckets):
            kept = self.kept.get(number)
            for index in bucket.cleared:
                if bucket.holds:
                    bucket.local_shard_of(index).zero_()
                if kept is not None:
                    bucket.stored.params[index].view(kept).zero_()
            bucket.cleared.clear()

    def drop(self) -> None:
        """Drops all gradients."""
        self.zero()
        for bucket in self.buckets:
            bucket.active = [False] * len(bucket.stored.params)

    def zero(self) -> None:
        """Drops all gradients; parameters that had a gradient then have a gradient of zero.

        Raises:
            ArgumentError: the gradients have updated parameters already.
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
        """Waits for all running reductions; on a device, the current stream waits."""
        while self._flying:
            self._land()
        if self._stream is not None:
            self._follow()
            self._stream = None
