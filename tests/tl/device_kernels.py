# SPDX-License-Identifier: Apache-2.0
"""Kernels of a user of ``ringcomm.tl``, which test_device_library.py runs and compiles.

The words of a kernel are int32 [rows, world] in symmetric memory. Rank p writes word [row, p]; the
rank's own words are counters.
"""

import triton
import triton.language as tl

from ringcomm import tl as rc

ARRIVED = tl.constexpr(0)
CONSUMED = tl.constexpr(1)


@triton.jit
def shift_kernel(
    table, timeout_ns, inboxes, words, source, target, count, DTYPE: tl.constexpr, G: tl.constexpr
):
    """Sends rank r's ``source`` to rank r + 1, which copies it from its inbox into ``target``."""
    ws, status = rc.begin_kernel(table, tl.program_id(0), timeout_ns, G)
    me = rc.rank_of(ws)
    after = rc.peer_at(ws, 1, G)
    before = rc.peer_at(ws, G.world - 1, G)
    epoch = rc.advance_epoch(rc.word_of(words, me, ARRIVED, me, G))
    # Waits until the last call's data has left the inbox.
    emptied = rc.word_of(words, me, CONSUMED, after, G)
    status = rc.wait_acquire_sys(ws, emptied, after, epoch - 1, 0, status, G)
    if status == 0:
        rc.put(inboxes, after, 0, source, count, DTYPE)
        rc.signal_release_sys(rc.word_of(words, after, ARRIVED, me, G), epoch)
    arrived = rc.word_of(words, me, ARRIVED, before, G)
    status = rc.wait_acquire_sys(ws, arrived, before, epoch, 1, status, G)
    if status == 0:
        rc.get(inboxes, me, 0, target, count, DTYPE)
        rc.signal_release_sys(rc.word_of(words, before, CONSUMED, me, G), epoch)
    rc.end_kernel(ws, status, G)


@triton.jit
def gather_kernel(
    table, timeout_ns, copies, words, target, count, DTYPE: tl.constexpr, G: tl.constexpr
):
    """Copies every rank's data, one rank after another; each block copies a part."""
    ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
    block = tl.program_id(0)
    ws, status = rc.begin_kernel(table, block, timeout_ns, G)
    first = block * count // tl.num_programs(0)
    last = (block + 1) * count // tl.num_programs(0)
    status = rc.barrier_sys(ws, words, block, 0, status, G)
    for peer in range(G.world):
        if status == 0:
            address = target + (peer * count + first).to(tl.int64) * ITEM
            rc.get(copies, peer, first, address, last - first, DTYPE)
    status = rc.barrier_sys(ws, words, block, 1, status, G)
    rc.end_kernel(ws, status, G)


@triton.jit
def rounds_kernel(table, timeout_ns, cells, words, sums, ROUNDS: tl.constexpr, G: tl.constexpr):
    """In every round each rank sends all others a number, and sums the received numbers in FP32.

    ``cells`` is FP32 [blocks, world], ``sums`` bfloat16 [blocks, rounds].
    """
    block = tl.program_id(0)
    ws, status = rc.begin_kernel(table, block, timeout_ns, G)
    me = rc.rank_of(ws)
    for i in range(ROUNDS):
        if status == 0:
            for peer in range(G.world):
                cell = rc.peer_ptr(cells, peer, tl.float32) + (block * G.world + me)
                tl.store(cell, ((block + 1) * (me + 1) * (i + 1)).to(tl.float32))
        status = rc.barrier_sys(ws, words, block, 2 * i, status, G)
        if status == 0:
            total = tl.full((), 0, tl.float32)
            for peer in range(G.world):
                here = rc.peer_ptr(cells, me, tl.float32) + (block * G.world + peer)
                total = rc.accumulate(total, tl.load(here))
            out = rc.pointer(sums + 0, tl.bfloat16, False) + (block * ROUNDS + i)
            tl.store(out, rc.round_to(total, tl.bfloat16))
        status = rc.barrier_sys(ws, words, block, 2 * i + 1, status, G)
    rc.end_kernel(ws, status, G)


@triton.jit
def relay_kernel(table, timeout_ns, word, data, out, value, G: tl.constexpr):
    """Block 0 stores a value and signals it; the other blocks add their index to it."""
    block = tl.program_id(0)
    ws, status = rc.begin_kernel(table, block, timeout_ns, G)
    epoch = rc.advance_epoch(word + 64 * (block + 1))
    values = rc.pointer(data + 0, tl.float32, False)
    if block == 0:
        tl.store(values, value.to(tl.float32))
        rc.signal_release_gpu(word, epoch)
    else:
        status = rc.wait_acquire_gpu(ws, word, epoch, status, G)
        if status == 0:
            tl.store(rc.pointer(out + 0, tl.float32, False) + block, tl.load(values) + block)
    rc.end_kernel(ws, status, G)


@triton.jit
def lonely_kernel(table, timeout_ns, word, G: tl.constexpr):
    """Waits for rank 1, which never signals."""
    ws, status = rc.begin_kernel(table, tl.program_id(0), timeout_ns, G)
    if rc.rank_of(ws) == 0:
        status = rc.wait_acquire_sys(ws, word + 0, 1, 7, 3, status, G)
    rc.end_kernel(ws, status, G)


@triton.jit
def stuck_kernel(table, timeout_ns, word, G: tl.constexpr):
    """Waits for a block that is not in the grid."""
    ws, status = rc.begin_kernel(table, tl.program_id(0), timeout_ns, G)
    epoch = rc.advance_epoch(word + 64)
    status = rc.wait_acquire_gpu(ws, word + 0, epoch, status, G)
    rc.end_kernel(ws, status, G)
