# SPDX-License-Identifier: Apache-2.0
"""Write Triton kernels that communicate: the device library, and fused kernels built with it.

On the host, :class:`Context` provides the arguments that kernels need, and symmetric memory. In
kernels, the functions below move data between ranks and synchronize them (``docs/triton.md``).
:func:`all_gather_matmul`, :func:`matmul_reduce_scatter` and :func:`reduce_scatter_rms_norm` are
such kernels. Start with ``context.py``.
"""

from __future__ import annotations

from ringcomm.errors import UnsupportedError

try:
    import triton  # noqa: F401
except ImportError as error:
    raise UnsupportedError(
        f"ringcomm.tl: it needs Triton, which cannot be imported here ({error}). pip install triton"
    ) from error

from ringcomm._tl.device import (
    accumulate,
    advance_epoch,
    barrier_sys,
    begin_kernel,
    end_kernel,
    get,
    is_aligned,
    peer_address,
    peer_at,
    peer_ptr,
    pointer,
    put,
    rank_of,
    round_to,
    signal_release_gpu,
    signal_release_sys,
    wait_acquire_gpu,
    wait_acquire_sys,
    word_of,
)
from ringcomm._tl.quantization import (
    dequantize_blocks,
    load_quantized,
    quantize_blocks,
    store_quantized,
)
from ringcomm.tl.context import (
    Context,
    Symmetric,
    all_gather_matmul,
    matmul_reduce_scatter,
    reduce_scatter_rms_norm,
)

__all__ = [
    "Context",
    "Symmetric",
    "accumulate",
    "advance_epoch",
    "all_gather_matmul",
    "barrier_sys",
    "begin_kernel",
    "dequantize_blocks",
    "end_kernel",
    "get",
    "is_aligned",
    "load_quantized",
    "matmul_reduce_scatter",
    "peer_address",
    "peer_at",
    "peer_ptr",
    "pointer",
    "put",
    "quantize_blocks",
    "rank_of",
    "reduce_scatter_rms_norm",
    "round_to",
    "signal_release_gpu",
    "signal_release_sys",
    "store_quantized",
    "wait_acquire_gpu",
    "wait_acquire_sys",
    "word_of",
]
