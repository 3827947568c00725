# SPDX-License-Identifier: Apache-2.0
"""A byte-level GPT with a mixture of experts divided over the ranks, and ZeRO over the replicas.

torchrun --nproc-per-node 4 docs/examples/moe_gpt.py
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import ringcomm
from ringcomm.extras import moe

SEQUENCES, LENGTH, VOCABULARY = 16, 32, 128  # all ranks' sequences; 128 ASCII codes
DIM, HEADS, EXPERTS, TOP_K = 32, 4, 8, 2
STEPS, LEARNING_RATE, BALANCE = 20, 1e-2, 0.01
TEXT = torch.tensor(list(Path(__file__).read_bytes()))


class Block(nn.Module):
    """Attention and, instead of an MLP, experts that the ranks of ``group`` divide among them."""

    def __init__(self, group: ringcomm.Communicator) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.norms = nn.ModuleList([nn.LayerNorm(DIM), nn.LayerNorm(DIM)])
        router = nn.Linear(DIM, EXPERTS, bias=False)
        # Every rank initializes all experts, so their values do not depend on the number of ranks.
        experts = [
            nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))
            for _ in range(EXPERTS)
        ]
        here = EXPERTS // group.world_size
        mine = nn.ModuleList(experts[group.rank * here : (group.rank + 1) * here])
        self.moe = moe.MoE(router, mine, group, options=moe.RoutingOptions(top_k=TOP_K))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.mix(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.moe(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self, group: ringcomm.Communicator) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, DIM), nn.Embedding(LENGTH, DIM)
        self.blocks = nn.ModuleList([Block(group) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_model(group: ringcomm.Communicator) -> GPT:
    torch.manual_seed(0)
    return GPT(group)


def make_batch(step: int) -> torch.Tensor:
    """Returns the sequences of a step: random pieces of this source file."""
    generator = torch.Generator().manual_seed(step)
    begins = torch.randint(len(TEXT) - LENGTH, (SEQUENCES,), generator=generator)
    return torch.stack([TEXT[begin : begin + LENGTH + 1] for begin in begins.tolist()])


def losses_of(model: GPT, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the loss of the text, and the auxiliary loss that balances the experts."""
    out = model(tokens[:, :-1])
    auxiliary = sum(block.moe.auxiliary_loss for block in model.blocks)
    return F.cross_entropy(out.flatten(0, 1), tokens[:, 1:].flatten()), BALANCE * auxiliary


def main() -> None:
    dist.init_process_group("ringcomm")
    mesh = ringcomm.Mesh(dp=-1, ep=2)
    model = make_model(mesh["ep"].get_group().communicator)
    for block in model.blocks:
        block.moe.counted_over = dist.group.WORLD  # balance over the tokens of all ranks
    moe.shard(model, stage=2, mesh=mesh)
    optimizer = moe.Optimizer(model, lambda params: ringcomm.optim.AdamW(params, lr=LEARNING_RATE))
    for step in range(STEPS):
        tokens = make_batch(step).chunk(dist.get_world_size())[dist.get_rank()]
        loss, auxiliary = losses_of(model, tokens)
        (loss + auxiliary).backward()
        optimizer.clip_grad_norm_(1.0)  # clips by the norm over dense layers and experts
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        if dist.get_rank() == 0:
            print(f"step {step:2d} loss {mean.item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
