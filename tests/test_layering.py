# SPDX-License-Identifier: Apache-2.0
"""Imports and includes point only downwards; compiler-specific code stays in its one header."""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.dependencies import imported_names, modules_below, package_name, strings_of

# What each part of ringcomm may import from ringcomm, in addition to itself. "" is the package
# itself: with an import of it, a part could import upwards through the public names.
MAY_IMPORT: dict[str, set[str]] = {}
_below = {"_native"}
_layers = (
    ["errors"],
    ["algorithms", "integers", "json_reader", "module_names", "process"],
    ["cuda", "rendezvous"],
    ["offload"],
    ["memory"],
    ["_tl"],
    ["comm"],
    ["c10d", "functional", "tl"],
    ["optim"],
    ["zero"],
    ["launch"],
    ["extras"],
    ["examples"],
)
EXTRAS = "ringcomm.extras"
# The parts that the root imports eagerly.
EAGER = {"errors", "_native"}
# Has extras among its public names: type checkers see imports, and __getattr__ imports at use.
REEXPORTS = "ringcomm/zero/__init__.py"
for _layer in _layers:
    MAY_IMPORT |= {part: set(_below) for part in _layer}
    _below |= set(_layer)
MAY_IMPORT["errors"] = set()
MAY_IMPORT["cli"] = _below | {""}
MAY_IMPORT["examples"] = {"", "optim", "zero"}
MAY_IMPORT["testing"] = _below
MAY_IMPORT["__main__"] = {"cli"}
MAY_IMPORT[""] = _below | {"testing"}

OUTSIDE = {"bench", "tests", "setup"}
BENCH_MAY_IMPORT = {"", "cli", "errors", "examples", "extras", "launch"}

COMPILER_TEST = re.compile(
    r"\b(__CUDACC__|__CUDACC_RTC__|__CUDA_ARCH__|__HIP__|_MSC_VER|__GNUC__|__clang__|"
    r"__SANITIZE_\w+|__has_(?:feature|builtin|attribute|cpp_attribute|include))\b"
)
MEMORY_ORDER = re.compile(
    r"__ATOMIC_|memory_order|__threadfence|"
    # Except multimem instructions, which have no spelling without an order (kernels/cuda/ptx.h).
    r"\b(?<!multimem\.)(?:ld|st|red|atom|fence)\.(?:[\w:]+\.)*(?:relaxed|acquire|release|acq_rel|sc)\b"
)
NOT_IN_TEMPLATES = re.compile(
    r"\btorch\b|\bATen\b|\bthreadIdx\b|\bblockIdx\b|<<<|nanobind|Python\.h"
)
# The folders of templates. A folder may include itself and the folders before it.
TEMPLATES = ("core", "protocol", "collectives", "optimizer")
KERNEL_INCLUDES = {
    folder: {*TEMPLATES[: number + 1], "include"} for number, folder in enumerate(TEMPLATES)
}
KERNEL_INCLUDES |= {
    "include": {"include", *TEMPLATES},
    "host": {"include", "host", *TEMPLATES},
    "cuda": {"include", "cuda", *TEMPLATES},
    "c10d": {"c10d"},
    "bindings": {"include", "host", "cuda", "bindings", "c10d", *TEMPLATES},
}
SOURCE_ENDINGS = {".h", ".hpp", ".cpp", ".cc", ".cu", ".cuh", ".inc"}


def unseen_lines(source: str) -> set[int]:
    """Returns the lines of a module that only type checkers see."""
    return {
        line
        for node in ast.parse(source).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for line in range(node.lineno, (node.body[-1].end_lineno or node.lineno) + 1)
    }


def names_of_extras(relative: Path, source: str) -> set[tuple[int, str]]:
    """Returns the imports of extras under TYPE_CHECKING in the only module that may have them."""
    if str(relative) != REEXPORTS:
        return set()
    unseen = unseen_lines(source)
    found = imported_names(source, ".".join(relative.parent.parts))
    return {
        (line, name) for line, name in found if subpackage_of(name) == "extras" and line in unseen
    }


def lazy_lines(source: str) -> set[int]:
    """Returns the lines of the table that says from where names are imported at first use."""
    return {
        line
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOME_OF"
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def extras_in_strings(relative: Path, source: str) -> list[str]:
    """Finds strings in the core that begin with the extras' name, except in the table of names."""
    own = relative.with_suffix("").parts[1]
    if own in {"extras", "cli"} or EXTRAS not in source:
        return []
    allowed = lazy_lines(source) if str(relative) == REEXPORTS else set()
    return [
        f"{relative}:{line}: has the name {text} of an extra"
        for line, text in strings_of(source)
        if text.startswith(EXTRAS) and line not in allowed
    ]


def eager_imports(source: str) -> list[str]:
    """Finds the root's eager imports, except errors and the native module."""
    unseen = unseen_lines(source)
    return [
        f"ringcomm/__init__.py:{line}: imports {name}, where its names are to be imported at use"
        for line, name in sorted({*imported_names(source, "ringcomm")})
        if name.split(".")[0] == "ringcomm"
        and line not in unseen
        and subpackage_of(name) not in EAGER
        and name != "ringcomm.*"
    ]


def subpackage_of(name: str) -> str:
    """Returns the subpackage of ringcomm of a dotted name; "" for the package's own names."""
    parts = name.split(".")
    if len(parts) < 2:
        return ""
    known = parts[1] in MAY_IMPORT or parts[1] == "bench" or parts[1].startswith("_")
    return parts[1] if known else ""


def python_violations(root: Path) -> list[str]:
    found = []
    # rglob() does not follow the links ringcomm/_tl and ringcomm/bench.
    paths = {*(root / "ringcomm").rglob("*.py"), *(root / "ringcomm" / "_tl").glob("*.py")}
    for path in sorted(paths):
        relative = path.relative_to(root)
        package = package_name(path, root)
        own = "" if str(relative) == "ringcomm/__init__.py" else relative.with_suffix("").parts[1]
        if own not in MAY_IMPORT:
            found.append(f"{relative}: {own} has no place in the layers")
            continue
        source = path.read_text()
        reexported = names_of_extras(relative, source)
        for line, name in sorted({*imported_names(source, package)} - reexported):
            top = name.split(".")[0]
            subpackage = subpackage_of(name)
            if top in OUTSIDE or subpackage == "bench":
                found.append(f"{relative}:{line}: imports {name}")
            elif top == "ringcomm" and subpackage != own and subpackage not in MAY_IMPORT[own]:
                found.append(f"{relative}:{line}: {own or 'ringcomm'} imports {name}")
        found += extras_in_strings(relative, source)
        if own == "":
            found += eager_imports(source)
    return found + bench_violations(root)


def bench_violations(root: Path) -> list[str]:
    found = []
    for path in sorted((root / "bench").rglob("*.py")):
        relative = path.relative_to(root)
        for line, name in imported_names(path.read_text(), ".".join(relative.parent.parts)):
            public = subpackage_of(name) in BENCH_MAY_IMPORT or name.startswith("ringcomm.bench")
            inside = name.split(".")[0] == "ringcomm" and not public
            if inside or name.split(".")[0] == "tests":
                found.append(f"{relative}:{line}: bench imports {name}")
    return found


def without_comments(text: str) -> str:
    """Blanks the comments of a C++ text, but keeps line breaks and string literals."""

    def blank(match: re.Match[str]) -> str:
        token = match.group()
        return "\n" * token.count("\n") if token.startswith("/") else token

    return re.sub(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', blank, text, flags=re.DOTALL)


def kernel_folder(relative: Path) -> str:
    """The folder of kernels/ of a file; for templates, their folder in include/ringcomm."""
    if relative.parts[0] == "include" and relative.parts[2] in TEMPLATES:
        return relative.parts[2]
    return relative.parts[0]


def included_folder(line: str, path: Path, kernels: Path) -> str | None:
    """Returns the folder of kernels/ that an #include line refers to, if any."""
    match = re.match(r'\s*#\s*include\s*["<]([^">]+)[">]', line)
    if not match:
        return None
    for folder in (
        path.parent,
        kernels.parent,
        kernels,
        *(kernels / part for part in KERNEL_INCLUDES if part not in TEMPLATES),
    ):
        target = (folder / match[1]).resolve()
        if target.is_file() and target.is_relative_to(kernels):
            return kernel_folder(target.relative_to(kernels))
    return None


def kernel_violations(root: Path) -> list[str]:
    kernels = (root / "kernels").resolve()
    found = []
    for path in sorted(p for p in kernels.rglob("*") if p.suffix in SOURCE_ENDINGS):
        relative = path.relative_to(kernels)
        folder = kernel_folder(relative)
        for number, line in enumerate(without_comments(path.read_text()).splitlines(), 1):
            where = f"kernels/{relative}:{number}"
            reached = included_folder(line, path, kernels)
            if reached and reached not in KERNEL_INCLUDES[folder]:
                found.append(f"{where}: {folder} includes {reached}: {line.strip()}")
            if path.name != "platform.h" and COMPILER_TEST.search(line):
                found.append(f"{where}: tests for the compiler: {line.strip()}")
            if path.name != "atomics.h" and MEMORY_ORDER.search(line):
                found.append(f"{where}: spells a memory order: {line.strip()}")
            if relative.parts[0] == "include" and NOT_IN_TEMPLATES.search(line):
                found.append(f"{where}: not in the templates: {line.strip()}")
    return found


def test_imports_point_one_way():
    assert python_violations(ROOT) == []


def test_includes_point_one_way():
    assert kernel_violations(ROOT) == []


def test_there_is_something_to_check():
    assert len(list((ROOT / "ringcomm").rglob("*.py"))) > 10
    assert len(list((ROOT / "kernels" / "include").rglob("*.h"))) > 5


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("ringcomm/errors.py", "from ringcomm.memory import heap"),
        ("ringcomm/memory/host_heap.py", "from ..comm import Work"),
        ("ringcomm/memory/host_heap.py", "import ringcomm"),
        ("ringcomm/memory/host_heap.py", "from ringcomm import Communicator"),
        ("ringcomm/comm/host/collectives.py", "def f():\n    import ringcomm.c10d"),
        (
            "ringcomm/comm/host/collectives.py",
            "import importlib\nimportlib.import_module('ringcomm.c10d')",
        ),
        ("ringcomm/c10d/group.py", "from ringcomm.functional import all_reduce"),
        ("ringcomm/functional.py", "from .c10d import register"),
        ("ringcomm/zero/stage.py", "from ringcomm.cli import main"),
        ("ringcomm/zero/__init__.py", "from ringcomm.extras.migrate.convert import convert"),
        ("ringcomm/zero/__init__.py", "def f():\n    import ringcomm.extras.migrate"),
        ("ringcomm/zero/stage.py", "if TYPE_CHECKING:\n    import ringcomm.extras.migrate"),
        ("ringcomm/zero/stage.py", "import_module('.extras.moe', 'ringcomm')"),
        ("ringcomm/zero/stage.py", "import_module(f'ringcomm.{part}')"),
        ("ringcomm/zero/stage.py", "import_module(NAME := 'ringcomm.extras' + part)"),
        ("ringcomm/zero/stage.py", "HOME = {'convert': 'ringcomm.extras.migrate.convert'}"),
        ("ringcomm/zero/stage.py", "_HOME_OF = {'convert': 'ringcomm.extras.migrate.convert'}"),
        ("ringcomm/zero/__init__.py", "HOME = {'convert': 'ringcomm.extras.migrate.convert'}"),
        ("ringcomm/zero/__init__.py", "_HOME_OF = {}\nx = f'ringcomm.extras.{name}'"),
        ("ringcomm/__init__.py", "from ringcomm.extras import moe"),
        ("ringcomm/__init__.py", "import ringcomm.extras.parallel"),
        ("ringcomm/__init__.py", "def f():\n    from ringcomm.comm import Communicator"),
        ("ringcomm/__init__.py", "_HOMES = {'ringcomm.extras.moe': ('MoE',)}"),
        ("ringcomm/cli/bench.py", "from ringcomm.bench import collectives"),
        ("ringcomm/cli/bench.py", "import ringcomm.bench.collectives"),
        ("ringcomm/comm/host/collectives.py", "from tests.support import spawn"),
        ("ringcomm/__init__.py", "if TYPE_CHECKING:\n    from ringcomm.cli import main"),
        ("ringcomm/stray.py", "import os"),
        ("ringcomm/_tl/launch.py", "from ringcomm.comm import work"),
        ("bench/cases.py", "from ringcomm.comm import work"),
        ("bench/cases.py", "import ringcomm._native"),
        ("bench/cases.py", "import tests"),
    ],
)
def test_a_wrong_import_is_reported(tmp_path, name, line):
    write(tmp_path, name, line)
    assert len(python_violations(tmp_path)) == 1


@pytest.mark.parametrize(
    "line",
    [
        "__import__('ringcomm.extras.moe')",
        "import_module('ringcomm.extras.moe')",
        "import_module(f'ringcomm.extras.{name}')",
    ],
)
def test_an_extra_that_the_core_imports_by_its_name_is_an_import_and_a_string(tmp_path, line):
    write(tmp_path, "ringcomm/zero/stage.py", line)
    imported, named = python_violations(tmp_path)
    assert "zero imports ringcomm.extras." in imported
    assert "has the name ringcomm.extras." in named


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (
            "ringcomm/memory/host_heap.py",
            "from ..errors import HeapError\nfrom ringcomm import _native",
        ),
        ("ringcomm/memory/host_heap.py", "from .block import Block\nimport os, torch"),
        ("ringcomm/c10d/group.py", "from ringcomm.comm.host.engine import Work"),
        ("ringcomm/zero/__init__.py", "if TYPE_CHECKING:\n    import ringcomm.extras.migrate"),
        (
            "ringcomm/zero/__init__.py",
            "_HOME_OF = {\n    'c': 'ringcomm.extras.migrate.convert'\n}",
        ),
        ("ringcomm/zero/stage.py", '"""Serves ringcomm.extras."""\nx = "see ringcomm.extras"'),
        ("ringcomm/cli/demo.py", "import ringcomm\nfrom ringcomm import Communicator"),
        ("ringcomm/cli/demo.py", "import_module(f'ringcomm.cli.{name}')"),
        ("ringcomm/__init__.py", "if TYPE_CHECKING:\n    from ringcomm.comm import Communicator"),
        ("ringcomm/__init__.py", "from ringcomm.errors import E\nimport_module(f'ringcomm.{x}')"),
        ("bench/cases.py", "from ringcomm import Communicator, errors\nfrom . import timing"),
    ],
)
def test_a_right_import_is_not_reported(tmp_path, name, line):
    write(tmp_path, name, line)
    assert python_violations(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("include/ringcomm/collectives/ring.h", '#include "host/wait.h"'),
        ("include/ringcomm/protocol/view.h", '#include "ringcomm/collectives/all_gather.h"'),
        ("include/ringcomm/collectives/ring.h", '#include "../../../host/wait.h"'),
        ("include/ringcomm/collectives/ring.h", '#include "kernels/host/wait.h"'),
        ("host/wait.h", '#include "cuda/launch.cuh"'),
        ("cuda/launch.cuh", '#include "../host/wait.h"'),
        ("include/ringcomm/collectives/ring.h", "#ifdef __CUDACC__"),
        ("host/module.cpp", "#if defined(__GNUC__)"),
        ("include/ringcomm/collectives/ring.h", "__atomic_load_n(p, __ATOMIC_ACQUIRE);"),
        ("host/module.cpp", "flag.load(std::memory_order_relaxed);"),
        ("cuda/launch.cuh", 'asm("ld.acquire.sys.u32 %0, [%1];");'),
        ("cuda/launch.cuh", 'asm("st.global.release.sys.u32 [%0], %1;");'),
        ("include/ringcomm/collectives/ring.h", "int lane = threadIdx.x;"),
        ("include/ringcomm/collectives/ring.h", "kernel<<<1, 2>>>();"),
        ("include/ringcomm/collectives/ring.h", "#include <torch/extension.h>"),
    ],
)
def test_a_wrong_kernel_line_is_reported(tmp_path, name, line):
    write(tmp_path, "kernels/host/wait.h", "")
    write(tmp_path, "kernels/cuda/launch.cuh", "")
    write(tmp_path, "kernels/include/ringcomm/collectives/all_gather.h", "")
    write(tmp_path, f"kernels/{name}", f"// a comment\n{line}\n")
    assert len(kernel_violations(tmp_path)) == 1


def test_comments_and_the_right_headers_are_not_reported(tmp_path):
    write(tmp_path, "kernels/include/ringcomm/core/platform.h", "#ifdef __CUDACC__\n#endif\n")
    write(tmp_path, "kernels/include/ringcomm/core/atomics.h", "int o = __ATOMIC_ACQUIRE;\n")
    write(tmp_path, "kernels/host/wait.h", '#include "ringcomm/core/atomics.h"\n')
    text = '// not threadIdx\n/* no\n torch */ #include "ringcomm/core/platform.h"\ne.release(1);\n'
    write(tmp_path, "kernels/include/ringcomm/collectives/ring.h", text)
    assert kernel_violations(tmp_path) == []


# Modules with private names that all parts may import: the native module, and kernels/tl.
PRIVATE_MODULES = {"_native", "_tl"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def package_of(relative: Path) -> str:
    """The package whose private names a module may use: its ringcomm folder, or bench."""
    return "/".join(relative.parts[: 2 if relative.parts[0] == "ringcomm" else 1])


def private_names(tree: ast.AST) -> set[str]:
    """Returns the private functions, classes, variables and attributes that a module defines."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return {name for name in found if is_private(name)}


def private_uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields line and private name for each use on an object other than self, and each import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            of = node.value.id if isinstance(node.value, ast.Name) else ""
            if of not in {"self", "cls", "torch"}:
                yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ringcomm"):
            yield from ((node.lineno, alias.name) for alias in node.names if is_private(alias.name))


def privacy_violations(root: Path) -> list[str]:
    """Finds uses of private names that another package of this project defines.

    Names that the using package defines, too, do not count, nor do torch's private names (tensors'
    ``_version``, ``ProcessGroupGloo._Options``).
    """
    paths = [*sorted((root / "ringcomm").rglob("*.py")), *sorted((root / "bench").rglob("*.py"))]
    trees = {path.relative_to(root): ast.parse(path.read_text()) for path in paths}
    defined: dict[str, set[str]] = {}
    for relative, tree in trees.items():
        defined.setdefault(package_of(relative), set()).update(private_names(tree))
    found = []
    for relative, tree in trees.items():
        own = package_of(relative)
        others = {name for package, names in defined.items() if package != own for name in names}
        others -= {"_version", "_Options", *defined[own], *PRIVATE_MODULES}
        found += [
            f"{relative}:{line}: takes {name} from another package"
            for line, name in private_uses(tree)
            if name in others
        ]
    return found


def ancestors_of(module: str) -> list[str]:
    """Returns the packages that Python imports before a module, except the top one."""
    parts = module.split(".")
    return [".".join(parts[:end]) for end in range(2, len(parts))]


def imports_of(path: Path, root: Path, modules: Mapping[str, Path]) -> set[str]:
    """Returns the modules that a source imports, at the top or inside functions.

    Importing a.b.c also imports a.b, whose ``__init__`` counts unless the source is below a.b.
    """
    source = path.read_text()
    own = package_name(path, root)
    found = {*imported_names(source, own)} - names_of_extras(path.relative_to(root), source)
    targets = set()
    for _, name in found:
        name = re.sub(r"^ringcomm\.bench\b", "bench", name)
        if name in {f"ringcomm.{module}" for module in PRIVATE_MODULES}:
            continue
        target = name if name in modules else name.rpartition(".")[0]
        if target in modules:
            implied = set(ancestors_of(target)) - {own, *ancestors_of(own)}
            targets |= {target, *(implied & set(modules))}
    return targets


def import_graph(root: Path) -> dict[str, set[str]]:
    """Returns the modules of ringcomm and bench, each with the modules that it imports."""
    modules = {**modules_below(root, "ringcomm"), **modules_below(root, "bench")}
    graph = {module: imports_of(path, root, modules) for module, path in modules.items()}
    return {module: found - {module} for module, found in graph.items()}


def circles_of(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Returns the cycles of a graph, each once."""
    circles = []
    done: set[str] = set()

    def walk(node: str, way: list[str]) -> None:
        if node in way:
            circles.append([*way[way.index(node) :], node])
        elif node not in done:
            for each in sorted(graph[node]):
                walk(each, [*way, node])
            done.add(node)

    for node in sorted(graph):
        walk(node, [])
    return circles


def import_circles(root: Path) -> list[list[str]]:
    """Finds modules that import each other, at the top or inside functions."""
    return circles_of(import_graph(root))


def folder_circles(root: Path) -> list[list[str]]:
    """Finds packages that import each other, including their ``__init__`` files.

    The root of ringcomm is left out, since it imports all parts. MAY_IMPORT orders the root's
    modules one by one, so each of them counts as a package.
    """
    modules = {**modules_below(root, "ringcomm"), **modules_below(root, "bench")}

    def folder_of(module: str) -> str:
        if modules[module].name == "__init__.py":
            return module
        package = module.rpartition(".")[0]
        return module if package == "ringcomm" else package

    graph: dict[str, set[str]] = {}
    for module, found in import_graph(root).items():
        own = folder_of(module)
        graph.setdefault(own, set()).update({folder_of(each) for each in found} - {own})
    graph["ringcomm"] = set()
    return circles_of(graph)


def test_no_package_uses_private_names_of_another():
    assert privacy_violations(ROOT) == []


def test_no_modules_import_each_other():
    assert import_circles(ROOT) == []


def test_no_packages_import_each_other():
    assert folder_circles(ROOT) == []


def test_a_private_name_of_another_package_is_reported(tmp_path):
    write(tmp_path, "ringcomm/comm/host/engine.py", "class E:\n    def _start(self): ...\n")
    write(tmp_path, "ringcomm/comm/host/collectives.py", "def f(e): e._start()\n")
    write(tmp_path, "ringcomm/zero/stages/unshard.py", "def f(e, t): e._start(t._version)\n")
    write(tmp_path, "ringcomm/zero/own.py", "from ringcomm.comm.host.engine import _start\n")
    assert sorted(line.partition(": ")[0] for line in privacy_violations(tmp_path)) == [
        "ringcomm/zero/own.py:1",
        "ringcomm/zero/stages/unshard.py:1",
    ]


def test_a_circle_is_reported_and_a_package_that_names_its_modules_is_not(tmp_path):
    write(tmp_path, "ringcomm/zero/__init__.py", "from ringcomm.zero.a import A\n")
    write(tmp_path, "ringcomm/zero/a.py", "from ringcomm.zero.b import B\n")
    write(tmp_path, "ringcomm/zero/b.py", "import os\n")
    assert import_circles(tmp_path) == []
    write(tmp_path, "ringcomm/zero/b.py", "def f():\n    from ringcomm.zero.a import A\n")
    assert import_circles(tmp_path) == [["ringcomm.zero.a", "ringcomm.zero.b", "ringcomm.zero.a"]]


def test_importing_a_module_of_another_package_imports_its_init(tmp_path):
    write(tmp_path, "ringcomm/zero/checkpoint/__init__.py", "from ringcomm.zero import f\n")
    write(tmp_path, "ringcomm/zero/checkpoint/g.py", "import os\n")
    write(tmp_path, "ringcomm/zero/f.py", "import ringcomm.zero.checkpoint.g\n")
    package = "ringcomm.zero.checkpoint"
    assert import_circles(tmp_path) == [[package, "ringcomm.zero.f", package]]


@pytest.mark.parametrize(
    ("files", "circle"),
    [
        (
            {
                "ringcomm/comm/host/a.py": "from ringcomm.comm.nodes.b import B",
                "ringcomm/comm/nodes/b.py": "",
                "ringcomm/comm/nodes/c.py": "def f():\n    from ringcomm.comm.host import d",
                "ringcomm/comm/host/d.py": "",
            },
            ["ringcomm.comm.host", "ringcomm.comm.nodes", "ringcomm.comm.host"],
        ),
        (
            {
                "ringcomm/zero/checkpoint/__init__.py": "from ringcomm.zero.checkpoint import f",
                "ringcomm/zero/checkpoint/f.py": "from ringcomm.zero.stages import s",
                "ringcomm/zero/stages/s.py": "import ringcomm.zero.checkpoint.g",
                "ringcomm/zero/checkpoint/g.py": "",
            },
            ["ringcomm.zero.checkpoint", "ringcomm.zero.stages", "ringcomm.zero.checkpoint"],
        ),
        (
            {
                "bench/a/x.py": "from ..b import y",
                "bench/a/z.py": "",
                "bench/b/y.py": "",
                "bench/b/w.py": "from ringcomm.bench.a import z",
            },
            ["bench.a", "bench.b", "bench.a"],
        ),
        (
            {
                "bench/cases.py": "",
                "bench/run.py": "from .a import x",
                "bench/a/x.py": "from .. import cases",
            },
            ["bench", "bench.a", "bench"],
        ),
        (
            {
                "ringcomm/zero/a.py": "",
                "ringcomm/zero/__init__.py": "from ringcomm.zero.stages.s import S",
                "ringcomm/zero/stages/s.py": "from ringcomm.zero.a import A",
            },
            ["ringcomm.zero", "ringcomm.zero.stages", "ringcomm.zero"],
        ),
        (
            {
                "ringcomm/extras/__init__.py": "from ringcomm.extras.moe.layer import M",
                "ringcomm/extras/a.py": "",
                "ringcomm/extras/moe/layer.py": "from ringcomm.extras.a import A",
            },
            ["ringcomm.extras", "ringcomm.extras.moe", "ringcomm.extras"],
        ),
    ],
)
def test_a_circle_of_packages_is_reported(tmp_path, files, circle):
    for name, text in files.items():
        for folder in {Path(name).parents[0], Path(name).parents[1]} - {Path()}:
            if not (tmp_path / folder / "__init__.py").exists():
                write(tmp_path, str(folder / "__init__.py"), "")
        write(tmp_path, name, text)
    assert folder_circles(tmp_path) == [circle]


def test_a_door_and_packages_below_each_other_are_no_circle(tmp_path):
    write(tmp_path, "ringcomm/__init__.py", "def f():\n    from ringcomm.zero import shard\n")
    write(tmp_path, "ringcomm/errors.py", "")
    write(tmp_path, "ringcomm/zero/__init__.py", "from ringcomm.zero.stages.s import shard\n")
    write(tmp_path, "ringcomm/zero/stages/__init__.py", "")
    write(tmp_path, "ringcomm/zero/stages/s.py", "from ringcomm import errors\n")
    assert folder_circles(tmp_path) == []
