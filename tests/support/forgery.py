# SPDX-License-Identifier: Apache-2.0
"""A rank that sends its peers data that no rank of ringcomm sends; the peers must notice."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from typing import Any

from ringcomm import Communicator, _native
from ringcomm.memory.host_heap import process_heap

HEADER = struct.Struct("<QQIiiiIIQQQdQQ")
FIELDS = (
    "sequence",
    "match_bytes",
    "collective",
    "dtype",
    "redop",
    "root",
    "algorithm",
    "kernels",
    "stream_bytes",
    "item_bytes",
    "heap_offset",
    "factor",
    "result_offset",
    "process_ptr",
)
NOT_IN_HEAP = 2**64 - 1
PAIR, SHARED, MESSAGE = 0, 1, 2
SEND = 10


@dataclass(frozen=True)
class Region:
    """One rank's region, mapped in this process."""

    base_ptr: int
    sizes: tuple[int, int, int, int]

    @classmethod
    def of(cls, comm: Communicator, rank: int | None = None) -> Region:
        """Returns the region of ``rank`` (default: the communicator's own) of ``comm``."""
        core: Any = comm.engine.core
        table = core.rank_table(0)
        offset = _native.STRUCTURES["table.regions"] + 8 * (comm.rank if rank is None else rank)
        (base_ptr,) = struct.unpack_from("<Q", table, offset)
        return cls(base_ptr, (comm.world_size, 1, core.slots, core.segment_bytes))

    def offset(self, what: str, stream: int, peer: int) -> int:
        return _native.layout_offset(self.sizes, what, stream, 0, peer)

    def write(self, offset: int, raw: bytes) -> None:
        ctypes.memmove(self.base_ptr + offset, raw, len(raw))

    def read(self, offset: int, size: int) -> bytes:
        return ctypes.string_at(self.base_ptr + offset, size)


def header(
    collective: int, dtype: str, size_bytes: int, match_bytes: int, /, **changes: Any
) -> bytes:
    """Returns the staged header of a communicator's first call, with ``changes``."""
    values: dict[str, Any] = dict.fromkeys(FIELDS, 0)
    values |= {
        "sequence": 1,
        "match_bytes": match_bytes,
        "collective": collective,
        "dtype": _native.DTYPES[dtype],
        "redop": -1,
        "root": -1,
        "algorithm": 1,
        "stream_bytes": size_bytes,
        "heap_offset": NOT_IN_HEAP,
        "factor": 1.0,
        "result_offset": NOT_IN_HEAP,
        **changes,
    }
    return HEADER.pack(*(values[name] for name in FIELDS))


def publish(comm: Communicator, reader: int, stream: int, raw: bytes) -> None:
    """Makes ``raw`` the header of this rank's first item for ``reader``, and publishes it."""
    theirs = Region.of(comm, reader)
    theirs.write(theirs.offset("header", stream, comm.rank), raw)
    theirs.write(theirs.offset("signal", stream, comm.rank), struct.pack("<I", 1))


def heap_end() -> int:
    """Returns the size of this process's heap, which is the first offset after its end."""
    return process_heap().capacity_bytes
