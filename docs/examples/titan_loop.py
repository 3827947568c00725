# SPDX-License-Identifier: Apache-2.0
"""A training loop like torchtitan's: mesh, accumulation, warm-up, checkpoints, resumption.

It imports blocks, their tensor-parallel plan and sequences from gpt_3d.py in the same folder.

torchrun --nproc-per-node 4 docs/examples/titan_loop.py
"""

import torch
import torch.distributed as dist
from gpt_3d import DIM, LENGTH, PLAN, VOCABULARY, Block, make_batch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

import ringcomm
from ringcomm import zero
from ringcomm.zero import Precision, ZeroOptions
from ringcomm.zero.checkpoint import Checkpoints

LAYERS, STEPS, WARMUP, ACCUMULATED, SAVE_EVERY = 2, 8, 2, 2, 4
LEARNING_RATE, MAX_NORM = 1e-2, 1.0


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, DIM), nn.Embedding(LENGTH, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Does the work of torchtitan's parallelize function; zero.shard() replaces fully_shard()."""
    if mesh["tp"].size() > 1:
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], PLAN)
    options = ZeroOptions(precision=Precision.preset("bf16-mixed"))
    return zero.shard(model, stage=3, comm=mesh["dp_shard"], options=options)


def make_batches(step: int, mesh: DeviceMesh) -> list[torch.Tensor]:
    """Returns the micro-batches of this replica."""
    own = make_batch(step).chunk(mesh["dp_shard"].size())[mesh.get_local_rank("dp_shard")]
    return list(own.chunk(ACCUMULATED))


def main(folder: str = "runs/titan", tp: int = 2) -> None:
    dist.init_process_group("ringcomm")
    replicas = dist.get_world_size() // tp
    mesh = init_device_mesh("cpu", (replicas, tp), mesh_dim_names=("dp_shard", "tp"))
    torch.manual_seed(0)
    model = parallelize(Transformer(), mesh)
    optimizer = ringcomm.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))
    begin = 0
    if Checkpoints(folder).latest() is not None:
        loaded = zero.load(folder, model, optimizer)
        begin = loaded.step
        schedule.load_state_dict(loaded.data)
    for step in range(begin, STEPS):
        total = torch.zeros(())
        batches = make_batches(step, mesh)
        for number, tokens in enumerate(batches, 1):
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            loss = loss / ACCUMULATED
            if number < ACCUMULATED:
                with zero.no_sync(model):
                    loss.backward()
            else:
                loss.backward()
            total += loss.detach()
        optimizer.clip_grad_norm_(MAX_NORM)  # clips by the norm over all axes of the mesh
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        dist.all_reduce(total, dist.ReduceOp.AVG, group=mesh.get_group("dp_shard"))
        if dist.get_rank() == 0:
            print(f"step {step:2d} loss {total.item():.6f}", flush=True)
        if (step + 1) % SAVE_EVERY == 0 and step + 1 < STEPS:
            zero.save(folder, step + 1, model, optimizer, data=schedule.state_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
