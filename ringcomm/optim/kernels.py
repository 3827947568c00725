"""What a step asks of the kernels, so that nothing else knows whose they are."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from ringcomm.comm.communicator import Communicator
from ringcomm.errors import UnsupportedError
from ringcomm.optim.buckets import Bucket
from ringcomm.optim.options import AdamWOptions
from ringcomm.optim.table import StepTable

Tensor = torch.Tensor


class Kernels(ABC):
    """The kernels of one optimizer on one rank. Nothing here waits for a device."""

    @abstractmethod
    def forget(self) -> None:
        """Tensors of some bucket's state were replaced: addresses must be taken anew."""

    @abstractmethod
    def begin(self, table: StepTable) -> None:
        """Advances the step numbers of active parameters, or counts a skipped step."""

    @abstractmethod
    def reduce_norm(self, bucket: Bucket, kind: str, words: Tensor) -> None:
        """Reduces a bucket's gradients to shards, and sums this rank's chunk for the norm.

        Args:
            bucket: its ``grad_shard`` is written, except alone, where ``grads`` are the shard.
            kind: "l2", "l1" or "inf".
            words: int64 [24], overwritten.
        """

    @abstractmethod
    def update(self, bucket: Bucket) -> None:
        """After :meth:`reduce_norm` and :meth:`begin`: parameters are updated on all ranks."""

    @abstractmethod
    def reduce_update(self, bucket: Bucket) -> None:
        """After :meth:`begin`: the whole step in one pass."""


def make_kernels(comm: Communicator | None, options: AdamWOptions, table: StepTable) -> Kernels:
    """The kernels that options and device ask for.

    Args:
        comm: None for a world of one.
        options: what to use.
        table: what :meth:`Kernels.begin` will be called with.

    Raises:
        UnsupportedError: there are none.
    """
    device = table.control.device
    if options.kernels != "native" or device.type != "cpu":
        raise UnsupportedError(
            f"optimizer: there are no {options.kernels} kernels for parameters on {device} yet; "
            'use kernels="native" and parameters on the CPU'
        )
    # Not at the top: that module is built on this one.
    from ringcomm.optim.host_kernels import HostKernels

    return HostKernels(comm, options, table)
