# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

import ringcomm


def test_all_reduce_of_different_shapes_and_dtypes(worlds):
    def body(comm):
        for async_op in (False, True):
            tensors = [
                torch.ones(3),
                torch.ones(2, 2, dtype=torch.int64),
                torch.ones(1000).half(),
            ]
            work = comm.all_reduce_coalesced(tensors, async_op=async_op)
            if async_op:
                assert work.result() == tensors
            assert all(torch.equal(each, torch.full_like(each, 3)) for each in tensors)

    worlds(3).run(body)


def test_all_gather_and_reduce_scatter(worlds):
    def body(comm):
        inputs = [torch.full((n,), 1.0 + comm.rank) for n in (1, 70, 500)]
        outputs = [torch.zeros(2 * each.numel()) for each in inputs]
        comm.all_gather_coalesced(outputs, inputs)
        for output, each in zip(outputs, inputs, strict=True):
            want = torch.tensor([1.0, 2.0]).repeat_interleave(each.numel())
            assert torch.equal(output, want)
        reduced = [torch.zeros_like(each) for each in inputs]
        comm.reduce_scatter_coalesced(reduced, outputs)
        for each in reduced:
            assert torch.equal(each, torch.full_like(each, 2.0 * (comm.rank + 1)))
        lists = [[torch.zeros_like(each) for each in inputs] for _ in range(2)]
        comm.all_gather_lists_coalesced(lists, inputs)
        for rank, row in enumerate(lists):
            assert all(torch.equal(each, torch.full_like(each, 1.0 + rank)) for each in row)

    worlds(2).run(body)


def test_one_bad_pair_leaves_all_tensors_alone(worlds):
    def body(comm):
        tensors = [torch.ones(3), torch.ones(3).to_sparse()]
        with pytest.raises(ringcomm.UnsupportedError, match="dense"):
            comm.all_reduce_coalesced(tensors)
        with pytest.raises(ringcomm.ArgumentError, match="expected 2 tensors"):
            comm.all_gather_coalesced([torch.zeros(6)], [torch.ones(3)] * 2)
        assert torch.equal(tensors[0], torch.ones(3))
        comm.barrier()

    worlds(2).run(body)
