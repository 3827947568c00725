# SPDX-License-Identifier: Apache-2.0
"""Lazy views of device tensors are moved by value; tensors without device memory are refused."""

import pytest
import torch

from ringcomm import UnsupportedError
from tests.comm.test_admission import LAZY, lazy_calls
from tests.support.device_worlds import on_host, put

PACKED: torch.dtype = getattr(torch, "uint4")  # noqa: B009  # torch's stubs lack it


@pytest.mark.parametrize("kind", LAZY)
def test_lazy_views_are_moved_by_value(devices, kind):
    lazy, world = LAZY[kind], devices.world(2)

    def resolved(tensor):
        return lazy(tensor).resolve_neg().resolve_conj().contiguous()

    def body(make):
        calls = lazy_calls(make, lambda comm, tensor: put(comm, tensor, "plain"))
        return lambda comm: [on_host(tensor) for tensor in calls(comm)]

    found, expected = devices.run(world, body(lazy)), devices.run(world, body(resolved))
    for mine, right in zip(found, expected, strict=True):
        assert len(mine) == len(right) > 30
        for index, (a, b) in enumerate(zip(mine, right, strict=True)):
            assert torch.equal(a, b), index


def test_what_has_no_memory_is_refused(devices):
    def body(comm):
        dense = put(comm, torch.ones(4), "plain")
        for odd, words in (
            (dense.to_sparse(), "layout torch.sparse_coo"),
            (dense.to("meta"), "meta tensor"),
            (torch.zeros(4, dtype=torch.uint8, device=dense.device).view(PACKED), "packed"),
        ):
            for call in (
                lambda odd=odd: comm.all_reduce(odd),
                lambda odd=odd: comm.broadcast(odd, 0, async_op=True),
                lambda odd=odd: comm.irecv(odd, 1 - comm.rank),
            ):
                with pytest.raises(UnsupportedError, match=words):
                    call()

    devices.run(devices.world(2), body)
