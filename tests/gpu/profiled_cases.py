# SPDX-License-Identifier: Apache-2.0
"""Runs the kernels with the important loops twice each, for a profiler, all ranks in one launch.

``make gpu-check`` runs this program under ncu, with the bytes of a rank's buffer as the argument.
The exit status is 1 when a sum is wrong.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

import ringcomm
from ringcomm.optim import AdamW, AdamWOptions
from tests.gpu import device
from tests.gpu.device import DEVICE
from tests.gpu.worlds import OrderedWorld

WORLDS = (2, 8)
SMALL_BYTES = 64 << 10
CALLS = 2
_HEAP_SLACK_BYTES = 1 << 30


def collectives(world: Any, elems: int) -> None:
    ranks = len(world)
    wholes = [ringcomm.zeros(elems, device=DEVICE) for _ in range(ranks)]
    chunks = [ringcomm.zeros(elems // ranks, device=DEVICE) for _ in range(ranks)]
    for rank, whole in enumerate(wholes):
        whole.fill_(rank + 1.0)
    for _ in range(CALLS):
        world.reduce_scatter_tensor(chunks, wholes, algorithm="one_shot")
    device.synchronize()
    total = ranks * (ranks + 1) / 2
    if any(bool((chunk != total).any()) for chunk in chunks):
        raise SystemExit(f"reduce_scatter of {ranks} ranks: expected {total} everywhere")
    if ranks == WORLDS[0]:
        for _ in range(CALLS):
            world.all_gather_into_tensor(wholes, chunks, algorithm="one_shot")


def step(comm: Any, elems: int, clip: bool) -> None:
    """Takes optimizer steps in one pass, or with ``clip`` first the norm, which sums gradients."""
    param = torch.nn.Parameter(ringcomm.zeros(elems, dtype=torch.bfloat16, device=DEVICE))
    param.grad = torch.ones_like(param)
    optimizer = AdamW([param], comm=comm, options=AdamWOptions(bucket_elems=elems))
    for _ in range(CALLS):
        if clip:
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()


def run(size_bytes: int) -> None:
    # Per rank: two buffers for collectives, and half of that for each of two optimizers.
    heap_bytes = 4 * max(WORLDS) * size_bytes + _HEAP_SLACK_BYTES

    def make(ranks: int) -> Any:
        return OrderedWorld(ringcomm.local_world(ranks, device=DEVICE, heap_bytes=heap_bytes))

    for ranks in WORLDS:
        with make(ranks) as world:
            collectives(world, size_bytes // 4)
            world.run(step, size_bytes // 2, False)
            if ranks == WORLDS[-1]:
                world.run(step, size_bytes // 2, True)
            device.synchronize()
    with make(1) as alone:
        step(alone[0], size_bytes // 2, False)
        device.synchronize()


if __name__ == "__main__":
    with device.in_use(), device.ordered():
        run(int(sys.argv[1]) if sys.argv[1:] else SMALL_BYTES)
