# SPDX-License-Identifier: Apache-2.0
"""The CUDA units' PTX, executed on emulated devices, gives the host's results, bit for bit.

Memory there is as weak as PTX allows: a load sees only stores that an acquire has made visible.
``make ptx-check`` runs all tests of devices in this way. Compiling a subunit takes seconds, so
``make test`` compiles the narrowest elements, the elements of sums, and an optimizer step of each
form; RINGCOMM_PTX_CHECK=all compiles all.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

import ringcomm
from ringcomm import AbortedError, CollectiveTimeout, Communicator, MismatchError, RingcommError
from ringcomm.algorithms import spelled
from ringcomm.optim import AdamW, AdamWOptions
from tests.comm.device.test_device_bits import drawn, reduced_on_host
from tests.comm.device.test_device_steps import RULES, same_as_on_host
from tests.proof.ptx.small_jobs import subunit_of
from tests.ptx_interpreter import PtxSchedule
from tests.support import nvrtc
from tests.support.call_checks import (
    CHECKS,
    EMULATED,
    Case,
    check_all_reduce,
    check_reduce_scatter,
)
from tests.support.covering import thinned
from tests.support.device_worlds import MEMORIES, OPTIONS, Devices, on_host, put
from tests.support.emulator.library import COMPILER
from tests.support.emulator.ptx import PtxKernels, ptx_of
from tests.support.exact import same
from tests.support.faults import leaving_together

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(nvrtc.library_path() is None, reason=nvrtc.NEEDS_NVRTC),
    pytest.mark.skipif(COMPILER is None, reason="the emulator needs a C++ compiler"),
]

EVERYTHING = os.environ.get("RINGCOMM_PTX_CHECK") == "all"

# The orders in which warps and lanes run; each is used in one of the worlds below.
UPWARDS = PtxSchedule(0)
AGAINST_PROGRESS = PtxSchedule(1, no_progress_in_a_warp=True)
AT_RANDOM = PtxSchedule(7, even_are_late=True)


@contextmanager
def ptx_devices(schedule: PtxSchedule) -> Iterator[Devices]:
    for subunit in ("move", "reduce_float32/sum"):
        ptx_of(subunit)  # compiling later would delay ranks at their rendezvous
    made = Devices("emulated", ptx=PtxKernels(schedule, subunit=subunit_of))
    yield made
    made.close()


@pytest.fixture(scope="module")
def devices() -> Iterator[Devices]:
    with ptx_devices(AT_RANDOM) as made:
        yield made


@pytest.mark.parametrize(
    ("world_size", "schedule"),
    [
        pytest.param(
            *(2, UPWARDS),
            marks=pytest.mark.skipif(not EVERYTHING, reason="RINGCOMM_PTX_CHECK=all has it"),
        ),
        (2, AGAINST_PROGRESS),
        (4 if EVERYTHING else 3, AT_RANDOM),
    ],
    ids=["2, upwards", "2, a lane may wait for good", "many, at random"],
)
def test_every_collective(world_size: int, schedule: PtxSchedule) -> None:
    algorithms, memories = (
        itertools.cycle(("one_shot", "ring", "ll", "auto")),
        itertools.cycle(MEMORIES),
    )
    cases = [
        Case(count, memory=memory, algorithm=algorithm, in_place=turn % 2 == 0, root=turn % 2)
        for turn, (count, memory, algorithm) in enumerate(
            zip((1, 257, 3001, 0, 33, 700), memories, algorithms, strict=False)
        )
    ]

    calls = list(itertools.product(CHECKS.values(), cases[:3] if world_size > 2 else cases))
    if not EVERYTHING and world_size > 2:
        # Many warps share a few cores, so each collective runs with the size of only one algorithm.
        some = itertools.cycle([*cases[:2], replace(cases[2], count=1201)])
        calls = list(zip(CHECKS.values(), some, strict=False))
    elif not EVERYTHING:
        calls = list(itertools.product(CHECKS.values(), cases[3:]))

    def body(comm: Communicator) -> None:
        for check, case in calls:
            check(comm, case)

    with ptx_devices(schedule) as devices:
        devices.run(devices.world(world_size, (0, 1)), body)


# Sums of units that other tests compile as well, and the narrowest elements.
SOME_UNITS = {torch.float32: "SUM", torch.bfloat16: "SUM", torch.int8: "MIN"}
EVERY_UNIT = [(dtype, operators[-1]) for dtype, operators in EMULATED.items()]


@pytest.mark.parametrize(
    ("dtype", "op"), EVERY_UNIT if EVERYTHING else thinned(SOME_UNITS.items(), 2), ids=str
)
def test_every_unit(devices: Devices, dtype: torch.dtype, op: str) -> None:
    def body(comm: Communicator) -> None:
        for turn, algorithm in enumerate(("one_shot", "ring", "ll")):
            for count, memory in ((67, "unaligned"), (1500, MEMORIES[turn])):
                case = Case(count, dtype, op, memory, algorithm)
                check_all_reduce(comm, case)
                check_reduce_scatter(comm, case)

    devices.run(devices.world(2, (0, 1)), body)


ROUNDED = [torch.bfloat16, *([torch.float32, torch.float16] if EVERYTHING else [])]


@pytest.mark.parametrize("dtype", ROUNDED, ids=str)
def test_rounded_sums_have_the_bits_of_the_host(devices: Devices, dtype: torch.dtype) -> None:
    given = {count: drawn(count, dtype, "SUM") for count in (37, 1003)}
    with ringcomm.local_world(4, timeout=60.0) as host_world:
        wanted = {count: reduced_on_host(host_world, each, "SUM") for count, each in given.items()}

    def body(comm: Communicator) -> None:
        for count, want in wanted.items():
            for algorithm in ("one_shot", "ll") if count == 37 else ("one_shot",):
                tensor = put(comm, given[count][comm.rank], "plain")
                comm.all_reduce(tensor, algorithm=spelled(algorithm, "all_reduce"))
                assert same(on_host(tensor), want), (count, algorithm)

    devices.run(devices.world(4, (0, 1)), body)


# World size and options, by the dtype of the parameters.
STEPS = {
    torch.float32: (4, AdamWOptions()),
    torch.bfloat16: (2, AdamWOptions(master="remainder")),
    torch.float16: (2, AdamWOptions(master="none", rounding="stochastic", seed=7)),
}
# Each algorithm and each form, for the dtype that test_orders.py compiles as well: another dtype
# takes ten seconds and more to compile.
SOME_STEPS = [
    (torch.float32, "ring", "one pass", "AdamW"),
    (torch.float32, "one_shot", "two passes", "momentum"),
    (torch.float32, "one_shot", "one pass", "AdamW8bit"),
]
FORMS = ("one pass", "two passes")
EVERY_STEP = [
    *itertools.product(STEPS, ("one_shot", "ring"), FORMS, ("AdamW",)),
    *itertools.product(STEPS, ("one_shot",), ("one pass",), RULES),
]


@pytest.mark.parametrize(
    ("dtype", "algorithm", "form", "rule"),
    EVERY_STEP if EVERYTHING else thinned(SOME_STEPS, 2),
    ids=str,
)
def test_steps(devices: Devices, dtype: torch.dtype, algorithm: str, form: str, rule: str) -> None:
    world_size, options = STEPS[dtype]
    options = replace(options, algorithm=algorithm)
    make = RULES.get(rule, AdamW)
    same_as_on_host(devices, world_size, dtype, options, clip=form == "two passes", make=make)


def test_a_graph_is_replayed(devices: Devices) -> None:
    turns, large_elems = (12, 3001) if EVERYTHING else (6, 700)
    world = devices.world(2)
    assert devices.emulated is not None
    with devices.as_on_gpu():
        sizes = (30, large_elems)
        small, large = ([put(comm, torch.ones(n), "heap") for comm in world] for n in sizes)
        with devices.emulated.capture() as graph:
            for algorithm in ("ll", "one_shot", "ring"):
                world.all_reduce(
                    small if algorithm == "ll" else large,
                    algorithm=spelled(algorithm, "all_reduce"),
                )
        for turn in range(turns):
            for rank in range(2):
                small[rank].fill_(turn + rank)
                large[rank].fill_(turn - rank)
            devices.emulated.replay(graph)
            for rank in range(2):
                assert torch.equal(on_host(small[rank]), torch.full((30,), 2.0 * turn + 1))
                wanted = torch.full((large_elems,), 4.0 * turn - 2)
                assert torch.equal(on_host(large[rank]), wanted)


def _errors(devices: Devices, world, body) -> list[RingcommError | None]:
    def caught(comm: Communicator) -> RingcommError | None:
        try:
            body(comm)
            on_host(torch.zeros(1))  # waits for the stream
            comm.engine.finish_host_side()
        except RingcommError as error:
            return error
        return None

    return devices.run(world, leaving_together(caught, len(world)))


@pytest.mark.parametrize("algorithm", ["one_shot", "ring", "ll"])
def test_a_rank_that_does_not_come_is_named(devices: Devices, algorithm: str) -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.all_reduce(
                put(comm, torch.ones(100), "plain"), algorithm=spelled(algorithm, "all_reduce")
            )

    with devices.new_world(2, (0, 1), replace(OPTIONS, timeout=0.3)) as world:
        alone, absent = _errors(devices, world, body)
    assert isinstance(alone, CollectiveTimeout) and "rank 1" in str(alone)
    assert absent is None or isinstance(absent, AbortedError)


@pytest.mark.parametrize("algorithm", ["one_shot", "ll"])
def test_other_calls_are_told_apart(devices: Devices, algorithm: str) -> None:
    def body(comm: Communicator) -> None:
        tensor = put(comm, torch.ones(100 + comm.rank), "plain")
        comm.all_reduce(tensor, algorithm=spelled(algorithm, "all_reduce"))

    with devices.new_world(2, (0, 1)) as world:
        errors = _errors(devices, world, body)
    assert any(isinstance(error, MismatchError) for error in errors), errors
    assert all(isinstance(error, RingcommError) for error in errors), errors
