"""Conversions of a sharded module by ``.to()``, ``.half()`` and the like, which are refused.

NOTE [Conversions]
A conversion gives each parameter other memory, and the buckets keep the old one. At stages 0 and 1
backward would then fail on gradients of another dtype, and at stages 2 and 3 the step would. All
conversions of torch call ``_apply()`` of each module with one function of a tensor. So each module
has an ``_apply()`` of its own, which tries the function on small tensors of the kinds that the
module's own are of, before anything is changed.

A function that returns equal tensors is not applied at all. ``.to("cpu:0")`` is an example: torch
copies tensors of the device "cpu", and the copy changes nothing that a program can observe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import torch
from torch import nn

from ringcomm.errors import ArgumentError
from ringcomm.module_names import named_modules
from ringcomm.optim.dtensors import local_of, plainly
from ringcomm.optim.layout import DTYPE_NAMES

Tensor = torch.Tensor
Convert = Callable[[Tensor], Tensor]
# The method of torch's modules that all conversions call.
_METHOD = "_apply"
# Each probe has values of its own, so that memory which an earlier probe has left, and a function
# does not initialise, differs from them.
_seeds = count(1)


class Unconverted:
    """A module's ``_apply()`` while it is sharded: refuses what would change one of its tensors.

    Attributes:
        module: the module.
        head: begins a message: operation and rank.
        alive: returns None once nothing shards the module any more, as when the whole, of which it
            is a part, is gone.
    """

    def __init__(self, module: nn.Module, head: str, alive: Callable[[], object | None]) -> None:
        self.module = module
        self.head = head
        self.alive = alive

    def __call__(self, fn: Convert, recurse: bool = True) -> nn.Module:
        if self.alive() is None:
            getattr(type(self.module), _METHOD)(self.module, fn, recurse)
            return self.module
        guarded = list(self._inside()) if recurse else [self.module]
        tried: dict[object, str | None] = {}
        for module in guarded:
            for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    self._check(module, key, tensor, fn, tried)
        # Nothing changes in what is sharded; what was added since is none of the engine's.
        if recurse:
            known = set(map(id, guarded))
            for module in guarded:
                for child in module.children():
                    if id(child) not in known:
                        getattr(child, _METHOD)(fn)
        return self.module

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of a part of the module is plain.
        return getattr, (self.module, _METHOD)

    def _inside(self) -> Iterator[nn.Module]:
        for module in self.module.modules():
            if isinstance(vars(module).get(_METHOD), Unconverted):
                yield module

    def _check(
        self,
        module: nn.Module,
        key: str,
        tensor: Tensor,
        fn: Convert,
        tried: dict[object, str | None],
    ) -> None:
        """Raises ArgumentError if the function changes tensors of this one's kind."""
        with plainly():
            local = local_of(tensor)
            shape = tuple(min(size, 2) for size in local.shape)
            kind = local.dtype, local.device, shape
        if kind not in tried:
            tried[kind] = _change_of(_probe(*kind), fn)
        change = tried[kind]
        if change is not None:
            which = "param" if key in module._parameters else "buffer"
            raise ArgumentError(self._refusal(self._name_of(module, key), which, kind, change))

    def _name_of(self, module: nn.Module, key: str) -> str:
        names = (name for name, each in named_modules(self.module) if each is module)
        prefix = next(names, "")
        return f"{prefix}.{key}" if prefix else key

    def _refusal(self, name: str, which: str, kind: tuple[Any, ...], change: str) -> str:
        way = "zero.unshard() the module, convert it, and shard() it anew"
        if change in map(str, DTYPE_NAMES):
            way = (
                f"pass shard() options=ZeroOptions(precision=Precision({which}={change})) "
                f"instead; or {way}"
            )
        return (
            f"{self.head}: {type(self.module).__name__}.to(), or another call that converts a "
            f"module: {name} is {kind[0]} on {kind[1]}, where shard() has put it, and would get "
            f"{change}. Nothing was changed. To convert it, {way}"
        )


def _probe(dtype: torch.dtype, device: torch.device, shape: tuple[int, ...]) -> Tensor:
    """Returns a small tensor whose values no other probe has had lately."""
    elems = torch.Size(shape).numel()
    first = next(_seeds) * max(elems, 1)
    return ((torch.arange(elems, device="cpu") + first) % 97 + 1).to(device, dtype).view(shape)


def _change_of(probe: Tensor, fn: Convert) -> str | None:
    """Returns the change that a function makes to a tensor, in words, or None."""
    before = _bits(probe)
    stride = probe.stride()
    with torch.no_grad():
        made = fn(probe)
    if made.dtype is not probe.dtype:
        return str(made.dtype)
    if made.device != probe.device:
        return f"memory on {made.device}"
    if made.layout is not torch.strided or (made.shape, made.stride()) != (probe.shape, stride):
        return f"strides {made.stride()}" if made.layout is torch.strided else str(made.layout)
    if made.device.type == "cpu" and made.is_shared():  # type: ignore[no-untyped-call]
        return "memory that torch shares between processes"
    return None if torch.equal(_bits(made), before) else "other values"


def _bits(tensor: Tensor) -> Tensor:
    """Returns a copy of a tensor's memory as bytes."""
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8).clone()


def refuse_conversions(
    root: nn.Module, head: str, alive: Callable[[], object | None]
) -> list[nn.Module]:
    """Has a module, and all inside it, refuse conversions; returns them.

    Args:
        root: the module.
        head: begins a message: operation and rank.
        alive: returns None once nothing shards the module any more.
    """
    modules = list(root.modules())
    for module in modules:
        object.__setattr__(module, _METHOD, Unconverted(module, head, alive))
    return modules


def allow_conversions(modules: list[nn.Module]) -> None:
    """Undoes :func:`refuse_conversions`."""
    for module in modules:
        vars(module).pop(_METHOD, None)
    modules.clear()
