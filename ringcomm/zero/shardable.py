"""Which modules shard() cannot take, and what their owner can do about it."""

from __future__ import annotations

import sys

from torch import nn
from torch.nn.parameter import is_lazy

from ringcomm.errors import ArgumentError, UnsupportedError
from ringcomm.optim.params import is_distributed


def check_shardable(root: nn.Module) -> None:
    """Checks what kinds of modules and parameters are in ``root``.

    Raises:
        ArgumentError: some are sharded or distributed by torch, or have no shape yet.
        UnsupportedError: a module writes to its parameter in forward.
    """
    # Nobody has such a module unless it was imported.
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    for name, module in root.named_modules():
        called = f"shard: module {name or type(module).__name__!r}"
        if isinstance(module, fsdp):
            raise ArgumentError(
                f"{called} is sharded by fully_shard() (FSDP2) already; use one of both: call "
                "shard() on the module as it was before"
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise UnsupportedError(
                f"{called}: max_norm={module.max_norm} has its forward write to the weight's rows "
                "that this rank's batch uses, so that the ranks' weights would differ; build it "
                "without max_norm, and clip the rows yourself after each step (inside "
                "gathered(module, write_from=0))"
            )
    for name, param in root.named_parameters():
        if is_distributed(param):
            raise ArgumentError(
                f"shard: parameter {name} is a DTensor, which has its own way of being sharded or "
                "replicated; use one of both: replace it by nn.Parameter(param.full_tensor())"
            )
        if is_lazy(param):
            raise ArgumentError(
                f"shard: parameter {name} has no shape yet, as it belongs to a lazy module; run "
                "the module once, on a batch, before shard()"
            )
