# SPDX-License-Identifier: Apache-2.0
"""Finds the imports of Python sources, as dotted names, without importing anything."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path


@cache
def imported_names(source: str, package: str) -> tuple[tuple[int, str], ...]:
    """Returns line and dotted name of each import in `source`, a module of `package`.

    If a name is put together at run time, its constant beginning is returned: "a.b.*".
    """
    return tuple(_imported_names(source, package))


def _imported_names(source: str, package: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = module_of(node, package)
            # `from a import b` may name the module a.b.
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call):
            yield from ((node.lineno, name) for name in _imported_by_call(node, package))


def _imported_by_call(call: ast.Call, package: str) -> Iterator[str]:
    if not ast.unparse(call.func).endswith(("import_module", "__import__")):
        return
    texts = [
        argument.value if isinstance(argument, ast.Constant) else f"{beginning_of(argument)}*"
        for argument in call.args[:2]
        if isinstance(argument, ast.Constant | ast.JoinedStr)
    ]
    if not texts or not isinstance(texts[0], str):
        return
    name = texts[0].lstrip(".")
    above = len(texts[0]) - len(name)
    if above:  # import_module(".name", "package")
        base = str(texts[1] if len(texts) > 1 else package).split(".")
        name = ".".join([*base[: len(base) - above + 1], name])
    yield name


def module_of(node: ast.ImportFrom, package: str) -> str:
    """Returns the absolute module name of `from module import ...` in a module of `package`."""
    base = package.split(".")[: len(package.split(".")) - node.level + 1]
    stem = ".".join(base) if node.level else ""
    return ".".join(part for part in (stem, node.module) if part)


def beginning_of(text: ast.JoinedStr) -> str:
    """Returns the text of an f-string before its first field."""
    first = text.values[0] if text.values else None
    return str(first.value) if isinstance(first, ast.Constant) else ""


def strings_of(source: str) -> Iterator[tuple[int, str]]:
    """Yields line and text of the strings of a source and of the constant parts of its f-strings.

    Strings that are statements, such as docstrings, are left out.
    """
    tree = ast.parse(source)
    alone = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield node.lineno, node.value


def modules_below(root: Path, top: str) -> dict[str, Path]:
    """Returns the modules of the package `top` by dotted name, except those in linked folders."""
    found = {}
    for path in sorted((root / top).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


def package_name(path: Path, root: Path) -> str:
    """Returns the dotted name of the package that a source belongs to."""
    return ".".join(path.relative_to(root).parent.parts)
