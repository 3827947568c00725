# SPDX-License-Identifier: Apache-2.0
"""Calls that a device refuses do not disturb peers, and the communicator stays usable."""

import mmap

import pytest
import torch

import ringcomm
from ringcomm import ArgumentError, UnsupportedError
from ringcomm.algorithms import spelled
from tests.support.device_worlds import (
    LL_BYTES,
    device_of,
    on_host,
    put,
    with_options,
)

_MAP_NORESERVE = 0x4000  # Linux's value; the mmap module has the name since Python 3.13


@pytest.fixture
def world(devices):
    """Two ranks that must still sum correctly after the test."""
    made = devices.world(2)
    yield made
    assert not any(comm.aborted for comm in made)

    def body(comm):
        tensor = put(comm, torch.full((300,), comm.rank + 1.0), "plain")
        comm.all_reduce(tensor)
        assert torch.equal(on_host(tensor), torch.full((300,), 3.0))

    devices.run(made, body)


def _on(comm, count=8, dtype=torch.float32):
    return put(comm, torch.zeros(count, dtype=dtype), "heap")


WITH_HOST_TENSORS = [
    lambda c, host: c.all_reduce(host(8)),
    lambda c, host: c.reduce(host(8), 0),
    lambda c, host: c.all_gather_into_tensor(_on(c, 16), host(8)),
    lambda c, host: c.all_gather_into_tensor(host(16), _on(c)),
    lambda c, host: c.all_gather([_on(c), host(8)], _on(c)),
    lambda c, host: c.reduce_scatter_tensor(host(4), _on(c)),
    lambda c, host: c.reduce_scatter(_on(c), [_on(c), host(8)]),
    lambda c, host: c.broadcast(host(8), 0),
    lambda c, host: c.gather(_on(c), [_on(c), host(8)], 0),
    lambda c, host: c.scatter(_on(c), [_on(c), host(8)], 0),
    lambda c, host: c.all_to_all([_on(c), host(8)], [_on(c), _on(c)]),
    lambda c, host: c.all_to_all_single(_on(c), host(8)),
    lambda c, host: c.all_reduce_coalesced([_on(c), host(8)]),
    lambda c, host: c.all_reduce(host(8), async_op=True),
    lambda c, host: c.send(host(8), 1),
    lambda c, host: c.irecv(host(8), 1),
]


@pytest.mark.parametrize("call", WITH_HOST_TENSORS)
@pytest.mark.parametrize("make", [torch.zeros, ringcomm.zeros], ids=["plain", "heap of the host"])
def test_tensors_of_the_host(devices, world, call, make):
    words = r"on rank 0 of 2: .*: expected a tensor on device 0 .*got one on cpu"
    with (
        devices.as_on_gpu(world[0]),
        devices.host_tensors(),
        pytest.raises(ArgumentError, match=words),
    ):
        call(world[0], make)


@pytest.mark.parametrize("count", [8, 16])
def test_tensors_of_another_device(two_devices, world, count):
    other = ringcomm.zeros(count, device="cuda:1")
    with two_devices.as_on_gpu(world[0]):
        mine = _on(world[0])
        for call in (
            lambda c: c.all_reduce(other),
            lambda c: c.all_gather_into_tensor(other, mine),
            lambda c: c.all_to_all([mine, other], [mine, mine]),
            lambda c: c.isend(other, 1),
        ):
            with pytest.raises(ArgumentError, match=r"expected a tensor on device 0"):
                call(world[0])


@pytest.mark.parametrize("async_op", [False, True])
def test_a_current_stream_of_another_device(two_devices, world, async_op):
    """A call runs on the current stream of its own device, whichever device is current."""
    runtime = two_devices.runtime

    def body(comm):
        tensor = put(comm, torch.full((300,), comm.rank + 1.0), "heap")
        with runtime.on_stream(runtime.make_stream(1)):
            work = comm.all_reduce(tensor, async_op=async_op)
            if work is not None:
                work.wait()
        comm.engine.finish_host_side()
        return torch.equal(on_host(tensor), torch.full((300,), 3.0))

    assert two_devices.run(world, body) == [True, True]


def test_tensors_of_a_device_on_a_communicator_of_the_host(devices):
    if devices.emulated:
        pytest.skip("the tensors of emulated devices are the host's for a communicator of the host")
    with (
        ringcomm.local_world(2) as hosts,
        pytest.raises(ArgumentError, match=r"CPU tensor.*cuda:0"),
    ):
        hosts[0].all_reduce(ringcomm.zeros(8, device="cuda:0"))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda c: c.all_reduce(_on(c), algorithm="star"), "auto, two_shot, ring, .*got 'star'"),
        (
            lambda c: c.all_reduce(_on(c), algorithm="copy_engine"),
            "for all_gather_into_tensor alone",
        ),
        (lambda c: c.reduce_scatter_tensor(_on(c), _on(c, 16), algorithm="copy_engine"), "alone"),
        (lambda c: c.all_reduce(_on(c, dtype=torch.float8_e5m2)), "not defined for dtype"),
        (lambda c: c.all_reduce(_on(c), torch.distributed.ReduceOp.BAND), "BAND is not defined"),
        (lambda c: c.broadcast(_on(c), 2), "src: expected a rank from 0 to 1, got 2"),
        (lambda c: c.reduce_scatter_tensor(_on(c, 3), _on(c)), "world_size x those of output"),
        (lambda c: c.all_gather_into_tensor(_on(c, 15), _on(c)), "world_size x those of input"),
        (lambda c: c.all_gather_into_tensor(_on(c, 32)[::2], _on(c)), "contiguous"),
        (lambda c: c.all_reduce(_on(c).expand(2, 8)), "memory of its own"),
    ],
)
def test_arguments_that_do_not_fit(devices, world, call, words):
    with (
        devices.as_on_gpu(world[0]),
        pytest.raises(ArgumentError, match=r"on rank 0 of 2: .*" + words),
    ):
        call(world[0])


def _refusals(devices, world, call):
    """Returns the error of every rank; each rank makes the call."""

    def body(comm):
        with pytest.raises(ArgumentError) as caught:
            call(comm)
        return str(caught.value)

    return devices.run(world, body)


TOO_MANY = LL_BYTES // 4 + 1


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.all_reduce(_on(c, TOO_MANY), algorithm="ll"),
        lambda c: c.reduce_scatter_tensor(_on(c, TOO_MANY), _on(c, 2 * TOO_MANY), algorithm="ll"),
        lambda c: c.all_gather_into_tensor(_on(c, 2 * TOO_MANY), _on(c, TOO_MANY), algorithm="ll"),
    ],
)
def test_a_message_too_large_for_ll(devices, world, call):
    for rank, text in enumerate(_refusals(devices, world, call)):
        assert f"on rank {rank} of 2: " in text
        assert f'"ll" takes up to {LL_BYTES} bytes per peer' in text
        assert f"got {4 * TOO_MANY} bytes" in text


def test_copy_without_staging_for_it(devices):
    with devices.new_world(2, options=with_options(copy_engine_bytes=0)) as world:

        def call(comm):
            comm.all_gather_into_tensor(_on(comm, 16), _on(comm), algorithm="copy_engine")

        for text in _refusals(devices, world, call):
            assert "CommOptions.copy_engine_bytes > 0" in text


@pytest.mark.parametrize("op", ["MIN", "MAX"])
@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_a_dtype_without_a_kernel(devices, world, dtype, op):
    def call(comm):
        comm.all_reduce(_on(comm, dtype=dtype), getattr(torch.distributed.ReduceOp, op))

    for text in _refusals(devices, world, call):
        assert "cannot be reduced on a GPU; convert it" in text


def test_complex_products(devices, world):
    def call(comm):
        tensor = _on(comm, dtype=torch.complex64)
        comm.all_reduce(tensor, torch.distributed.ReduceOp.PRODUCT)

    for text in _refusals(devices, world, call):
        assert "cannot be reduced on a GPU" in text


def test_more_than_staging_can_pipe(devices):
    """Epochs are compared modulo 2^32, so one call may have at most 2^31 items."""
    if not devices.emulated:
        pytest.skip("needs more memory than a GPU has")
    # The memory is never read, and so is never allocated.
    size_bytes = 33 << 30
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON | _MAP_NORESERVE)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    options = with_options(segment_bytes=64, channels=1)
    with devices.new_world(2, options=options) as world:
        for text in _refusals(devices, world, lambda comm: comm.broadcast(tensor, 0)):
            assert f"a chunk of {size_bytes} bytes is more than staging can pipe" in text
            assert "raise CommOptions.segment_bytes" in text


def test_a_world_of_one_takes_every_algorithm(devices):
    def body(comm):
        for algorithm in ("auto", "one_shot", "ring", "ll", "copy_engine"):
            tensor, output = _on(comm, 8) + 3, _on(comm)
            comm.all_gather_into_tensor(output, tensor, algorithm=algorithm)
            assert on_host(output).tolist() == [3.0] * 8
            if algorithm != "copy_engine":
                comm.all_reduce(
                    tensor, ringcomm.premul_sum(2.0), algorithm=spelled(algorithm, "all_reduce")
                )
                assert on_host(tensor).tolist() == [6.0] * 8

    devices.run(devices.world(1), body)


@pytest.mark.parametrize("name", ["all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"])
def test_an_empty_message_takes_every_algorithm(devices, world, name):
    def body(comm):
        for algorithm in ("auto", "one_shot", "ring", "ll"):
            tensors = [_on(comm, 0)] * (1 if name == "all_reduce" else 2)
            getattr(comm, name)(*tensors, algorithm=spelled(algorithm, name))

    devices.run(world, body)


def test_any_source(devices, world):
    with pytest.raises(UnsupportedError, match=r"irecv on rank 1 of 2: src: .*one sender"):
        world[1].irecv(_on(world[1]))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda w, t: w.all_reduce([t(0)]), "expected tensors of 2 ranks, got those of 1"),
        (
            lambda w, t: w.all_reduce([t(0), t(1, 9)]),
            "rank 1 of 2: .* is 8 on rank 0 and 9 on",
        ),
        (
            lambda w, t: w.all_reduce([t(0), t(1, dtype=torch.int32)]),
            "float32. on rank 0 and .*int32",
        ),
        (lambda w, t: w.all_reduce([t(0), t(1).view(4, 2).t()]), "rank 1 of 2: .*contiguous"),
        (lambda w, t: w.all_reduce([t(0), t(1)], algorithm="copy_engine"), "copy_engine"),
        (lambda w, t: w.all_gather_into_tensor([t(0)] * 2, [t(1)] * 2), "world_size x"),
    ],
)
def test_lists_of_all_ranks_that_do_not_fit(devices, world, call, words):
    def tensor(rank, count=8, dtype=torch.float32):
        return _on(world[rank], count, dtype)

    with devices.as_on_gpu(world[0]), pytest.raises(ArgumentError, match=words):
        call(world, tensor)


def test_names_of_devices(devices):
    assert [device_of(comm) for comm in devices.world(2)] == [0, 0]
    for name in ("cuda:7", "xpu:0", "gpu", 99, -1):
        with pytest.raises(ArgumentError, match=str(name)):
            ringcomm.local_world(1, device=name)
