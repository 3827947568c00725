"""The heap of this process on each of its devices, and tensors in it.

One plain device allocation per process and device, made at first use: all communicators and heap
tensors on the device share it, and a peer that has mapped it reaches all of them. It is given
back at exit, after the mappings of peers' heaps.
"""

from __future__ import annotations

import os
import threading
from math import prod
from multiprocessing.util import Finalize

import torch

from ringcomm.errors import ArgumentError, HeapError
from ringcomm.memory import device_runtime
from ringcomm.memory.device_blocks import HEAP_BYTES_VARIABLE, DeviceHeap
from ringcomm.memory.device_runtime import DeviceRuntime, Stream
from ringcomm.memory.heap import parse_bytes

DEFAULT_HEAP_BYTES = 1 << 30
# The driver shares memory between processes by whole pages of 2 MiB: a smaller allocation would
# show the peers what lies beside it.
PAGE_BYTES = 2 << 20
# After the communicators (100) and the mappings of peers' heaps (90).
EXIT_PRIORITY = 80


class _Process:
    """What this process holds; replaced as a whole in a forked child."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.heaps: dict[int, DeviceHeap] = {}
        self.closes_at_exit = False


_process = _Process()
_inherited: list[_Process] = []


def _forget_heaps_in_child() -> None:
    global _process
    _inherited.append(_process)
    _process = _Process()


os.register_at_fork(after_in_child=_forget_heaps_in_child)


def _wanted_bytes(runtime: DeviceRuntime, device: int, heap_bytes: int | None) -> int:
    text = os.environ.get(HEAP_BYTES_VARIABLE, "")
    if heap_bytes is None and text:
        heap_bytes = parse_bytes(text, HEAP_BYTES_VARIABLE)
    if heap_bytes is None:
        heap_bytes = max(PAGE_BYTES, min(DEFAULT_HEAP_BYTES, runtime.memory_info(device)[0] // 2))
    if heap_bytes < PAGE_BYTES:
        raise ArgumentError(
            f"heap_bytes: expected at least {PAGE_BYTES} bytes, got {heap_bytes}; pass a larger "
            f"heap_bytes= or set {HEAP_BYTES_VARIABLE}"
        )
    return -(-heap_bytes // PAGE_BYTES) * PAGE_BYTES


def _make_heap(runtime: DeviceRuntime, device: int, capacity_bytes: int) -> DeviceHeap:
    try:
        return DeviceHeap(runtime, device, capacity_bytes)
    except MemoryError as error:
        free_bytes, total_bytes = runtime.memory_info(device)
        raise HeapError(
            f"device heap: needs {capacity_bytes} bytes, free {free_bytes} bytes of the "
            f"{total_bytes} bytes of device {device} ({runtime.identity(device).name}): {error}. "
            f"Set {HEAP_BYTES_VARIABLE} (or heap_bytes=) to a smaller size, or end what else uses "
            "the device; torch gives cached memory back with torch.cuda.empty_cache()"
        ) from error


def device_heap(device: int, heap_bytes: int | None = None) -> DeviceHeap:
    """The heap of this process on ``device``, made now if this is the first use.

    Args:
        device: ordinal in this process.
        heap_bytes: capacity in bytes, rounded up to 2 MiB; None takes
            ``RINGCOMM_CUDA_HEAP_BYTES``, or else 1 GiB, or half of the device's free memory if
            that is less.

    Raises:
        HeapError: it cannot be made, or it exists already and is smaller than asked.
        ArgumentError: the size is not usable.
        UnsupportedError: this process has no devices; says why.
        ForkError: this process was forked from one that used its devices.
    """
    runtime = device_runtime.current()
    process = _process
    with process.lock:
        heap = process.heaps.get(device)
        if heap is not None and heap.runtime is not runtime:
            # device_runtime.use() has set another one meanwhile. First out of the table: who finds
            # a heap there may read it.
            del process.heaps[device]
            heap.close()
            heap = None
        if heap is None:
            capacity_bytes = _wanted_bytes(runtime, device, heap_bytes)
            heap = process.heaps[device] = _make_heap(runtime, device, capacity_bytes)
            if not process.closes_at_exit:
                # Not atexit, which the children of multiprocessing skip.
                Finalize(None, close_heaps, exitpriority=EXIT_PRIORITY)
                process.closes_at_exit = True
        elif heap_bytes is not None and heap.capacity_bytes < heap_bytes:
            raise HeapError(
                f"heap_bytes={heap_bytes}: the heap on device {device} exists already with "
                f"{heap.capacity_bytes} bytes; ask for the larger size at its first use, or set "
                f"{HEAP_BYTES_VARIABLE}"
            )
        return heap


def existing_heap(device: int) -> DeviceHeap | None:
    """The heap on ``device`` if there is one."""
    return _process.heaps.get(device)


def heap_of_token(token: int) -> DeviceHeap | None:
    """This process's heap of that token, whichever device it is on."""
    heaps = list(_process.heaps.values())
    return next((heap for heap in heaps if heap.token == token), None)


def close_heaps() -> None:
    """Gives all heaps of this process back; runs at exit."""
    process = _process
    with process.lock:
        while process.heaps:
            _, heap = process.heaps.popitem()
            heap.close()


def keep_for_stream(device: int, tensor: torch.Tensor, stream: Stream) -> None:
    """Keeps the tensor's memory from reuse before the work on ``stream`` that uses it is done.

    For tensors of any origin: those of the heap wait as described above, all others as torch's
    ``Tensor.record_stream`` does it.
    """
    heap = existing_heap(device)
    block = heap.find_block(tensor.untyped_storage().data_ptr()) if heap is not None else None
    if block is not None:
        block.keep_for_stream(stream)
    else:
        device_runtime.current().keep_for_stream(tensor, stream)


def device_empty(
    shape: tuple[int, ...], dtype: torch.dtype, device: int, operation: str = "ringcomm.empty"
) -> torch.Tensor:
    """A contiguous tensor in the heap of ``device``, not initialised; see ``ringcomm.empty``."""
    count_elems = prod(shape)
    if count_elems == 0:
        on_device = device_runtime.current().torch_device(device)
        return torch.empty(shape, dtype=dtype, device=on_device)
    block = device_heap(device).allocate(count_elems * dtype.itemsize, operation)
    return block.tensor().view(dtype).view(shape)
