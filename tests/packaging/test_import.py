"""What `import ringcomm` brings along, in a fresh interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

# What a machine without a GPU, or without NumPy, does not have.
ABSENT = ["numpy", "cupy", "triton", "pynvml", "mpi4py", "matplotlib"]

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
    """Standard output of a fresh interpreter that runs `code` in the source tree."""
    # torch would otherwise import ringcomm itself, through its entry point.
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    # Not a word at exit either: the process's heap outlives the interpreter's last statement.
    assert done.stderr == ""
    return done.stdout


def new_modules(statement: str) -> set[str]:
    """Names of the modules that `statement` loads after `import torch`."""
    code = f"import sys, torch; before = set(sys.modules); {statement}"
    return set(run(f"{code}\nprint(*sorted(set(sys.modules) - before))").split())


def test_import_adds_nothing_heavy():
    added = new_modules("import ringcomm")
    assert not {name for name in added if name.partition(".")[0] in ABSENT}
    # The entry point imports ringcomm at every `import torch`: what it loads stays small.
    assert not {name for name in added if name.startswith("torch.")}
    assert "ringcomm._native" not in added


def test_public_names_are_listed_before_they_are_loaded():
    names = run("import ringcomm; print(*dir(ringcomm))").split()
    assert {"Communicator", "local_world", "all_reduce", "empty", "ReduceOp"} <= set(names)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AssertionError, match="AttributeError"):
        run("import ringcomm; ringcomm.no_such_name")


def test_it_works_without_numpy_and_without_a_gpu_stack():
    run(BLOCK_ABSENT + USE)


def test_the_blocker_blocks():
    with pytest.raises(AssertionError, match="No module named 'numpy'"):
        run(BLOCK_ABSENT + "import numpy")
