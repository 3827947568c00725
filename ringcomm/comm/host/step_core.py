"""The interface of a core on the host for the steps of an optimizer: its collectives on buckets.

``_native.Comm`` has them among ranks on one node, and :class:`ringcomm.comm.nodes.steps.Steps` over
several. A device has no host core: ``_native.DeviceComm`` takes the address of each shard's copy in
device memory, too, and no ``step_bytes``. Triton's kernels are planned by the optimizer itself.

Addresses are of checked memory that stays alive. Dtype, op, norm and algorithm codes are those of
the native module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from ringcomm import _native

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["AdamWAllGather", "ReduceScatterAdamWAllGather", "ReduceScatterNorm", "StepCore"]


class ReduceScatterNorm(NamedTuple):
    """The arguments of :meth:`StepCore.reduce_scatter_norm`.

    Attributes:
        grads: [bucket_elems] of ``dtype``, in the heap.
        bucket_elems: elements of the bucket.
        dtype: dtype code of the gradients.
        op: op code of the reduction.
        out: float32 [chunk elements], the sum of what this rank keeps state for.
        accumulate: add to ``out``.
        kind: norm code.
        words: int64 [24], overwritten with the norm words of this rank's part; 0: no norm.
        algorithm: algorithm code.
        step_bytes: bytes of gradients that the whole step reduces; 0: those of this bucket.
        tag: tells buckets of equal size apart, equal on all ranks; 0: no tag.
    """

    grads: int
    bucket_elems: int
    dtype: int
    op: int
    out: int
    accumulate: bool
    kind: int
    words: int
    algorithm: int
    step_bytes: int
    tag: int


class AdamWAllGather(NamedTuple):
    """The arguments of :meth:`StepCore.adamw_all_gather`.

    Attributes:
        shard: the bucket's parameters, and this rank's state of them.
        grad: [chunk elements] of ``grad_dtype``, the reduced gradient.
        grad_dtype: dtype code: float32, or a dtype of 16 bits.
        algorithm: algorithm code.
        step_bytes: bytes of parameters that the whole step updates; 0: those of this bucket.
    """

    shard: _native.AdamWShard
    grad: int
    grad_dtype: int
    algorithm: int
    step_bytes: int


class ReduceScatterAdamWAllGather(NamedTuple):
    """The arguments of :meth:`StepCore.reduce_scatter_adamw_all_gather`.

    Attributes:
        shard: as of :class:`AdamWAllGather`.
        grads: [bucket elements] of ``grad_dtype``, in the heap.
        grad_dtype: dtype code of the gradients.
        op: op code of the reduction.
        algorithm: algorithm code.
        step_bytes: as of :class:`AdamWAllGather`.
        tag: as of :class:`ReduceScatterNorm`.
    """

    shard: _native.AdamWShard
    grads: int
    grad_dtype: int
    op: int
    algorithm: int
    step_bytes: int
    tag: int


class StepCore(Protocol):
    """The collectives of an optimizer's step, of one rank on the host.

    Arguments are passed by position, in the order of the fields of the named tuples. Calls return
    0, or another status once they have failed, as those of :class:`ringcomm.comm.host.core.Core`.
    """

    def reduce_scatter_norm(self, *arguments: Unpack[ReduceScatterNorm]) -> int:
        """Reduces a bucket's gradients to FP32 chunks, and sums this rank's for the norm."""

    def adamw_all_gather(self, *arguments: Unpack[AdamWAllGather]) -> int:
        """Updates this rank's chunk of the parameters, and gathers the bucket's chunks."""

    def reduce_scatter_adamw_all_gather(
        self, *arguments: Unpack[ReduceScatterAdamWAllGather]
    ) -> int:
        """Reduces gradients, updates with them and gathers, in one call and without a norm."""
