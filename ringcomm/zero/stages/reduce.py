"""Reduction of gradient buckets at stages 2 and 3, while backward fills the next bucket.

A bucket goes through a backward in these steps:

1. Its gradients arrive one by one in ``p.grad``, and the hook of each parameter counts them; see
   NOTE [Hooks count] in ``zero/stages/engine.py``.
2. When the last one has arrived, or those that wait have ``BATCH_BYTES``, :meth:`Reduction.arrived`
   moves all that wait into a buffer at once, and ``p.grad`` lets them go.
3. When the full bucket has its turn, :meth:`Reduction.advance` starts its reduction, or keeps the
   buffer for the step. What is missing at the end of backward counts as zeros.
4. When the reduction has ended, the buffer is free for a bucket behind.

NOTE [Order of reductions]
Reductions are collective, so all ranks must make them in one order, whatever order their backwards
run in. A module's buckets are reduced in a fixed order. It is the reverse of the layout's order
until the first backward has ended, and from then on the order in which rank 0 filled its buckets. A
bucket that is full early waits for its turn. At the end of backward every bucket has had its turn,
even one without gradients, since another rank may have some.

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


#: Bytes of gradients of a bucket that wait in ``p.grad`` at most, but for the last one, before they
#: move into the buffer. A choice: so few are still in the caches of a core, and take little memory
#: beside the buffers; and the small gradients of a layer of a usual size move at once.
BATCH_BYTES = 1 << 20


class BufferView(NamedTuple):
    """A buffer as one bucket sees it.

    Attributes:
        flat: [bucket elements], in the heap.
        views: by parameter, the memory of its gradient.
        gaps: what lies between and behind the parameters, which is reduced, too.
        zeros: what the gaps are filled with.
    """

    flat: Tensor
    views: tuple[Tensor, ...]
    gaps: tuple[Tensor, ...]
    zeros: tuple[Tensor, ...]


@dataclass(eq=False)
class GradientBucket:
    """One bucket's gradients, from the parameters to this rank's shard.

    Attributes:
        number: of the bucket.
        stored: the bucket of the parameters.
        shard: [state chunk elements], float32 or 16 bits; the sum since :meth:`Reduction.drop`.
        words: int64 [24], the norm words of the last reduction.
        error_feedback: what quantization of gradients has lost; None where nothing keeps that.
        holds: True if anything was reduced into the shard.
        active: by parameter, True if a gradient was reduced since :meth:`Reduction.drop`.
        waiting: indices of parameters whose gradients have arrived, and were not looked at yet.
        left: number of gradients that are counted before the bucket is looked at.
        room: bytes of gradients that may wait before the bucket is looked at.
        missing: indices of parameters whose gradient this backward has not brought yet, as of the
            last look.
        trained: number of parameters that this backward may bring gradients of.
        pending: number of gradients after which backward needs the parameters no more; see NOTE
            [When a bucket can be resharded in backward] in ``zero/stages/hooks.py``.
        taken: indices of parameters whose gradient is in ``buffer``.
        cleared: indices of parameters whose gradient is to be filled with zeros; see NOTE
            [Gradients cleared one by one].
        zeroed: indices of parameters whose gradient was set to zero since a step used it.
        brought: with ``update="in_backward"``, ``active`` as it was when the bucket was updated.
        buffer: where gradients move while the bucket is filled.
        accumulator: see NOTE [Sums in FP32]; None without ``accumulate_dtype``.
        gone: True if this backward has had the bucket's turn.
        summed: True if the last reduction computed ``words``.
        version: version of ``shard`` after the last reduction.
        params: the parameters.
        sizes: by parameter, the bytes of its gradient.
        only_in_grad: True if its gradients are nowhere but in ``p.grad``, and are no DTensors.
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
        """Has the hooks count until the next look at the bucket.

        Args:
            to_fill: look when it may be full.
            to_reshard: look when backward needs its parameters no more.
        """
        if to_fill:
            self.left = len(self.missing)
            self.room = BATCH_BYTES if self.accumulator is None else 0
        else:
            self.left, self.room = len(self.params) + 1, sys.maxsize
        if to_reshard and 0 < self.pending < self.left:
            self.left = self.pending

    def take(self, indices: Iterable[int], with_gaps: bool = False) -> None:
        """Moves the gradients that parameters have into the buffer, in one call where possible.

        Args:
            indices: of the parameters.
            with_gaps: fill the buffer's gaps, too.
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
        """Returns ``buffer``, which holds all gradients, and zeros elsewhere; the bucket has none
        of them any more.
        """
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
        """True if the bucket has gradients that were not reduced.

        Called in :func:`without_torch_function`.
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
        """True if a gradient was reduced that is neither cleared nor zero."""
        return any(on and index not in self.zeroed for index, on in enumerate(self.active))

    def local_shard_of(self, index: int) -> Tensor:
        """Returns the elements of the shard that are of one parameter."""
        entry, chunk = self.stored.params[index], self.stored.state_chunk
        begin, end = max(entry.begin, chunk.begin), min(entry.end, chunk.end)
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
        sums, entry = self._sums, self.stored.params[index]
        if sums is not None and sums.has(entry.param):
            yield sums.sum_of(entry.param)
        if index in self.taken and self.buffer is not None:
            yield self.buffer.views[index]

    def drop(self) -> None:
        """Forgets gradients that were not reduced."""
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
        # By address, all buffers; and by that and the number of a bucket, what the bucket sees.
        self._whole: dict[int, Tensor] = {}
        # More than there are in a gap.
        self._zeros: dict[torch.dtype, Tensor] = {}
        self._views: dict[tuple[int, int], BufferView] = {}

    def get(self, bucket: GradientBucket, must: bool) -> BufferView | None:
        """Returns a buffer, which holds anything; None if all are in use.

        Args:
            bucket: the bucket that the buffer is for.
            must: make one more if all are in use.
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
        """Takes a buffer back."""
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
    """The gradients of all buckets of one rank, and their reductions.

    Attributes:
        buckets: the buckets, by number.
        reducer: the kernels that reduce them.
        order: the numbers of the buckets, in the order of their turns.
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
        # The device whose reductions follow the caller's work and free their buffers at once, as
        # they have nothing or little to send. Others run beside that work.
        engine: object = comm.engine
        self._device_ref: tuple[DeviceRuntime, int] | None = None
        is_small = comm.world_size == 1 or max(sizes_bytes, default=0) <= SMALL_BYTES
        if is_small and isinstance(engine, DeviceCallEngine):
            self._device_ref = engine.device_ref
        # Where these reductions are, until wait() has put a stream behind them. With overlap=False
        # it is None: the caller orders the streams of its backwards and steps.
        self._stream: int | None = None
        # The numbers of buckets whose norm words are zeros.
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
        # The turn of this backward, and its full buckets in the order in which they were filled.
        self._turn = 0
        self._filled: list[int] = []
        self._begun = False
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
        device = self._comm.heap_device
        stored = [bucket.stored for bucket in self.buckets]
        self._buffers = Buffers(stored, self._options.in_flight, device, torch.float32)
        for bucket in self.buckets:
            bucket.accumulator, bucket.only_in_grad = weakref.ref(accumulator), False

    def begin_backward(self) -> None:
        """Begins a backward, which also reduces the gradients that earlier ones have left."""
        if self.updates is not None:
            self.updates.begin("backward", self.order)
        self.has_left_over = False
        if self._used:
            self._used = self._added_to = any(bucket.is_active for bucket in self.buckets)
        self.settle()
        if self._launches:
            # All buckets have their turn, and the blocks of each reduction add to its words.
            self.wait()
            self._words.zero_()
            self._zeroed.update(range(len(self.buckets)))
        self._backwards += 1
        self._begin()

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

    def _begin(self) -> None:
        """Marks all buckets as not reduced in this backward."""
        with without_torch_function():
            for bucket in self.buckets:
                bucket.missing.clear()
                # Parameters may have been frozen since shard(), and bring no gradients then.
                for index, param in enumerate(bucket.params):
                    if param.requires_grad:
                        bucket.missing.add(index)
                bucket.trained = len(bucket.missing)
                bucket.gone = False
        self._turn, self._filled = 0, []
        self._begun = True

    # ---- during backward ------------------------------------------------------------------------

    def count(self, reduces: bool, to_reshard: bool) -> None:
        """Has the hooks count, from a backward's first gradient on.

        Args:
            reduces: False if this backward leaves the gradients where they are.
            to_reshard: count those after which backward needs the parameters no more, too.
        """
        if not (reduces and self._begun):
            self._begin()
        if not reduces:
            self.has_left_over = True
        for bucket in self.buckets:
            bucket.pending = bucket.trained
            bucket.count(reduces, to_reshard)

    def stop_counting(self) -> None:
        """Forgets counts and waiting gradients at the end of a backward."""
        self._begun = False
        for bucket in self.buckets:
            bucket.waiting.clear()

    def arrived(self, bucket: GradientBucket, indices: Sequence[int]) -> bool:
        """Takes the gradients that this backward has put into ``p.grad`` of a bucket's parameters.

        Returns:
            Whether the bucket is full now, and may have its turn.
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
                return True  # its turn takes the gradients
        # Buckets further behind would take buffers from those whose turn comes first.
        if bucket.buffer is None and bucket.number in turns:
            # A gradient that moves now is still in the cache, and frees its memory for the next.
            # A device's events are not queried: that is an error while a graph is captured.
            if self._flying and not self._launches:
                self._land_ended()
            if self._stream is not None:
                self._follow()
            bucket.buffer = self._buffers.get(bucket, must=False)
        bucket.take(indices)
        return full

    def advance(self) -> bool:
        """Reduces the full buckets whose turn it is; returns whether all buckets have gone."""
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
        """Ends a backward whose buckets have all gone; collective."""
        if not self._learned:
            self.order = order_of_rank_0(self._comm, self._filled, self.order)
            self._learned = True
        self._begun = False
        if self.updates is not None:
            self.wait()
            self.updates.end_backward()

    def abandon(self) -> None:
        """Called before the reductions of a backward that has raised are made up for."""
        if self.updates is not None:
            self.updates.abandon()

    def _filled_buffer(self, bucket: GradientBucket) -> Tensor:
        """Returns a buffer with all gradients of a bucket; waits for one while all are in use."""
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
        """Returns a tag that tells a reduction from those of other buckets, backwards, modules."""
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
        # The norm is that of the FP32 sum: a shard that was rounded to 16 bits has another one.
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
        """Puts the current stream behind reductions that may have begun on another one."""
        assert self._device_ref is not None and self._stream is not None
        runtime, device = self._device_ref
        current, last = runtime.current_stream(device), self._stream
        if last != current:
            with runtime.on_device(device):
                runtime.wait_event(device, current, runtime.record_event(device, last))
            self._stream = current

    def _reduce_rounding(self, buffer: Tensor, into: Into) -> None:
        """Reduces to a shard of 16 bits, by way of an FP32 one."""
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
        """Waits for the oldest reduction."""
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
            updates.begin("step", self.order)
        for number in updates.left(self._left_over()):
            self._launch(number, self._filled_buffer(self.buckets[number]))
        self.has_left_over = False
        self.wait()

    def _left_over(self) -> list[int]:
        """Returns the buckets for which some rank has unreduced gradients."""
        with without_torch_function():
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
            self.reducer.norm(bucket.stored.own_chunk_of(bucket.shard), kind, words)

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
        return bool(bucket.local_shard_of(index).count_nonzero())

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

    def terms(self, number: int, index: int) -> list[Tensor]:
        """Returns all that this rank has of a parameter's gradient besides ``p.grad``.

        Their sum over the ranks, each element being in one shard, is the gradient.
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
        """Fills what was cleared with zeros; see NOTE [Gradients cleared one by one]."""
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
        """Waits for all reductions under way; on a device the current stream does."""
        while self._flying:
            self._land()
        if self._stream is not None:
            self._follow()
            self._stream = None
