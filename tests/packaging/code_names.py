# SPDX-License-Identifier: Apache-2.0
"""Finds ringcomm names in code that do not exist, and calls that do not fit a signature."""

from __future__ import annotations

import ast
import builtins
import importlib
import importlib.util
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE = "ringcomm"
# These modules import libraries that may be missing.
INTEGRATIONS = {f"ringcomm.extras.{each}" for each in ("accelerate", "lightning", "transformers")}


def exported_by(module: str) -> list[str]:
    """Returns the names in a module's ``__all__``, without importing the module."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return []
    for node in ast.parse(Path(spec.origin).read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


@dataclass(frozen=True)
class Instance:
    """Stands for any object of a class."""

    kind: type


def _is_ours(thing: Any) -> bool:
    name = thing.__name__ if isinstance(thing, ModuleType) else getattr(thing, "__module__", None)
    return isinstance(name, str) and name.partition(".")[0] == PACKAGE


def _attributes_set(kind: type) -> set[str]:
    """Returns the annotations of a class, and the names in its ``__init__`` methods."""
    found: set[str] = set()
    for each in kind.__mro__:
        found |= set(getattr(each, "__annotations__", {}))
        init = each.__dict__.get("__init__")
        if inspect.isfunction(init):
            found |= set(init.__code__.co_names)
    return found


class Names:
    """The known names of one document, to which its blocks add one after the other."""

    def __init__(self) -> None:
        self.known: dict[str, Any] = {}
        self.problems: list[str] = []

    def read(self, tree: ast.Module) -> None:
        """Checks a block: its imports, the objects that it makes, its attributes and calls."""
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                self._import(node)
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign):
                self._assign(node.targets, node.value)
            elif isinstance(node, ast.withitem) and node.optional_vars is not None:
                self._assign([node.optional_vars], node.context_expr)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                self._value(node, report=True)
            elif isinstance(node, ast.Call):
                self._call(node)

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        if isinstance(node, ast.Import):
            for each in node.names:
                if each.name.partition(".")[0] == PACKAGE:
                    module = importlib.import_module(each.name)
                    top = module if each.asname else importlib.import_module(PACKAGE)
                    self.known[each.asname or PACKAGE] = top
                else:
                    self.known.pop(each.asname or each.name.partition(".")[0], None)
            return
        for each in node.names:
            name = each.asname or each.name
            self.known.pop(name, None)
            if (node.module or "").partition(".")[0] != PACKAGE:
                continue
            if str(node.module) in INTEGRATIONS:
                if each.name not in exported_by(str(node.module)):
                    self.problems.append(f"from {node.module} import {each.name}")
                continue
            module = importlib.import_module(str(node.module))
            try:
                self.known[name] = getattr(module, each.name)
            except AttributeError:
                self.problems.append(f"from {node.module} import {each.name}")

    def _assign(self, targets: list[ast.expr], value: ast.expr) -> None:
        made = self._made(value)
        for target in targets:
            if isinstance(target, ast.Name):
                self.known.pop(target.id, None)
                if made is not None:
                    self.known[target.id] = made

    def _made(self, node: ast.expr) -> Instance | None:
        """Returns an Instance for a call that makes an object of a class of ringcomm, else None."""
        if not isinstance(node, ast.Call):
            return None
        called = self._value(node.func)
        if inspect.isclass(called) and _is_ours(called):
            return Instance(called)
        function = inspect.unwrap(called) if callable(called) else None
        if not (inspect.isfunction(function) or inspect.ismethod(function)):
            return None
        told = function.__annotations__.get("return")
        kind = function.__globals__.get(told) if isinstance(told, str) else told
        return Instance(kind) if inspect.isclass(kind) and _is_ours(kind) else None

    def _value(self, node: ast.expr, report: bool = False) -> Any:
        """Returns the object of a dotted name, or None if it is unknown."""
        if isinstance(node, ast.Name):
            return self.known.get(node.id)
        if not isinstance(node, ast.Attribute):
            return None
        base = self._value(node.value)
        if isinstance(base, Instance):
            missing = not hasattr(base.kind, node.attr)
            if missing and report and node.attr not in _attributes_set(base.kind):
                self.problems.append(f"{base.kind.__name__}().{node.attr}")
            found = None if missing else getattr(base.kind, node.attr)
            return Bound(found) if inspect.isfunction(found) else None
        if not isinstance(base, ModuleType | type) or not _is_ours(base):
            return None
        try:
            return getattr(base, node.attr)
        except AttributeError:
            if report:
                self.problems.append(ast.unparse(node))
            return None

    def _call(self, node: ast.Call) -> None:
        called = self._value(node.func)
        bound = isinstance(called, Bound)
        function = called.function if bound else called
        if not callable(function) or not _is_ours(function):
            return
        starred = any(isinstance(each, ast.Starred) for each in node.args)
        starred |= any(each.arg is None for each in node.keywords)
        unknown = any(isinstance(each, ast.Constant) and each.value is ... for each in node.args)
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):
            return
        positional = [None] * (len(node.args) + bound)
        named: Mapping[str, Any] = {each.arg: None for each in node.keywords if each.arg}
        try:
            if starred or unknown:
                signature.bind_partial(**named)
            else:
                signature.bind(*positional, **named)
        except TypeError as error:
            self.problems.append(f"{ast.unparse(node)}: {error}")


@dataclass(frozen=True)
class Bound:
    """A method of an :class:`Instance`, whose first argument is bound."""

    function: Any


def problems_of(texts: list[str]) -> list[str]:
    """Returns the mistakes in the blocks of one document."""
    names = Names()
    for text in texts:
        names.read(ast.parse(text))
    return names.problems


def undefined_in(tree: ast.Module) -> set[str]:
    """Returns names that the code reads but nothing defines; a program has no such name."""
    bound = set(dir(builtins)) | {"__name__", "__file__"}
    read: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return read - bound
