# SPDX-License-Identifier: Apache-2.0
"""Point-to-point calls on a device, alone and in batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ringcomm.comm.device.core import MESSAGES
from ringcomm.comm.device.launch import DeviceCallEngine, LaunchedWork, device_comm_of
from ringcomm.comm.host.arguments import put_back, readable, size_bytes, writable
from ringcomm.comm.host.core import Core
from ringcomm.comm.host.engine import Call, Work
from ringcomm.comm.host.messages import check_tag, other_rank
from ringcomm.cuda.runtime import Stream
from ringcomm.errors import UnsupportedError, where

__all__ = ["DeviceMessages", "PeerMessage", "TensorAndPeer", "launch_batch", "launches_of"]

Tensor = torch.Tensor
# Messages between two ranks match in the order in which they are sent and received; a receive
# checks the tag of the next message, and does not search for a tag. Sends run on one stream of the
# communicator and receives on another, so that two ranks may both send before they receive.
#
# NOTE [Messages of threads] A copy from a device to pageable memory (``tensor.cpu()``) holds the
# driver's lock until all work before it on its stream is done. If this work waits for a message
# from another thread of this process, the other thread cannot launch the message, and both wait
# until the deadline. So if ranks of a process share a device, ``wait()`` of a message waits on the
# host, without the lock: later work on the stream then waits for no peer. (Seen on an H100 with
# CUDA 13.0: the other thread was blocked in cudaEventRecord or cudaStreamCreate.) Other calls do
# not need this, since one launch carries them for all ranks.

# (tensor, peer) of a message.
TensorAndPeer = tuple[Tensor, int]

# A batch is sent in as few launches as possible. A kernel that sends to a rank may wait until that
# rank receives. Two ranks that both send in one launch and receive in the next would wait for each
# other. In a single launch they send and receive at once.


class PeerMessage(NamedTuple):
    """One message of a batch.

    Attributes:
        messages: makes the messages of a communicator on a device.
        tensor, peer, tag, is_send: as :meth:`DeviceMessages.isend` and ``irecv`` take them.
    """

    messages: DeviceMessages
    tensor: Tensor
    peer: int
    tag: int
    is_send: bool


def launches_of(messages: Sequence[PeerMessage]) -> list[list[int]]:
    """Returns the launches that carry ``messages``, in order, as indices into ``messages``.

    A launch carries messages of one communicator and tag, at most one in each direction with each
    rank. Further messages between two ranks follow in the launches of later rounds, in the order of
    the batch, which is equal on both ranks. All ranks order launches by round, then by tag, then by
    communicator, so that no launch waits for a later launch.
    """
    turns: Counter[tuple[int, int, bool]] = Counter()
    launches: dict[tuple[int, int, int], list[int]] = {}
    for index, message in enumerate(messages):
        one_way = (id(message.messages), message.peer, message.is_send)
        launch = (turns[one_way], message.tag, id(message.messages))
        launches.setdefault(launch, []).append(index)
        turns[one_way] += 1

    def position(launch: tuple[int, int, int]) -> tuple[int, int, str]:
        turn, tag, _ = launch
        return turn, tag, messages[launches[launch][0]].messages.engine.membership.name

    return [launches[launch] for launch in sorted(launches, key=position)]


def launch_batch(messages: Sequence[PeerMessage]) -> LaunchedWork:
    """Launches the messages of one launch, as :func:`launches_of` has grouped them.

    Raises:
        ArgumentError: bad argument; none of these messages was sent.
        RingcommError: a fault; see ``ringcomm.errors``.
    """
    return messages[0].messages.exchange_messages(
        [(message.tensor, message.peer) for message in messages if message.is_send],
        [(message.tensor, message.peer) for message in messages if not message.is_send],
        messages[0].tag,
    )


class DeviceMessages:
    """Makes the sends and receives of a rank on a device.

    Args:
        engine: the communicator's engine.
    """

    def __init__(self, engine: DeviceCallEngine) -> None:
        self.engine = engine
        self._send_stream: Stream | None = None
        self._receive_stream: Stream | None = None

    def send(self, tensor: Tensor, dst: int, tag: int) -> None:
        self.isend(tensor, dst, tag).wait()

    def recv(self, tensor: Tensor, src: int | None, tag: int) -> int:
        work = self.irecv(tensor, src, tag)
        work.wait()
        return work.source_rank()

    def isend(self, tensor: Tensor, dst: int, tag: int) -> Work:
        peer, tag = self.check_message("isend", tensor, dst, tag, write=False)
        return self._post("isend", [(tensor, peer)], [], tag)

    def irecv(self, tensor: Tensor, src: int | None, tag: int) -> Work:
        peer, tag = self.check_message("irecv", tensor, src, tag, write=True)
        return self._post("irecv", [], [(tensor, peer)], tag, source=peer)

    def exchange_messages(
        self, sends: Sequence[TensorAndPeer], receives: Sequence[TensorAndPeer], tag: int = 0
    ) -> LaunchedWork:
        """Sends and receives several messages in one launch; they do not wait for each other.

        Args:
            sends: (tensor, destination); at most one to each rank.
            receives: (tensor, source); at most one from each rank.
            tag: tag of all messages.

        Raises:
            ArgumentError: bad argument, or two messages in one direction with one rank.
            RingcommError: a fault of an earlier call; see ``ringcomm.errors``.
        """
        name = "exchange_messages"
        checked: tuple[list[TensorAndPeer], list[TensorAndPeer]] = ([], [])
        for messages, write in ((sends, False), (receives, True)):
            for tensor, named in messages:
                peer, tag = self.check_message(name, tensor, named, tag, write=write)
                checked[write].append((tensor, peer))
            peers = [peer for _, peer in checked[write]]
            if len(set(peers)) != len(peers):
                self.engine.checks(name).fail(
                    f"expected at most one message to or from each rank, got ranks {peers}"
                )
        return self._post(name, *checked, tag)

    def check_message(
        self, op: str, tensor: Tensor, peer: Any, tag: Any, *, write: bool
    ) -> tuple[int, int]:
        """Checks the arguments of an :meth:`isend`, or of an :meth:`irecv` if ``write``.

        Returns the peer and the tag.
        """
        checks = self.engine.checks(op)
        if write and peer is None:
            raise UnsupportedError(
                f"{checks}: src: expected a rank, got None; on a device a receive waits for one "
                "sender. Name it, or receive into a CPU tensor"
            )
        (checks.output if write else checks.tensor)("tensor", tensor)
        rank = other_rank(checks, "src" if write else "dst", peer, self.engine.rank)
        return rank, check_tag(checks, tag, self.engine)

    def _post(
        self,
        name: str,
        sends: list[TensorAndPeer],
        receives: list[TensorAndPeer],
        tag: int,
        source: int | None = None,
    ) -> LaunchedWork:
        def run(core: Core) -> int:
            out = [(readable(tensor), peer) for tensor, peer in sends]
            into = [(writable(tensor), peer) for tensor, peer in receives]
            device_comm_of(core).messages(*self._spans(out), *self._spans(into), tag)
            for (tensor, _), (dense, _) in zip(receives, into, strict=True):
                put_back(tensor, dense)
            return 0

        into, out = [tensor for tensor, _ in receives], [tensor for tensor, _ in sends]
        call = Call(name, run, into, out)
        engine = self.engine
        engine.admit(call.name, call.outputs, call.inputs)
        runtime, device = engine.device_ref
        with engine.queue.turn, runtime.on_device(device):
            engine.begin_turn(name)
            head = where(name, *engine.rank_of)
            engine.order.sends(engine.joint_launch or engine.device_core, head)
            streams = self._streams(bool(sends), bool(receives))
            engine.message_streams.update(stream.handle for stream in streams)
            first = streams[0]
            current = runtime.current_stream(device)
            for behind in (current, *(other.handle for other in streams[1:])):
                runtime.wait_event(device, first.handle, runtime.record_event(device, behind))
            engine.device_core.native.stream = first.handle
            before = self._messages_enqueued()
            with runtime.on_stream(first):
                self._run_alone(call)
            for other in streams[1:]:
                event = runtime.record_event(device, first.handle)
                runtime.wait_event(device, other.handle, event)
            numbers = (before + 1, self._messages_enqueued())
            done = engine.calls.mark_messages(first.handle, *numbers)
            engine.keep(call, done, (first.handle, current))
        stream_ref, holds = (runtime, device, first), engine.joint_launch is not None
        check = partial(engine.check_work, name)
        work = LaunchedWork(name, call.outputs, stream_ref, done, check, source, holds)
        work.calls = engine.calls
        return work

    def _messages_enqueued(self) -> int:
        records = self.engine.records
        return records.enqueued(MESSAGES) if records is not None else 0

    def _streams(self, sends: bool, receives: bool) -> list[Stream]:
        runtime, device = self.engine.device_ref
        if sends and self._send_stream is None:
            self._send_stream = runtime.make_stream(device)
        if receives and self._receive_stream is None:
            self._receive_stream = runtime.make_stream(device)
        used = (self._send_stream if sends else None, self._receive_stream if receives else None)
        streams = [stream for stream in used if stream is not None]
        return streams or [self.engine.streams.side]

    def _run_alone(self, call: Call) -> None:
        """Launches messages of this rank outside the joint launches of several ranks."""
        engine = self.engine
        engine.sends_alone = True
        try:
            call.run(engine.device_core.native)
        except BaseException as error:
            engine.raise_worded(call.name, error)
        finally:
            engine.sends_alone = False

    def _spans(self, messages: list[TensorAndPeer]) -> tuple[list[int], list[int], int]:
        """Returns addresses and sizes by rank, and a bit mask of the ranks with a message."""
        ptrs, sizes, ranks = [0] * self.engine.world_size, [0] * self.engine.world_size, 0
        for tensor, peer in messages:
            ptrs[peer], sizes[peer] = tensor.data_ptr(), size_bytes(tensor)
            ranks |= 1 << peer
        return ptrs, sizes, ranks
