# SPDX-License-Identifier: Apache-2.0
"""Training that survives a lost rank: torchrun starts all ranks again, and they resume.

torchrun --standalone --nproc-per-node 2 --max-restarts 3 docs/examples/elastic.py runs/a

Over several nodes the folder must be on a file system that all nodes share.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from ringcomm import Communicator, zero
from ringcomm.c10d.process_group import ProcessGroup
from ringcomm.optim import AdamW
from ringcomm.zero.checkpoint import Checkpoints


def connect(use_group: bool) -> Communicator:
    """Returns the ranks of this attempt, once all of them have started."""
    if not use_group:
        return Communicator.from_env(timeout=60)
    dist.init_process_group("ringcomm")
    group = dist.group.WORLD
    assert isinstance(group, ProcessGroup)
    return group.communicator


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="of the checkpoints")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--group", action="store_true", help="use torch's default group")
    options = parser.parse_args()
    comm = connect(options.group)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    zero.shard(model, stage=2, comm=comm)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    begin = 0
    if Checkpoints(options.folder).latest() is not None:
        begin = zero.load(options.folder, model, optimizer).step
    print(f"rank {comm.rank} begins at step {begin}", flush=True)
    loss = torch.zeros(())
    for step in range(begin, options.steps):
        # The data of a rank depend on the step, and not on the attempt.
        batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(97 * step + comm.rank))
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 2 == 0:
            zero.save(options.folder, step + 1, model, optimizer)
    state = zero.full_state_dict(model)
    if comm.rank == 0:
        torch.save({**state, "loss": loss.detach()}, options.folder / "final.pt")
    comm.close()


if __name__ == "__main__":
    main()
