"""The arguments of an optimizer's constructor, brought into one form and checked."""

from __future__ import annotations

from typing import Any

import torch

from ringcomm.errors import ArgumentError
from ringcomm.optim.params import DTYPE_NAMES, DTYPES, check_local

Tensor = torch.Tensor


def listed(params: Any) -> Any:
    """Parameters, or groups of them, that can be read twice: no generators."""
    if isinstance(params, (Tensor, set, str)):
        return params  # torch words it
    return [
        {**each, "params": listed(each["params"])}
        if isinstance(each, dict) and "params" in each
        else each
        for each in params
    ]


def first_device(params: Any) -> torch.device | None:
    """Where the first parameter is; None where there is none."""
    first = next(iter(params), None) if isinstance(params, list) else None
    while isinstance(first, (dict, tuple, list)):
        inside = first["params"] if isinstance(first, dict) else first[1:]
        first = inside if isinstance(inside, Tensor) else next(iter(inside), None)
    return first.device if isinstance(first, Tensor) else None


def numbers(betas: Any) -> Any:
    """Betas as numbers, where they are tensors of one element."""
    if not isinstance(betas, (tuple, list)):
        return betas
    return tuple(float(beta) if isinstance(beta, Tensor) else beta for beta in betas)


def check_param(entry: Any, called: str, place: torch.device) -> None:
    """Checks an entry of "params": a tensor, or a name and one.

    Raises:
        ArgumentError: its class, dtype, layout or device cannot be used.
    """
    param = entry[1] if isinstance(entry, tuple) else entry
    if not isinstance(param, Tensor):
        return  # torch words it
    check_local(param, called)
    if param.dtype not in DTYPE_NAMES:
        way_out = "use torch.optim for it"
        if not param.requires_grad:
            way_out = (
                "it is frozen, so leave it out: pass "
                "[p for p in module.parameters() if p.requires_grad]"
            )
        raise ArgumentError(
            f"{called}: expected dtype {', '.join(DTYPES)}, got {param.dtype}; {way_out}"
        )
    if param.layout is not torch.strided:
        raise ArgumentError(f"{called}: expected a dense tensor, got layout {param.layout}")
    if param.device != place:
        raise ArgumentError(
            f"{called}: expected a tensor on {place}, as the communicator's or the first one, got "
            f"one on {param.device}; all parameters must be on one device"
        )
