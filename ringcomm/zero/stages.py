"""What each stage makes of the kernels that work on whole buckets.

Stage 1 takes them as they are: one pass, or two, over parameters and gradients that all ranks have
whole.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ringcomm.comm.communicator import Communicator
from ringcomm.memory.heap import zeros
from ringcomm.optim.buckets import Bucket
from ringcomm.optim.kernels import Kernels
from ringcomm.optim.norms import NORM_WORDS
from ringcomm.optim.reducers import Into, Reducer
from ringcomm.optim.table import StepTable
from ringcomm.zero.reduction import Reduction

Tensor = torch.Tensor


class StageKernels(Kernels):
    """What the stages share: the kernels below, and a reducer that works alone, too."""

    def __init__(self, native: Kernels, reducer: Reducer) -> None:
        super().__init__(native.alone, reducer)
        self._native = native

    def forget(self) -> None:
        self._native.forget()

    def begin(self, table: StepTable) -> None:
        self._native.begin(table)

    def update_shard(self, bucket: Bucket, grad: Tensor) -> None:
        self._native.update_shard(bucket, grad)

    def update_gather(self, bucket: Bucket, grad: Tensor) -> None:
        if self.alone:
            self._native.update_shard(bucket, grad)
        else:
            self._native.update_gather(bucket, grad)

    def one_pass(self, bucket: Bucket, grads: Tensor) -> None:
        self._native.one_pass(bucket, grads)


class RoundedKernels(StageKernels):
    """Stage 1 with the reduced gradient in 16 bits, where the other stages keep it so."""

    def __init__(self, native: Kernels, reducer: Reducer, dtype: torch.dtype) -> None:
        super().__init__(native, reducer)
        self._dtype = dtype
        self._shards: dict[int, Tensor] = {}

    def reduce_norm(self, bucket: Bucket, kind: str, words: Tensor) -> None:
        exact = torch.empty(bucket.chunk.elems, dtype=torch.float32, device=bucket.grads.device)
        self.reducer.reduce(bucket.grads, Into(exact, kind, words))
        self._shards[bucket.number] = exact.to(self._dtype)

    def update(self, bucket: Bucket) -> None:
        self.update_gather(bucket, self._shards.pop(bucket.number))

    def reduce_update(self, bucket: Bucket) -> None:
        self.reduce_norm(bucket, "l2", _new_words(bucket))
        self.update(bucket)


class ReplicatedKernels(StageKernels):
    """Stage 0: an all-reduce, and the whole update on every rank.

    The all-reduce is a reduce-scatter and an all-gather of FP32 sums, bucket by bucket, so that the
    update reads the same bits as at the other stages.
    """

    def __init__(
        self, native: Kernels, reducer: Reducer, comm: Communicator, dtype: torch.dtype
    ) -> None:
        super().__init__(native, reducer)
        self._comm = comm
        self._dtype = dtype
        self._sums: dict[int, Tensor] = {}

    def _sum(self, bucket: Bucket) -> Tensor:
        """dtype [largest chunk elements], in the heap: this rank's chunk of the sum."""
        if bucket.number not in self._sums:
            elems = bucket.layout.chunk(0, self._comm.world_size).elems
            self._sums[bucket.number] = zeros(
                elems, dtype=self._dtype, device=self._comm.heap_device
            )
        return self._sums[bucket.number]

    def reduce_norm(self, bucket: Bucket, kind: str, words: Tensor) -> None:
        chunk = bucket.layout.chunk(self._comm.rank, self._comm.world_size)
        own = self._sum(bucket)[: chunk.elems]
        exact = own
        if self._dtype is not torch.float32:
            exact = torch.empty(chunk.elems, dtype=torch.float32, device=own.device)
        self.reducer.reduce(bucket.grads, Into(exact, kind, words))
        if exact is not own:
            own.copy_(exact)

    def update(self, bucket: Bucket) -> None:
        own = self._sum(bucket)
        whole = torch.empty(
            own.numel() * self._comm.world_size, dtype=self._dtype, device=own.device
        )
        self._comm.all_gather_into_tensor(whole, own)
        self.update_shard(bucket, whole)

    def reduce_update(self, bucket: Bucket) -> None:
        self.reduce_norm(bucket, "l2", _new_words(bucket))
        self.update(bucket)


class ReducedKernels(StageKernels):
    """Stage 2: gradients were reduced while backward ran.

    But for the last ones; see NOTE [Kept for the step] in ``reduction.py``.
    """

    def __init__(self, native: Kernels, reduction: Reduction) -> None:
        super().__init__(native, reduction.reducer)
        self._reduction = reduction

    def end(self) -> None:
        self._reduction.used()

    def reduce_norm(self, bucket: Bucket, kind: str, words: Tensor) -> None:
        self._reduction.norm(bucket.number, kind, words)

    def update(self, bucket: Bucket) -> None:
        self.update_gather(bucket, self._reduction.buckets[bucket.number].shard)

    def reduce_update(self, bucket: Bucket) -> None:
        kept = self._reduction.kept.get(bucket.number)
        if kept is None:
            self.update(bucket)
        elif self.alone:
            self._native.update_shard(bucket, kept[: bucket.chunk.elems])
        else:
            self._native.one_pass(bucket, kept)


class SplitKernels(ReducedKernels):
    """Stage 3: and no rank has more than its chunk of the parameters.

    See NOTE [Gathering is one-sided] in ``stored.py`` for the barriers.
    """

    def __init__(
        self,
        native: Kernels,
        reduction: Reduction,
        comm: Communicator,
        free_all: Callable[[], None],
    ) -> None:
        super().__init__(native, reduction)
        self._comm = comm
        self._free_all = free_all

    def ready(self) -> None:
        self._free_all()

    def begin(self, table: StepTable) -> None:
        self._comm.barrier()
        super().begin(table)

    def update(self, bucket: Bucket) -> None:
        self.update_shard(bucket, self._reduction.buckets[bucket.number].shard)

    def end(self) -> None:
        super().end()
        self._comm.barrier()


def _new_words(bucket: Bucket) -> Tensor:
    return torch.zeros(NORM_WORDS, dtype=torch.int64, device=bucket.grads.device)
