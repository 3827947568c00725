# SPDX-License-Identifier: Apache-2.0
"""Hugging Face Accelerate on ``ringcomm.zero``: an ``Accelerator`` for sharded modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ringcomm import zero
from ringcomm.errors import ArgumentError, UnsupportedError
from ringcomm.extras.training_loops import (
    imported,
    is_sharded,
    must_be_sharded,
    next_number,
    state_on_first,
)
from ringcomm.optim.sharded import ShardedOptimizer

__all__ = ["ZeroAccelerator"]

_accelerate: Any = imported(("accelerate",), "accelerate", "ringcomm.extras.accelerate")


class ZeroAccelerator(_accelerate.Accelerator):
    """An ``Accelerator`` for modules that :func:`ringcomm.zero.shard` has sharded.

    Shard the module and build its optimizer first; the loop is Accelerate's::

        zero.shard(model, stage=3)
        optimizer = ringcomm.optim.AdamW(model.parameters())
        model, optimizer, data = accelerator.prepare(model, optimizer, data)

    Clipping, accumulation, ``save_state()``, ``load_state()`` and ``get_state_dict()`` then work at
    every stage as with DDP. In ``save_state()`` each rank writes its shards.

    Args:
        settings: settings of Accelerate's ``Accelerator``, without ``mixed_precision`` and without
            plugins of FSDP and DeepSpeed.

    Raises:
        UnsupportedError: a setting would shard or cast a second time.
    """

    _models: list[Any]
    _optimizers: list[Any]

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        check_settings(self, "ZeroAccelerator")

    # ---- prepare() ------------------------------------------------------------------------------

    def prepare_model(
        self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Returns a sharded module unchanged, and prepares other modules for evaluation.

        Raises:
            ArgumentError: a module with trainable parameters is not sharded.
        """
        if is_sharded(model):
            # Prepare the module as for evaluation, so that Accelerate does not wrap it in DDP.
            return super().prepare_model(model, device_placement=False, evaluation_mode=True)
        if not evaluation_mode and any(param.requires_grad for param in model.parameters()):
            raise ArgumentError(
                "ZeroAccelerator.prepare: expected a module that ringcomm.zero.shard() has "
                f"sharded, got a {type(model).__name__} that is not: shard it and build its "
                "optimizer before prepare()"
            )
        return super().prepare_model(model, device_placement, evaluation_mode=True)

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Accepts a ringcomm optimizer unchanged.

        Raises:
            ArgumentError: the optimizer is not a ringcomm optimizer.
        """
        must_be_sharded(_unwrapped(optimizer), "ZeroAccelerator.prepare")
        return super().prepare_optimizer(optimizer, device_placement=False)

    # ---- gradients ------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        """Context in which a sharded module reduces no gradients; ``accumulate()`` calls it."""
        whole: AbstractContextManager[None] = nullcontext()
        with zero.no_sync(model) if is_sharded(model) else whole:
            yield

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> Tensor:
        """Lets the optimizer clip the gradients; returns the norm of the ranks' mean gradient."""
        optimizer, params = self._optimizer_of(parameters, "clip_grad_norm_")
        return optimizer.clip_grad_norm_(max_norm, float(norm_type), params=params)

    def clip_grad_value_(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        """Lets the optimizer clip each element of the gradients."""
        optimizer, params = self._optimizer_of(parameters, "clip_grad_value_")
        optimizer.clip_grad_value_(clip_value, params=params)

    def _optimizer_of(
        self, parameters: Iterable[Tensor], operation: str
    ) -> tuple[ShardedOptimizer, list[Tensor] | None]:
        """Returns the parameters' optimizer, and the parameters (None if it has no others)."""
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        wanted = {id(param) for param in given if param.requires_grad}
        for optimizer in map(_unwrapped, self._optimizers):
            own = {
                id(param)
                for group in optimizer.param_groups
                for param in group["params"]
                if param.requires_grad
            }
            if wanted and wanted <= own:
                return optimizer, None if wanted == own else given
        raise ArgumentError(
            f"ZeroAccelerator.{operation}: expected parameters of one optimizer that prepare() was "
            f"given, got {len(given)} that do not belong to one optimizer"
        )

    # ---- checkpoints ----------------------------------------------------------------------------

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """Returns whole weights on the main process, {} on other processes; all ranks call it."""
        if is_sharded(model):
            return state_on_first(model, self.is_main_process)
        return super().get_state_dict(model, unwrap)

    def save_model(
        self, model: Any, save_directory: Any, max_shard_size: Any = "10GB", **settings: Any
    ) -> None:
        """Writes whole weights from the main process; all ranks call it."""
        if self.is_main_process or not is_sharded(model):
            super().save_model(model, save_directory, max_shard_size, **settings)
        else:
            self.get_state_dict(model)
        self.wait_for_everyone()

    def save_state(self, output_dir: Any = None, **settings: Any) -> Any:
        """Saves all prepared objects; uses :func:`ringcomm.zero.save` for sharded modules."""
        sharded = self._sharded_pairs()
        with self._without(sharded):
            folder = super().save_state(output_dir, **settings)
        for number, (module, optimizer) in enumerate(sharded):
            root = _root(folder, number)
            zero.save(root, next_number(root), module, optimizer, keep=1)
        return folder

    def load_state(self, input_dir: Any = None, **settings: Any) -> None:
        """Loads a result of :meth:`save_state`, at any stage and with any number of ranks."""
        sharded = self._sharded_pairs()
        found: list[Any] = []
        handle = self.register_load_state_pre_hook(lambda _, folder: found.append(folder))
        try:
            with self._without(sharded):
                super().load_state(input_dir, **settings)
        finally:
            handle.remove()
        for number, (module, optimizer) in enumerate(sharded):
            zero.load(_root(found[0], number), module, optimizer)

    def _sharded_pairs(self) -> list[tuple[nn.Module, ShardedOptimizer | None]]:
        """Returns pairs of a prepared sharded module and its prepared optimizer, if it has one."""
        pairs = []
        for model in self._models:
            if is_sharded(model):
                own = set(map(id, model.parameters()))
                of_model = (
                    inner
                    for inner in map(_unwrapped, self._optimizers)
                    if any(id(p) in own for group in inner.param_groups for p in group["params"])
                )
                pairs.append((model, next(of_model, None)))
        return pairs

    @contextmanager
    def _without(self, sharded: list[tuple[nn.Module, ShardedOptimizer | None]]) -> Iterator[None]:
        """A context that hides sharded modules and optimizers from Accelerate's own saving."""
        hidden = {id(each) for pair in sharded for each in pair}
        models, optimizers = self._models, self._optimizers
        self._models = [each for each in models if id(each) not in hidden]
        self._optimizers = [each for each in optimizers if id(_unwrapped(each)) not in hidden]
        try:
            yield
        finally:
            self._models, self._optimizers = models, optimizers


def check_settings(accelerator: Any, where: str) -> None:
    """Raises UnsupportedError for settings that shard or cast, which ``ringcomm.zero`` must do."""
    kind = accelerator.distributed_type.value
    if kind in ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA", "TP"):
        raise UnsupportedError(
            f"{where}: expected data parallelism alone, got {kind}, which shards the module or "
            f"reduces its gradients itself; use either the plugin of {kind} or ringcomm.zero"
        )
    if accelerator.mixed_precision not in ("no", None):
        raise UnsupportedError(
            f"{where}: mixed_precision: expected 'no', got {accelerator.mixed_precision!r}: "
            "autocast would keep 16-bit copies of all weights from forward to backward, and its "
            "scaler sees no sharded gradients. Set precision by zero.shard(..., options="
            'ZeroOptions(precision=Precision.preset("bf16-mixed")))'
        )


def _unwrapped(optimizer: Any) -> Any:
    """Returns the optimizer that Accelerate wrapped, or the optimizer itself if it did not."""
    return getattr(optimizer, "optimizer", optimizer)


def _root(folder: Any, number: int) -> Path:
    return Path(folder) / (f"ringcomm_{number}" if number else "ringcomm")
