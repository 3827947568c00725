"""Stages 2 and 3: reduces each bucket of gradients while backward fills the next.

NOTE [Order of reductions]
Reductions are collective, so all ranks must make them in one order, whatever order their backwards
run in. Buckets are reduced in a fixed order: that of the layout, backwards, and after the first
backward the order in which rank 0 had its buckets full. A bucket that is full early waits for its
turn. At the end of backward all buckets have been reduced, those without gradients too, since
another rank may have some.

NOTE [What is left over]
Gradients that no backward has reduced, since they came under ``no_sync`` or after their bucket had
gone (a reentrant checkpoint runs backwards inside backwards), stay in ``p.grad``. The next backward
takes them along, and at the latest the step: where there may be any, which is so on all ranks or on
none, they agree on the buckets that have some.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from ringcomm.comm.communicator import Communicator
from ringcomm.comm.reduce_ops import ReduceOp
from ringcomm.comm.work import Work
from ringcomm.optim.buckets import empty_for_streams
from ringcomm.optim.norms import NORM_WORDS
from ringcomm.optim.reducers import make_reducer
from ringcomm.zero.options import ZeroOptions
from ringcomm.zero.reduced import Buffers, Reduced
from ringcomm.zero.stored import Stored
from ringcomm.zero.trace import Trace

Tensor = torch.Tensor


class Reduction:
    """The gradients of all buckets of one rank."""

    def __init__(
        self,
        stored: Sequence[Stored],
        comm: Communicator,
        options: ZeroOptions,
        trace: Trace,
    ) -> None:
        self._comm = comm
        self._options = options
        self._trace = trace
        self.reducer = make_reducer(comm, options)
        dtype = options.precision.reduced_dtype
        self.buckets = [
            Reduced(
                each,
                empty_for_streams(each.chunk.elems, dtype, comm.device),
                torch.zeros(NORM_WORDS, dtype=torch.int64, device=comm.device),
            )
            for each in stored
        ]
        most = max(each.layout.elems for each in stored)
        self._buffers = Buffers(most, options.in_flight, comm.heap_device)
        self._order = list(range(len(self.buckets)))[::-1]
        self._learned = False
        self._filled: list[int] = []
        self._position = 0
        #: See NOTE [What is left over].
        self.has_left_over = False
        self._flying: deque[tuple[Reduced, Tensor, Work | None]] = deque()
        #: Counts reductions, so that what was computed from the shards can be told to be old.
        self.generation = 0
        self.begin()

    def begin_backward(self) -> None:
        """A backward begins that takes along what earlier ones have left."""
        self.has_left_over = False
        self.begin()

    def begin(self) -> None:
        """No bucket has been reduced yet."""
        for bucket in self.buckets:
            bucket.missing = set(range(len(bucket.stored.params)))
            bucket.gone = False
        self._position = 0
        self._filled = []

    # ---- during backward ------------------------------------------------------------------------

    def arrived(self, number: int, index: int) -> None:
        """Parameter ``index`` of a bucket has its gradient of this backward in ``p.grad``."""
        bucket = self.buckets[number]
        if bucket.gone:
            self.has_left_over = True
            return
        bucket.missing.discard(index)
        if bucket.buffer is None and self._is_soon(number):
            bucket.buffer = self._buffers.get(bucket.stored, must=False)
        bucket.take(index)
        if not bucket.missing:
            self._filled.append(number)
            self._advance()

    def _is_soon(self, number: int) -> bool:
        # Those further behind would keep buffers from those whose turn it is.
        window = self._order[self._position : self._position + self._options.in_flight]
        return number in window

    def _advance(self) -> None:
        """Reduces the buckets that are full and whose turn it is."""
        while self._position < len(self._order):
            bucket = self.buckets[self._order[self._position]]
            if bucket.missing:
                return
            self._position += 1
            bucket.gone = True
            self._launch(bucket)

    def end_backward(self) -> None:
        """Reduces all that is left, in order; collective."""
        filled = [*self._filled]
        for bucket in self.buckets:
            bucket.missing.clear()
        self._advance()
        if not self._learned:
            self._learn(filled)
        self.begin()

    def _learn(self, filled: list[int]) -> None:
        """Agrees on the order of rank 0; see NOTE [Order of reductions]."""
        rest = [number for number in self._order if number not in filled]
        order = torch.tensor([*filled, *rest], dtype=torch.int64, device=self._comm.device)
        if len(order):
            self._comm.broadcast(order, 0)
        self._order = order.tolist()
        self._learned = True

    def _launch(self, bucket: Reduced) -> None:
        """Starts one reduction; collective."""
        buffer = bucket.buffer if bucket.buffer is not None else self._buffer_for(bucket)
        bucket.fill_up(buffer)
        for index in bucket.taken:
            bucket.active[index] = True
        bucket.buffer, accumulate = None, bucket.holds
        bucket.taken.clear()
        bucket.holds = True
        self.generation += 1
        self._flying.append((bucket, buffer, self._reduce(bucket, buffer, accumulate)))

    def _reduce(self, bucket: Reduced, buffer: Tensor, accumulate: bool) -> Work | None:
        def run() -> list[Tensor]:
            with self._trace.span("reduce_scatter", buffer.nbytes):
                self._reduce_now(bucket, buffer, accumulate)
            return [bucket.shard]

        if not self._options.overlap:
            run()
        elif not self._comm.launches:
            return self._comm.submit(run, "reduce_scatter_norm")
        elif bucket.shard.dtype is torch.float32:
            return self.reducer.reduce(
                buffer, bucket.shard, "l2", bucket.words, accumulate, async_op=True
            )
        else:
            run()
        return None

    def _reduce_now(self, bucket: Reduced, buffer: Tensor, accumulate: bool) -> None:
        if bucket.shard.dtype is torch.float32:
            self.reducer.reduce(buffer, bucket.shard, "l2", bucket.words, accumulate)
            return
        exact = torch.empty_like(bucket.shard, dtype=torch.float32)
        if accumulate:
            exact.copy_(bucket.shard)
        self.reducer.reduce(buffer, exact, "l2", bucket.words, accumulate)
        bucket.shard.copy_(exact)

    def _buffer_for(self, bucket: Reduced) -> Tensor:
        """A buffer; waits for the oldest reductions where there are enough of them."""
        buffer = self._buffers.get(bucket.stored, must=not self._flying)
        while buffer is None:
            self._land()
            buffer = self._buffers.get(bucket.stored, must=not self._flying)
        return buffer

    def _land(self) -> None:
        """Waits for the oldest reduction."""
        bucket, buffer, work = self._flying.popleft()
        if work is not None:
            with self._trace.span("wait for reduce_scatter", kind="wait"):
                work.wait()
        bucket.version = bucket.shard._version
        self._buffers.give(buffer)

    # ---- at the step ----------------------------------------------------------------------------

    def finish(self) -> list[list[bool]]:
        """All gradients are in the shards when it returns; collective.

        Returns:
            By bucket and parameter: whether this rank has had a gradient for it.
        """
        for number in self._left_over():
            self._launch(self.buckets[number])
        self.has_left_over = False
        self.begin()
        while self._flying:
            self._land()
        for bucket in self.buckets:
            if not bucket.holds:
                bucket.shard.zero_()
        return [bucket.active for bucket in self.buckets]

    def _left_over(self) -> list[int]:
        """The buckets that some rank has unreduced gradients of."""
        mine = [bucket.has_more for bucket in self.buckets]
        # Somebody may have set p.grad by hand.
        if not self.has_left_over and not any(mine):
            return []
        left = torch.tensor(mine, dtype=torch.int32, device=self._comm.device)
        self._comm.all_reduce(left, ReduceOp.MAX)
        return [number for number, has in enumerate(left.tolist()) if has]

    def norm(self, number: int, kind: str, words: Tensor) -> None:
        """Sums a finished shard for the norm; ``words`` int64 [24] is overwritten."""
        bucket = self.buckets[number]
        if kind == "l2" and bucket.holds and bucket.version == bucket.shard._version:
            words.copy_(bucket.words)
        else:
            self.reducer.norm(bucket.shard, kind, words)

    def drop(self) -> None:
        """Forgets all gradients."""
        for bucket in self.buckets:
            bucket.holds = False
            bucket.drop()
            bucket.active = [False] * len(bucket.stored.params)
        self.generation += 1

    def zero(self) -> None:
        """Zeroes all gradients; parameters that had one still have one."""
        self.wait()
        for bucket in self.buckets:
            bucket.drop()
            bucket.shard.zero_()
        self.generation += 1

    def wait(self) -> None:
        """Waits for what is under way."""
        while self._flying:
            self._land()
