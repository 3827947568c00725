# SPDX-License-Identifier: Apache-2.0
"""Finds the files that an import of modules reads, by parsing their sources."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import ringcomm
from tests.support import ROOT

# `import torch` imports this module, through an entry point.
IMPORTED_BY_TORCH = "ringcomm.c10d"


def files_imported(modules: Iterable[str], root: Path = ROOT) -> set[str]:
    """Returns the files, relative to the root, that importing modules by dotted name reads.

    It follows only code that runs at import: neither function bodies nor ``TYPE_CHECKING`` blocks.
    """
    found: dict[str, str] = {}
    open_names = {part for name in modules for part in _with_parents(name)}
    seen: set[str] = set()
    while open_names:
        name = open_names.pop()
        seen.add(name)
        path = _file_of(name, root)
        if path is not None:
            found[name] = path.resolve().relative_to(root.resolve()).as_posix()
            if path.suffix == ".py":
                open_names |= _imported_by(path, name) - seen
    return set(found.values())


def _with_parents(name: str) -> list[str]:
    """Returns "a", "a.b" and "a.b.c" of "a.b.c"."""
    parts = name.split(".")
    return [".".join(parts[: end + 1]) for end in range(len(parts))]


def _file_of(name: str, root: Path) -> Path | None:
    path = root.joinpath(*name.split("."))
    natives = path.parent.glob(f"{path.name}.*.so") if name == "ringcomm._native" else ()
    for each in (path.with_suffix(".py"), path / "__init__.py", *natives):
        if each.is_file():
            return each
    return None


@cache
def _imported_by(path: Path, name: str) -> frozenset[str]:
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    seen = _AtImport(package)
    seen.visit(ast.parse(path.read_text()))
    return frozenset(part for each in seen.names for part in _with_parents(each))


class _AtImport(ast.NodeVisitor):
    """Collects the names that a module of ``package`` imports while it is imported."""

    def __init__(self, package: str) -> None:
        self.names: set[str] = set()
        self._package = package

    def _visit_all(self, nodes: Iterable[ast.AST | None]) -> None:
        for node in nodes:
            if node is not None:
                self.visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._visit_all((*node.decorator_list, *node.args.defaults, *node.args.kw_defaults))

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._visit_all((*node.args.defaults, *node.args.kw_defaults))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._visit_all([node.value])

    def visit_If(self, node: ast.If) -> None:
        unseen = ast.unparse(node.test) == "TYPE_CHECKING"
        self._visit_all(node.orelse if unseen else (node.test, *node.body, *node.orelse))

    def visit_Import(self, node: ast.Import) -> None:
        self._add(alias.name for alias in node.names)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        parts = self._package.split(".")
        stem = parts[: len(parts) - node.level + 1] if node.level else []
        module = ".".join([*stem, *([node.module] if node.module else [])])
        # `from a import b` may name the module a.b.
        self._add(each for alias in node.names for each in (module, f"{module}.{alias.name}"))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.value, ast.Name) and node.value.id == "ringcomm":
            self._add([f"ringcomm.{node.attr}"])
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if ast.unparse(node.func).endswith("import_module"):
            named = [each.value for each in node.args[:1] if isinstance(each, ast.Constant)]
            self._add(map(str, named))
        self.generic_visit(node)

    def _add(self, names: Iterable[str]) -> None:
        for name in names:
            self.names.add(name)
            self.names.update(_also_imported(name))


def _also_imported(name: str) -> Iterator[str]:
    """Yields modules that an import of a name loads in addition to the module of this name."""
    if name.partition(".")[0] == "torch":
        yield IMPORTED_BY_TORCH
    if name.startswith("ringcomm."):
        home = ringcomm._HOME_OF.get(name.split(".")[1])  # loaded at the name's first use
        if home is not None:
            yield home
