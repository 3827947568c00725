# SPDX-License-Identifier: Apache-2.0
"""Proofs are left out only while nothing that they read has changed, and they list all they read.

A parser finds the files that importing a proof's tests reads. ``make test-all`` also observes the
files that a proof opens while it runs, with all its processes, in a copy of the tree; ``make test``
does so for one proof.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests import proofs
from tests.proofs import PROOFS, Proof
from tests.support import ROOT, fork_server
from tests.support.compiler import NEEDS_COMPILER, OPTIMISED, compile_to
from tests.support.covering import EVERY_CASE, in_test_all
from tests.support.imports import files_imported
from tests.support.opened import Opened

QUICK = "litmus tests"

by_proof = pytest.mark.parametrize("proof", PROOFS, ids=lambda proof: proof.name)


# ---- the table -----------------------------------------------------------------------------------


@by_proof
def test_the_table_names_files_that_exist(proof: Proof) -> None:
    names = proofs.files_of(ROOT)
    for test in (*proof.tests, *proof.except_for):
        assert (ROOT / test).exists(), test
    for pattern in proof.patterns:
        alone = Proof("", (), (pattern,))
        assert any(alone.lists(name) for name in names), f"{pattern} matches no file"


def test_a_file_belongs_to_one_proof() -> None:
    for name in proofs.files_of(ROOT):
        assert len([proof.name for proof in PROOFS if proof.owns(name)]) <= 1, name


@pytest.mark.parametrize(
    ("pattern", "listed", "other"),
    [
        ("a/*.h", ["a/x.h"], ["a/b/x.h", "a/x.hpp", "b/a/x.h", "a/xzh"]),
        ("a/**", ["a/x", "a/b/x"], ["ab/x", "b/a/x"]),
        ("**", ["x", "a/b/x"], []),
        ("a/**/x.py", ["a/x.py", "a/b/c/x.py"], ["a/b/yx.py"]),
        ("a/x_*.py", ["a/x_y.py"], ["a/x_y/z.py"]),
    ],
)
def test_a_pattern_lists_files(pattern: str, listed: list[str], other: list[str]) -> None:
    proof = Proof("", ("tests/one",), (pattern,))
    assert [name for name in listed if not proof.lists(name)] == []
    assert [name for name in other if proof.lists(name)] == []
    assert proof.owns("tests/one") and proof.owns("tests/one/a.py")
    assert not proof.owns("tests/one_more.py") and not proof.owns("tests")


def test_the_files_of_git_do_not_belong_to_a_tree(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    for name in (".git", "inner/.git", "inner/source.py", ".gitignore"):
        (tmp_path / name).touch()
    assert proofs.files_of(tmp_path) == [".gitignore", "inner/source.py"]


# ---- which files are opened ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, of their byte code, and of the native module."""
    made = tmp_path_factory.mktemp("proofs") / "tree"
    for name in proofs.files_of(ROOT):
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, made / name, follow_symlinks=False)
    for folder in {(ROOT / name).parent for name in proofs.files_of(ROOT)}:
        if (folder / "__pycache__").is_dir():
            shutil.copytree(folder / "__pycache__", made / folder.relative_to(ROOT) / "__pycache__")
    # Only links to folders belong to the tree; an environment in .venv has links of its own.
    inner = [path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")]
    for folder in (ROOT, *inner):
        for link in folder.iterdir():
            if link.is_symlink() and link.is_dir() and not link.name.startswith("."):
                (made / link.relative_to(ROOT)).symlink_to(link.readlink())
    return made


def environment(tree: Path) -> dict[str, str]:
    """Makes processes import the copy, and write no byte code, whose new folders nobody watches."""
    return {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}


def imported_by(proof: Proof) -> set[str]:
    """Returns the files that an import of a proof's tests and programs reads."""
    files = {
        path
        for test in proof.tests
        for path in ([ROOT / test] if test.endswith(".py") else (ROOT / test).rglob("*.py"))
        if path.name.startswith("test_") and proof.owns(path.relative_to(ROOT).as_posix())
    }
    folders = {folder for path in files for folder in path.parents if ROOT in folder.parents}
    paths = files | {folder / "conftest.py" for folder in folders}
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in sorted(paths)]
    return files_imported([*modules, *proof.programs])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import a.b.c", "a a/b a/b/c.py"),
        ("from a import b", "a a/b"),
        ("from . import b, name", "a a/b"),
        ("from .b.c import name", "a a/b a/b/c.py"),
        ("import importlib\nimportlib.import_module('a.b')", "a a/b"),
        ("try:\n    import a.b\nexcept ImportError:\n    pass", "a a/b"),
        ("import ringcomm\n@ringcomm.CommOptions\nclass A: pass", "options"),
        ("def f(x=ringcomm.CommOptions()): pass", "options"),
        ("import torch.nn", "c10d"),
        ("from numpy import ones\nimport nothing", ""),
        ("def f():\n    import a.b", ""),
        ("x: a = 1\nif TYPE_CHECKING:\n    import a.b", ""),
    ],
)
def test_files_that_an_import_reads_are_found(tmp_path: Path, text: str, found: str) -> None:
    short = {
        "options": "ringcomm ringcomm/comm ringcomm/comm/host ringcomm/comm/host/options.py",
        "c10d": "ringcomm ringcomm/c10d",
    }

    def files(names: str) -> set[str]:
        return {
            name if name.endswith(".py") else f"{name}/__init__.py"
            for name in short.get(names, names).split()
        }

    for name in {"a/b/c.py"} | files("a a/b") | files("options") | files("c10d"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "a/main.py").write_text(text)
    assert files_imported(["a.main"], tmp_path) == {"a/main.py"} | files("a") | files(found)


def unlisted(proof: Proof, opened: set[str], tree: Path) -> str:
    """Names the files that the table must list in addition; "" if none."""
    known = set(proofs.files_of(tree))
    missing = sorted(name for name in opened & known if not proof.lists(name))
    return f"tests/proofs.py: {proof.name!r} also reads {missing}" if missing else ""


@by_proof
def test_a_mutant_of_any_file_that_a_proof_imports_makes_it_run(proof: Proof) -> None:
    imported = imported_by(proof)
    assert unlisted(proof, imported, ROOT) == ""
    assert any(proof.owns(name) for name in imported)
    names = proofs.files_of(ROOT)
    contents = dict.fromkeys(filter(proof.lists, names), "content")
    right = proofs.digest_of(contents, "")
    # Patterns also match files that are read without being imported: take one file per pattern.
    of_patterns = {
        next(filter(Proof("", (), (pattern,)).lists, names)) for pattern in proof.patterns
    }
    read = sorted(of_patterns | (imported & set(names)))
    assert contents.keys() >= set(read)
    for name in read:
        assert proofs.digest_of({**contents, name: "mutant"}, "") != right, name


def test_an_import_that_no_pattern_lists_is_told() -> None:
    for proof, name in {
        "races": "tests/support/compiler.py",
        "PTX of CUDA kernels": "tests/support/preloaded_for_devices.py",
        "PTX of Triton kernels": "ringcomm/optim/adamw.py",
        "style and types": "tests/support/compiler.py",
    }.items():
        (whole,) = (each for each in PROOFS if each.name == proof)
        assert f"'{name}'" in unlisted(replace(whole, reads=()), imported_by(whole), ROOT)


def test_a_changed_byte_a_new_file_and_another_tool_change_the_digest(tree, monkeypatch) -> None:
    tools = proofs.tools()

    def digests() -> dict[str, str]:
        return proofs.digests(tree, PROOFS, tools)

    before = digests()
    path = tree / "kernels/host/comm.h"
    text = path.read_text()
    path.write_text(text.replace("\n", " \n", 1))
    after = digests()
    path.write_text(text)
    changed = {name for name, digest in after.items() if digest != before[name]}
    assert {"races", "litmus tests", "models", "machine code of CUDA"} <= changed
    assert "PTX interpreter" not in changed
    new = tree / "kernels/tl/new.py"
    new.touch()
    after = digests()
    new.unlink()
    assert after["models"] != before["models"] and after["races"] == before["races"]
    assert digests() == before
    monkeypatch.setattr(proofs, "_said", lambda *command: f"another {command[0]}")
    tools = proofs.tools()
    assert not set(digests().values()) & set(before.values())


@pytest.mark.parametrize(
    "proof",
    [
        pytest.param(
            proof,
            id=proof.name,
            marks=[
                pytest.mark.timeout(3600),
                pytest.mark.skipif(
                    proof.name != QUICK and not EVERY_CASE,
                    reason="runs a proof once more: make test-all",
                ),
            ],
        )
        for proof in PROOFS
    ],
)
def test_all_files_that_a_proof_opens_as_it_runs_are_listed(proof: Proof, tree: Path) -> None:
    shutil.rmtree(tree / "build", ignore_errors=True)  # other proofs may have filled it
    inherited = environment(tree) | {"RINGCOMM_TEST_PRELOADED": "core"}
    inherited.pop("RINGCOMM_TEST_CASES", None)
    others = [f"--ignore={name}" for name in proof.except_for]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *others]
    command += proof.tests
    with Opened(tree) as opened:
        done = subprocess.run(command, cwd=tree, env=inherited, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout
    assert unlisted(proof, opened.files, tree) == ""
    assert imported_by(proof) - opened.files == set()  # the process opened each of them


@NEEDS_COMPILER
def test_files_that_a_compiler_and_a_child_of_a_child_read_are_seen(tmp_path: Path) -> None:
    (tmp_path / "tree/inner").mkdir(parents=True)
    for name, text in {
        "header.h": "",
        "main.cpp": '#include "inner/header.h"\nint main() {}\n',
        "read.py": "print(open('inner/data').read())",
        "data": "1",
        "other": "",
    }.items():
        folder = tmp_path / "tree" / ("" if name in ("main.cpp", "read.py") else "inner")
        (folder / name).write_text(text)
    with Opened(tmp_path / "tree") as opened:
        root = tmp_path / "tree"
        compile_to(tmp_path / "program", root, root / "main.cpp", flags=OPTIMISED)
        command = f"import subprocess; subprocess.run([{sys.executable!r}, 'read.py'], check=True)"
        subprocess.run([sys.executable, "-c", command], cwd=root, check=True)
    assert opened.files == {"main.cpp", "inner/header.h", "read.py", "inner/data"}


def test_an_unlisted_file_is_told(tree: Path) -> None:
    proof = Proof("sums", ("tests/test_sums.py",), ("kernels/host/**",))
    opened = {"kernels/host/comm.h", "ringcomm/errors.py", "tests/conftest.py", "not/in/the/tree"}
    assert "'sums' also reads ['ringcomm/errors.py']" in unlisted(proof, opened, tree)


# ---- runs that leave proofs out ------------------------------------------------------------------

CONFTEST = """
from pathlib import Path
from tests.proofs import Gate, Proof

ROOT = Path(__file__).parent
PROOFS = (
    Proof("sums", ("checks/test_sums.py",), ("source/*.txt", "conftest.py")),
    Proof("products", ("checks/products",), ()),
)


def pytest_configure(config):
    config.pluginmanager.register(Gate(config, PROOFS, ROOT, ROOT / "build" / "proofs.json"))
"""
PASSES = "def test_it(): pass\n"
FILES = {
    "conftest.py": CONFTEST,
    "pytest.ini": "[pytest]\ntestpaths = checks\naddopts = -p no:cacheprovider\n",
    "source/numbers.txt": "1 2 3\n",
    "checks/test_behaviour.py": PASSES,
    "checks/test_sums.py": "def test_one(): pass\ndef test_two(): pass\n",
    "checks/products/test_a.py": PASSES,
    "checks/products/test_b.py": PASSES.replace("it", "that"),
}


class Project:
    """A small tree with two proofs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name, text in FILES.items():
            self.write(name, text)

    def write(self, name: str, text: str) -> None:
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_text(text)

    def run(self, *options: str, **settings: str) -> tuple[dict[str, int], str]:
        """Runs pytest; returns the numbers in its last line, and the output."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        inherited.pop("RINGCOMM_TEST_CASES", None)
        own = {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        command = [sys.executable, "-m", "pytest", *options]
        environment = {**inherited, **own, **settings}
        if "xdist" in options:  # its workers are new interpreters
            done = subprocess.run(
                command, cwd=self.root, env=environment, text=True, capture_output=True
            )
        else:
            done = fork_server.run(command, cwd=self.root, env=environment)
        summary = done.stdout.strip().rpartition("\n")[2]
        numbers = re.findall(r"(\d+) (passed|failed|error|deselected)", summary)
        return {word: int(number) for number, word in numbers}, done.stdout + done.stderr

    def recorded(self) -> set[str]:
        path = self.root / "build" / "proofs.json"
        return set(json.loads(path.read_text())) if path.exists() else set()


WORKERS = ("-p", "xdist", "-n", "2")


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_a_proof_runs_again_when_a_file_that_it_reads_has_changed(project) -> None:
    assert project.run()[0] == {"passed": 5}
    outcome, output = project.run()
    assert outcome == {"passed": 1}
    assert "last passed: sums (2 tests), products (2 tests); make test-all" in output
    project.write("source/numbers.txt", "1 2 4\n")
    outcome, output = project.run()
    assert outcome == {"passed": 3} and "last passed: products (2 tests);" in output
    assert project.run()[0] == {"passed": 1}
    project.write("checks/products/test_b.py", PASSES)
    assert project.run()[0] == {"passed": 3}


@pytest.mark.parametrize("changed", ["checks/products/test_b.py", "checks/products/test_a.py"])
def test_a_file_that_a_proof_excepts_always_runs_and_changes_nothing(project, changed) -> None:
    excepts = '("checks/products",), (), except_for=("checks/products/test_b.py",)'
    project.write("conftest.py", CONFTEST.replace('("checks/products",), ()', excepts))
    assert project.run()[0] == {"passed": 5}
    outcome, output = project.run()
    assert outcome == {"passed": 2} and "last passed: sums (2 tests), products (1 tests);" in output
    project.write(changed, f"\n{PASSES}")
    assert project.run()[0] == {"passed": 2 if changed.endswith("b.py") else 3}
    project.write("checks/products/test_b.py", "def test_it(): assert False\n")
    assert project.run()[0] == {"passed": 1, "failed": 1}
    assert project.recorded() == {"sums", "products"}


def test_workers_leave_out_and_record_what_their_master_says(project) -> None:
    project.write("checks/test_sums.py", FILES["checks/test_sums.py"] + "def test_no(): assert 0\n")
    assert project.run(*WORKERS)[0] == {"passed": 5, "failed": 1}
    assert project.recorded() == {"products"}
    project.write("checks/test_sums.py", FILES["checks/test_sums.py"])
    outcome, output = project.run(*WORKERS)
    assert outcome == {"passed": 3} and "last passed: products (2 tests);" in output
    assert project.recorded() == {"sums", "products"}


def test_a_proof_that_is_asked_for_runs(project) -> None:
    project.run()
    for options, passed in {
        ("checks/test_sums.py",): 2,
        ("checks/products",): 2,
        ("checks",): 5,
        ("checks/test_sums.py::test_one",): 1,
        ("-k", "one or that"): 2,
    }.items():
        assert project.run(*options)[0]["passed"] == passed, options
    assert project.run(RINGCOMM_TEST_CASES="all")[0] == {"passed": 5}
    assert project.run(RINGCOMM_ANOTHER="setting")[0] == {"passed": 5}


def test_a_part_of_a_run_records_nothing(project) -> None:
    for options in (
        ("checks",),
        ("-k", "one"),
        ("--deselect", "checks/test_sums.py::test_one"),
        ("--collect-only",),
    ):
        project.run(*options)
        assert project.recorded() == set(), options
    project.run("--ignore=checks/products/test_a.py")
    assert project.recorded() == {"sums"}


def test_a_proof_that_fails_is_not_recorded(project) -> None:
    project.write("checks/test_sums.py", FILES["checks/test_sums.py"] + "def test_no(): assert 0\n")
    assert project.run()[0] == {"passed": 5, "failed": 1}
    assert project.recorded() == {"products"}
    project.write("checks/test_sums.py", "import pytest\npytest.fail('it does not import')\n")
    project.run()
    assert project.recorded() == {"products"}


def test_a_failure_that_depends_on_no_file_takes_the_record_back(project) -> None:
    project.write(
        "checks/test_sums.py", "import os\ndef test(): assert 'FAILS' not in os.environ\n"
    )
    project.run()
    assert project.recorded() == {"sums", "products"}
    assert project.run("checks/test_sums.py", FAILS="1")[0] == {"failed": 1}
    assert project.recorded() == {"products"}


INTERRUPTED, KILLED = ("raise KeyboardInterrupt", "-v"), ("os._exit(1)", "-v")
STOPPED = ("assert False", "-x")


@pytest.mark.parametrize(
    ("body", "option", "workers"),
    [
        *((*end, ()) for end in (INTERRUPTED, KILLED, STOPPED)),
        (*KILLED, WORKERS),
        *in_test_all((*INTERRUPTED, WORKERS), (*STOPPED, WORKERS)),
    ],
)
def test_a_run_that_ends_early_records_nothing(project, body, option, workers) -> None:
    project.write("checks/test_behaviour.py", f"import os\ndef test_it(): {body}\n")
    # This file comes first: the proof's other tests have not run when the run ends.
    project.write("checks/products/test_a.py", f"import os\ndef test_it(): {body}\n")
    project.run(option, *workers)
    assert "products" not in project.recorded()
    if not (body == "os._exit(1)" and workers):  # pytest-xdist replaces a killed worker
        assert project.recorded() == set()


def test_a_file_that_changes_meanwhile_is_not_recorded(project) -> None:
    changes = "open('source/numbers.txt', 'a').write('5')"
    project.write("checks/test_behaviour.py", f"def test_it(): {changes}\n")
    project.run()
    assert project.recorded() == {"products"}
