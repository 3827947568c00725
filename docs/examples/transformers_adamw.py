# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face model trained with ringcomm's AdamW, whose state is sharded over the ranks.

torchrun --nproc-per-node 2 docs/examples/transformers_adamw.py
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import ringcomm

SEQUENCES = 8  # of all ranks together
LENGTH = 32
VOCABULARY = 64
STEPS = 30
LEARNING_RATE = 3e-3


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    return LlamaForCausalLM(config)  # from a configuration: nothing is downloaded


def make_batch(step: int, rank: int, world_size: int) -> torch.Tensor:
    """Returns this rank's sequences of a step; each counts up from a random token."""
    numbers = torch.Generator().manual_seed(step)
    first = torch.randint(VOCABULARY, (SEQUENCES, 1), generator=numbers)
    tokens = (first + torch.arange(LENGTH)) % VOCABULARY
    return tokens[rank::world_size]


def main() -> None:
    ringcomm.init_process_group()
    rank, world_size = ringcomm.get_rank(), ringcomm.get_world_size()
    model = make_model()
    optimizer = ringcomm.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for step in range(STEPS):
        tokens = make_batch(step, rank, world_size)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.clip_grad_norm_(1.0)  # clips by the norm of the mean gradient of the ranks
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        mean = loss.detach().clone()
        ringcomm.all_reduce(mean, ringcomm.ReduceOp.AVG)
        if rank == 0:
            print(f"step {step:2d} loss {mean.item():.6f}", flush=True)
    ringcomm.destroy_process_group()


if __name__ == "__main__":
    main()
