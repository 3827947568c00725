# SPDX-License-Identifier: Apache-2.0
"""The heap of this process in host memory, and the mapped heaps of other processes."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from typing import Protocol
from weakref import WeakValueDictionary

import torch

from ringcomm import _native
from ringcomm.errors import ArgumentError, HeapError, RendezvousError, UnsupportedError
from ringcomm.memory.numa import own_binding
from ringcomm.process import (
    control_groups,
    free_address_space_bytes,
    largest_file_bytes,
    memory_limit_bytes,
    warn_of_unknown,
)
from ringcomm.rendezvous.launchers import read_environment

# ---- Freed memory: whether the C library keeps it, or returns it to the system ------------------

# NOTE [Freed memory]
# A backward frees a gradient as soon as it is reduced, and stage 3 frees a unit's parameters as
# soon as they were used. glibc's malloc returns freed memory to the system once the top of malloc's
# heap has more free memory than a limit: twice the largest allocation that was ever freed. The
# system zeroes returned memory page by page when it is allocated again. So a step of a GPT of 25 M
# FP32 parameters has 2,500 to 10,000 page faults, of 3 us each on a virtual machine. It takes 1.06
# (stage 2) to 1.18 (stage 3) times as long as a step without them.
# The limit depends only on allocations of at most 32 MiB (M_MMAP_THRESHOLD in mallopt(3)). So
# keep_freed_memory() makes and frees an allocation of nearly this size, without touching its pages.
# It sets the limit to its maximum: the process keeps at most 64 MiB more. If the environment or
# mallopt() sets a threshold, glibc uses it instead; other allocators are not affected.

# The largest allocation that raises glibc's limit, less the overhead that malloc and torch add.
_LARGEST_BYTES = (32 << 20) - (64 << 10)


def keep_freed_memory() -> None:
    """Makes glibc keep the memory that backward frees; see NOTE [Freed memory]."""
    torch.empty(_LARGEST_BYTES, dtype=torch.uint8, device="cpu")


def give_back_freed() -> None:
    """Returns freed memory from the C library to the system.

    The library keeps freed allocations of less than 32 MiB for the thread that made them, and
    autograd's threads make the gradients: a GPT of 202 M bfloat16 parameters on 2 ranks kept 470
    MiB per rank. C libraries without malloc_trim() keep the memory.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


# The heap of this process, and tensors in it.
#
# A process has one heap, made at first use and shared by all its communicators. Its capacity is
# only address space: pages are committed when memory is allocated. The file that holds the heap has
# no name, so the system frees it however the process ends.

HEAP_BYTES_VARIABLE = "RINGCOMM_HEAP_BYTES"
HEAP_DIR_VARIABLE = "RINGCOMM_HEAP_DIR"
SMALLEST_HEAP_BYTES = 2 << 20
# The largest size that the kernel can map: user addresses have 47 bits.
LARGEST_HEAP_BYTES = 1 << 47
MOST_DIGITS = 20
_SIZE_SUFFIXES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class _ProcessHeap:
    """Holds the heap of this process; a forked child starts with a new, empty object."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.heap: _native.Heap | None = None


_process = _ProcessHeap()
_inherited: list[_ProcessHeap] = []


def _forget_heap_in_child() -> None:
    # The pages still belong to the parent. The child keeps the objects so that no destructor frees
    # the parent's memory, and makes a heap of its own at first use.
    global _process
    _inherited.append(_process)
    _process = _ProcessHeap()


os.register_at_fork(after_in_child=_forget_heap_in_child)


def parse_bytes(text: str, name: str) -> int:
    """Reads a size such as ``1073741824``, ``512M`` or ``8GiB``.

    Raises:
        ArgumentError: the text is not a size; the message contains ``name``.
    """
    stripped = text.strip().lower().removesuffix("ib").removesuffix("b")
    digits = stripped.rstrip("kmgt")
    unit = _SIZE_SUFFIXES.get(stripped[len(digits) :])
    # int() raises its own error if a number has thousands of digits, so check the length first.
    if unit is None or not digits.strip().isdecimal() or len(digits) > MOST_DIGITS:
        raise ArgumentError(
            f"{name}: expected a number of bytes such as 1073741824, 512M or 8G, got {text[:80]!r}"
        )
    return int(digits) * unit


def default_heap_bytes(world_size: int = 1) -> int:
    """Returns the default size of the heap: half of the memory that this process may use.

    The process may use the machine's memory, or the smaller limit of its control groups. Under an
    address-space limit (``ulimit -v``) the ranks of the node share half of the address space, since
    each rank maps all heaps. The heap also stays below a file size limit (``ulimit -f``), and below
    the size of the file system of ``RINGCOMM_HEAP_DIR``.

    Args:
        world_size: ranks of the communicator that needs the heap; used as the number of ranks on
            this node if no launcher gives this number.
    """
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    sizes = [min(memory_bytes, memory_limit_bytes() or memory_bytes) // 2]
    address_space_bytes = free_address_space_bytes()
    if address_space_bytes is not None:
        launched = read_environment()
        ranks = launched.local_world_size if launched.world_size > 1 else world_size
        sizes.append(address_space_bytes // 2 // ranks)
    file_bytes = largest_file_bytes()
    if file_bytes is not None:
        sizes.append(file_bytes)
    directory = os.environ.get(HEAP_DIR_VARIABLE, "")
    if directory:
        sizes += _size_of(directory)
    # Round down to a multiple of the smallest heap, since a limit may have any size.
    whole = min(sizes) // SMALLEST_HEAP_BYTES * SMALLEST_HEAP_BYTES
    return max(whole, SMALLEST_HEAP_BYTES)


def _size_of(directory: str) -> list[int]:
    """Returns [size of a folder's file system]; [] if it has no limit or the folder is missing."""
    try:
        status = os.statvfs(directory)
    except OSError:
        return []  # the later attempt to make the heap there raises the error
    return [status.f_blocks * status.f_frsize] if status.f_blocks else []


def _wanted_heap_bytes(heap_bytes: int | None, world_size: int) -> int:
    warn_of_unknown()
    if heap_bytes is None:
        text = os.environ.get(HEAP_BYTES_VARIABLE, "")
        if text:
            heap_bytes = parse_bytes(text, HEAP_BYTES_VARIABLE)
        else:
            heap_bytes = default_heap_bytes(world_size)
    if not SMALLEST_HEAP_BYTES <= heap_bytes <= LARGEST_HEAP_BYTES:
        raise ArgumentError(
            f"heap_bytes: expected at least {SMALLEST_HEAP_BYTES} bytes and at most "
            f"{LARGEST_HEAP_BYTES}, got {heap_bytes}; "
            f"pass a larger heap_bytes= or set {HEAP_BYTES_VARIABLE}"
        )
    return heap_bytes


def process_heap(heap_bytes: int | None = None, world_size: int = 1) -> _native.Heap:
    """Returns the heap of this process; makes it at the first use.

    Args:
        heap_bytes: capacity in bytes; None means ``RINGCOMM_HEAP_BYTES`` if set, else
            :func:`default_heap_bytes`.
        world_size: ranks of the communicator that needs the heap.

    Raises:
        HeapError: the heap cannot be made, or the existing heap is smaller than requested.
        ArgumentError: the size is not usable.
    """
    process = _process
    with process.lock:
        heap = process.heap
        if heap is None:
            heap = process.heap = _make_heap(_wanted_heap_bytes(heap_bytes, world_size))
        elif heap_bytes is not None and heap.capacity_bytes < heap_bytes:
            raise HeapError(
                f"heap_bytes={heap_bytes}: the heap of this process exists already with "
                f"{heap.capacity_bytes} bytes; ask for the larger size at its first use, or set "
                f"{HEAP_BYTES_VARIABLE}"
            )
        return heap


_NO_DESCRIPTOR = (
    "No file descriptor is left: raise the limit of open files (ulimit -n), or close files"
)


def _make_heap(capacity_bytes: int) -> _native.Heap:
    directory = os.environ.get(HEAP_DIR_VARIABLE, "")
    groups = [str(folder) for folder in control_groups("memory")]
    try:
        return _native.Heap(capacity_bytes, directory, groups, own_binding().nodes)
    except OSError as error:
        where = directory or "anonymous shared memory"
        raise HeapError(
            f"heap: cannot make a heap of {capacity_bytes} bytes in {where}: "
            f"{error.strerror or error}. {_advice(error.errno, directory)}"
        ) from error


def _advice(code: int | None, directory: str) -> str:
    """Returns the remedy for error ``code``, with which making a heap in ``directory`` failed."""
    if code in (errno.EMFILE, errno.ENFILE):
        return _NO_DESCRIPTOR
    if code == errno.EFBIG:
        return (
            f"Set {HEAP_BYTES_VARIABLE} (or heap_bytes=) to a smaller size, or raise the limit on "
            f"the size of files (ulimit -f), which is {largest_file_bytes()} bytes"
        )
    if code == errno.ENOMEM:
        free_bytes = free_address_space_bytes()
        limit = ""
        if free_bytes is not None:
            limit = f", or raise the limit of the address space (ulimit -v), of which {free_bytes}"
            limit += " bytes are left"
        return (
            f"Set {HEAP_BYTES_VARIABLE} (or heap_bytes=) to a smaller size, which each rank of the "
            f"node maps{limit}"
        )
    if directory:
        return (
            f"{HEAP_DIR_VARIABLE}={directory} must be an existing folder of a tmpfs or hugetlbfs "
            "that this user may write to, such as /dev/shm. Without the variable the heap needs "
            "no folder"
        )
    return (
        "The kernel or a filter of system calls refuses memfd_create, at any size. Set "
        f"{HEAP_DIR_VARIABLE} to a folder of a tmpfs, such as /dev/shm"
    )


def allocate(size_bytes: int, operation: str) -> _native.Allocation:
    """Returns an allocation of the process's heap, which is freed when the object dies.

    Raises:
        HeapError: too little free memory; the message names the needed and the free bytes.
    """
    heap = process_heap()
    try:
        return heap.allocate(size_bytes)
    except OSError as error:
        raise no_room_error(operation, heap, error) from error


def no_room_error(operation: str, heap: _native.Heap, error: OSError) -> HeapError:
    """Returns the error for an allocation that does not fit into ``heap``, with advice.

    Args:
        operation: the operation that allocates.
        heap: the heap that is full.
        error: the error of the native allocation; its text names the needed bytes.
    """
    free_bytes = heap.capacity_bytes - heap.used_bytes
    head = f"{operation}: {error.strerror}; {free_bytes} of the heap's {heap.capacity_bytes} bytes "
    directory = os.environ.get(HEAP_DIR_VARIABLE, "")
    if error.errno == errno.ENOBUFS:
        advice = f"Free tensors of the heap, or raise {HEAP_BYTES_VARIABLE} (or heap_bytes=) before"
        advice += " the heap's first use"
    elif directory:
        advice = (
            f"Free tensors of the heap, or enlarge the file system of {directory} (mount -o "
            f"remount,size=; docker run --shm-size), or unset {HEAP_DIR_VARIABLE}. A larger "
            f"{HEAP_BYTES_VARIABLE} cannot help"
        )
    else:
        advice = (
            "Free tensors, end what else uses the memory, or raise the memory limit of the control "
            f"group (container). A larger {HEAP_BYTES_VARIABLE} cannot help"
        )
    return HeapError(f"{head}are free. {advice}")


# The heaps of other processes. This process maps each heap once; all its communicators share it.


class HeapAddress(Protocol):
    """The address of a rank's heap: the process id, a descriptor in that process, and a token."""

    @property
    def rank(self) -> int: ...
    @property
    def pid(self) -> int: ...
    @property
    def fd(self) -> int: ...
    @property
    def capacity_bytes(self) -> int: ...
    @property
    def token(self) -> int: ...


class MappedHeap:
    """One peer's heap, mapped in this process until its last user is gone.

    ``mapping`` is the native object, ``base_ptr`` the heap's address in this process; ``pid`` is 0
    if the peer is a thread of this process.
    """

    __slots__ = ("__weakref__", "base_ptr", "mapping", "pid")

    def __init__(self, mapping: _native.PeerHeap | _native.Heap, pid: int) -> None:
        self.mapping = mapping
        self.base_ptr: int = mapping.base_ptr
        self.pid = pid


_Key = tuple[int, int, int]
_lock = threading.Lock()
_mapped: WeakValueDictionary[_Key, MappedHeap] = WeakValueDictionary()
_inherited_mappings: list[MappedHeap] = []


def _forget_mappings_in_child() -> None:
    global _lock, _mapped
    _lock = threading.Lock()
    _inherited_mappings.extend(_mapped.values())
    _mapped = WeakValueDictionary()


os.register_at_fork(after_in_child=_forget_mappings_in_child)


def map_heap(handle: HeapAddress, own: _native.Heap, operation: str) -> MappedHeap:
    """Returns the heap that ``handle`` names, mapped into this process.

    Args:
        handle: the handle, as received from the peer.
        own: the heap of this process; a peer that is a thread of this process needs no mapping.
        operation: the name of the operation, for errors.

    Raises:
        UnsupportedError: the kernel does not let this process map the peer's memory.
        RendezvousError: the peer is gone, or another process now has its process id.
    """
    if handle.token == own.token:
        return MappedHeap(own, pid=0)
    key = (handle.pid, handle.fd, handle.token)
    with _lock:
        found = _mapped.get(key)
        if found is not None:
            return found
        try:
            mapping = _native.PeerHeap.open(
                handle.pid, handle.fd, handle.capacity_bytes, handle.token
            )
        except PermissionError as error:
            raise UnsupportedError(
                f"{operation}: the kernel does not let this process map the heap of rank "
                f"{handle.rank} (pid {handle.pid}): {error}. All ranks must run as one user, "
                "in one user namespace, and be dumpable"
            ) from error
        except OSError as error:
            raise RendezvousError(
                f"{operation}: cannot map the heap of rank {handle.rank} (pid {handle.pid}): "
                f"{error}. {_mapping_advice(error.errno)}"
            ) from error
        found = _mapped[key] = MappedHeap(mapping, handle.pid)
        return found


def _mapping_advice(code: int | None) -> str:
    """Returns the remedy for error ``code``, with which mapping a peer's heap failed."""
    if code in (errno.EMFILE, errno.ENFILE):
        return _NO_DESCRIPTOR
    if code == errno.ENOMEM:
        return (
            "Each rank maps the heaps of all ranks of its node: set "
            f"{HEAP_BYTES_VARIABLE} to a smaller size on all ranks, or raise the limit of the "
            "address space (ulimit -v) or of mappings (sysctl vm.max_map_count)"
        )
    return (
        "Is that process alive? Ranks on machines that are clones of each other need a "
        "RINGCOMM_NODE_ID for each machine"
    )
