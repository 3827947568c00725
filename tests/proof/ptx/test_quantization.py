# SPDX-License-Identifier: Apache-2.0
"""The PTX of the quantization kernels, executed, has the host's bits; its mutants do not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ringcomm import _native
from tests import ptx_interpreter as ptx
from tests.proof.ptx.lone_kernels import check, check_seen, lone_device
from tests.proof.ptx.small_jobs import SLIPS
from tests.support import nvrtc
from tests.support.covering import covering
from tests.support.device_worlds import Devices
from tests.support.emulator.library import COMPILER
from tests.support.quantization_checks import CASES, DTYPES, QuantizationEnd, each_difference

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(nvrtc.library_path() is None, reason=nvrtc.NEEDS_NVRTC),
    pytest.mark.skipif(COMPILER is None, reason="the emulator needs a C++ compiler"),
]

QUANT_FORMATS = ("int8", "fp8", "int4")
# More numbers than one block of the grid handles, so the grid has two blocks.
TWO_BLOCKS = ((8_500, 0),)


@pytest.fixture(scope="module")
def devices() -> Iterator[Devices]:
    with lone_device() as made:
        yield made


def quantization_end(devices: Devices, native: _native.DeviceComm) -> QuantizationEnd:
    def to_device(tensor: torch.Tensor) -> torch.Tensor:
        ptx.allow(tensor)
        return tensor

    def to_host(tensor: torch.Tensor) -> torch.Tensor:
        devices.runtime.synchronize(0)
        return tensor

    return QuantizationEnd(native.quantize, native.dequantize_and_sum, to_device, to_host)


@covering(strength=1, quant_format=QUANT_FORMATS, dtype=DTYPES)
def test_the_bits_are_the_hosts(devices: Devices, quant_format: str, dtype: torch.dtype) -> None:
    cases = CASES + (TWO_BLOCKS if dtype == torch.float32 else ())
    check(
        devices,
        lambda end: each_difference(quantization_end(devices, end), quant_format, dtype, cases),
    )


# Patterns of the text, and their replacements.
MUTANTS = {
    **{name: SLIPS[name] for name in ("too few lanes at a shuffle", "another lane of a shuffle")},
    "another operand of a store": SLIPS["a store's other operand"],
    "values one higher": (r"(add\.rn\.f32\s.*)0f4B400000;", r"\g<1>0f4B400001;"),
    "no reciprocal": (r"rcp\.rn\.f32", "mov.f32"),
    "infinities as numbers": (r"(and\.b32\s.*), 8388608;", r"\1, 0;"),
    "tiny numbers as others": (
        r"0f5F800000, 0f3F800000|0f3F800000, 0f5F800000",
        "0f3F800000, 0f3F800000",
    ),
    "no division": (r"(div\.rn\.f32\s+%f\d+, %f\d+), %f\d+;", r"\1, 0f3F800000;"),
    "sums of the last alone": (r"add\.rn\.f32(\s+%f\d+, )%f\d+, (%f\d+);", r"mov.f32\1\2;"),
    "another byte of a scale": (r"(ld\.u8\s+%\w+, \[%rd\d+\+)2\]", r"\g<1>1]"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_seen(devices: Devices, mutant: str) -> None:
    def found(end: _native.DeviceComm) -> Iterator[str]:
        return each_difference(quantization_end(devices, end), "int8", torch.float32)

    check_seen(devices, "quantize_int8/float32", MUTANTS[mutant], found)
