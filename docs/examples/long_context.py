# SPDX-License-Identifier: Apache-2.0
"""Training on one long sequence, of which each rank has a part: ring attention.

torchrun --nproc-per-node 4 docs/examples/long_context.py
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import ringcomm
from ringcomm import functional

LENGTH, VOCABULARY, NAMES = 64, 32, 8  # LENGTH: tokens on all ranks together
DIM, HEADS = 32, 4
STEPS, LEARNING_RATE = 40, 1e-2
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Applies rotary embeddings (RoPE) to heads [batch, heads, tokens, dim], by positions."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * 1000.0 ** (-torch.arange(half) / half)
    a, b = x.chunk(2, dim=-1)
    sin, cos = angles.sin(), angles.cos()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, VOCABULARY)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attention
    ) -> torch.Tensor:
        x = self.embed(tokens)
        heads = self.qkv(x).unflatten(-1, (3, HEADS, -1)).movedim(-3, 0).transpose(-3, -2)
        query, key, value = heads
        mixed = attend(rotated(query, positions), rotated(key, positions), value)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return self.head(x + self.down(F.gelu(self.up(x))))


def make_model() -> Model:
    torch.manual_seed(0)
    return Model()


def make_batch(step: int) -> torch.Tensor:
    """Returns sequences whose first token, which the model must recall later, is below NAMES."""
    draw = torch.Generator().manual_seed(step)
    tokens = torch.randint(NAMES, VOCABULARY, (16, LENGTH), generator=draw)
    tokens[:, 0] = torch.randint(NAMES, (16,), generator=draw)
    return tokens


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    names = tokens[:, :1].expand(logits.shape[:2])
    return F.cross_entropy(logits.flatten(0, 1), names.flatten())


def main() -> None:
    dist.init_process_group("ringcomm")
    mesh = ringcomm.Mesh(cp=-1)
    ring = mesh["cp"].get_group().communicator
    at = functional.context_positions(LENGTH, ring, zigzag=True)  # positions of this rank's tokens

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return functional.ring_attention(query, key, value, ring, is_causal=True, zigzag=True)

    model = make_model()
    # The gradient of the mean over all tokens is the mean of the ranks' gradients.
    optimizer = ringcomm.optim.AdamW(model.parameters(), lr=LEARNING_RATE, mesh=mesh)
    for step in range(STEPS):
        tokens = make_batch(step)
        loss = loss_of(model(tokens[:, at], at, attend), tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        if dist.get_rank() == 0:
            print(f"step {step:2d} loss {mean.item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
