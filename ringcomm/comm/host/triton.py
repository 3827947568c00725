# SPDX-License-Identifier: Apache-2.0
"""Collectives that Triton kernels run in place of the native ones: ``kernels="triton"``."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from ringcomm import _native
from ringcomm.algorithms import spelled
from ringcomm.comm.host.arguments import DTYPE_NAMES, CallChecks, NativeOp
from ringcomm.comm.host.rendezvous import Membership
from ringcomm.cuda.runtime import DeviceRuntime
from ringcomm.errors import UnsupportedError

if TYPE_CHECKING:
    from ringcomm._tl.geometry import Geometry
    from ringcomm._tl.launch import KernelPlan

__all__ = [
    "KERNELS",
    "NATIVE",
    "ONE_RANK",
    "TRITON",
    "HostTriton",
    "KernelTarget",
    "TritonEnd",
    "check_kernels",
    "check_triton",
    "device_kernel_target",
    "host_kernel_target",
    "require_triton",
]

# All ranks of a call must run the same kernels. The header of the call names them, so different
# kernels are a mismatch like any other. The first call that uses Triton imports Triton.

NATIVE, TRITON = "native", "triton"
KERNELS = (NATIVE, TRITON)
_DTYPE_OF = {code: name for name, code in _native.DTYPES.items()}
_OP_OF = {code: name for name, code in _native.OPS.items()}
_AUTO = _native.ALGORITHMS["auto"]
_FORMS = ("auto", "one_shot", "ring")  # names in options
ONE_RANK = (
    "Triton's interpreter runs one kernel of a process at a time, so ranks that are threads of one "
    'process would wait for each other. Use kernels="native", or a process per rank'
)


def require_triton(checks: CallChecks) -> None:
    """Raises UnsupportedError if Triton cannot be imported."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            f'{checks}: kernels="triton" needs Triton, which cannot be imported ({error}). '
            "pip install triton"
        ) from error


def check_kernels(checks: CallChecks, kernels: str) -> None:
    """Raises ArgumentError if a call names unknown kernels."""
    if kernels not in KERNELS:
        checks.fail(f"kernels: expected one of {', '.join(KERNELS)}, got {kernels!r}")


def check_triton(
    checks: CallChecks, algorithm: str, dtype: torch.dtype, reduction: NativeOp | None
) -> None:
    """Checks a call that asks for Triton's kernels.

    Args:
        checks: the checks of the call.
        algorithm: the algorithm's name in the call.
        dtype: the elements' dtype code.
        reduction: None if nothing is reduced.

    Raises:
        UnsupportedError: Triton cannot be imported, or its kernels do not support the call.
    """
    require_triton(checks)
    from ringcomm._tl.launch import DTYPES, OPS

    advice = 'Use kernels="native"'
    forms = [spelled(form, checks.op) for form in _FORMS]
    if algorithm not in forms:
        raise UnsupportedError(
            f'{checks}: kernels="triton" has the algorithms {", ".join(forms)}, got '
            f"{algorithm!r}. {advice}"
        )
    if reduction is None:
        return
    if DTYPE_NAMES[dtype] not in DTYPES or reduction.name not in OPS:
        raise UnsupportedError(
            f'{checks}: kernels="triton" reduces {", ".join(DTYPES)} by {" and ".join(OPS)}, got '
            f"{DTYPE_NAMES[dtype]} by {reduction.name}. {advice}"
        )


class Runner(Protocol):
    """Runs a plan on buffers at two addresses; returns a native status."""

    def __call__(self, plan: KernelPlan, in_ptr: int, out_ptr: int) -> int: ...


class TritonEnd:
    """Runs the collectives of a native communicator that Triton kernels can replace.

    Args:
        run: runs a plan.
        world_size: the communicator's number of ranks.
        family: code of the algorithm that replaces "auto".
    """

    def __init__(self, run: Runner, world_size: int, family: int) -> None:
        self._run = run
        self._world_size = world_size
        self._family = family

    def chosen(self, algorithm: int) -> int:
        """Returns ``algorithm``, or the code of the family if it is the code of "auto"."""
        return self._family if algorithm == _AUTO else algorithm

    def run(self, plan: KernelPlan, in_ptr: int, out_ptr: int) -> int:
        """Runs a plan that the caller has made; returns a native status."""
        return self._run(plan, in_ptr, out_ptr)

    def all_reduce(
        self,
        in_ptr: int,
        out_ptr: int,
        elems: int,
        dtype: int,
        op: int,
        factor: float,
        algorithm: int,
    ) -> int:
        """Makes an all-reduce. Like the methods below, it has the native method's arguments.

        ``factor`` is for ops that Triton does not support, and is ignored.
        """
        from ringcomm._tl.launch import plan_all_reduce

        name = _DTYPE_OF[dtype]
        size_bytes = elems * getattr(torch, name).itemsize
        plan = plan_all_reduce(
            size_bytes, name, _OP_OF[op], self.chosen(algorithm), self._world_size
        )
        return self._run(plan, in_ptr, out_ptr)

    def reduce_scatter(
        self,
        in_ptr: int,
        out_ptr: int,
        out_elems: int,
        dtype: int,
        op: int,
        factor: float,
        algorithm: int,
    ) -> int:
        from ringcomm._tl.launch import plan_reduce_scatter

        name = _DTYPE_OF[dtype]
        chunk_bytes = out_elems * getattr(torch, name).itemsize
        plan = plan_reduce_scatter(
            chunk_bytes, name, _OP_OF[op], self.chosen(algorithm), self._world_size
        )
        return self._run(plan, in_ptr, out_ptr)

    def all_gather(
        self, in_ptr: int, out_ptr: int, in_bytes: int, dtype: int, algorithm: int
    ) -> int:
        from ringcomm._tl.launch import plan_all_gather

        itemsize = getattr(torch, _DTYPE_OF[dtype]).itemsize
        plan = plan_all_gather(in_bytes, dtype, itemsize, self.chosen(algorithm), self._world_size)
        return self._run(plan, in_ptr, out_ptr)


class HostTriton:
    """The runner of plans on the host, in Triton's interpreter.

    Args:
        core: the native communicator.
        membership: the communicator's members and options.
        checks: the checks of the first call that asks for Triton.

    Raises:
        UnsupportedError: Triton compiles for GPUs here, or a peer is a thread of this process.
    """

    def __init__(self, core: _native.Comm, membership: Membership, checks: CallChecks) -> None:
        require_triton(checks)
        from ringcomm._tl.geometry import Geometry
        from ringcomm._tl.hooks import IS_INTERPRETED

        if not IS_INTERPRETED:
            raise UnsupportedError(
                f'{checks}: on the host kernels="triton" runs in Triton\'s interpreter. Set '
                'TRITON_INTERPRET=1 before Triton is imported, or use kernels="native"'
            )
        others = [heap for rank, heap in enumerate(membership.heaps) if rank != membership.rank]
        if any(heap.pid == 0 for heap in others):
            raise UnsupportedError(f"{checks}: {ONE_RANK}")
        self._core = core
        self._geometry = Geometry.of(core.geometry)
        state_bytes = _native.STRUCTURES["scratch"]
        state_bytes += _native.STRUCTURES["scratch_per_rank"] * len(membership.ranks)
        self._state = ctypes.create_string_buffer(state_bytes * self._geometry.channels)
        table = core.rank_table(ctypes.addressof(self._state))
        self._table = ctypes.create_string_buffer(table, len(table))

    def __call__(self, plan: KernelPlan, in_ptr: int, out_ptr: int) -> int:
        from ringcomm._tl.launch import RankPointers, launch_kernel

        core = self._core
        pointers = RankPointers(ctypes.addressof(self._table), in_ptr, out_ptr)
        core.record_begin(plan.call)
        try:
            timeout_ns = core.timeout_ms * 1_000_000
            launch_kernel(plan, [pointers], timeout_ns, self._geometry, core.health)
        except BaseException as error:
            # Peers wait for data that this rank will never publish.
            core.abort(f"a Triton kernel was interrupted by {type(error).__name__}: {error}")
            core.record_end(_native.STATUSES["aborted"])
            raise
        # After a failure, fault() waits for the abort word, which another thread may raise soon.
        status = _native.STATUSES["aborted"] if core.aborted else 0
        core.record_end(status)
        return status


# In the interpreter the blocks of a grid run one after another, so more blocks only take longer.
HOST_BLOCKS = 8
_SCRATCH = _native.STRUCTURES["table.scratch"]
_HEAPS = _native.STRUCTURES["table.heaps"]


@dataclass(frozen=True)
class KernelTarget:
    """The target of Triton kernels that the user launches on a rank; see ``ringcomm.tl.Context``.

    Attributes:
        table: the bytes of this rank's rank table, which kernels read: the addresses of all ranks.
        geometry: the layout of the communicator's regions.
        heap_device: the device of the heap for symmetric memory, as ``ringcomm.empty`` names it.
        most_blocks: how many blocks of each rank run at once, whatever resources the blocks need:
            one per multiprocessor, divided among the ranks that share a device.
        default_blocks: the number of blocks of a context that names none.
        health: returns the status of a peer's process, for the interpreter; GPU kernels read it
            themselves.
        around: makes the context manager that surrounds a launch.
    """

    table: bytes
    geometry: Geometry
    heap_device: str
    most_blocks: int
    default_blocks: int
    health: Callable[[int], int]
    around: Callable[[], AbstractContextManager[None]]

    @property
    def heaps(self) -> list[int]:
        """Addresses of the ranks' heaps as mapped here, by rank."""
        words = torch.frombuffer(bytearray(self.table), dtype=torch.int64)
        first = _HEAPS // 8
        return [int(word) for word in words[first : first + self.geometry.world]]

    def table_with(self, scratch_ptr: int) -> bytes:
        """Returns the rank table, but with the blocks' states at ``scratch_ptr``."""
        after = _SCRATCH + 8
        return self.table[:_SCRATCH] + scratch_ptr.to_bytes(8, "little") + self.table[after:]

    @contextmanager
    def launching(self) -> Iterator[None]:
        """A context for a launch: the interpreter runs only one kernel of a process at a time."""
        from ringcomm._tl.hooks import IS_INTERPRETED, interpreting

        with self.around(), interpreting(self.health) if IS_INTERPRETED else nullcontext():
            yield


def host_kernel_target(core: _native.Comm, membership: Membership, head: str) -> KernelTarget:
    """Returns the target of a host communicator's kernels: Triton's interpreter in this process.

    Raises:
        UnsupportedError: Triton compiles for GPUs here, or a peer is a thread of this process.
    """
    import triton.language as tl

    from ringcomm._tl.geometry import Geometry
    from ringcomm._tl.hooks import IS_INTERPRETED

    # Triton reads TRITON_INTERPRET when it defines a function. So Triton's own device functions
    # must have been defined for the interpreter as well.
    if not IS_INTERPRETED or type(tl.zeros).__name__ != "InterpretedFunction":
        raise UnsupportedError(
            f"{head}: on the host a Triton kernel runs only in Triton's interpreter. Set "
            "TRITON_INTERPRET=1 before Triton is imported, or use a communicator of a GPU"
        )
    for rank, heap in enumerate(membership.heaps):
        if heap.pid == 0 and rank != membership.rank:
            raise UnsupportedError(
                f"{head}: rank {rank} is a thread of this process, and Triton's interpreter runs "
                "one kernel of a process at a time, so the two would wait for each other. Give "
                "each rank a process"
            )
    geometry = Geometry.of(core.geometry)
    table = core.rank_table(0)
    return KernelTarget(table, geometry, "cpu", 1 << 20, HOST_BLOCKS, core.health, nullcontext)


def device_kernel_target(
    native: _native.DeviceComm, device_ref: tuple[DeviceRuntime, int], blocks: int, head: str
) -> KernelTarget:
    """Returns the target of the kernels of a communicator on a device.

    Args:
        native: the communicator.
        device_ref: the device.
        blocks: the number of this rank's blocks that certainly run at once.
        head: the beginning of an error message.

    Raises:
        UnsupportedError: the interpreter is on for a GPU, or off for an emulated device.
    """
    from ringcomm._tl.geometry import Geometry
    from ringcomm._tl.hooks import IS_INTERPRETED, lives

    runtime, device = device_ref
    if (runtime.kind == "emulated") != IS_INTERPRETED:
        raise UnsupportedError(
            f"{head}: Triton's interpreter (TRITON_INTERPRET=1) reaches only the memory of "
            f"emulated devices, and compiled kernels only that of GPUs; the device is of kind "
            f"{runtime.kind!r}. Change TRITON_INTERPRET before Triton is imported"
        )
    table = runtime.read(device, native.table_ptr, _native.STRUCTURES["table"])
    geometry = Geometry.of(native.geometry)
    name = f"cuda:{device}"
    return KernelTarget(
        table, geometry, name, blocks, blocks, lives, lambda: runtime.on_device(device)
    )
