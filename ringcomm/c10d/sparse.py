"""All-reduce of sparse COO tensors, as Gloo has it: sums whose ranks differ in non-zeros."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from ringcomm.comm.communicator import Communicator
from ringcomm.errors import MismatchError, UnsupportedError

__all__ = ["sparse_all_reduce"]

_LONGEST_SHAPE = 64  # dimensions that fit into a header; torch itself stops at 64


def sparse_all_reduce(
    host: Communicator, communicator: Communicator, tensor: Tensor, op: Any
) -> None:
    """Sums a sparse tensor over all ranks, in place; the result is coalesced.

    Three all-gathers: what each rank has, all indices, all values. The sum runs in rank order,
    so all ranks get equal bits.

    Args:
        host: of the group, for what each rank has: the caller needs it on the host.
        communicator: of the tensor's device; may be ``host``.
        tensor: sparse COO, of one shape and dtype on all ranks, with any number of non-zeros.
        op: only SUM.

    Raises:
        UnsupportedError: another op or layout.
        MismatchError: the ranks' tensors differ in shape or in sparse dimensions.
    """
    where = f"allreduce of a sparse tensor on rank {communicator.rank} of {communicator.world_size}"
    if tensor.layout is not torch.sparse_coo or op is not ReduceOp.SUM:
        raise UnsupportedError(
            f"{where}: expected layout torch.sparse_coo and op SUM, got {tensor.layout} and {op}; "
            "convert with tensor.to_sparse_coo(), or reduce tensor.to_dense()"
        )
    with torch.no_grad():
        mine = tensor.detach().coalesce()
        counts = _counts_of_non_zeros(host, mine, where)
        indices = _gathered(communicator, mine.indices().t(), counts)
        values = _gathered(communicator, mine.values(), counts)
        total = torch.sparse_coo_tensor(
            indices[0].t(),
            values[0],
            mine.shape,
            is_coalesced=True,
            check_invariants=False,
            device=mine.device,
        )
        for places, addends in zip(indices[1:], values[1:], strict=True):
            total = total + torch.sparse_coo_tensor(
                places.t(),
                addends,
                mine.shape,
                is_coalesced=True,
                check_invariants=False,
                device=mine.device,
            )
        tensor.copy_(total.coalesce())


def _counts_of_non_zeros(communicator: Communicator, mine: Tensor, where: str) -> list[int]:
    header = torch.zeros(_LONGEST_SHAPE + 3, dtype=torch.int64, device="cpu")
    shape = list(mine.shape)
    header[: len(shape) + 3] = torch.tensor(
        [mine.values().shape[0], mine.sparse_dim(), len(shape), *shape],
        dtype=torch.int64,
        device="cpu",
    )
    headers = header.new_empty(communicator.world_size, len(header))
    communicator.all_gather_into_tensor(headers, header)
    for peer, row in enumerate(headers):
        if not torch.equal(row[1:], header[1:]):
            theirs = row[3 : 3 + int(row[2])].tolist()
            raise MismatchError(
                f"{where}: expected one shape and number of sparse dimensions on all ranks; rank "
                f"{communicator.rank} has {shape} with {mine.sparse_dim()}, rank {peer} has "
                f"{theirs} with {int(row[1])}"
            )
    return [int(count) for count in headers[:, 0]]


def _gathered(communicator: Communicator, rows: Tensor, counts: list[int]) -> list[Tensor]:
    """The rows of every rank, by rank; all but the first dimension are equal."""
    outputs = [rows.new_empty(count, *rows.shape[1:]) for count in counts]
    communicator.all_gather(outputs, rows.contiguous())
    return outputs
