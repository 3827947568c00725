# SPDX-License-Identifier: Apache-2.0
"""Quantization by Triton's functions, in the interpreter, has the host's bits."""

import itertools
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from tests.support.memories import below_2_gib, needs_low_addresses
from tests.support.quantization_checks import QuantizationEnd, differences
from tests.tl.interpreter import run_ranks

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")

QUANT_FORMATS = ("int8", "fp8", "int4")
BLOCKS = 8
# Blocks of all kinds, for the dtype that has them; and all kinds of ends, aligned and not.
CASES = {
    torch.float32: ((2432, 0), (191, 1), (2, 0)),
    torch.bfloat16: ((301, 0), (255, 1)),
    torch.float16: ((640, 0), (64, 1)),
}


def quantization_end():
    """Returns Triton's kernels that quantize and sum, wherever their launches run."""
    from ringcomm import _native
    from ringcomm._tl.launch import DTYPES
    from tests.tl.kernels import dequantize_and_sum_kernel, quantize_kernel

    formats = {code: quant_format for quant_format, code in _native.QUANT_FORMATS.items()}
    types = {_native.DTYPES[name]: dtype for name, dtype in DTYPES.items()}

    def programs(elems):
        return (-(-elems // (BLOCKS * 128)),)

    def quantize(quant_format, source, dtype, out, elems):
        how = {"DTYPE": types[dtype], "BLOCKS": BLOCKS, "FORMAT": formats[quant_format]}
        quantize_kernel[programs(elems)](out, source, elems, **how)

    def sum_up(quant_format, source, count, stride, out, *rest):
        dtype, elems, divide_by = rest
        how = {"DTYPE": types[dtype], "BLOCKS": BLOCKS, "FORMAT": formats[quant_format]}
        dequantize_and_sum_kernel[programs(elems)](
            out, source, elems, stride, COUNT=count, DIVISOR=max(divide_by, 1), **how
        )

    return QuantizationEnd(quantize, sum_up, lambda tensor: tensor, lambda tensor: tensor)


def _all(store, rank, world):
    end = quantization_end()
    found = {}
    for quant_format, (dtype, cases) in itertools.product(QUANT_FORMATS, CASES.items()):
        found[f"{quant_format} {dtype}"] = differences(end, quant_format, dtype, cases)
    # A mutant is seen.
    from ringcomm._tl import quantization

    vars(quantization)["_product"] = lambda a, b: a + b
    found["mutant"] = differences(end, "int8", torch.float32, ((191, 1),))
    return found


def _low_addresses(store, rank, world):
    end = replace(quantization_end(), to_device=below_2_gib)
    return differences(end, "int8", torch.float32, ((191, 1),))


@needs_low_addresses
def test_the_bits_are_the_hosts_below_2_gib():
    assert run_ranks(_low_addresses, 1) == [[]]


def test_the_bits_are_the_hosts():
    (found,) = run_ranks(_all, 1)
    assert found.pop("mutant")
    assert found == {key: [] for key in found}
    assert len(found) == len(QUANT_FORMATS) * len(CASES)
