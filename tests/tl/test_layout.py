# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels' own arithmetic, compared with the C++ structures that it mirrors."""

import itertools
from importlib.util import find_spec

import pytest
import torch

from ringcomm import _native
from tests.tl.interpreter import run_ranks

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")

CASES = [(2, 1, 2, 64), (3, 2, 4, 1024), (5, 3, 4, 65536)]


def _offsets(store, rank, world):
    from ringcomm._tl.geometry import Geometry
    from tests.tl.kernels import chunks_kernel, offsets_kernel

    wrong: list[object] = []
    for sizes in CASES:
        world_size, channels, slots, _ = sizes
        geometry = Geometry(*sizes, _native.layout_offset(sizes, "staging"))
        positions = itertools.product((0, 1), range(channels), range(world_size), (1, 7, -2))
        for stream, channel, peer, epoch in positions:
            found = torch.zeros(5, dtype=torch.int64)
            offsets_kernel[(1,)](found.data_ptr(), stream, channel, peer, epoch, G=geometry)
            at = (stream, channel, peer)
            slot = (epoch - 1) % slots
            want = [
                _native.layout_offset(sizes, "signal", *at),
                _native.layout_offset(sizes, "epoch", *at),
                _native.layout_offset(sizes, "channel", *at),
                _native.layout_offset(sizes, "slot", *at, slot),
                _native.layout_offset(sizes, "header", *at, slot),
            ]
            if found.tolist() != want:
                wrong.append((sizes, at, epoch, found.tolist(), want))
        for total, chunk in ((0, 64), (1, 64), (1000, 128), (10_000, 4096)):
            covered = 0
            for peer, channel in itertools.product(range(world_size), range(channels)):
                found = torch.zeros(2, dtype=torch.int64)
                chunks_kernel[(1,)](found.data_ptr(), total, chunk, peer, channel, G=geometry)
                begin, size = found.tolist()
                bounds = min(peer * chunk, total), min((peer + 1) * chunk, total)
                if size and not (bounds[0] <= begin and begin + size <= bounds[1]):
                    wrong.append((sizes, total, chunk, peer, channel, begin, size))
                covered += size
            if covered != min(total, chunk * world_size):
                wrong.append((sizes, total, chunk, covered))
    return wrong


def test_addresses_and_slices():
    assert run_ranks(_offsets, 1) == [[]]


def _rounds(store, rank, world):
    from ringcomm._tl.geometry import Geometry
    from tests.tl.kernels import rounds_kernel

    wrong: list[object] = []
    beyond_the_first = 0
    tile = _native.ADAMW_TILE_ELEMS * 2  # the unit by which optimizer steps divide a chunk
    units = ((64, 64), (64, 128), (tile, tile))
    for world_size, channels, (line, segment) in itertools.product((2, 3), (1, 5), units):
        geometry = Geometry(world_size, channels, 2, segment, 0, line)
        for lines, channel in itertools.product(range(0, 42, 3), range(channels)):
            total = max(lines * line - 4, 0)
            chunk = -(-total // world_size // line) * line
            pieces = []
            for peer in range(world_size):
                here = -(-min(max(total - peer * chunk, 0), chunk) // line)
                cut = here * (channel + 1) // channels - here * channel // channels
                pieces.append(max(-(-cut * line // segment), 1))
            found = torch.zeros(1, dtype=torch.int64)
            rounds_kernel[(1,)](found.data_ptr(), total, chunk, channel, G=geometry)
            beyond_the_first += pieces[0] < max(pieces)
            if found.item() != max(pieces):
                wrong.append((geometry, lines, channel, found.item(), pieces))
    return wrong, beyond_the_first > 0


def test_the_rounds_of_a_ring_cover_every_chunk():
    assert run_ranks(_rounds, 1) == [([], True)]
