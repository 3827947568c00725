# SPDX-License-Identifier: Apache-2.0
"""Units: parts of a module; all parameters of a unit are unsharded together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import add
from typing import Protocol

import torch
from torch import nn

from ringcomm.errors import ArgumentError
from ringcomm.module_names import (
    find_modules,
    matches,
    named_modules,
    named_parameters,
    some,
    unwrapped,
    unwrapped_name,
    wrapped_key,
)
from ringcomm.optim.dtensors import Sharding, local_of
from ringcomm.optim.layout import (
    BUCKET_DTYPES,
    DTYPE_NAMES,
    DTYPES,
    BucketLayout,
    ParamSpec,
    ShardLayout,
)
from ringcomm.zero.stages.options import ModuleDtypes, UnitOptions, Units, ZeroOptions

# ---- The values of parameters that move into buckets: held as tensors, or read from elsewhere ----

Tensor = torch.Tensor


class Values(Protocol):
    """The values of this rank's local tensor of a parameter, which can be read piece by piece.

    Attributes:
        dtype: the parameter's dtype in the module, before it moves into a bucket.
    """

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, begin: int, out: Tensor) -> None:
        """Fills ``out`` [n], of any floating-point dtype, with the elements from ``begin`` on."""


class HeldValues:
    """Values that a tensor holds."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self.dtype = tensor.dtype

    def read(self, begin: int, out: Tensor) -> None:
        out.copy_(self._tensor.reshape(-1)[begin : begin + out.numel()])


class WeightSource(ABC):
    """A source of values for a module that is being sharded; every rank reads its own values.

    A source is opened before anything changes, and is read while parameters move. Read errors are
    raised in :meth:`settle`: a rank that raised earlier would keep the other ranks waiting.
    """

    @abstractmethod
    def open(self, root: nn.Module) -> None:
        """Finds the source's values of a module's parameters and persistent buffers.

        Raises:
            CheckpointError: values are missing, or do not fit the module.
        """

    @property
    @abstractmethod
    def digest(self) -> str:
        """Returns a description that is equal on ranks that read the same values."""

    @abstractmethod
    def values_of(self, param: Tensor) -> Values | None:
        """Returns the values of a parameter; None if the source has none."""

    @abstractmethod
    def values_of_buffer(self, owner: nn.Module, key: str) -> Values | None:
        """Returns the values of a module's own buffer; None if the source has none."""

    @abstractmethod
    def initialize(self, module: nn.Module) -> None:
        """Initializes a module's own parameters and buffers, some of which the source lacks.

        Raises:
            ArgumentError: the source does not define how to initialize the module.
        """

    @abstractmethod
    def settle(self) -> None:
        """Ends the reading; raises the error of a read that failed."""

    @abstractmethod
    def close(self) -> None:
        """Ends the reading, whether or not a read has failed."""


_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(eq=False)
class Unit:
    """A module whose parameters are unsharded when it runs.

    Attributes:
        name: unwrapped name of the module; "" is the root.
        module: the module whose calls unshard the unit.
        params: the parameters that belong to this unit and to no unit inside it, by unwrapped name;
            each once, under its first name.
        options: the options of this unit.
    """

    name: str
    module: nn.Module
    params: dict[str, nn.Parameter] = field(default_factory=dict)
    options: UnitOptions = field(default_factory=UnitOptions)


def find_units(root: nn.Module, rule: Units | None) -> list[Unit]:
    """Returns the units of a module, the root first, then in the order of ``named_modules()``.

    If modules of several units share a parameter, it belongs to the innermost unit that contains
    all of these modules.

    Raises:
        ArgumentError: ``rule`` is neither types nor a function, or no module has one of its types.
    """
    chosen = {id(root): Unit("", root)}
    for name, module in _chosen(root, rule):
        if module is not root and any(True for _ in module.parameters()):
            chosen.setdefault(id(module), Unit(name, module))
    for name, path in _owners(root, chosen).items():
        path[-1].params[unwrapped_name(root, name)] = root.get_parameter(name)
    return list(chosen.values())


def choose_options(root: nn.Module, units: Sequence[Unit], options: ZeroOptions) -> None:
    """Gives units their options from ``options.per_unit``.

    Raises:
        ArgumentError: a name matches no unit.
    """
    by_module = {id(unit.module): unit for unit in units if unit.name}
    for pattern, chosen in options.per_unit.items():
        found = [by_module.get(id(module)) for _, module in find_modules(root, pattern)]
        named = [unit for unit in found if unit is not None]
        if not named:
            there = some([unit.name for unit in by_module.values()])
            raise ArgumentError(
                f"shard: per_unit: expected names of units, but {pattern!r} matches none (a * "
                f"matches one part of a name); there are {there}. ZeroOptions(units=) makes "
                "other modules units"
            )
        for unit in named:
            unit.options = chosen


def leave_out(root: nn.Module, units: Sequence[Unit], options: ZeroOptions) -> frozenset[int]:
    """Removes ignored parameters from their units; returns the ``id`` of each ignored one.

    Raises:
        ArgumentError: a name matches neither a parameter nor a module with parameters.
    """
    named = list(named_parameters(root, remove_duplicate=False))
    ignored: set[int] = set()
    for pattern in options.ignored:
        found = {id(param) for name, param in named if matches(pattern, name)}
        for _, module in find_modules(root, pattern):
            found.update(map(id, module.parameters()))
        if not found:
            raise ArgumentError(
                f"shard: ignored: expected names of parameters or modules, but {pattern!r} matches "
                f"none (a * matches one part of a name); there are "
                f"{some([name for name, _ in named])}"
            )
        ignored |= found
    for unit in units:
        kept = {name: param for name, param in unit.params.items() if id(param) not in ignored}
        unit.params = kept
    return frozenset(ignored)


def _chosen(root: nn.Module, rule: Units | None) -> Iterator[tuple[str, nn.Module]]:
    if rule is None:
        found = list(_list_elements(root, ""))
        yield from found or unwrapped(root).named_children()
    elif callable(rule) and not isinstance(rule, type):
        yield from _by_function(root, rule)
    else:
        types = () if isinstance(rule, type) else tuple(rule)
        if not types or not all(isinstance(each, type) for each in types):
            raise ArgumentError(
                f"units: expected types of modules, or a function of a name and a module, got "
                f"{rule!r}"
            )
        of_types = [(n, m) for n, m in named_modules(root) if isinstance(m, types)]
        if not of_types:
            raise ArgumentError(
                f"units: expected types of modules, but {type(root).__name__} has none of "
                f"{', '.join(each.__name__ for each in types)}. To unshard the whole module as one "
                "unit, pass units=lambda name, module: False"
            )
        yield from of_types


def _by_function(
    root: nn.Module, rule: Callable[[str, nn.Module], bool]
) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules that ``rule`` selects, without modules inside a selected wrapper."""
    done: set[int] = set()
    for name, module in named_modules(root):
        if id(module) not in done and rule(name, module):
            yield name, module
            if wrapped_key(module) is not None:
                done.update(id(each) for each in _inside_wrappers(module))


def _inside_wrappers(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the modules inside a wrapper that have the same unwrapped name as the wrapper."""
    while wrapped_key(module) is not None:
        module = next(module.children())
        yield module


def _list_elements(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yields the elements of the outermost lists of modules, with their unwrapped names."""
    module = unwrapped(module)
    for name, child in module.named_children():
        if isinstance(module, _LISTS):
            yield prefix + name, child
        else:
            yield from _list_elements(child, f"{prefix}{name}.")


def _owners(root: nn.Module, chosen: dict[int, Unit]) -> dict[str, list[Unit]]:
    """Returns, by first name of a parameter, the units around all modules with this parameter."""
    first: dict[int, str] = {}
    around: dict[str, list[Unit]] = {}
    for prefix, module in root.named_modules(remove_duplicate=False):
        path = _path(root, prefix, chosen)
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            full = f"{prefix}.{name}" if prefix else name
            known = first.setdefault(id(param), full)
            before = around.get(known, path)
            same = [a for a, b in zip(before, path, strict=False) if a is b]
            around[known] = same
    return around


def _path(root: nn.Module, name: str, chosen: dict[int, Unit]) -> list[Unit]:
    """Returns the units on the path from the root to the module ``name``."""
    path, module = [chosen[id(root)]], root
    for part in name.split(".") if name else ():
        module = getattr(module, part)
        unit = chosen.get(id(module))
        if unit is not None:
            path.append(unit)
    return path


def aliases(root: nn.Module) -> dict[str, str]:
    """Returns {further name of a tied parameter: its first name}, without wrappers' names."""
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for name, param in named_parameters(root, remove_duplicate=False):
        known = first.setdefault(id(param), name)
        if known != name:
            found[name] = known
    return found


# ---- The assignment of parameters to buckets ----------------------------------------------------


@dataclass(frozen=True)
class BucketAssignment:
    """The trainable (or the frozen) parameters of a module in buckets; equal at every stage.

    Attributes:
        names: the parameters' names, by parameter index.
        params: parameters, by index.
        layout: the layout of these parameters in buckets.
        unit_of: for each bucket number, the index of the unit of its parameters.
    """

    names: tuple[str, ...]
    params: tuple[nn.Parameter, ...]
    layout: ShardLayout
    unit_of: tuple[int, ...]


def assign_buckets(
    units: Sequence[Unit], options: ZeroOptions, dtypes: ModuleDtypes, trainable: bool
) -> BucketAssignment:
    """Lays out the trainable or the frozen parameters of units; no bucket spans two units.

    Parameters of several dtypes in a unit get separate buckets for each dtype. Frozen 8-bit
    parameters keep their dtype; other frozen parameters that no optimizer takes are in no bucket.

    Raises:
        ArgumentError: a trainable parameter has a dtype that no optimizer takes.
    """
    named: list[tuple[str, nn.Parameter]] = []
    specs: list[ParamSpec] = []
    buckets: list[BucketLayout] = []
    unit_of: list[int] = []
    for number, unit in enumerate(units):
        first = len(specs)
        for name, param in unit.params.items():
            if trainable and param.requires_grad and param.dtype not in DTYPE_NAMES:
                raise ArgumentError(
                    f"shard: parameter {name}: expected dtype {', '.join(DTYPES)}, got "
                    f"{param.dtype}, which no optimizer steps; freeze it (requires_grad_(False)), "
                    "and train other parameters, such as adapters"
                )
            if param.requires_grad == trainable and param.dtype in BUCKET_DTYPES:
                named.append((name, param))
                specs.append(_spec(name, param, dtypes.of_param(param)))
        run = ShardLayout.assign(specs[first:], options.bucket_elems)
        for bucket in run.buckets:
            buckets.append(bucket.with_params(partial(add, first)))
            unit_of.append(number)
    return BucketAssignment(
        tuple(name for name, _ in named),
        tuple(param for _, param in named),
        ShardLayout(tuple(specs), options.bucket_elems, tuple(buckets)),
        tuple(unit_of),
    )


def _spec(name: str, param: nn.Parameter, dtype: torch.dtype | None) -> ParamSpec:
    """Returns the spec that gives a parameter, even a frozen one, a place in a bucket.

    The spec has the dtype that the parameter has after the cast to ``dtype``, and no strides: in
    checkpoints a shard of a bucket is then a shard of the flattened parameter.
    """
    shape = tuple(local_of(param).shape)
    if param.dtype not in DTYPE_NAMES:
        dtype = None
    return ParamSpec(shape, dtype or param.dtype, name=name, sharding=Sharding.of(param))


def by_optimizer(
    assignment: BucketAssignment,
    params: Sequence[Tensor],
    groups: Sequence[int],
    names: Sequence[str],
) -> ShardLayout:
    """Returns the layout with its parameters in an optimizer's order.

    Args:
        assignment: the buckets of the trainable parameters.
        params: parameters in the optimizer's order. Frozen parameters and repetitions are in no
            bucket; bucket parameters that ``params`` lacks become padding.
        groups: the param group of each parameter.
        names: the name of each parameter; "" means the parameter's name in the module.
    """
    index_of = {id(param): index for index, param in enumerate(assignment.params)}
    specs: list[ParamSpec] = []
    position: dict[int, int] = {}
    seen: dict[int, int] = {}
    for at, (param, group, name) in enumerate(zip(params, groups, names, strict=True)):
        index = index_of.get(id(param))
        tied_to = seen.setdefault(id(param), at)
        if index is None:
            frozen = ParamSpec.of(param, group, name, _earlier(tied_to, at))
            specs.append(replace(frozen, trainable=False, stride=None))
            continue
        spec = replace(assignment.layout.params[index], group=group)
        if name:
            spec = replace(spec, name=name)
        specs.append(replace(spec, tied_to=_earlier(tied_to, at)))
        position.setdefault(index, at)
    buckets = tuple(bucket.with_params(position.get) for bucket in assignment.layout.buckets)
    return ShardLayout(tuple(specs), assignment.layout.bucket_elems, buckets)


def _earlier(first: int, at: int) -> int | None:
    return None if first == at else first
