# SPDX-License-Identifier: Apache-2.0
"""Quantization on a device has the host's bits; on a GPU its rate is recorded, and a copy's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import ringcomm
from ringcomm import Communicator, _native
from ringcomm.comm.host.arguments import DTYPE_CODES
from ringcomm.comm.host.engine import Call
from ringcomm.comm.nodes.calls import Span
from ringcomm.comm.nodes.device_core import DeviceQuantizer, size_bytes
from tests.gpu.device import PLAIN, REAL, synchronize
from tests.gpu.worlds import one_launch_world
from tests.support.covering import covering
from tests.support.quantization_checks import DTYPES, QuantizationEnd, differences, numbers_of

QUANT_FORMATS = ("int8", "fp8", "int4")
FLOAT32 = DTYPE_CODES[torch.float32]
# Larger than the caches of a GPU. An emulated device has no rates, so one block is enough there.
RATE_ELEMS, ROUNDS = (1 << 28, 20) if REAL else (300, 1)
SOURCES = 4


@pytest.fixture(scope="module")
def comm(device: None) -> Any:
    with one_launch_world(1) as world:
        yield world[0]


def enqueue_of(comm: Communicator) -> Callable[..., None]:
    """Returns a function that enqueues a native call, as a communicator over nodes does."""

    def enqueue(name: str, *args: Any) -> None:
        comm.engine.start_call(Call(name, lambda end: getattr(end, name)(*args), []))

    return enqueue


def end_of(comm: Communicator) -> QuantizationEnd:
    enqueue = enqueue_of(comm)

    def quantize(*args: Any) -> None:
        enqueue("quantize", *args)

    def sum_up(*args: Any) -> None:
        enqueue("dequantize_and_sum", *args)

    def to_host(tensor: torch.Tensor) -> torch.Tensor:
        synchronize()
        return tensor.cpu()

    return QuantizationEnd(quantize, sum_up, lambda tensor: tensor.to(PLAIN), to_host)


@covering(strength=1, quant_format=QUANT_FORMATS, dtype=DTYPES)
def test_the_bits_are_the_hosts(comm: Communicator, quant_format: str, dtype: torch.dtype) -> None:
    assert differences(end_of(comm), quant_format, dtype) == []


def test_what_cannot_be_quantized_is_refused(comm: Communicator) -> None:
    enqueue, x = enqueue_of(comm), torch.ones(4, device=PLAIN)
    for words, name, args in (
        (
            "no such format",
            "quantize",
            (len(QUANT_FORMATS), x.data_ptr(), FLOAT32, x.data_ptr(), 4),
        ),
        ("expected float32", "quantize", (0, x.data_ptr(), 0, x.data_ptr(), 4)),
        (
            "one source or more",
            "dequantize_and_sum",
            (0, x.data_ptr(), 0, 4, x.data_ptr(), FLOAT32, 4),
        ),
    ):
        with pytest.raises(ringcomm.ArgumentError, match=words):
            enqueue(name, *args)


def test_rates(comm: Communicator, record_property: Callable[[str, object], None]) -> None:
    """Records the rates of the kernels in bytes per second, and that of a copy of the numbers."""
    enqueue = enqueue_of(comm)
    quantizer = DeviceQuantizer(
        enqueue, lambda size: torch.empty(size, dtype=torch.uint8, device=PLAIN)
    )
    numbers = numbers_of(2432, torch.float32).repeat(-(-RATE_ELEMS // 2432))[:RATE_ELEMS].to(PLAIN)
    out = torch.empty_like(numbers)
    span = Span(out.data_ptr(), out.numel())
    figures: dict[str, tuple[int, Callable[[], object]]] = {
        "copy": (2 * numbers.nbytes, lambda: out.copy_(numbers))
    }
    for quant_format in QUANT_FORMATS:
        quantized = quantizer.quantize(quant_format, [numbers])
        runs = quantized.repeat(SOURCES)
        quantized_bytes = size_bytes(quant_format, RATE_ELEMS)

        def quantize(quant_format: str = quant_format, quantized: torch.Tensor = quantized) -> None:
            given = (numbers.data_ptr(), FLOAT32, quantized.data_ptr(), RATE_ELEMS)
            enqueue("quantize", _native.QUANT_FORMATS[quant_format], *given)

        def add_up(quant_format: str = quant_format, runs: torch.Tensor = runs) -> None:
            quantizer.add_up(quant_format, runs, SOURCES, span, FLOAT32)

        figures[f"quantize {quant_format}"] = (numbers.nbytes + quantized_bytes, quantize)
        figures[f"sum of {SOURCES} in {quant_format}"] = (
            SOURCES * quantized_bytes + out.nbytes,
            add_up,
        )
    for name, (moved_bytes, call) in figures.items():
        call()
        synchronize()
        if REAL:
            record_property(f"GB/s, {name}", f"{moved_bytes / seconds_of(call) / 1e9:.0f}")
    # The last call summed four int4 runs of the same numbers.
    one = torch.empty_like(numbers)
    quantizer.add_up("int4", runs, 1, Span(one.data_ptr(), one.numel()), FLOAT32)
    synchronize()
    finite = one.isfinite() & (one.abs() < 1e37)
    assert torch.equal(out[finite], 4 * one[finite])


def seconds_of(call: Callable[[], object]) -> float:
    """Returns the shortest of some rounds, by the device's clock."""
    taken = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) / 1e3)
    return min(taken)
