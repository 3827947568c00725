# SPDX-License-Identifier: Apache-2.0
"""Extras, commands and examples use only public names of the core, and listed internal names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.dependencies import (
    imported_names,
    module_of,
    modules_below,
    package_name,
    strings_of,
)

# The parts above the core. They may import any name from each other.
ABOVE = ("extras", "cli", "examples")
OWN = {*ABOVE, "bench"}
# By module, every internal name of the core that these parts use. A new name needs a reason.
INTERNAL_NAMES = {
    "": "_native",
    "c10d.backend": "build describe find",
    "c10d.calls": "OP_TYPES PendingWork",
    "c10d.comm_argument": "CommArgument find_communicator",
    "c10d.communicators": "Communicators",
    "c10d.process_group": "behind",
    "comm.agreement": "all_or_none check_agreement first_other unequal",
    "comm.device.launch": "DeviceCallEngine",
    "comm.device.topology": (
        "Connection Gpu LEVELS Topology TopologyChoice host_choice load read_machine save"
    ),
    "comm.functions": "Group communicator_of",
    "comm.host.arguments": "CallChecks DTYPE_CODES is_contiguous readable size_bytes",
    "comm.host.engine": "Call",
    "comm.host.options": "COMPRESSIONS",
    "comm.host.threads": "COUNTS_TORCHS_THREADS THREADS_VARIABLE named_threads",
    "comm.nodes.device_core": "preload",
    "comm.peer_memory": "awaiting_peers heap_bases is_in_heap",
    "comm.recorder.reader": (
        "FORMAT FoundRecorder FoundRecorders LARGEST_BYTES Trace ended_ranks find_newest "
        "live_recordings newest other_processes read recording_of running_communicators"
    ),
    "comm.recorder.records": "CallTotals NodeLevel",
    "cuda": "current",
    "cuda.build": "describe_source",
    "cuda.runtime": "CONNECTIONS_VARIABLE DEFAULT_CONNECTIONS DeviceRuntime",
    "cuda.units": "UNITS",
    "errors": "printable where",
    "functional.collectives": "Derivatives enter find no_forward_mode register",
    "functional.in_graph": "describe",
    "integers": "integer",
    "json_reader": (
        "DAMAGE exactly in_words number_below read_bounded read_json read_object reason shown"
    ),
    "launch": (
        "RankLaunch RankCommand STORE_PORT_VARIABLE TIMEOUT describe_exit end_at_ctrl_c end_with "
        "hide_missing_numpy launch_ranks launch_store started threads_per_rank"
    ),
    "memory": "normal_tensors",
    "memory.device_heap": "HEAP_BYTES_VARIABLE why_heap_is_fixed",
    "memory.host_heap": "HEAP_DIR_VARIABLE process_heap",
    "memory.numa": "NodeTopology SYSTEM_FOLDER bytes_by_node own_binding read_topology",
    "module_names": "find_modules matches named_modules some without_wrappers",
    "offload.scratch": "PAGE_BYTES rounded_up",
    "optim.clipping": "NormBound NormTerm agree_on_finite clip_joint_norm",
    "optim.layout": "TILE_ELEMS round_up",
    "optim.options": "PARAMETER_COMPRESSIONS",
    "optim.placement": "SHARING STAGES",
    "optim.sharded": "Params",
    "optim.step": "Asked",
    "optim.state_offload": "PINNED_BUFFER_BYTES elems_of_pieces piece_elems",
    "process": "available_cores memory_limit_bytes new_unknown",
    "rendezvous.launchers": "launched_world read_environment",
    "zero.checkpoint.format": "Box DTYPES MOST_DIMS host_slices",
    "zero.checkpoint.save_load": "check_load take_load",
    "zero.checkpoint.state": "VERSION",
    "zero.stages.engine": "owner_of",
    "zero.stages.options": "Units",
    "zero.stages.sharding": "check_module check_step_number is_sharded path_of",
    "zero.stages.units": "find_units",
}
DOTTED = re.compile(r"ringcomm(?:\.\w+)+")


@cache
def modules_of_the_tree() -> frozenset[str]:
    linked = {f"ringcomm._tl.{path.stem}" for path in (ROOT / "ringcomm" / "_tl").glob("*.py")}
    return frozenset({*modules_below(ROOT, "ringcomm"), "ringcomm.bench", "ringcomm._tl", *linked})


@cache
def public_modules() -> frozenset[str]:
    """Returns the modules that docs/versions.md calls public."""
    text = (ROOT / "docs" / "versions.md").read_text()
    (listed,) = re.findall(r"public modules \(([^)]*)\)", text)
    found = {f"ringcomm.{name}" for name in re.findall(r"`([\w.]+)`", listed)}
    assert found <= modules_of_the_tree()
    return frozenset({"ringcomm", *found})


def exported(tree: ast.Module) -> set[str]:
    """Returns the names in the ``__all__`` of a module."""
    (names,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and node.value is not None
        and ast.unparse(node).startswith("__all__")
    )
    return set(names)


@cache
def public_names() -> frozenset[tuple[str, str]]:
    """Pairs of module and public name, both for the public module and for the defining module."""
    found = set()
    paths = modules_below(ROOT, "ringcomm")
    for door in public_modules():
        tree = ast.parse(paths[door].read_text())
        names = exported(tree)
        found |= {(door, name) for name in names}
        package = package_name(paths[door], ROOT)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                module = module_of(node, package)
                here = {alias.name for alias in node.names if alias.asname in (None, alias.name)}
                found |= {(module, name) for name in here & names}
    return frozenset(found)


def resolved(dotted: str) -> tuple[str, str]:
    """Splits a dotted name into its longest module of the tree and the attribute after it."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        if (module := ".".join(parts[:end])) in modules_of_the_tree():
            return module, "".join(parts[end : end + 1])
    return "", ""


def module_aliases(tree: ast.AST, package: str) -> dict[str, str]:
    """Returns the names in a source that refer to modules of ringcomm, with these modules."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.split(".")[0]
                found[bound] = alias.name if alias.asname else bound
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                found[alias.asname or alias.name] = f"{module_of(node, package)}.{alias.name}"
    return {name: module for name, module in found.items() if module in modules_of_the_tree()}


def attributes_used(tree: ast.AST, aliases: dict[str, str]) -> Iterator[str]:
    """Yields the dotted names of the attributes that a source uses of these modules."""
    for node in ast.walk(tree):
        parts: list[str] = []
        at: ast.expr | None = node if isinstance(node, ast.Attribute) else None
        while isinstance(at, ast.Attribute):
            parts.insert(0, at.attr)
            at = at.value
        if isinstance(at, ast.Name) and at.id in aliases:
            yield ".".join([aliases[at.id], *parts])


def names_used(source: str, package: str) -> set[tuple[str, str]]:
    """Pairs of module and name that a source uses of ringcomm; name "" for an unused module.

    A use is an import, an attribute of a module, or a string that is a dotted name.
    """
    tree = ast.parse(source)
    imported = {name for _, name in imported_names(source, package)}
    strings = {text for _, text in strings_of(source) if DOTTED.fullmatch(text)}
    taken = {resolved(name) for name in attributes_used(tree, module_aliases(tree, package))}
    found = {resolved(name) for name in imported | strings}
    with_uses = {module for module, name in taken if name}
    return {(m, n) for m, n in found if n or m not in with_uses} | {(m, n) for m, n in taken if n}


def internal_names(root: Path) -> dict[str, set[str]]:
    """Returns by module the core's internal names that the parts above the core use."""
    found: dict[str, set[str]] = {}
    for part in ABOVE:
        for path in sorted((root / "ringcomm" / part).rglob("*.py")):
            for module, name in names_used(path.read_text(), package_name(path, root)):
                is_own = module.split(".")[1:2] and module.split(".")[1] in OWN
                is_public = (module, name) in public_names()
                is_public |= not name and module in public_modules()
                if module and not is_own and not is_public:
                    found.setdefault(module.removeprefix("ringcomm").strip("."), set()).add(name)
    return found


def test_the_parts_above_the_core_use_listed_names_of_it():
    assert internal_names(ROOT) == {
        module: set(names.split()) for module, names in INTERNAL_NAMES.items()
    }


def test_the_public_modules_are_those_of_the_document():
    assert {"ringcomm", "ringcomm.zero.checkpoint", "ringcomm.extras.moe"} <= public_modules()
    assert "ringcomm.extras.lightning" in public_modules()
    assert not public_modules() & {"ringcomm.launch", "ringcomm.memory", "ringcomm.errors"}
    assert public_modules() <= modules_of_the_tree()


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("from ringcomm.comm.host.engine import Call", {"comm.host.engine": {"Call"}}),
        # zero has functions of these names, too.
        (
            "from ringcomm.comm.device.topology import load, save",
            {"comm.device.topology": {"load", "save"}},
        ),
        ("from ringcomm.optim import layout, step", {"optim.layout": {""}, "optim.step": {""}}),
        ("from ringcomm.optim import layout\nlayout.round_up(1)", {"optim.layout": {"round_up"}}),
        ("import ringcomm.comm.host.engine as e\ne.Call()", {"comm.host.engine": {"Call"}}),
        ("import ringcomm.comm.host.engine", {"comm.host.engine": {""}}),
        ("import ringcomm\nringcomm.zero.stages.units.find(1)", {"zero.stages.units": {"find"}}),
        ("from ringcomm import zero as z\nz.stages.units.find(1)", {"zero.stages.units": {"find"}}),
        ("from ..comm.host.engine import Call", {"comm.host.engine": {"Call"}}),
        ("from .. import launch", {"launch": {""}}),
        ("import_module('ringcomm.comm.host.engine')", {"comm.host.engine": {""}}),
        ("import_module(f'ringcomm.comm.{name}')", {"comm": {"*"}}),
        ("__import__('ringcomm.comm.host.engine')", {"comm.host.engine": {""}}),
        ("HOME = 'ringcomm.comm.host.engine.Call'", {"comm.host.engine": {"Call"}}),
        ("from ringcomm.launch import started", {"launch": {"started"}}),
        ("from ringcomm.errors import where", {"errors": {"where"}}),
        ("from ringcomm.memory import normal_tensors", {"memory": {"normal_tensors"}}),
        ("from ringcomm import _native, cuda", {"": {"_native"}, "cuda": {""}}),
        ("from ringcomm.c10d import register", {"c10d": {"register"}}),
    ],
)
def test_a_name_of_the_core_that_is_not_public_is_found(tmp_path, line, found):
    path = tmp_path / "ringcomm" / "cli" / "demo.py"
    path.parent.mkdir(parents=True)
    path.write_text(line)
    assert internal_names(tmp_path) == found


@pytest.mark.parametrize(
    "line",
    [
        "import ringcomm\nfrom ringcomm import Disk, zero\nzero.shard, ringcomm.optim.AdamW",
        "from ringcomm.errors import ArgumentError",
        "from ringcomm.comm.communicator import Communicator",
        "from ringcomm.memory import Disk, empty",
        "from ringcomm.zero.checkpoint.save_load import load, save",
        "from ringcomm.extras.moe.rows import gather\nfrom ringcomm.extras import moe",
        "import_module(f'ringcomm.cli.{name}')",
        '"""Uses ringcomm.comm.host.engine."""',
        "text = 'ringcomm.comm: an error'",
        "import os, torch\nfrom torch import optim\noptim.layout",
    ],
)
def test_a_public_name_is_not_reported(tmp_path, line):
    path = tmp_path / "ringcomm" / "cli" / "demo.py"
    path.parent.mkdir(parents=True)
    path.write_text(line)
    assert internal_names(tmp_path) == {}
