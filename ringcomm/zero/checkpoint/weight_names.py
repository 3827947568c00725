"""Which tensors of weight files are which of a module: names, tied weights, Hugging Face's rules.

A model of the transformers library may have other names than its files, and may keep experts that
are files' tensors of their own as one parameter. The library's own tables say so, and are used
where a stack of files' tensors has its elements in the order of the parameter's.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from ringcomm.errors import ArgumentError, CheckpointError, UnsupportedError
from ringcomm.module_names import KnownNames, matches, named_modules, some, unwrapped
from ringcomm.zero.checkpoint.weight_files import StoredTensor, WeightFiles

Tensor = torch.Tensor
#: Gives the name in the module for one in the files; None leaves the tensor out.
Rename = Mapping[str, str] | Callable[[str], str | None]


class IncompatibleKeys(NamedTuple):
    """Names in which a module and what was loaded into it differ.

    Attributes:
        missing_keys: of parameters and persistent buffers that keep the values they had.
        unexpected_keys: of tensors that the module does not have.
    """

    missing_keys: tuple[str, ...]
    unexpected_keys: tuple[str, ...]

    def in_words(self, has: str) -> str:
        """Returns what differs, for an error; ``has`` is "they have", said of what is loaded."""
        said = [f"{has} no {some(self.missing_keys)}"] if self.missing_keys else []
        said += [f"the module has no {some(self.unexpected_keys)}"] if self.unexpected_keys else []
        return ", and ".join(said)


@dataclass(frozen=True)
class ModuleNames:
    """The plain names of a module's parameters and persistent buffers.

    Attributes:
        tensors: by first name.
        first: the first name, by every name.
        buffers: the first name, by the ``id`` of the module that has the buffer, and its key.
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
            for key, param in module._parameters.items():
                if param is not None:
                    made._add(dot + key, param, known)
            for key, buffer in module._buffers.items():
                if buffer is not None and key not in module._non_persistent_buffers_set:
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
        names: of the module.
        only: patterns of modules, parameters and buffers, with everything inside; None for all.
        operation: named in errors.

    Raises:
        ArgumentError: a pattern names nothing.
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
                    f"none matches {pattern!r} (a * stands for one part of a name); there are "
                    f"{some(known)}"
                )

    def __contains__(self, name: str) -> bool:
        return self._only is None or any(_inside(pattern, name) for pattern in self._only)


def _inside(pattern: str, name: str) -> bool:
    """Tells whether a pattern names something, or a module around it."""
    parts = name.split(".")
    return any(matches(pattern, ".".join(parts[:count])) for count in range(1, len(parts) + 1))


@dataclass(frozen=True)
class PartialLoad:
    """The choice of a checkpoint's tensors for a module that may be another one.

    Attributes:
        names: of the module.
        chosen: the part that is loaded.
        strict: refuse a checkpoint that has not all of the part, or more.
    """

    names: ModuleNames
    chosen: Chosen
    strict: bool

    def match(
        self, saved: Collection[str], tied: Mapping[str, str]
    ) -> tuple[dict[str, str], IncompatibleKeys]:
        """Returns the checkpoint's names by the module's first names, and what differs.

        Args:
            saved: the names in the checkpoint.
            tied: further names there, with the first ones.
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


@dataclass(frozen=True)
class Matched:
    """The parameters and buffers of a module, matched with the tensors of files.

    Attributes:
        found: by first name in the module, the stored tensors whose elements follow each other in
            the flattened tensor.
        keys: what else there is, on either side.
    """

    found: dict[str, tuple[StoredTensor, ...]]
    keys: IncompatibleKeys


def match(
    root: nn.Module,
    names: ModuleNames,
    files: WeightFiles,
    rename: Rename | None,
    only: Sequence[str] | None,
) -> Matched:
    """Finds the tensors of a module.

    Raises:
        ArgumentError: ``only`` names nothing.
        CheckpointError: shapes or dtypes do not fit, or two tensors have one name.
        UnsupportedError: a parameter is made of stored tensors in a way that reads no elements in
            order.
    """
    chosen = Chosen(names.first, only, "pretrained")
    rules = _Rules(root, names.first)
    stacks: dict[str, _Stack] = {}
    unexpected = []
    for stored in files.tensors.values():
        name = _renamed(stored.name, rename)
        if name is None:
            continue
        name, converter, pattern = rules.placed(name)
        if name not in names.first:
            if name in chosen and not rules.ignores_unexpected(name):
                unexpected.append(stored.name)
        elif name in chosen:
            stacks.setdefault(name, _Stack(converter)).add(pattern, stored)
    found: dict[str, tuple[StoredTensor, ...]] = {}
    for name, stack in stacks.items():
        first = names.first[name]
        # A tied weight may be in the files under each of its names: the first one counts.
        if first not in found or name == first:
            found[first] = stack.in_order(name, names.tensors[first], files)
    missing = [
        name
        for name in names.tensors
        if name in chosen and name not in found and not rules.ignores_missing(name)
    ]
    return Matched(found, IncompatibleKeys(tuple(missing), tuple(unexpected)))


def _renamed(name: str, rename: Rename | None) -> str | None:
    if rename is None:
        return name
    if isinstance(rename, Mapping):
        return rename.get(name, name)
    return rename(name)


class _Stack:
    """The stored tensors of one parameter, by the pattern that names them."""

    def __init__(self, converter: Any) -> None:
        self._converter = converter
        self._parts: dict[str | None, list[StoredTensor]] = {}

    def add(self, pattern: str | None, stored: StoredTensor) -> None:
        self._parts.setdefault(pattern, []).append(stored)

    def in_order(self, name: str, tensor: Tensor, files: WeightFiles) -> tuple[StoredTensor, ...]:
        """Returns the stored tensors in the order of the flattened parameter's elements."""
        shape = tuple(tensor.shape)
        runs = self._runs(name, len(shape))
        for each in runs:
            if not each.becomes(tensor.dtype):
                raise CheckpointError(
                    f"{files.source}: {each.name}: expected values for {tensor.dtype}, as the "
                    f"module has {name}, got {each.code}; quantized weights are not read"
                )
        made = self._converter is not None
        if not (_fill(runs, shape) if made else runs[0].shape == shape):
            several = f"{len(runs)} tensors of " if made else ""
            raise CheckpointError(
                f"{files.source}: {runs[0].name}: expected shape {shape}, as the module has {name},"
                f" got {several}shape {runs[0].shape}"
            )
        return tuple(runs)

    def _runs(self, name: str, dims: int) -> list[StoredTensor]:
        if self._converter is None:
            runs = [each for part in self._parts.values() for each in part]
            if len(runs) > 1:
                raise CheckpointError(
                    f"{runs[0].name} and {runs[1].name} in the files are both {name} of the module"
                )
            return runs
        kinds = [(type(each).__name__, getattr(each, "dim", 0)) for each in _operations(self)]
        order = [
            self._parts[each] for each in self._converter.source_patterns if each in self._parts
        ]
        parts = [sorted(part, key=lambda stored: _natural(stored.name)) for part in order]
        one_each = len({len(part) for part in parts}) == 1
        stacked = kinds == [("MergeModulelist", 0)] and len(parts) == 1
        joined = kinds == [("MergeModulelist", 0), ("Concatenate", 1)] and one_each and dims > 1
        whole = kinds == [("Concatenate", 0)] and all(len(part) == 1 for part in parts)
        if not (stacked or joined or whole) or len(self._converter.target_patterns) != 1:
            raise UnsupportedError(
                f"pretrained: {name} is made of {parts[0][0].name} and others by "
                f"{[kind for kind, _ in kinds]}, which does not keep their elements in order; load "
                "the model with from_pretrained() and pass it to shard()"
            )
        return [each for row in zip(*parts, strict=True) for each in row]


def _operations(stack: _Stack) -> Sequence[Any]:
    found: Sequence[Any] = stack._converter.operations
    return found


def _fill(runs: Sequence[StoredTensor], shape: tuple[int, ...]) -> bool:
    """Tells whether tensors that follow each other fill a parameter with the same last dims."""
    last = shape[-(len(runs[0].shape) - 1) :] if len(runs[0].shape) > 1 else ()
    elems = sum(each.elems for each in runs)
    return elems == torch.Size(shape).numel() and all(each.shape[1:] == last for each in runs)


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Sorts numbers in names as numbers."""
    parts = name.split(".")
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts]


class _Rules:
    """The transformers library's rules for the names of a model, if the model is one of its own."""

    def __init__(self, root: nn.Module, names: Mapping[str, str]) -> None:
        root = unwrapped(root)
        self._names = names
        self._known = KnownNames(names)
        self._prefix = getattr(root, "base_model_prefix", "") if is_transformers(root) else ""
        self._ignored = {
            kind: _any_of(getattr(root, f"_keys_to_ignore_on_load_{kind}", None))
            for kind in ("missing", "unexpected")
        }
        self._renamings: list[Any] = []
        self._converters: list[Any] = []
        # Older releases of the library have no tables, and models with the names of their files.
        tables = "transformers.conversion_mapping"
        if is_transformers(root) and tables in sys.modules:
            for each in sys.modules[tables].get_model_conversion_mapping(root):
                kind = self._converters if hasattr(each, "operations") else self._renamings
                kind.append(each)

    def placed(self, name: str) -> tuple[str, Any, str | None]:
        """Returns the module's name for one in the files, and what makes it of several."""
        name = self._known.find(name)
        if name in self._names:
            return name, None, None
        for each in self._renamings:
            name, _ = each.rename_source_key(name)
        for each in self._converters:
            name, pattern = each.rename_source_key(name)
            if pattern is not None:
                return self._with_prefix(name), each, pattern
        return self._with_prefix(name), None, None

    def _with_prefix(self, name: str) -> str:
        """Adds the prefix of the base model, or takes it away, where the module has that name."""
        others = (f"{self._prefix}.{name}", name.removeprefix(f"{self._prefix}."))
        if self._prefix and name not in self._names:
            return next((each for each in others if each in self._names), name)
        return name

    def ignores_missing(self, name: str) -> bool:
        found = self._ignored["missing"]
        return found is not None and found.search(name) is not None

    def ignores_unexpected(self, name: str) -> bool:
        found = self._ignored["unexpected"]
        return found is not None and found.search(name) is not None


def is_transformers(root: nn.Module) -> bool:
    # Looked up in sys.modules, to import nothing: no module can be one of its models otherwise.
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(root, library.PreTrainedModel)


def _any_of(patterns: Iterable[str] | None) -> re.Pattern[str] | None:
    found = [f"({each})" for each in patterns or ()]
    return re.compile("|".join(found)) if found else None


def own_initializer(root: nn.Module) -> Callable[[nn.Module], None]:
    """Returns what fills a module's own parameters and buffers: its model's, or its own method.

    A model of the transformers library says itself how its modules are initialised, buffers that
    are in no file (rotary frequencies) included.
    """
    owners: dict[int, nn.Module] = {}
    _find_owners(root, None, owners)

    def fill(module: nn.Module) -> None:
        owner = owners.get(id(module))
        if owner is not None:
            owner._init_weights(module)  # type: ignore[operator]
        elif hasattr(module, "reset_parameters"):
            module.reset_parameters()  # type: ignore[operator]
        else:
            raise ArgumentError(
                f"pretrained: a {type(module).__name__} has parameters or buffers on the meta "
                "device that are not in the files, and no reset_parameters(); pass init=, which "
                "fills those of a module"
            )

    return fill


def _find_owners(module: nn.Module, owner: nn.Module | None, owners: dict[int, nn.Module]) -> None:
    owner = module if is_transformers(module) else owner
    if owner is not None:
        owners[id(module)] = owner
    for child in module.children():
        _find_owners(child, owner, owners)
