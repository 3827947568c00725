"""The kernels of the stages: the native ones, adapted to where parameters and gradients are."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from ringcomm.comm.communicator import Communicator
from ringcomm.comm.work import Work
from ringcomm.memory import zeros
from ringcomm.memory.disk_chunks import DiskChunks
from ringcomm.optim.buckets import Bucket, empty_for_streams
from ringcomm.optim.kernels import FOUND_INF, Kernels, StepTable
from ringcomm.optim.owners import OwnerKernels
from ringcomm.optim.reduction import NORM_WORDS, Into, Reducer
from ringcomm.optim.tiers import takes_step
from ringcomm.zero.buckets import ShardedBucket
from ringcomm.zero.disk_buckets import expect
from ringcomm.zero.engine import ShardEngine
from ringcomm.zero.precision import Precision
from ringcomm.zero.reduce import Reduction

Tensor = torch.Tensor

# Stage 1 uses the native kernels as they are, for parameters and gradients that all ranks have
# whole. The classes below adapt them to the other stages.


class StageKernels(Kernels):
    """The base of the stages' kernels: native kernels, with a reducer for a world of one too."""

    def __init__(self, native: Kernels, reducer: Reducer) -> None:
        super().__init__(native.alone, reducer)
        self._native = native

    def forget(self) -> None:
        self._native.forget()

    def begin(self, table: StepTable) -> None:
        self._native.begin(table)

    def update_shard(self, bucket: Bucket, grad: Tensor) -> None:
        self._native.update_shard(bucket, grad)

    def end(self) -> None:
        self._native.end()

    def update_gather(self, bucket: Bucket, grad: Tensor) -> None:
        if self.alone:
            self._native.update_shard(bucket, grad)
        else:
            self._native.update_gather(bucket, grad)

    def one_pass(self, bucket: Bucket, grads: Tensor) -> None:
        self._native.one_pass(bucket, grads)


class RoundedKernels(StageKernels):
    """The kernels of stage 1 with the reduced gradient rounded to 16 bits, as at other stages."""

    def __init__(self, native: Kernels, reducer: Reducer, precision: Precision) -> None:
        super().__init__(native, reducer)
        self._precision = precision
        self._shards: dict[int, Tensor] = {}

    def reduce_norm(self, bucket: Bucket, kind: str, words: Tensor) -> None:
        exact = torch.empty(bucket.chunk.elems, dtype=torch.float32, device=bucket.grads.device)
        self.reducer.reduce(bucket.grads, Into(exact, kind, words, residual=bucket.residual))
        dtype = self._precision.reduced_dtype(bucket.layout.dtype)
        self._shards[bucket.number] = exact.to(dtype)

    def reduced(self, bucket: Bucket) -> Tensor:
        return self._shards[bucket.number]

    def update(self, bucket: Bucket) -> None:
        self.update_gather(bucket, self._shards.pop(bucket.number))

    def reduce_update(self, bucket: Bucket) -> None:
        self.reduce_norm(bucket, "l2", _new_words(bucket))
        self.update(bucket)


class ReplicatedKernels(StageKernels):
    """The kernels of stage 0: an all-reduce, and the whole update on every rank.

    The all-reduce is a reduce-scatter and an all-gather of FP32 sums, bucket by bucket, so that the
    update reads the same bits as at the other stages.
    """

    def __init__(
        self, native: Kernels, reducer: Reducer, comm: Communicator, precision: Precision
    ) -> None:
        super().__init__(native, reducer)
        self._comm = comm
        self._precision = precision
        self._sums: dict[int, Tensor] = {}

    def _sum(self, bucket: Bucket) -> Tensor:
        """Returns this rank's chunk of the sum: [largest chunk elements], in the heap."""
        if bucket.number not in self._sums:
            elems = bucket.layout.chunk(0, self._comm.world_size).elems
            dtype = self._precision.reduced_dtype(bucket.layout.dtype)
            self._sums[bucket.number] = zeros(elems, dtype=dtype, device=self._comm.heap_device)
        return self._sums[bucket.number]

    def reduced(self, bucket: Bucket) -> Tensor:
        chunk = bucket.layout.chunk(self._comm.shard_index, self._comm.world_size)
        return self._sum(bucket)[: chunk.elems]

    def reduce_norm(self, bucket: Bucket, kind: str, words: Tensor) -> None:
        own = self.reduced(bucket)
        exact = own
        if own.dtype is not torch.float32:
            exact = torch.empty_like(own, dtype=torch.float32)
        self.reducer.reduce(bucket.grads, Into(exact, kind, words, residual=bucket.residual))
        if exact is not own:
            own.copy_(exact)

    def update(self, bucket: Bucket) -> None:
        own = self._sum(bucket)
        world = self._comm.world_size
        whole = torch.empty(own.numel() * world, dtype=own.dtype, device=own.device)
        if self._comm.num_nodes == 1:
            self._comm.all_gather_into_tensor(whole, own)
        else:
            parts = whole.chunk(world)
            indices = map(self._comm.shard_index_of, range(world))
            self._comm.all_gather([parts[index] for index in indices], own)
        self.update_shard(bucket, whole)

    def reduce_update(self, bucket: Bucket) -> None:
        self.reduce_norm(bucket, "l2", _new_words(bucket))
        self.update(bucket)


class ReducedKernels(StageKernels):
    """The kernels of stage 2, where all gradients but the last ones were reduced in backward.

    See NOTE [Kept for the step] in ``zero/reduce.py`` for the last ones.
    """

    def __init__(self, native: Kernels, reduction: Reduction) -> None:
        super().__init__(native, reduction.reducer)
        self._reduction = reduction
        # float32 [elements of the largest chunk so far], for gradients of one bucket at a time.
        self._own: Tensor | None = None

    def end(self) -> None:
        super().end()
        self._reduction.used()

    def reduce_norm(self, bucket: Bucket, kind: str, words: Tensor) -> None:
        self._reduction.norm(bucket.number, kind, words)

    def reduced(self, bucket: Bucket) -> Tensor:
        self._reduction.settle()
        self._reduction.wait()
        return self._reduction.buckets[bucket.number].shard

    def update(self, bucket: Bucket) -> None:
        self.update_gather(bucket, self._reduction.buckets[bucket.number].shard)

    def reduce_update(self, bucket: Bucket) -> None:
        kept = self._reduction.kept.get(bucket.number)
        if kept is None:
            self.update(bucket)
        else:
            self._native.reduce_update_from(bucket, kept)

    def reduce_update_from(self, bucket: Bucket, grads: Tensor) -> None:
        if self._reduction.buckets[bucket.number].shard.dtype is torch.float32:
            self._native.reduce_update_from(bucket, grads)
        else:
            self.update_gather(bucket, self.reduce_now(bucket, grads))

    def reduce_now(self, bucket: Bucket, grads: Tensor) -> Tensor:
        """Returns what :meth:`reduced` would, of gradients that no shard keeps; collective.

        Its memory is that of all buckets, used in turn.
        """
        elems = bucket.chunk.elems
        if self._own is None or self._own.numel() < elems:
            self._own = empty_for_streams(elems, torch.float32, grads.device)
        own = self._own[:elems]
        into = Into(own, "l2", None, tag=bucket.tag(), residual=bucket.residual)
        self.reducer.reduce(grads, into)
        return own.to(self._reduction.buckets[bucket.number].shard.dtype)


class SplitKernels(ReducedKernels):
    """The kernels of stage 3, where no rank has more than its chunk of the parameters either.

    See NOTE [Gathering is one-sided] in ``zero/buckets.py`` for the barriers.
    """

    def __init__(
        self,
        native: Kernels,
        reduction: Reduction,
        comm: Communicator,
        free_all: Callable[[], None],
        overlap: bool,
    ) -> None:
        super().__init__(native, reduction)
        self._comm = comm
        self._free_all = free_all
        self._overlap = overlap
        self._sharing: list[Work] = []

    def ready(self) -> None:
        self._free_all()

    def begin(self, table: StepTable) -> None:
        # In backward the reduction of each bucket takes the barrier's place.
        if self._reduction.updates is None:
            self._sharing.clear()
            self._comm.barrier()
        super().begin(table)

    def update(self, bucket: Bucket) -> None:
        reduced = self._reduction.buckets[bucket.number]
        assert isinstance(reduced.stored, ShardedBucket)
        self.update_shard(bucket, reduced.shard)
        # What is behind computation on a thread of its own is waited for in end().
        work = reduced.stored.settle(async_op=self._overlap)
        if work is not None:
            self._sharing.append(work)

    def reduce_update_from(self, bucket: Bucket, grads: Tensor) -> None:
        self.update_shard(bucket, self.reduce_now(bucket, grads))
        bucket.share()

    def end(self) -> None:
        super().end()
        while self._sharing:
            self._sharing.pop(0).wait()
        self._comm.barrier()


class DiskKernels(SplitKernels):
    """The kernels of stage 3 with parameters on a disk, whose chunks stream through memory.

    Args:
        native, reduction: as of :class:`ReducedKernels`.
        engine: whose parameters they are.
        store: the disk.
    """

    def __init__(
        self, native: Kernels, reduction: Reduction, engine: ShardEngine, store: DiskChunks
    ) -> None:
        overlap = engine.options.overlap is True
        super().__init__(native, reduction, engine.comm, engine.free_for_step, overlap)
        self._engine = weakref.ref(engine)
        self._store = store
        # Owners' kernels bring parameters themselves, once they have computed.
        self._brings = not isinstance(native, OwnerKernels)
        self._skips = False
        self._active: list[float] = []

    def ready(self) -> None:
        self._store.raise_fault()
        super().ready()

    def begin(self, table: StepTable) -> None:
        self._skips = bool(table.control[FOUND_INF])
        super().begin(table)
        self._active = table.active.tolist()

    def update_shard(self, bucket: Bucket, grad: Tensor) -> None:
        if self._skips or not self._brings:
            with self._store.keeping_faults():
                super().update_shard(bucket, grad)
            return
        anew = self._writes_anew(bucket)
        if not anew:
            following = self._reduction.buckets[bucket.number :]
            expect(self._store, (each.stored for each in following))
        changes = takes_step(bucket.layout, bucket.chunk, self._active)
        # The others wait for this rank's calls, and the step's end tells them.
        with self._store.keeping_faults(), bucket.params_here(write=changes, anew=anew):
            super().update_shard(bucket, grad)

    def _writes_anew(self, bucket: Bucket) -> bool:
        """Tells whether a chunk's parameters all become what their FP32 masters round to."""
        if bucket.state.master is None:
            return False
        steps = {each.begin for each in bucket.layout.segments if self._active[each.param]}
        chunk = bucket.chunk
        return all(
            each.begin in steps
            for each in self._reduction.buckets[bucket.number].stored.params
            if each.begin < chunk.end and chunk.begin < each.end
        )

    def end(self) -> None:
        with self._store.keeping_faults():
            super().end()
        engine = self._engine()
        if engine is not None and engine.gatherer is not None:
            engine.gatherer.expect_first()


def _new_words(bucket: Bucket) -> Tensor:
    return torch.zeros(NORM_WORDS, dtype=torch.int64, device=bucket.grads.device)
