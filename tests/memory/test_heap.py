# SPDX-License-Identifier: Apache-2.0
"""Tensors in the heap: shapes, dtypes, reuse, limits."""

import gc
import os
import random
import stat
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import ringcomm
from ringcomm import ArgumentError, HeapError
from ringcomm.memory.host_heap import parse_bytes, process_heap
from tests.support.exact import MOVABLE
from tests.support.faults import shared_memory_files
from tests.support.heap_use import settled_heap_bytes
from tests.support.ranks import run_ranks

MIB = 1 << 20


@pytest.mark.parametrize("dtype", MOVABLE)
def test_every_dtype(dtype):
    for shape in ((7,), (2, 3), (), (0, 4), (70_000,)):
        zeros = ringcomm.zeros(shape, dtype=dtype)
        of_torch = torch.zeros(shape).to(dtype)
        assert zeros.dtype is dtype
        assert zeros.shape == of_torch.shape
        assert zeros.is_contiguous()
        if dtype is not torch.float8_e8m0fnu:  # this dtype has no zero
            assert torch.equal(
                zeros.float() if dtype.is_floating_point else zeros,
                of_torch.float() if dtype.is_floating_point else of_torch,
            )
        assert ringcomm.empty(shape, dtype=dtype).shape == of_torch.shape
        if zeros.numel():
            assert process_heap().contains(zeros.data_ptr(), zeros.numel() * dtype.itemsize)


def test_ways_to_give_a_shape():
    for made in (
        ringcomm.empty(2, 3),
        ringcomm.empty((2, 3)),
        ringcomm.empty([2, 3]),
        ringcomm.empty(torch.Size([2, 3])),
        ringcomm.zeros(2, 3),
    ):
        assert made.shape == (2, 3)
        assert made.dtype is torch.get_default_dtype()
    assert ringcomm.empty(5).shape == (5,)
    assert ringcomm.zeros(()).shape == ()
    assert ringcomm.zeros().item() == 0


def test_bad_shapes_and_dtypes():
    bad: list[Any] = [(-1,), (2.5,), ("3",), (2, (3,)), (None,)]
    for size in bad:
        with pytest.raises(ArgumentError, match=r"ringcomm\.empty: expected"):
            ringcomm.empty(*size)
    not_a_dtype: Any = "float32"
    with pytest.raises(ArgumentError, match=r"ringcomm\.zeros: expected a torch\.dtype"):
        ringcomm.zeros(3, dtype=not_a_dtype)


def test_zeros_are_zero_in_used_memory():
    for _ in range(3):
        used = ringcomm.empty(1000)
        used.fill_(7)
        address = used.data_ptr()
        del used
        again = ringcomm.zeros(1000)
        assert again.data_ptr() == address
        assert not again.any()
        del again


def test_a_view_keeps_its_memory_and_the_last_one_gives_it_back():
    before = settled_heap_bytes()
    tensor = ringcomm.zeros(4, 1024, 1024)
    view = tensor[1].t()
    del tensor
    held = ringcomm.heap_stats()
    assert held["used_bytes"] >= before + 16 * MIB
    other = ringcomm.empty(4, 1024, 1024)
    other.fill_(3)
    assert not view.any()
    del view, other
    assert ringcomm.heap_stats()["used_bytes"] == before


def test_statistics_add_up():
    stats = ringcomm.heap_stats()
    assert stats["used_bytes"] + stats["free_bytes"] == stats["capacity_bytes"]
    assert 0 < stats["largest_free_bytes"] <= stats["free_bytes"]
    assert stats["committed_bytes"] <= stats["capacity_bytes"]
    assert 0 <= stats["huge_bytes"] <= stats["capacity_bytes"]


def test_training_like_allocation_does_not_grow_the_heap():
    """Allocates the same shapes repeatedly, and frees them in a different order each time."""
    chooser = random.Random(3)
    shapes = [chooser.randrange(1, 400_000) for _ in range(40)]

    def turn():
        tensors = [ringcomm.empty(n) for n in shapes]
        chooser.shuffle(tensors)
        while tensors:
            tensors.pop()
        return ringcomm.heap_stats()

    settled_heap_bytes()  # later turns free nothing of earlier tests
    first = turn()
    for _ in range(20):
        last = turn()
    assert last["used_bytes"] == first["used_bytes"]
    assert last["committed_bytes"] == first["committed_bytes"]
    assert last["largest_free_bytes"] == first["largest_free_bytes"]


def test_fragmentation_is_bounded():
    """With random sizes and lifetimes, touched memory stays below Robson's bound for best fit."""
    chooser = random.Random(4)
    start = ringcomm.heap_stats()["committed_bytes"]
    live: list[torch.Tensor] = []
    largest_live_bytes = 0
    for _ in range(3000):
        if live and chooser.random() < 0.5:
            live.pop(chooser.randrange(len(live)))
        live.append(ringcomm.empty(chooser.randrange(1, 64 << 10), dtype=torch.uint8))
        largest_live_bytes = max(largest_live_bytes, sum(each.numel() for each in live))
    grown = ringcomm.heap_stats()["committed_bytes"] - start
    # Robson's theorem allows largest_live * log2(largest allocation); in practice it is far less,
    # and the test requires at most 2 * largest_live.
    assert grown <= 2 * largest_live_bytes + 2 * MIB


def _fills_a_small_heap(store, rank, world):
    ringcomm.memory.host_heap.process_heap(8 * MIB)
    kept = ringcomm.zeros(4 * MIB, dtype=torch.uint8)
    with pytest.raises(HeapError) as raised:
        ringcomm.empty(5 * MIB, dtype=torch.uint8)
    text = str(raised.value)
    for word in ("ringcomm.empty", str(5 * MIB), "free", "RINGCOMM_HEAP_BYTES", "heap_bytes="):
        assert word in text, text
    del kept
    assert ringcomm.zeros(5 * MIB, dtype=torch.uint8).numel() == 5 * MIB
    with pytest.raises(HeapError, match="exists already with 8388608 bytes"):
        process_heap(9 * MIB)
    assert process_heap(7 * MIB) is process_heap()
    return mode_of_heap()


def mode_of_heap() -> int:
    return stat.S_IMODE(os.fstat(process_heap().fd).st_mode)


def test_full_heap_says_what_is_needed():
    assert run_ranks(_fills_a_small_heap, 1) == [0o600]


def _with_variables(store, rank, world, variables, wanted):
    os.environ.update(variables)
    if wanted is None:
        with pytest.raises(HeapError) as raised:
            process_heap()
        return str(raised.value)
    assert process_heap().capacity_bytes == wanted
    tensor = ringcomm.zeros(100)
    assert mode_of_heap() == 0o600
    return float(tensor.sum())


def test_size_and_place_from_the_environment():
    assert run_ranks(_with_variables, 1, {"RINGCOMM_HEAP_BYTES": "16M"}, 16 * MIB) == [0.0]
    before = shared_memory_files()
    in_shm = {"RINGCOMM_HEAP_BYTES": "16MiB", "RINGCOMM_HEAP_DIR": "/dev/shm"}
    assert run_ranks(_with_variables, 1, in_shm, 16 * MIB) == [0.0]
    assert shared_memory_files() == before
    nowhere = {"RINGCOMM_HEAP_DIR": "/nonexistent"}
    (text,) = run_ranks(_with_variables, 1, nowhere, None)
    assert "/nonexistent" in text
    assert "RINGCOMM_HEAP_DIR" in text


def _in_tiny_tmpfs(store, rank, world, directory):
    os.environ.update({"RINGCOMM_HEAP_DIR": directory, "RINGCOMM_HEAP_BYTES": "64M"})
    small = ringcomm.zeros(MIB, dtype=torch.uint8)
    with pytest.raises(HeapError) as raised:
        ringcomm.empty(32 * MIB, dtype=torch.uint8)
    del small
    return str(raised.value)


def test_tmpfs_that_is_too_small():
    with tempfile.TemporaryDirectory() as directory:
        mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", directory]
        if subprocess.run(mount, capture_output=True, check=False).returncode:
            pytest.skip("this user cannot mount a tmpfs")
        try:
            (text,) = run_ranks(_in_tiny_tmpfs, 1, directory)
        finally:
            subprocess.run(["umount", directory], check=True)
    for word in ("ringcomm.empty", "MiB more in", directory, "free", "remount,size="):
        assert word in text, text


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("512k", 512 << 10), ("3M", 3 * MIB), (" 2 GiB", 2 << 30), ("1tb", 1 << 40)],
)
def test_sizes_in_words(text, size):
    assert parse_bytes(text, "X") == size


@pytest.mark.parametrize("text", ["", "M", "1.5G", "-3", "12x", "k4", "1kk"])
def test_sizes_that_are_none(text):
    with pytest.raises(ArgumentError, match="X: expected a number of bytes"):
        parse_bytes(text, "X")


def _forked_child_has_its_own_heap(store, rank, world):
    mine = ringcomm.zeros(1000)
    kept = [ringcomm.zeros(100_000) for _ in range(4)]
    token = process_heap().token
    child = os.fork()
    if child == 0:
        code = 1
        try:
            kept.clear()
            gc.collect()
            other = ringcomm.zeros(100_000)
            other.fill_(9)
            code = 0 if process_heap().token != token and not mine.any() else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert not any(each.any() for each in (mine, *kept))
    return process_heap().token == token


def test_fork():
    assert run_ranks(_forked_child_has_its_own_heap, 1) == [True]


def test_no_module_is_named_in_shared_memory():
    ringcomm.zeros(1000)
    target = Path(f"/proc/self/fd/{process_heap().fd}").readlink()
    assert "deleted" in str(target)
