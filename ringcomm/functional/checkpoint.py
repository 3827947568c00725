# SPDX-License-Identifier: Apache-2.0
"""Activation checkpoints whose saved inputs are divided among the ranks of a tensor-parallel group.

Under tensor parallelism every rank of the group has the same inputs of a layer. A checkpoint keeps
the inputs until backward, and then computes the layer again; here each of W ranks keeps 1 / W of
the inputs, and they are gathered when backward reaches the layer. Rajbhandari et al., "ZeRO: Memory
Optimizations Toward Training Trillion Parameter Models" (SC'20), section 6.1, calls this P_a.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from ringcomm.comm.communicator import Communicator
from ringcomm.comm.functions import Group, communicator_of
from ringcomm.errors import ArgumentError, MismatchError, where
from ringcomm.functional.collectives import named, not_traced, refuse_transforms

Tensor = torch.Tensor

_OPERATION = named("partitioned_checkpoint")
_WITHOUT_TRANSFORMS = (
    "call the function itself there, or torch.utils.checkpoint.checkpoint(use_reentrant=False)"
)
# Maps an element size in bytes to the integer dtype in which a checksum sums the elements' bits.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@not_traced("a graph has checkpoints of its own; put it around compiled functions")
def partitioned_checkpoint(
    function: Callable[..., Any],
    *args: Any,
    group: Group,
    preserve_rng_state: bool = True,
) -> Any:
    """Calls ``function(*args)``, and again in backward; each of W ranks keeps 1 / W of the inputs.

    Otherwise equal to ``torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=True)``.
    All ranks of the group must call this function with the same tensors, and their backwards must
    reach the checkpoints in the same order.

    Args:
        function: returns a tensor or a tuple of tensors.
        args: the function's arguments. Floating-point tensors with at least as many elements as
            ranks are divided; each must have the same bits on all ranks.
        group: the tensor-parallel ranks, which have the same activations; a group of one rank
            keeps everything, as torch's checkpoint does.
        preserve_rng_state: see torch's function.

    Raises:
        ArgumentError: ``group`` is None.
        MismatchError: in backward, on the host, if a tensor did not have the same bits on all
            ranks.
        UnsupportedError: a transform of ``torch.func`` is active, or a tensor has a tangent.
        RingcommError: a fault; see ``ringcomm.errors``.
    """
    if group is None:
        raise ArgumentError(
            f"{_OPERATION}: group: expected the tensor-parallel ranks, such as mesh['tp'], which "
            "have the same activations, got None. Data-parallel ranks have different "
            "activations, which cannot be divided: use torch.utils.checkpoint there"
        )
    comm = communicator_of(group, _OPERATION)
    refuse_transforms(_OPERATION, _WITHOUT_TRANSFORMS, *args)
    with saved_tensors_hooks(partial(_keep, comm), _bring):
        return checkpoint(
            function, *args, use_reentrant=True, preserve_rng_state=preserve_rng_state
        )


@dataclass(frozen=True)
class _KeptShare:
    """The shard of a tensor that this rank keeps until backward.

    Attributes:
        comm: the communicator of the ranks that have the other shards.
        shard: [ceil(elements / W)]; zeros fill the places after the tensor's last element.
        shape: shape of the tensor.
        checksum: sum of the tensor's bits; None on a device, where the host would have to wait.
    """

    comm: Communicator
    shard: Tensor
    shape: torch.Size
    checksum: Tensor | None


def _keep(comm: Communicator, tensor: Tensor) -> Tensor | _KeptShare:
    world_size = comm.world_size
    if world_size == 1 or not tensor.is_floating_point() or tensor.numel() < world_size:
        return tensor
    flat = tensor.detach().reshape(-1)
    each = -(-flat.numel() // world_size)
    own = flat[comm.rank * each : (comm.rank + 1) * each]
    shard = flat.new_zeros(each)
    shard[: own.numel()] = own
    return _KeptShare(comm, shard, tensor.shape, None if comm.launches else _checksum(flat))


def _bring(kept: Tensor | _KeptShare) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    comm = kept.comm
    everyone = kept.shard.new_empty(comm.world_size * kept.shard.numel())
    comm.all_gather_into_tensor(everyone, kept.shard)
    flat = everyone[: kept.shape.numel()]
    if kept.checksum is not None and not torch.equal(_checksum(flat), kept.checksum):
        raise MismatchError(
            f"{where(_OPERATION, comm.rank, comm.world_size)}: expected a tensor "
            f"{list(kept.shape)} with the same bits on all ranks, got one that differs between "
            "ranks. Pass the group of tensor-parallel ranks, and only tensors that all of them "
            "have; sequence-parallel parts differ"
        )
    return flat.view(kept.shape)


def _checksum(flat: Tensor) -> Tensor:
    """Returns the sum of the elements' bits, read as integers: an int64 tensor, modulo 2^64."""
    return flat.view(_BITS[flat.element_size()]).sum(dtype=torch.int64)
