# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's ZeRO as one of the systems of :mod:`.training_systems`, on Gloo and CPUs.

It takes part if it is installed. Like the other systems it neither clips nor computes the norm of
gradients, and it uses torch's fused AdamW; its other options were the fastest on two cores.
"""

from __future__ import annotations

import importlib.util
import os
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

Tensor = torch.Tensor
STAGES = {f"deepspeed zero-{stage}": stage for stage in (1, 2, 3)}
BUCKET_ELEMS = 4_000_000
# Fastest of five to fourteen combinations of buckets, contiguous gradients, overlap and similar
# options.
OPTIONS: dict[int, dict[str, Any]] = {
    1: {"overlap_comm": False, "compute_grad_norm": False, "allgather_bucket_size": BUCKET_ELEMS},
    2: {"overlap_comm": True, "compute_grad_norm": False, "allgather_bucket_size": BUCKET_ELEMS},
    3: {"overlap_comm": False, "stage3_allgather_sequential": True},
}
MISSING = "no deepspeed: DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed"
# DeepSpeed compiles this operation at its first use, and needs it only for inference.
_INFERENCE_OP = "deepspeed_shm_comm"


def installed_version() -> str | None:
    return version("deepspeed") if importlib.util.find_spec("deepspeed") else None


def begin(rank: int) -> None:
    """Lets DeepSpeed use torch's first group, which is on Gloo, and load its modules in advance.

    Collective.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_RANK", str(rank))
    import deepspeed

    deepspeed.ops.__compatible_ops__[_INFERENCE_OP] = False
    deepspeed.init_distributed(dist_backend="gloo")
    for stage in STAGES.values():
        module = nn.Linear(8, 8)
        engine = Engine(module, torch.optim.AdamW(module.parameters(), fused=True), stage)
        engine.backward(engine.module(torch.ones(1, 8)).sum())
        engine.step()


class Engine:
    """DeepSpeed's engine, with the interface of an optimizer.

    Attributes:
        module: the model, as the engine wraps it.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, stage: int) -> None:
        import deepspeed

        buckets = {"reduce_bucket_size": BUCKET_ELEMS, "contiguous_gradients": False}
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.0,
            "bf16": {"enabled": next(model.parameters()).dtype == torch.bfloat16},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": stage, **buckets, **OPTIONS[stage]},
        }
        params = model.parameters()
        self.module, *_ = deepspeed.initialize(
            model=model, model_parameters=params, optimizer=optimizer, config=config
        )

    def backward(self, loss: Tensor) -> None:
        self.module.backward(loss)

    def step(self) -> None:
        self.module.step()

    def zero_grad(self) -> None:
        """Does nothing: the engine's step already drops the gradients."""

    def weights(self) -> dict[str, Tensor]:
        """Returns all weights; collective."""
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(self.module.parameters())):
            return {name: each.detach().clone() for name, each in self.module.named_parameters()}
