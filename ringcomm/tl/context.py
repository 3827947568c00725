# SPDX-License-Identifier: Apache-2.0
"""A context for Triton kernels that communicate, memory that all ranks reach, and fused kernels."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from types import FunctionType, TracebackType
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
from triton.runtime import JITFunction

from ringcomm import _native, memory
from ringcomm._tl.fused_compute import (
    all_gather_matmul_kernel,
    matmul_reduce_scatter_kernel,
    reduce_scatter_rms_norm_kernel,
)
from ringcomm._tl.geometry import Geometry
from ringcomm._tl.hooks import IS_INTERPRETED, interpreted_int64
from ringcomm.comm.agreement import first_other, gather_bytes, unequal
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.peer_memory import awaiting_peers
from ringcomm.errors import ArgumentError, RingcommError, UnsupportedError, where
from ringcomm.integers import integer, integers
from ringcomm.process import until_exit

__all__ = [
    "Context",
    "Symmetric",
    "all_gather_matmul",
    "matmul_reduce_scatter",
    "reduce_scatter_rms_norm",
]


# The arguments that a kernel needs, and memory that the kernels of all ranks reach.

T = TypeVar("T")

_TWO_NUMBERS = struct.Struct("<qq")
# Memory of contexts that ended without all ranks' consent, so that a peer may still use it.
_abandoned: list[object] = []
# Maps (id of a kernel, names of its address parameters) to (the kernel, the form to launch).
_launched: dict[tuple[int, tuple[str, ...]], tuple[Any, Any]] = {}


@dataclass(frozen=True)
class Symmetric:
    """A tensor with a copy on every rank; the kernels of all ranks can reach all copies.

    Attributes:
        tensor: this rank's copy.
        ptrs: int64 [world]: the addresses of all ranks' copies for this rank's kernels.
    """

    tensor: torch.Tensor
    ptrs: torch.Tensor


def _with_int64(function: FunctionType, names: tuple[str, ...]) -> FunctionType:
    """Returns a copy of the function whose parameters ``names`` are annotated as int64."""
    copy = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
    copy.__annotations__ = {**function.__annotations__, **dict.fromkeys(names, tl.int64)}
    return copy


def _for_any_address(kernel: Any, addresses: tuple[int | str, ...]) -> Any:
    """Returns the kernel in a form that compiles once for all values of ``addresses``.

    Triton would otherwise compile again, in seconds while the peers wait: for the first address
    that is a multiple of 16, and for the first address below 2^31, which it passes as an int32. The
    kernels themselves check whether addresses are aligned.
    """
    if not isinstance(kernel, JITFunction) or not addresses:
        return kernel  # the interpreter's kernel, or the user's own wrapper of a kernel
    names = tuple(kernel.arg_names[at] if isinstance(at, int) else at for at in addresses)
    key = id(kernel), names
    if key not in _launched:
        launched = triton.jit(
            _with_int64(kernel.fn, names),
            version=kernel.version,
            repr=kernel._repr,
            launch_metadata=kernel.launch_metadata,
            do_not_specialize=kernel.do_not_specialize,
            do_not_specialize_on_alignment=[*kernel.do_not_specialize_on_alignment, *names],
            debug=kernel.debug,
            noinline=kernel.noinline,
        )
        launched.pre_run_hooks = kernel.pre_run_hooks
        _launched.setdefault(key, (kernel, launched))
    return _launched[key][1]


class Context:
    """Launches a user's kernels that communicate; all ranks must build one with equal arguments.

    A context owns its memory. :meth:`close`, or the end of the ``with`` block, frees the memory
    once all ranks have arrived, so that no peer's kernel can use it any more. If the context ends
    in another way (an exception, a fault, no close) its memory stays until the process ends.

    A communicator's collectives and a context's kernels are not ordered among each other: on a GPU
    order them by the stream, on the host by the order of the calls.

    Args:
        comm: the communicator of the ranks.
        blocks: the largest grid of a launch. All blocks of a launch must run at once, since they
            wait for each other. So on a GPU the limit and default is the number of multiprocessors
            divided by the ranks that share the GPU; on the host the default is 8. Equal on all
            ranks.

    Attributes:
        comm: the communicator.
        blocks: the largest grid.
        geometry: the kernels' constexpr argument ``G``.
        table_ptr: the kernels' argument ``table``.

    Raises:
        UnsupportedError: Triton kernels cannot run here. On the host they run in Triton's
            interpreter (``TRITON_INTERPRET=1``), one rank per process.
        ArgumentError: a bad number of blocks.
        MismatchError: another rank has another number of blocks.
    """

    def __init__(self, comm: Communicator, blocks: int | None = None) -> None:
        self.comm = comm
        self._closed = True  # close() does nothing until construction is complete
        target = self._target = comm.engine.kernel_target("ringcomm.tl.Context")
        most = target.most_blocks
        wanted = target.default_blocks if blocks is None else integer(blocks)
        if wanted is None or not 1 <= wanted <= most:
            raise ArgumentError(
                f"{self._where('ringcomm.tl.Context')}: blocks: expected 1 to {most}, "
                "the multiprocessors of the device divided by the ranks that share it, got "
                f"{blocks}. The blocks of all ranks wait for each other, so all of them must run "
                "at once"
            )
        self.blocks = wanted
        self.geometry: Geometry = target.geometry
        state_bytes = _native.STRUCTURES["scratch"]
        state_bytes += _native.STRUCTURES["scratch_per_rank"] * comm.world_size
        device = comm.device
        self._state = torch.zeros(self.blocks * state_bytes, dtype=torch.uint8, device=device)
        table = target.table_with(self._state.data_ptr())
        # clone() gives aligned memory; the buffer of a bytearray may be unaligned.
        self._table = torch.frombuffer(bytearray(table), dtype=torch.uint8).clone().to(device)
        self.table_ptr: int = self._table.data_ptr()
        self._heaps = target.heaps
        self._owned: list[torch.Tensor] = []
        self._kept: dict[object, Any] = {}
        self._agree("ringcomm.tl.Context", "blocks", self.blocks)
        self._closed = False

    @property
    def timeout_ns(self) -> int:
        """The deadline of one wait in nanoseconds: the communicator's timeout."""
        return self.comm.timeout // timedelta(microseconds=1) * 1000

    def _where(self, operation: str) -> str:
        return where(operation, self.comm.rank, self.comm.world_size)

    def _agree(self, operation: str, what: str, number: int, own: int = 0) -> list[int]:
        """Checks that ``number`` is equal on all ranks; returns each rank's ``own``."""
        mine = _TWO_NUMBERS.pack(number, own)
        told = map(_TWO_NUMBERS.unpack, gather_bytes(self.comm, mine, len(mine)))
        numbers, owns = zip(*told, strict=True)
        if other := first_other(numbers):
            rows = [(each,) for each in numbers]
            advice = "Give all ranks the same arguments"
            raise unequal(self._where(operation), (f"option {what}",), rows, other, advice)
        return list(owns)

    # ---- memory -------------------------------------------------------------------------------

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> Symmetric:
        """Allocates symmetric memory, uninitialized. All ranks must call it with equal arguments.

        Raises:
            HeapError: the heap has too little free memory.
            MismatchError: another rank requested another size.
        """
        return self._allocate(memory.empty, shape, dtype)

    def zeros(self, shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> Symmetric:
        """Like :meth:`empty`; each rank's copy is zeroed before any rank can reach it."""
        return self._allocate(memory.zeros, shape, dtype)

    def _allocate(
        self, make: Callable[..., torch.Tensor], shape: int | Sequence[int], dtype: torch.dtype
    ) -> Symmetric:
        operation = f"ringcomm.tl.Context.{make.__name__}"
        self.check(operation)
        count = integer(shape)
        dims = integers(shape) if count is None else [count]
        if dims is None:
            raise ArgumentError(
                f"{self._where(operation)}: expected integers below 2^63, got {shape!r}"
            )
        shape = tuple(dims)
        # At least one element: an empty tensor has no address.
        whole = make(max(1, prod(shape)), dtype=dtype, device=self._target.heap_device)
        self._owned.append(whole)
        awaiting_peers(self.comm)(operation)
        offset = whole.data_ptr() - self._heaps[self.comm.rank]
        offsets = self._agree(operation, "bytes", prod(shape) * dtype.itemsize, offset)
        addresses = [base + offset for base, offset in zip(self._heaps, offsets, strict=True)]
        ptrs = torch.tensor(addresses, dtype=torch.int64, device=self.comm.device)
        return Symmetric(whole[: prod(shape)].view(shape), ptrs)

    def keep(self, key: object, make: Callable[[], T]) -> T:
        """Returns the result of ``make()``, which is called only the first time for each ``key``.

        Args:
            key: names the result in this context, for instance a kernel's synchronization words.
            make: may allocate symmetric memory; then all ranks must make this call.
        """
        if key not in self._kept:
            self._kept[key] = make()
        found: T = self._kept[key]
        return found

    # ---- kernels ------------------------------------------------------------------------------

    def launch(self, kernel: Any, grid: Sequence[int], *args: Any, **constants: Any) -> None:
        """Runs a kernel: on torch's current stream of a GPU, or in Triton's interpreter.

        Args:
            kernel: a function decorated by ``@triton.jit``.
            grid: at most ``blocks`` programs in all.
            args: tensors are passed as their addresses (int64), never as tensors: Triton's
                interpreter would write whole storages back, over data that peers have stored there.
                They must be on the communicator's device. A kernel is compiled once for all
                addresses; in the kernel, use ``is_aligned`` before a wide access.
            constants: by name: constexpr arguments and Triton's own, such as ``num_warps``.

        Raises:
            ArgumentError: the grid is too large, or a tensor is on another device.
            RingcommError: on the host, a wait of the kernel gave up. On a GPU the launch returns
                early, and :meth:`check` or the next launch raises the error.
        """
        name = getattr(getattr(kernel, "fn", kernel), "__name__", "kernel")
        self.comm.engine.raise_if_unusable(name)
        if prod(grid) > self.blocks:
            raise ArgumentError(
                f"{self._where(name)}: grid: expected at most {self.blocks} programs, got "
                f"{tuple(grid)}. Loop inside the kernel, or make the context with more blocks="
            )
        passed = [self._passed(name, arg) for arg in args]
        named = {key: self._passed(name, arg) for key, arg in constants.items()}
        addresses: list[int | str] = [
            position for position, arg in enumerate(args) if isinstance(arg, torch.Tensor)
        ]
        addresses += [key for key, arg in constants.items() if isinstance(arg, torch.Tensor)]
        launched = _for_any_address(kernel, tuple(addresses))
        try:
            with self._target.launching():
                launched[tuple(grid)](*passed, **named)
        except BaseException as error:
            # Peers wait for signals that this rank will not send any more.
            self.comm.abort(f"{name} was interrupted by {type(error).__name__}: {error}")
            raise
        if not self.comm.launches:
            self.comm.engine.raise_if_unusable(name)

    def _passed(self, name: str, arg: Any) -> Any:
        if not isinstance(arg, torch.Tensor):
            return arg
        if arg.device != self.comm.device:
            raise ArgumentError(
                f"{self._where(name)}: expected tensors on {self.comm.device}, got one on "
                f"{arg.device}. Copy it there"
            )
        # An empty tensor has address 0, which Triton would give another type: pass any address.
        address = arg.data_ptr() or self.table_ptr
        return interpreted_int64(address) if IS_INTERPRETED else address

    def check(self, name: str = "check") -> None:
        """Raises the error that made the communicator unusable, if there is one.

        On a GPU it first waits for the device: then all launched kernels have ended.

        Args:
            name: the name of the operation, for the error.
        """
        if not self.comm.aborted:
            self.comm.engine.finish_host_side()
        self.comm.engine.raise_if_unusable(name)

    # ---- the end ------------------------------------------------------------------------------

    def close(self) -> None:
        """Waits for all ranks, then frees the memory; a second call does nothing.

        Raises:
            RingcommError: a rank did not arrive, or the communicator is unusable. The memory stays
                until the process ends.
        """
        if self._closed:
            return
        try:
            self.check("ringcomm.tl.Context.close")
            self.comm.barrier()
            self.comm.engine.finish_host_side()
        except RingcommError:
            self._abandon()
            raise
        self._closed = True
        self._owned.clear()
        self._kept.clear()

    def _abandon(self) -> None:
        self._closed = True
        _abandoned.append((self._owned, self._kept))

    def __enter__(self) -> Context:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        elif not self._closed:
            self._abandon()

    @until_exit
    def __del__(self) -> None:
        if not self._closed:
            self._abandon()


# ---- Communication fused with computation: kernels built with the device library ----------------

Tensor = torch.Tensor

_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# Chosen without measuring other values: the number of blocks that pull or sum rows, the chunks of
# rows per such block, and the tile sizes (on a GPU by the bytes of an element).
_MOVING_BLOCKS = 16
_MOVING_BLOCKS_ON_HOST = 2
_CHUNKS_PER_BLOCK = 4
_TILES = {2: (128, 128, 64), 4: (64, 64, 32)}
_TILES_ON_HOST = (32, 32, 64)
# One block holds a whole row in its registers.
LARGEST_ROW = 16384
_WIDE_ROW = 8192


class _Site:
    """Checks the arguments of one call, and makes the errors for them."""

    def __init__(self, context: Context, operation: str) -> None:
        self._context = context
        self._head = where(operation, context.comm.rank, context.comm.world_size)

    def fail(self, text: str) -> ArgumentError:
        return ArgumentError(f"{self._head}: {text}")

    def symmetric(self, name: str, given: Any) -> Tensor:
        """Checks a matrix that peers read in place; returns this rank's copy."""
        if not isinstance(given, Symmetric):
            raise self.fail(
                f"{name}: expected a result of Context.empty() or zeros(), which peers can read, "
                f"got {type(given).__name__}. Allocate one, write to its .tensor, and pass it"
            )
        tensor = given.tensor
        if tensor.dim() != 2 or tensor.dtype not in _DTYPES:
            raise self.fail(
                f"{name}: expected a matrix of float32, bfloat16 or float16, got "
                f"{tuple(tensor.shape)} of {tensor.dtype}"
            )
        return tensor

    def contiguous(self, name: str, given: Tensor, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Returns ``given`` after checking that it is contiguous and of this shape and dtype."""
        if tuple(given.shape) != shape or given.dtype != like.dtype or not given.is_contiguous():
            raise self.fail(
                f"{name}: expected a contiguous tensor {shape} of {like.dtype}, got "
                f"{tuple(given.shape)} of {given.dtype} with strides {given.stride()}"
            )
        return given

    def rows_to_norm(self, partials: Tensor, world: int) -> tuple[int, int]:
        """Returns the number of rows per rank, and the elements per row."""
        n, d = partials.shape[0] // world, partials.shape[1]
        if n * world != partials.shape[0] or d == 0:
            raise self.fail(
                f"x: expected rows of at least one element, and a number of rows divisible by the "
                f"world size {world}, got {tuple(partials.shape)}"
            )
        if d > LARGEST_ROW:
            raise UnsupportedError(
                f"{self._head}: x: expected rows of at most {LARGEST_ROW} elements, got {d}. Use "
                "reduce_scatter_tensor() and normalize its result"
            )
        return n, d


@dataclass(frozen=True)
class _Words:
    """The words of memory by which blocks of a fused kernel synchronize; they are never reset.

    Attributes:
        ranks: words by which ranks synchronize.
        chunks: words by which blocks signal that chunks have arrived or are stored.
        epochs: for each block that counts calls, the number of calls.
    """

    ranks: Symmetric
    chunks: Tensor
    epochs: Tensor


def _words(context: Context, moving: int, chunks: int, epochs: int) -> _Words:
    world, device = context.comm.world_size, context.comm.device
    return _Words(
        context.zeros((2 * moving, world), torch.int32),
        torch.zeros(chunks, dtype=torch.int32, device=device),
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
    """Returns the constants of a matrix product's kernel."""
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
    """Computes ``torch.cat(every rank's a) @ b``; multiplies some rows while others arrive.

    Products are summed in FP32 and rounded once. All ranks call it, in the same order. On a GPU it
    runs on the current stream and can be captured into a graph after one uncaptured call.

    Args:
        context: this rank's context; all its blocks take part.
        a: [m, k], from ``context.empty``; of one shape and dtype on all ranks. It is read in place
            and may be overwritten once the work is done.
        b: [k, n], with any strides; n may differ between ranks; of the same dtype.

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
            f"b: expected a matrix of {k} rows, the columns of a, of dtype {mine.dtype}, got "
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
        words.chunks,
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
    """Returns this rank's rows of the sum of ``a @ b`` over ranks; sends rows while multiplying.

    Products are summed in FP32 and rounded, then summed over ranks in FP32 in rank order, and
    rounded: the same bits as ``reduce_scatter_tensor`` of the products. All ranks call it, in the
    same order. On a GPU it runs on the current stream and can be captured into a graph after one
    uncaptured call.

    Args:
        context: this rank's context, with equally many blocks on all ranks; all of them take part.
        a: [world * m, k], contiguous; k may differ between ranks.
        b: [k, n], with any strides, of the same dtype.
        inbox: [world * m, n], from ``context.empty``; of one shape and dtype on all ranks. Peers
            store their products there; nothing else may use it during the call.

    Returns:
        [m, n]: the rows from rank * m on.

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
            f"inbox: expected a number of rows divisible by the world size {world}, got "
            f"{tuple(room.shape)}"
        )
    if a.dim() != 2:
        raise checks.fail(f"a: expected a matrix of {rows} rows, got {tuple(a.shape)}")
    k = a.shape[1]
    checks.contiguous("a", a, (rows, k), room)
    if tuple(b.shape) != (k, n) or b.dtype != room.dtype:
        raise checks.fail(
            f"b: expected a matrix {(k, n)} of {room.dtype} (columns of a, columns of inbox), got "
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
        words.chunks,
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
    """Returns the RMS norm of this rank's rows of the sum of all ranks' ``x``.

    The sum is computed in FP32 in rank order, with ``residual`` last, and stays in FP32 until the
    normalized row is rounded. All ranks call it, in the same order. On a GPU it runs on the current
    stream and can be captured into a graph after one uncaptured call.

    Args:
        context: this rank's context, with equally many blocks on all ranks.
        x: [world * n, d], from ``context.empty``; of one shape and dtype on all ranks, d up to
            16384. It is read in place and may be overwritten once the work is done.
        weight: [d]; ``weight`` and the result have the dtype of ``x``.
        eps: added to the mean square of a row.
        residual: [n, d], added to the sum.
        summed: [n, d], receives the rounded sum, including the residual; may be the same tensor as
            ``residual``.

    Returns:
        [n, d], the normalized rows.

    Raises:
        ArgumentError: an argument does not fit; a plain tensor as ``x`` is refused, not copied.
        UnsupportedError: the rows are too long.
        RingcommError: a wait gave up; see :meth:`Context.launch`.
    """
    checks = _Site(context, "reduce_scatter_rms_norm")
    partials = checks.symmetric("x", x)
    world = context.comm.world_size
    n, d = checks.rows_to_norm(partials, world)
    checks.contiguous("weight", weight, (d,), partials)
    for name, given in (("residual", residual), ("summed", summed)):
        if given is not None:
            checks.contiguous(name, given, (n, d), partials)
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
