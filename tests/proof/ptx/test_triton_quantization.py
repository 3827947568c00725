# SPDX-License-Identifier: Apache-2.0
"""Quantization as Triton compiles it, executed, has the host's bits.

It is compiled like users' kernels, where products and sums may be fused.
"""

import os

import pytest
import torch

pytest.importorskip("triton")

from ringcomm._tl.hooks import IS_INTERPRETED
from tests import ptx_interpreter as ptx
from tests.support.emulator.library import COMPILER
from tests.support.quantization_checks import QuantizationEnd, differences
from tests.support.triton_device import PtxLauncher, executed
from tests.tl.test_quantization import quantization_end

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(IS_INTERPRETED, reason="TRITON_INTERPRET is set: nothing compiles"),
    pytest.mark.skipif(COMPILER is None, reason="the emulator needs a C++ compiler"),
]

# For sm_90 Triton compiles int4 to an instruction that the PTX interpreter lacks (stmatrix).
CAPABILITIES = {"fp8": 90, "int4": 80}
if os.environ.get("RINGCOMM_PTX_CHECK") == "all":
    CAPABILITIES["int8"] = 90
CASES = ((2432, 0), (191, 1))


def _allowed(tensor: torch.Tensor) -> torch.Tensor:
    ptx.allow(tensor)
    return tensor


def _differences(gpu: PtxLauncher, quant_format: str) -> list[str]:
    made = quantization_end()
    ptx.be_strict(True)
    with executed(gpu):
        end = QuantizationEnd(made.quantize, made.sum, _allowed, made.to_host)
        try:
            return differences(end, quant_format, torch.float32, CASES)
        finally:
            ptx.forget_allowed()


@pytest.mark.parametrize("quant_format", CAPABILITIES)
def test_the_bits_are_the_hosts(quant_format: str) -> None:
    gpu = PtxLauncher(capability=CAPABILITIES[quant_format])
    assert _differences(gpu, quant_format) == []
    assert ptx.failure() is None
    assert all(each.metadata.enable_fp_fusion for each in gpu.made)


def test_a_mutant_is_seen() -> None:
    def changed(text: str) -> str:
        assert "mul.rn.f32" in text
        return text.replace("mul.rn.f32", "add.rn.f32")

    assert _differences(PtxLauncher(text_of=changed), "fp8")
    assert ptx.failure() is None
