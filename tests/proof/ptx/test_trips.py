# SPDX-License-Identifier: Apache-2.0
"""A call by packets waits for exactly two loads from memory, one after the other.

The interpreter counts them (``tests/ptx_interpreter/source/trips.h``) in the kernels of a rank that
comes last, so that all awaited data has arrived when it looks.
"""

from __future__ import annotations

import time

import pytest
import torch

from ringcomm import Communicator
from ringcomm.cuda import units
from tests import ptx_interpreter
from tests.proof.ptx.small_jobs import QUICK, subunit_of
from tests.ptx_interpreter import PtxSchedule
from tests.support import nvrtc
from tests.support.cuda_code import packets_source
from tests.support.device_worlds import Devices, on_host, put
from tests.support.emulator.library import COMPILER
from tests.support.emulator.ptx import PtxKernels, ptx_from, ptx_of

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(nvrtc.library_path() is None, reason=nvrtc.NEEDS_NVRTC),
    pytest.mark.skipif(COMPILER is None, reason="the emulator needs a C++ compiler"),
]

KERNEL = "rc_ll_sum"
# The first trip loads the call's words and the input, the second the peers' packets.
TRIPS = 2
# The serial kernel's trips: the words, the input, the headers, the payloads.
SERIAL_TRIPS = 4
TURNS = 4
# Long enough for a launched kernel to send its packets.
HEAD_START_S = 0.1

PACKETS, BODY, LL = "kernels/cuda/packet_kernels.h", "kernels/cuda/body.h", "ringcomm/protocol/ll.h"
FIRST = "  FirstWords words = load_first(lane, head.world);\n"
WORDS = "  load_packet_words(team, p, args, head, w);\n"
STORED = "  w.sequence = sequence;\n"
LOADED = "  const uint64_t sequence = counts ? line->sequence : 0;\n"
SENT = "    if (at < lane.end) {\n      a.first"
CHECKED = "    if (status != Status::kOk || at >= lane.end) break;\n"
# By name: the header to change, and pairs of old and new text.
MUTANTS = {
    "what is sent loaded behind the words": (PACKETS, [(FIRST, ""), (WORDS, WORDS + FIRST)]),
    "a word stored before the next is loaded": (BODY, [(STORED, ""), (LOADED, LOADED + STORED)]),
    "payloads awaited behind headers": (
        LL,
        [
            (SENT, SENT.replace("lane.end)", "lane.end && checked)")),
            (CHECKED, f"{CHECKED}    if (a.payload == nullptr) continue;\n"),
        ],
    ),
}


def packets_ptx(loops: str = units.BATCHED, mutant: str = "") -> str:
    """Returns the PTX of the packet kernel, or of a mutant of it."""
    source, headers, macros = packets_source("reduce_float32/sum", loops)
    if mutant:
        header, changes = MUTANTS[mutant]
        for old, new in changes:
            assert headers[header].count(old) == 1, old
            headers[header] = headers[header].replace(old, new)
    return ptx_from(KERNEL, source, headers, macros)


def trips(text: str, elems: int) -> int:
    """Returns the trips of an all-reduce on the last rank; each rank is last in turn."""
    kernels = PtxKernels(
        PtxSchedule(counts_trips=1),
        subunit=lambda unit, kernel: KERNEL if kernel == KERNEL else subunit_of(unit, kernel),
        text_of=lambda subunit: text if subunit == KERNEL else ptx_of(subunit),
    )
    devices = Devices("emulated", ptx=kernels)

    def body(comm: Communicator) -> None:
        for turn in range(TURNS):
            tensor = put(comm, torch.full((elems,), float(comm.rank)), "plain")
            if comm.rank == turn % 2:
                time.sleep(HEAD_START_S)
            comm.all_reduce(tensor, algorithm="ll")
            assert torch.equal(on_host(tensor), torch.ones(elems))

    with devices.new_world(2, (0, 1), QUICK) as world:
        devices.run(world, body)
    devices.close()
    return ptx_interpreter.trips(kernels.module(KERNEL), KERNEL)


def test_a_sum_of_packets_waits_twice() -> None:
    assert trips(packets_ptx(), 128) == TRIPS
    # A function loads the incomplete last word byte by byte, and returns before all other loads.
    assert trips(packets_ptx(), 131) == TRIPS + 1


def test_the_serial_kernel_waits_more_often() -> None:
    assert trips(packets_ptx(units.SERIAL), 128) == SERIAL_TRIPS


@pytest.mark.parametrize("mutant", MUTANTS)
def test_another_wait_is_counted(mutant: str) -> None:
    assert trips(packets_ptx(mutant=mutant), 128) == TRIPS + 1
