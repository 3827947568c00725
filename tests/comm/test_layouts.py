# SPDX-License-Identifier: Apache-2.0
"""Collectives of tensors with strides, signs, gradients or other shapes, and of lists."""

from __future__ import annotations

import torch

from ringcomm import ReduceOp


def _uneven(sender, receiver):
    return (sender * 5 + receiver * 3) % 7


def test_all_reduce_of_strided_conjugated_and_scalar_tensors(worlds):
    def body(comm):
        wide = torch.arange(24.0).view(4, 6).clone()
        column = wide.t()[1:4]
        comm.all_reduce(column)
        want = torch.arange(24.0).view(4, 6)
        want[:, 1:4] *= 2
        assert torch.equal(wide, want)
        scalar = torch.tensor(3)
        comm.all_reduce(scalar)
        assert scalar.item() == 6
        base = torch.tensor([1 + 2j, 3 - 1j])
        comm.all_reduce(base.conj())
        assert torch.equal(base, torch.tensor([2 + 4j, 6 - 2j]))
        negated = torch.tensor([2 + 5j]).conj().imag
        comm.all_reduce(negated)
        assert negated.item() == -10
        negated = torch.tensor([2 + (5 + comm.rank) * 1j]).conj().imag
        comm.all_reduce(negated, ReduceOp.MAX)
        assert negated.item() == -5  # its memory holds 5 and 6

    worlds(2).run(body)


def test_parameter_that_needs_gradients(worlds):
    def body(comm):
        parameter = torch.nn.Parameter(torch.ones(5))
        comm.all_reduce(parameter)
        comm.all_reduce(parameter.t())
        assert torch.equal(parameter.detach(), torch.full((5,), 4.0))

    worlds(2).run(body)


def test_reduce_of_a_strided_tensor(worlds):
    def body(comm):
        grid = torch.ones(4, 4)
        comm.reduce(grid[:, 1], 1)
        want = torch.ones(4, 4)
        if comm.rank == 1:
            want[:, 1] = 2
        assert torch.equal(grid, want)

    worlds(2).run(body)


def test_broadcast_of_strided_and_expanded_tensors(worlds):
    def body(comm):
        grid = torch.full((3, 4), float(comm.rank))
        comm.broadcast(grid[:, 2], 1)
        want = torch.full((3, 4), float(comm.rank))
        want[:, 2] = 1
        assert torch.equal(grid, want)
        # The root's tensor is only read, so its elements may share memory.
        tensor = torch.tensor(7.0).expand(5) if comm.rank == 0 else torch.zeros(5)
        comm.broadcast(tensor, 0)
        assert torch.equal(tensor, torch.full((5,), 7.0))

    worlds(2).run(body)


def test_gather_in_place_and_to_strided_tensors(worlds):
    def body(comm):
        grid = torch.zeros(4, 2)
        columns = [grid[:, 0], grid[:, 1]]
        comm.gather(torch.full((4,), 1.0 + comm.rank), columns if comm.rank == 0 else None)
        want = torch.tensor([[1.0, 2.0]] * 4) if comm.rank == 0 else torch.zeros(4, 2)
        assert torch.equal(grid, want)
        parts = [torch.full((3,), float(comm.rank)) for _ in range(2)]
        comm.gather(parts[comm.rank], parts if comm.rank == 1 else None, 1)
        if comm.rank == 1:
            assert torch.equal(torch.stack(parts), torch.tensor([[0.0] * 3, [1.0] * 3]))

    worlds(2).run(body)


def test_scatter_in_place_and_to_strided_tensors(worlds):
    def body(comm):
        grid = torch.arange(8.0).view(4, 2)
        output = torch.zeros(4, 3)[:, 1]
        comm.scatter(output, [grid[:, 0], grid[:, 1]] if comm.rank == 0 else None)
        assert torch.equal(output, grid[:, comm.rank])
        parts = [torch.full((3,), 5.0 + rank) for rank in range(2)]
        comm.scatter(parts[comm.rank], parts if comm.rank == 1 else None, 1)
        assert torch.equal(parts[comm.rank], torch.full((3,), 5.0 + comm.rank))

    worlds(2).run(body)


def test_reduce_scatter_of_strided_lists(worlds):
    def body(comm):
        grid = torch.arange(12.0).view(3, 4).clone()
        output = torch.zeros(3, 2)[:, 0]
        comm.reduce_scatter(output, [grid[:, 0], grid[:, 1]])
        assert torch.equal(output, 2 * grid[:, comm.rank])

    worlds(2).run(body)


def test_a_negated_element_gets_its_sign(worlds):
    """A view of one element is contiguous, but its memory holds the negated value."""

    def body(comm):
        mine = torch.tensor([0 + 7j]).conj().imag
        assert mine.is_neg() and mine.is_contiguous()
        comm.reduce_scatter_tensor(mine, torch.tensor([1.0, 2.0]))
        assert mine.tolist() == [2 + 2 * comm.rank]

    worlds(2).run(body)


def test_all_gather_to_strided_lists_and_other_shapes(worlds):
    def body(comm):
        grid = torch.zeros(4, 2)
        comm.all_gather([grid[:, 0], grid[:, 1]], torch.full((2, 2), 1.0 + comm.rank).t())
        assert torch.equal(grid, torch.tensor([[1.0, 2.0]] * 4))
        stacked = torch.zeros(2, 3)
        comm.all_gather_into_tensor(stacked, torch.full((3,), float(comm.rank)))
        assert torch.equal(stacked, torch.tensor([[0.0] * 3, [1.0] * 3]))

    worlds(2).run(body)


def test_all_gather_of_a_conjugated_tensor(worlds):
    def body(comm):
        mine = torch.tensor([1 + 2j]).conj()
        parts = [torch.zeros(1, dtype=torch.complex64) for _ in range(2)]
        comm.all_gather(parts, mine)
        assert all(part.item() == 1 - 2j for part in parts)

    worlds(2).run(body)


def test_a_negated_element_is_gathered_with_its_sign(worlds):
    """A view of one element is contiguous, but its memory holds the negated value."""

    def body(comm):
        mine = torch.tensor([1 + 2j]).conj().imag
        assert mine.is_neg() and mine.is_contiguous()
        gathered = torch.zeros(2)
        comm.all_gather_into_tensor(gathered, mine)
        assert gathered.tolist() == [-2, -2]

    worlds(2).run(body)


def test_all_to_all_of_strided_lists(worlds):
    def body(comm):
        grid = torch.arange(8.0).view(4, 2) + 10 * comm.rank
        result = torch.zeros(4, 2)
        comm.all_to_all([result[:, 0], result[:, 1]], [grid[:, 0], grid[:, 1]])
        base = torch.arange(8.0).view(4, 2)[:, comm.rank]
        assert torch.equal(result, torch.stack([base, base + 10], 1))

    worlds(2).run(body)


def test_all_to_all_single_of_uneven_splits_of_rows(worlds):
    world_size = 3

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
