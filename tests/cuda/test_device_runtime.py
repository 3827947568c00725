# SPDX-License-Identifier: Apache-2.0
"""The device runtime that a process gets, and the error of a process that gets none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from ringcomm import ArgumentError, ForkError, UnsupportedError, cuda
from ringcomm.cuda import find_device
from ringcomm.cuda.cupy_runtime import make_cuda_runtime
from tests.support import ROOT

# The state of CuPy on a machine, by name: the code that makes it, and the expected error message.
STACKS = {
    "absent": (
        """
import importlib.abc
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "cupy":
            raise ModuleNotFoundError("No module named 'cupy'", name="cupy")
sys.meta_path.insert(0, Absent())
""",
        "CuPy is not installed: pip install cupy-cuda13x nvidia-ml-py triton",
    ),
    "without driver": (
        """
import types
def count():
    raise RuntimeError("cudaErrorInsufficientDriver: driver version is insufficient")
cupy = sys.modules["cupy"] = types.ModuleType("cupy")
runtime = types.SimpleNamespace(driverGetVersion=lambda: 0, getDeviceCount=count)
cupy.cuda = types.SimpleNamespace(runtime=runtime, driver=None)
""",
        "there is no NVIDIA driver (libcuda.so.1)",
    ),
    "broken": (
        """
import importlib.abc
class Broken(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "cupy":
            raise OSError("libcuda.so.1: file too short")
sys.meta_path.insert(0, Broken())
""",
        "cannot be imported: OSError: libcuda.so.1: file too short",
    ),
}
# A program whose forks import ringcomm, each with another state of CuPy.
USE = """
import json, os, sys
import torch
for stack in json.loads(sys.argv[1]):
    pid = os.fork()
    if pid == 0:
        break
    if os.waitpid(pid, 0)[1]:
        sys.exit(1)
else:
    sys.exit()
assert "ringcomm" not in sys.modules
exec(stack)
import ringcomm
def work(comm):
    tensor = torch.full((1000,), float(comm.rank + 1))
    comm.all_reduce(tensor)
    return tensor
with ringcomm.local_world(2) as world:
    results = world.run(work)
assert all(torch.equal(r, torch.full((1000,), 3.0)) for r in results)
for call in (lambda: ringcomm.empty(3, device="cuda"), lambda: ringcomm.heap_stats("cuda")):
    try:
        call()
    except ringcomm.UnsupportedError as error:
        print(error, flush=True)
"""


def test_the_host_path_works_and_the_device_path_says_why_not():
    stacks = [stack for stack, _ in STACKS.values()]
    done = subprocess.run(
        [sys.executable, "-c", USE, json.dumps(stacks)],
        cwd=ROOT,
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    for _, said in STACKS.values():
        assert done.stdout.count(said) == 2, done.stdout


class StatusError(RuntimeError):
    """Like an error of CuPy: the number is in ``status``."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def fail(error: BaseException) -> Any:
    def call(*_: object) -> Any:
        raise error

    return call


@pytest.fixture
def stack(monkeypatch) -> SimpleNamespace:
    """A CuPy and a torch that both see one device; a test then breaks a part of them."""
    runtime = SimpleNamespace(driverGetVersion=lambda: 13000, getDeviceCount=lambda: 1)
    cupy: Any = ModuleType("cupy")
    cupy.cuda = SimpleNamespace(runtime=runtime, driver=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    return SimpleNamespace(cupy=cupy, runtime=runtime)


def said_by(monkeypatch: pytest.MonkeyPatch) -> str:
    with pytest.raises(UnsupportedError) as raised:
        make_cuda_runtime()
    return str(raised.value)


def test_no_visible_device(stack, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    error = StatusError(100, "cudaErrorNoDevice: no CUDA-capable device is detected")
    for count in (fail(error), lambda: 0):
        stack.runtime.getDeviceCount = count
        assert "shows no device; CUDA_VISIBLE_DEVICES is ''" in said_by(monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert "CUDA_VISIBLE_DEVICES is not set" in said_by(monkeypatch)


def test_a_driver_that_fails_with_cupy(stack, monkeypatch):
    stack.runtime.getDeviceCount = fail(StatusError(999, "cudaErrorUnknown:\n unknown error"))
    text = said_by(monkeypatch)
    assert "does not work with CuPy: StatusError: cudaErrorUnknown: unknown error." in text
    stack.runtime.driverGetVersion = fail(OSError("bad ELF"))
    assert "does not work with CuPy: OSError: bad ELF." in said_by(monkeypatch)
    del stack.cupy.cuda
    assert "CuPy does not work here: AttributeError" in said_by(monkeypatch)


def test_a_torch_that_cannot_use_the_devices(stack, monkeypatch):
    monkeypatch.setattr(torch.cuda, "init", fail(RuntimeError("CUDA unknown error")))
    text = said_by(monkeypatch)
    assert "the driver does not work with torch: RuntimeError: CUDA unknown error" in text
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert "CuPy sees 1 devices and torch 2" in said_by(monkeypatch)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "was built without CUDA" in said_by(monkeypatch)


def test_a_driver_library_that_does_not_load(stack, monkeypatch):
    def load(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr("ctypes.CDLL", load)
    assert "libcuda.so.1 cannot be used: OSError" in said_by(monkeypatch)


# ---- current and use -----------------------------------------------------------------------------


class TwoDevices:
    """The methods of a runtime that ringcomm calls to resolve a device's name."""

    def device_count(self) -> int:
        return 2

    def current_device(self) -> int:
        return 1


@pytest.fixture
def two_devices() -> Any:
    runtime: Any = TwoDevices()
    before = cuda.use(runtime)
    yield runtime
    assert cuda.use(before) is runtime


def test_use_sets_what_current_returns(two_devices):
    assert cuda.current() is two_devices
    assert cuda.use(None) is two_devices
    assert cuda.use(two_devices) is None


def test_devices_by_name(two_devices):
    assert find_device(None, "op") is None
    assert find_device("cpu", "op") is None
    assert find_device(torch.device("cpu"), "op") is None
    assert find_device("cuda", "op") == 1
    assert find_device("cuda:0", "op") == 0
    assert find_device(torch.device("cuda", 1), "op") == 1
    assert find_device(0, "op") == 0


@pytest.mark.parametrize("device", ["gpu", "meta", "cuda:x", -1, 1.5, object(), "cuda:2", 2])
def test_devices_that_are_none(two_devices, device):
    with pytest.raises(ArgumentError, match="op: device: expected"):
        find_device(device, "op")


def test_a_forked_child_has_no_runtime(two_devices):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            try:
                cuda.current()
            except ForkError as error:
                code = 0 if f"pid {os.getpid()}" in str(error) else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert cuda.current() is two_devices
