# SPDX-License-Identifier: Apache-2.0
"""PyTorch Lightning on ``ringcomm.zero``: a strategy for its ``Trainer``.

NOTE [A step is a call of the module]
Lightning calls ``training_step()`` and not ``forward()``, so hooks of the sharded module would not
run. As in Lightning's strategy for DDP, the strategy therefore calls the module, and during the
call the step replaces the module's ``forward``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ringcomm import zero
from ringcomm.errors import ArgumentError, UnsupportedError
from ringcomm.extras.training_loops import (
    imported,
    is_sharded,
    must_be_sharded,
    next_number,
    state_on_first,
    writing,
)
from ringcomm.optim.sharded import ShardedOptimizer

__all__ = ["RingcommStrategy"]

_NAMES = ("lightning.pytorch", "pytorch_lightning")
_lightning: Any = imported(_NAMES, "lightning", "ringcomm.extras.lightning")
_strategies: Any = imported(
    (f"{_lightning.__name__}.strategies",), "lightning", "ringcomm.extras.lightning"
)
_precisions: Any = imported(
    (f"{_lightning.__name__}.plugins.precision",), "lightning", "ringcomm.extras.lightning"
)
_FITTING = "fit"  # of Lightning's TrainerFn


class _ShardedPrecision(_precisions.Precision):
    """A precision plugin that lets the optimizer clip, since no rank has the whole gradient."""

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        _unwrapped(optimizer).clip_grad_norm_(clip_val)

    def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:
        _unwrapped(optimizer).clip_grad_value_(clip_val)


# Names of the base classes of callbacks that average weights.
_AVERAGES = ("StochasticWeightAveraging", "WeightAveraging")


class RingcommStrategy(_strategies.DDPStrategy):
    """Trains a ``LightningModule`` with sharded state, by :func:`ringcomm.zero.shard`.

    ``configure_optimizers()`` must return one optimizer of :mod:`ringcomm.optim`, with or without
    schedulers::

        trainer = Trainer(
            accelerator="cpu", devices=2, strategy=RingcommStrategy(stage=3), max_epochs=1
        )

    The module stays sharded after ``fit()``, so that ``test()``, ``predict()`` and
    ``save_checkpoint()`` can follow; :func:`ringcomm.zero.remove_sharding` undoes the sharding.

    Args:
        stage: stage of ZeRO, 0 to 3.
        options: options of the sharding, including precision; the ``Trainer`` keeps
            ``precision=32``.
        submodule: name of the submodule to shard, such as "model", which must have all parameters;
            its calls then cast arguments and results. None shards the whole ``LightningModule``,
            and each step is one call of it.
        checkpoint: "full" lets rank 0 write a file in Lightning's format, with whole weights and
            whole optimizer state. "sharded" makes a folder to which each rank writes its shards.
        accumulate_locally: True sums the gradients of ``accumulate_grad_batches`` on each rank, and
            reduces them once per step, with the same bits at all stages. With False, stages 2 and 3
            reduce after each backward, and hold only shards.
        settings: settings of Lightning's ``DDPStrategy`` for processes and groups, such as
            ``timeout``, ``cluster_environment``, or ``process_group_backend``, which is "ringcomm"
            by default.

    Raises:
        ArgumentError: a bad argument, or a setting of ``DistributedDataParallel``.
    """

    strategy_name = "ringcomm"

    def __init__(
        self,
        stage: int = 3,
        *,
        options: zero.ZeroOptions | None = None,
        submodule: str | None = None,
        checkpoint: Literal["full", "sharded"] = "full",
        accumulate_locally: bool = True,
        **settings: Any,
    ) -> None:
        if checkpoint not in ("full", "sharded"):
            raise ArgumentError(
                f'RingcommStrategy: checkpoint: expected "full" or "sharded", got {checkpoint!r}'
            )
        self._stage = stage
        self._options = options
        self._submodule = submodule
        self._is_sharded_checkpoint = checkpoint == "sharded"
        self._accumulate_locally = accumulate_locally
        self._precision = _ShardedPrecision()
        super().__init__(**{"process_group_backend": "ringcomm", **settings})
        if self._ddp_kwargs:
            raise ArgumentError(
                f"RingcommStrategy: {', '.join(self._ddp_kwargs)}: expected settings for processes "
                "and groups; DistributedDataParallel, whose options these are, is not used"
            )

    # ---- set-up ---------------------------------------------------------------------------------

    @property
    def precision_plugin(self) -> Any:
        """Lightning's plugin for FP32, with clipping by the optimizer."""
        return self._precision

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        if plugin is None or type(plugin) in (_precisions.Precision, _ShardedPrecision):
            return
        raise UnsupportedError(
            f"RingcommStrategy: precision: expected the Trainer's 32, got {type(plugin).__name__}: "
            "autocast would keep 16-bit copies of all weights from forward to backward, and its "
            "scaler sees no sharded gradients. Set precision by RingcommStrategy(options="
            'ZeroOptions(precision=Precision.preset("bf16-mixed")))'
        )

    @property
    def sharded_module(self) -> nn.Module:
        """The sharded module: the ``LightningModule``, or its submodule ``submodule``."""
        module: nn.Module = self.lightning_module
        return module if self._submodule is None else module.get_submodule(self._submodule)

    def setup(self, trainer: Any) -> None:
        """Shards the module, and for ``fit()`` makes it configure its optimizer."""
        if self._layer_sync:
            raise UnsupportedError(
                "RingcommStrategy: sync_batchnorm=True: torch's layer needs CUDA and its own "
                "group; call ringcomm.zero.convert_sync_batchnorm() in configure_model()"
            )
        for callback in trainer.callbacks:
            if any(kind.__name__ in _AVERAGES for kind in type(callback).__mro__):
                raise UnsupportedError(
                    f"RingcommStrategy: {type(callback).__name__}: expected no callback that "
                    "averages weights: it would copy the module before sharding, and later write "
                    "the sharded parameters. Average the shards by hand: see docs/zero.md, "
                    "section 'Averages of weights, by shards'"
                )
        self.accelerator.setup(trainer)
        fits = trainer.state.fn == _FITTING
        if is_sharded(self.sharded_module) and fits:
            zero.remove_sharding(self.sharded_module)  # an optimizer belongs to one sharding
        if not is_sharded(self.sharded_module):
            self.model_to_device()
            self._shard()
        if fits:
            _refuse_finetuning(trainer.callbacks)
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _shard(self) -> None:
        module = self.sharded_module
        if module is not self.lightning_module:
            inside = set(map(id, module.parameters()))
            for name, param in self.lightning_module.named_parameters():
                if id(param) not in inside and param.requires_grad:
                    raise ArgumentError(
                        f"RingcommStrategy: submodule: expected all trainable parameters in "
                        f"{self._submodule!r}, but {name} is outside of it"
                    )
        zero.shard(module, self._stage, options=self._options)

    def model_to_device(self) -> None:
        """Moves the module to the device; ``shard()`` fills a module that is on the meta device."""
        module = self.lightning_module
        if not any(param.is_meta for param in module.parameters()):
            module.to(self.root_device)

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Context for new tensors: the meta device with ``empty_init``, else this rank's device."""
        with torch.device("meta") if empty_init else self.root_device:
            yield

    def setup_optimizers(self, trainer: Any) -> None:
        """Makes the module configure its optimizer, and prepares the optimizer at once."""
        self._reset_optimizers_and_schedulers()
        super().setup_optimizers(trainer)
        if len(self.optimizers) != 1:
            raise UnsupportedError(
                f"RingcommStrategy: configure_optimizers: expected one optimizer, got "
                f"{len(self.optimizers)}: one optimizer steps all parameters of a sharded module"
            )
        # Prepare now: otherwise Lightning's wrapper of the optimizer would own the shards.
        self._optimizer().prepare()

    def _optimizer(self) -> ShardedOptimizer:
        where = "RingcommStrategy: configure_optimizers"
        return must_be_sharded(_unwrapped(self.optimizers[0]), where)

    def teardown(self) -> None:
        """Tears down the ``Trainer``'s environment and plugins; the module stays sharded."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # ---- steps ----------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module's step; see NOTE [A step is a call of the module]."""
        return self._step("training_step", args, kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module's step, like :meth:`training_step`."""
        return self._step("validation_step", args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module's step, like :meth:`training_step`."""
        return self._step("test_step", args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module's step, like :meth:`training_step`."""
        return self._step("predict_step", args, kwargs)

    def _step(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        module = self.lightning_module
        if self._submodule is not None:
            return getattr(module, name)(*args, **kwargs)
        return self._forward_redirection(module, module, name, *args, **kwargs)

    def block_backward_sync(self) -> AbstractContextManager[None]:
        """Returns a context in which backward reduces no gradients, if they accumulate locally."""
        return zero.no_sync(self.sharded_module) if self._accumulate_locally else nullcontext()

    # ---- checkpoints ----------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True, since values are loaded into shards, which exist only after the set-up."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns whole weights on rank 0; {} on other ranks and for a sharded checkpoint."""
        if self._is_sharded_checkpoint:
            return {}
        return state_on_first(self.lightning_module, self.is_global_zero)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Returns whole state on rank 0; {} on other ranks and for a sharded checkpoint."""
        if self._is_sharded_checkpoint:
            return {}
        return self._optimizer().full_state_dict(dst=0)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Writes a checkpoint: rank 0 writes a file, or all ranks write to a folder."""
        if not self._is_sharded_checkpoint:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        folder = Path(self.broadcast(filepath))
        number = next_number(folder)
        rest = _rest(folder, number)
        if self.is_global_zero:
            folder.mkdir(parents=True, exist_ok=True)
            self.checkpoint_io.save_checkpoint(checkpoint, rest, storage_options=storage_options)
        has_optimizer = "optimizer_states" in checkpoint
        optimizer = self._optimizer() if has_optimizer and self.optimizers else None
        zero.save(folder, number, self.sharded_module, optimizer, keep=1)
        if self.is_global_zero:
            for each in folder.glob("lightning-*.ckpt"):
                if each != rest:
                    each.unlink()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """Reads a checkpoint's file, or the parts of its folder that this rank needs."""
        folder = Path(self.broadcast(checkpoint_path))
        if not folder.is_dir():
            return super().load_checkpoint(checkpoint_path, weights_only)
        optimizer = self._optimizer() if self.optimizers else None
        loaded = zero.load(folder, self.sharded_module, optimizer)
        return self.checkpoint_io.load_checkpoint(
            _rest(folder, loaded.step), weights_only=weights_only
        )

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads whole weights into the shards; a folder's shards are already loaded."""
        if checkpoint["state_dict"]:
            with writing(self.lightning_module):
                self.lightning_module.load_state_dict(checkpoint["state_dict"], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads whole optimizer state; the checkpoint may come from training without sharding."""
        for state in checkpoint["optimizer_states"]:
            if state:
                self._optimizer().load_torch_state_dict(state)


def _unwrapped(optimizer: Any) -> Any:
    """Returns the optimizer that Lightning wrapped, or the optimizer itself if it did not."""
    return getattr(optimizer, "optimizer", optimizer)


def _rest(folder: Path, number: int) -> Path:
    """Returns the path of the file with a checkpoint's data other than weights and state."""
    return folder / f"lightning-{number:08d}.ckpt"


def _refuse_finetuning(callbacks: Iterable[Any]) -> None:
    """Raises UnsupportedError for callbacks that unfreeze parameters while a module is fitted."""
    for callback in callbacks:
        if any(base.__name__ == "BaseFinetuning" for base in type(callback).__mro__):
            raise UnsupportedError(
                f"RingcommStrategy: callback {type(callback).__name__}: a BaseFinetuning unfreezes "
                "parameters that were frozen when the module was sharded, and these have no memory "
                "for a gradient. Freeze them after shard(), between steps "
                "(requires_grad_(False)), or fit twice, with another Trainer for each part"
            )
