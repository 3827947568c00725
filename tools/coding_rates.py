"""Rates at which one core codes numbers for a coded wire and adds decoded ones, beside memcpy's.

    python -m tools.coding_rates --elems 4M

Every round has one copy of the numbers by memcpy, and for each wire one coding, and one sum of what
was coded; then the next round. A ratio is taken within its round: the time of the copy over that of
the call, so that 1 is as fast as memcpy. The numbers should be too many for the caches.
``--coding-gbps`` of ``ringcomm estimate`` wants the rates.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ringcomm import _native
from ringcomm.bench.options import parse_size

_FLOAT32 = _native.DTYPES["float32"]
CODING, ADDING, IN_TURN = "code", "decode and add", "one, then the other"


@dataclass(frozen=True)
class CodingRate:
    """What one wire's calls took in all rounds.

    Attributes:
        gbps: 10^9 bytes of FP32 numbers a second, the median.
        ratios: memcpy's time over the call's, by round.
    """

    wire: str
    what: str
    gbps: float
    ratios: tuple[float, ...]


def _seconds(call: Callable[..., object], *arguments: object) -> float:
    begin = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - begin


def time_coding(elems: int, rounds: int) -> list[CodingRate]:
    """Times each wire on ``elems`` FP32 numbers, in ``rounds`` rounds after one to warm up."""
    numbers = torch.randn(elems, generator=torch.Generator(device="cpu").manual_seed(0))
    sums, size_bytes = torch.zeros(elems), 4 * elems
    in_ptr, out_ptr = numbers.data_ptr(), sums.data_ptr()
    room = {
        wire: torch.zeros(_native.wire_bytes(code, elems), dtype=torch.uint8)
        for wire, code in _native.WIRES.items()
    }
    took: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for _ in range(1 + rounds):
        copy = _seconds(ctypes.memmove, out_ptr, in_ptr, size_bytes)
        for wire, codes in room.items():
            code, ptr = _native.WIRES[wire], codes.data_ptr()
            coded = _seconds(_native.encode_wire, code, in_ptr, _FLOAT32, ptr, elems)
            added = _seconds(_native.sum_wires, code, [ptr], out_ptr, _FLOAT32, elems)
            for what, took_s in (CODING, coded), (ADDING, added), (IN_TURN, coded + added):
                took.setdefault((wire, what), []).append((took_s, copy / took_s))
    return [
        CodingRate(
            wire,
            what,
            size_bytes / statistics.median(took_s for took_s, _ in each[1:]) / 1e9,
            tuple(ratio for _, ratio in each[1:]),
        )
        for (wire, what), each in took.items()
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the rates of each wire with each instruction set that was asked for."""
    parser = argparse.ArgumentParser(prog="python -m tools.coding_rates", description=__doc__)
    parser.add_argument("--elems", type=parse_size, default=4 << 20, help="FP32 numbers (4M)")
    parser.add_argument("-n", "--rounds", type=int, default=15)
    parser.add_argument("--isa", nargs="+", default=[_native.isa()], help="instruction sets")
    options = parser.parse_args(argv)
    if options.elems < 1 or options.rounds < 2:
        parser.error("expected --elems of 1 or more, and --rounds of 2 or more")
    print(f"{'isa':9} {'wire':5} {'':20} {'GB/s':>6} {'of memcpy':>9} {'low':>6} {'high':>6}")
    try:
        for isa in options.isa:
            if not _native.force_isa(isa):
                parser.error(f"--isa: {isa!r} is no instruction set of this processor")
            for rate in time_coding(options.elems, options.rounds):
                low, middle, high = statistics.quantiles(rate.ratios, n=4)
                print(
                    f"{isa:9} {rate.wire:5} {rate.what:20} {rate.gbps:6.2f} {middle:9.2f} "
                    f"{low:6.2f} {high:6.2f}"
                )
    finally:
        _native.force_isa("")


if __name__ == "__main__":
    main()
