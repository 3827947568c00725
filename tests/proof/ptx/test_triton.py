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
