# SPDX-License-Identifier: Apache-2.0
"""Names of modules and their tensors without wrapper parts, and patterns that select some of them.

NOTE [Names without wrappers]
``torch.compile()``, activation checkpoints and data parallelism wrap a module in another module
without tensors of its own, which adds a part to the names inside. Wrappers may change from run to
run, so no file and no option contains their parts: a tensor's *unwrapped* name is its name without
any wrapper. Readers of files also accept names with wrapper parts; see :class:`KnownNames`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import chain, combinations, islice
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ringcomm.errors import ArgumentError

__all__ = [
    "Chosen",
    "IncompatibleKeys",
    "KnownNames",
    "ModuleNames",
    "PartialLoad",
    "find_modules",
    "matches",
    "named_modules",
    "named_parameters",
    "some",
    "unwrapped",
    "unwrapped_name",
    "without_wrappers",
    "wrapped_key",
]

Tensor = torch.Tensor

# The most names that a message lists.
_NAMED = 5
# The attributes in which wrappers keep the wrapped module: torch.compile(), activation checkpoints
# and FSDP. No model uses these names.
_RESERVED = frozenset(("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"))
# The attribute of data parallelism's wrappers. A model may use this name itself.
_PARALLEL = "module"
# How many "module" parts are tried as wrappers' parts: each doubles the number of combinations.
_MAX_PARALLEL = 4


def wrapped_key(module: nn.Module | None) -> str | None:
    """Returns the attribute in which a wrapper keeps its module; None if it is not a wrapper.

    A module that has tensors, or other modules than the wrapped one, is not a wrapper.
    """
    children = [] if module is None else list(islice(module.named_children(), 2))
    if module is None or len(children) != 1:
        return None
    key = children[0][0]
    parallel = key == _PARALLEL and isinstance(module, (DataParallel, DistributedDataParallel))
    if key not in _RESERVED and not parallel:
        return None
    own = chain(module.parameters(recurse=False), module.buffers(recurse=False))
    return None if any(True for _ in own) else key


def unwrapped(module: nn.Module) -> nn.Module:
    """Returns the module inside all wrappers; a module without wrappers is returned itself."""
    while wrapped_key(module) is not None:
        module = next(module.children())
    return module


def unwrapped_name(root: nn.Module, name: str) -> str:
    """Returns the unwrapped name of a module, a parameter or a buffer of ``root``."""
    parts = name.split(".")
    if _PARALLEL not in parts and not _RESERVED.intersection(parts):
        return name
    module: nn.Module | None = root
    kept = []
    for index, part in enumerate(parts):
        key = wrapped_key(module)
        if key != part and key is not None and module is not None:
            # Some wrappers omit their own part from the names that they report.
            module = unwrapped(module)
            key = None
        if key is None:
            kept.append(part)
        # The last part may name a parameter, and reading its attribute may gather it.
        last = index + 1 == len(parts)
        child = None if module is None or last else getattr(module, part, None)
        module = child if isinstance(child, nn.Module) else None
    return ".".join(kept)


def named_modules(
    root: nn.Module, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Module]]:
    """Like ``root.named_modules()``, with unwrapped names; a wrapper has its module's name."""
    for name, module in root.named_modules(remove_duplicate=remove_duplicate):
        yield unwrapped_name(root, name), module


def named_parameters(
    root: nn.Module, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:
    """Like ``root.named_parameters()``, with unwrapped names."""
    for name, param in root.named_parameters(remove_duplicate=remove_duplicate):
        yield unwrapped_name(root, name), param


def without_wrappers(names: Iterable[str]) -> dict[str, str]:
    """Maps the names of a file's tensors to their unwrapped names.

    Without a module only the reserved parts, which no model uses, are removed. A name is kept if
    its unwrapped form is another tensor's name.
    """
    there = list(names)
    found: dict[str, str] = {}
    taken = set(there)
    for name in there:
        inner = ".".join(part for part in name.split(".") if part not in _RESERVED)
        found[name] = name if inner in taken or not inner else inner
        taken.add(found[name])
    return found


class KnownNames:
    """The unwrapped names of a module, and look-ups of them by the names in a file.

    The file may come from a run with other wrappers, whose parts are in its names.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)

    @classmethod
    def of(cls, root: nn.Module) -> KnownNames:
        """Returns the names of a module's parameters, buffers and extra states in a state dict."""
        names: list[str] = []
        for name, module in named_modules(root, remove_duplicate=False):
            own = [key for key, _ in module.named_parameters("", False, False)]
            own += [key for key, _ in module.named_buffers("", False, False)]
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                own.append(_EXTRA_STATE_KEY_SUFFIX)
            names += [f"{name}.{key}" if name else key for key in own]
        return cls(names)

    def find_module(self, name: str) -> str:
        """Like :meth:`find`, for the name of a module that has extra state."""
        end = _EXTRA_STATE_KEY_SUFFIX
        found = self.find(f"{name}.{end}" if name else end)
        return found.removesuffix(end).removesuffix(".")

    def find(self, name: str) -> str:
        """Returns the known name for a file's name, or the file's name if none matches."""
        if name in self._names:
            return name
        parts = [part for part in name.split(".") if part not in _RESERVED]
        at = [index for index, part in enumerate(parts) if part == _PARALLEL]
        if len(at) > _MAX_PARALLEL:
            at = at[:1]
        for count in range(len(at) + 1):
            for dropped in combinations(at, count):
                kept = [part for index, part in enumerate(parts) if index not in dropped]
                found = ".".join(kept)
                if found in self._names:
                    return found
        return name


def find_modules(model: nn.Module, pattern: str) -> list[tuple[str, nn.Module]]:
    """Returns the modules that match a pattern, with their names from ``named_modules()``.

    Args:
        model: the whole model.
        pattern: an unwrapped name; a ``*`` matches any characters within one part. A wrapper and
            its module have the same unwrapped name; only the wrapper is returned.
    """
    found: dict[str, tuple[str, nn.Module]] = {}
    for name, module in model.named_modules():
        inner = unwrapped_name(model, name)
        if matches(pattern, inner):
            found.setdefault(inner, (name, module))
    return list(found.values())


def matches(pattern: str, name: str) -> bool:
    """True if a pattern matches this unwrapped name."""
    parts = name.split(".")
    wanted = [part for part in pattern.split(".") if part not in _RESERVED]
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def some(names: Sequence[str]) -> str:
    """Returns names for a message: the first few, and how many more there are."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(map(repr, names[:_NAMED])) + more


# ---- the tensors of a module, compared with those of a file -------------------------------------


class IncompatibleKeys(NamedTuple):
    """Names in which a module differs from the state that was loaded into it.

    Attributes:
        missing_keys: parameters and persistent buffers that keep their earlier values.
        unexpected_keys: loaded tensors that the module does not have.
    """

    missing_keys: tuple[str, ...]
    unexpected_keys: tuple[str, ...]

    def in_words(self, has: str) -> str:
        """Describes the difference for an error: "they have no X" if ``has`` is "they have"."""
        said = [f"{has} no {some(self.missing_keys)}"] if self.missing_keys else []
        said += [f"the module has no {some(self.unexpected_keys)}"] if self.unexpected_keys else []
        return ", and ".join(said)


@dataclass(frozen=True)
class ModuleNames:
    """The unwrapped names of a module's parameters and persistent buffers.

    Attributes:
        tensors: the tensors, by first name; a tied tensor has several names.
        first: the first name of a tensor, by each of its names.
        buffers: the first name, by (``id`` of the module that has the buffer, buffer's key).
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)
    buffers: dict[tuple[int, str], str] = field(default_factory=dict)

    @classmethod
    def of(cls, root: nn.Module) -> ModuleNames:
        made = cls()
        known: dict[int, str] = {}
        for prefix, module in named_modules(root, remove_duplicate=False):
            dot = f"{prefix}." if prefix else ""
            for key, param in module.named_parameters("", False, False):
                made._add(dot + key, param, known)
            for key, buffer in module.named_buffers("", False, False):
                if key not in module._non_persistent_buffers_set:
                    made.buffers.setdefault((id(module), key), made._add(dot + key, buffer, known))
        return made

    def _add(self, name: str, tensor: Tensor, known: dict[int, str]) -> str:
        first = known.setdefault(id(tensor), name)
        self.first[name] = first
        self.tensors.setdefault(first, tensor)
        return first


class Chosen:
    """The part of a module that is loaded.

    Args:
        names: the names of the module's tensors.
        only: patterns of modules, parameters and buffers, with everything inside; None for all.
        operation: the name of the operation, for errors.

    Raises:
        ArgumentError: a pattern matches no name.
    """

    def __init__(self, names: Iterable[str], only: Sequence[str] | None, operation: str) -> None:
        if isinstance(only, str):
            raise ArgumentError(f"{operation}: only: expected a list of names, got {only!r}")
        self._only = None if only is None else tuple(only)
        known = list(names)
        for pattern in self._only or ():
            if not any(_inside(pattern, name) for name in known):
                raise ArgumentError(
                    f"{operation}: only: expected names of modules, parameters or buffers, but "
                    f"none matches {pattern!r} (a * matches one part of a name); the names are "
                    f"{some(known)}"
                )

    def __contains__(self, name: str) -> bool:
        return self._only is None or any(_inside(pattern, name) for pattern in self._only)


def _inside(pattern: str, name: str) -> bool:
    """True if a pattern matches this name, or the name of a module around it."""
    parts = name.split(".")
    return any(matches(pattern, ".".join(parts[:count])) for count in range(1, len(parts) + 1))


@dataclass(frozen=True)
class PartialLoad:
    """Matches a checkpoint's tensors with those of a module, which may be another model.

    Attributes:
        names: the names of the module.
        chosen: the part that is loaded.
        strict: raise if the checkpoint lacks tensors of the part, or has additional ones.
    """

    names: ModuleNames
    chosen: Chosen
    strict: bool

    def match(
        self, saved: Collection[str], tied: Mapping[str, str]
    ) -> tuple[dict[str, str], IncompatibleKeys]:
        """Returns the checkpoint's names by the module's first names, and the differences.

        Args:
            saved: the names in the checkpoint.
            tied: the first names of tied tensors in the checkpoint, by their other names.
        """
        found: dict[str, str] = {}
        for name, first in self.names.first.items():
            source = tied.get(name, name)
            if name in self.chosen and source in saved and (name == first or first not in found):
                found[first] = source
        known = {*self.names.first, *found.values()}
        missing = [n for n in self.names.tensors if n in self.chosen and n not in found]
        unexpected = [n for n in saved if n in self.chosen and n not in known]
        return found, IncompatibleKeys(tuple(missing), tuple(sorted(unexpected)))
