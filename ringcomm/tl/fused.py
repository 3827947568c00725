"""Communication fused with computation: two kernels made of the device library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from ringcomm._tl.fused_compute import all_gather_matmul_kernel, reduce_scatter_rms_norm_kernel
from ringcomm.errors import ArgumentError, UnsupportedError, where
from ringcomm.tl.context import Context, Symmetric

Tensor = torch.Tensor

_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# Choices, not swept: how many blocks pull rows, into how many chunks these are cut, and the tiles
# of a GPU, by the size of an element, and of the interpreter.
_COLLECTING_BLOCKS = 16
_COLLECTING_BLOCKS_ON_HOST = 2
_CHUNKS_PER_BLOCK = 4
_TILES = {2: (128, 128, 64), 4: (64, 64, 32)}
_TILES_ON_HOST = (32, 32, 64)
# A row is held in the registers of one block.
LARGEST_ROW = 16384
_WIDE_ROW = 8192

__all__ = ["all_gather_matmul", "reduce_scatter_rms_norm"]


class _Site:
    """Checks the arguments of one call, and words what is wrong with them."""

    def __init__(self, context: Context, operation: str) -> None:
        self._context = context
        self._head = where(operation, context.comm.rank, context.comm.world_size)

    def fail(self, text: str) -> ArgumentError:
        return ArgumentError(f"{self._head}: {text}")

    def symmetric(self, name: str, given: Any) -> Tensor:
        """This rank's copy of a matrix that peers read where it lies."""
        if not isinstance(given, Symmetric):
            raise self.fail(
                f"{name}: expected what Context.empty() or zeros() returned, which peers can read, "
                f"got {type(given).__name__}. Make one, write into its .tensor, and pass it"
            )
        tensor = given.tensor
        if tensor.dim() != 2 or tensor.dtype not in _DTYPES:
            raise self.fail(
                f"{name}: expected a matrix of float32, bfloat16 or float16, got "
                f"{tuple(tensor.shape)} of {tensor.dtype}"
            )
        return tensor

    def plain(self, name: str, given: Tensor, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """A contiguous tensor of this rank's own."""
        if tuple(given.shape) != shape or given.dtype != like.dtype or not given.is_contiguous():
            raise self.fail(
                f"{name}: expected a contiguous tensor {shape} of {like.dtype}, got "
                f"{tuple(given.shape)} of {given.dtype} with strides {given.stride()}"
            )
        return given


@dataclass(frozen=True)
class _Words:
    """The words by which all_gather_matmul's blocks synchronise; they are never reset."""

    ranks: Symmetric
    arrived: Tensor
    epochs: Tensor


def _words(context: Context, collecting: int) -> _Words:
    world, device = context.comm.world_size, context.comm.device
    return _Words(
        context.zeros((2 * collecting, world), torch.int32),
        torch.zeros(world * _CHUNKS_PER_BLOCK * collecting, dtype=torch.int32, device=device),
        torch.zeros(context.blocks - collecting, dtype=torch.int32, device=device),
    )


def _collecting_blocks(checks: _Site, context: Context) -> int:
    usual = _COLLECTING_BLOCKS if context.comm.launches else _COLLECTING_BLOCKS_ON_HOST
    if context.blocks <= usual:
        raise checks.fail(
            f"context: expected more than {usual} blocks, of which {usual} collect rows and the "
            f"others compute, got {context.blocks}. Make it with more blocks="
        )
    return usual


def all_gather_matmul(context: Context, a: Symmetric, b: Tensor) -> Tensor:
    """``torch.cat(every rank's a) @ b``, computed on the rows that are there while others arrive.

    Products are summed in FP32 and rounded once. All ranks call it, in the same order. On a GPU it
    runs on the current stream and can be captured into a graph, after a first call without one.

    Args:
        context: of this rank; all its blocks take part.
        a: [m, k], from ``context.empty``; of one shape and dtype on all ranks. It is read in place
            and may be written again once the work is done.
        b: [k, n], of any strides, with its own n on each rank; of the same dtype.

    Returns:
        [world * m, n], rank by rank.

    Raises:
        ArgumentError: an argument does not fit; a plain tensor as ``a`` is refused, not copied.
        RingcommError: a wait gave up; see :meth:`Context.launch`.
    """
    checks = _Site(context, "all_gather_matmul")
    mine = checks.symmetric("a", a)
    m, k = mine.shape
    if b.dim() != 2 or b.shape[0] != k or b.dtype != mine.dtype:
        raise checks.fail(
            f"b: expected a matrix of {k} rows of {mine.dtype}, as a has columns, got "
            f"{tuple(b.shape)} of {b.dtype}"
        )
    collecting = _collecting_blocks(checks, context)
    words = context.keep(("all_gather_matmul", collecting), lambda: _words(context, collecting))
    world, n = context.comm.world_size, b.shape[1]
    gathered = torch.empty(world * m, k, dtype=mine.dtype, device=mine.device)
    out = torch.empty(world * m, n, dtype=mine.dtype, device=mine.device)
    tiles = _TILES[mine.itemsize] if context.comm.launches else _TILES_ON_HOST
    context.launch(
        all_gather_matmul_kernel,
        (context.blocks,),
        context.table_ptr,
        context.timeout_ns,
        a.ptrs,
        words.ranks.ptrs,
        words.arrived,
        words.epochs,
        gathered,
        b,
        out,
        m,
        n,
        k,
        *b.stride(),
        DTYPE=_DTYPES[mine.dtype],
        COMM=collecting,
        CHUNKS=_CHUNKS_PER_BLOCK * collecting,
        **dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), tiles, strict=True)),
        G=context.geometry,
        num_warps=8,
        enable_fp_fusion=True,
    )
    return out


def reduce_scatter_rms_norm(
    context: Context,
    x: Symmetric,
    weight: Tensor,
    *,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    summed: Tensor | None = None,
) -> Tensor:
    """The RMS norm of this rank's rows of the sum of all ranks' ``x``.

    The sum is taken in FP32 in rank order, with ``residual`` last, and stays in FP32 until the
    normalised row is rounded. All ranks call it, in the same order. On a GPU it runs on the current
    stream and can be captured into a graph, after a first call without one.

    Args:
        context: of this rank, with equally many blocks on all ranks.
        x: [world * n, d], from ``context.empty``; of one shape and dtype on all ranks, d up to
            16384. It is read in place and may be written again once the work is done.
        weight: [d], of the same dtype, as is the result.
        eps: added to the mean square of a row.
        residual: [n, d], added to the sum.
        summed: [n, d], receives the sum, with the residual and rounded; may be ``residual``.

    Returns:
        [n, d], the normalised rows.

    Raises:
        ArgumentError: an argument does not fit; a plain tensor as ``x`` is refused, not copied.
        UnsupportedError: the rows are too long.
        RingcommError: a wait gave up; see :meth:`Context.launch`.
    """
    checks = _Site(context, "reduce_scatter_rms_norm")
    partials = checks.symmetric("x", x)
    world = context.comm.world_size
    n, d = partials.shape[0] // world, partials.shape[1]
    if n * world != partials.shape[0] or d == 0:
        raise checks.fail(
            f"x: expected a multiple of {world} rows, the world size, of at least one element, got "
            f"{tuple(partials.shape)}"
        )
    if d > LARGEST_ROW:
        raise UnsupportedError(
            f"{where('reduce_scatter_rms_norm', context.comm.rank, world)}: x: expected rows of at "
            f"most {LARGEST_ROW} elements, got {d}. Use reduce_scatter_tensor() and normalise after"
        )
    checks.plain("weight", weight, (d,), partials)
    for name, given in (("residual", residual), ("summed", summed)):
        if given is not None:
            checks.plain(name, given, (n, d), partials)
    words = context.keep(
        "reduce_scatter_rms_norm", lambda: context.zeros((context.blocks, world), torch.int32)
    )
    out = torch.empty(n, d, dtype=partials.dtype, device=partials.device)
    more = out if residual is None else residual
    sums = out if summed is None else summed
    width = 1 << (d - 1).bit_length()
    context.launch(
        reduce_scatter_rms_norm_kernel,
        (context.blocks,),
        context.table_ptr,
        context.timeout_ns,
        x.ptrs,
        words.ptrs,
        more,
        weight,
        out,
        sums,
        n,
        float(eps),
        D=d,
        BLOCK_D=width,
        DTYPE=_DTYPES[partials.dtype],
        ADDS=residual is not None,
        KEEPS=summed is not None,
        G=context.geometry,
        num_warps=16 if width >= _WIDE_ROW else 8,
        enable_fp_fusion=True,
    )
    return out
