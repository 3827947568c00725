# SPDX-License-Identifier: Apache-2.0
"""The rendezvous of ranks on devices: ranks compare devices, choose rings, and prove all links."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any, TypeVar

import torch

from ringcomm import _native
from ringcomm.algorithms import spelled
from ringcomm.comm.device import lifecycle
from ringcomm.comm.device.core import DeviceCore
from ringcomm.comm.device.lifecycle import Peer
from ringcomm.comm.device.sharing import Blocks, DeviceOrder, JointLaunch, joint_launch_of, order_of
from ringcomm.comm.device.topology import Topology, from_json, read_machine
from ringcomm.comm.host.arguments import CallChecks, NativeOp
from ringcomm.comm.host.options import CommOptions
from ringcomm.comm.host.rendezvous import Membership, spec_of
from ringcomm.cuda.multicast import MulticastWindow, granularity_bytes, why_not
from ringcomm.errors import (
    MismatchError,
    RendezvousError,
    RingcommError,
    UnsupportedError,
    timed_out,
)
from ringcomm.json_reader import read_fields, shown
from ringcomm.memory.device_heap import (
    USUAL_CAUSES,
    DeviceHandle,
    DeviceHeap,
    MappedDeviceHeap,
    device_heap,
    make_handle,
    map_device_heap,
)
from ringcomm.process import Deadline
from ringcomm.rendezvous.handles import (
    DescriptorInbox,
    Rendezvous,
    RendezvousSpec,
    check_announced,
    check_one_machine,
    forming,
    machine_of,
    send_descriptor,
)

__all__ = [
    "MULTICAST",
    "Links",
    "check_multicast",
    "make_window",
    "prove_links",
    "rendezvous_on_device",
]


# ---- The windows of a communicator's ranks for ``algorithm="multicast"``, made at the rendezvous


MULTICAST = "multicast"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OPS = ("SUM", "AVG")
_INSTEAD = "or leave CommOptions.multicast_bytes at 0 and use another algorithm"
_PRELOADED = ("multicast_float32", "rc_multicast_sum")
_POLL_S = 0.05


@dataclass(frozen=True)
class _Ability:
    """The report of a rank: why its device has no multicast ("" if it has), the granularity, the
    bytes of its heap that can be bound, and the inbox in which the rank receives the object's
    descriptor (hex)."""

    refusal: str
    granularity_bytes: int
    heap_bytes: int
    inbox: str


@dataclass(frozen=True)
class _Added:
    """The report of a rank that has added its device to the multicast object: the most bytes of a
    rank's heap that can be bound to the object."""

    heap_bytes: int


def make_window(
    rendezvous: Rendezvous,
    spec: RendezvousSpec,
    heap: DeviceHeap,
    handles: Sequence[DeviceHandle],
    options: CommOptions,
) -> MulticastWindow | None:
    """Makes this rank's multicast window and binds it; None if ``multicast_bytes`` is 0.

    All ranks call this function, after they have compared their options. Kernels may use the window
    when all ranks have returned.

    Raises:
        UnsupportedError: a device has no multicast, or two ranks share a device.
        RendezvousError: a rank did not arrive in time or failed, perhaps for one of these reasons.
    """
    if options.multicast_bytes == 0:
        return None
    runtime, device, world_size = heap.runtime, heap.device, spec.world_size
    refusal, unit_bytes = why_not(runtime, device), 0
    if not refusal:
        # Load the FP32 kernel now, while no peer waits; kernels of other dtypes load at first use.
        runtime.find_kernel(device, *_PRELOADED)
        unit_bytes = granularity_bytes(runtime, device, world_size)
    inbox = DescriptorInbox()
    try:
        heap_bytes = heap.memory.bindable_bytes(unit_bytes) if unit_bytes else 0
        mine = _Ability(refusal, unit_bytes, heap_bytes, inbox.name.hex())
        texts = rendezvous.everyone("multicast", asdict(mine))
        operation = spec.operation
        abilities = [
            _Ability(**read_fields(_Ability, text, rank, operation, hexadecimal=("inbox",)))
            for rank, text in enumerate(texts)
        ]
        _check_devices(spec, handles, abilities)
        unit_bytes = max(each.granularity_bytes for each in abilities)
        size_bytes = -(-options.multicast_bytes // unit_bytes) * unit_bytes
        heap_bytes = min(each.heap_bytes for each in abilities) // unit_bytes * unit_bytes
        if spec.rank == 0:
            window = MulticastWindow.create(runtime, device, size_bytes, world_size, heap_bytes)
        else:
            descriptor = _receive(rendezvous, spec, inbox, handles[0].pid)
            try:
                window = MulticastWindow.join(runtime, device, size_bytes, descriptor, heap_bytes)
            finally:
                os.close(descriptor)
    finally:
        inbox.close()
    try:
        if spec.rank == 0:
            _send(spec, window, abilities)
        # Wait here, with a deadline: bind() would block until every device is added, or forever.
        added = rendezvous.everyone("added", asdict(_Added(window.heap_bytes)))
        window.heap_bytes = read_fields(_Added, added[0], 0, spec.operation)["heap_bytes"]
        window.heap_refusal = window.heap_refusal or _heap_refusal(abilities, window)
        window.bind()
    except BaseException:
        window.close()
        raise
    return window


def _heap_refusal(abilities: Sequence[_Ability], window: MulticastWindow) -> str:
    """Returns why the ranks' heaps are not bound to the object; "" if they are."""
    for rank, ability in enumerate(abilities):
        if ability.heap_bytes == 0:
            return f"the heap of rank {rank} does not grow, or grows by less than the object's unit"
    return "" if window.heap_bytes else "rank 0 could not make an object for the ranks' heaps"


def _check_devices(
    spec: RendezvousSpec, handles: Sequence[DeviceHandle], abilities: Sequence[_Ability]
) -> None:
    head = f"{spec.operation}: multicast_bytes"
    if spec.world_size < 2:
        raise UnsupportedError(f"{head}: expected 2 ranks or more, got 1. Add ranks, {_INSTEAD}")
    for handle, ability in zip(handles, abilities, strict=True):
        if ability.refusal:
            raise UnsupportedError(
                f"{head}: expected devices with multicast, but {handle.named} has none: "
                f"{ability.refusal}. Use GPUs of sm_90 or later under one NVSwitch, {_INSTEAD}"
            )
    for rank, handle in enumerate(handles):
        shared = next((other for other in handles[:rank] if other.uuid == handle.uuid), None)
        if shared is not None:
            raise UnsupportedError(
                f"{head}: expected a device for each rank, but {handle.named} has the device of "
                f"rank {shared.rank}, and a multicast object takes each device only once. Give "
                f"each rank a device of its own, {_INSTEAD}"
            )


def _send(spec: RendezvousSpec, window: MulticastWindow, abilities: Sequence[_Ability]) -> None:
    descriptor = window.export()
    try:
        for rank, ability in enumerate(abilities[1:], 1):
            try:
                send_descriptor(bytes.fromhex(ability.inbox), descriptor)
            except OSError as error:
                raise UnsupportedError(
                    f"{spec.operation}: multicast_bytes: cannot hand a file descriptor to rank "
                    f"{rank}: {error.strerror}. Do the ranks run in containers that do not share "
                    f"a network namespace? Share it, {_INSTEAD}"
                ) from error
    finally:
        os.close(descriptor)


def _receive(
    rendezvous: Rendezvous, spec: RendezvousSpec, inbox: DescriptorInbox, sender_pid: int
) -> int:
    while not spec.deadline.is_over():
        descriptor = inbox.receive(sender_pid, _POLL_S)
        if descriptor is not None:
            return descriptor
        rendezvous.look_for_failures([0])
    raise timed_out(
        f"{spec.operation}: multicast_bytes:",
        spec.deadline.timeout_s,
        "the multicast object of rank 0, which did not come",
        "See what that rank reports",
        kind=RendezvousError,
    )


def check_multicast(checks: CallChecks, dtype: torch.dtype, reduction: NativeOp) -> None:
    """Raises UnsupportedError for a reduction that NVSwitches do not offer."""
    if dtype not in DTYPES or reduction.name not in OPS:
        dtypes = ", ".join(map(str, DTYPES))
        raise UnsupportedError(
            f'{checks}: algorithm: "multicast" expected {" or ".join(OPS)} of {dtypes}, got '
            f'{reduction.name} of {dtype}. Use "auto", "{spelled("one_shot", checks.op)}" or "ring"'
        )


C = TypeVar("C")

# A driver may report peer access, and even map a peer's memory, although data never arrive. So
# every rank writes to every peer, reads every peer's memory, and checks the words that peers wrote
# to its own memory, with the pointers that kernels will use.

LINE_BYTES = 64
WORD_BYTES = 8
FIRST_POLL_S = 0.0002
LAST_POLL_S = 0.02


@dataclass(frozen=True)
class Links:
    """The links from this rank to all ranks, itself included.

    Every rank's region has world_size lines of 64 bytes from ``scratch_offset_bytes`` on. Each rank
    writes one line in every region. Nothing else uses the lines until all ranks have proved their
    links, and the proof does not clear them.
    """

    heap: DeviceHeap
    rank: int
    handles: Sequence[DeviceHandle]
    mapped: Sequence[MappedDeviceHeap]
    scratch_offset_bytes: int

    def line_ptr(self, owner: int, writer: int) -> int:
        """Returns this rank's address of the line in ``owner``'s region that ``writer`` writes."""
        region_ptr = self.mapped[owner].base_ptr + self.handles[owner].region_offset_bytes
        return region_ptr + self.scratch_offset_bytes + writer * LINE_BYTES

    def word(self, owner: int, writer: int) -> bytes:
        """Returns ``writer``'s word for its line at ``owner``; words differ by communicator."""
        handle = self.handles[owner]
        text = f"{handle.token} {handle.proof} {owner} {writer}"
        return hashlib.sha256(text.encode()).digest()[:WORD_BYTES]

    def holds(self, owner: int, writer: int) -> bool:
        """True if this rank now reads ``writer``'s word in its line in ``owner``'s region."""
        ptr = self.line_ptr(owner, writer)
        return self.heap.runtime.read(self.heap.device, ptr, WORD_BYTES) == self.word(owner, writer)

    def write(self, owner: int) -> None:
        ptr, word = self.line_ptr(owner, self.rank), self.word(owner, self.rank)
        self.heap.runtime.write(self.heap.device, ptr, word)


def prove_links(
    links: Links,
    operation: str,
    deadline: Deadline,
    look: Callable[[], None] | None = None,
) -> None:
    """Writes to all peers and returns when this rank has seen what all peers wrote.

    All ranks call this between the exchange of handles and the confirmation that all are ready. A
    rank may return while a peer is still checking.

    Args:
        links: the links to all ranks, whose heaps are mapped.
        operation: the operation that errors name.
        deadline: deadline of the proof.
        look: called during a long wait; raises if a peer cannot arrive any more.

    Raises:
        RendezvousError: a link does not carry data, or a peer did not arrive; the message names
            both ranks, both devices, the direction, and usual causes.
    """
    # A rank writes the line in its own region first: it is there when a peer sees the rank's word.
    for owner in (links.rank, *(r for r in range(len(links.handles)) if r != links.rank)):
        links.write(owner)
    peers = [rank for rank in range(len(links.handles)) if rank != links.rank]
    unseen = [(links.rank, peer) for peer in peers] + [(peer, peer) for peer in peers]
    pause_s = FIRST_POLL_S
    while True:
        unseen = [line for line in unseen if not links.holds(*line)]
        if not unseen:
            return
        if deadline.is_over():
            raise _broken_link(links, unseen, operation, deadline.timeout_s)
        if look is not None and pause_s == LAST_POLL_S:
            look()
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, LAST_POLL_S)


def _broken_link(
    links: Links, unseen: list[tuple[int, int]], operation: str, timeout_s: float
) -> RingcommError:
    owner, writer = unseen[0]
    mine, theirs = links.handles[links.rank].named, links.handles[writer].named
    if owner == links.rank:
        failure = f"what {theirs} writes into the memory of {mine}, which does not arrive"
    else:
        failure = f"{mine} to see in the memory of {theirs} what that rank wrote there"
    peers = sorted({peer for _, peer in unseen})
    others = f"Links with ranks {peers[1:]} fail, too. " if len(peers) > 1 else ""
    return timed_out(
        f"{operation}:",
        timeout_s,
        failure,
        f"{others}{USUAL_CAUSES}. Or that rank did not get this far in time: see what it reports",
        kind=RendezvousError,
    )


# Blocks per collective of a rank with a GPU of its own. They must fill the GPU's links and leave
# the other multiprocessors to the model. No benchmark has compared other numbers.
CHANNELS_ALONE = 32
# Kernels that every rank loads before its first call, so that no call loads them while a peer
# waits. Kernels of other dtypes load at their first call.
PRELOADED = (
    ("move", ("rc_move", "rc_list_move", "rc_ll_move")),
    (
        "reduce_float32",
        (
            "rc_reduce_scatter_sum",
            "rc_reduce_scatter_list_sum",
            "rc_all_reduce_sum",
            "rc_ll_sum",
        ),
    ),
)
# A proof that takes longer has failed, since it only reads and writes a few words of 8 bytes.
LINK_PROOF_S = 30.0


@dataclass(frozen=True)
class _DeviceInfo:
    """The device of a rank, which all ranks must know before they can lay out their regions."""

    pid: int
    presence: int
    uuid: str
    kind: str
    multiprocessors: int
    topology: str
    machine: str

    @classmethod
    def from_json(cls, text: bytes, rank: int, operation: str) -> _DeviceInfo:
        record = json.loads(text)
        values: dict[str, Any] = {}
        for field in fields(cls):
            value = values[field.name] = record.get(field.name)
            if type(value).__name__ != field.type:
                raise RendezvousError(
                    f"{operation}: expected {field.name} of rank {rank} to be of type "
                    f"{field.type}, got {shown(value)}"
                )
        return cls(**values)


def rendezvous_on_device(
    membership: Membership, device: int, heap_bytes: int | None, build: Callable[..., C]
) -> C | None:
    """Holds the rendezvous of the members' devices, and builds this rank's communicator.

    Args:
        membership: the communicator's members; its store also serves the rendezvous.
        device: this rank's device, as an ordinal in this process.
        heap_bytes: capacity of the device's heap, if the heap is not made yet.
        build: makes the communicator from the core, the membership, the device's order and, if
            ranks share process and device, their joint launch.

    Returns:
        The communicator; None on all ranks if the members are on several machines, or have
        different values of ``RINGCOMM_NODE_ID``.

    Raises:
        RendezvousError: a rank is missing or failed; the message names it.
        MismatchError: the ranks disagree.
        UnsupportedError: too many ranks, unreachable devices, or an option ``sum_group_size``.
        HeapError: no memory for the heap, or for the communicator's region in the heap.
    """
    world_size = len(membership.ranks)
    spec = spec_of(membership)
    _refuse_sum_groups(membership, spec)
    with forming(spec.operation):
        rendezvous = Rendezvous(spec)
    core: DeviceCore | None = None
    presence = lifecycle.begin_presence()
    try:
        with forming(spec.operation):
            lifecycle.reclaim()
            heap = device_heap(device, heap_bytes)
            infos = _exchange_infos(rendezvous, spec, heap, presence, membership.node_id)
            if len({info.machine for info in infos}) > 1:
                lifecycle.end_presence(presence)
                return None
            if world_size > _native.MAX_DEVICE_WORLD:
                raise UnsupportedError(
                    f"{spec.operation}: got {world_size} ranks, but a communicator on devices "
                    f"of one node has at most {_native.MAX_DEVICE_WORLD}. Build several "
                    "communicators of fewer ranks"
                )
            chosen = _topology(infos).choose([info.uuid for info in infos])
            channels = _channels(membership, infos)
            _preload(heap)
            multiprocessors = max(1, min(_shares(infos)))
            core = DeviceCore(heap, membership, chosen, channels, multiprocessors, presence)
            core.native.limit_message_channels(_message_channels(infos, channels))
            handles = _handles(rendezvous, spec, core, infos)
            mapped = [
                map_device_heap(handle, heap, spec.operation, handles[membership.rank].named)
                for handle in handles
            ]
            core.reach(handles, mapped)
            links = Links(heap, membership.rank, handles, mapped, core.native.words_bytes)
            _prove_now(links, rendezvous, spec)
            core.connect(
                chosen.rings, make_window(rendezvous, spec, heap, handles, membership.options)
            )
            met = membership.after_rendezvous((), spec.lookout.processes)
            communicator = build(core, met, *_join(membership, core, handles, mapped))
            rendezvous.confirm()
            core.activate()
    except BaseException as error:
        if core is not None:
            # A peer may have seen all ranks ready: the abort ends its wait for this rank.
            core.abort(f"rendezvous failed: {error}")
            core.close()  # frees file descriptors, which the store may need
        rendezvous.fail(error)
        lifecycle.end_presence(presence)
        raise
    return communicator


def _refuse_sum_groups(membership: Membership, spec: RendezvousSpec) -> None:
    if membership.options.sum_group_size:
        raise UnsupportedError(
            f"{spec.operation}: got CommOptions(sum_group_size="
            f"{membership.options.sum_group_size}), but devices sum only in rank order. Use "
            "sum_group_size=0, or a communicator on the host"
        )


def _prove_now(links: Links, rendezvous: Rendezvous, spec: RendezvousSpec) -> None:
    """Proves the links within LINK_PROOF_S or the rendezvous' timeout; see :func:`prove_links`."""
    proof_s = min(LINK_PROOF_S, spec.deadline.timeout_s)
    peers = [rank for rank in range(spec.world_size) if rank != spec.rank]
    look = partial(rendezvous.look_for_failures, peers)
    prove_links(links, spec.operation, Deadline(proof_s), look)


def _join(
    membership: Membership,
    core: DeviceCore,
    handles: Sequence[DeviceHandle],
    mapped: Sequence[MappedDeviceHeap],
) -> tuple[DeviceOrder, JointLaunch | None]:
    """Returns the order of this device's launches, and the joint launch if ranks share it."""
    heap = core.heap
    local = [rank for rank, each in enumerate(mapped) if each.heap is heap]
    operation = f"communicator {membership.name!r}"
    if len(local) > _native.MAX_RANKS_PER_LAUNCH:
        raise UnsupportedError(
            f"{operation}: {len(local)} ranks of this process share device {core.device}, and "
            f"one launch carries at most {_native.MAX_RANKS_PER_LAUNCH}. Use fewer ranks, more "
            "devices, or processes"
        )
    runtime = heap.runtime
    blocks_each = _blocks_each(heap)
    capacity = blocks_each * runtime.usable_multiprocessors(core.device)
    order = order_of(runtime, core.device, core.driver)
    joint = None
    if len(local) > 1:
        proofs = [handles[rank].proof for rank in local]
        joint = joint_launch_of(runtime, core.device, local, proofs, order)
    # Every rank may have a send and a receive running at once.
    messages = 2 * core.native.message_channels * len(local)
    # A world of one rank waits for no peer, so its blocks need not all run at once.
    waiting = core.native.channels * len(local) if core.world_size > 1 else 0
    blocks = Blocks(waiting, messages)
    order.join(joint or core, blocks, capacity, operation)
    core.calls.set_needed_multiprocessors(-(-blocks.collective // blocks_each))
    core.native.set_ledger(order.ledger, id(joint or core))
    return order, joint


def _blocks_each(heap: DeviceHeap) -> int:
    """Returns how many blocks of any one kernel that waits for peers fit on a multiprocessor.

    Only the native kernels of FP32 sums are examined. Kernels of other dtypes, and Triton's, have
    equally many threads; tests/comm/device/test_device_occupancy.py compares all of them.
    """
    runtime, device = heap.runtime, heap.device
    return min(
        runtime.find_kernel(device, unit, name).blocks_per_multiprocessor
        for unit, names in PRELOADED
        for name in names
    )


def _preload(heap: DeviceHeap) -> None:
    for unit, names in PRELOADED:
        for name in names:
            heap.runtime.find_kernel(heap.device, unit, name)


def _exchange_infos(
    rendezvous: Rendezvous, spec: RendezvousSpec, heap: DeviceHeap, presence: int, node_id: str
) -> list[_DeviceInfo]:
    identity = heap.runtime.identity(heap.device)
    # Rank 0 reads the machine's topology for all ranks: equal plans need equal input, and ranks in
    # different containers may see different GPUs.
    topology = _read_topology(heap) if spec.rank == 0 else ""
    mine = _DeviceInfo(
        os.getpid(),
        presence,
        identity.uuid,
        heap.runtime.kind,
        heap.runtime.usable_multiprocessors(heap.device),
        topology,
        machine_of(node_id),
    )
    operation = spec.operation
    found: dict[int, _DeviceInfo] = {}

    def read(rank: int, text: bytes) -> None:
        found[rank] = info = _DeviceInfo.from_json(text, rank, operation)
        if info.machine == mine.machine:
            spec.lookout.learn(rank, info.pid)

    rendezvous.everyone("device", asdict(mine), read)
    infos = [found[rank] for rank in range(spec.world_size)]
    for rank, info in enumerate(infos):
        if info.kind != heap.runtime.kind:
            raise MismatchError(
                f"{operation}: rank {rank} has a device of kind {info.kind!r}, this rank one of "
                f"kind {heap.runtime.kind!r}. Give all ranks the same kind of device="
            )
    return infos


def _read_topology(heap: DeviceHeap) -> str:
    kind = heap.runtime.kind
    if kind == "cuda":
        return read_machine().to_json()
    return Topology(machine=kind, absent=f"devices of kind {kind!r} have no NVML").to_json()


def _topology(infos: Sequence[_DeviceInfo]) -> Topology:
    return from_json(infos[0].topology, "topology of rank 0")


def _message_channels(infos: Sequence[_DeviceInfo], channels: int) -> int:
    """Returns how many blocks a send or receive may use while a collective uses ``channels``.

    The number is equal on all ranks. Every rank of a GPU may run a send, a receive and a collective
    at once, and each of their blocks may take a multiprocessor.
    """
    left = min(_shares(infos)) - channels
    return max(1, min(left // 2, _message_share(infos)))


def _message_share(infos: Sequence[_DeviceInfo]) -> int:
    """Returns the most blocks per message; 1 if ranks share a GPU, since collectives need blocks.

    On a GPU with one rank, messages take at most 1/4 of the multiprocessors.
    """
    if not _alone(infos):
        return 1
    return max(1, min(_native.MESSAGE_CHANNELS, min(_shares(infos)) // 8))


def _shares(infos: Sequence[_DeviceInfo]) -> list[int]:
    """Returns for each rank its equal share of the multiprocessors of its GPU."""
    ranks_on = Counter(info.uuid for info in infos)
    return [info.multiprocessors // ranks_on[info.uuid] for info in infos]


def _alone(infos: Sequence[_DeviceInfo]) -> bool:
    """True when no two ranks share a GPU."""
    return len({info.uuid for info in infos}) == len(infos)


def _channels(membership: Membership, infos: Sequence[_DeviceInfo]) -> int:
    """Returns the blocks per collective: a rank's share of the GPU that has the most ranks.

    The number is equal on all ranks, and leaves blocks for the messages of all ranks of a GPU. A
    world of one rank has no links to fill, and its kernels are bound by the GPU's memory: they take
    all multiprocessors. No benchmark has compared other numbers.
    """
    if membership.options.channels:
        return membership.options.channels
    if len(infos) == 1:
        return infos[0].multiprocessors
    share = max(1, min(_shares(infos)) - 2 * _message_share(infos))
    return min(CHANNELS_ALONE, share) if _alone(infos) else share


def _handles(
    rendezvous: Rendezvous, spec: RendezvousSpec, core: DeviceCore, infos: Sequence[_DeviceInfo]
) -> list[DeviceHandle]:
    core.announce([Peer.of(info.pid, info.presence) for info in infos])
    recorder = core.recorder.address if core.recorder is not None else None
    mine = make_handle(
        core.heap,
        core.rank,
        core.world_size,
        core.region,
        core.layout,
        recorder,
        shares=any(info.pid != os.getpid() for info in infos),
    )
    texts = rendezvous.everyone("heap", asdict(mine))
    operation = spec.operation
    handles = [DeviceHandle.from_json(text, rank, operation) for rank, text in enumerate(texts)]
    try:
        for rank, theirs in enumerate(handles):
            check_announced(spec, mine, theirs, rank)
            check_one_machine(spec, mine, theirs)
    except RingcommError:
        # Every rank makes this check and fails, so no rank will write into another rank's region.
        core.announce(None)
        raise
    return handles
