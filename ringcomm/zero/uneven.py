"""Batches of ranks that have different numbers of them.

NOTE [No shadow]
``torch.distributed.algorithms.Join`` has a rank without batches repeat the collectives of the
others. With sharded state these do not tell enough: such a rank goes on updating its shards, so it
has to clip, scale, and follow learning rates as the others do, which they do between collectives.
So the loop itself goes on, on all ranks, and what a rank without batches computes counts nothing.
That needs nothing of a stage, nor of a model's order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch

from ringcomm.c10d.comm_argument import CommArgument, find_communicator
from ringcomm.comm.arguments import ReduceOp
from ringcomm.comm.communicator import Communicator
from ringcomm.errors import ArgumentError, RingcommError, where

Batch = TypeVar("Batch")


def uneven(
    batches: Iterable[Batch],
    *,
    comm: CommArgument = None,
    divide_by_initial_world_size: bool = True,
) -> Iterator[tuple[Batch, float]]:
    """Yields batches until no rank has one left, with a weight for the loss; collective.

    A rank whose batches have ended gets its last one again, with the weight 0. Multiply the loss by
    the weight, and do everything else as ever: ranks run equally many backwards and steps. Ranks
    agree on each batch in one small all-reduce; none may leave the loop alone.

    Args:
        batches: this rank's batches; at least one, unless no rank has any.
        comm: the ranks that share the work, as of :func:`shard`.
        divide_by_initial_world_size: as of ``DistributedDataParallel.join()``. True: the gradient
            is the sum divided by the number of all ranks; a weight is 1 or 0. False: it is the mean
            of the ranks that have batches, whose weight grows as their number falls.

    Raises:
        ArgumentError: on all ranks: one has no batch at all, and others have.
        RingcommError: the batches of another rank raised an exception.
    """
    found = find_communicator(comm, "uneven", None)
    remaining, batch, has_any = iter(batches), None, False
    while True:
        error: BaseException | None = None
        here = False
        try:
            batch = next(remaining)
            here = has_any = True
        except StopIteration:
            pass
        except Exception as raised:
            error = raised
        present = 1 if here else 0
        if found is not None:
            present = _agree(found, here, has_any, error)
        if error is not None:
            raise error
        if not present:
            return
        ranks = 1 if found is None else found.world_size
        share = 1.0 if divide_by_initial_world_size else ranks / present
        yield batch, share if here else 0.0  # type: ignore[misc]


def _agree(comm: Communicator, here: bool, has_any: bool, error: BaseException | None) -> int:
    """Returns how many ranks have a batch; collective."""
    told = torch.tensor([here, not has_any, error is not None], dtype=torch.int64, device="cpu")
    told = told.to(comm.device)
    comm.all_reduce(told, ReduceOp.SUM)
    comm.finish_host_side()
    present, without, failed = told.tolist()
    head = where("uneven", comm.rank, comm.world_size)
    if failed and error is None:
        raise RingcommError(
            f"{head}: the batches of another rank raised an exception, which that rank tells; so "
            "no rank goes on"
        )
    if present and without:
        mine = "this rank has batches" if has_any else "this rank has no batch"
        raise ArgumentError(
            f"{head}: batches: expected at least one on each rank, got none on {without} of "
            f"{comm.world_size} ({mine}); a rank repeats its last batch once it has no more, so "
            "give each rank one"
        )
    return int(present)
