"""One rank of the doctor's self-test: ``python -m ringcomm.cli.doctor_rank STORE RANK``."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

import ringcomm

WORLD = 2
COUNT_ELEMS = 100_003  # several segments and a tail
TIMEOUT_S = 30.0


def run(store_path: str, rank: int) -> None:
    """Raises ``RuntimeError`` where a result is wrong, ``RingcommError`` where a call fails."""
    store = dist.FileStore(store_path, WORLD)
    with ringcomm.Communicator.from_store(store, rank, WORLD, timeout=TIMEOUT_S) as communicator:
        for allocate in (torch.empty, ringcomm.empty):
            data = allocate(COUNT_ELEMS * WORLD, dtype=torch.float32)
            shard = allocate(COUNT_ELEMS, dtype=torch.float32)
            index = torch.arange(COUNT_ELEMS * WORLD).remainder(97).float()
            data.copy_(index + rank)
            communicator.reduce_scatter_tensor(shard, data)
            communicator.all_reduce(data)
            expected = WORLD * index + WORLD * (WORLD - 1) // 2
            _require(torch.equal(data, expected), "all_reduce")
            own = expected[rank * COUNT_ELEMS : (rank + 1) * COUNT_ELEMS]
            _require(torch.equal(shard, own), "reduce_scatter_tensor")
        communicator.barrier()


def _require(right: bool, operation: str) -> None:
    if not right:
        raise RuntimeError(f"{operation} returned a wrong result")


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]))
