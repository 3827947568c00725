# SPDX-License-Identifier: Apache-2.0
"""Triton's kernels as the PTX that Triton emits for sm_90, executed on emulated devices.

Ranks are threads with a device each, whose kernels run side by side, or two ranks share a launch.
All results are compared with the exact result, or with the bits of the native kernels on the host.
A kernel takes seconds to compile, so ``make test`` runs a few; RINGCOMM_PTX_CHECK=all runs the
others.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

import ringcomm
from ringcomm import Communicator, RingcommError, _native
from ringcomm._tl.fused_compute import all_gather_matmul_kernel
from ringcomm._tl.geometry import Geometry
from ringcomm._tl.hooks import IS_INTERPRETED
from ringcomm.comm.device.launch import DeviceCallEngine
from ringcomm.comm.host.arguments import DTYPE_CODES, DTYPE_NAMES
from tests import ptx_interpreter as ptx
from tests.proof.compile.compiled import compile_kernel
from tests.proof.ptx.small_jobs import subunit_of
from tests.proof.ptx.triton_jobs import allow_all, open_context
from tests.ptx_interpreter import PtxSchedule
from tests.support.call_checks import (
    Case,
    check_all_gather,
    check_all_reduce,
    check_reduce_scatter,
)
from tests.support.device_worlds import Devices, on_host, put, with_options
from tests.support.emulator.ptx import PtxKernels
from tests.support.triton_device import PtxLauncher, executed
from tests.tl import device_kernels as kernels
from tests.tl.shards import Case as ShardCase
from tests.tl.shards import Memory, Steps, differences, wide_range
from tests.tl.test_device_library import _gather as check_gather
from tests.tl.test_device_library import _relay as check_relay
from tests.tl.test_device_library import _rounds as check_rounds
from tests.tl.test_device_library import _shift as check_shift
from tests.tl.test_fused import _norm as check_norm

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(IS_INTERPRETED, reason="TRITON_INTERPRET is set: nothing compiles"),
]

ALL = os.environ.get("RINGCOMM_PTX_CHECK") == "all"
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# Two slots of half a KiB, so the calls go around the slots several times.
OPTIONS = with_options(kernels="triton", segment_bytes=512, slots=2, timeout=90.0)
# None, one element, partial vectors of every kind of access, and more than the slots hold.
COUNTS = (0, 1, 7, 300, 2051)
MEMORIES = ("heap", "plain", "unaligned", "mixed", "heap")


@pytest.fixture(scope="module")
def gpu() -> Iterator[PtxLauncher]:
    launcher = PtxLauncher(PtxSchedule(seed=2))
    with executed(launcher):
        yield launcher


@pytest.fixture(scope="module")
def devices(gpu: PtxLauncher) -> Iterator[Devices]:
    made = Devices("emulated", devices=3, ptx=PtxKernels(subunit=subunit_of))
    yield made
    made.close()


CHECKS = {
    "all_reduce": check_all_reduce,
    "reduce_scatter": check_reduce_scatter,
    "all_gather": check_all_gather,
}
# Ranks, collective, algorithm, dtype, operator; each case compiles a kernel. test_triton_mutants.py
# executes the two-shot all-reduce of two ranks in make test.
SOME = ((4, "all_reduce", "ring", BF16, "AVG"),)
MORE = (
    (2, "all_reduce", "one_shot", F32, "SUM"),
    (2, "all_reduce", "ring", BF16, "AVG"),
    (4, "all_gather", "one_shot", torch.int32, "SUM"),
    (2, "reduce_scatter", "one_shot", F32, "SUM"),
    (2, "all_gather", "ring", torch.int16, "SUM"),
    (4, "reduce_scatter", "ring", F16, "AVG"),
    (2, "all_reduce", "one_shot", F16, "AVG"),
    (2, "all_reduce", "ring", F32, "SUM"),
    (2, "reduce_scatter", "ring", F32, "SUM"),
    (2, "all_gather", "one_shot", torch.int8, "SUM"),
    (2, "all_gather", "one_shot", torch.complex128, "SUM"),
    (3, "all_reduce", "one_shot", BF16, "SUM"),
    (3, "all_reduce", "ring", F32, "AVG"),
    (4, "all_reduce", "one_shot", F32, "AVG"),
    (4, "all_reduce", "ring", F16, "SUM"),
    (4, "reduce_scatter", "one_shot", BF16, "SUM"),
    (4, "all_gather", "ring", torch.int64, "SUM"),
)


@pytest.mark.parametrize(
    ("ranks", "name", "algorithm", "dtype", "op"), (*SOME, *MORE) if ALL else SOME
)
def test_collectives_are_exact(devices, ranks, name, algorithm, dtype, op):
    """With four ranks two share each launch; with fewer ranks each has a kernel of its own."""
    world = devices.world(ranks, range(2 if ranks == 4 else ranks), OPTIONS)

    def body(comm: Communicator) -> None:
        for count, memory in zip(COUNTS, MEMORIES, strict=True):
            CHECKS[name](comm, Case(count, dtype, op, memory, algorithm))
        if algorithm == "one_shot":  # zero copy needs a slice of 16 KiB
            CHECKS[name](comm, Case(36_000 // dtype.itemsize, dtype, op, "heap", algorithm))

    devices.run(world, body)


class _AllFast:
    """The compiled calls, each of which must take the fast path."""

    def __init__(self, calls: Any) -> None:
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: object) -> int:
            assert getattr(self._calls, name)(*arguments) == 0, name
            return 0

        return call


def _launches(devices, world, gpu: PtxLauncher, calls: Any, way: str) -> list[bytes]:
    """Returns the launch parameters of all ranks' calls, made by Triton, from Python or fast."""
    begin = len(gpu.parameters), len(gpu.launched)

    def body(comm: Communicator) -> None:
        compiled = comm.engine.compiled
        if way != "triton":
            comm.engine.compiled = _AllFast(compiled) if way == "fast" else None
        with devices.emulated.on_device(comm.rank):  # otherwise the driver refuses a fast call
            calls(comm)
        comm.engine.compiled = compiled
        comm.engine.finish_host_side()

    with triton.knobs.runtime.scope():
        if way == "triton":
            triton.knobs.runtime.launch_enter_hook = lambda *_: None
        # No call is fast where torch's operations follow the order of streams.
        world.run(body) if way == "fast" else devices.run(world, body)
    made = gpu.parameters[begin[0] :]
    assert len(gpu.launched) - begin[1] == (len(made) if way == "triton" else 0)
    return sorted(made)


def test_what_is_launched_without_triton_gets_what_triton_passes(devices, gpu):
    world = devices.world(2, range(2), OPTIONS)
    tensors: dict[int, tuple[torch.Tensor, ...]] = {}

    def calls(comm: Communicator) -> None:
        if comm.rank not in tensors:
            sizes = 5, 606, 303
            tensors[comm.rank] = tuple(put(comm, torch.ones(n), "heap") for n in sizes)
        few, whole, part = tensors[comm.rank]
        comm.all_reduce(few, algorithm="two_shot")
        comm.all_reduce(whole, algorithm="two_shot")
        comm.reduce_scatter_tensor(part, whole)
        comm.all_gather_into_tensor(whole, part)

    devices.run(world, calls)  # compiles
    by_triton = _launches(devices, world, gpu, calls, "triton")
    assert len(by_triton) == 2 * 4
    for way in ("checked", "fast"):
        assert _launches(devices, world, gpu, calls, way) == by_triton


def test_a_graph_replays_kernels(devices):
    """Each rank has a graph, which advances the same epochs as eager calls."""
    world = devices.world(2, range(2), OPTIONS)
    runtime = devices.emulated

    def body(comm: Communicator) -> None:
        device = comm.rank
        tensor = put(comm, torch.zeros(700), "heap")
        comm.all_reduce(tensor, algorithm="two_shot")  # compiled before the capture
        with runtime.capture(device) as graph:
            comm.all_reduce(tensor, algorithm="two_shot")
        for turn in range(4):
            given = [torch.arange(700.0) * (turn + 1 + rank) for rank in range(2)]
            tensor.copy_(given[comm.rank])
            if turn == 2:
                comm.all_reduce(tensor, algorithm="two_shot")
            else:
                runtime.replay(graph, device)
            assert torch.equal(on_host(tensor), torch.stack(given).sum(0)), turn

    devices.run(world, body)


def test_calls_of_both_kinds_of_kernels_alternate(devices):
    """Each kind of kernel continues with the epochs of the other."""
    world = devices.world(2, range(2), OPTIONS)

    def body(comm: Communicator) -> None:
        for turn in range(4):
            given = [torch.arange(1500.0) * (turn + 3 * rank) for rank in range(2)]
            tensor = put(comm, given[comm.rank], ("heap", "plain")[turn // 2])
            comm.all_reduce(tensor, algorithm="two_shot", kernels=("native", "triton")[turn % 2])
            assert torch.equal(on_host(tensor), torch.stack(given).sum(0)), turn

    devices.run(world, body)


# ---- faults -------------------------------------------------------------------------------------

WAIT_S = 0.5


def _faults(devices: Devices, kernels: str, end: str) -> dict[int, Any]:
    """Returns each rank's record of rank 1 not coming, or making another call."""
    options = replace(OPTIONS, kernels=kernels, timeout=WAIT_S if end == "timeout" else 60.0)
    records = {}
    with devices.new_world(2, range(2), options) as world:
        over = threading.Barrier(2)

        def body(comm: Communicator) -> None:
            try:
                if comm.rank == 0 or end == "mismatch":
                    elems = 300 + comm.rank
                    tensor = put(comm, torch.ones(elems * 2), "plain")
                    with pytest.raises(RingcommError):
                        comm.all_reduce(tensor, algorithm="two_shot")
                        comm.engine.finish_host_side()
            finally:
                over.wait()
            records[comm.rank] = cast(DeviceCallEngine, comm.engine).device_core.native.fault()

        devices.run(world, body)
    return records


def _without_times(record: dict[str, Any] | None) -> dict[str, Any] | None:
    """Removes also the code of the kernels that made the call."""
    if record is None:
        return None
    kept = {name: value for name, value in record.items() if name != "waited_ms"}
    for name in ("my_call", "their_call"):
        *others, _kernels, match_bytes = kept[name]
        kept[name] = (*others, match_bytes)
    for name in ("mine", "theirs"):
        kept[name] = kept[name].replace(", Triton kernels", "")
    return kept


def test_a_peer_that_does_not_come_leaves_the_record_of_the_native_kernels(devices):
    triton, native = (_faults(devices, kernels, "timeout") for kernels in ("triton", "native"))
    assert triton[0]["kind"] == "timeout" and triton[0]["peer"] == 1
    assert triton[0]["waited_ms"] >= WAIT_S * 1000
    assert _without_times(triton[0]) == _without_times(native[0])
    assert triton[1] is native[1] is None


def test_other_calls_are_told_apart(devices):
    found = _faults(devices, "triton", "mismatch")
    named = [record for record in found.values() if record["kind"] == "mismatch"]
    assert named and all(record["kind"] in ("mismatch", "aborted") for record in found.values())
    for record in named:
        calls = record["mine"], record["theirs"]
        for rank, call in zip((record["rank"], record["peer"]), calls, strict=True):
            assert f"{2400 + 8 * rank} bytes" in call and "Triton kernels" in call


# ---- the optimizer ------------------------------------------------------------------------------

# Elements of shards and buckets: none, one, partial turns, and whole turns.
SIZES = (0, 1, 600, 5003) if ALL else (1, 5003)
# Gradients, parameters, kind of master copy, amsgrad, stochastic rounding: covers every path.
KINDS = (
    (BF16, BF16, "remainder", True, False),
    (F16, F16, "fp32", False, True),
    (F32, F32, "own", True, False),
    (BF16, F32, "own", False, False),
    (F32, BF16, "fp32", True, False),
    (F16, F16, "none", False, True),
)
NORMS = ((F32, "l2"), (BF16, "l1"), (F16, "inf"))


@pytest.mark.parametrize("kind", KINDS if ALL else KINDS[:2])
def test_a_shard_is_updated_to_the_bits_of_the_native_kernel(gpu, kind):
    from ringcomm._tl.adamw_launch import launch_adamw_shard

    changed = 0
    for elems in SIZES:
        case = ShardCase(elems, *kind)
        ours, native = (Memory(case, 0, 1, hostile=elems > 700) for _ in range(2))
        allow_all(ours)
        before, grad = ours.params.clone(), ours.grads_ptr
        _native.adamw_shard(native.shard, grad, DTYPE_CODES[case.grad])
        launch_adamw_shard(ours.descriptor.data_ptr(), grad, elems, ours.kind("SUM", 1))
        assert ptx.failure() is None
        assert differences(ours, native) == [], elems
        changed += not torch.equal(ours.params, before)
    assert changed >= len(SIZES) // 2


@pytest.mark.parametrize(("dtype", "kind"), NORMS if ALL else NORMS[:1])
def test_norms_have_the_words_of_the_native_kernel(gpu, dtype, kind):
    from ringcomm._tl.adamw_launch import launch_grad_norm

    torch.manual_seed(0)
    code = _native.GRAD_NORM_KINDS[kind]
    for elems in (0, 1, 600, 9 * 512 + 3):
        given = wide_range(elems, 19).to(dtype)
        given[elems // 2 : elems // 2 + 9] = 2.0**-24 if dtype is F16 else 1e-40
        for poison in (None, math.inf, math.nan):
            if poison is not None:
                given[elems // 3 : elems // 3 + 1] = poison
            both = torch.zeros(2, _native.GRAD_NORM_WORDS, dtype=torch.int64)
            native, ours = both
            ptx.allow(given)
            ptx.allow(both)
            at = given.data_ptr()
            _native.grad_norm(at, DTYPE_CODES[dtype], elems, code, native.data_ptr())
            launch_grad_norm(at, DTYPE_NAMES[dtype], elems, code, ours.data_ptr())
            assert ptx.failure() is None
            assert torch.equal(native, ours), (elems, poison)


# Ranks, kind, operator, norm, algorithm. test_triton_mutants.py also runs the case of make test.
STEPS = ((2, KINDS[2], "AVG", "l2", "one_shot"),)
MORE_STEPS = (
    (2, KINDS[0], "AVG", "l2", "one_shot"),
    (2, KINDS[1], "SUM", "l1", "ring"),
    (2, KINDS[5], "SUM", "inf", "one_shot"),
    (4, KINDS[3], "AVG", "l2", "ring"),
    (4, KINDS[4], "SUM", "l1", "one_shot"),
)


def _step(comm: Communicator, algorithm: str, form: str, norm: str, kernels: str, of: list[Memory]):
    steps, mine = Steps(comm, algorithm), of[comm.rank]
    if form == "one pass":
        steps.one_pass(mine, kernels)
    else:
        steps.norm(mine, kernels, norm, True)
        steps.update(mine, kernels)
    comm.engine.finish_host_side()


@pytest.mark.parametrize(
    ("ranks", "kind", "op", "norm", "algorithm"), (*STEPS, *MORE_STEPS) if ALL else STEPS
)
def test_a_step_has_the_bits_of_the_native_kernels(devices, ranks, kind, op, norm, algorithm):
    options = replace(OPTIONS, segment_bytes=4096)
    world = devices.world(ranks, range(2), options)
    host = ringcomm.local_world(ranks, options=replace(options, kernels="native"))
    for elems in SIZES:
        case = replace(ShardCase(elems, *kind), op=op)
        for form in ("one pass", "two passes"):
            names = [f"cuda:{rank * 2 // ranks}" for rank in range(ranks)]
            ours = [Memory(case, r, ranks, device=device) for r, device in enumerate(names)]
            native = [Memory(case, rank, ranks) for rank in range(ranks)]
            for memory in ours:
                allow_all(memory)
            devices.run(world, _step, algorithm, form, norm, "triton", ours)
            host.run(_step, algorithm, form, norm, "native", native)
            found = [differences(*pair) for pair in zip(ours, native, strict=True)]
            assert found == [[]] * ranks, (elems, form)
    host.close()


# ---- kernels of users ---------------------------------------------------------------------------


def test_kernels_made_of_the_library(devices, monkeypatch):
    # Triton must take the device for a GPU, since it executes compiled code.
    monkeypatch.setattr(devices.runtime, "kind", "cuda")
    world = devices.new_world(2, range(2), replace(OPTIONS, kernels="native"))

    def body(comm: Communicator) -> None:
        with open_context(comm, 4) as context:
            check_norm(context, 5, 33, BF16, adds=True, summed="new")
            check_relay(context, kernels)
            assert check_rounds(context, kernels)
            if ALL:
                check_shift(context, kernels, BF16)
                check_gather(context, kernels, 3)
                check_norm(context, 4, 96, F32)
            context.check()

    devices.run(world, body)
    world.close()


@pytest.mark.skipif(not ALL, reason="compiles for seconds: RINGCOMM_PTX_CHECK=all")
def test_tensor_cores_are_refused_by_name():
    types = dict.fromkeys(all_gather_matmul_kernel.arg_names, "i64")
    constants = {
        "DTYPE": tl.bfloat16,
        "COMM": 2,
        "CHUNKS": 8,
        "G": Geometry(2, 2, 4, 1024, 1 << 16),
    }
    constants |= {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32}
    types |= dict.fromkeys("mnk", "i32")
    made = compile_kernel(
        all_gather_matmul_kernel,
        {name: kind for name, kind in types.items() if name not in constants},
        90,
        **constants,
    )
    with pytest.raises(ptx.RefusedError, match=r"the instruction .* is not known"):
        ptx.load(made.ptx)
