# SPDX-License-Identifier: Apache-2.0
"""The kernels of ``algorithm="multicast"``, executed on an emulated switch."""

import os
import sys
from dataclasses import replace

import pytest
import torch

from ringcomm import Communicator, MismatchError
from ringcomm.algorithms import spelled
from tests.proof.ptx.multicast_job import (
    COUNTS,
    MULTICAST,
    UNIT,
    WINDOW_BYTES,
    all_reduce,
    every_call,
    halves,
    in_a_row,
    multicast_kernels,
)
from tests.proof.ptx.orderings import orderings, without
from tests.ptx_interpreter import PtxSchedule
from tests.support import ROOT, fork_server, nvrtc
from tests.support.covering import in_test_all, thinned
from tests.support.cuda_code import unit_source
from tests.support.device_worlds import MEMORIES, OPTIONS, Devices, on_host, put, room
from tests.support.emulator import ptx
from tests.support.emulator.library import library
from tests.support.emulator.ptx import ptx_of

pytestmark = pytest.mark.skipif(nvrtc.library_path() is None, reason="no NVRTC")

WITH_WINDOW = replace(OPTIONS, multicast_bytes=WINDOW_BYTES)


@pytest.fixture(scope="module")
def devices():
    made = Devices("emulated", devices=4, ptx=multicast_kernels(PtxSchedule(seed=2)))
    yield made
    made.close()
    assert library().emu_vmm_in_use() == 0


@pytest.fixture(params=[2, *in_test_all(4)])
def world(devices, request):
    return devices.world(request.param, tuple(range(request.param)), WITH_WINDOW)


@pytest.mark.parametrize(
    ("world", "dtype"),
    thinned([(2, torch.float32), (2, torch.bfloat16), (2, torch.float16), (4, torch.float32)], 3),
    indirect=["world"],
)
def test_results(devices, world, dtype):
    """Partial vectors, several pieces, in place and not; plain, heap and unaligned tensors."""
    some = ("mixed", "unaligned") if len(world) == 2 else ("unaligned",)
    everywhere = dtype is torch.float32 and len(world) == 2
    devices.run(world, every_call, dtype, MEMORIES if everywhere else some)


def test_calls_follow_each_other_without_a_look_between(devices, world):
    devices.run(world, in_a_row, 3, COUNTS[-1])


def test_each_channel_has_slots_of_its_own(devices):
    world = devices.world(2, (0, 1), replace(OPTIONS, multicast_bytes=16 * WINDOW_BYTES))

    def body(comm: Communicator) -> None:
        all_reduce(comm, 0, 9001, torch.float32, "plain")  # on both channels
        all_reduce(comm, 1, 777, torch.float32, "plain")  # on one
        halves(comm, 2, 9001, torch.float32, "heap")
        tensor = put(comm, torch.ones(9001), "plain")
        for algorithm in ("one_shot", "multicast", "ring", "multicast"):
            comm.all_reduce(tensor, algorithm=spelled(algorithm, "all_reduce"))
        assert torch.equal(on_host(tensor), torch.full((9001,), 16.0))

    devices.run(world, body)


def test_all_gather_moves_any_dtype(devices, world):
    def body(comm: Communicator) -> None:
        for count in (0, 1, 999):
            values = torch.arange(count * comm.world_size).to(torch.uint8)
            output = room(comm, len(values), torch.uint8, "plain")
            mine = put(comm, values[comm.rank * count :][:count], "heap")
            comm.all_gather_into_tensor(output, mine, algorithm=MULTICAST)
            assert torch.equal(on_host(output), values)

    devices.run(world, body)


def test_graphs_replay_it(devices):
    def body(comm: Communicator) -> None:
        tensor = put(comm, torch.ones(COUNTS[-1]), "plain")
        with devices.emulated.capture(comm.rank) as graph:
            comm.all_reduce(tensor, algorithm=MULTICAST)
        for _ in range(3):
            devices.emulated.replay(graph, comm.rank)
        assert torch.equal(on_host(tensor), torch.full((COUNTS[-1],), 8.0))

    devices.run(devices.world(2, (0, 1), WITH_WINDOW), body)


def test_a_peer_that_calls_something_else_is_told_before_data_move(devices):
    def body(comm: Communicator) -> torch.Tensor:
        tensor = put(comm, torch.ones(COUNTS[-1]), "plain")
        with pytest.raises(MismatchError, match=r"multicast.*two_shot|two_shot.*multicast"):
            comm.all_reduce(tensor, algorithm="two_shot" if comm.rank else MULTICAST)
            on_host(tensor)
            comm.barrier()
        return tensor

    with devices.new_world(2, (0, 1), replace(WITH_WINDOW, timeout=10.0)) as world:
        for tensor in devices.run(world, body):
            assert torch.equal(tensor, torch.ones(COUNTS[-1]))


def test_it_is_never_chosen(devices, world):
    """A window does not change the choice among the other algorithms."""

    def body(comm: Communicator) -> list[str]:
        for count in (8, 20_000):
            comm.all_reduce(put(comm, torch.ones(count), "plain"))
        return [call.algorithm for call in comm.recording().ranks[comm.rank].collectives]

    for chosen in devices.run(devices.new_world(2, (0, 1), WITH_WINDOW), body):
        assert chosen == ["ll", "two_shot"]


# ---- mutants -------------------------------------------------------------------------------------

ORDERINGS = (
    # A call begins when all ranks have read what this rank shared before, which a wait finds at
    # once or soon. The barrier behind this wait, "run (1)", shows only if a peer is late, which
    # this test leaves to chance. "run (3)" is behind the last wait of a call in place, where the
    # kernel ends, too.
    "acquire of find_link, acquire of drained",
    "barrier of move_through_slots",
    "barrier of run (2)",
    "barrier of publish_shared",
    "release of publish_shared",
    "acquire of sync_peers",
    "fence of fence_proxy_alias",
    "barrier of sync_peers",
    "release of release",
)
# Each mutant is compiled, so make test runs one of the orders, one of the arithmetic, and one of
# the choice between calls in place and through slots.
SOURCES = {
    "one slot in place of two": ("piece & 1", "piece & 0"),
    "a lane adds up the vector of another": ("(part.all + at); };", "(part.all + (at ^ 16)); };"),
    "a rank that asks no peer whether its buffer is bound": (
        "all &= e.v.results[p] == e.v.heaps[p] + mine.offset;",
        "",
    ),
}
if os.environ.get("RINGCOMM_PTX_CHECK") == "all":
    SOURCES |= {
        "a piece of another chunk": ("slots.offset(j, e.rank())", "slots.offset(j, 0)"),
        "the last piece is not copied out": (
            "piece_of(out.get(r), slice, slots.piece_bytes, j - 1)",
            "Span{}",
        ),
        "no wait for the peers at the end of a call in place": (
            "if (published == Published::kAll)\n      RC_RETURN_IF_FAILED",
            "if (published == Published::kNone)\n      RC_RETURN_IF_FAILED",
        ),
        "a partial vector is stored whole": ("if (shares && part.padded)", "if (shares)"),
        "a partial vector is stored for this rank alone": (
            "store_some(e.v.results[p] +",
            "store_some(e.v.results[e.rank()] +",
        ),
        "a chunk of another rank in place": (
            "piece_of(chunks().get(e.rank()), slice, slice_bytes, 0)",
            "piece_of(chunks().get(0), slice, slice_bytes, 0)",
        ),
        "an offset outside of the heap": (
            "->buffer_offset = mine.offset",
            "->buffer_offset = mine.offset == kNotInHeap ? kNotInHeap : mine.offset + (1ull << 50)",
        ),
    }


def _caught(tmp_path, text: str) -> str:
    """Runs a job with this PTX; returns its error, or "". A crash of the process fails the test."""
    file = tmp_path / "mutant.ptx"
    file.write_text(text)
    command = [sys.executable, "-m", "tests.proof.ptx.multicast_job", str(file)]
    done = fork_server.run(command, kind=fork_server.PopenForDevices, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _compiled(monkeypatch, changes: dict[str, str]) -> str:
    def changed(name, loops):
        source, headers, macros = unit_source(name, loops)
        for before, after in changes.items():
            text = headers["kernels/cuda/multicast.h"]
            assert text.count(before) == 1
            headers["kernels/cuda/multicast.h"] = text.replace(before, after)
        return source, headers, macros

    monkeypatch.setattr(ptx, "unit_source", changed)
    return ptx_of(UNIT)


def test_the_jobs_of_mutants_pass_without_one(tmp_path):
    assert _caught(tmp_path, ptx_of(UNIT)) == ""


@pytest.mark.parametrize("name", ORDERINGS)
def test_an_ordering_that_is_dropped_is_an_error(tmp_path, name):
    text = ptx_of(UNIT)
    by_name = orderings(text)
    lines = [each.line for part in name.split(", ") for each in by_name[part]]
    assert _caught(tmp_path, without(text, lines))


@pytest.mark.parametrize("name", SOURCES)
def test_a_wrong_place_is_an_error(tmp_path, monkeypatch, name):
    before, after = SOURCES[name]
    assert _caught(tmp_path, _compiled(monkeypatch, {before: after}))
