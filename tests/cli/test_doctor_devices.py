# SPDX-License-Identifier: Apache-2.0
"""The doctor's findings about GPUs, on emulated GPUs and without a GPU."""

import pytest

from ringcomm import cuda
from ringcomm.cli import doctor
from ringcomm.cli.doctor import FAIL, LOADING_VARIABLE, NOTE, OK, check_devices
from ringcomm.cuda.runtime import CONNECTIONS_VARIABLE
from ringcomm.errors import UnsupportedError
from tests.support.emulator import EmulatedRuntime


@pytest.fixture
def runtime():
    before = cuda.use(EmulatedRuntime(devices=2, multiprocessors=6))
    yield
    cuda.use(before)


def test_every_device_is_described(runtime, monkeypatch):
    monkeypatch.delenv(CONNECTIONS_VARIABLE, raising=False)
    monkeypatch.setattr(doctor, "describe_source", lambda capability: f"for {capability}")
    first, heap, second, _, queues, _ = check_devices()
    assert (first.name, second.name) == ("gpu 0", "gpu 1")
    assert (heap.name, heap.verdict, heap.value) == (
        "heap on gpu 0",
        OK,
        "grows by chunks as it fills",
    )
    assert first.verdict == OK
    assert "6 multiprocessors" in first.value
    assert "kernels: for (" in first.value
    assert (queues.verdict, queues.value) == (OK, "8 (the default)")


def test_a_device_without_kernels_is_named(runtime, monkeypatch):
    def none(capability):
        raise UnsupportedError("no compiler")

    monkeypatch.setattr(doctor, "describe_source", none)
    first, *_ = check_devices()
    assert (first.verdict, first.advice) == (NOTE, "no compiler")


def test_a_heap_that_does_not_grow_is_named(runtime, monkeypatch):
    monkeypatch.setenv("RINGCOMM_CUDA_HEAP", "fixed")
    _, heap, *_ = check_devices()
    assert (heap.verdict, heap.value) == (NOTE, "one allocation, which does not grow")
    assert "RINGCOMM_CUDA_HEAP=fixed is set; RINGCOMM_CUDA_HEAP_BYTES sets" in heap.advice
    monkeypatch.setenv("RINGCOMM_CUDA_HEAP", "rubber")
    _, heap, *_ = check_devices()
    assert heap.verdict == FAIL


def test_few_queues_are_named(runtime, monkeypatch):
    monkeypatch.setenv(CONNECTIONS_VARIABLE, "1")
    *_, queues, _ = check_devices()
    assert queues.verdict == NOTE
    assert "block each other" in queues.advice


def test_eager_loading_is_recommended(runtime, monkeypatch):
    for setting, shown in (("", "lazy (the default)"), ("LAZY", "lazy")):
        monkeypatch.setenv(LOADING_VARIABLE, setting)
        *_, loading = check_devices()
        assert (loading.verdict, loading.value) == (NOTE, shown)
        assert "CUDA_MODULE_LOADING=EAGER" in loading.advice
    monkeypatch.setenv(LOADING_VARIABLE, "EAGER")
    *_, loading = check_devices()
    assert loading.verdict == OK


@pytest.mark.parametrize("has_driver", [True, False])
def test_without_a_device_the_reason_is_told(monkeypatch, has_driver):
    def absent():
        raise UnsupportedError("CuPy is not installed: pip install it")

    monkeypatch.setattr(cuda, "current", absent)
    monkeypatch.setattr(doctor, "_has_driver", lambda: has_driver)
    (finding,) = check_devices()
    assert finding.verdict == NOTE
    told = (finding.value, finding.advice)
    if has_driver:
        assert told == ("none that ringcomm can use", "CuPy is not installed: pip install it")
    else:
        assert told == ("no NVIDIA driver on this machine", "")


def test_a_device_file_or_a_library_is_a_driver(tmp_path):
    broken = tmp_path / "libbroken.so"
    broken.touch()
    assert not doctor._has_driver(tmp_path, "libmissing.so.1")
    assert doctor._has_driver(tmp_path, "libc.so.6")
    assert doctor._has_driver(tmp_path, str(broken))
    (tmp_path / "nvidia0").touch()
    assert doctor._has_driver(tmp_path, "libmissing.so.1")
