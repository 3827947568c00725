"""Parameters on the meta device get memory a unit at a time, straight before they are sharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import nn

from ringcomm.errors import ArgumentError
from ringcomm.zero.before import Before
from ringcomm.zero.units import Unit

Tensor = torch.Tensor
# Fills the parameters and buffers that a module has itself, not those of its children.
Initialize: TypeAlias = "Callable[[nn.Module], None]"


def is_meta(tensor: Tensor) -> bool:
    """Whether a tensor has a shape and no memory."""
    return tensor.device.type == "meta"


def materialize(
    unit: Unit,
    units: Sequence[Unit],
    device: torch.device,
    init: Initialize | None,
    before: Before,
) -> None:
    """Gives a unit's meta tensors memory on ``device`` and values.

    Args:
        unit: whose modules, down to those of other units.
        units: all units.
        device: of the communicator.
        init: see ``shard()``.
        before: learns how to undo it.

    Raises:
        ArgumentError: a module has no ``reset_parameters()`` and ``init`` is None.
    """
    others = {id(each.module) for each in units if each is not unit}
    for name, module in _modules(unit.module, unit.name, others):
        tensors = [*module._parameters.values(), *module._buffers.values()]
        if not any(each is not None and is_meta(each) for each in tensors):
            continue
        for param in module._parameters.values():
            if param is None:
                continue
            if is_meta(param):
                _give_memory(param, device, before)
            else:
                before.keep_values(param)
        for key, buffer in module._buffers.items():
            if buffer is None:
                continue
            if is_meta(buffer):
                before.keep_entry(module._buffers, key)
                module._buffers[key] = torch.empty_like(buffer, device=device)
            else:
                before.keep_values(buffer)
        if init is not None:
            init(module)
        elif hasattr(module, "reset_parameters"):
            module.reset_parameters()  # type: ignore[operator]
        else:
            raise ArgumentError(
                f"shard: module {name or type(module).__name__!r} has parameters or buffers on the "
                "meta device and no reset_parameters(); pass init=, which fills those of a module"
            )


def _give_memory(param: nn.Parameter, device: torch.device, before: Before) -> None:
    # In place, since optimizers and other modules know the parameter by its identity.
    other = nn.Parameter(torch.empty_like(param, device=device), param.requires_grad)
    torch.utils.swap_tensors(param, other)  # type: ignore[no-untyped-call]
    before.call(torch.utils.swap_tensors, param, other)


def _modules(module: nn.Module, name: str, others: set[int]) -> list[tuple[str, nn.Module]]:
    """The module and those inside it, apart from other units'."""
    found = [(name, module)]
    for key, child in module.named_children():
        if id(child) not in others:
            found += _modules(child, f"{name}.{key}" if name else key, others)
    return found
