"""Runs of a part as boxes of its tensor, and boxes out of tensors that were saved flat."""

from __future__ import annotations

import itertools
from math import prod

import pytest
import torch

from ringcomm.errors import ArgumentError
from ringcomm.zero.checkpoint import Checkpoints, FlatShard
from ringcomm.zero.checkpoint import folder as reader
from ringcomm.zero.checkpoint.format import Part, PartShard

WHOLE = torch.arange(4 * 5 * 6.0).view(4, 5, 6)


def boxes_of(size: int) -> list[tuple[int, int]]:
    return [
        (a, b) for a, b in itertools.combinations(range(size + 1), 2) if (a + b) % 2 or b == size
    ]


@pytest.mark.parametrize("part", [Part((4, 5, 6), (1, 0, 2), (3, 5, 3)), Part((4,), (3,), (0,))])
def test_runs_of_a_part_fill_it(part):
    elems = prod(part.sizes)
    for cut in range(elems + 1):
        found = torch.zeros(part.shape)
        for begin, end in ((0, cut), (cut, elems)):
            shard = PartShard(part, begin, torch.arange(float(begin), float(end)))
            assert shard.size() == torch.Size(part.shape)
            for box in shard.boxes():
                assert shard.__get_tensor_shard__(_index(box.offsets)).equal(box.local)
                within = zip(box.offsets, box.sizes, strict=True)
                found[tuple(slice(o, o + n) for o, n in within)] = box.local
        here = tuple(slice(o, o + n) for o, n in zip(part.offsets, part.sizes, strict=True))
        assert found[here].equal(torch.arange(float(elems)).view(part.sizes))


def _index(offsets):
    from torch.distributed.checkpoint.metadata import MetadataIndex

    return MetadataIndex("x", torch.Size(offsets))


@pytest.mark.parametrize("block_bytes", [8, 100, 1 << 20])
def test_boxes_of_a_tensor_that_was_saved_flat(tmp_path, monkeypatch, block_bytes):
    monkeypatch.setattr(reader, "BLOCK_BYTES", block_bytes)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"x": FlatShard(WHOLE.numel(), 0, WHOLE.view(-1), (4, 5, 6))})
    opened = checkpoints.reader()
    for box in itertools.product(boxes_of(4), boxes_of(5), boxes_of(6)):
        out = torch.empty([end - begin for begin, end in box])
        opened.read_box("x", [begin for begin, _ in box], out)
        assert out.equal(WHOLE[tuple(slice(*each) for each in box)])
    with pytest.raises(ArgumentError, match=r"expected a box in size \(4, 5, 6\)"):
        opened.read_box("x", (2, 0, 0), torch.empty(3, 5, 6))


def test_a_tensor_that_was_saved_in_parts_reads_flat(tmp_path):
    part = Part((4, 5, 6), (0, 0, 0), (4, 5, 6))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"x": PartShard(part, 0, WHOLE.reshape(-1))})
    out = torch.empty(50)
    checkpoints.reader().read("x", 7, out)
    assert out.equal(WHOLE.view(-1)[7:57])
