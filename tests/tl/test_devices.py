# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels on emulated devices, and with ``-m gpu`` on a real device.

Processes share a device, each with several channels.
"""

from importlib.util import find_spec

import pytest
import torch

from ringcomm import Communicator, UnsupportedError
from ringcomm.algorithms import spelled
from ringcomm.optim import AdamW, AdamWOptions
from tests.support import ranks
from tests.support.covering import EVERY_CASE
from tests.support.device_worlds import OPTIONS, Devices, on_host, put, with_options
from tests.support.exact import op_of, operand, pattern, reduced, same
from tests.tl.interpreter import Ranks, run_ranks

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def kind(request):
    """The kind of device; on emulated devices the kernels run in Triton's interpreter."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return request.param


def _on_one_device(store, rank, world, kind, check, segment_bytes):
    how = {"devices": 1, "physical": (0,)} if kind == "emulated" else {}
    devices = Devices(kind, **how)
    # Two segments per channel, and more than one turn around the slots.
    options = with_options(segment_bytes=segment_bytes, slots=2)
    with (
        Communicator.from_store(
            store, rank, world, device="cuda:0", options=options, heap_bytes=64 << 20
        ) as comm,
        devices.as_on_gpu(comm),
    ):
        return check(comm, kind)


def _run_on_one_device(kind, check, segment_bytes):
    of = Ranks if kind == "emulated" else ranks.Ranks
    return ranks.run_ranks(_on_one_device, 2, kind, check, segment_bytes, timeout_s=120, kind=of)


# ---- collectives --------------------------------------------------------------------------------

BOTH = ("one_shot", "ring")
# Count, dtype, memory, operator and algorithms. 300 elements use every slot several times. The
# interpreter is slow, and the tests on the host run more sizes.
FORMS = (
    (300, torch.bfloat16, "plain", "AVG", BOTH),
    (1, torch.float32, "heap", "SUM", BOTH),
    (1501, torch.float16, "unaligned", "SUM", BOTH),
)
SOME_FORMS = ((*FORMS[0][:4], ("one_shot",)), (*FORMS[1][:4], ("ring",)))


def _check(comm, count, dtype, memory, algorithm, op):
    rank, world = comm.rank, comm.world_size
    case = (count, dtype, memory, algorithm, op)
    inputs = [operand(count, each, world, dtype, op) for each in range(world)]
    tensor = put(comm, inputs[rank], memory)
    comm.all_reduce(tensor, op_of(op), algorithm=spelled(algorithm, "all_reduce"), kernels="triton")
    assert torch.equal(on_host(tensor), reduced(inputs, op)), case
    parts = [pattern(count, each, dtype) for each in range(world)]
    gathered = put(comm, torch.zeros(count * world, dtype=dtype), memory)
    mine = put(comm, parts[rank], memory, 1)
    work = comm.all_gather_into_tensor(
        gathered, mine, algorithm=algorithm, kernels="triton", async_op=True
    )
    assert work.wait()
    assert same(on_host(gathered), torch.cat(parts)), case
    output = put(comm, torch.zeros(count, dtype=dtype), memory)
    wholes = [operand(count * world, each, world, dtype, op) for each in range(world)]
    given = put(comm, wholes[rank], memory, 1)
    comm.reduce_scatter_tensor(output, given, op_of(op), algorithm=algorithm, kernels="triton")
    assert torch.equal(on_host(output), reduced(wholes, op).chunk(world)[rank]), case


def _collectives(comm, kind):
    forms = SOME_FORMS if kind == "emulated" and not EVERY_CASE else FORMS
    for count, dtype, memory, op, algorithms in forms:
        for algorithm in algorithms:
            _check(comm, count, dtype, memory, algorithm, op)
    # The native kernels continue with the same epochs.
    tensor = put(comm, torch.full((900,), float(comm.rank)), "heap")
    comm.all_reduce(tensor)
    assert on_host(tensor).eq(1).all()
    _check_records(comm, 3 * sum(len(algorithms) for *_, algorithms in forms))


def _check_records(comm, calls_of_triton):
    """Checks that Triton's calls and a native call after them are numbered consecutively."""
    core = comm.engine.device_core
    comm.engine.finish_host_side()
    ptr = core._ptr + core.native.sequence_offset_bytes
    assert int.from_bytes(core.runtime.read(core.device, ptr, 8), "little") == calls_of_triton + 1
    calls = comm.recording().ranks[comm.rank].collectives
    assert [each.number for each in calls] == list(range(1, calls_of_triton + 2))
    assert [each.kernels for each in calls] == ["triton"] * calls_of_triton + ["native"]
    assert {each.state for each in calls} == {"completed"}
    assert all(__file__ in each.site for each in calls)


def test_processes_that_share_a_device(kind):
    _run_on_one_device(kind, _collectives, 512)


def _threads_are_refused(store, rank, world):
    devices = Devices("emulated")
    refused = []
    from ringcomm import tl as rc

    def body(comm):
        with pytest.raises(UnsupportedError, match="threads of one process"):
            rc.Context(comm)
        tensor = put(comm, torch.ones(3), "heap")
        with pytest.raises(UnsupportedError, match="threads of one process"):
            comm.all_reduce(tensor, kernels="triton")
        refused.append(comm.rank)

    devices.run(devices.world(2, options=OPTIONS), body)
    devices.close()
    return sorted(refused)


def test_the_interpreter_refuses_ranks_of_one_process():
    assert run_ranks(_threads_are_refused, 1) == [[0, 1]]


# ---- the optimizer ------------------------------------------------------------------------------

SHAPES = ((1300,), (3, 5))
# Amsgrad, dtype, algorithm, and whether the norm is clipped.
STEPS = ((True, torch.float32, "one_shot", False), (False, torch.bfloat16, "ring", True))


def _train(comm, amsgrad, dtype, options, clip):
    """Returns the parameters and norms after two steps."""
    torch.manual_seed(0)
    params = [
        torch.randn(shape).to(dtype).to(comm.device).detach().requires_grad_() for shape in SHAPES
    ]
    optimizer = AdamW(params, lr=0.1, amsgrad=amsgrad, comm=comm, options=options)
    torch.manual_seed(1 + comm.rank)
    found = []
    for _ in range(2):
        for param, shape in zip(params, SHAPES, strict=True):
            param.grad = torch.randn(shape).to(dtype).to(comm.device)
        if clip:
            found.append(on_host(optimizer.clip_grad_norm_(0.5)))
        optimizer.step()
    return [*found, *(on_host(param.detach()) for param in params)]


def _steps(comm, kind):
    for amsgrad, dtype, algorithm, clip in STEPS:
        native, triton = (
            _train(comm, amsgrad, dtype, AdamWOptions(algorithm=algorithm, kernels=kernels), clip)
            for kernels in ("native", "triton")
        )
        assert all(map(torch.equal, native, triton)), (dtype, algorithm)


def test_an_optimizer_steps_alike_on_both(kind):
    _run_on_one_device(kind, _steps, 4096)
