"""A GradScaler by which all ranks take a step, or all skip it."""

from __future__ import annotations

from typing import Any

import torch

from ringcomm.c10d.comm_argument import CommArgument, find_communicator, find_device_type
from ringcomm.comm.arguments import ReduceOp
from ringcomm.errors import ArgumentError
from ringcomm.optim.dtensors import grad_of, local_of
from ringcomm.optim.meshes import ModelMesh
from ringcomm.optim.sharded import ShardedOptimizer

Tensor = torch.Tensor


class GradScaler(torch.amp.GradScaler):
    """A ``torch.amp.GradScaler`` that skips a step on all ranks if the gradient of one overflowed.

    So the ranks' scales stay equal. It works with any optimizer, and uses the communicator of
    ringcomm's. It also checks gradients that ``accumulate_dtype`` has taken out of ``p.grad``. In a
    pipeline only the last stage calls :meth:`scale`; every stage makes the other calls.

    Args:
        device: "cpu" or "cuda"; None takes the communicator's.
        comm: the ranks that agree on the steps of other optimizers, in the forms that
            :class:`AdamW` takes; looked up when the gradients of such an optimizer are unscaled.
        settings: torch's further arguments: init_scale, growth_factor, backoff_factor,
            growth_interval, enabled.
    """

    def __init__(
        self, device: str | None = None, *, comm: CommArgument = None, **settings: Any
    ) -> None:
        found = find_device_type(comm, "GradScaler")
        self._comm = comm
        super().__init__(device or found, **settings)

    def __repr__(self) -> str:
        # Not the scale: to read it is to wait for the device.
        state = "enabled" if self.is_enabled() else "not enabled"
        return f"<ringcomm.optim.GradScaler on {self._device}, {state}>"

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients by the scale; collective."""
        self._begin(optimizer)
        super().unscale_(optimizer)

    def _begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Sets the first scale on stages without a loss; elsewhere :meth:`scale` does."""
        if (
            not self._enabled
            or self._scale is not None
            or not isinstance(optimizer, ShardedOptimizer)
        ):
            return
        mesh = optimizer.mesh
        if isinstance(mesh, ModelMesh) and mesh.has_stages:
            self._lazy_init_scale_growth_tracker(torch.device(self._device))

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        sums: list[Tensor] | None = None
        mesh, asks = None, False
        if isinstance(optimizer, ShardedOptimizer):
            comm, sums, mesh = optimizer.communicator, optimizer._gradient_flats(), optimizer.mesh
            # A step that unscales by itself only asks for infinities, by the scale 1.
            asks = sums is None and mesh is None and allow_fp16
            if sums is None:
                if not allow_fp16:
                    _check_not_fp16(optimizer)
                sums = _local_gradients(optimizer)
        else:
            comm = find_communicator(self._comm, "GradScaler", found_inf.device)
        if sums is not None:
            local = found_inf.clone()
            for dtype in {each.dtype for each in sums}:
                alike = [each for each in sums if each.dtype is dtype]
                torch._amp_foreach_non_finite_check_and_unscale_(alike, local, inv_scale)
                # The operator does not change versions, by which a step detects stale results.
                if not asks:
                    torch.autograd.graph.increment_version(alike)
            found = {local.device: local}
        else:
            found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        # A rank without gradients still takes part in the collective.
        found = found or {found_inf.device: found_inf.clone()}
        if comm is not None and comm.world_size > 1:
            for each in found.values():
                comm.all_reduce(each, ReduceOp.MAX)
        if mesh is not None:
            for each in found.values():
                mesh.all_reduce(each, ReduceOp.MAX)
        return found

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Steps the optimizer unless a gradient overflowed on some rank; collective."""
        if not self._enabled or not isinstance(optimizer, ShardedOptimizer):
            return super().step(optimizer, *args, **kwargs)
        self._begin(optimizer)
        optimizer._found_inf_agreed = True
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            optimizer._found_inf_agreed = False


def _local_gradients(optimizer: ShardedOptimizer) -> list[Tensor]:
    """Returns this rank's own gradients; torch takes no mixture with DTensors."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [local_of(grad) for grad in map(grad_of, params) if grad is not None]


def _check_not_fp16(optimizer: ShardedOptimizer) -> None:
    for group in optimizer.param_groups:
        for grad in map(grad_of, group["params"]):
            if grad is not None and grad.dtype is torch.float16:
                raise ArgumentError(
                    "GradScaler.unscale_: expected FP32 gradients, got float16, which unscaled "
                    "would lose their small values. To clip them, build the optimizer with "
                    "loss_scaler=ringcomm.optim.LossScaler() in place of a GradScaler: its "
                    "clip_grad_norm_() takes the scale into account"
                )
