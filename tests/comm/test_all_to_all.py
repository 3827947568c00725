import pytest
import torch

from tests.support.covering import covering
from tests.support.exact import MOVABLE, WORLD_SIZES, pattern, same
from tests.support.placing import PLACES, put, room


def _piece(count, sender, receiver, dtype):
    return pattern(count, sender * 17 + receiver, dtype)


def _check_single(comm, count, dtype, place):
    world, rank = comm.world_size, comm.rank
    parts = [_piece(count, rank, peer, dtype).view(torch.uint8) for peer in range(world)]
    source = put(torch.cat(parts).view(dtype), place, rank)
    output = room(count * world, dtype, place, rank + 1)
    comm.all_to_all_single(output, source)
    for peer in range(world):
        got = output[peer * count : (peer + 1) * count]
        assert same(got, _piece(count, peer, rank, dtype)), (count, dtype, place, peer)


def test_every_dtype(worlds):
    def body(comm):
        for dtype in MOVABLE:
            _check_single(comm, 67, dtype, "mixed")

    worlds(3).run(body)


@covering(strength=1, world_size=WORLD_SIZES, place=PLACES)
def test_every_world_and_size(worlds, world_size, place):
    def body(comm):
        for count in (0, 1, 64, 65, 1003):
            _check_single(comm, count, torch.float32, place)

    worlds(world_size).run(body)


def _uneven(sender, receiver):
    return (sender * 5 + receiver * 3) % 7


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_uneven_splits_of_rows(worlds, world_size):
    def body(comm):
        rank = comm.rank
        sent = [_uneven(rank, peer) for peer in range(world_size)]
        received = [_uneven(peer, rank) for peer in range(world_size)]
        source = torch.cat([torch.full((n, 2, 3), rank * 100.0 + p) for p, n in enumerate(sent)])
        output = torch.zeros(sum(received), 2, 3)
        comm.all_to_all_single(output, source, received, sent)
        parts = [torch.full((n, 2, 3), p * 100.0 + rank) for p, n in enumerate(received)]
        assert torch.equal(output, torch.cat(parts))

    worlds(world_size).run(body)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_lists_of_different_counts(worlds, world_size):
    def body(comm):
        rank = comm.rank
        counts = [[41 * _uneven(a, b) for b in range(world_size)] for a in range(world_size)]
        inputs = [_piece(counts[rank][p], rank, p, torch.int64) for p in range(world_size)]
        outputs = [room(counts[p][rank], torch.int64, "mixed", p) for p in range(world_size)]
        comm.all_to_all(outputs, inputs)
        for p, output in enumerate(outputs):
            assert same(output, _piece(counts[p][rank], p, rank, torch.int64))

    worlds(world_size).run(body)


def test_strided_lists(worlds):
    def body(comm):
        grid = torch.arange(8.0).view(4, 2) + 10 * comm.rank
        result = torch.zeros(4, 2)
        comm.all_to_all([result[:, 0], result[:, 1]], [grid[:, 0], grid[:, 1]])
        base = torch.arange(8.0).view(4, 2)[:, comm.rank]
        assert torch.equal(result, torch.stack([base, base + 10], 1))

    worlds(2).run(body)
