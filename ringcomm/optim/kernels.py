"""What a step asks of the kernels, so that nothing else knows whose they are."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from ringcomm import _native
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.device_engine import DeviceEngine
from ringcomm.comm.reduce_ops import ALGORITHMS, DTYPE_CODES
from ringcomm.errors import UnsupportedError
from ringcomm.optim.buckets import Bucket
from ringcomm.optim.layout import BLOCK_ELEMS
from ringcomm.optim.options import AdamWOptions
from ringcomm.optim.reducers import Into, Reducer
from ringcomm.optim.table import StepTable

Tensor = torch.Tensor


class Kernels(ABC):
    """The kernels of one optimizer on one rank. Nothing here waits for a device.

    Attributes:
        alone: whether there are no other ranks.
        reducer: what reduces gradients before a step.
    """

    def __init__(self, alone: bool, reducer: Reducer) -> None:
        self.alone = alone
        self.reducer = reducer

    @abstractmethod
    def forget(self) -> None:
        """Tensors of some bucket's state were replaced: addresses must be taken anew."""

    def ready(self) -> None:
        """Called before a step.

        Raises:
            ArgumentError: it cannot be made now; nothing was changed.
        """
        return

    @abstractmethod
    def begin(self, table: StepTable) -> None:
        """Advances the step numbers of active parameters, or counts a skipped step."""

    def end(self) -> None:
        """All buckets were updated."""
        return

    def reduce_norm(self, bucket: Bucket, kind: str, words: Tensor) -> None:
        """Reduces a bucket's gradients to shards, and sums this rank's chunk for the norm.

        Args:
            bucket: its ``grad_shard`` is written, except alone, where ``grads`` are the shard.
            kind: "l2", "l1" or "inf".
            words: int64 [24], overwritten.
        """
        if self.alone:
            self.reducer.norm(bucket.grads, kind, words)
        else:
            self.reducer.reduce(bucket.grads, Into(bucket.ensure_grad_shard(), kind, words))

    def update(self, bucket: Bucket) -> None:
        """After :meth:`reduce_norm` and :meth:`begin`: parameters are updated on all ranks."""
        if self.alone:
            self.update_shard(bucket, bucket.grads)
        else:
            self.update_gather(bucket, bucket.ensure_grad_shard())

    def reduce_update(self, bucket: Bucket) -> None:
        """After :meth:`begin`: the whole step in one pass."""
        if self.alone:
            self.update_shard(bucket, bucket.grads)
        else:
            self.one_pass(bucket, bucket.grads)

    @abstractmethod
    def update_shard(self, bucket: Bucket, grad: Tensor) -> None:
        """Updates what this rank keeps state for, and tells nobody.

        Args:
            bucket: whose parameters are written.
            grad: [chunk elements], reduced.
        """

    @abstractmethod
    def update_gather(self, bucket: Bucket, grad: Tensor) -> None:
        """:meth:`update_shard` whose result goes to all ranks; collective."""

    @abstractmethod
    def one_pass(self, bucket: Bucket, grads: Tensor) -> None:
        """Reduces a bucket's gradients, updates and gathers; collective.

        Args:
            bucket: whose parameters are written.
            grads: [bucket elements], in the heap.
        """


def make_kernels(comm: Communicator | None, options: AdamWOptions, table: StepTable) -> Kernels:
    """The kernels that options and device ask for.

    Args:
        comm: None for a world of one.
        options: what to use.
        table: what :meth:`Kernels.begin` will be called with.

    Raises:
        UnsupportedError: Triton's cannot run here, or the ring's segments are too small.
    """
    if comm is not None and comm.world_size > 1:
        _check_segments(comm, ALGORITHMS[options.algorithm])
    # Not at the top: these modules are built on this one.
    from ringcomm.optim.device_kernels import DeviceKernels
    from ringcomm.optim.host_kernels import HostKernels

    native: Kernels
    if comm is not None and comm.launches:
        native = DeviceKernels(comm, options, table)
    else:
        native = HostKernels(comm, options, table)
    if options.kernels == "native":
        return native
    from ringcomm.optim.triton_kernels import TritonKernels

    return TritonKernels(comm, options, table, native)


def _check_segments(comm: Communicator, algorithm: int) -> None:
    """Refuses a ring whose segments hold no whole block, of which norms are sums."""
    core: _native.Comm | _native.DeviceComm = comm._core
    if isinstance(comm, DeviceEngine):
        core = comm._device_core.native
        algorithm = algorithm or core.family  # what "auto" means there
    segment_bytes, least = core.geometry["segment_bytes"], BLOCK_ELEMS * 4
    if algorithm == ALGORITHMS["ring"] and segment_bytes < least:
        raise UnsupportedError(
            f"optimizer: the ring forms move whole blocks of {BLOCK_ELEMS} elements, so they "
            f"expect CommOptions.segment_bytes >= {least}, got {segment_bytes}"
        )


def shard_of(bucket: Bucket, factors_ptr: int, options: AdamWOptions) -> _native.AdamWShard:
    """What the native kernels know of a bucket and this rank's shard of it."""
    state = bucket.state

    def ptr_of(tensor: Tensor | None) -> int:
        return 0 if tensor is None else tensor.data_ptr()

    return _native.AdamWShard(
        segments=bucket.segments.data_ptr(),
        segment_count=len(bucket.segments),
        factors=factors_ptr,
        bucket_elems=bucket.layout.elems,
        begin=bucket.chunk.begin,
        elems=bucket.chunk.elems,
        master=ptr_of(state.master),
        remainder=ptr_of(state.remainder),
        exp_avg=ptr_of(state.exp_avg),
        exp_avg_sq=ptr_of(state.exp_avg_sq),
        max_exp_avg_sq=ptr_of(state.max_exp_avg_sq),
        params=bucket.params_ptr,
        param_dtype=DTYPE_CODES[bucket.layout.dtype],
        stochastic=options.rounding == "stochastic",
        seed=options.seed,
        bucket=bucket.number,
    )
