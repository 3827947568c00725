# SPDX-License-Identifier: Apache-2.0
"""The proofs that ``make test`` runs only when something that they read has changed.

Other tests always run. A proof is a group of tests that reads only a part of the tree: for example
the kernels, but not the optimizers. :data:`PROOFS` lists the files that each proof reads. When all
tests of a proof have passed in a run of all tests, a digest of these files and of the tools is
written to ``build/proofs.json``, which is not committed. Later runs leave the proof out while its
digest stays the same. The last lines of a run name the proofs that were left out.

A new clone has no record, so all proofs run there, as they do in ``make test-all``. A proof that is
named on the command line runs, and all proofs run if ``-k`` or ``-m`` selects tests; such runs
record nothing. ``tests/test_proofs.py`` observes which files a proof opens, and fails for a file
that the table does not list.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "build" / "proofs.json"


@dataclass(frozen=True)
class Proof:
    """Tests that are skipped while the files that they read are unchanged.

    Attributes:
        name: shown at the end of a run.
        tests: files and folders, relative to the root. A file belongs to one proof at most.
        reads: patterns of the other files of the tree that the tests read. ``*`` matches a part
            of a name, and ``**`` any folders.
        programs: modules that processes of the tests import, but not the tests themselves.
        except_for: files inside the folders of ``tests`` that are not tests of the proof.
    """

    name: str
    tests: tuple[str, ...]
    reads: tuple[str, ...]
    programs: tuple[str, ...] = ()
    except_for: tuple[str, ...] = ()

    def owns(self, name: str) -> bool:
        """True if a path is one of the proof's tests, or inside one, with all that is inside it."""
        if any(each == name or each.startswith(f"{name}/") for each in self.except_for):
            return False
        return any(name == test or name.startswith(f"{test}/") for test in self.tests)

    def lists(self, name: str) -> bool:
        """True if a change of the file makes the proof run."""
        return self.owns(name) or self._listed.fullmatch(name) is not None

    @property
    def patterns(self) -> tuple[str, ...]:
        """Patterns of the files that the proof reads in addition to its tests."""
        return (*EVERY_TEST, *self.reads)

    @cached_property
    def _listed(self) -> re.Pattern[str]:
        return re.compile("|".join(map(_expression, self.patterns)))


# Files that pytest reads before any test, and ``__init__`` files of parent packages.
EVERY_TEST = (
    *("pyproject.toml", "tests/**/__init__.py", "tests/conftest.py", "tests/proofs.py"),
    "tests/support/covering.py",
)
_CPP = ("kernels/cuda/**", "kernels/host/**", "kernels/include/**")
_COMPILING = (*_CPP, "tests/support/compiler.py")
# torch registers the backend, so `import torch` reads ringcomm/c10d/__init__.py.
_TORCH = ("ringcomm/*.py", "ringcomm/c10d/__init__.py")
_COMPILED_KERNELS = (
    *(*_TORCH, "ringcomm/_native*.so", "ringcomm/cuda/**"),
    *("kernels/**", "CMakeLists.txt", "tests/proof/compile/*", "tests/ptx_interpreter/**"),
    *("tests/support/cuda_*.py", "tests/support/emulat*/**", "tests/support/emulated_driver.py"),
    *("tests/support/nvrtc.py", "tests/support/shared_library.py", "tests/support/compiler.py"),
    "tests/support/torch_operators.py",
    "tests/support/triton_device.py",
)
_COMMUNICATORS = (
    *("ringcomm/c10d/**", "ringcomm/comm/**", "ringcomm/memory/**", "ringcomm/offload/**"),
    *("ringcomm/rendezvous/**", "ringcomm/tl/**", "ringcomm/_native.pyi"),
)
_QUANTIZATION = ("tests/comm/__init__.py", "tests/comm/test_quantization.py", "tests/tl/*.py")
_DEVICES = (
    *(*_COMPILED_KERNELS, *_COMMUNICATORS, "ringcomm/optim/**"),
    *(*_QUANTIZATION, "tests/comm/device/*.py", "tests/proof/ptx/*.py", "tests/support/**"),
)
# The packages below sharded training, and what their tests share.
_CORE = (
    *(*_TORCH, *_COMMUNICATORS, "ringcomm/_native*.so", "ringcomm/cli/**", "ringcomm/cuda/**"),
    *("ringcomm/extras/__init__.py", "ringcomm/optim/**", "kernels/**", "CMakeLists.txt"),
    *("tests/ptx_interpreter/**", "tests/support/**"),
)
_SHARED_BY_DEVICES = (
    *("tests/comm/conftest.py", "tests/comm/device/conftest.py"),
    *("tests/comm/device/test_device_steps.py", "tests/gpu/conftest.py", "tests/gpu/device.py"),
    *("tests/gpu/worlds.py", "tests/memory/disk_folder.py"),
)
_FORKS = ("tests.support.fork_server", "tests.support.preloaded_for_devices")

PROOFS = (
    Proof("races", ("tests/proof/races",), (*_COMPILING, "tests/support/emulator/*.h")),
    Proof("litmus tests", ("tests/proof/litmus",), (*_CPP, "kernels/tl/**")),
    Proof("models", ("tests/proof/model",), ("kernels/**", "tests/support/compiler.py")),
    Proof(
        "hostile peers",
        ("tests/proof/fuzz/test_hostile.py",),
        (*_COMPILING, "tests/proof/fuzz/*", "tests/proof/races/*"),
    ),
    Proof(
        "machine code of CUDA",
        tuple(
            f"tests/proof/compile/test_{name}.py"
            for name in ("cuda_checks", "cuda_compile", "loop_measures", "packet_compile")
        ),
        _COMPILED_KERNELS,
    ),
    Proof(
        "bars of machine code",
        tuple(
            f"tests/proof/compile/test_{name}.py"
            for name in ("bars", "isa", "ptx_order", "quotient_code", "step_loops")
        ),
        (*_COMPILED_KERNELS, *_COMMUNICATORS, "bench/*.py", "ringcomm/cli/*.py"),
    ),
    Proof(
        "machine code of Triton",
        tuple(
            f"tests/proof/compile/test_{name}.py"
            for name in ("adamw_compile", "tl_compile", "tl_loads")
        ),
        (*_COMPILED_KERNELS, "tests/tl/*.py"),
    ),
    Proof(
        "machine code of the device library",
        ("tests/proof/compile/test_device_compile.py",),
        (*_COMPILED_KERNELS, *_COMMUNICATORS, "tests/tl/*.py", "tests/support/memories.py"),
    ),
    Proof(
        "PTX interpreter",
        ("tests/ptx_interpreter",),
        (*_TORCH, "tests/support/shared_library.py"),
    ),
    Proof(
        "PTX of quantization's kernels by Triton",
        ("tests/proof/ptx/test_triton_quantization.py",),
        (
            *_COMPILED_KERNELS,
            *_COMMUNICATORS,
            *_QUANTIZATION,
            "tests/proof/ptx/*.py",
            "tests/support/*.py",
        ),
    ),
    Proof(
        "PTX of CUDA kernels",
        tuple(
            f"tests/proof/ptx/test_{name}.py"
            for name in (
                *("cuda", "multicast", "multicast_in_place", "orders", "rows"),
                *("quantization", "trips"),
            )
        ),
        _DEVICES,
        ("tests.proof.ptx.multicast_job", "tests.proof.ptx.small_jobs", *_FORKS),
    ),
    Proof(
        "PTX of Triton kernels",
        ("tests/proof/ptx/test_triton.py", "tests/proof/ptx/test_triton_mutants.py"),
        _DEVICES,
        ("tests.proof.ptx.triton_jobs", *_FORKS),
    ),
    Proof(
        "communicators",
        ("tests/comm",),
        (
            *(*_CORE, *_SHARED_BY_DEVICES, "tests/memory/test_numa.py", "tests/proof/ptx/*.py"),
            *("tests/proof/races/*.cpp", "tests/proof/races/*.h", "tests/proof/soak/cases.py"),
        ),
        except_for=(
            "tests/comm/nodes/test_on_devices.py",
            *(
                f"tests/comm/test_{name}.py"
                for name in ("exit", "functions", "leaving", "no_threads", "threads")
            ),
        ),
    ),
    Proof(
        "memory and rendezvous",
        ("tests/memory", "tests/rendezvous"),
        (*_CORE, "tests/proof/faults/device/rig.py"),
        except_for=("tests/memory/test_heap_growth.py",),
    ),
    Proof(
        "kernels on the emulated device",
        ("tests/cuda", "tests/tl"),
        (*_CORE, "docs/triton.md", "tests/comm/test_quantization.py"),
    ),
    Proof(
        "faults",
        ("tests/proof/faults",),
        (*_CORE, "tests/cli/processes.py"),
        except_for=tuple(
            f"tests/proof/faults/test_{name}.py"
            for name in ("elastic", "soak", "suspended", "training")
        ),
    ),
    Proof(
        "optimizers and functions",
        ("tests/functional", "tests/optim"),
        (
            *(*_CORE, *_SHARED_BY_DEVICES, "ringcomm/**", "tests/extras/moe/cases.py"),
            *("tests/packaging/test_import.py", "tests/zero/*.py"),
        ),
    ),
    Proof(
        "sharded training",
        ("tests/zero",),
        (
            *(*_CORE, *_SHARED_BY_DEVICES, "ringcomm/**", "tests/comm/*.py", "tests/c10d/*.py"),
            *("docs/migrating.md", "docs/precision.md", "docs/zero.md"),
            *("tests/functional/conftest.py", "tests/optim/*.py"),
        ),
    ),
    Proof(
        "backend, extras and examples",
        ("tests/c10d", "tests/examples", "tests/extras", "tests/gpu"),
        (
            *(*_CORE, *_SHARED_BY_DEVICES, "ringcomm/**", "docs/examples/**"),
            *("docs/integrations/**", "docs/migrating.md", "docs/moe.md"),
            *("docs/reference/environment.md", "tests/packaging/*.py"),
            *("tests/comm/test_quantization.py", "tests/functional/*.py", "tests/zero/models.py"),
        ),
    ),
    Proof(
        "commands, benchmarks and tools",
        ("tests/bench", "tests/cli", "tests/tools"),
        (
            *(*_CORE, *_SHARED_BY_DEVICES, "ringcomm/**", "bench/**", "tools/**"),
            *("tests/comm/test_no_threads.py", "tests/comm/test_threads.py"),
            *("tests/comm/topology/**", "tests/gpu/*.py", "tests/proof/compile/test_isa.py"),
            *("tests/proof/fuzz/test_hostile.py", "tests/proof/races/*.py"),
            *("README.md", "docs/performance.md", "docs/pictures/compare.svg"),
        ),
    ),
    Proof(
        "style and types",
        ("tests/test_style.py",),
        (
            *("bench/**", "kernels/**", "ringcomm/**", "tests/**", "tools/**", "setup.py"),
            *(".clang-format", ".gitignore"),
        ),
    ),
    Proof("packaging and site", ("tests/packaging",), ("**",)),
)


def _expression(pattern: str) -> str:
    parts = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*"}
    pieces = re.split(r"(\*\*/|\*\*|\*)", pattern)
    return "".join(parts.get(piece, re.escape(piece)) for piece in pieces)


# ---- digests -------------------------------------------------------------------------------------

# Folders of builds, environments and caches.
_NOT_SOURCE = {"build", "dist", "out", "__pycache__", "_kernels"}
_HIDDEN_SOURCE = {".ci", ".github"}


def files_of(root: Path) -> list[str]:
    """Returns the names of all files of a tree, relative to it, without builds and caches."""
    found = []
    for folder, inner, names in os.walk(root):
        inner[:] = [
            each
            for each in inner
            if each in _HIDDEN_SOURCE
            or not (each in _NOT_SOURCE or each.startswith(".") or each.endswith(".egg-info"))
        ]
        # A linked worktree has a file .git instead of a folder.
        kept = [name for name in names if name != ".git"]
        found += [os.path.relpath(os.path.join(folder, name), root) for name in kept]
    return sorted(found)


def _said(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except OSError:
        return f"{command[0]}: none"
    return f"{command[0]}: {done.stdout.partition(chr(10))[0]}"


# Programs without which tests are skipped; installing such a program makes the proofs run again.
_OPTIONAL = (
    *("apt-get", "compute-sanitizer", "git", "ip", "make", "mkfs.ext4", "mpiexec", "mpirun"),
    *("mpirun.openmpi", "ncu", "slurmctld", "slurmd", "srun", "tc", "unshare"),
)


def tools() -> str:
    """Returns the versions of everything outside the tree that can change a proof's result."""
    compilers = [
        os.environ.get("CXX", "c++"),
        *("g++", "clang++", "aarch64-linux-gnu-g++", "nvcc"),
    ]
    packages = sorted({f"{each.name} {each.version}" for each in metadata.distributions()})
    processor = re.findall(r"^(?:model name|flags)\s*:.*$", _processors(), re.MULTILINE)
    settings = [
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if name.startswith(("CUDA_", "RINGCOMM_", "TRITON_")) and name != "RINGCOMM_TEST_CASES"
    ]
    return "\n".join(
        [
            *(sys.version, platform.platform(), *processor[:2], f"user {os.geteuid()}"),
            *(_said(each, "--version") for each in compilers),
            *(_said("spin", "-V"), _said("nvidia-smi", "-L"), _said("nvidia-smi", "--version")),
            *(f"{each}: {shutil.which(each)}" for each in _OPTIONAL),
            *(*packages, *settings),
        ]
    )


def _processors() -> str:
    path = Path("/proc/cpuinfo")
    return path.read_text() if path.exists() else ""


def digests(root: Path, proofs: Sequence[Proof], versions: str) -> dict[str, str]:
    """Returns for each proof the SHA-256 of the files that it reads, and of the tools."""
    names = files_of(root)
    content = cache(lambda name: content_of(root / name))
    found = {}
    for proof in proofs:
        contents = {name: content(name) for name in names if proof.lists(name)}
        found[proof.name] = digest_of(contents, versions)
    return found


def digest_of(contents: Mapping[str, str], versions: str) -> str:
    """Returns the SHA-256 of files, given by name and :func:`content_of`, and of the tools."""
    lines = [f"{name} {content}" for name, content in sorted(contents.items())]
    return hashlib.sha256("\n".join([versions, *lines]).encode()).hexdigest()


def content_of(path: Path) -> str:
    """Returns the SHA-256 of a file."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except FileNotFoundError:  # a broken link, or a file that another process removed
        return "none"


# ---- the record ----------------------------------------------------------------------------------


def read_record(path: Path) -> dict[str, dict[str, Any]]:
    """Returns by proof the digest of its last pass, and its number of tests."""
    try:
        return dict(json.loads(path.read_text()))
    except (FileNotFoundError, ValueError):
        return {}


def write_record(path: Path, record: Mapping[str, object]) -> None:
    """Replaces the record atomically, so that no reader sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(record, indent=1))
    unfinished.replace(path)


# Options that select a part of all tests.
_SELECTING = ("keyword", "markexpr", "deselect", "ignore_glob", "lf", "stepwise", "collectonly")


class Gate:
    """The pytest plugin that leaves unchanged proofs out, and records the proofs that pass.

    The process that the user started decides, and its workers follow (pytest-xdist).

    Args:
        config: of the run.
        proofs: the table.
        root: of the tree.
        record: the file that records which proofs have passed.
    """

    def __init__(
        self,
        config: pytest.Config,
        proofs: Sequence[Proof] = PROOFS,
        root: Path = ROOT,
        record: Path = RECORD,
    ) -> None:
        self._proofs, self._root, self._record = proofs, root, record
        self._expected: set[str] = set()
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self._digests: dict[str, str] = {}
        self.left_out: dict[str, int] = {}  # by name, with the number of tests
        worker = getattr(config, "workerinput", None)
        self._is_worker = worker is not None
        if worker is not None:
            self.left_out = worker["proofs_left_out"]
            return
        named = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
        if named or any(config.getoption(option, None) for option in _SELECTING):
            return
        self._tools = tools()
        self._digests = digests(root, proofs, self._tools)
        if os.environ.get("RINGCOMM_TEST_CASES") != "all":
            known = read_record(record)
            self.left_out = {
                name: known[name]["tests"]
                for name, digest in self._digests.items()
                if known.get(name, {}).get("digest") == digest
            }

    def leaves_out(self, path: Path) -> bool:
        """True if a file or folder of tests belongs to a proof that is left out."""
        if not self.left_out or not path.is_relative_to(self._root):
            return False
        return self._proof_of(path.relative_to(self._root).as_posix()) in self.left_out

    def _proof_of(self, name: str) -> str | None:
        return next((proof.name for proof in self._proofs if proof.owns(name)), None)

    # ---- hooks ----

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        return self.leaves_out(collection_path) or None

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["proofs_left_out"] = self.left_out

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self._expected.update(ids)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._expected.update(item.nodeid for item in session.items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid)
        if report.when == "teardown":
            self._finished.add(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if self._is_worker:
            return
        before = read_record(self._record)
        record = {
            proof.name: before[proof.name]
            for proof in self._proofs
            if proof.name in before and not self._of(proof, self._failed)
        }
        ended = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        if self._digests and ended and not session.shouldfail and not session.shouldstop:
            record.update(self._passed(session.config.getoption("ignore") or ()))
        if record != before:
            write_record(self._record, record)

    def _passed(self, ignored: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Returns the record of the proofs whose tests have all passed or were skipped."""
        now = digests(self._root, self._proofs, self._tools)
        passed = {}
        for proof in self._proofs:
            digest, expected = self._digests[proof.name], self._of(proof, self._expected)
            whole = expected <= self._finished and not self._is_ignored(proof, ignored)
            if (
                expected
                and whole
                and not self._of(proof, self._failed)
                and now[proof.name] == digest
            ):
                passed[proof.name] = {"digest": digest, "tests": len(expected)}
        return passed

    def _of(self, proof: Proof, ids: Iterable[str]) -> set[str]:
        return {each for each in ids if proof.owns(each.split("::")[0])}

    def _is_ignored(self, proof: Proof, ignored: Iterable[str]) -> bool:
        """True if an option has kept a part of the proof out of the run."""
        paths = [Path(os.path.abspath(each)) for each in ignored]
        tests = [self._root / test for test in proof.tests]
        return any(
            path.is_relative_to(test) or test.is_relative_to(path)
            for path in paths
            for test in tests
        )

    @pytest.hookimpl(trylast=True)  # after the durations, where users see it
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.left_out:
            told = ", ".join(f"{name} ({count} tests)" for name, count in self.left_out.items())
            terminalreporter.write_line(
                f"proofs unchanged since they last passed: {told}; make test-all runs them"
            )
