# SPDX-License-Identifier: Apache-2.0
"""Checks that a device quantizes, dequantizes and sums as the host does, to the ends of runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ringcomm import _native
from ringcomm.comm.host.arguments import DTYPE_CODES
from tests.comm.test_quantization import blocks_of_all_kinds, quantize, total

Tensor = torch.Tensor
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# (numbers in a run, offset of its start from any alignment in elements, or in bytes for quantized
# values). They include all kinds of whole blocks, consecutive blocks, and partial blocks.
CASES = ((64, 0), (301, 1), (255, 0), (191, 1), (2, 0), (1, 1), (2432, 0))
_GUARD = 0xA5


@dataclass(frozen=True)
class QuantizationEnd:
    """The quantization functions of a device.

    Attributes:
        quantize, sum: ``quantize`` and ``dequantize_and_sum`` of the native device communicator.
        to_device: copies a host tensor to the device, where kernels may use it.
        to_host: copies a tensor back once all calls are done.
    """

    quantize: Callable[..., object]
    sum: Callable[..., object]
    to_device: Callable[[Tensor], Tensor]
    to_host: Callable[[Tensor], Tensor]


def numbers_of(elems: int, dtype: torch.dtype) -> Tensor:
    """Returns ``elems`` numbers: blocks of all kinds, repeated."""
    kinds = blocks_of_all_kinds().flatten()
    return kinds.repeat(-(-elems // kinds.numel()))[:elems].to(dtype)


def differences(
    end: QuantizationEnd,
    quant_format: str,
    dtype: torch.dtype,
    cases: Sequence[tuple[int, int]] = CASES,
) -> list[str]:
    """Returns how the device's results differ from the host's."""
    return list(each_difference(end, quant_format, dtype, cases))


def each_difference(
    end: QuantizationEnd,
    quant_format: str,
    dtype: torch.dtype,
    cases: Sequence[tuple[int, int]] = CASES,
) -> Iterator[str]:
    """Yields how the device's results differ from the host's; computes only as far as needed."""
    for elems, skip in cases:
        numbers = numbers_of(elems, dtype)
        for wrong in (_wrong_values, _wrong_sums):
            for what in wrong(end, quant_format, numbers, skip):
                yield f"{what} of {elems} numbers, {skip} off"


def _wrong_values(
    end: QuantizationEnd, quant_format: str, numbers: Tensor, skip: int
) -> Iterator[str]:
    wanted, elems = quantize(quant_format, numbers), numbers.numel()
    given = end.to_device(torch.cat([numbers[:skip], numbers]))[skip:]
    room = end.to_device(torch.full((skip + wanted.numel() + 16,), _GUARD, dtype=torch.uint8))
    code, dtype = _native.QUANT_FORMATS[quant_format], DTYPE_CODES[numbers.dtype]
    end.quantize(code, given.data_ptr(), dtype, room[skip:].data_ptr(), elems)
    found = end.to_host(room)
    inside = found[skip : skip + wanted.numel()]
    if not torch.equal(inside, wanted):
        yield "values"
    if int(found.int().sum() - inside.int().sum()) != _GUARD * (skip + 16):
        yield "what lies beside the values"


def _wrong_sums(
    end: QuantizationEnd, quant_format: str, numbers: Tensor, skip: int
) -> Iterator[str]:
    elems, dtype = numbers.numel(), DTYPE_CODES[numbers.dtype]
    runs = [quantize(quant_format, each) for each in (numbers, numbers.flip(0), numbers * 0.75)]
    stride = runs[0].numel() + (-runs[0].numel() % 16 if skip == 0 else 0)
    padded = [torch.nn.functional.pad(run, (0, stride - run.numel())) for run in runs]
    quantized = end.to_device(torch.cat([padded[0][:skip], *padded]))[skip:]
    for count, divide_by in ((1, 0), (3, 5)):
        wanted = total(quant_format, runs[:count], elems, numbers.dtype, divide_by)
        room = end.to_device(torch.full((skip + elems + 4,), 77.0, dtype=numbers.dtype))
        given = (quantized.data_ptr(), count, stride, room[skip:].data_ptr())
        end.sum(_native.QUANT_FORMATS[quant_format], *given, dtype, elems, divide_by)
        found = end.to_host(room)
        if not _alike(found[skip : skip + elems], wanted):
            yield f"the sum of {count} by {divide_by}"
        if not (found[:skip].eq(77).all() and found[skip + elems :].eq(77).all()):
            yield "what lies beside the sum"


def _alike(found: Tensor, wanted: Tensor) -> bool:
    """True if the bits are equal, or both are NaN: the payload of a NaN depends on the machine."""
    bits = {4: torch.int32, 2: torch.int16}[found.element_size()]
    both_nan = found.isnan() & wanted.isnan()
    return bool(((found.view(bits) == wanted.view(bits)) | both_nan).all())
