# SPDX-License-Identifier: Apache-2.0
"""Unmodified DeepSpeed trains with the same results on ringcomm and Gloo, at ZeRO stages 1 to 3."""

import functools
import os
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.rank_pool import RankPool, same

pytestmark = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="DeepSpeed is not installed: pip install deepspeed"
)


def train(stage: int, dtype: str, folder: Path, rank: int, world_size: int) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    import deepspeed

    deepspeed.init_distributed(dist_backend=dist.get_backend())
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 2))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 500},
        "bf16": {"enabled": dtype == "bf16"},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), optimizer=optimizer, config=config
    )
    numbers = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(6):
        x = torch.randn(4, 8, generator=numbers).to(next(engine.parameters()).dtype)
        loss = engine(x).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        parameters = [p.detach().clone() for p in engine.module.parameters()]
    torch.save((losses, parameters), folder / f"{dist.get_backend()}.{rank}")


@pytest.mark.parametrize(("stage", "dtype"), [(1, "fp32"), (2, "fp32"), (2, "bf16"), (3, "bf16")])
def test_zero(tmp_path, stage, dtype):
    # DeepSpeed keeps the first group of a process, so every run needs new processes.
    for backend in ("gloo", "ringcomm"):
        with closing(RankPool(2)) as pool:
            pool.run(functools.partial(train, stage, dtype, tmp_path), backend)
    for rank in range(2):
        same(torch.load(tmp_path / f"ringcomm.{rank}"), torch.load(tmp_path / f"gloo.{rank}"))
