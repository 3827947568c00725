# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's ``Trainer`` on ``ringcomm.zero``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ringcomm import zero
from ringcomm.errors import ArgumentError, UnsupportedError
from ringcomm.extras.accelerate import ZeroAccelerator, check_settings
from ringcomm.extras.training_loops import (
    imported,
    is_sharded,
    must_be_sharded,
    next_number,
    writing,
)
from ringcomm.optim import AdamW, AdamWOptions, Sharded
from ringcomm.optim.sharded import ShardedOptimizer

__all__ = ["ZeroTrainer"]

_trainer: Any = imported(("transformers.trainer",), "transformers", "ringcomm.extras.transformers")
_FOLDER = "ringcomm"  # the folder of shards in a checkpoint's folder


class ZeroTrainer(_trainer.Trainer):
    """A ``Trainer`` that shards its model by :func:`ringcomm.zero.shard`.

    ``args.optim`` chooses the optimizer: ``adamw_torch`` and ``adamw_torch_fused`` become
    :class:`ringcomm.optim.AdamW`, and any other elementwise class of torch is wrapped in
    :class:`ringcomm.optim.Sharded`. A checkpoint has whole weights, which ``from_pretrained()``
    reads, and in addition shards of weights and optimizer state, from which training resumes with
    the same bits.

    Args:
        args: all positional arguments of ``Trainer``.
        stage: stage of ZeRO, 0 to 3.
        zero_options: options of the sharding, including precision, which replaces ``bf16`` and
            ``fp16`` of ``args``.
        optimizer_options: options of the optimizer.
        settings: all keyword arguments of ``Trainer``.

    Raises:
        UnsupportedError: the arguments ask for DeepSpeed, FSDP, or mixed precision by autocast.
    """

    optimizer: Any

    def __init__(
        self,
        *args: Any,
        stage: int = 3,
        zero_options: zero.ZeroOptions | None = None,
        optimizer_options: AdamWOptions | None = None,
        **settings: Any,
    ) -> None:
        self.zero_stage = stage
        self.zero_options = zero_options
        self.optimizer_options = optimizer_options
        super().__init__(*args, **settings)
        if self.optimizer is not None:
            must_be_sharded(self.optimizer, "ZeroTrainer: optimizers")

    def create_accelerator_and_postprocess(self) -> None:
        """Makes the accelerator a :class:`ZeroAccelerator`, for sharded modules."""
        super().create_accelerator_and_postprocess()
        check_settings(self.accelerator, "ZeroTrainer")
        # Trainer's code names its accelerator's class, and has no hook for another class.
        self.accelerator.__class__ = ZeroAccelerator

    def create_optimizer(self, model: Any = None) -> Any:
        """Shards the model, and builds the optimizer of ``args.optim`` on it."""
        module: nn.Module = self.model if model is None else model
        if self.optimizer is not None:
            if not is_sharded(module):
                raise ArgumentError(
                    "ZeroTrainer: optimizers: expected None, or an optimizer of a model that "
                    "ringcomm.zero.shard() has sharded before"
                )
            return self.optimizer
        if not is_sharded(module):
            zero.shard(module, self.zero_stage, options=self.zero_options)
        decayed = set(self.get_decay_parameter_names(module))
        trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        groups = [
            {
                "params": [param for name, param in trained if (name in decayed) is decays],
                "weight_decay": self.args.weight_decay if decays else 0.0,
            }
            for decays in (True, False)
        ]
        if self.optimizer_cls_and_kwargs is not None:
            kind, settings = self.optimizer_cls_and_kwargs
        else:
            kind, settings = self.get_optimizer_cls_and_kwargs(self.args, module)
        self.optimizer = self._built(kind, groups, settings)
        return self.optimizer

    def _built(
        self, kind: Any, groups: list[dict[str, Any]], settings: dict[str, Any]
    ) -> ShardedOptimizer:
        settings = {key: value for key, value in settings.items() if key != "fused"}
        by_layers = {"params", "model", "optimizer_dict"} & set(settings)
        if by_layers or not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
            raise UnsupportedError(
                f"ZeroTrainer: optim: expected an elementwise optimizer, got {self.args.optim}, "
                "which is built on whole layers"
            )
        if kind is torch.optim.AdamW:
            return AdamW(groups, options=self.optimizer_options, **settings)
        return Sharded(kind, groups, options=self.optimizer_options, **settings)

    # ---- checkpoints ----------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes whole weights from the main process; all ranks call it."""
        if not is_sharded(self.model):
            super().save_model(output_dir, _internal_call)
            return
        state = self.accelerator.get_state_dict(self.model)
        self._save(self.args.output_dir if output_dir is None else output_dir, state_dict=state)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        root = Path(output_dir) / _FOLDER
        schedule = self.lr_scheduler.state_dict()  # JSON data, which needs no pickle
        zero.save(root, next_number(root), self.model, self._inner(), data=schedule, keep=1)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not (Path(checkpoint) / _FOLDER).is_dir():
            return
        loaded = zero.load(Path(checkpoint) / _FOLDER, self.model, self._inner())
        self.lr_scheduler.load_state_dict(loaded.data)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if (Path(resume_from_checkpoint) / _FOLDER).is_dir():
            return  # the model's shards are loaded together with the optimizer's
        with writing(self.model if model is None else model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        with writing(self.model):
            super()._load_best_model()

    def _inner(self) -> ShardedOptimizer:
        """Returns the optimizer, which Accelerate has wrapped."""
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        return must_be_sharded(inner, "ZeroTrainer")
