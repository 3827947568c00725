# SPDX-License-Identifier: Apache-2.0
"""The bare loop, an upper bound: plain copies by two ranks in one mapping (bare_loop.cpp).

With ``--tensors heap`` its tensors are in memory that both ranks map; otherwise they are ordinary
tensors, and the data pass through four staging slots.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import tempfile
from functools import partial
from pathlib import Path

import torch

from ..board import share_memory
from ..cases import Case, CaseBuffers, Prepared
from .systems import PeerSetup, System, Unavailable
from .torch_groups import allocate_buffers, plain

# Chosen on an EPYC (family 25 model 17, 2 cores) by a sweep of 32 KiB to 1 MiB, for calls of 1 and
# 64 MiB.
_SLOT_BYTES = 256 << 10
_HUGE_PAGE_BYTES = 2 << 20


class BareLoop(System):
    """The loop, and the memory that two ranks share.

    Each rank has one half of this memory, with control words, slots and tensors. A process has only
    one instance. The mapping remains until the process ends, since tensors may still use it.
    """

    def __init__(self, setup: PeerSetup) -> None:
        if setup.world != 2:
            raise RuntimeError(f"the bare loop is written for 2 ranks, not {setup.world}")
        self._library = _compile(setup)
        self._zero_copy, self._rank, self._plain = setup.heap_tensors, setup.rank, plain(setup)
        self._control_bytes = _round_up(self._library.bare_control_bytes(_SLOT_BYTES))
        self._half_bytes = self._control_bytes + _round_up(setup.heap_bytes or 0)
        both_bytes = 2 * self._half_bytes
        descriptor = share_memory(setup.store, "bare", setup.rank, setup.world, both_bytes)
        self._library.bare_open.restype = ctypes.c_void_p
        numbers = (descriptor, self._half_bytes, _SLOT_BYTES, setup.rank)
        begin = self._library.bare_open(*map(ctypes.c_int64, numbers))
        os.close(descriptor)
        if begin is None:
            raise RuntimeError(f"the bare loop cannot map {both_bytes} bytes")
        memory = (ctypes.c_char * both_bytes).from_address(begin)
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self.version = "bare loop, " + ("zero copy" if self._zero_copy else "staged")

    def prepare(self, case: Case) -> Prepared:
        name = case.collective.name
        if name not in ("reduce_scatter", "all_gather", "all_reduce"):
            raise Unavailable(f"the bare loop has no {name}")
        if case.dtype_name not in ("float", "bfloat16") or case.op != "sum":
            raise Unavailable("the bare loop sums only float and bfloat16")
        chunk_bytes = case.chunk_elems * case.dtype.itemsize
        if chunk_bytes % 64 or (name == "all_reduce" and not case.in_place):
            raise Unavailable("the bare loop does not support this layout")
        self._taken_bytes = self._control_bytes
        allocate = self._allocate if self._zero_copy else self._plain
        source, target = allocate_buffers(case, allocate)
        pointers = [source.data_ptr(), target.data_ptr()]
        if self._zero_copy:
            to_peer_bytes = (1 - 2 * self._rank) * self._half_bytes
            if case.in_place and case.collective.input_is_chunk:
                to_peer_bytes += (1 - 2 * self._rank) * chunk_bytes
            pointers.insert(1, source.data_ptr() + to_peer_bytes)
        if name == "all_reduce":
            pointers.pop()
        numbers = [chunk_bytes, *[case.dtype == torch.bfloat16] * case.collective.reduces]
        how = "mapped" if self._zero_copy else "staged"
        arguments = [*map(ctypes.c_void_p, pointers), *map(ctypes.c_int64, numbers)]
        call = partial(getattr(self._library, f"bare_{name}_{how}"), *arguments)
        return Prepared((CaseBuffers(case, source, target),), call)

    def _allocate(self, count_elems: int, dtype: torch.dtype) -> torch.Tensor:
        size_bytes = count_elems * dtype.itemsize
        begin = self._rank * self._half_bytes + self._taken_bytes
        self._taken_bytes += _round_up(size_bytes)
        if self._taken_bytes > self._half_bytes:
            raise Unavailable("the bare loop's mapping is too small")
        return self._bytes[begin : begin + size_bytes].view(dtype)


def _compile(setup: PeerSetup) -> ctypes.CDLL:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise RuntimeError("the bare loop needs a C++ compiler (c++, g++ or $CXX)")
    source = Path(__file__).resolve().parent.parent / "bare_loop.cpp"
    if platform.machine() != "x86_64" or not source.exists():
        raise RuntimeError(
            "the bare loop is x86-64 code that is compiled in a source tree of ringcomm: "
            f"this processor is {platform.machine()}, and the loop's source is expected at {source}"
        )
    with tempfile.TemporaryDirectory(prefix="ringcomm-bench-") as directory:
        if setup.rank == 0:
            file, flags = f"{directory}/bare_loop.so", "-std=c++20 -O3 -march=native -shared -fPIC"
            subprocess.run([compiler, *flags.split(), str(source), "-o", file], check=True)
            setup.store.set("bare loop", file)
        library = ctypes.CDLL(setup.store.get("bare loop").decode())
        setup.store.set(f"bare loop {setup.rank}", "loaded")  # loaded: the file may be deleted
        setup.store.wait(["bare loop 0", "bare loop 1"])
    return library


def _round_up(size_bytes: int) -> int:
    return -(-size_bytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
