# SPDX-License-Identifier: Apache-2.0
"""Sums of integers wrap on a GPU as on the host; tests/comm/device compares the other results."""

import torch

import ringcomm
from tests.gpu.device import PLAIN
from tests.support.exact import INTEGERS, raw_bytes

RANKS = 4
COUNT = 4 * 1021


def test_integers_wrap_alike(gpu_worlds):
    for dtype in INTEGERS:
        largest = torch.iinfo(dtype).max
        given = [torch.full((COUNT,), largest - rank, dtype=dtype) for rank in range(RANKS)]

        def on_host(comm, given=given):
            comm.all_reduce(given[comm.rank], algorithm="two_shot")
            return given[comm.rank]

        tensors = [tensor.to(PLAIN, copy=True) for tensor in given]
        gpu_worlds(RANKS).all_reduce(tensors, algorithm="two_shot")
        with ringcomm.local_world(RANKS) as world:
            wanted = world.run(on_host)
        for one, other in zip(tensors, wanted, strict=True):
            assert torch.equal(raw_bytes(one.cpu()), raw_bytes(other)), dtype
