# SPDX-License-Identifier: Apache-2.0
"""Worlds that cannot be built report the reason on every rank, and leave no memory allocated."""

import re
import threading
import time
from dataclasses import replace

import pytest
import torch
from torch.distributed import HashStore

import ringcomm
from ringcomm import (
    ArgumentError,
    Communicator,
    HeapError,
    MismatchError,
    ReduceOp,
    RingcommError,
    UnsupportedError,
    premul_sum,
)
from ringcomm.comm.device import rendezvous
from ringcomm.comm.device.rendezvous import prove_links
from ringcomm.memory import device_heap
from ringcomm.memory.device_heap import map_device_heap
from tests.comm.device.conftest import require
from tests.proof.ptx.multicast_job import multicast_kernels
from tests.support import nvrtc
from tests.support.device_worlds import OPTIONS, Devices, with_options
from tests.support.emulator.library import figures_of, library

MIB = 1 << 20


@pytest.fixture
def emulated():
    """``emulated(**settings)`` makes devices; after the test all their memory must be free."""
    require("emulated")
    made = []

    def use(**settings):
        made.append(Devices("emulated", **settings))
        return made[-1]

    yield use
    for devices in made:
        devices.close()


@pytest.fixture
def kernels():
    """The kernels that an emulated device needs for windows; no test here launches them."""
    if nvrtc.library_path() is None:
        pytest.skip("no NVRTC")
    return multicast_kernels()


def _errors(ranks, options=OPTIONS, devices=None, heap_bytes=None):
    """Returns the error of each rank's rendezvous."""
    store, errors = HashStore(), [RingcommError("nothing was raised")] * ranks

    def build(rank):
        device = devices[rank] if devices else "cuda:0"
        try:
            Communicator.from_store(
                store, rank, ranks, options=options, device=device, heap_bytes=heap_bytes
            )
        except RingcommError as error:
            errors[rank] = error

    threads = [threading.Thread(target=build, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_a_heap_that_does_not_fit_on_the_device(emulated, monkeypatch):
    monkeypatch.setenv("RINGCOMM_CUDA_HEAP", "fixed")
    emulated(memory_bytes=16 * MIB)
    for error in _errors(2, heap_bytes=32 * MIB):
        assert isinstance(error, HeapError) or "needs" in str(error)
        assert f"needs {32 * MIB} bytes, free {16 * MIB} bytes" in str(error)
        assert "RINGCOMM_CUDA_HEAP_BYTES" in str(error)


def test_a_region_that_does_not_fit_in_the_heap(emulated):
    emulated(memory_bytes=16 * MIB)
    errors = _errors(2, with_options(segment_bytes=MIB), heap_bytes=4 * MIB)
    assert any(isinstance(error, HeapError) for error in errors)
    for error in errors:
        assert "needs" in str(error) and "of the heap on device 0" in str(error)


def test_no_peer_access(emulated):
    emulated(unreachable=frozenset({(1, 0)}))
    errors = _errors(2, devices=["cuda:0", "cuda:1"])
    assert isinstance(errors[1], UnsupportedError)
    for error in errors:
        assert "no peer access from 1 to 0" in str(error)


def test_a_rank_that_fails_when_its_peers_have_mapped_it(emulated, monkeypatch):
    """Peers wait for words that it will never write; its error ends their waits early."""
    emulated()
    peers_prove = threading.Barrier(3)

    def maps(handle, heap, operation, reader):
        if "rank 1 " not in operation:
            return map_device_heap(handle, heap, operation, reader)
        peers_prove.wait(OPTIONS.timeout_s)
        raise UnsupportedError(f"{operation}: no way")

    def proves(*args):
        peers_prove.wait(OPTIONS.timeout_s)
        prove_links(*args)

    monkeypatch.setattr(rendezvous, "map_device_heap", maps)
    monkeypatch.setattr(rendezvous, "prove_links", proves)
    started = time.monotonic()
    errors = _errors(3)
    assert time.monotonic() - started < OPTIONS.timeout_s / 2
    assert isinstance(errors[1], UnsupportedError)
    for error in errors:
        assert "no way" in str(error)
    assert "rank 1 failed" in str(errors[0]) and "rank 1 failed" in str(errors[2])


def test_more_ranks_than_a_launch_carries(emulated):
    emulated()
    for error in _errors(9, with_options(channels=1)):
        assert "9 ranks of this process share device 0" in str(error)
        assert "at most 8" in str(error)


def test_a_grid_that_could_not_be_co_resident(emulated):
    emulated(multiprocessors=4)
    for error in _errors(3, with_options(channels=2)):
        assert isinstance(error, UnsupportedError)
        assert "needs 6 co-resident blocks, but device 0 runs 4 of them at once" in str(error)
        assert "CommOptions(channels=...)" in str(error)
    with ringcomm.local_world(2, device="cuda:0", options=with_options(channels=2)) as world:
        assert len(world) == 2


def test_a_world_that_is_too_large(emulated):
    emulated()
    with pytest.raises(UnsupportedError, match=r"65 ranks.*at most 64"):
        ringcomm.local_world(65, options=OPTIONS, device="cuda:0")


def test_options_that_differ(emulated):
    emulated()
    store, errors = HashStore(), []

    def build(rank):
        options = with_options(segment_bytes=1024 * (rank + 1))
        with pytest.raises(RingcommError) as caught:
            Communicator.from_store(store, rank, 2, options=options, device="cuda:0")
        errors.append(caught.value)

    threads = [threading.Thread(target=build, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert any(isinstance(error, MismatchError) for error in errors)
    for error in errors:
        assert "segment_bytes=1024" in str(error) and "segment_bytes=2048" in str(error)


def test_a_refused_world_leaves_blocks_for_the_next(emulated):
    devices = emulated(multiprocessors=4)
    for _ in range(3):
        _errors(3, with_options(channels=2))
        world = devices.new_world(2)
        world.close()


# ---- algorithm="multicast" -----------------------------------------------------------------------

WITH_WINDOW = with_options(multicast_bytes=4096)


@pytest.mark.parametrize(
    ("settings", "lacks"),
    [
        ({"multicast": False}, "it is under no NVSwitch"),
        ({"capability": (8, 0)}, "its compute capability is 8.0, and multimem instructions need"),
    ],
)
def test_devices_without_multicast(emulated, settings, lacks):
    emulated(**settings)
    errors = _errors(2, WITH_WINDOW, ["cuda:0", "cuda:1"])
    assert any(isinstance(error, UnsupportedError) for error in errors)
    for error in errors:
        # Each error is the rank's own refusal, or repeats the other rank's.
        told = (
            r"of 2: (rank [01] failed: UnsupportedError: )?multicast_bytes: expected devices with"
        )
        assert re.search(told + " multicast", str(error))
        assert "but rank 0 (pid" in str(error) and lacks in str(error)
        assert "Use GPUs of sm_90 or later under one NVSwitch, or leave" in str(error)


def test_windows_of_ranks_that_share_a_device(emulated, kernels):
    emulated(ptx=kernels)
    errors = _errors(3, with_options(multicast_bytes=4096, channels=1), ["cuda:0"] * 3)
    assert any(isinstance(error, UnsupportedError) for error in errors)
    for error in errors:
        assert "expected a device for each rank, but rank 1" in str(error)
        assert "has the device of rank 0" in str(error)


def test_a_window_of_one_rank(emulated, kernels):
    emulated(ptx=kernels)
    (error,) = _errors(1, WITH_WINDOW)
    assert isinstance(error, UnsupportedError) and "expected 2 ranks or more, got 1" in str(error)


def test_a_window_that_is_too_small(emulated, kernels):
    emulated(ptx=kernels)
    for error in _errors(2, with_options(multicast_bytes=64), ["cuda:0", "cuda:1"]):
        assert "multicast_bytes: expected at least 512 for 2 ranks and 2 channels" in str(error)
    device_heap.close_heaps()
    assert library().emu_vmm_in_use() == 0


def test_a_window_on_emulated_devices_that_execute_no_ptx(emulated):
    if emulated().emulated.ptx is not None:
        pytest.skip("these execute PTX")
    for error in _errors(2, WITH_WINDOW, ["cuda:0", "cuda:1"]):
        assert "kernel rc_multicast_sum of unit multicast_float32 has multimem" in str(error)


def test_calls_by_multicast_that_are_not_supported(emulated):
    with emulated().new_world(2, (0, 1)) as world:
        comm = world[0]
        for dtype, op in (
            (torch.float64, ReduceOp.SUM),
            (torch.int32, ReduceOp.SUM),
            (torch.float32, ReduceOp.MAX),
            (torch.bfloat16, premul_sum(2.0)),
        ):
            tensor = torch.zeros(8, dtype=dtype)
            with pytest.raises(UnsupportedError, match=r"SUM or AVG of torch\.float32, .* got"):
                comm.all_reduce(tensor, op=op, algorithm="multicast")
            with pytest.raises(UnsupportedError, match=f"reduce_scatter_tensor on rank 0.*{dtype}"):
                comm.reduce_scatter_tensor(tensor[:4], tensor, op=op, algorithm="multicast")
        plain = torch.zeros(8)
        with pytest.raises(ArgumentError, match=r"needs CommOptions\.multicast_bytes > 0"):
            comm.all_reduce(plain, algorithm="multicast")
        with pytest.raises(ArgumentError, match="multicast_bytes > 0"):
            comm.all_gather_into_tensor(plain, plain[:4], algorithm="multicast")
        world.run(lambda comm: comm.barrier())  # the peer is not affected


def test_multicast_on_the_host():
    with (
        ringcomm.local_world(1) as world,
        pytest.raises(UnsupportedError, match="works on the host"),
    ):
        world[0].all_reduce(torch.zeros(4), algorithm="multicast")


# ---- threads of a block --------------------------------------------------------------------------


def test_a_kernel_is_launched_with_the_threads_that_it_was_compiled_for(emulated, monkeypatch):
    """The host reads the number from the function; the mutant reports one more than it allows."""
    devices = emulated()
    find, more = devices.runtime.find_kernel, 0
    monkeypatch.setattr(
        devices.runtime,
        "find_kernel",
        lambda *which: replace(
            kernel := find(*which), threads=figures_of(kernel.handle).threads + more
        ),
    )

    def barrier_of_one():
        with ringcomm.local_world(1, device="cuda:0", options=OPTIONS) as (comm,):
            comm.barrier()
            devices.runtime.synchronize(0)

    barrier_of_one()
    more = 1
    with pytest.raises(RingcommError, match=r"launching a collective.*invalid argument"):
        barrier_of_one()


# ---- kernels of two forms ------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["barrier", "all_to_all"])
def test_a_kernel_of_other_parameters_than_the_launch_has_is_refused(emulated, monkeypatch, call):
    """The mutant: kernels with lists and kernels without lists are exchanged."""
    devices = emulated()
    find, other = devices.runtime.find_kernel, {"rc_move": "rc_list_move"}
    other |= {theirs: name for name, theirs in other.items()}

    out, given = torch.zeros(4), torch.ones(4)

    def make_call(comm):
        if call == "barrier":
            comm.barrier()
        else:
            comm.all_to_all([out], [given])
        devices.runtime.synchronize(0)

    with ringcomm.local_world(1, device="cuda:0", options=OPTIONS) as (comm,):
        make_call(comm)
    monkeypatch.setattr(
        devices.runtime,
        "find_kernel",
        lambda device, unit, name: find(device, unit, other.get(name, name)),
    )
    with (
        ringcomm.local_world(1, device="cuda:0", options=OPTIONS) as (comm,),
        pytest.raises(RingcommError, match=r"launching a collective.*invalid argument"),
    ):
        make_call(comm)
