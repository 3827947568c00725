"""The device heaps of the other ranks, mapped here once each, however many communicators use them.

A peer is a thread of this process on the same device (the heap is this rank's own), a thread on
another device (peer access between two devices of this process), or another process (CUDA IPC,
which never works in the process that made the handle).
"""

from __future__ import annotations

import os
import secrets
import threading
from dataclasses import dataclass
from multiprocessing.util import Finalize
from weakref import WeakValueDictionary

from ringcomm.cuda.runtime import DeviceRuntime
from ringcomm.errors import MismatchError, RendezvousError, UnsupportedError
from ringcomm.json_reader import read_fields
from ringcomm.lifetime import until_exit
from ringcomm.memory.device_heap import TOKEN_BYTES, DeviceHeap, heap_of_token
from ringcomm.rendezvous.handles import machine_identity

# After the communicators (100), before the heaps of this process (80).
EXIT_PRIORITY = 90

USUAL_CAUSES = (
    "Usual causes: containers that do not share the IPC and PID namespaces; an IOMMU, or PCIe ACS, "
    "that redirects traffic between GPUs; MIG instances, which cannot reach each other; a GPU that "
    "CUDA_VISIBLE_DEVICES hides from one of the two; a driver or GPU without peer access. "
    "'ringcomm topo' and 'nvidia-smi topo -p2p rw' show what the driver reports. Ranks with "
    "different RINGCOMM_NODE_ID are on different nodes, which NCCL joins"
)


@dataclass(frozen=True)
class RecorderAddress:
    """The place of a rank's flight recorder, in the heap of its process on the host."""

    rank: int
    pid: int
    fd: int
    capacity_bytes: int
    token: int
    offset_bytes: int


@dataclass(frozen=True)
class DeviceHandle:
    """The place of a rank's device heap and of its region, and what all ranks must agree on.

    ``ipc_handle`` is hexadecimal; it is empty when the driver gave none, for the reason that
    ``ipc_refusal`` states. ``proof`` is random in every communicator: what the ranks write to
    each other when they prove their links cannot be left over from an earlier one. The fields of
    the recorder are 0 where nothing is recorded.
    """

    rank: int
    world_size: int
    host: str
    boot: str
    pid_namespace: str
    pid: int
    kind: str
    device: int
    uuid: str
    pci_bus_id: str
    device_name: str
    ipc_handle: str
    ipc_refusal: str
    capacity_bytes: int
    token: int
    proof: int
    region_offset_bytes: int
    region_bytes: int
    recorder_fd: int
    recorder_capacity_bytes: int
    recorder_token: int
    recorder_offset_bytes: int
    layout: str

    @classmethod
    def from_json(cls, text: bytes, rank: int, operation: str) -> DeviceHandle:
        """Reads what ``rank`` posted; raises RendezvousError for anything but a valid handle."""
        return cls(**read_fields(cls, text, rank, operation, hexadecimal=("ipc_handle",)))

    @property
    def recorder(self) -> RecorderAddress:
        return RecorderAddress(
            self.rank,
            self.pid,
            self.recorder_fd,
            self.recorder_capacity_bytes,
            self.recorder_token,
            self.recorder_offset_bytes,
        )

    @property
    def place(self) -> str:
        """The rank and its device, as errors name them."""
        return (
            f"rank {self.rank} (pid {self.pid}, device {self.device}: {self.device_name} at "
            f"{self.pci_bus_id})"
        )


def _export(heap: DeviceHeap) -> tuple[str, str]:
    """The heap's IPC handle, or why there is none: ranks of one process need none."""
    try:
        return heap.runtime.export_handle(heap.device, heap.base_ptr).hex(), ""
    except UnsupportedError as error:
        return "", str(error)


def make_handle(
    heap: DeviceHeap,
    rank: int,
    world_size: int,
    region: tuple[int, int],
    layout: str,
    recorder: RecorderAddress | None = None,
) -> DeviceHandle:
    """Makes what this rank tells its peers; ``region`` is offset in the heap and size, in bytes."""
    host, boot, pid_namespace = machine_identity()
    identity = heap.runtime.identity(heap.device)
    ipc_handle, ipc_refusal = _export(heap)
    return DeviceHandle(
        rank=rank,
        world_size=world_size,
        host=host,
        boot=boot,
        pid_namespace=pid_namespace,
        pid=os.getpid(),
        kind=heap.runtime.kind,
        device=heap.device,
        uuid=identity.uuid,
        pci_bus_id=identity.pci_bus_id,
        device_name=identity.name,
        ipc_handle=ipc_handle,
        ipc_refusal=ipc_refusal,
        capacity_bytes=heap.capacity_bytes,
        token=heap.token,
        proof=secrets.randbits(63),
        region_offset_bytes=region[0],
        region_bytes=region[1],
        recorder_fd=recorder.fd if recorder else 0,
        recorder_capacity_bytes=recorder.capacity_bytes if recorder else 0,
        recorder_token=recorder.token if recorder else 0,
        recorder_offset_bytes=recorder.offset_bytes if recorder else 0,
        layout=layout,
    )


class MappedDeviceHeap:
    """A rank's device heap as this process reaches it: ``base_ptr`` for kernels and copies.

    ``pid`` is 0 when the rank is a thread of this process. ``heap`` is that thread's heap then.
    """

    __slots__ = ("__weakref__", "base_ptr", "heap", "pid")

    def __init__(self, base_ptr: int, pid: int, heap: DeviceHeap | None) -> None:
        self.base_ptr = base_ptr
        self.pid = pid
        self.heap = heap


class _OpenedHeap(MappedDeviceHeap):
    """Another process's heap, opened for one device; closed when the last user lets go."""

    __slots__ = ("_closed", "_device", "_opened_by", "_runtime")

    def __init__(self, runtime: DeviceRuntime, device: int, handle: DeviceHandle) -> None:
        super().__init__(
            runtime.open_handle(device, bytes.fromhex(handle.ipc_handle)), handle.pid, None
        )
        self._runtime = runtime
        self._device = device
        self._opened_by = os.getpid()
        self._closed = False

    def close(self) -> None:
        # In a forked child the mapping is the parent's.
        if not self._closed and self._opened_by == os.getpid():
            self._closed = True
            self._runtime.close_handle(self._device, self.base_ptr)

    @until_exit
    def __del__(self) -> None:
        if hasattr(self, "_closed"):  # it has been opened
            self.close()


class _Process:
    """The heaps that this process has mapped; replaced as a whole in a forked child."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.opened: WeakValueDictionary[tuple[int, int, int], _OpenedHeap] = WeakValueDictionary()
        self.closes_at_exit = False


_process = _Process()
_inherited: list[tuple[_Process, list[_OpenedHeap]]] = []


def _forget_mappings_in_child() -> None:
    global _process
    _inherited.append((_process, list(_process.opened.values())))
    _process = _Process()


os.register_at_fork(after_in_child=_forget_mappings_in_child)


def close_mappings() -> None:
    """Closes all mappings of other processes' heaps; runs at exit, before the own are freed."""
    for mapped in list(_process.opened.values()):
        mapped.close()


def opened_heaps() -> int:
    """Returns how many heaps of other processes are mapped now."""
    return len(_process.opened)


def map_device_heap(handle: DeviceHandle, own_heap: DeviceHeap, operation: str) -> MappedDeviceHeap:
    """The heap that ``handle`` names, as kernels on ``own_heap``'s device reach it.

    Args:
        handle: as received from the peer.
        own_heap: this rank's heap.
        operation: named in errors.

    Raises:
        UnsupportedError: the two devices cannot reach each other; names both and usual causes.
        MismatchError: the ranks use different kinds of device.
        RendezvousError: the peer is gone, or is not who it said.
    """
    if handle.token == own_heap.token:
        return MappedDeviceHeap(own_heap.base_ptr, 0, own_heap)
    if handle.kind != own_heap.runtime.kind:
        raise MismatchError(
            f"{operation}: {handle.place} has a device of kind {handle.kind!r}, this rank one of "
            f"kind {own_heap.runtime.kind!r}. Give all ranks the same kind of device="
        )
    if (handle.pid, handle.pid_namespace) == (os.getpid(), machine_identity()[2]):
        return _peer_device(handle, own_heap, operation)
    return _open(handle, own_heap, operation)


def _peer_device(handle: DeviceHandle, own_heap: DeviceHeap, operation: str) -> MappedDeviceHeap:
    heap = heap_of_token(handle.token)
    if heap is None:
        raise RendezvousError(
            f"{operation}: {handle.place} is in this process, which has no such heap. "
            "Was it closed, or the runtime replaced, meanwhile?"
        )
    try:
        own_heap.runtime.enable_peer(own_heap.device, heap.device)
    except UnsupportedError as error:
        raise _unreachable(handle, own_heap, operation, str(error)) from error
    return MappedDeviceHeap(heap.base_ptr, 0, heap)


def _open(handle: DeviceHandle, own_heap: DeviceHeap, operation: str) -> MappedDeviceHeap:
    process, runtime, device = _process, own_heap.runtime, own_heap.device
    if not handle.ipc_handle:
        raise _unreachable(handle, own_heap, operation, handle.ipc_refusal)
    key = (device, handle.pid, handle.token)
    with process.lock:
        opened = process.opened.get(key)
        if opened is None:
            try:
                opened = _OpenedHeap(runtime, device, handle)
            except UnsupportedError as error:
                raise _unreachable(handle, own_heap, operation, str(error)) from error
            if not process.closes_at_exit:
                # Not atexit, which the children of multiprocessing skip.
                Finalize(None, close_mappings, exitpriority=EXIT_PRIORITY)
                process.closes_at_exit = True
            found = int.from_bytes(runtime.read(device, opened.base_ptr, TOKEN_BYTES), "little")
            if found != handle.token:
                raise RendezvousError(
                    f"{operation}: what this process mapped is not the heap that {handle.place} "
                    f"announced: its token is {found:#x}, announced {handle.token:#x}. Has the "
                    "peer ended meanwhile?"
                )
            process.opened[key] = opened
        return opened


def _unreachable(
    handle: DeviceHandle, own_heap: DeviceHeap, operation: str, said: str
) -> UnsupportedError:
    identity = own_heap.runtime.identity(own_heap.device)
    return UnsupportedError(
        f"{operation}: device {own_heap.device} ({identity.name} at {identity.pci_bus_id}) of this "
        f"rank cannot reach the memory of {handle.place}: {said}. {USUAL_CAUSES}"
    )
