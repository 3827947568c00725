"""The optimizer's Triton kernels on devices, emulated here and real with ``-m gpu``: several
channels and processes, against the native kernels of the device."""

from functools import partial
from importlib.util import find_spec

import pytest
import torch

from ringcomm import Communicator
from ringcomm.optim import SGD, AdamW, AdamW8bit, AdamWOptions, Lion
from tests.support.device_worlds import Devices, on_host, with_options
from tests.support.ranks import run_ranks
from tests.tl.interpreter import interpreted

# Not imported: the ranks, which import this file, must set TRITON_INTERPRET first.
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")

LIMIT_S = 120.0
SHAPES = ((1300,), (3, 5), (40, 41))


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def kind(request):
    """The devices that the kernels run on; emulated ones run them in Triton's interpreter."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return request.param


ADAMW = partial(AdamW, amsgrad=True)
NESTEROV = partial(SGD, momentum=0.9, nesterov=True, weight_decay=0.1)
# Optimizer, dtype, algorithm, and whether the norm is clipped.
CASES = (
    (ADAMW, torch.float32, "direct", False),
    (NESTEROV, torch.bfloat16, "ring", False),
    (Lion, torch.bfloat16, "direct", True),
    (ADAMW, torch.float32, "ring", True),
    (AdamW8bit, torch.bfloat16, "direct", True),
)


def _train(comm, make, dtype, options, clip):
    """Parameters and norms after two steps."""
    torch.manual_seed(0)
    params = [
        torch.randn(shape).to(dtype).to(comm.device).detach().requires_grad_() for shape in SHAPES
    ]
    optimizer = make(params, lr=0.1, comm=comm, options=options)
    torch.manual_seed(1 + comm.rank)
    found = []
    for _ in range(2):
        for param, shape in zip(params, SHAPES, strict=True):
            param.grad = torch.randn(shape).to(dtype).to(comm.device)
        if clip:
            found.append(on_host(optimizer.clip_grad_norm_(0.5)))
        optimizer.step()
    return [*found, *(on_host(param.detach()) for param in params)]


def _rank(store, rank, world, kind):
    if kind == "emulated":
        with interpreted():
            from ringcomm._tl import adamw_launch  # noqa: F401
        devices = Devices(kind, devices=1, physical=(0,))
    else:
        devices = Devices(kind)
    options = with_options(segment_bytes=4096, slots=2)
    wrong = []
    with (
        Communicator.from_store(
            store, rank, world, device="cuda:0", options=options, heap_bytes=64 << 20
        ) as comm,
        devices.as_on_gpu(comm),
    ):
        for make, dtype, algorithm, clip in CASES:
            ends = [
                _train(comm, make, dtype, AdamWOptions(algorithm=algorithm, kernels=kernels), clip)
                for kernels in ("native", "triton")
            ]
            if not all(map(torch.equal, *ends)):
                wrong.append((str(make), dtype, algorithm))
    return wrong


@pytest.mark.timeout(LIMIT_S + 10)
def test_an_optimizer_steps_alike_on_both(kind):
    assert run_ranks(_rank, 2, kind, timeout_s=LIMIT_S) == [[]] * 2
