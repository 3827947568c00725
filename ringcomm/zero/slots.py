"""The places of a sharded module's parameters, in which no other tensor may take theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ringcomm.errors import ArgumentError, UnsupportedError
from ringcomm.module_names import plain_name
from ringcomm.zero.buckets import BucketParam

Tensor = torch.Tensor


class _Slot(NamedTuple):
    """The place of a parameter: ``module._parameters[key] is param``, ``name`` from the root."""

    name: str
    module: nn.Module
    key: str
    param: nn.Parameter


class Slots:
    """The places of a module's parameters that lie in buckets.

    NOTE [Replaced parameters]
    A parameter that replaces one that ``shard()`` has seen would never be trained: hooks, buckets
    and the optimizer hold the old one, which the module does not use any more. A parameter that
    ``load_state_dict(assign=True)`` puts there is copied into the old one, as a load without
    ``assign`` does. Any other replacement is refused at the step. A parameter that only moves to
    another name, as pruning and most parametrizations move it, goes on being trained.
    """

    def __init__(self, root: nn.Module, placed: Iterable[BucketParam], head: str) -> None:
        self._root = root
        self._head = head
        known = {id(each.param) for each in placed}
        self._slots = [
            _Slot(f"{prefix}.{key}" if prefix else key, module, key, param)
            for prefix, module in root.named_modules(remove_duplicate=False)
            for key, param in module._parameters.items()
            if id(param) in known and param is not None
        ]
        # From the last look. The tables themselves may change; see NOTE [Plain while here].
        self._entries: list[tuple[nn.Module, str, str, object]] | None = None

    def _read(self) -> Iterator[tuple[nn.Module, str, str, object]]:
        """Yields the table entries of all modules; while they are unchanged, no look is needed."""
        known = {id(slot.param) for slot in self._slots}
        for module in self._root.modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue  # its tables are not Python's, and do not change
            for key, child in module._modules.items():
                yield module, "_modules", key, child
            for key, param in module._parameters.items():
                if id(param) in known:
                    yield module, "_parameters", key, param

    def check(self) -> None:
        """Checks that each parameter still has its place.

        Raises:
            ArgumentError: the module has another tensor in a parameter's place.
            UnsupportedError: a module of TorchScript replaced a parameter's module.
        """
        if self._entries is None:
            return self._look()
        for module, table, key, thing in self._entries:
            if module.__dict__[table].get(key) is not thing:
                return self._look()
        return None

    def _look(self) -> None:
        there = {id(param) for param in self._root.parameters()}
        for slot in self._slots:
            if self._is_replaced(slot, there):
                name = plain_name(self._root, slot.name)
                raise ArgumentError(
                    f"{self._head}: parameter {name}: another tensor has its place in the "
                    "module since shard(), and would never be trained. Keep the parameter and "
                    "change its values in place, with copy_(), at stage 3 inside "
                    "ringcomm.zero.gathered(module, write_from=0). Replace, tie or parametrize "
                    "parameters before shard(), or unshard() the module first"
                )
        self._entries = list(self._read())

    def _is_replaced(self, slot: _Slot, there: set[int]) -> bool:
        owner: Any = self._root
        for part in slot.name.split(".")[:-1]:
            owner = vars(owner)["_modules"].get(part)
            if owner is None:
                return False  # deleted, so nothing uses it
            if isinstance(owner, torch.jit.ScriptModule):
                raise UnsupportedError(
                    f"{self._head}: parameter {plain_name(self._root, slot.name)}: a "
                    f"{type(owner).__name__} of TorchScript has taken the place of its module "
                    "since shard(), without the module's hooks. Compile modules with "
                    "torch.compile(), or unshard() the root before you script or trace its parts"
                )
        now = owner._parameters.get(slot.key)
        if now is not None or id(slot.param) in there:
            return now is not None and now is not slot.param
        # The value itself is not read, since a property may compute it from parameters.
        computed = isinstance(getattr(type(owner), slot.key, None), property)
        held = vars(owner).get(slot.key), owner._buffers.get(slot.key)
        return computed or any(isinstance(each, Tensor) for each in held)

    def watch_loads(self, keep: Callable[[RemovableHandle], None]) -> None:
        """Has ``load_state_dict(assign=True)`` copy into the parameters, not replace them."""
        of: dict[nn.Module, list[_Slot]] = {}
        for slot in self._slots:
            of.setdefault(slot.module, []).append(slot)
        for module, slots in of.items():
            keep(module.register_load_state_dict_post_hook(_TakeOver(slots)))  # type: ignore[no-untyped-call]


class _TakeOver:
    """A load hook that copies assigned tensors into one module's parameters, and restores these."""

    def __init__(self, slots: list[_Slot]) -> None:
        self._slots = slots

    @torch.no_grad()
    def __call__(self, module: nn.Module, incompatible: Any) -> None:
        for slot in self._slots:
            now = module._parameters.get(slot.key)
            if now is not None and now is not slot.param:
                slot.param.copy_(now)
                module._parameters[slot.key] = slot.param
