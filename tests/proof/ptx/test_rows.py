# SPDX-License-Identifier: Apache-2.0
"""The PTX of the row kernels, executed, gives the host's copies, sums and products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

from ringcomm import _native
from ringcomm.comm.host.arguments import DTYPE_CODES
from tests import ptx_interpreter as ptx
from tests.proof.ptx.lone_kernels import check, check_seen, lone_device
from tests.proof.ptx.small_jobs import SLIPS
from tests.support import nvrtc
from tests.support.device_worlds import Devices
from tests.support.emulator.library import COMPILER

Tensor = torch.Tensor

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(nvrtc.library_path() is None, reason=nvrtc.NEEDS_NVRTC),
    pytest.mark.skipif(COMPILER is None, reason="the emulator needs a C++ compiler"),
]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GUARD = 0xA5
RANKS, TOKENS, K = 3, 11, 3
# Numbers per row: fewer than the 64 partial sums of a scalar product, rows that are not aligned to
# 16 bytes, and more than a turn of a warp (1024 numbers of 2 bytes).
SIZES = (8, 37, 1104)


class Rows(NamedTuple):
    """Rows of several ranks, and a table of entries; some entries name no row."""

    of_ranks: list[Tensor]
    entries: Tensor  # int64 [TOKENS, K, 2]
    weights: Tensor
    with_: Tensor  # [TOKENS, numbers]


@pytest.fixture(scope="module")
def devices() -> Iterator[Devices]:
    with lone_device() as made:
        yield made


def rows_of(elems: int, dtype: torch.dtype) -> Rows:
    seed = torch.Generator().manual_seed(elems)
    of_ranks = [torch.randn(7 + rank, elems, generator=seed).to(dtype) for rank in range(RANKS)]
    ranks = torch.randint(-1, RANKS, (TOKENS, K), generator=seed)
    # A token without rows, and a token with a single row.
    ranks[4], ranks[5] = -1, torch.tensor([-1, 2, -1])
    at = torch.randint(0, 7, (TOKENS, K), generator=seed)
    weights = torch.randn(TOKENS, K, generator=seed)
    with_ = torch.randn(TOKENS, elems, generator=seed).to(dtype)
    return Rows(of_ranks, torch.stack([ranks, at], -1), weights, with_)


class Made(NamedTuple):
    """The results of the calls, with guard bytes behind each."""

    copies: Tensor
    words: Tensor
    sums: Tensor
    plain_sums: Tensor
    products: Tensor
    dots: Tensor


def results(end: Any, rows: Rows, dtype: torch.dtype, use: Callable[[Tensor], Tensor]) -> Made:
    """Lets ``end`` (the native module or a device's end) copy, sum and scale the rows."""
    elems, row_bytes = rows.with_.size(1), rows.with_[0].nbytes
    of_ranks, with_ = [use(each) for each in rows.of_ranks], use(rows.with_)
    entries, weights = use(rows.entries), use(rows.weights)
    # A table of sources; the first two words of each are an entry.
    sources = use(torch.cat([rows.entries, rows.entries], -1)[:, 0].contiguous())
    ptrs = [each.data_ptr() for each in of_ranks]

    def room(count: int, of_bytes: int) -> Tensor:
        return use(torch.full((count * of_bytes + 16,), GUARD, dtype=torch.uint8))

    count, code = TOKENS * K, DTYPE_CODES[dtype]
    made = Made(
        copies=room(count, row_bytes),
        words=room(count, 8),
        sums=room(TOKENS, row_bytes),
        plain_sums=room(TOKENS, row_bytes),
        products=room(TOKENS, row_bytes),
        dots=room(TOKENS, 4),
    )
    end.copy_rows(entries.data_ptr(), 2, count, ptrs, row_bytes, made.copies.data_ptr())
    end.copy_rows(entries.data_ptr(), 2, count, ptrs, 8, made.words.data_ptr())
    for by, out in ((weights.data_ptr(), made.sums), (0, made.plain_sums)):
        end.sum_rows(entries.data_ptr(), ptrs, TOKENS, K, by, code, elems, out.data_ptr())
    end.scale_rows(
        *(sources.data_ptr(), TOKENS, ptrs, weights.data_ptr(), with_.data_ptr(), code, elems),
        *(made.products.data_ptr(), made.dots.data_ptr()),
    )
    return made


def differences(devices: Devices, end: _native.DeviceComm, dtype: torch.dtype) -> Iterator[str]:
    """Yields the results in which the end differs from the host."""
    kept = []

    def allowed(tensor: Tensor) -> Tensor:
        kept.append(tensor.clone())  # keeps it until the kernels have ended
        ptx.allow(kept[-1])
        return kept[-1]

    for elems in SIZES:
        rows = rows_of(elems, dtype)
        wanted = results(_native, rows, dtype, lambda tensor: tensor)
        made = results(end, rows, dtype, allowed)
        devices.runtime.synchronize(0)
        for name, mine, theirs in zip(Made._fields, made, wanted, strict=True):
            if not torch.equal(mine, theirs):
                yield f"{name} of rows of {elems}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bits_are_the_hosts(devices: Devices, dtype: torch.dtype) -> None:
    check(devices, lambda end: differences(devices, end, dtype))


# Patterns of the text, and their replacements.
MUTANTS = {
    **{name: SLIPS[name] for name in ("too few lanes at a shuffle", "another lane of a shuffle")},
    "another operand of a store": SLIPS["a store's other operand"],
    "a vector a word too far": SLIPS["a vector a word too far"],
    "no row where there is none": (r"setp\.(lt|gt)\.s64", r"setp.eq.s64"),
    "sums of the last alone": (r"add\.rn\.f32(\s+%f\d+, )%f\d+, (%f\d+);", r"mov.f32\1\2;"),
    "no weights": (r"mul\.rn\.f32(\s+%f\d+, )(%f\d+), %f\d+;", r"mov.f32\1\2;"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_seen(devices: Devices, mutant: str) -> None:
    def found(end: _native.DeviceComm) -> Iterator[str]:
        return differences(devices, end, torch.float32)

    check_seen(devices, "rows", MUTANTS[mutant], found)
