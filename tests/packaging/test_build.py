# SPDX-License-Identifier: Apache-2.0
"""The sdist, the wheel and the editable install: they build without torch, install, and run."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.compiler import LOW_PRIORITY

pytestmark = pytest.mark.compiles

NOT_SOURCE = ("*.so", "*.egg-info", "__pycache__", "build", "dist", ".*", "results")

# The tested interpreter runs this in the source tree: a PEP 517 hook and its output folder.
CALL_HOOK = (
    "import sys; from setuptools import build_meta as b; getattr(b, sys.argv[1])(sys.argv[2])"
)
PRINT_PURELIB = "import sysconfig; print(sysconfig.get_path('purelib'))"

USE = """
import importlib.metadata, importlib.util, pathlib, sys
import torch, torch.distributed as dist

store = dist.HashStore()
dist.init_process_group("ringcomm", store=store, rank=0, world_size=1)
tensor = torch.ones(3)
dist.all_reduce(tensor)
assert torch.equal(tensor, torch.ones(3))
dist.destroy_process_group()

import ringcomm
def work(comm):
    tensor = torch.full((1000,), float(comm.rank + 1))
    comm.all_reduce(tensor)
    return tensor
with ringcomm.local_world(2) as world:
    results = world.run(work)
assert all(torch.equal(r, torch.full((1000,), 3.0)) for r in results)
assert importlib.metadata.version("ringcomm") == ringcomm.__version__
for kernels in ("launch", "words", "collectives"):
    assert importlib.util.find_spec(f"ringcomm._tl.{kernels}") is not None
print(pathlib.Path(ringcomm.__file__).parent)
print(pathlib.Path(importlib.util.find_spec("ringcomm.bench").origin).parent)

# Where the package takes the kernels' sources from, and what a compilation reads of them.
from ringcomm.cuda import units
root = units.source_root()
sources = [units.read_source(root, unit) for unit in units.UNITS.values()]
names = {name for source in sources for name in source.headers}
print(root, units.SOURCE, *names)
"""


# These tests check the packed files, not their speed. If this tree's build has an object and the
# copy has its source and all headers, the object is copied; other objects are compiled without
# optimisation.
COMPILER = """#!/bin/sh
for word; do
  [ "$before" = -o ] && out=$word
  [ "$word" = -c ] && compiles=yes
  before=$word
done
if [ "$compiles" = yes ] && [ -f "{made}/$out" ]; then
  {compiler} "$@" -E > /dev/null && cp "{made}/$out" "$out"
else
  exec {compiler} "$@" -O0
fi
"""

# Replaces the compiler of the C++ backend, which takes 20 s; tests/c10d/test_backend.py runs it.
COMPILER_OF_BACKEND = """#!/bin/sh
case "$*" in
  *kernels/c10d/backend.cpp*)
    for word; do [ "$before" = -o ] && out=$word; before=$word; done
    echo compiled > "$out" ;;
  *) exec {compiler} "$@" ;;
esac
"""


def run(*command: object, cwd: Path, **environment: str) -> str:
    """Returns the output of a command that must succeed, run without access to the source tree."""
    inherited = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "CMAKE_ARGS"}}
    words = [*LOW_PRIORITY, *(str(word) for word in command)]
    merged = {**inherited, **environment}
    done = subprocess.run(words, cwd=cwd, env=merged, text=True, capture_output=True)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}{done.stderr}"
    return done.stdout


class Workshop:
    """A copy of the source tree, the packages built from it, and environments to install them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tree = folder / "tree"
        shutil.copytree(ROOT, self.tree, ignore=shutil.ignore_patterns(*NOT_SOURCE))
        blocked = folder / "blocked" / "torch"
        blocked.mkdir(parents=True)
        (blocked / "__init__.py").write_text("raise ImportError('torch at build time')")
        self.compiler = folder / "c++"
        made = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}"
        compiler = os.environ.get("CXX", "c++")
        self.compiler.write_text(COMPILER.format(made=made, compiler=compiler))
        self.compiler.chmod(0o755)

    def build(self, hook: str, source: Path) -> Path:
        """Returns the one file that a PEP 517 hook builds from a source tree without torch."""
        out = self.folder / hook
        out.mkdir()
        blocked = str(self.folder / "blocked")
        # nvcc takes minutes for all kernels; tests/proof/compile runs a build with CUDA.
        arguments = "-DRINGCOMM_CUDA=OFF -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG="
        environment = {"PYTHONPATH": blocked, "CMAKE_ARGS": arguments, "CXX": str(self.compiler)}
        run(sys.executable, "-c", CALL_HOOK, hook, out, cwd=source, **environment)
        (built,) = out.iterdir()
        return built

    def install(self, wheel: Path) -> Path:
        """Makes an environment with this wheel, and with torch linked from the running one."""
        home = self.folder / f"venv-{wheel.parent.name}"
        venv.create(home, with_pip=False, symlinks=True)
        borrowed = self.folder / f"borrowed-{wheel.parent.name}"
        borrowed.mkdir()
        for entry in Path(sysconfig.get_path("purelib")).iterdir():
            if "ringcomm" not in entry.name and entry.suffix != ".pth":
                (borrowed / entry.name).symlink_to(entry)
        python = home / "bin" / "python"
        purelib = run(python, "-c", PRINT_PURELIB, cwd=self.folder).strip()
        Path(purelib, "borrowed.pth").write_text(f"{borrowed}\n")
        pip = [sys.executable, "-m", "pip", "--python", python]
        run(*pip, "install", "--quiet", "--no-index", "--no-deps", wheel, cwd=self.folder)
        return home


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    return Workshop(tmp_path_factory.mktemp("packaging"))


@pytest.fixture(scope="module")
def sdist(workshop):
    return workshop.build("build_sdist", workshop.tree)


@pytest.fixture(scope="module")
def unpacked(workshop, sdist):
    """The source tree as the sdist contains it; both builds share its CMake build folder."""
    out = workshop.folder / "unpacked"
    with tarfile.open(sdist) as archive:
        archive.extractall(out)
    (tree,) = out.iterdir()
    return tree


@pytest.fixture(scope="module")
def wheel(workshop, unpacked):
    return workshop.build("build_wheel", unpacked)


def test_the_sdist_holds_the_sources(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"CMakeLists.txt", "LICENSE", "README.md", "Makefile", "tests/test_layering.py"}
    assert wanted | {"kernels/include/ringcomm/core/platform.h", "bench/__init__.py"} <= names
    assert {"kernels/cuda/kernels.cu", "kernels/cuda/CMakeLists.txt"} <= names
    about = {"CHANGELOG.md", "CITATION.cff", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md"}
    assert about | {"Containerfile", "mkdocs.yml", "pyproject.toml", "docs/index.md"} <= names
    assert not {name for name in names if name.endswith((".so", ".pyc")) or name.startswith(".ci")}


def test_the_wheel_holds_the_packages_only(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"ringcomm"}
    wanted = {"py.typed", "_native.pyi", "bench/collectives/__init__.py", "_tl/launch.py"}
    wanted |= {"cli/report.html", "extras/migrate/keys.ini"}
    assert {f"ringcomm/{name}" for name in wanted} <= set(names)
    assert len([name for name in names if name.endswith(".so")]) == 1
    backend = "ringcomm/_kernels/src/kernels/c10d/"
    assert f"{backend}backend.cpp" in names  # a command compiles it on demand
    others = [name for name in names if not name.startswith(backend)]
    assert not {name for name in others if name.endswith((".csv", ".cpp", "CMakeLists.txt"))}
    # The CUDA kernels' sources, which NVRTC compiles at first use.
    sources = {name for name in names if name.endswith((".h", ".cu"))}
    assert all(name.startswith("ringcomm/_kernels/src/kernels/") for name in sources)
    assert "ringcomm/_kernels/src/kernels/cuda/kernels.cu" in sources


def test_the_wheel_installs_and_runs(workshop, wheel):
    home = workshop.install(wheel)
    printed = run(home / "bin" / "python", "-c", USE, cwd=workshop.folder)
    package, harness, root, *texts = printed.split()
    assert Path(package).is_relative_to(home)
    assert Path(harness) == Path(package, "bench")
    assert Path(root) == Path(package, "_kernels", "src")
    assert {"kernels/cuda/kernels.cu", "ringcomm/core/platform.h"} <= set(texts)
    assert "bench" in run(home / "bin" / "ringcomm", "--help", cwd=workshop.folder)


def test_the_editable_install_runs_from_the_tree(workshop, unpacked):
    home = workshop.install(workshop.build("build_editable", unpacked))
    printed = run(home / "bin" / "python", "-c", USE, cwd=workshop.folder)
    package, harness, root, *texts = printed.split()
    assert Path(package) == unpacked / "ringcomm"
    assert Path(harness) == unpacked / "ringcomm" / "bench"  # an sdist has no links
    assert Path(root) == unpacked
    assert {"kernels/cuda/kernels.cu", "ringcomm/core/platform.h"} <= set(texts)
    assert "bench" in run(home / "bin" / "ringcomm", "--help", cwd=workshop.folder)


def test_a_build_beside_torch_can_make_the_cpp_backend(workshop, unpacked):
    compiler = workshop.folder / "c++ of the backend"
    compiler.write_text(COMPILER_OF_BACKEND.format(compiler=workshop.compiler))
    compiler.chmod(0o755)
    asked = {"RINGCOMM_BUILD_BACKEND": "1", "CXX": str(compiler)}
    arguments = "-DRINGCOMM_CUDA=OFF -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG="
    build = (sys.executable, "setup.py", "-q", "build_ext", "--inplace")
    run(*build, cwd=unpacked, CMAKE_ARGS=arguments, **asked)
    (made,) = (unpacked / "ringcomm").glob("_backend.torch*.so")
    assert made.read_text() == "compiled\n"
    made.unlink()


def test_the_build_cannot_reach_torch(workshop):
    with pytest.raises(AssertionError, match="torch at build time"):
        blocked = str(workshop.folder / "blocked")
        run(sys.executable, "-c", "import torch", cwd=workshop.folder, PYTHONPATH=blocked)


# The functions of CPython 3.12's limited API (as its documentation says of each) that the bindings
# may use. A build under 3.12, by `make matrix` or `make wheels`, proves this; CI has an older
# CPython, where all functions can be called.
LIMITED_API = {
    "PyBuffer_FillInfo",
    "PyBytes_AsString",
    "PyCapsule_GetContext",
    "PyCapsule_New",
    "PyCapsule_SetContext",
    "PyDict_GetItemWithError",
    "PyErr_CheckSignals",
    "PyErr_Clear",
    "PyErr_Occurred",
    "PyErr_SetFromErrno",
    "PyErr_SetObject",
    "PyEval_RestoreThread",
    "PyEval_SaveThread",
    "PyExc_OSError",
    "PyFrame_GetCode",
    "PyFrame_GetLineNumber",
    "PyGILState_Ensure",
    "PyGILState_Release",
    "PyGILState_STATE",
    "PyList_CheckExact",
    "PyList_GetItem",
    "PyList_Size",
    "PyLong_AsLong",
    "PyLong_AsLongAndOverflow",
    "PyLong_AsVoidPtr",
    "PyLong_CheckExact",
    "PyLong_FromLong",
    "PyLong_FromLongLong",
    "PyObject_CallMethodObjArgs",
    "PyObject_CallNoArgs",
    "PyObject_GetAttr",
    "PyObject_GetAttrString",
    "PyObject_Hash",
    "PyObject_Vectorcall",
    "PySequence_Index",
    "PySys_GetObject",
    "PyTuple_New",
    "PyTuple_Pack",
    "PyTuple_SetItem",
    "PyType_GetSlot",
    "PyType_Slot",
    "PyUnicode_AsEncodedString",
    "PyUnicode_CheckExact",
    "PyUnicode_CompareWithASCIIString",
    "PyUnicode_DecodeUTF8",
    "PyUnicode_EncodeFSDefault",
    "PyUnicode_GetLength",
    "PyUnicode_InternFromString",
}


def test_the_bindings_keep_to_the_limited_api():
    """With CPython 3.12's limited API, one wheel serves all later versions."""
    bindings = ROOT / "kernels" / "bindings"
    used = {
        name
        for path in (*bindings.glob("*.cpp"), *bindings.glob("*.h"))
        for name in re.findall(r"\bPy[A-Z][A-Za-z]*_\w+", path.read_text())
    }
    assert used and used - LIMITED_API == set()
