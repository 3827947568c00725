"""Imports and includes point one way, and compiler matters stay in their one header."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import ringcomm
import ringcomm.optim
import ringcomm.zero
from tests.support import ROOT

# What each part of ringcomm may import from ringcomm, apart from itself. "" is the package itself:
# importing it from inside would hide an upward import behind the public names.
MAY_IMPORT: dict[str, set[str]] = {}
_below = {"_native"}
_layers = (
    ["errors"],
    ["integers", "json_reader", "module_names", "process"],
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
# Public names whose code is an extra. Only these modules may import extras from below.
DOORS = {"fsdp2", "integrations", "moe", "parallel"}
# It has extras among its public names: type checkers see them, and __getattr__ imports them later.
REEXPORTS = "ringcomm/zero/__init__.py"
for _layer in _layers:
    MAY_IMPORT |= {part: set(_below) for part in _layer}
    _below |= set(_layer)
MAY_IMPORT["errors"] = set()
MAY_IMPORT |= {part: {"extras"} for part in DOORS}
MAY_IMPORT["cli"] = _below | DOORS | {""}
MAY_IMPORT["examples"] = {"", "optim", "zero"}
MAY_IMPORT["__main__"] = {"cli"}
MAY_IMPORT[""] = (_below - {"extras"}) | DOORS

OUTSIDE = {"bench", "tests", "setup"}
BENCH_MAY_IMPORT = {"", "errors", "examples", "launch", "moe", "parallel"}

COMPILER_TEST = re.compile(
    r"\b(__CUDACC__|__CUDACC_RTC__|__CUDA_ARCH__|__HIP__|_MSC_VER|__GNUC__|__clang__|"
    r"__SANITIZE_\w+|__has_(?:feature|builtin|attribute|cpp_attribute|include))\b"
)
MEMORY_ORDER = re.compile(
    r"__ATOMIC_|memory_order|__threadfence|"
    # But multimem instructions, whose order is part of their one spelling (kernels/cuda/ptx.h).
    r"\b(?<!multimem\.)(?:ld|st|red|atom|fence)\.(?:[\w:]+\.)*(?:relaxed|acquire|release|acq_rel|sc)\b"
)
NOT_IN_TEMPLATES = re.compile(
    r"\btorch\b|\bATen\b|\bthreadIdx\b|\bblockIdx\b|<<<|nanobind|Python\.h"
)
# The folders of the templates, each of which may include itself and those before it.
TEMPLATES = ("core", "protocol", "collectives", "optimizer")
KERNEL_INCLUDES = {
    folder: {*TEMPLATES[: number + 1], "include"} for number, folder in enumerate(TEMPLATES)
}
KERNEL_INCLUDES |= {
    "include": {"include", *TEMPLATES},
    "host": {"include", "host", *TEMPLATES},
    "cuda": {"include", "cuda", *TEMPLATES},
    "bindings": {"include", "host", "cuda", "bindings", *TEMPLATES},
}
SOURCE_ENDINGS = {".h", ".hpp", ".cpp", ".cc", ".cu", ".cuh", ".inc"}


def imported_names(source: str, package: str) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that `source`, a module of `package`, imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1]
            stem = ".".join(base) if node.level else ""
            module = ".".join(part for part in (stem, node.module) if part)
            # `from a import b` may name the module a.b.
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield node.lineno, argument.value


def names_of_extras(relative: Path, source: str) -> set[tuple[int, str]]:
    """The imports of extras that only type checkers see, in the module that may have them."""
    if str(relative) != REEXPORTS:
        return set()
    unseen = [
        line
        for node in ast.parse(source).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for line in range(node.lineno, node.body[-1].lineno + 1)
    ]
    found = imported_names(source, ".".join(relative.parent.parts))
    return {(line, name) for line, name in found if part_of(name) == "extras" and line in unseen}


def part_of(name: str) -> str:
    """The part of ringcomm that a dotted name belongs to; "" for the package's own names."""
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
        package = ".".join(relative.parent.parts)
        own = "" if str(relative) == "ringcomm/__init__.py" else relative.with_suffix("").parts[1]
        if own not in MAY_IMPORT:
            found.append(f"{relative}: {own} has no place in the layers")
            continue
        source = path.read_text()
        reexported = names_of_extras(relative, source)
        for line, name in sorted({*imported_names(source, package)} - reexported):
            top = name.split(".")[0]
            part = part_of(name)
            if top in OUTSIDE or part == "bench":
                found.append(f"{relative}:{line}: imports {name}")
            elif top == "ringcomm" and part != own and part not in MAY_IMPORT[own]:
                found.append(f"{relative}:{line}: {own or 'ringcomm'} imports {name}")
    return found + bench_violations(root)


def bench_violations(root: Path) -> list[str]:
    found = []
    for path in sorted((root / "bench").rglob("*.py")):
        relative = path.relative_to(root)
        for line, name in imported_names(path.read_text(), ".".join(relative.parent.parts)):
            public = part_of(name) in BENCH_MAY_IMPORT or name.startswith("ringcomm.bench")
            inside = name.split(".")[0] == "ringcomm" and not public
            if inside or name.split(".")[0] == "tests":
                found.append(f"{relative}:{line}: bench imports {name}")
    return found


def without_comments(text: str) -> str:
    """C++ text with its comments blanked, lines and string literals kept."""

    def blank(match: re.Match[str]) -> str:
        token = match.group()
        return "\n" * token.count("\n") if token.startswith("/") else token

    return re.sub(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', blank, text, flags=re.DOTALL)


def kernel_part(relative: Path) -> str:
    """The part that a file below kernels/ belongs to; of the templates, their folder."""
    if relative.parts[0] == "include" and relative.parts[2] in TEMPLATES:
        return relative.parts[2]
    return relative.parts[0]


def included_part(line: str, path: Path, kernels: Path) -> str | None:
    """The part of kernels/ that an #include line reaches, if any."""
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
            return kernel_part(target.relative_to(kernels))
    return None


def kernel_violations(root: Path) -> list[str]:
    kernels = (root / "kernels").resolve()
    found = []
    for path in sorted(p for p in kernels.rglob("*") if p.suffix in SOURCE_ENDINGS):
        relative = path.relative_to(kernels)
        part = kernel_part(relative)
        for number, line in enumerate(without_comments(path.read_text()).splitlines(), 1):
            where = f"kernels/{relative}:{number}"
            reached = included_part(line, path, kernels)
            if reached and reached not in KERNEL_INCLUDES[part]:
                found.append(f"{where}: {part} includes {reached}: {line.strip()}")
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
        ("ringcomm/cli/bench.py", "from ringcomm.bench import collectives"),
        ("ringcomm/cli/bench.py", "import ringcomm.bench.collectives"),
        ("ringcomm/comm/host/collectives.py", "from tests.support import spawn"),
        ("ringcomm/__init__.py", "from ringcomm.cli import main"),
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
    ("name", "line"),
    [
        (
            "ringcomm/memory/host_heap.py",
            "from ..errors import HeapError\nfrom ringcomm import _native",
        ),
        ("ringcomm/memory/host_heap.py", "from .block import Block\nimport os, torch"),
        ("ringcomm/c10d/group.py", "from ringcomm.comm.host.engine import Work"),
        ("ringcomm/zero/__init__.py", "if TYPE_CHECKING:\n    import ringcomm.extras.migrate"),
        ("ringcomm/cli/demo.py", "import ringcomm\nfrom ringcomm import Communicator"),
        ("ringcomm/__init__.py", "from ringcomm.comm import Communicator"),
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


# Ways into the package that are no part of its surface: the native module, and kernels/tl.
PRIVATE_MODULES = {"_native", "_tl"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def package_of(relative: Path) -> str:
    """The package whose private names a module may use: a folder of ringcomm, or bench."""
    return "/".join(relative.parts[: 2 if relative.parts[0] == "ringcomm" else 1])


def private_names(tree: ast.AST) -> set[str]:
    """The private names that a module defines: functions, classes, variables, attributes."""
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
    """Line and private name wherever it is taken of something other than self, or imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            of = node.value.id if isinstance(node.value, ast.Name) else ""
            if of not in {"self", "cls", "torch"}:
                yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ringcomm"):
            yield from ((node.lineno, alias.name) for alias in node.names if is_private(alias.name))


def privacy_violations(root: Path) -> list[str]:
    """Uses of a private name that another package of the house defines, and the user's does not.

    Private names of torch are none of them: tensors' ``_version``, ``ProcessGroupGloo._Options``.
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


def import_circles(root: Path) -> list[list[str]]:
    """Modules of ringcomm that import each other, at the top or later, each circle once."""
    modules = {}
    for path in (root / "ringcomm").rglob("*.py"):
        relative = path.relative_to(root).with_suffix("")
        modules[".".join(relative.parts).removesuffix(".__init__")] = path
    imports: dict[str, set[str]] = {}
    for module, path in modules.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        source = path.read_text()
        found = {*imported_names(source, package)}
        names = {name for _, name in found - names_of_extras(path.relative_to(root), source)}
        names -= {f"ringcomm.{module}" for module in PRIVATE_MODULES}
        targets = {name if name in modules else name.rpartition(".")[0] for name in names}
        imports[module] = {each for each in targets & set(modules) if each != module}
    circles = []
    done: set[str] = set()

    def walk(module: str, way: list[str]) -> None:
        if module in way:
            circles.append([*way[way.index(module) :], module])
        elif module not in done:
            for each in sorted(imports[module]):
                walk(each, [*way, module])
            done.add(module)

    for module in sorted(modules):
        walk(module, [])
    return circles


def test_no_package_uses_private_names_of_another():
    assert privacy_violations(ROOT) == []


def test_no_modules_import_each_other():
    assert import_circles(ROOT) == []


def test_a_private_name_of_another_package_is_reported(tmp_path):
    write(tmp_path, "ringcomm/comm/host/engine.py", "class E:\n    def _start(self): ...\n")
    write(tmp_path, "ringcomm/comm/host/collectives.py", "def f(e): e._start()\n")
    write(tmp_path, "ringcomm/zero/stages/gather.py", "def f(e, t): e._start(t._version)\n")
    write(tmp_path, "ringcomm/zero/own.py", "from ringcomm.comm.host.engine import _start\n")
    assert sorted(line.partition(": ")[0] for line in privacy_violations(tmp_path)) == [
        "ringcomm/zero/own.py:1",
        "ringcomm/zero/stages/gather.py:1",
    ]


def test_a_circle_is_reported_and_a_package_that_names_its_modules_is_not(tmp_path):
    write(tmp_path, "ringcomm/zero/__init__.py", "from ringcomm.zero.a import A\n")
    write(tmp_path, "ringcomm/zero/a.py", "from ringcomm.zero.b import B\n")
    write(tmp_path, "ringcomm/zero/b.py", "import os\n")
    assert import_circles(tmp_path) == []
    write(tmp_path, "ringcomm/zero/b.py", "def f():\n    from ringcomm.zero.a import A\n")
    assert import_circles(tmp_path) == [["ringcomm.zero.a", "ringcomm.zero.b", "ringcomm.zero.a"]]


# ---- The core's names that extras and commands use ----------------------------------------------

# Modules of public names, and modules without collectives. A public name may also be
# imported from its home, which spares a circle through the door.
PUBLIC_MODULES = {"", "c10d", "cuda", "functional", "launch", "memory", "optim", "tl", "zero"}
PUBLIC_MODULES |= DOORS | {"errors", "integers", "json_reader", "module_names", "process"}
PUBLIC_MODULES |= {"zero.checkpoint"}
PUBLIC_NAMES = {name for door in (ringcomm, ringcomm.optim, ringcomm.zero) for name in dir(door)}
PUBLIC_NAMES |= {*ringcomm._HOME_OF, *ringcomm.zero.__all__}
# Every other name of the core that code above it imports. A new one needs a reason.
INTERNAL_NAMES = {
    "c10d.calls": "OP_TYPES PendingWork",
    "c10d.comm_argument": "CommArgument find_communicator",
    "c10d.communicators": "Communicators",
    "c10d.process_group": "ProcessGroup",
    "comm.agreement": "all_or_none check_agreement",
    "comm.device.launch": "DeviceCallEngine",
    "comm.device.topology": "Connection Gpu LEVELS Topology TopologyPlan host_plan read_machine",
    "comm.functions": "Group communicator_of",
    "comm.host.arguments": "CallChecks DTYPE_CODES is_plain readable size_bytes",
    "comm.host.engine": "Call",
    "comm.nodes.device_core": "preload",
    "comm.peer_memory": "heap_bases is_in_heap",
    "comm.recorder": "reader",
    "comm.recorder.reader": (
        "LARGEST_BYTES Trace ended_ranks find_newest live_recordings newest read "
        "running_communicators"
    ),
    "comm.recorder.records": "NodeLevel",
    "cuda.build": "describe_source",
    "cuda.runtime": "CONNECTIONS_VARIABLE DEFAULT_CONNECTIONS DeviceRuntime",
    "cuda.units": "UNITS",
    "functional.collectives": "Derivatives enter find no_forward_mode register",
    "functional.graph_pass": "fuse_products",
    "memory.host_heap": "HEAP_DIR_VARIABLE",
    "offload.scratch": "PAGE_BYTES rounded_up",
    "optim.clipping": "NormBound NormPart agree_on_finite clip_norm_of_parts",
    "optim.layout": "BLOCK_ELEMS round_up",
    "optim.placement": "SHARING STAGES",
    "optim.sharded": "Params",
    "optim.step": "Asked",
    "optim.tiers": "PINNED_BUFFER_BYTES elems_of_pieces piece_elems",
    "rendezvous.launchers": "launched_world read_environment",
    "zero.checkpoint.format": "Box DTYPES MOST_DIMS host_blocks",
    "zero.checkpoint.save_load": "check_load take_load",
    "zero.checkpoint.state": "VERSION",
    "zero.stages.engine": "owner_of",
    "zero.stages.options": "Units",
    "zero.stages.sharding": "check_module check_step_number is_sharded path_of",
    "zero.stages.units": "find_units",
}


def internal_names(root: Path) -> dict[str, set[str]]:
    """Returns, by module, the names of the core that extras and commands import from inside it."""
    found: dict[str, set[str]] = {}
    for part in ("extras", "cli", "examples"):
        for path in sorted((root / "ringcomm" / part).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.ImportFrom):
                    continue
                module = (node.module or "").removeprefix("ringcomm").removeprefix(".")
                is_own = module.split(".")[0] in ("extras", "cli", "examples", "bench")
                if not (node.module or "").startswith("ringcomm") or is_own:
                    continue
                if module not in PUBLIC_MODULES:
                    names = {alias.name for alias in node.names} - PUBLIC_NAMES
                    found.setdefault(module, set()).update(names)
    return {module: names for module, names in found.items() if names}


def test_extras_and_commands_use_listed_names_of_the_core():
    assert internal_names(ROOT) == {
        module: set(names.split()) for module, names in INTERNAL_NAMES.items()
    }


def test_a_name_of_the_core_that_is_not_public_is_found(tmp_path):
    write(tmp_path, "ringcomm/cli/demo.py", "from ringcomm.comm.host.engine import Call")
    write(tmp_path, "ringcomm/extras/moe/rows.py", "from ringcomm.errors import where")
    assert internal_names(tmp_path) == {"comm.host.engine": {"Call"}}
