"""The communicator of ranks on devices: how it is built."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from ringcomm import _native
from ringcomm.comm import device_retired
from ringcomm.comm.calls import Membership
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.device_core import DeviceCore
from ringcomm.comm.device_meeting import meeting_of
from ringcomm.comm.device_messages import DeviceMessages
from ringcomm.comm.device_order import Blocks, order_of
from ringcomm.comm.device_retired import Peer
from ringcomm.comm.host_meeting import rendezvous_of
from ringcomm.comm.topology import Topology
from ringcomm.comm.topology_file import from_json, to_json
from ringcomm.comm.topology_nvml import read_machine
from ringcomm.comm.topology_plan import Plan, plan
from ringcomm.errors import MismatchError, RendezvousError, RingcommError, UnsupportedError
from ringcomm.memory.device_blocks import DeviceHeap
from ringcomm.memory.device_heap import device_heap
from ringcomm.memory.device_links import Links, prove_links
from ringcomm.memory.device_peers import (
    DeviceHandle,
    MappedDeviceHeap,
    make_handle,
    map_device_heap,
)
from ringcomm.memory.exchange import Exchange, Meeting, check_agreement
from ringcomm.memory.records import shown

# Blocks per collective of a rank with a GPU of its own: they must fill its links and leave the rest
# of the multiprocessors to the model. A choice, not swept.
CHANNELS_ALONE = 32
# What every rank loads before its first call, so that no later call of these has to load while a
# peer waits; other dtypes load at their first call.
PRELOADED = (
    ("move", ("rc_move", "rc_packet_move")),
    ("reduce_float32", ("rc_reduce_scatter_sum", "rc_all_reduce_sum", "rc_packet_sum")),
)
# A proof that takes longer has failed: it is a few reads and writes of 8 bytes.
LINK_PROOF_S = 30.0

__all__ = ["DeviceCommunicator"]


@dataclass(frozen=True)
class _Place:
    """Where a rank is; what all ranks must know before they can lay out their regions."""

    pid: int
    stay: int
    uuid: str
    kind: str
    multiprocessors: int
    topology: str

    @classmethod
    def from_json(cls, text: bytes, rank: int, operation: str) -> _Place:
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


class DeviceCommunicator(DeviceMessages, Communicator):
    """A :class:`Communicator` whose tensors are on one device of this rank."""

    _device_index: int
    _plan: Plan
    # Multiprocessors for the kernels of each rank, which run beside those of the ranks that share
    # its device; equal on all ranks.
    _multiprocessors: int

    @property
    def plan(self) -> Plan:
        """The algorithm and the rings that "auto" and "ring" use, and why."""
        return self._plan

    @property
    def heap_device(self) -> torch.device:
        return torch.device("cuda", self._device_index)

    @classmethod
    def _meet_on(
        cls, membership: Membership, device: int, heap_bytes: int | None = None
    ) -> DeviceCommunicator:
        """Rendezvous of the members, each with its device."""
        world_size = len(membership.ranks)
        meeting = rendezvous_of(membership)
        if world_size > _native.MAX_DEVICE_WORLD:
            raise UnsupportedError(
                f"{meeting.operation}: got {world_size} ranks, but a communicator on devices has "
                f"at most {_native.MAX_DEVICE_WORLD}. Build several of fewer ranks"
            )
        exchange = Exchange(meeting)
        core: DeviceCore | None = None
        stay = device_retired.begin_stay()
        try:
            device_retired.reclaim()
            heap = device_heap(device, heap_bytes)
            places = _places(exchange, meeting, heap, stay)
            chosen = plan(_topology(places), [place.uuid for place in places])
            channels = _channels(membership, places)
            _preload(heap)
            core = DeviceCore(heap, membership, channels, chosen.algorithm, stay)
            core.native.limit_message_channels(_message_channels(places, channels))
            handles = _handles(exchange, meeting, core, places)
            mapped = [map_device_heap(handle, heap, meeting.operation) for handle in handles]
            core.reach(handles, mapped)
            links = Links(heap, membership.rank, handles, mapped, core.native.words_bytes)
            proof_s = min(LINK_PROOF_S, meeting.timeout_s)
            deadline = time.monotonic() + proof_s
            prove_links(links, meeting.operation, deadline, proof_s, exchange.look_for_failures)
            core.connect(chosen.rings)
            communicator = cls._join(membership, core, handles, mapped)
            exchange.confirm()
            core.activate()
        except BaseException as error:
            exchange.fail(error)
            if core is not None:
                # A peer may have seen all ranks ready: it shall not wait for this one.
                core.abort(f"rendezvous failed: {error}")
                core.close()
            device_retired.end_stay(stay)
            raise
        communicator._device_index = device
        communicator._plan = chosen
        communicator._multiprocessors = max(1, min(_shares(places)))
        return communicator

    @classmethod
    def _join(
        cls,
        membership: Membership,
        core: DeviceCore,
        handles: Sequence[DeviceHandle],
        mapped: Sequence[MappedDeviceHeap],
    ) -> DeviceCommunicator:
        """With the ranks that share this process and device, and with its other communicators."""
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
        identity = runtime.identity(core.device)
        kernel = runtime.find_kernel(core.device, *_largest_kernel())
        capacity = kernel.blocks_per_multiprocessor * identity.multiprocessors
        order = order_of(runtime, core.device)
        meeting = None
        if len(local) > 1:
            proofs = [handles[rank].proof for rank in local]
            meeting = meeting_of(runtime, core.device, local, proofs, order)
        # Every rank may have a send and a receive under way.
        messages = 2 * core.native.message_channels * len(local)
        blocks = Blocks(core.native.channels * len(local), messages)
        order.join(meeting or core, blocks, capacity, operation)
        return cls(core, membership, order, meeting)

    def _rebuild(self, membership: Membership) -> Communicator:
        return self._meet_on(membership, self._device_index)


def _largest_kernel() -> tuple[str, str]:
    unit, names = PRELOADED[-1]
    return unit, names[0]


def _preload(heap: DeviceHeap) -> None:
    for unit, names in PRELOADED:
        for name in names:
            heap.runtime.find_kernel(heap.device, unit, name)


def _places(exchange: Exchange, meeting: Meeting, heap: DeviceHeap, stay: int) -> list[_Place]:
    identity = heap.runtime.identity(heap.device)
    # One rank reads the machine for all: in different containers they may see different GPUs, and
    # equal plans need equal input.
    topology = _read_topology(heap) if meeting.rank == 0 else ""
    mine = _Place(
        os.getpid(), stay, identity.uuid, heap.runtime.kind, identity.multiprocessors, topology
    )
    texts = exchange.everyone("place", asdict(mine))
    operation = meeting.operation
    places = [_Place.from_json(text, rank, operation) for rank, text in enumerate(texts)]
    for rank, place in enumerate(places):
        if place.kind != heap.runtime.kind:
            raise MismatchError(
                f"{operation}: rank {rank} has a device of kind {place.kind!r}, this rank one of "
                f"kind {heap.runtime.kind!r}. Give all ranks the same kind of device="
            )
    return places


def _read_topology(heap: DeviceHeap) -> str:
    kind = heap.runtime.kind
    if kind == "cuda":
        return to_json(read_machine())
    return to_json(Topology(machine=kind, absent=f"devices of kind {kind!r} have no NVML"))


def _topology(places: Sequence[_Place]) -> Topology:
    return from_json(places[0].topology, "topology of rank 0")


def _message_channels(places: Sequence[_Place], channels: int) -> int:
    """Blocks per message, equal on all ranks: what collectives of ``channels`` blocks leave.

    Every rank of a GPU may have a send and a receive under way, and a collective between them,
    whose blocks may each take a multiprocessor.
    """
    left = min(_shares(places)) - channels
    return max(1, min(left // 2, _message_share(places)))


def _message_share(places: Sequence[_Place]) -> int:
    """Blocks per message with which messages take a quarter of the multiprocessors at most."""
    return max(1, min(_native.MESSAGE_CHANNELS, min(_shares(places)) // 8))


def _shares(places: Sequence[_Place]) -> list[int]:
    """By rank: the multiprocessors of its GPU, divided among the ranks that share it."""
    ranks_on = Counter(place.uuid for place in places)
    return [place.multiprocessors // ranks_on[place.uuid] for place in places]


def _channels(membership: Membership, places: Sequence[_Place]) -> int:
    """Blocks per collective, equal on all ranks: as many as the fullest GPU has for each rank.

    Room for the messages of all its ranks is left.
    """
    if membership.options.channels:
        return membership.options.channels
    share = max(1, min(_shares(places)) - 2 * _message_share(places))
    alone = len({place.uuid for place in places}) == len(places)
    return min(CHANNELS_ALONE, share) if alone else share


def _handles(
    exchange: Exchange, meeting: Meeting, core: DeviceCore, places: Sequence[_Place]
) -> list[DeviceHandle]:
    core.announce([Peer.of(place.pid, place.stay) for place in places])
    recorder = core.recorder.address if core.recorder is not None else None
    mine = make_handle(core.heap, core.rank, core.world_size, core.region, core.layout, recorder)
    texts = exchange.everyone("heap", asdict(mine))
    operation = meeting.operation
    handles = [DeviceHandle.from_json(text, rank, operation) for rank, text in enumerate(texts)]
    try:
        for rank, theirs in enumerate(handles):
            check_agreement(meeting, mine, theirs, rank)
    except RingcommError:
        core.announce(None)  # all ranks compare all handles, so none goes on
        raise
    return handles
