"""Parameters that cross between nodes in codes, beside the FP32 masters that are coded.

NOTE [Coded parameters]
With ``Wire(parameters=)`` every rank, the one that updates a parameter included, computes with what
the code of its FP32 master decodes to, rounded to the parameter's dtype: so all nodes have equal
bits, whoever updates. It is as in mixed precision, whose parameters are rounded masters, with
another rounding, of blocks of 128 elements from the bucket's begin. Since chunks begin at blocks,
it depends on no world size. Codes of decoded values are others, so the masters are kept for as long
as the module is sharded: ``ParamBucket.wide`` is their memory, which an optimizer's state shares.

Masters follow what is written to parameters from outside: one that does not decode to its parameter
becomes that. Codes are then made anew, which moves the other elements of a block if its largest one
has changed.
"""

from __future__ import annotations

import torch

from ringcomm import _native
from ringcomm.comm.arguments import DTYPE_CODES

Tensor = torch.Tensor


def decoded(wide: Tensor, wire: str, dtype: torch.dtype) -> Tensor:
    """Returns what codes of FP32 numbers, in blocks from the first one on, decode to.

    Args:
        wide: float32, contiguous, on the CPU.
        wire: "int8", "fp8" or "int4".
        dtype: of the result.
    """
    elems, code = wide.numel(), _native.WIRES[wire]
    codes = torch.empty(_native.wire_bytes(code, elems), dtype=torch.uint8, device=wide.device)
    found = torch.empty(elems, dtype=dtype, device=wide.device)
    _native.encode_wire(code, wide.data_ptr(), DTYPE_CODES[wide.dtype], codes.data_ptr(), elems)
    _native.sum_wires(code, [codes.data_ptr()], found.data_ptr(), DTYPE_CODES[dtype], elems, 0)
    return found


def following(master: Tensor, params: Tensor, wire: str | None) -> Tensor:
    """Returns ``master``, but the parameter wherever the master does not round to it.

    Args:
        master: float32 [elements], from the begin of a block on.
        params: [elements].
        wire: as of :func:`decoded`; None where parameters are masters rounded to their dtype.
    """
    rounded = master.to(params.dtype) if wire is None else decoded(master, wire, params.dtype)
    return torch.where(rounded == params, master, params.to(master.dtype))
