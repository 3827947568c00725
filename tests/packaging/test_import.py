# SPDX-License-Identifier: Apache-2.0
"""The modules that `import ringcomm` loads, in a fresh interpreter."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

# Modules that a machine without a GPU, or without NumPy, may lack.
ABSENT = ["numpy", "cupy", "triton", "pynvml", "mpi4py"]

BLOCK_ABSENT = f"""
import importlib.abc, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
import warnings
warnings.filterwarnings("ignore", "Failed to initialize NumPy")
"""

USE = """
import torch, ringcomm
def work(comm):
    tensor = torch.full((1000,), float(comm.rank + 1))
    comm.all_reduce(tensor)
    return tensor
with ringcomm.local_world(2) as world:
    results = world.run(work)
assert all(torch.equal(r, torch.full((1000,), 3.0)) for r in results)
"""


def run(code: str) -> str:
    """Returns the output of a fresh interpreter that runs `code` in the source tree."""
    # Otherwise torch would import ringcomm itself, through its entry point.
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    # Nothing is printed at exit either: the heap outlives the interpreter's last statement.
    assert done.stderr == ""
    return done.stdout


def new_modules(statement: str) -> set[str]:
    """Returns the modules that `statement` loads after `import torch`."""
    code = f"import sys, torch; before = set(sys.modules); {statement}"
    return set(run(f"{code}\nprint(*sorted(set(sys.modules) - before))").split())


def test_import_adds_nothing_heavy():
    added = new_modules("import ringcomm")
    assert not {name for name in added if name.partition(".")[0] in ABSENT}
    # Every `import torch` imports ringcomm through the entry point, so this import must stay small.
    assert not {name for name in added if name.startswith("torch.")}
    assert "ringcomm._native" not in added


def test_public_names_are_listed_before_they_are_loaded():
    names = run("import ringcomm; print(*dir(ringcomm))").split()
    assert {"Communicator", "local_world", "all_reduce", "empty", "ReduceOp"} <= set(names)


def test_every_door_is_listed_and_loaded_at_its_first_use():
    doors = ["extras", "functional", "optim", "tl", "zero"]
    names = run("import ringcomm; print(*dir(ringcomm))").split()
    assert set(doors) <= set(names)
    # One extra is enough: other modules load in the same way, and take seconds.
    assert run("import ringcomm; print(ringcomm.extras.__name__)") == "ringcomm.extras\n"


def test_every_extra_is_listed_and_loaded_at_its_first_use():
    extras = ["accelerate", "fsdp2", "lightning", "moe", "parallel", "transformers"]
    assert set(extras) <= set(run("from ringcomm import extras; print(*dir(extras))").split())
    name = run("import ringcomm; print(ringcomm.extras.parallel.__name__)")
    assert name == "ringcomm.extras.parallel\n"
    with pytest.raises(AssertionError, match="AttributeError"):
        run("import ringcomm; ringcomm.extras.no_such_name")


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AssertionError, match="AttributeError"):
        run("import ringcomm; ringcomm.no_such_name")


def test_it_works_without_numpy_and_without_a_gpu_stack():
    run(BLOCK_ABSENT + USE)


def test_the_blocker_blocks():
    with pytest.raises(AssertionError, match="No module named 'numpy'"):
        run(BLOCK_ABSENT + "import numpy")


def unbuilt(folder: Path) -> Path:
    """A copy of the package without the native module, in a folder like a source tree."""
    package = folder / "ringcomm"
    shutil.copytree(
        ROOT / "ringcomm", package, ignore=shutil.ignore_patterns("_native*.so", "__pycache__")
    )
    (folder / "CMakeLists.txt").write_text("")
    return package


# Removes the editable install's finder, which would find the built native module.
TRY_NATIVE = """
import sys
sys.meta_path[:] = [each for each in sys.meta_path if "editable" not in each.__module__]
import ringcomm
try:
    from ringcomm import _native
except ImportError as error:
    print(type(error.__cause__).__name__, error.name, error)
"""


def fails_in(folder: Path) -> str:
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONPATH": str(folder)}
    command = [sys.executable, "-c", TRY_NATIVE]
    done = subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_the_native_module_what_to_run_is_said(tmp_path):
    package = unbuilt(tmp_path)
    said = fails_in(tmp_path)
    assert said.startswith("ModuleNotFoundError ringcomm._native ringcomm: the native module is ")
    assert f"not built: there is no _native in {package}. In {tmp_path}, run 'make native'" in said
    assert "or 'pip install .'" in said


def test_a_native_module_of_another_python_is_named(tmp_path):
    package = unbuilt(tmp_path)
    other = package / "_native.cpython-39-x86_64-linux-gnu.so"
    other.write_bytes(b"")
    python = ".".join(map(str, sys.version_info[:2]))
    said = fails_in(tmp_path)
    assert f"does not load in Python {python}: {package} has {other.name}. In " in said
    # A library of the stable ABI is found, and needs a newer Python.
    other.unlink()
    (package / "_native.abi3.so").write_bytes(b"no library")
    (tmp_path / "CMakeLists.txt").unlink()
    said = fails_in(tmp_path)
    assert said.startswith("ImportError ringcomm._native ringcomm: the native module does not load")
    assert "has _native.abi3.so, and Python says: " in said
    assert "Install ringcomm again with this Python: pip install" in said
