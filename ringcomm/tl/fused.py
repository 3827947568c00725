"""Communication fused with computation: kernels made of the device library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from ringcomm._tl.fused_compute import (
    all_gather_matmul_kernel,
    matmul_reduce_scatter_kernel,
    reduce_scatter_rms_norm_kernel,
)
from ringcomm.errors import ArgumentError, UnsupportedError, where
from ringcomm.tl.context import Context, Symmetric

Tensor = torch.Tensor

_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# Choices, not swept: how many blocks pull rows, or sum them, into how many chunks these are cut,
# and the tiles of a GPU, by the size of an element, and of the interpreter.
_MOVING_BLOCKS = 16
_MOVING_BLOCKS_ON_HOST = 2
_CHUNKS_PER_BLOCK = 4
_TILES = {2: (128, 128, 64), 4: (64, 64, 32)}
_TILES_ON_HOST = (32, 32, 64)
# A row is held in the registers of one block.
LARGEST_ROW = 16384
_WIDE_ROW = 8192

__all__ = ["all_gather_matmul", "matmul_reduce_scatter", "reduce_scatter_rms_norm"]


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

    def rows_to_norm(self, partials: Tensor, world: int) -> tuple[int, int]:
        """How many rows are a rank's, and how long they are."""
        n, d = partials.shape[0] // world, partials.shape[1]
        if n * world != partials.shape[0] or d == 0:
            raise self.fail(
                f"x: expected a multiple of {world} rows, the world size, of at least one element, "
                f"got {tuple(partials.shape)}"
            )
        if d > LARGEST_ROW:
            raise UnsupportedError(
                f"{self._head}: x: expected rows of at most {LARGEST_ROW} elements, got {d}. Use "
                "reduce_scatter_tensor() and normalise after"
            )
        return n, d


@dataclass(frozen=True)
class _Words:
    """The words by which a product's blocks synchronise; they are never reset.

    Attributes:
        ranks: between ranks.
        parts: between blocks, of chunks that have arrived, or are stored.
        epochs: of each block that counts calls there.
    """

    ranks: Symmetric
    parts: Tensor
    epochs: Tensor


def _words(context: Context, moving: int, parts: int, epochs: int) -> _Words:
    world, device = context.comm.world_size, context.comm.device
    return _Words(
        context.zeros((2 * moving, world), torch.int32),
        torch.zeros(parts, dtype=torch.int32, device=device),
        torch.zeros(epochs, dtype=torch.int32, device=device),
    )


def _words_of_gather(context: Context, moving: int) -> _Words:
    arrived = context.comm.world_size * _CHUNKS_PER_BLOCK * moving
    return _words(context, moving, arrived, context.blocks - moving)


def _words_of_scatter(context: Context, moving: int) -> _Words:
    return _words(context, moving, context.blocks - moving, context.blocks)


def _moving_blocks(checks: _Site, context: Context) -> int:
    usual = _MOVING_BLOCKS if context.comm.launches else _MOVING_BLOCKS_ON_HOST
    if context.blocks <= usual:
        raise checks.fail(
            f"context: expected more than {usual} blocks, of which {usual} collect or sum rows and "
            f"the others compute, got {context.blocks}. Make it with more blocks="
        )
    return usual


def _shape_of_blocks(context: Context, moving: int, dtype: torch.dtype) -> dict[str, Any]:
    """The constants of a product's kernel."""
    tiles = _TILES[dtype.itemsize] if context.comm.launches else _TILES_ON_HOST
    return {
        "DTYPE": _DTYPES[dtype],
        "COMM": moving,
        "CHUNKS": _CHUNKS_PER_BLOCK * moving,
        **dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), tiles, strict=True)),
        "G": context.geometry,
        "num_warps": 8,
        "enable_fp_fusion": True,
    }


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
    collecting = _moving_blocks(checks, context)
    words = context.keep("all_gather_matmul", lambda: _words_of_gather(context, collecting))
    world, n = context.comm.world_size, b.shape[1]
    gathered = torch.empty(world * m, k, dtype=mine.dtype, device=mine.device)
    out = torch.empty(world * m, n, dtype=mine.dtype, device=mine.device)
    context.launch(
        all_gather_matmul_kernel,
        (context.blocks,),
        context.table_ptr,
        context.timeout_ns,
        a.ptrs,
        words.ranks.ptrs,
        words.parts,
        words.epochs,
        gathered,
        b,
        out,
        m,
        n,
        k,
        *b.stride(),
        **_shape_of_blocks(context, collecting, mine.dtype),
    )
    return out


def matmul_reduce_scatter(context: Context, a: Tensor, b: Tensor, inbox: Symmetric) -> Tensor:
    """This rank's rows of the sum over all ranks of ``a @ b``, sent while others are multiplied.

    Products are summed in FP32 and rounded, then summed over ranks in FP32 in rank order, and
    rounded: the bits of ``reduce_scatter_tensor`` of them. All ranks call it, in the same order. On
    a GPU it runs on the current stream and can be captured into a graph, after a first call without
    one.

    Args:
        context: of this rank, with equally many blocks on all ranks; all of them take part.
        a: [world * m, k], contiguous, with its own k on each rank.
        b: [k, n], of any strides, of the same dtype.
        inbox: [world * m, n], from ``context.empty``; of one shape and dtype on all ranks. Peers
            store their products there, and nothing else may use it meanwhile.

    Returns:
        [m, n]: rows rank * m and following.

    Raises:
        ArgumentError: an argument does not fit; a plain tensor as ``inbox`` is refused.
        RingcommError: a wait gave up; see :meth:`Context.launch`.
    """
    checks = _Site(context, "matmul_reduce_scatter")
    room = checks.symmetric("inbox", inbox)
    rows, n = room.shape
    world = context.comm.world_size
    if rows % world:
        raise checks.fail(
            f"inbox: expected a multiple of {world} rows, the world size, got {tuple(room.shape)}"
        )
    if a.dim() != 2:
        raise checks.fail(f"a: expected a matrix of {rows} rows, got {tuple(a.shape)}")
    k = a.shape[1]
    checks.plain("a", a, (rows, k), room)
    if tuple(b.shape) != (k, n) or b.dtype != room.dtype:
        raise checks.fail(
            f"b: expected a matrix {(k, n)} of {room.dtype}, by the columns of a and of inbox, got "
            f"{tuple(b.shape)} of {b.dtype}"
        )
    summing = _moving_blocks(checks, context)
    words = context.keep("matmul_reduce_scatter", lambda: _words_of_scatter(context, summing))
    m = rows // world
    out = torch.empty(m, n, dtype=room.dtype, device=room.device)
    context.launch(
        matmul_reduce_scatter_kernel,
        (context.blocks,),
        context.table_ptr,
        context.timeout_ns,
        inbox.ptrs,
        words.ranks.ptrs,
        words.parts,
        words.epochs,
        a,
        b,
        out,
        m,
        n,
        k,
        *b.stride(),
        **_shape_of_blocks(context, summing, room.dtype),
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
    n, d = checks.rows_to_norm(partials, world)
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
