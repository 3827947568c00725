# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels refuse a damaged header in the same way as the native kernels."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch

from ringcomm import CorruptedError, MismatchError, RingcommError, _native
from tests.support.forgery import SHARED, header, heap_end, publish
from tests.tl.interpreter import connect, run_ranks

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")

SIZE = 256
SEGMENT = 4096
CASES: dict[str, tuple[dict[str, Any], type | None]] = {
    "sound": ({"item_bytes": SEGMENT}, None),
    "size of items": ({"item_bytes": 64}, CorruptedError),
    "behind the heap": ({"item_bytes": SIZE, "heap_offset": "end"}, CorruptedError),
    "half behind the heap": ({"item_bytes": SIZE, "heap_offset": "end - 4"}, CorruptedError),
    "before the heap": ({"item_bytes": SIZE, "heap_offset": 2**64 - 4096}, CorruptedError),
    "far away": ({"item_bytes": SIZE, "heap_offset": 2**62}, CorruptedError),
    "another size": ({"item_bytes": SEGMENT, "stream_bytes": SIZE + 4}, MismatchError),
}


def _reads(store, rank, world):
    """Returns rank 0's error for each damage, each in a communicator of its own."""
    ends = {"end": heap_end(), "end - 4": heap_end() - 4}
    found: dict[str, Any] = {}
    for number, (name, (changes, _)) in enumerate(CASES.items()):
        comm = connect(store, rank, world, name=f"n{number}")
        if rank == 1:
            values = {field: ends.get(value, value) for field, value in changes.items()}
            call = {"kernels": 1, **values}
            all_gather = _native.COLLECTIVES["all_gather"]
            publish(comm, 0, SHARED, header(all_gather, "float32", SIZE, 2 * SIZE, **call))
        else:
            found[name] = None
            try:
                comm.all_gather_into_tensor(torch.empty(SIZE // 2), torch.ones(SIZE // 4))
            except RingcommError as error:
                found[name] = type(error), str(error)
            comm.abort("done")
        store.set(f"{number}/{rank}", "done")
        store.get(f"{number}/{1 - rank}")
        comm.close()
    return found


def test_what_leads_outside_is_refused():
    found, _ = run_ranks(_reads, 2)
    for name, (_, kind) in CASES.items():
        if kind is None:
            assert found[name] is None, found[name]
        else:
            assert found[name][0] is kind, (name, found[name])
            assert "ank 1" in found[name][1]
