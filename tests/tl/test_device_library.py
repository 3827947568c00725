# SPDX-License-Identifier: Apache-2.0
"""The device library in Triton's interpreter, one process per rank, on the host's heap."""

import time
from importlib.util import find_spec

import pytest
import torch

from ringcomm import ArgumentError
from tests.support.covering import in_test_all
from tests.support.exact import pattern
from tests.support.memories import below_2_gib, needs_low_addresses
from tests.tl.interpreter import no_wait, open_context, run_kernel, run_ranks

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

COUNTS = (0, 1, 5003, *in_test_all(1000, 20_011))
DTYPES = (torch.bfloat16, torch.int8)


def _type(dtype):
    import triton.language as tl

    return getattr(tl, str(dtype).removeprefix("torch."))


# ---- data and signals ---------------------------------------------------------------------------


def _shift(context, kernels, dtype):
    rank, world = context.comm.rank, context.comm.world_size
    inboxes = context.empty(max(COUNTS), dtype)
    words = context.zeros((2, world), torch.int32)
    for count in COUNTS:
        target = torch.empty(count, dtype=dtype)
        source = pattern(count, rank, dtype)
        pointers = (inboxes.ptrs, words.ptrs, source, target)
        run_kernel(context, kernels.shift_kernel, (1,), *pointers, count, DTYPE=_type(dtype))
        want = pattern(count, (rank - 1) % world, dtype)
        assert torch.equal(target.view(torch.uint8), want.view(torch.uint8)), (count, dtype)


def _gather(context, kernels, blocks):
    rank, world = context.comm.rank, context.comm.world_size
    count = 3001
    copies = context.empty(count, torch.float16)
    words = context.zeros((blocks, world), torch.int32)
    for call in range(2):
        copies.tensor.copy_(pattern(count, rank + call, torch.float16))
        target = torch.empty(world, count, dtype=torch.float16)
        pointers = (copies.ptrs, words.ptrs, target)
        run_kernel(
            context, kernels.gather_kernel, (blocks,), *pointers, count, DTYPE=_type(target.dtype)
        )
        want = torch.stack([pattern(count, peer + call, torch.float16) for peer in range(world)])
        assert torch.equal(target.view(torch.int16), want.view(torch.int16)), call


def _rounds(context, kernels, rounds=3, blocks=2, late_s=0.0):
    """True if every block summed every round's numbers, in two launches."""
    world = context.comm.world_size
    cells = context.zeros((blocks, world), torch.float32)
    words = context.zeros((blocks, world), torch.int32)
    told = world * (world + 1) // 2
    want = torch.outer(torch.arange(1, blocks + 1), torch.arange(1, rounds + 1)) * told
    right = []
    time.sleep(late_s)
    for _ in range(2):
        sums = torch.zeros(blocks, rounds, dtype=torch.bfloat16)
        pointers = (cells.ptrs, words.ptrs, sums)
        run_kernel(context, kernels.rounds_kernel, (blocks,), *pointers, ROUNDS=rounds)
        right.append(torch.equal(sums, want.bfloat16()))
    return all(right)


def _wrapped_epochs(context, kernels):
    """Barriers continue to work when the epochs wrap around."""
    blocks, world = 1, context.comm.world_size
    cells = context.zeros((blocks, world), torch.float32)
    words = context.zeros((blocks, world), torch.int32)
    words.tensor.fill_(-3)
    context.comm.barrier()
    sums = torch.zeros(blocks, 4, dtype=torch.bfloat16)
    run_kernel(context, kernels.rounds_kernel, (1,), cells.ptrs, words.ptrs, sums, ROUNDS=4)
    assert words.tensor.eq(5).all(), words.tensor


def _relay(context, kernels):
    word, data = torch.zeros(100, dtype=torch.int32), torch.zeros(1)
    for value in (3, 8):
        out = torch.zeros(4)
        run_kernel(context, kernels.relay_kernel, (4,), word, data, out, value)
        assert out.tolist() == [0, value + 1, value + 2, value + 3]


def _low_addresses(store, rank, world):
    comm, context, _ = open_context(store, rank, world)
    from tests.tl import device_kernels as kernels

    with comm, context:
        word, data, out = map(below_2_gib, (torch.zeros(100), torch.zeros(1), torch.zeros(4)))
        run_kernel(context, kernels.relay_kernel, (4,), word, data, out, 3)
        assert out.tolist() == [0, 4, 5, 6]


@needs_low_addresses
def test_addresses_below_2_gib_are_int64_too():
    run_ranks(_low_addresses, 1)


def _library(store, rank, world):
    comm, context, _ = open_context(store, rank, world)
    from tests.tl import device_kernels as kernels

    with comm, context:
        for dtype in DTYPES:
            _shift(context, kernels, dtype)
        _gather(context, kernels, 3)
        assert _rounds(context, kernels)
        _wrapped_epochs(context, kernels)
        _relay(context, kernels)
        # A communicator's own collectives still work beside the kernels.
        total = torch.ones(3)
        comm.all_reduce(total)
        assert total.eq(world).all()
        context.check()


@pytest.mark.parametrize("world", [1, 3])
def test_every_function_across_processes(world):
    run_ranks(_library, world)


def _on_devices(store, rank, world):
    from ringcomm import Communicator
    from ringcomm import tl as rc
    from tests.support.device_worlds import OPTIONS, Devices
    from tests.tl import device_kernels as kernels

    # Ranks 0 and 1 share a device of 8 multiprocessors; rank 2 has a device alone.
    devices = Devices("emulated", devices=1, physical=(rank // 2,), multiprocessors=8)
    with (
        Communicator.from_store(store, rank, world, device="cuda:0", options=OPTIONS) as comm,
        devices.as_on_gpu(comm),
        rc.Context(comm) as context,
    ):
        assert context.blocks == 4
        with pytest.raises(ArgumentError, match=r"blocks: expected 1 to 4, .* got 5"):
            rc.Context(comm, 5)
        _gather(context, kernels, 4)


def test_contexts_on_devices_divide_the_multiprocessors_among_ranks():
    run_ranks(_on_devices, 3)


def _without_wait(store, rank, world):
    """Tells whether a rank with a late peer sums rounds correctly, with waits and without."""
    comm, context, _ = open_context(store, rank, world)
    from ringcomm._tl import device
    from tests.tl import device_kernels as kernels

    right = []
    for wait in (device.wait_acquire_sys, no_wait):
        vars(device)["wait_acquire_sys"] = wait
        comm.barrier()
        right.append(_rounds(context, kernels, late_s=0.3 * rank))
    comm.barrier()
    comm.close()
    return right


def test_without_its_wait_a_barrier_does_not_hold():
    with_wait, without = zip(*run_ranks(_without_wait, 2), strict=True)
    assert all(with_wait)
    assert not all(without)
