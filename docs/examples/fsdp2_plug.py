# SPDX-License-Identifier: Apache-2.0
"""FSDP2 on ringcomm, with its buffers in ringcomm's heap.

torchrun --nproc-per-node 2 docs/examples/fsdp2_plug.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ringcomm


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x.mean(dim=1))
        return out


def main(backend: str = "ringcomm") -> None:
    dist.init_process_group(backend)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Model()
    mesh = init_device_mesh("cpu", (world_size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    ringcomm.extras.fsdp2.plug(model)  # on a mesh of any backend
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(30):
        x = torch.randn(16, 8, 32, generator=torch.Generator().manual_seed(100 * step + rank))
        loss = nn.functional.mse_loss(model(x), x.mean(dim=1).sum(dim=1, keepdim=True))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        if rank == 0:
            print(f"step {step:2d} loss {mean.item():.6f}", flush=True)
    ringcomm.extras.fsdp2.unplug(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
