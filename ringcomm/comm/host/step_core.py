# SPDX-License-Identifier: Apache-2.0
"""The interface of a host core for the steps of an optimizer: collectives on buckets.

``_native.Comm`` implements it on one node, :class:`ringcomm.comm.nodes.steps.Steps` over several
nodes. Devices use another interface: the methods of ``_native.DeviceComm`` also take the address of
each shard's copy in device memory, but not ``step_bytes``. Triton's kernels are not called through
this interface: the optimizer itself plans them.

Addresses point to checked memory that stays alive. The native module defines the codes of dtypes,
ops, norms and algorithms.
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
        out: float32 [chunk elements], the sum of the elements for which this rank keeps state.
        accumulate: add to ``out``.
        kind: norm code.
        words: int64 [24], overwritten with the norm words of this rank's part; 0: no norm.
        algorithm: algorithm code.
        step_bytes: bytes of gradients that the whole step reduces; 0: the bytes of this bucket.
        tag: distinguishes buckets of equal size, equal on all ranks; 0: no tag.
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
        shard: the bucket's parameters, and this rank's optimizer state for the parameters.
        grad: [chunk elements] of ``grad_dtype``, the reduced gradient.
        grad_dtype: dtype code: float32, or a dtype of 16 bits.
        algorithm: algorithm code.
        step_bytes: bytes of parameters that the whole step updates; 0: the bytes of this bucket.
    """

    shard: _native.AdamWShard
    grad: int
    grad_dtype: int
    algorithm: int
    step_bytes: int


class ReduceScatterAdamWAllGather(NamedTuple):
    """The arguments of :meth:`StepCore.reduce_scatter_adamw_all_gather`.

    Attributes:
        shard: as in :class:`AdamWAllGather`.
        grads: [bucket elements] of ``grad_dtype``, in the heap.
        grad_dtype: dtype code of the gradients.
        op: op code of the reduction.
        algorithm: algorithm code.
        step_bytes: as in :class:`AdamWAllGather`.
        tag: as in :class:`ReduceScatterNorm`.
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
    0, or a nonzero status when they have failed, as in :class:`ringcomm.comm.host.core.Core`.
    """

    def reduce_scatter_norm(self, *arguments: Unpack[ReduceScatterNorm]) -> int:
        """Reduces a bucket's gradients to FP32 chunks; sums the norm words of this rank's chunk."""

    def adamw_all_gather(self, *arguments: Unpack[AdamWAllGather]) -> int:
        """Updates this rank's chunk of the parameters, and gathers the bucket's chunks."""

    def reduce_scatter_adamw_all_gather(
        self, *arguments: Unpack[ReduceScatterAdamWAllGather]
    ) -> int:
        """Reduces gradients, updates parameters and gathers them, in one call without a norm."""
