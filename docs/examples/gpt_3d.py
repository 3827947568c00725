# SPDX-License-Identifier: Apache-2.0
"""A GPT in two pipeline stages, each under tensor parallelism, with ZeRO over the replicas.

torchrun --nproc-per-node 8 docs/examples/gpt_3d.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import ringcomm
from ringcomm import zero

SEQUENCES, LENGTH, VOCABULARY = 16, 16, 32  # sequences of all ranks together
DIM, HEAD_DIM = 32, 8
STAGES, MICRO_BATCHES, STEPS, LEARNING_RATE = 2, 4, 15, 1e-2
COLUMNS, ROWS = ColwiseParallel(), RowwiseParallel()
PLAN = {"q": COLUMNS, "k": COLUMNS, "v": COLUMNS, "o": ROWS, "up": COLUMNS, "down": ROWS}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM) for _ in range(4))
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
        self.norms = nn.ModuleList([nn.LayerNorm(DIM), nn.LayerNorm(DIM)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norms[0](x)
        # The number of heads follows from the tensor, since this rank has only some of the heads.
        heads = [
            f(h).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for f in (self.q, self.k, self.v)
        ]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.o(mixed)
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, DIM), nn.Embedding(LENGTH, DIM)
        self.block = Block()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = self.position(torch.arange(tokens.shape[1]))
        return self.block(self.embed(tokens) + positions)


def make_stages() -> list[nn.Module]:
    torch.manual_seed(0)
    last = nn.Sequential()
    last.block, last.norm, last.head = Block(), nn.LayerNorm(DIM), nn.Linear(DIM, VOCABULARY)
    return [First(), last]


def make_batch(step: int) -> torch.Tensor:
    """Returns the sequences of a step; each counts up from a random token."""
    first = torch.randint(VOCABULARY, (SEQUENCES, 1), generator=torch.Generator().manual_seed(step))
    return (first + torch.arange(LENGTH + 1)) % VOCABULARY


def loss_of(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out.flatten(0, 1), target.flatten())


def main() -> None:
    dist.init_process_group("ringcomm")
    mesh = ringcomm.Mesh(pp=STAGES, dp=-1, tp=2)
    number, replica = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    module = make_stages()[number]
    parallelize_module(module.block, mesh["tp"], PLAN)
    zero.shard(module, stage=2, mesh=mesh)
    optimizer = ringcomm.optim.AdamW(module.parameters(), lr=LEARNING_RATE)
    device, group = torch.device("cpu"), mesh.get_group("pp")
    stage = PipelineStage(module, number, STAGES, device, group=group)
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_of)
    for step in range(STEPS):
        tokens = make_batch(step).chunk(mesh["dp"].size())[replica]
        losses: list[torch.Tensor] = []
        if stage.is_first:
            schedule.step(tokens[:, :-1])
        else:
            schedule.step(target=tokens[:, 1:], losses=losses)
            mean = torch.stack(losses).detach().mean()
            dist.all_reduce(mean, dist.ReduceOp.AVG, group=mesh.get_group("dp"))
            if dist.get_rank() == dist.get_world_size() - 1:
                print(f"step {step:2d} loss {mean.item():.6f}", flush=True)
        optimizer.clip_grad_norm_(1.0)  # clips by the norm over both stages
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
