# SPDX-License-Identifier: Apache-2.0
"""Hugging Face Accelerate on ringcomm: data-parallel training through torch.distributed.

torchrun --nproc-per-node 2 docs/examples/accelerate_ddp.py
"""

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make_data() -> TensorDataset:
    numbers = torch.Generator().manual_seed(1)
    x = torch.randn(512, 16, generator=numbers)
    return TensorDataset(x, x.sin().sum(dim=1, keepdim=True))


def train(accelerator: Accelerator) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = DataLoader(make_data(), batch_size=32)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    for epoch in range(10):
        total = torch.zeros(())
        for x, y in data:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.detach()
        mean = accelerator.reduce(total / len(data), reduction="mean")
        accelerator.print(f"epoch {epoch} loss {mean.item():.6f}", flush=True)


def main(backend: str = "ringcomm") -> None:
    # Create the group first: Accelerate uses an existing group, and otherwise makes a Gloo group on
    # CPUs.
    dist.init_process_group(backend)
    # The model is deleted when train() returns, before its group: in the other order some runs hang
    # on Gloo.
    train(Accelerator(cpu=True, gradient_accumulation_steps=2))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
