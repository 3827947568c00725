# SPDX-License-Identifier: Apache-2.0
"""Collectives whose channels get tiles of a chunk (core/tiles.h), compared with slices.

Segments have the size of the smallest tile, and each chunk has several rounds of tiles and a rest.
"""

import threading
from dataclasses import replace

import pytest
import torch

from ringcomm import Communicator
from ringcomm.cuda import units
from ringcomm.errors import MismatchError
from tests.support.call_checks import CHECKS, REDUCTIONS, Case
from tests.support.covering import covering
from tests.support.device_worlds import MEMORIES, with_options

TILE_BYTES = 16 << 10
CHANNELS = 3
# 4-byte elements: three rounds of tiles, and a rest that ends within a 16-byte vector.
COUNT = 3 * CHANNELS * TILE_BYTES // 4 + 5_003
OPTIONS = with_options(segment_bytes=TILE_BYTES, channels=CHANNELS)
KERNELS = ("batched", "sliced")


@covering(strength=2, name=[*CHECKS], memory=MEMORIES, kernels=KERNELS)
def test_every_call_is_exact(devices, monkeypatch, name, memory, kernels):
    monkeypatch.setenv("RINGCOMM_KERNELS", kernels)

    def body(comm):
        for turn, algorithm in enumerate(("one_shot", "ring")):
            CHECKS[name](comm, Case(COUNT, memory=memory, algorithm=algorithm, in_place=turn == 0))

    with devices.new_world(2, options=OPTIONS) as world:
        devices.run(world, body)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_every_way_to_sum_is_exact(devices, name):
    """Two sources, a number of sources without a loop of its own, an average, and factors."""

    def body(comm):
        for op in ("AVG", "PREMUL_SUM"):
            REDUCTIONS[name](comm, Case(COUNT, op=op, memory="heap", algorithm="one_shot"))

    for ranks in (1, 2, 3):
        with devices.new_world(ranks, options=OPTIONS) as world:
            devices.run(world, body)


def test_chunks_of_one_round_and_of_none(devices):
    """A chunk shorter than a round is divided into slices; short chunks have fewer rounds."""
    round_elems = CHANNELS * TILE_BYTES // 4

    def body(comm):
        for count in (round_elems - 1, round_elems, round_elems + 1, 2 * round_elems + 17):
            for name in ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor"):
                CHECKS[name](comm, Case(count, memory="heap", algorithm="one_shot"))
                CHECKS[name](comm, Case(count, memory="mixed", algorithm="ring"))

    with devices.new_world(3, options=OPTIONS) as world:
        devices.run(world, body)


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_shorter_chunk_whose_part_is_longer_by_a_piece(devices, monkeypatch, kernels):
    """The third of five channels gets 256 lines of a chunk of 1,283 lines, but 257 of 1,282."""
    monkeypatch.setenv("RINGCOMM_KERNELS", kernels)

    def body(comm):
        for algorithm in ("one_shot", "ring"):
            case = Case((1283 + 1282) * 64 // 4, memory="heap", algorithm=algorithm)
            CHECKS["all_reduce"](comm, case)

    with devices.new_world(2, options=replace(OPTIONS, channels=5)) as world:
        devices.run(world, body)


def _sends(comm):
    tensor = torch.zeros(COUNT, device=comm.device)
    if comm.rank == 0:
        comm.send(tensor, 1)
    else:
        comm.recv(tensor, 0)


def _reduces(comm):
    CHECKS["reduce_scatter_tensor"](comm, Case(COUNT, memory="heap", algorithm="one_shot"))


@pytest.mark.parametrize("call", [_reduces, _sends, Communicator.barrier])
def test_ranks_that_cut_differently_get_an_error(devices, monkeypatch, call):
    """Each rank looks up the kernel in its own thread; rank 1 requests slices."""
    of_thread = threading.local()
    monkeypatch.setattr(units, "deals_tiles", lambda: not getattr(of_thread, "sliced", False))

    def body(comm):
        of_thread.sliced = comm.rank == 1
        with pytest.raises(MismatchError) as raised:
            call(comm)
            comm.barrier()
            devices.runtime.synchronize(comm.rank)  # a send ends before its peer's error
            comm.barrier()
        text = str(raised.value)
        assert text.count("slices as RINGCOMM_KERNELS asks") == 1, text
        assert "ops and roots; set RINGCOMM_KERNELS to the same value on all ranks" in text

    world = devices.new_world(2, on=(0, 1), options=OPTIONS)
    devices.run(world, body)
    world.close()
