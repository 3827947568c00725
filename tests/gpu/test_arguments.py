"""Calls that a communicator on a GPU refuses: nothing hangs, and it stays usable."""

import pytest
import torch

import ringcomm
from ringcomm import ArgumentError, cuda
from tests.gpu.device import DEVICE, PLAIN, REAL, on_host
from tests.gpu.worlds import TIMEOUT_S, one_launch_world


@pytest.fixture
def comm(gpu_worlds):
    communicator = gpu_worlds(2)[0]
    yield communicator
    assert not communicator.aborted


def test_the_device_is_the_gpu(comm):
    assert comm.device == torch.device(PLAIN)


def on_gpu(count=8, dtype=torch.float32):
    return ringcomm.zeros(count, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.all_reduce(torch.zeros(8)),
        lambda c: c.all_reduce(ringcomm.zeros(8)),
        lambda c: c.all_gather_into_tensor(on_gpu(16), torch.zeros(8)),
        lambda c: c.all_gather_into_tensor(torch.zeros(16), on_gpu(8)),
        lambda c: c.reduce_scatter_tensor(torch.zeros(4), on_gpu(8)),
        lambda c: c.broadcast(torch.zeros(8), 0),
        lambda c: c.all_to_all_single(on_gpu(8), torch.zeros(8)),
        lambda c: c.send(torch.zeros(8), 1),
        lambda c: c.irecv(torch.zeros(8), 1),
    ],
)
def test_cpu_tensors_are_refused(comm, call):
    found = rf"rank 0 of 2.*expected a tensor on device 0 \({PLAIN}\), got one on cpu"
    with on_host(), pytest.raises(ArgumentError, match=found):
        call(comm)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_tensors_of_another_device_are_refused(comm):
    with pytest.raises(ArgumentError, match=r"cuda:0.*cuda:1"):
        comm.all_reduce(torch.zeros(8, device="cuda:1"))


def test_a_communicator_of_the_host_refuses_tensors_of_a_device():
    # Tensors of an emulated device look like the host's.
    elsewhere = DEVICE if REAL else "meta"
    found = f"expected a CPU tensor, got one on {elsewhere}" if REAL else "got a meta tensor"
    with (
        ringcomm.local_world(2, timeout=TIMEOUT_S) as world,
        pytest.raises(ArgumentError if REAL else ringcomm.UnsupportedError, match=found),
    ):
        world[0].all_reduce(torch.zeros(8, device=elsewhere))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda w: w.all_reduce([on_gpu()]), "of 2 ranks, got those of 1"),
        (lambda w: w.all_reduce([on_gpu(8), on_gpu(9)]), "got 8 elements.* and 9"),
        (lambda w: w.all_reduce([on_gpu(), torch.zeros(8)]), "got one on cpu"),
        (lambda w: w.all_reduce([on_gpu(), on_gpu(8, torch.int32)]), "int32"),
        (
            lambda w: w.reduce_scatter_tensor([on_gpu(3)] * 2, [on_gpu(8)] * 2),
            "expected 6 elements",
        ),
        (lambda w: w.all_reduce([on_gpu()] * 2, algorithm="star"), "star"),
    ],
)
def test_lists_that_do_not_fit_are_refused(gpu_worlds, call, words):
    world = gpu_worlds(2)
    with on_host(), pytest.raises(ringcomm.RingcommError, match=words):
        call(world)
    assert not any(each.aborted for each in world)


def test_no_such_device():
    for device in (f"cuda:{cuda.current().device_count()}", "xpu:0", "gpu"):
        with pytest.raises(ringcomm.RingcommError, match=device):
            one_launch_world(1, on=device)


def test_more_ranks_than_a_launch_carries():
    with pytest.raises(ringcomm.RingcommError, match="8"):
        one_launch_world(9)
