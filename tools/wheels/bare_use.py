"""Tests an installed wheel without any other package, not even torch.

Two ranks, which are threads of this process, add numbers with every instruction set of this
processor. The last line is a checksum of the sums, which must be equal on all machines. The program
imports only the installed package and Python's own library.
"""

import array
import importlib.metadata
import platform
import random
import threading
import zlib
from pathlib import Path

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


def sums(comms: list[_native.Comm], op: str) -> int:
    """Returns the checksum of an all-reduce, which must be equal on both ranks."""
    numbers = random.Random(0)
    inputs = [array.array("f", [numbers.uniform(-1, 1) for _ in range(ELEMS)]) for _ in comms]
    results = [array.array("f", bytes(4 * ELEMS)) for _ in comms]
    statuses = {}

    def reduce(rank: int) -> None:
        comm = comms[rank]
        comm.turn.acquire(60.0)
        source, target = (values[rank].buffer_info()[0] for values in (inputs, results))
        code = _native.OPS[op]
        statuses[rank] = comm.all_reduce(
            source, target, ELEMS, _native.DTYPES["float32"], code, 1.0, _native.ALGORITHMS["auto"]
        )
        comm.turn.release()

    threads = [threading.Thread(target=reduce, args=(rank,)) for rank in range(len(comms))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == {0: 0, 1: 0}, statuses
    first, second = (zlib.crc32(values.tobytes()) for values in results)
    assert first == second
    return first


def sets_of_processor() -> list[str]:
    """Returns the instruction sets that the system reports for this processor."""
    flags = Path("/proc/cpuinfo").read_text().split() if platform.machine() == "x86_64" else []
    needs: dict[str, set[str]] = {
        "baseline": set(),
        "avx2": {"avx2"},
        "avx512": {"avx512bw", "avx512vl"},
    }
    return [name for name in SETS if needs[name] <= set(flags)]


comms = connected_pair()
tried = [name for name in SETS if _native.force_isa(name)]
assert tried == sets_of_processor(), f"uses {tried} of {sets_of_processor()}"
found = set()
for name in tried:
    assert _native.force_isa(name)
    found.add((sums(comms, "SUM"), sums(comms, "AVG")))
assert len(found) == 1, f"instruction sets give different bits: {found}"
assert ringcomm.__version__ == importlib.metadata.version("ringcomm")
print(ringcomm.__version__, *tried)
print(*(f"{checksum:08x}" for checksum in found.pop()))
