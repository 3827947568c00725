"""Triton's kernels as the PTX that Triton emits for sm_90, executed on emulated devices.

Ranks are threads with a device each, whose kernels run side by side, or two ranks in one launch.
Everything is compared with the exact result, or with the bits of the native kernels on the host.
A kernel takes seconds to compile, so ``make test`` has a few of all; RINGCOMM_PTX_CHECK=all has
the others.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

import ringcomm
from ringcomm import CollectiveTimeout, Communicator, _native
from ringcomm._tl.hooks import IS_INTERPRETED
from ringcomm.comm.arguments import DTYPE_CODES, DTYPE_NAMES
from tests.proof.ptx.small_jobs import part_of
from tests.support.device_checks import (
    Case,
    check_all_gather,
    check_all_reduce,
    check_reduce_scatter,
)
from tests.support.device_worlds import Devices, on_host, put, with_options
from tests.support.emulator import ptx
from tests.support.emulator.library import PtxSchedule
from tests.support.emulator.ptx import PtxKernels
from tests.support.triton_device import PtxLauncher, executed
from tests.tl.shards import Case as ShardCase
from tests.tl.shards import Memory, Steps, differences, wide_range

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(IS_INTERPRETED, reason="TRITON_INTERPRET is set: nothing compiles"),
]

ALL = os.environ.get("RINGCOMM_PTX_CHECK") == "all"
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# Two slots of half a KiB: what follows goes several times around them.
OPTIONS = with_options(kernels="triton", segment_bytes=512, slots=2, timeout=90.0)
# One element, tails of every kind of access, and more than the slots hold.
COUNTS = (0, 1, 7, 300, 2051)
PLACES = ("heap", "plain", "unaligned", "mixed", "heap")


@pytest.fixture(scope="module")
def gpu() -> Iterator[PtxLauncher]:
    with ExitStack() as stack:
        launcher = PtxLauncher(PtxSchedule(seed=2))
        stack.enter_context(executed(launcher))
        yield launcher


@pytest.fixture(scope="module")
def devices(gpu: PtxLauncher) -> Iterator[Devices]:
    made = Devices("emulated", ptx=PtxKernels(part=part_of))
    yield made
    made.close()


def check_of(name: str):
    return {
        "all_reduce": check_all_reduce,
        "reduce_scatter": check_reduce_scatter,
        "all_gather": check_all_gather,
    }[name]


# Ranks, collective, algorithm, dtype, operator; of each a compilation.
SOME = (
    (2, "all_reduce", "direct", F32, "SUM"),
    (2, "all_reduce", "ring", BF16, "AVG"),
    (2, "reduce_scatter", "direct", F16, "AVG"),
    (2, "all_gather", "ring", torch.int16, "SUM"),
    (4, "reduce_scatter", "ring", F32, "SUM"),
    (4, "all_gather", "direct", torch.int32, "SUM"),
)
MORE = (
    (2, "all_reduce", "direct", F16, "AVG"),
    (2, "all_reduce", "ring", F32, "SUM"),
    (2, "reduce_scatter", "ring", F16, "SUM"),
    (2, "all_gather", "direct", torch.int8, "SUM"),
    (2, "all_gather", "direct", torch.complex128, "SUM"),
    (3, "all_reduce", "direct", BF16, "SUM"),
    (3, "all_reduce", "ring", F32, "AVG"),
    (4, "all_reduce", "direct", F32, "AVG"),
    (4, "all_reduce", "ring", F16, "SUM"),
    (4, "reduce_scatter", "direct", BF16, "SUM"),
    (4, "all_gather", "ring", torch.int64, "SUM"),
)


@pytest.mark.parametrize(
    ("ranks", "name", "algorithm", "dtype", "op"), (*SOME, *MORE) if ALL else SOME
)
def test_collectives_are_exact(devices, ranks, name, algorithm, dtype, op):
    """With four ranks, two of each launch; with fewer, a kernel each."""
    world = devices.world(ranks, range(min(ranks, 2)) if ranks != 3 else range(3), OPTIONS)

    def body(comm: Communicator) -> None:
        for count, place in zip(COUNTS, PLACES, strict=True):
            check_of(name)(comm, Case(count, dtype, op, place, algorithm))
        # Zero copy begins at 16 KiB of a slice.
        if name != "all_gather" or ALL:
            check_of(name)(comm, Case(36_000 // dtype.itemsize, dtype, op, "heap", algorithm))

    devices.run(world, body)


# ---- the optimizer ------------------------------------------------------------------------------

# Gradients, parameters, where the master copy lies, amsgrad, stochastic rounding: every path.
KINDS = (
    (BF16, BF16, "remainder", True, False),
    (F16, F16, "fp32", False, True),
    (F32, F32, "own", True, False),
    (BF16, F32, "own", False, False),
    (F32, BF16, "fp32", True, False),
    (F16, F16, "none", False, True),
)
# What the tests above and below do not run a device for.
NORMS = ((F32, "l2"), (BF16, "l1"), (F16, "inf"))


def _allow(memory: Memory) -> None:
    for tensor in (*memory.tensors.values(), *vars(memory).values()):
        if isinstance(tensor, torch.Tensor):
            ptx.allow(tensor)


@pytest.mark.parametrize("kind", KINDS if ALL else KINDS[:2])
def test_a_shard_is_updated_to_the_bits_of_the_native_kernel(gpu, kind):
    from ringcomm._tl.adamw_launch import launch_adamw_shard

    changed = 0
    for elems in (0, 1, 600, 5003):
        case = ShardCase(elems, *kind)
        ours, native = (Memory(case, 0, 1, hostile=elems > 700) for _ in range(2))
        _allow(ours)
        before, grad = ours.params.clone(), ours.grads_ptr
        _native.adamw_shard(native.shard, grad, DTYPE_CODES[case.grad])
        launch_adamw_shard(ours.record.data_ptr(), grad, elems, ours.kind("SUM", 1))
        assert ptx.failure() is None
        assert differences(ours, native) == [], elems
        changed += not torch.equal(ours.params, before)
    assert changed >= 2


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


# Ranks, kind, operator, norm, algorithm.
STEPS = ((2, KINDS[0], "AVG", "l2", "direct"),)
MORE_STEPS = (
    (2, KINDS[1], "SUM", "l1", "ring"),
    (2, KINDS[5], "SUM", "inf", "direct"),
    (4, KINDS[2], "AVG", "l2", "ring"),
    (4, KINDS[4], "SUM", "l1", "direct"),
)


def _step(comm: Communicator, steps: Steps, form: str, memory: Memory, norm: str, kernels: str):
    if form == "one pass":
        steps.one_pass(memory, kernels)
    else:
        steps.norm(memory, kernels, norm, True)
        steps.update(memory, kernels)
    comm.finish_host_side()


@pytest.mark.parametrize(
    ("ranks", "kind", "op", "norm", "algorithm"), (*STEPS, *MORE_STEPS) if ALL else STEPS
)
def test_a_step_has_the_bits_of_the_native_kernels(devices, ranks, kind, op, norm, algorithm):
    options = replace(OPTIONS, segment_bytes=4096)
    world = devices.world(ranks, range(2), options)
    host = ringcomm.local_world(ranks, options=replace(options, kernels="native"))
    for elems in (0, 1, 600, 5003):
        case = ShardCase(elems, *kind, op=op)
        for form in ("one pass", "two passes"):
            places = [f"cuda:{rank * 2 // ranks}" for rank in range(ranks)]
            ours = [Memory(case, r, ranks, device=place) for r, place in enumerate(places)]
            native = [Memory(case, rank, ranks) for rank in range(ranks)]
            for memory in ours:
                _allow(memory)
            devices.run(
                world,
                lambda comm: _step(
                    comm, Steps(comm, algorithm), form, ours[comm.rank], norm, "triton"
                ),
            )
            host.run(
                lambda comm: _step(
                    comm, Steps(comm, algorithm), form, native[comm.rank], norm, "native"
                )
            )
            found = [differences(*pair) for pair in zip(ours, native, strict=True)]
            assert found == [[]] * ranks, (elems, form)
    host.close()
