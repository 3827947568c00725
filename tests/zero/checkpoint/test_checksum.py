# SPDX-License-Identifier: Apache-2.0
"""Checkpoint checksums equal zlib's, by each implementation of this CPU and with any threads."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator

import pytest
import torch

from ringcomm import _native
from tests.comm.test_threads import threads_of_local_calls

PART = 512 << 10  # kPartBytes
BYTES = random.Random(1).randbytes(5 * PART + 99)


@pytest.fixture(scope="module")
def memory() -> torch.Tensor:
    return torch.frombuffer(bytearray(BYTES), dtype=torch.uint8)


@pytest.fixture
def workers() -> Iterator[None]:
    _native.wake_workers(True)
    yield
    _native.wake_workers(False)


@pytest.mark.parametrize("way", _native.crc32_ways())
def test_every_way_has_zlibs_sum(way: str, memory: torch.Tensor) -> None:
    """Lengths around 16-byte blocks and four-block turns, at any alignment, match zlib."""
    known = torch.frombuffer(bytearray(b"123456789"), dtype=torch.uint8)
    assert _native.crc32_by(way, known.data_ptr(), 9) == 0xCBF43926
    for length in (*range(150), 4095, 4096, 4097, PART + 1):
        for start, before in ((0, 0), (1, 0x12345678), (7, 0xFFFFFFFF)):
            wanted = zlib.crc32(BYTES[start : start + length], before)
            seen = _native.crc32_by(way, memory.data_ptr() + start, length, before)
            assert seen == wanted, (length, start)


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("threads", [1, 2, 3, 5, 8])
def test_any_number_of_threads_has_zlibs_sum(threads: int, memory: torch.Tensor) -> None:
    borders = [part * PART + more for part in range(1, 6) for more in (-1, 0, 1, 99)]
    with threads_of_local_calls(threads):
        for length in (0, 1, *borders):
            for start, before in ((0, 0), (0, 0x12345678), (3, 0)):
                content = BYTES[start:][:length]
                seen = _native.crc32(memory.data_ptr() + start, len(content), before)
                assert seen == zlib.crc32(content, before), (length, start, before)


def test_the_sum_of_two_parts_follows_from_theirs_and_the_second_length() -> None:
    drawn = random.Random(2)
    for _ in range(200):
        a, b = (BYTES[: drawn.choice((0, 1, 5, 64, drawn.randrange(PART)))] for _ in range(2))
        sums, whole = (zlib.crc32(a), zlib.crc32(b)), zlib.crc32(a + b)
        assert _native.combined_crc32(*sums, len(b)) == whole
        if a:  # the checksum of no bytes is 0, whatever bytes follow
            assert _native.combined_crc32(*sums, len(b) + 1) != whole
    # Lengths too long to compute in a test: 2^32 - 1 zero bits leave a checksum unchanged.
    assert _native.combined_crc32(0xCBF43926, 0, 2**32 - 1) == 0xCBF43926
    assert _native.combined_crc32(0xCBF43926, 0, 2**40) == _native.combined_crc32(
        _native.combined_crc32(0xCBF43926, 0, 2**39), 0, 2**39
    )
