# SPDX-License-Identifier: Apache-2.0
"""The kernels use only features of Triton 3.6, the oldest version that pyproject.toml allows.

The tests compile with a newer Triton, which accepts more. Here the sources are searched for the
known differences. ``make oldest-triton`` compiles with the oldest version itself.
"""

import ast
from collections.abc import Iterator
from typing import Any, get_type_hints

import pytest

pytest.importorskip("triton")

from ringcomm._tl.adamw_launch import NormKind, ShardKind
from ringcomm._tl.geometry import Geometry
from tests.support import ROOT

# Types of attributes that may be passed on unchanged; Any means Triton's element types.
PASSED = (int, bool, Any)


def _types(of: type) -> dict[str, Any]:
    """Returns the types of a class's fields and properties."""
    gets = {name: each.fget for name, each in vars(of).items() if isinstance(each, property)}
    return get_type_hints(of) | {name: get_type_hints(get)["return"] for name, get in gets.items()}


OBJECTS = {
    name
    for of in (Geometry, ShardKind, NormKind)
    for name, kind in _types(of).items()
    if kind not in PASSED
}


def _results(node: ast.expr) -> Iterator[ast.expr]:
    """Yields the expressions of which one is the value of ``node``."""
    if isinstance(node, ast.IfExp):
        yield from (*_results(node.body), *_results(node.orelse))
    else:
        yield node


def unknown_to_it(source: str) -> Iterator[tuple[int, str]]:
    """Yields line and text of code that Triton 3.6 refuses or compiles to something else."""
    functions = [
        each
        for each in ast.walk(ast.parse(source))
        if isinstance(each, ast.FunctionDef)
        and any(ast.unparse(mark).startswith("triton.jit") for mark in each.decorator_list)
    ]
    for node in (each for function in functions for each in ast.walk(function)):
        if isinstance(node, ast.Call):
            for argument in (*node.args, *(each.value for each in node.keywords)):
                for given in _results(argument):
                    if isinstance(given, ast.Attribute) and given.attr in OBJECTS:
                        yield given.lineno, ast.unparse(given)
        elif isinstance(node, ast.NamedExpr):
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.ListComp) and any(each.ifs for each in node.generators):
            yield node.lineno, ast.unparse(node)  # Triton 3.6 ignores the condition
        elif isinstance(node, ast.arguments) and (node.vararg or node.kwonlyargs):
            name = node.vararg or node.kwonlyargs[0]
            yield name.lineno, ast.unparse(node)


def test_the_kernels_are_written_for_it():
    sources = {
        path: path.read_text()
        for folder in ("kernels/tl", "tests/tl")
        for path in (ROOT / folder).glob("*.py")
    }
    assert sum("@triton.jit" in source for source in sources.values()) > 10
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path, source in sources.items()
        for line, text in unknown_to_it(source)
    ]
    assert found == []


KERNEL = "@triton.jit\ndef f(x, G: tl.constexpr, KIND: tl.constexpr):\n    "


@pytest.mark.parametrize(
    "source",
    [
        KERNEL + "g(x, G.tiles_of_2)",
        KERNEL + "return g(x, G=G.tiles_of_4)",
        KERNEL + "x += g(x, G.tiles_of_4 if KIND.stochastic else G)",
        KERNEL + "g(x, KIND.master)",
        KERNEL + "g((y := x), G)",
        KERNEL + "g([s for s in x if s], G)",
        "@triton.jit(do_not_specialize=['x'])\ndef f(x, *rest): ...",
        "@triton.jit\ndef f(x, *, G: tl.constexpr): ...",
    ],
)
def test_what_is_found(source):
    assert len(list(unknown_to_it(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        KERNEL + "TILES: tl.constexpr = G.tiles_of_4 if KIND.stochastic else G.tiles_of_2",
        KERNEL + "g(x, G.world, KIND.param, KIND.keeps_max, KIND.master == 'own')",
        KERNEL + "g([s + 1 for s in x], G=G)",
        "def f(*rest, **more): g(G.tiles_of_2, [s for s in rest if s], KIND.master)",
    ],
)
def test_what_is_not(source):
    assert list(unknown_to_it(source)) == []
