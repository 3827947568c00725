"""A context for Triton kernels that communicate, and memory that the kernels of all ranks reach."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from types import TracebackType
from typing import Any, TypeVar

import torch
import triton
from triton.runtime import JITFunction

from ringcomm import _native, memory
from ringcomm._tl.geometry import Geometry
from ringcomm.comm.communicator import Communicator
from ringcomm.errors import ArgumentError, MismatchError, RingcommError, where
from ringcomm.integers import integer, integers
from ringcomm.lifetime import until_exit

__all__ = ["Context", "Symmetric"]

# What a kernel needs of a communicator, and memory that the kernels of all ranks reach.

T = TypeVar("T")

# Memory that a peer may still touch, of contexts that ended without all ranks' consent.
_abandoned: list[object] = []
# By a kernel and which of its parameters are addresses: the kernel, and what is launched for it.
_launched: dict[tuple[int, tuple[int | str, ...]], tuple[Any, Any]] = {}


@dataclass(frozen=True)
class Symmetric:
    """A tensor that every rank has a copy of, where the kernels of all ranks reach it.

    Attributes:
        tensor: this rank's copy.
        ptrs: int64 [world]: addresses of all ranks' copies as this rank's kernels use them.
    """

    tensor: torch.Tensor
    ptrs: torch.Tensor


def _for_any_alignment(kernel: Any, addresses: tuple[int | str, ...]) -> Any:
    """The kernel, compiled once for all values of the parameters ``addresses``.

    Triton compiles anew (seconds) for an address that is a multiple of 16 where others were not,
    while the peers wait. The kernels themselves see whether addresses are aligned.
    """
    if not isinstance(kernel, JITFunction) or not addresses:
        return kernel  # it is the interpreter's, or the user's own wrapper of one
    key = id(kernel), addresses
    if key not in _launched:
        launched = triton.jit(
            kernel.fn,
            version=kernel.version,
            repr=kernel._repr,
            launch_metadata=kernel.launch_metadata,
            do_not_specialize=kernel.do_not_specialize,
            do_not_specialize_on_alignment=[*kernel.do_not_specialize_on_alignment, *addresses],
            debug=kernel.debug,
            noinline=kernel.noinline,
        )
        launched.pre_run_hooks = kernel.pre_run_hooks
        _launched.setdefault(key, (kernel, launched))
    return _launched[key][1]


class Context:
    """One rank's means to run kernels of its own that communicate; made on all ranks alike.

    It owns the memory that it hands out. :meth:`close`, or the end of the ``with`` block, gives it
    back once all ranks are there: no peer's kernel can touch it any more then. Memory of a context
    that ends otherwise (an exception, a fault, no close at all) stays until the process ends.

    A communicator's collectives and a context's kernels are separate: on a GPU order them by the
    stream, on the host by the program.

    Args:
        comm: whose ranks communicate.
        blocks: the largest grid of a launch. All blocks of a launch must run at once, since they
            wait for each other, so on a GPU there are at most as many as multiprocessors, divided
            by the ranks that share it, which is the default; on the host it is 8. Equal on all
            ranks.

    Attributes:
        comm: the communicator.
        blocks: the largest grid.
        geometry: what kernels take as their constexpr argument ``G``.
        table_ptr: what kernels take as ``table``.

    Raises:
        UnsupportedError: Triton kernels cannot run here. On the host they run in Triton's
            interpreter (``TRITON_INTERPRET=1``), one rank per process.
        ArgumentError: a bad number of blocks.
        MismatchError: another rank has another number of blocks.
    """

    def __init__(self, comm: Communicator, blocks: int | None = None) -> None:
        self.comm = comm
        self._closed = True  # until there is something to close
        place = self._place = comm.kernel_place("ringcomm.tl.Context")
        wanted = place.default_blocks if blocks is None else integer(blocks)
        if wanted is None or not 1 <= wanted <= place.most_blocks:
            raise ArgumentError(
                f"{self._where('ringcomm.tl.Context')}: blocks: expected 1 to {place.most_blocks}, "
                "the multiprocessors of the device divided by the ranks that share it, got "
                f"{blocks}. The blocks of all ranks wait for each other, so all of them must run "
                "at once"
            )
        self.blocks = wanted
        self.geometry: Geometry = place.geometry
        state_bytes = _native.STRUCTURES["scratch"]
        state_bytes += _native.STRUCTURES["scratch_per_rank"] * comm.world_size
        device = comm.device
        self._state = torch.zeros(self.blocks * state_bytes, dtype=torch.uint8, device=device)
        table = place.table_with(self._state.data_ptr())
        # clone(): aligned, which the buffer of a bytearray need not be.
        self._table = torch.frombuffer(bytearray(table), dtype=torch.uint8).clone().to(device)
        self.table_ptr: int = self._table.data_ptr()
        self._heaps = place.heaps
        self._owned: list[torch.Tensor] = []
        self._kept: dict[object, Any] = {}
        self._agree("ringcomm.tl.Context", "blocks", self.blocks)
        self._closed = False

    @property
    def timeout_ns(self) -> int:
        """The deadline of one wait, which is the communicator's."""
        return self.comm.timeout // timedelta(microseconds=1) * 1000

    def _where(self, operation: str) -> str:
        return where(operation, self.comm.rank, self.comm.world_size)

    def _agree(self, operation: str, what: str, number: int, own: int = 0) -> list[int]:
        """Checks that ``number`` is equal on all ranks, and returns what each has as ``own``."""
        device = self.comm.device
        mine = torch.tensor([number, own], dtype=torch.int64, device=device)
        everyone = torch.empty(self.comm.world_size, 2, dtype=torch.int64, device=device)
        self.comm.all_gather_into_tensor(everyone.view(-1), mine)
        self.comm.finish_host_side()
        numbers, owns = everyone.T.tolist()
        for peer, theirs in enumerate(numbers):
            if theirs != number:
                raise MismatchError(
                    f"{self._where(operation)}: expected {number} {what} on all ranks, but rank "
                    f"{peer} has {theirs}. Give all ranks the same arguments"
                )
        found: list[int] = owns
        return found

    # ---- memory -------------------------------------------------------------------------------

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> Symmetric:
        """Symmetric memory, not initialised. All ranks call it, with equal arguments.

        Raises:
            HeapError: the heap has no room.
            MismatchError: another rank asked for another size.
        """
        return self._allocate(memory.empty, shape, dtype)

    def zeros(self, shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> Symmetric:
        """Makes memory like :meth:`empty`, zeros on every rank before any rank can reach it."""
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
        whole = make(max(1, prod(shape)), dtype=dtype, device=self._place.heap_device)
        self._owned.append(whole)
        offset = whole.data_ptr() - self._heaps[self.comm.rank]
        offsets = self._agree(operation, "bytes", prod(shape) * dtype.itemsize, offset)
        addresses = [base + offset for base, offset in zip(self._heaps, offsets, strict=True)]
        ptrs = torch.tensor(addresses, dtype=torch.int64, device=self.comm.device)
        return Symmetric(whole[: prod(shape)].view(shape), ptrs)

    def keep(self, key: object, make: Callable[[], T]) -> T:
        """Returns what ``make`` returned at the first call for ``key``; for words of one's kernels.

        Args:
            key: names it in this context.
            make: may allocate, and then all ranks must come here alike.
        """
        if key not in self._kept:
            self._kept[key] = make()
        found: T = self._kept[key]
        return found

    # ---- kernels ------------------------------------------------------------------------------

    def launch(self, kernel: Any, grid: Sequence[int], *args: Any, **constants: Any) -> None:
        """Runs a kernel: on torch's current stream of a GPU, or in Triton's interpreter.

        Args:
            kernel: what ``@triton.jit`` made.
            grid: at most ``blocks`` programs in all.
            args: tensors are passed as their addresses (int64), never as tensors: Triton's
                interpreter would write whole storages back, over what peers have stored there.
                They must lie on the communicator's device. A kernel is compiled once wherever
                they lie; ask ``is_aligned`` in it what a wide access needs to know.
            constants: by name: constexpr arguments and Triton's own, such as ``num_warps``.

        Raises:
            ArgumentError: the grid is too large, or a tensor is elsewhere.
            RingcommError: on the host, a wait of the kernel gave up. On a GPU the launch returns
                early, and :meth:`check` or the next launch raises it.
        """
        name = getattr(getattr(kernel, "fn", kernel), "__name__", "kernel")
        self.comm.raise_if_unusable(name)
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
        launched = _for_any_alignment(kernel, tuple(addresses))
        try:
            with self._place.launching():
                launched[tuple(grid)](*passed, **named)
        except BaseException as error:
            # Peers wait for what this rank was about to signal.
            self.comm.abort(f"{name} was interrupted by {type(error).__name__}: {error}")
            raise
        if not self.comm.launches:
            self.comm.raise_if_unusable(name)

    def _passed(self, name: str, arg: Any) -> Any:
        if not isinstance(arg, torch.Tensor):
            return arg
        if arg.device != self.comm.device:
            raise ArgumentError(
                f"{self._where(name)}: expected tensors on {self.comm.device}, got one on "
                f"{arg.device}. Copy it there"
            )
        # An empty tensor has no address, and a small number would be another type to Triton.
        return arg.data_ptr() or self.table_ptr

    def check(self, name: str = "check") -> None:
        """Raises what made the communicator unusable, if anything did.

        On a GPU it waits for the device first: kernels that were launched have ended then.

        Args:
            name: of the operation, for the error.
        """
        if not self.comm.aborted:
            self.comm.finish_host_side()
        self.comm.raise_if_unusable(name)

    # ---- the end ------------------------------------------------------------------------------

    def close(self) -> None:
        """Waits for all ranks, then gives the memory back; a second call does nothing.

        Raises:
            RingcommError: a rank did not come, or the communicator is unusable. The memory stays
                until the process ends.
        """
        if self._closed:
            return
        try:
            self.check("ringcomm.tl.Context.close")
            self.comm.barrier()
            self.comm.finish_host_side()
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
