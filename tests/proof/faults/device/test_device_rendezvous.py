"""A rendezvous that failed between processes leaves nothing."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from ringcomm import Communicator, HeapError
from tests.proof.faults.device.places import (
    DEVICE,
    HEAP_BYTES,
    LONG_S,
    OPTIONS,
    Place,
    error_of,
    until,
)
from tests.proof.faults.device.test_device_processes import is_given_back
from tests.support.ranks import run_ranks


def one_has_no_room(store: Any, rank: int, n: int, kind: str) -> tuple[Any, str]:
    """Rank 1 fails before it hears of anybody's region, and ends; rank 0 lives on."""
    place = Place(kind)
    options = replace(OPTIONS, segment_bytes=HEAP_BYTES) if rank else OPTIONS
    error = error_of(
        lambda: Communicator.from_store(
            store, rank, n, timeout=LONG_S, options=options, device=DEVICE, heap_bytes=HEAP_BYTES
        )
    )
    kind_and_text = type(error), str(error)
    # The traceback holds what the rendezvous had got.
    del error
    if rank == 0:
        until(partial(is_given_back, place))
    else:
        assert is_given_back(place)
    place.close()
    return kind_and_text


def test_a_region_returns_when_the_process_that_failed_has_ended(kind: str) -> None:
    (_, told), (error, text) = run_ranks(one_has_no_room, 2, kind)
    assert error is HeapError
    assert "needs" in text and "rank 1 failed: HeapError" in told
