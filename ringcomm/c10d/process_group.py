# SPDX-License-Identifier: Apache-2.0
"""The process group that ``init_process_group("ringcomm")`` makes."""

from __future__ import annotations

import functools
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from inspect import unwrap
from types import FrameType
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend as BackendOfTorch
from torch.distributed import (
    BackendConfig,
    P2POp,
    PrefixStore,
    Store,
    Work,
    distributed_c10d,
    isend,
)
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import BarrierOptions, GroupName

from ringcomm import cuda, memory
from ringcomm.c10d.backend import BACKEND_VARIABLE, is_asked_for, load
from ringcomm.c10d.calls import (
    BACKEND_NAME,
    OP_TYPES,
    UNSET_TIMEOUT,
    BarrierWork,
    Batch,
    Calls,
    PendingWork,
    WorkGroup,
    completed,
    dispatch,
    options,
    single,
)
from ringcomm.c10d.collectives import CoalescedCollectives
from ringcomm.c10d.communicators import Communicators
from ringcomm.c10d.plain_options import read_from_memory
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.functions import find_behind_by
from ringcomm.comm.host.arguments import (
    DTYPE_CODES,
    OP_CODES,
    CallChecks,
    is_watched,
    only_inlined_methods,
    outside_of_compile,
)
from ringcomm.comm.host.engine import Work as CommunicatorWork
from ringcomm.comm.host.options import CommOptions, seconds_of
from ringcomm.cuda import find_device
from ringcomm.errors import (
    ArgumentError,
    CollectiveTimeout,
    PeerLost,
    UnsupportedError,
    timed_out,
    waited_for,
    where,
)
from ringcomm.process import Deadline
from ringcomm.rendezvous.handles import FIRST_POLL_S, LAST_POLL_S, launch_attempt
from ringcomm.rendezvous.same_node import Lookout

__all__ = ["behind", "create_process_group"]


# ---- The barriers of the process group: on the host, on devices, and the monitored barrier ------

_CPU = torch.device("cpu")


class Barriers(Calls):
    """Mixin of the process group: its barriers."""

    bound_device_id: torch.device | None

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Waits for all members.

        If a device is named (``device_ids``) or bound (``device_id`` of ``init_process_group``),
        the barrier runs there, after the earlier work of every member's current stream, and blocks
        the caller until all members have reached it. Otherwise it runs on the host.
        """
        if not isinstance(opts, BarrierOptions):
            opts = options(BarrierOptions, opts, timeout)
        # The usual case first: reading a device's type takes longer than comparing devices.
        device = None if opts.device == _CPU else self._barrier_device(opts)
        if device is None:
            host = self._communicators.host
            return self._run(opts, host, [], host.barrier)
        self._sequence += 1
        communicator = self._communicators.on_device(device, "barrier")
        limit = None if opts.timeout == UNSET_TIMEOUT else opts.timeout
        if limit is None:
            inner = cast(CommunicatorWork, communicator.barrier(True))
        else:
            inner = communicator.engine.submit(_barrier_of(communicator), "barrier", timeout=limit)
        if cuda.current().is_capturing(device):
            # The host cannot wait for an event in a capture; the graph itself keeps the order.
            work: PendingWork = PendingWork(inner, [], OP_TYPES["barrier"])
        else:
            work = BarrierWork(inner, communicator.timeout if limit is None else limit)
        if opts.asyncOp:
            return self._collected(work)
        work.wait()
        return completed([], OP_TYPES["barrier"])

    def _barrier_device(self, opts: Any) -> int | None:
        device: torch.device | None = opts.device
        if device is None:
            # torch.distributed.barrier sets the device; only direct callers of the group do not.
            ids = opts.device_ids
            device = torch.device("cuda", ids[0]) if ids else self.bound_device_id
        if device is None or device.type == "cpu":
            return None
        return find_device(device, "barrier") if device.index is None else device.index


def _barrier_of(communicator: Communicator) -> Callable[[], list[Tensor]]:
    def run() -> list[Tensor]:
        communicator.barrier()
        return []

    return run


# ``monitored_barrier``: a barrier whose error names the ranks that did not call it.
#
# It uses the group's store, not the communicator: it must name missing ranks while ranks hang
# inside a collective, and a rank that does not come must leave the communicator usable.
#
# Keys, below the prefix of the round; a round is one call, and every rank counts its rounds:
# ``here/<rank>``  that rank has come        (writer: the rank, reader: rank 0)
# ``verdict``      "pass", or who is missing (writer: rank 0, readers: the other ranks)

_PASS = "pass"


class MonitoredBarrier:
    """The monitored barriers of one process group.

    Args:
        store: a store that only the members of the group use.
        rank: the caller's rank in the group.
        world_size: the number of members.
        lookout: finds members that have ended.
    """

    def __init__(self, store: Store, rank: int, world_size: int, lookout: Lookout) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._lookout = lookout
        self._round = 0

    def __call__(self, timeout: timedelta, wait_all_ranks: bool) -> None:
        """Blocks until every rank of the group has called.

        Args:
            timeout: how long rank 0 waits for the other ranks, and the other ranks for rank 0.
            wait_all_ranks: rank 0 reports all ranks that did not come, not only the first.

        Raises:
            CollectiveTimeout: on rank 0, naming the ranks that did not come in time.
            PeerLost: on rank 0, naming ranks whose processes have ended; on another rank, if rank 0
                did not come, has ended or reported a failure.
        """
        # The store may still contain posts of an earlier attempt, under another prefix.
        prefix = f"monitored_barrier/attempt{launch_attempt()}/{self._round}"
        self._round += 1
        if self._rank == 0:
            self._judge(prefix, timeout, wait_all_ranks)
        else:
            self._report(prefix, timeout)

    def _judge(self, prefix: str, timeout: timedelta, wait_all_ranks: bool) -> None:
        deadline, pause_s = Deadline(timeout.total_seconds()), FIRST_POLL_S
        awaited = list(range(1, self._world_size))
        while awaited := self._missing(prefix, awaited):
            # A value that a rank posted before it ended is still valid.
            ended = self._missing(prefix, self._lookout.ended_among(awaited))
            vain = ended == awaited if wait_all_ranks else bool(ended)
            if vain or deadline.is_over():
                missing = awaited if wait_all_ranks else (ended or awaited)[:1]
                self._fail(prefix, missing, [r for r in ended if r in missing], timeout)
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, LAST_POLL_S)
        self._store.set(f"{prefix}/verdict", _PASS)

    def _missing(self, prefix: str, ranks: Iterable[int]) -> list[int]:
        return [rank for rank in ranks if not self._store.check([f"{prefix}/here/{rank}"])]

    def _fail(
        self, prefix: str, missing: list[int], ended: list[int], timeout: timedelta
    ) -> NoReturn:
        what = f"{_ranks(missing)} failed to pass monitoredBarrier"
        if missing != ended:
            # The wording of Gloo.
            what += f" in {_ms(timeout)} ms"
        if ended:
            what += f"; of {_ranks(ended).lower()} the process has ended"
        self._store.set(f"{prefix}/verdict", what)
        head = where("monitored_barrier", 0, self._world_size)
        if missing != ended:
            raise timed_out(
                f"{head}:",
                timeout.total_seconds(),
                f"every rank to come: {what}",
                "Look at what those ranks do instead",
                kind=PeerLost if ended else CollectiveTimeout,
            )
        raise PeerLost(
            f"{head}: expected every rank to come: {what}. See why, and build a group of the ranks "
            "that are left"
        )

    def _report(self, prefix: str, timeout: timedelta) -> None:
        here, key = f"{prefix}/here/{self._rank}", f"{prefix}/verdict"
        cause: RuntimeError | None = None
        try:
            self._store.set(here, "")
            verdict = self._verdict(key, timeout)
        except RuntimeError as error:
            cause = error
            verdict = f"the store does not answer any more: {str(error).partition(chr(10))[0]}"
        if verdict != _PASS:
            raise PeerLost(
                f"monitored_barrier on rank {self._rank} of {self._world_size}: "
                f"Rank {self._rank} successfully reached monitoredBarrier, but received errors "
                f"while waiting for send/recv from rank 0: {verdict}. Look at rank 0's message."
            ) from cause

    def _verdict(self, key: str, timeout: timedelta) -> str:
        """Waits for rank 0's verdict, and returns the verdict, or why there is none."""
        deadline, pause_s = Deadline(timeout.total_seconds()), FIRST_POLL_S
        while not self._store.check([key]):
            why = ""
            if deadline.is_over():
                why = waited_for(timeout.total_seconds(), "rank 0, which did not come")
            for _ in self._lookout.ended_among([0]):
                why = "its process has ended"
            if why and not self._store.check([key]):
                return why
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, LAST_POLL_S)
        return self._store.get(key).decode()


def _ranks(ranks: list[int]) -> str:
    return ("Rank " if len(ranks) == 1 else "Ranks ") + ", ".join(map(str, ranks))


def _ms(timeout: timedelta) -> int:
    return timeout // timedelta(milliseconds=1)


# ---- Send and receive of the process group, in the argument forms of ``torch.distributed`` ------
# Between CPU tensors messages are matched by tag. Between devices they are matched in order, and
# their tags must agree; a receive on a device names its sender.

# torch.distributed.send() and recv() call the group's asynchronous method and then wait at once.
# The group makes these messages synchronously: they need neither a Work nor a thread.
_WAITING = {
    unwrap(function).__code__ for function in (torch.distributed.send, torch.distributed.recv)
}


def _is_waited_for() -> bool:
    """True if ``torch.distributed.send()`` or ``recv()`` has made the group's call."""
    # Frames up to the caller: this function, the group's method, and isend() or irecv().
    frame = sys._getframe(2).f_back
    return frame is not None and frame.f_code in _WAITING


class PeerToPeer(Calls):
    """Mixin of the process group: messages between two members. Ranks are ranks of the group."""

    def send(self, tensors: list[Tensor], dstRank: int, tag: int = 0) -> Work:
        tensor = single(tensors, "send")
        communicator = self._of([tensor], "send")
        if is_watched():
            make = partial(self.send, [tensor], dstRank, tag)
            return self._seen(None, communicator, "send", (tensor, dstRank, tag), make)
        batch = self._coalescing
        if batch is not None and communicator is not self._communicators.host:
            return batch.post(communicator, tensor, dstRank, tag, is_send=True)
        if batch is None and communicator is self._communicators.host and _is_waited_for():
            communicator.send(tensor, dstRank, tag)
            return completed([tensor], OP_TYPES["send"])
        sent = communicator.isend(tensor, dstRank, tag)
        return self._collected(PendingWork(sent, [tensor], OP_TYPES["send"]))

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int = 0) -> Work:
        tensor = single(tensors, "recv")
        communicator = self._of([tensor], "recv")
        if is_watched():
            make = partial(self.recv, [tensor], srcRank, tag)
            return self._seen(None, communicator, "recv", (tensor, srcRank, tag), make)
        batch = self._coalescing
        if batch is not None and communicator is not self._communicators.host:
            return batch.post(communicator, tensor, srcRank, tag, is_send=False)
        if batch is None and communicator is self._communicators.host and _is_waited_for():
            communicator.recv(tensor, srcRank, tag)
            return completed([tensor], OP_TYPES["recv"])
        received = communicator.irecv(tensor, srcRank, tag)
        return self._collected(PendingWork(received, [tensor], OP_TYPES["recv"]))

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        tensor = single(tensors, "recv_anysource")
        if not self.is_on_host(tensor, "recv"):
            host = self._communicators.host
            raise UnsupportedError(
                f"{where('recv', host.rank, host.world_size)}: src: expected a rank for a tensor "
                f"on {tensor.device}, got None; a receive on a device waits for one sender. Name "
                "it, or receive into a CPU tensor"
            )
        communicator = self._communicators.host
        if is_watched():
            make = partial(self.recv_anysource, [tensor], tag)
            return self._seen(None, communicator, "recv from any source", (tensor, tag), make)
        received = communicator.irecv(tensor, None, tag)
        return self._collected(PendingWork(received, [tensor], OP_TYPES["recv from any source"]))

    def is_on_host(self, tensor: Tensor, operation: str) -> bool:
        """True if the host communicator serves the tensor."""
        return self._communicators.is_on_host(tensor, operation)

    def batch(self, ops: Sequence[P2POp]) -> Work:
        """Sends and receives device messages, which do not wait for each other; returns one work.

        Args:
            ops: messages of this group. Messages between two ranks keep their order, which must be
                the same on both ranks.

        Raises:
            ArgumentError: bad argument; no message was sent.
            RingcommError: a fault; see ``ringcomm.errors``.
        """
        device = ops[0].tensor.device
        self._start_coalescing(device)
        try:
            for op in ops:
                # Use torch's own functions, which pass a complex tensor as real numbers.
                peer: dict[str, Any] = {
                    "group_dst" if op.op is isend else "group_src": op.group_peer
                }
                op.op(op.tensor, group=op.group, tag=op.tag, **peer)
        except BaseException:
            self._coalescing = None
            raise
        return self._end_coalescing(device)

    def _start_coalescing(self, device: torch.device) -> None:
        """Begins to collect the following calls.

        Collectives, and messages of CPU tensors, run at once; device messages are sent at the end.
        """
        if self._coalescing is not None:
            raise ArgumentError("_start_coalescing: the group is coalescing already")
        self._coalescing = Batch()

    def _end_coalescing(self, device: torch.device) -> Work:
        """Returns one work for all calls since ``_start_coalescing``."""
        if self._coalescing is None:
            raise ArgumentError("_end_coalescing: there was no _start_coalescing")
        batch, self._coalescing = self._coalescing, None
        works = batch.works + dispatch(batch.posted)
        return WorkGroup(works) if works else completed([], OP_TYPES["batch"])


# ---- Makes a process group from the arguments of ``torch.distributed`` for a backend's creator --


def create_process_group(
    group: Any, pg_options: Any, kind: type[Communicators] = Communicators
) -> Any:
    """Returns the object that makes this rank's calls; all members of a new group must call it.

    Args:
        group: torch's ``_DistributedBackendOptions``: store, group_rank, group_size, timeout,
            group_id.
        pg_options: a ``ringcomm.CommOptions`` (its timeout is replaced by the group's) or None.
        kind: the class that finds the group's communicators.

    Returns:
        A process group, which torch uses for all devices. If other devices name another
        backend: a C++ backend for the devices that name ringcomm.

    Raises:
        ArgumentError: ``pg_options`` has another type.
        UnsupportedError: the group mixes ringcomm with another backend, and the C++ backend is
            not built.
        RendezvousError: the members did not find each other within the timeout.
    """
    config, outer = _being_made(sys._getframe(1))
    others = _other_backends(config)
    native = _native_backend(config, others)
    if native is not None and (made := _backend_behind(outer)) is not None:
        return made  # torch called this function before, for another device of the group
    if others and isinstance(pg_options, BackendOfTorch.Options):
        pg_options = None  # torch passes all backends the same options
    if pg_options is not None and not isinstance(pg_options, CommOptions):
        raise ArgumentError(
            f"init_process_group on rank {group.group_rank} of {group.group_size}: pg_options of "
            f"the backend {BACKEND_NAME!r} is a ringcomm.CommOptions, got "
            f"{type(pg_options).__name__}. Pass ringcomm.CommOptions(...) or nothing."
        )
    communicators = kind.rendezvous(
        group.store,
        group.group_rank,
        group.group_size,
        name=group.group_id,
        timeout=group.timeout,
        options=pg_options,
        split_from=_within_world(group.global_ranks_in_group),
    )
    admit_ringcomm_to_monitored_barrier()
    admit_ringcomm_to_batches()
    made = ProcessGroup(group.store, communicators)
    if native is None:
        return made
    made._set_group_name(group.group_id)
    find_behind_by(_communicator_behind)
    if outer is not None and outer.name() == _UNDEFINED:
        # torch does this for plugins, but does not recognize ringcomm, and would warn at exit.
        outer._set_default_backend(ProcessGroup.BackendType.CUSTOM)
    return native(made, _Splits(native), _direct_calls(communicators.host))


# Torch's backend name for a group without a default backend.
_UNDEFINED = "undefined"


def _being_made(frame: FrameType | None) -> tuple[BackendConfig | None, Any]:
    """Returns the backends of the group that torch is making, and the group.

    If a creator returns a process group, torch uses it as the whole group, for all devices, and
    drops the other backends without a warning. torch does not pass their names to the creator, so
    this reads them from local variables of torch's ``_new_process_group_helper``.
    """
    while frame is not None:
        config = frame.f_locals.get("backend_config")
        if isinstance(config, BackendConfig):
            return config, frame.f_locals.get("pg")
        frame = frame.f_back
    return None, None


def _other_backends(config: BackendConfig | None) -> dict[str, str]:
    """Returns the backends that are not ringcomm, by type of device."""
    if config is None:
        return {}
    return {
        device: name
        for device, name in config.get_device_backend_map().items()
        if name != BACKEND_NAME
    }


def _native_backend(config: BackendConfig | None, others: dict[str, str]) -> Any:
    """Returns the class of the C++ backend, if the group needs it or the user requests it.

    Raises:
        UnsupportedError: the C++ backend is not built.
    """
    if others:
        return load(
            f"init_process_group({config!r}): a group that {BACKEND_NAME} shares with another "
            f"backend ({others})",
            f'or write init_process_group("{BACKEND_NAME}"), which serves every device, and make a '
            "second group for the other devices, as in "
            f"new_group(backend={next(iter(others.values()))!r})",
        )
    if config is not None and is_asked_for():
        return load(f"{BACKEND_VARIABLE}=native")
    return None


def _backend_behind(group: Any) -> Any:
    """Returns the C++ backend of ringcomm that a torch group has for some device, or None."""
    if type(group) is not dist.ProcessGroup:
        return None  # a Python group serves all its devices itself
    for device in group._device_types:
        backend: Any = group._get_backend(device)
        backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
        if isinstance(getattr(backend, "group", None), ProcessGroup):
            return backend
    return None


def behind(group: Any, device: torch.device | None = None) -> ProcessGroup | None:
    """Returns the process group of ringcomm that makes the calls of a torch group.

    Args:
        group: a group of any backends.
        device: the device of the calls' tensors; None: any device.

    Returns:
        None if another backend makes the calls.
    """
    if isinstance(group, ProcessGroup):
        return group
    backend = _backend_behind(group)
    if backend is None or device is None:
        return None if backend is None else cast(ProcessGroup, backend.group)
    if all(each.type != device.type for each in group._device_types):
        return None
    serving = group._get_backend(device)
    serving = getattr(serving, "wrapped_pg", serving)
    return cast(ProcessGroup, backend.group) if serving is backend else None


def _within_world(members: list[int]) -> tuple[Communicator, list[int]] | None:
    """Returns (the default group's communicator, ``members``), for splitting the members off.

    Returns None if the default group itself is being made, or has another backend.
    """
    world = dist.group.WORLD if members and dist.is_initialized() else None
    parent = behind(world)
    return None if parent is None else (parent.communicator, members)


def _communicator_behind(group: Any) -> Communicator | None:
    """Returns the host communicator of a group, if ringcomm makes its calls."""
    ours = behind(group)
    return None if ours is None else ours.communicator


class _Splits:
    """Makes the C++ backends of a group's subgroups; only a subgroup's members call it.

    Args:
        native: the class of the backends.
    """

    def __init__(self, native: Any) -> None:
        self._native = native
        self._latest: tuple[Store, Any] | None = None

    def __call__(
        self, group: ProcessGroup, store: Store, ranks: list[int], timeout: timedelta
    ) -> Any:
        """Returns the backend of a new group.

        Args:
            group: the group that is split.
            store: the new group's store. torch splits once per type of device, with one store.
            ranks: the members' ranks in ``group``, by rank in the new group.
            timeout: the timeout of the new group.
        """
        if self._latest is None or self._latest[0] is not store:
            child = group.split_group(ranks, timeout)
            self._latest = store, child and self._made(child)
        return self._latest[1]

    def _made(self, child: ProcessGroup) -> Any:
        return self._native(child, _Splits(self._native), _direct_calls(child.communicator))


# Names of the native module's ops, in the order of ReduceOp::RedOpType.
_OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


def _direct_calls(host: Communicator) -> tuple[Any, ...]:
    """Returns the values by which the C++ backend makes calls without Python.

    These are the C functions (None if the core has none), the codes of types and ops, and the
    function that makes an error; see NOTE [Direct calls].
    """
    engine = host.engine
    functions = None if engine.kernels else getattr(engine.fast, "direct_calls", None)
    codes = {dtype: code for dtype, code in DTYPE_CODES.items() if not dtype.is_complex}
    return functions, codes, [OP_CODES[name] for name in _OPS], engine.fault


_of_torch = distributed_c10d.batch_isend_irecv


_NO_GRAPH = "messages and monitored barriers of ringcomm run between the graphs of torch.compile()"


@outside_of_compile(_NO_GRAPH)
def _batch_isend_irecv(p2p_op_list: list[P2POp]) -> list[Work]:
    distributed_c10d._check_p2p_op_list(p2p_op_list)
    group, tensor = p2p_op_list[0].group, p2p_op_list[0].tensor
    ours = behind(group, tensor.device)
    if ours is None or ours.is_on_host(tensor, "batch_isend_irecv"):
        return _of_torch(p2p_op_list)
    return [ours.batch(p2p_op_list)]


def admit_ringcomm_to_batches() -> None:
    """Lets ``torch.distributed.batch_isend_irecv`` batch the messages of groups of ringcomm.

    torch's function opens a coalescing bracket only for groups of exactly torch's own class, and
    makes all other groups send and receive one by one. The replacement passes a batch of messages
    between devices to ringcomm's group as a whole, and all else to torch's function.
    """
    _batch_isend_irecv.__doc__ = _of_torch.__doc__
    distributed_c10d.batch_isend_irecv = _batch_isend_irecv
    dist.batch_isend_irecv = _batch_isend_irecv


def admit_ringcomm_to_monitored_barrier() -> None:
    """Lets ``torch.distributed.monitored_barrier`` accept groups of ringcomm.

    Up to torch 2.14 torch's function raises for every backend that is not named gloo, before it
    calls the group; later versions accept a group with a CPU backend (pytorch/pytorch#189070). If
    torch still tests the name, calls for ringcomm's groups go directly to the group and all other
    calls to the original function.
    """
    original = distributed_c10d.monitored_barrier
    if "GLOO" not in original.__code__.co_names:
        return

    @outside_of_compile(_NO_GRAPH)
    @functools.wraps(original)
    def monitored_barrier(
        group: Any = None,
        timeout: timedelta | float | None = None,
        wait_all_ranks: bool = False,
    ) -> None:

        ours = behind(dist.group.WORLD if group is None else group, _CPU)
        if ours is None:
            original(group, timeout, wait_all_ranks)
            return
        ours.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)

    distributed_c10d.monitored_barrier = monitored_barrier
    dist.monitored_barrier = monitored_barrier


@only_inlined_methods
class ProcessGroup(  # type: ignore[misc]
    CoalescedCollectives, PeerToPeer, Barriers, torch.distributed.ProcessGroup
):
    """A process group of torch; it uses a host communicator, and one communicator per device.

    A call runs on the device of its tensors. Calls without tensors, such as barriers, and calls
    with objects run on the host unless a device is named or bound.

    torch uses it both as the group and as its backend, so it implements both interfaces. It has no
    method ``new_group``: otherwise torch would make all subgroups through it, even those for
    another backend.

    Args:
        store: a store that only the members of the group use.
        communicators: the communicators of this group; ``shutdown`` closes them.
    """

    supports_splitting = True
    supports_coalescing = False
    supports_shrinking = False
    supports_time_estimate = False
    _supports_time_estimate = False  # the flag's name from torch 2.15 on

    def __init__(self, store: Store, communicators: Communicators) -> None:
        host = communicators.host
        # Call the constructor without a store: with one, Python cannot subclass the group.
        super().__init__(host.rank, host.world_size)  # type: ignore[call-arg]
        read_from_memory()
        self._store = store
        self._communicators = communicators
        self._host = host.engine
        self._of = communicators.of
        self._rank: int = host.rank
        self._size: int = host.world_size
        self._name = GroupName(host.name)
        self._desc = "undefined"
        self._sequence = 0
        self._coalescing = None
        self._monitored_barrier = MonitoredBarrier(
            store, self._rank, self._size, host.engine.lookout()
        )
        self._split_count = 0

    @property
    def communicator(self) -> Communicator:
        """The host communicator, for calls that ``torch.distributed`` does not offer."""
        return self._communicators.host

    def communicator_on(self, device: torch.device | str | int) -> Communicator:
        """Returns the communicator of a device; all members must make the first call for it.

        Raises:
            ArgumentError: this process has no such device.
            UnsupportedError: this process has no devices; the error says why.
            RingcommError: the members could not connect their devices.
        """
        index = find_device(device, "communicator_on")
        if index is None:
            return self._communicators.host
        return self._communicators.on_device(index, "communicator_on")

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def name(self) -> str:
        return BACKEND_NAME

    def getBackendName(self) -> str:
        return BACKEND_NAME

    def _get_backend_name(self) -> str:
        return BACKEND_NAME

    @property
    def group_name(self) -> GroupName:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = GroupName(name)

    @property
    def group_desc(self) -> str:
        return self._desc

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    # torch's C++ code calls these four methods by these names.
    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = GroupName(name)

    def getGroupDesc(self) -> str:
        return self._desc

    def setGroupDesc(self, desc: str) -> None:
        self._desc = desc

    @property
    def _device_types(self) -> list[torch.device]:
        # The CPU first: torch puts pickled objects on the first device; the host needs no copy.
        return [torch.device("cpu"), torch.device("cuda")]

    def _get_backend(self, device: torch.device | str) -> ProcessGroup:  # type: ignore[override]
        """Returns this group, which is its own backend.

        Raises:
            UnsupportedError: the device is neither the CPU nor a GPU.
        """
        if not _is_served(device):
            # torch's own wording, by which callers recognize the case.
            raise UnsupportedError(
                f"No backend type associated with device type {torch.device(device).type}: "
                f"{BACKEND_NAME} serves tensors of the CPU and of CUDA devices"
            )
        return self

    get_backend = _get_backend

    @property
    def options(self) -> None:
        """The options that a split passes to the new group: None, so it uses the defaults."""
        return None

    def supports_tensor_alloc(self, device: torch.device | str) -> bool:
        return _is_served(device)

    def allocate_tensor(
        self, size: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> Tensor:
        """Returns a heap tensor of ``size`` elements, which collectives move without a copy.

        FSDP2 allocates its buffers here after
        ``set_allocate_memory_from_process_group_for_comm(True)``.
        """
        self._get_backend(device)
        return memory.empty(size, dtype=dtype, device=device)

    def get_group_store(self) -> Store:
        """Returns the store of this group's members."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets how long later calls wait for their peers."""
        self._communicators.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Restarts the count of collectives; all members must do so together."""
        self._sequence = 0

    def _get_sequence_number_for_group(self) -> int:
        """Returns how many collectives this rank has made on the group."""
        return self._sequence

    def monitored_barrier(
        self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        """See :class:`ringcomm.c10d.process_group.MonitoredBarrier`."""
        if timeout is None:
            timeout = default_pg_timeout
        elif not isinstance(timeout, timedelta):
            warnings.warn(f"Please specify timeout arg as a timedelta, not {timeout}", stacklevel=2)
            timeout = timedelta(seconds=seconds_of(timeout))
        self._monitored_barrier(timeout, wait_all_ranks)

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: list[torch.device] | None = None,
    ) -> ProcessGroup | None:
        """Makes a group of some members of this group; only these members need to call it.

        Args:
            new_ranks: ranks of this group, in the order of their ranks in the new group.
            timeout: the timeout of the new group; None: this group's timeout.
            opts: a ``ringcomm.CommOptions`` or None.
            group_name: the name of the new group; None: a name made from the ranks.
            group_desc: free text.
            device_types: CPU or CUDA or both; the new group serves both in any case.

        Returns:
            The new group, or None if this rank is not in ``new_ranks``.
        """
        new_ranks = CallChecks("split_group", self._rank, self._size).ranks("new_ranks", new_ranks)
        for device in device_types or ():
            self._get_backend(device)
        self._split_count += 1
        if self._rank not in new_ranks:
            return None
        name = group_name or (
            f"{self._name}/split{self._split_count}:{'_'.join(map(str, new_ranks))}"
        )
        store = PrefixStore(f"{name}/", self._store)
        communicators = self._communicators.rendezvous(
            store,
            new_ranks.index(self._rank),
            len(new_ranks),
            name=name,
            timeout=self._communicators.host.timeout if timeout is None else timeout,
            options=opts,
            split_from=(self._communicators.host, new_ranks),
        )
        child = ProcessGroup(store, communicators)
        child._set_group_name(name)
        child._set_group_desc(group_desc or f"{self._desc}:split")
        return child

    splitGroup = split_group

    def comm_split_count(self) -> int:
        return self._split_count

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Does nothing: a split concerns only its members."""

    def eager_connect_single_device(self, device: torch.device | None) -> None:
        """Binds the group to a device and connects it there; all members must call this.

        torch calls this if ``init_process_group`` got a ``device_id``.
        """
        if device is not None and device.type != "cpu":
            self._communicators.on_device(device.index, "init_process_group")
            self.bound_device_id = device

    def _wait_for_pending_works(self) -> None:
        """Blocks until all calls of this rank are done."""
        self._communicators.host.engine.submit(list, "wait for pending works").wait()
        for device in self._communicators.devices():
            cuda.current().synchronize(device)

    def abort(self) -> None:
        """Makes all ranks' calls on this group fail at once."""
        self._communicators.abort("the process group was aborted")

    def shutdown(self) -> None:
        """Ends the group on this rank."""
        self._communicators.close()


def _is_served(device: torch.device | str) -> bool:
    return torch.device(device).type in ("cpu", "cuda")
