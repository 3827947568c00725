# SPDX-License-Identifier: Apache-2.0
"""torch's FSDP2 and tensor parallelism, on the backend "ringcomm".

torchrun --nproc-per-node 4 docs/examples/fsdp2_tp.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def main(backend: str = "ringcomm") -> None:
    dist.init_process_group(backend)
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(32, 1))
    for block in model[:2]:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    # The ranks of a tensor-parallel group have the same data.
    draw = torch.Generator().manual_seed(mesh.get_local_rank("dp"))
    x = torch.randn(16, 32, generator=draw)
    for step in range(30):
        loss = F.mse_loss(model(x), x.sum(dim=1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.SUM, group=mesh.get_group("dp"))
        if dist.get_rank() == 0:
            print(f"step {step:2d} loss {mean.item() / mesh.size(0):.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
