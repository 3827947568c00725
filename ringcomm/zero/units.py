"""The units of a module: the modules that are gathered as one, and the parameters of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

from ringcomm.errors import ArgumentError
from ringcomm.module_names import (
    find_modules,
    matches,
    named_modules,
    named_parameters,
    plain_name,
    some,
    unwrapped,
    wrapped_key,
)
from ringcomm.zero.options import UnitOptions, Units, ZeroOptions

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(eq=False)
class Unit:
    """A module whose parameters are gathered when it runs.

    Attributes:
        name: plain name of the module; "" is the root.
        module: the module whose calls gather the unit.
        params: the parameters that belong to this unit and to no unit inside it, by plain name;
            each once, under its first name.
        options: choices for it.
    """

    name: str
    module: nn.Module
    params: dict[str, nn.Parameter] = field(default_factory=dict)
    options: UnitOptions = field(default_factory=UnitOptions)


def find_units(root: nn.Module, rule: Units | None) -> list[Unit]:
    """Returns the units of a module, the root first, then in the order of ``named_modules()``.

    A parameter that modules of several units share belongs to the innermost unit around all of
    them.

    Raises:
        ArgumentError: ``rule`` is neither types nor a function, or no module is of its types.
    """
    chosen = {id(root): Unit("", root)}
    for name, module in _chosen(root, rule):
        if module is not root and any(True for _ in module.parameters()):
            chosen.setdefault(id(module), Unit(name, module))
    for name, path in _owners(root, chosen).items():
        path[-1].params[plain_name(root, name)] = root.get_parameter(name)
    return list(chosen.values())


def choose_options(root: nn.Module, units: Sequence[Unit], options: ZeroOptions) -> None:
    """Gives units the choices of ``options.per_unit``.

    Raises:
        ArgumentError: a name is of no unit.
    """
    by_module = {id(unit.module): unit for unit in units if unit.name}
    for pattern, chosen in options.per_unit.items():
        found = [by_module.get(id(module)) for _, module in find_modules(root, pattern)]
        named = [unit for unit in found if unit is not None]
        if not named:
            there = some([unit.name for unit in by_module.values()])
            raise ArgumentError(
                f"shard: per_unit: expected names of units, but {pattern!r} matches none (a * "
                f"stands for one part of a name); there are {there}. ZeroOptions(units=) makes "
                "other modules units"
            )
        for unit in named:
            unit.options = chosen


def leave_out(root: nn.Module, units: Sequence[Unit], options: ZeroOptions) -> frozenset[int]:
    """Takes parameters that are to be ignored out of their units; returns the ``id`` of each.

    Raises:
        ArgumentError: a name is of no parameter and of no module that has one.
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
                f"none (a * stands for one part of a name); there are "
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
                f"{', '.join(each.__name__ for each in types)}. To gather all of it as one, pass "
                "lambda name, module: False"
            )
        yield from of_types


def _by_function(
    root: nn.Module, rule: Callable[[str, nn.Module], bool]
) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules that a function chooses; choosing a wrapper chooses the module inside."""
    done: set[int] = set()
    for name, module in named_modules(root):
        if id(module) not in done and rule(name, module):
            yield name, module
            if wrapped_key(module) is not None:
                done.update(id(each) for each in _inside_wrappers(module))


def _inside_wrappers(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the modules inside a wrapper that have its plain name."""
    while wrapped_key(module) is not None:
        module = next(module.children())
        yield module


def _list_elements(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yields the elements of the outermost lists of modules, with their plain names."""
    module = unwrapped(module)
    for name, child in module.named_children():
        if isinstance(module, _LISTS):
            yield prefix + name, child
        else:
            yield from _list_elements(child, f"{prefix}{name}.")


def _owners(root: nn.Module, chosen: dict[int, Unit]) -> dict[str, list[Unit]]:
    """Returns the units around all modules with a parameter, root first, by its first name."""
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
    """Returns the units on the way from the root to the module of that name."""
    path, module = [chosen[id(root)]], root
    for part in name.split(".") if name else ():
        module = getattr(module, part)
        unit = chosen.get(id(module))
        if unit is not None:
            path.append(unit)
    return path


def aliases(root: nn.Module) -> dict[str, str]:
    """Returns the first plain name of each tied parameter, by its every further name."""
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for name, param in named_parameters(root, remove_duplicate=False):
        known = first.setdefault(id(param), name)
        if known != name:
            found[name] = known
    return found
