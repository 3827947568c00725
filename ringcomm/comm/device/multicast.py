"""The windows of a communicator's ranks for ``algorithm="multicast"``, made when they meet."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from ringcomm.comm.arguments import CallChecks, NativeOp
from ringcomm.comm.options import CommOptions
from ringcomm.cuda.multicast import MulticastWindow, granularity_bytes, why_not
from ringcomm.errors import RendezvousError, UnsupportedError
from ringcomm.json_reader import read_fields
from ringcomm.memory.device_heap import DeviceHeap
from ringcomm.memory.device_peers import DeviceHandle
from ringcomm.rendezvous.descriptors import DescriptorInbox, send_descriptor
from ringcomm.rendezvous.handles import Meeting, Rendezvous

__all__ = ["MULTICAST", "check_multicast", "make_window"]

MULTICAST = "multicast"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OPS = ("SUM", "AVG")
_INSTEAD = "or leave CommOptions.multicast_bytes at 0 and use another algorithm"
_PRELOADED = ("multicast_float32", "rc_multicast_sum")
_POLL_S = 0.05


@dataclass(frozen=True)
class _Ability:
    """A rank's word on its device, and where it receives the object's descriptor (hex)."""

    refusal: str
    granularity_bytes: int
    inbox: str


def make_window(
    rendezvous: Rendezvous,
    meeting: Meeting,
    heap: DeviceHeap,
    handles: Sequence[DeviceHandle],
    options: CommOptions,
) -> MulticastWindow | None:
    """Makes this rank's window, bound with those of all ranks; None if the options ask for none.

    All ranks call it, once they know that they have equal options. Kernels may use the window when
    all ranks have returned.

    Raises:
        UnsupportedError: a device has no multicast, or two ranks share one.
        RendezvousError: a rank did not come in time, or failed, for one of these reasons perhaps.
    """
    if options.multicast_bytes == 0:
        return None
    runtime, device, world_size = heap.runtime, heap.device, meeting.world_size
    refusal, unit_bytes = why_not(runtime, device), 0
    if not refusal:
        # No call has to load it while a peer waits; other dtypes' load at their first call.
        runtime.find_kernel(device, *_PRELOADED)
        unit_bytes = granularity_bytes(runtime, device, world_size)
    inbox = DescriptorInbox()
    try:
        mine = _Ability(refusal, unit_bytes, inbox.name.hex())
        texts = rendezvous.everyone("multicast", asdict(mine))
        operation = meeting.operation
        abilities = [
            _Ability(**read_fields(_Ability, text, rank, operation, hexadecimal=("inbox",)))
            for rank, text in enumerate(texts)
        ]
        _check_devices(meeting, handles, abilities)
        unit_bytes = max(each.granularity_bytes for each in abilities)
        size_bytes = -(-options.multicast_bytes // unit_bytes) * unit_bytes
        if meeting.rank == 0:
            window = MulticastWindow.create(runtime, device, size_bytes, world_size)
        else:
            descriptor = _receive(rendezvous, meeting, inbox, handles[0].pid)
            try:
                window = MulticastWindow.join(runtime, device, size_bytes, descriptor)
            finally:
                os.close(descriptor)
    finally:
        inbox.close()
    try:
        if meeting.rank == 0:
            _send(meeting, window, abilities)
        # The driver would block in bind() until every device has been added, or for ever.
        rendezvous.everyone("added", {})
        window.bind()
    except BaseException:
        window.close()
        raise
    return window


def _check_devices(
    meeting: Meeting, handles: Sequence[DeviceHandle], abilities: Sequence[_Ability]
) -> None:
    head = f"{meeting.operation}: multicast_bytes"
    if meeting.world_size < 2:
        raise UnsupportedError(f"{head}: expected 2 ranks or more, got 1. Use more, {_INSTEAD}")
    for handle, ability in zip(handles, abilities, strict=True):
        if ability.refusal:
            raise UnsupportedError(
                f"{head}: expected devices with multicast, but {handle.place} has none: "
                f"{ability.refusal}. Use GPUs of sm_90 or later under one NVSwitch, {_INSTEAD}"
            )
    for rank, handle in enumerate(handles):
        shared = next((other for other in handles[:rank] if other.uuid == handle.uuid), None)
        if shared is not None:
            raise UnsupportedError(
                f"{head}: expected a device for each rank, but {handle.place} has that of rank "
                f"{shared.rank}, and a multicast object takes a device once. Give each rank a "
                f"device of its own, {_INSTEAD}"
            )


def _send(meeting: Meeting, window: MulticastWindow, abilities: Sequence[_Ability]) -> None:
    descriptor = window.export()
    try:
        for rank, ability in enumerate(abilities[1:], 1):
            try:
                send_descriptor(bytes.fromhex(ability.inbox), descriptor)
            except OSError as error:
                raise UnsupportedError(
                    f"{meeting.operation}: multicast_bytes: cannot hand a file descriptor to rank "
                    f"{rank}: {error.strerror}. Do the ranks run in containers that do not share "
                    f"a network namespace? Share it, {_INSTEAD}"
                ) from error
    finally:
        os.close(descriptor)


def _receive(
    rendezvous: Rendezvous, meeting: Meeting, inbox: DescriptorInbox, sender_pid: int
) -> int:
    while not meeting.deadline.is_over():
        descriptor = inbox.receive(sender_pid, _POLL_S)
        if descriptor is not None:
            return descriptor
        rendezvous.look_for_failures([0])
    raise RendezvousError(
        f"{meeting.operation}: multicast_bytes: waited {meeting.deadline.timeout_s:g} s for the "
        "multicast object of rank 0, which did not come. See what that rank reports, or raise "
        "timeout="
    )


def check_multicast(checks: CallChecks, dtype: torch.dtype, reduction: NativeOp) -> None:
    """Raises UnsupportedError for a reduction that NVSwitches do not offer."""
    if dtype not in DTYPES or reduction.name not in OPS:
        dtypes = ", ".join(map(str, DTYPES))
        raise UnsupportedError(
            f'{checks}: algorithm: "multicast" expected {" or ".join(OPS)} of {dtypes}, got '
            f'{reduction.name} of {dtype}. Use "auto", "direct" or "ring"'
        )
