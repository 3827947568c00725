# SPDX-License-Identifier: Apache-2.0
"""Tests an installed wheel without any other package, not even torch.

Two ranks, which are threads of this process, add numbers of each floating-point dtype with every
instruction set of this processor, and the numbers are quantized in each format. The last line has
checksums of the sums, the averages and the quantized numbers, which must be equal on all machines.
The program imports only the installed package and Python's own library.
"""

from __future__ import annotations

import array
import ctypes
import importlib.metadata
import platform
import random
import struct
import threading
import zlib
from pathlib import Path
from typing import Any

import ringcomm
from ringcomm import _native

ELEMS = 100_003
SETS = ("baseline", "avx2", "avx512")


def connected_pair() -> list[_native.Comm]:
    heap = _native.Heap(64 << 20)
    comms = [_native.Comm(heap, rank, 2, timeout_ms=60_000) for rank in range(2)]
    for comm in comms:
        comm.connect([(heap, peer.region_offset_bytes, 0, peer.proof) for peer in comms])
        comm.publish_members(1)
    for comm in comms:
        comm.activate()
    return comms


def random_inputs() -> list[dict[str, array.array[Any]]]:
    """Returns the same numbers as each dtype, by rank. Arrays of 16-bit floats have their bits."""
    numbers = random.Random(0)
    ranks: list[dict[str, array.array[Any]]] = []
    for _ in range(2):
        wide = array.array("d", (numbers.uniform(-1, 1) for _ in range(ELEMS)))
        single = array.array("f", wide)
        half = array.array("H", struct.pack(f"<{ELEMS}e", *wide))
        # The upper half of a float32's bits, on these machines, which are little-endian.
        upper = array.array("H", single.tobytes())[1::2]
        ranks.append({"float64": wide, "float32": single, "float16": half, "bfloat16": upper})
    return ranks


def sums(comms: list[_native.Comm], dtype: str, op: str, before: int) -> int:
    """Returns the checksum of earlier data and an all-reduce, whose bits both ranks must share."""
    results = [array.array(rank[dtype].typecode, rank[dtype]) for rank in inputs]
    statuses = {}

    def reduce(rank: int) -> None:
        comm = comms[rank]
        comm.turn.acquire(60.0)
        address, algorithm = results[rank].buffer_info()[0], _native.ALGORITHMS["auto"]
        codes = _native.DTYPES[dtype], _native.OPS[op]
        statuses[rank] = comm.all_reduce(address, address, ELEMS, *codes, 1.0, algorithm)
        comm.turn.release()

    threads = [threading.Thread(target=reduce, args=(rank,)) for rank in range(len(comms))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == {0: 0, 1: 0}, statuses
    first, second = (zlib.crc32(values.tobytes(), before) for values in results)
    assert first == second
    return first


def quantized(format: int, before: int) -> int:
    """Returns the checksum of earlier data, numbers in a quantized format, and their sum."""
    float32 = _native.DTYPES["float32"]
    parts = [bytearray(_native.quantized_bytes(format, ELEMS)) for _ in inputs]
    addresses = [(ctypes.c_char * len(part)).from_buffer(part) for part in parts]
    pointers = [ctypes.addressof(address) for address in addresses]
    for rank, pointer in zip(inputs, pointers, strict=True):
        source = rank["float32"].buffer_info()[0]
        _native.quantize(format, source, float32, pointer, ELEMS)
    total = array.array("f", bytes(4 * ELEMS))
    _native.dequantize_and_sum(format, pointers, total.buffer_info()[0], float32, ELEMS)
    for part in parts:
        before = zlib.crc32(part, before)
    return zlib.crc32(total.tobytes(), before)


def file_checksum() -> int:
    """Returns the CRC-32C of the numbers, by each implementation; checks CRC-32 with zlib's."""
    data = inputs[0]["float64"]
    address, size = data.buffer_info()[0], len(data.tobytes())
    checksums = {_native.crc32c(address, size, way) for way in _native.crc32c_ways()}
    assert len(checksums) == 1, f"implementations of CRC-32C differ: {checksums}"
    assert _native.crc32(address, size) == zlib.crc32(data.tobytes())
    return checksums.pop()


def all_checksums(comms: list[_native.Comm]) -> tuple[int, ...]:
    """Returns the checksums of the sums, the averages, and the quantized numbers."""
    reduced = []
    for op in ("SUM", "AVG"):
        checksum = 0
        for dtype in inputs[0]:
            checksum = sums(comms, dtype, op, checksum)
        reduced.append(checksum)
    codecs = file_checksum()
    for format in _native.QUANT_FORMATS.values():
        codecs = quantized(format, codecs)
    return *reduced, codecs


def sets_of_processor() -> list[str]:
    """Returns the instruction sets that the system reports for this processor."""
    flags = Path("/proc/cpuinfo").read_text().split() if platform.machine() == "x86_64" else []
    needs: dict[str, set[str]] = {
        "baseline": set(),
        "avx2": {"avx2"},
        "avx512": {"avx512bw", "avx512vl"},
    }
    return [name for name in SETS if needs[name] <= set(flags)]


inputs = random_inputs()
comms = connected_pair()
tried = [name for name in SETS if _native.force_isa(name)]
assert tried == sets_of_processor(), f"uses {tried} of {sets_of_processor()}"
found = set()
for name in tried:
    assert _native.force_isa(name)
    found.add(all_checksums(comms))
assert len(found) == 1, f"instruction sets give different bits: {found}"
assert ringcomm.__version__ == importlib.metadata.version("ringcomm")
print(ringcomm.__version__, *tried)
print(*(f"{checksum:08x}" for checksum in found.pop()))
