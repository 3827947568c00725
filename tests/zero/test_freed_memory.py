# SPDX-License-Identifier: Apache-2.0
"""NOTE [Freed memory]: shard() raises the sizes above which malloc returns memory at once."""

import ctypes

import pytest
import torch

import ringcomm
from ringcomm import zero
from tests.support.ranks import run_ranks

M_TRIM_THRESHOLD = -1

pytestmark = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs the mallinfo2 of glibc >= 2.33"
)


class MallInfo(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks")),
        ("rest", ctypes.c_size_t * 6),
    )


def _mapped(kept):
    """Returns how many of three 20 MiB allocations malloc maps separately from the system.

    malloc returns such memory to the system when it is freed; mallinfo2(3) counts the mappings. Up
    to twice the mapping threshold may stay free at the top of the heap (M_MMAP_THRESHOLD in
    mallopt(3)). The tensors are kept, because malloc adapts its threshold when memory is freed.
    """
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = MallInfo
    before = mallinfo().hblks
    kept += [torch.empty(20 << 20, dtype=torch.uint8) for _ in range(3)]
    return mallinfo().hblks - before


def _before_and_after(store, rank, world_size, threshold_bytes=None):
    if threshold_bytes is not None:
        # Has the effect of MALLOC_TRIM_THRESHOLD_ in the environment at process start.
        assert ctypes.CDLL(None).mallopt(M_TRIM_THRESHOLD, threshold_bytes) == 1
    kept: list[torch.Tensor] = []
    with ringcomm.local_world(1) as world:
        before = _mapped(kept)
        zero.shard(torch.nn.Linear(3, 3), comm=world[0])
        return before, _mapped(kept)


def test_large_allocations_stay_with_the_process():
    """Before shard(), malloc maps each large allocation; after it, none."""
    assert run_ranks(_before_and_after, 1) == [(3, 0)]


def test_a_threshold_of_the_users_own_stays():
    assert run_ranks(_before_and_after, 1, 128 << 10) == [(3, 3)]
