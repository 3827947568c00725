# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face Llama under its own tensor-parallel plan, with ZeRO over the replicas.

torchrun --nproc-per-node 4 docs/examples/llama_tp.py
"""

import torch
import torch.distributed as dist
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

import ringcomm
from ringcomm import zero

SEQUENCES, LENGTH, VOCABULARY = 8, 16, 64  # sequences of all ranks together
STEPS, LEARNING_RATE = 15, 5e-3
STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,  # a multiple of the tensor-parallel ranks
    )
    return LlamaForCausalLM(config)  # from a configuration: nothing is downloaded


def make_batch(step: int) -> torch.Tensor:
    """Returns the sequences of a step; each counts up from a random token."""
    first = torch.randint(VOCABULARY, (SEQUENCES, 1), generator=torch.Generator().manual_seed(step))
    return (first + torch.arange(LENGTH)) % VOCABULARY


def main() -> None:
    dist.init_process_group("ringcomm")
    mesh = ringcomm.Mesh(dp=-1, tp=2)
    model = make_model()
    # The plan's names are those of the inner model, such as "layers.*.mlp.up_proj".
    plan = {name: STYLES[style]() for name, style in model.config.base_model_tp_plan.items()}
    parallelize_module(model.model, mesh["tp"], plan)
    zero.shard(model, stage=3, mesh=mesh)
    optimizer = ringcomm.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for step in range(STEPS):
        tokens = make_batch(step).chunk(mesh["dp"].size())[mesh.get_local_rank("dp")]
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        if dist.get_rank() == 0:
            print(f"step {step:2d} loss {mean.item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
