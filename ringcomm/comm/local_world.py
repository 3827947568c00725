# SPDX-License-Identifier: Apache-2.0
"""Ranks that are threads of one process, and calls of all of them from one thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import cache, partial
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar, cast, overload

import torch
from torch import Tensor
from torch.distributed import HashStore, Store

from ringcomm import _native
from ringcomm.comm.agreement import first_other, unequal
from ringcomm.comm.communicator import Communicator, Device
from ringcomm.comm.device.launch import DeviceCallEngine
from ringcomm.comm.device.sharing import Prepared, launch_prepared
from ringcomm.comm.functions import thread_default
from ringcomm.comm.host.arguments import SUM, is_contiguous
from ringcomm.comm.host.engine import Call, CallEngine, RankContext, engines_at
from ringcomm.comm.host.options import CommOptions
from ringcomm.errors import AbortedError, ArgumentError, RingcommError, start_thread, where
from ringcomm.integers import integer, integers
from ringcomm.json_reader import shown
from ringcomm.process import Deadline
from ringcomm.rendezvous.handles import Rendezvous, RendezvousSpec
from ringcomm.rendezvous.same_node import Lookout

__all__ = ["LocalWorld", "T", "launch_calls", "local_world", "make_call"]


def make_call(
    communicator: Communicator, name: str, arguments: tuple[Any, ...], algorithm: str
) -> Call:
    """Makes a checked call of ``communicator``.

    Args:
        communicator: a communicator on a device.
        name: all_reduce, reduce_scatter_tensor or all_gather_into_tensor.
        arguments: tensors, and the op of a reduction.
        algorithm: as in the call.

    Raises:
        ArgumentError: bad argument; a tensor that is not contiguous, which would need a copy after
            the launch; or the algorithm "copy_engine".
    """
    if algorithm == "copy_engine":
        # Copy engines would wait for launches of other ranks, which this thread makes later.
        communicator.engine.checks(name).fail(
            'algorithm: expected any but "copy_engine" for all ranks from one thread; for it run '
            "the ranks as threads (LocalWorld.run)"
        )
    makers: dict[str, Callable[..., Call]] = {
        "all_reduce": communicator._all_reduce_call,
        "reduce_scatter_tensor": communicator._reduce_scatter_call,
        "all_gather_into_tensor": communicator._all_gather_call,
    }
    call = makers[name](*arguments, algorithm)
    for tensor in (*call.outputs, *call.inputs):
        if not is_contiguous(tensor):
            communicator.engine.checks(name).fail(
                "tensors: expected contiguous tensors without a pending negation or conjugation, "
                f"got shape {tuple(tensor.shape)} with stride {tensor.stride()}; pass "
                "tensor.resolve_neg().resolve_conj().contiguous()"
            )
    communicator.engine.admit(call.name, call.outputs, call.inputs)
    return call


def launch_calls(communicators: Sequence[Communicator], calls: Sequence[Call]) -> None:
    """Launches one checked call of every rank, from this thread and on its current streams.

    There is one launch per device. This function serves timing, tests, and the capture of graphs.

    Args:
        communicators: the ranks of a world, all on devices of this process.
        calls: the calls of the same ranks; their tensors must need no copies.

    Raises:
        ArgumentError: the ranks' calls cannot share a launch.
        RingcommError: a communicator is unusable.
    """
    by_device: dict[int, list[tuple[DeviceCallEngine, Call]]] = {}
    engines = [cast(DeviceCallEngine, each.engine) for each in communicators]
    for engine, call in zip(engines, calls, strict=True):
        engine.check_usable(call.name)
        by_device.setdefault(engine.device_ref[1], []).append((engine, call))
    for device, group in by_device.items():
        _launch_group(device, group)


def _launch_group(device: int, group: list[tuple[DeviceCallEngine, Call]]) -> None:
    first = group[0][0]
    runtime = first.device_ref[0]
    with runtime.on_device(device):
        stream = runtime.current_stream(device)
        prepared: list[Prepared] = []
        try:
            for engine, call in group:
                with engine.queue.turn:
                    engine.begin_turn(call.name)
                    prepared.append(engine.prepare(call, stream))
            try:
                if first.joint_launch is not None:
                    first.joint_launch.launch_together(prepared, stream)
                else:
                    launch_prepared(prepared, stream)
            except BaseException as error:
                first.raise_worded(group[0][1].name, error)
        except BaseException:
            for engine, _ in group[: len(prepared)]:
                engine.withdraw()
            raise


@cache
def _settle_vector_math() -> None:
    """Makes oneMKL choose its vector functions before ranks call them at the same time.

    oneMKL chooses at the first call in a process. If several threads make first calls at once, some
    run functions with relative errors of about 1e-4 (pytorch/pytorch issue 188792).
    """
    torch.exp(torch.zeros(1, dtype=torch.float32, device="cpu"))


T = TypeVar("T")
P = ParamSpec("P")
# Seconds between two polls of the asynchronous calls of a rank that has returned.
BUSY_POLL_S = 0.02
_ONE_DEVICE = (str, int, torch.device, type(None))


class LocalWorld(Sequence[Communicator]):
    """The communicators, by rank, of a world of threads; a context manager closes them."""

    def __init__(self, communicators: Sequence[Communicator]) -> None:
        self._communicators = tuple(communicators)
        # The ranks' native call objects if one launch carries the calls of all ranks; else empty.
        self._one_launch = _calls_of_one_device(self._communicators)
        _settle_vector_math()

    def __repr__(self) -> str:
        first = self[0]
        nodes = f" on {first.num_nodes} nodes" if first.num_nodes > 1 else ""
        devices = sorted({str(each.device) for each in self if each.launches})
        device = f" on {', '.join(devices)}" if devices else ""
        state = ""
        if any(each.engine.refuse is not None for each in self):
            state = " (closed)" if all(each.engine.closed for each in self) else " (unusable)"
        return f"<ringcomm.LocalWorld of {_count(len(self))}{nodes}{device}{state}>"

    @overload
    def __getitem__(self, index: int) -> Communicator: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Communicator]: ...
    def __getitem__(self, index: int | slice) -> Communicator | Sequence[Communicator]:
        return self._communicators[index]

    def __len__(self) -> int:
        return len(self._communicators)

    def __iter__(self) -> Iterator[Communicator]:
        return iter(self._communicators)

    @overload
    def run(self, fn: Callable[[Communicator], T]) -> list[T]: ...
    @overload
    def run(
        self, fn: Callable[Concatenate[Communicator, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]: ...
    def run(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> list[T]:
        """Calls ``fn(communicator, *args, **kwargs)`` on every rank at once, each in a thread.

        In ``fn`` the module-level functions (``ringcomm.all_reduce`` and so on) use that thread's
        communicator. On a device each rank has a stream of its own, ordered after the caller's
        earlier work and before its later work. When a rank has returned or raised, calls of other
        ranks that wait for it, in this world or in a group of its ranks, raise PeerLost.
        When a rank has raised, the communicators are aborted at the end.

        Returns:
            The results by rank.

        Raises:
            BaseException: the first error of a rank that does not follow from another rank's error.
        """
        turns = [communicator.engine.rank_context() for communicator in self]
        calls = [
            _bind(partial(fn, communicator, *args, **kwargs), communicator, turn)
            for communicator, turn in zip(self, turns, strict=True)
        ]
        leaving = _Leaving(self[0].engine.membership.store)
        raised: dict[int, BaseException] = {}

        def leave(rank: int, error: BaseException) -> None:
            raised[rank] = error
            # Only an abort reaches a waiting kernel, or a thread that must end after Ctrl-C.
            if self[rank].launches or isinstance(error, KeyboardInterrupt):
                self._abort(rank, error)

        try:
            results = _run_threads(calls, leave, leaving.note)
        finally:
            leaving.end()
            for rank, error in raised.items():
                self._abort(rank, error)
        for turn in turns:
            turn.rejoin()
        return results

    def all_reduce(
        self, tensors: Sequence[Tensor], op: Any = SUM, *, algorithm: str = "auto"
    ) -> None:
        """Makes the :meth:`Communicator.all_reduce` calls of all ranks from this thread.

        On devices the ranks' calls become one launch per device, on the caller's current stream,
        which may be captured in a graph; on the host each rank gets a thread.

        Args:
            tensors: by rank, contiguous.
            op: as in the communicator's method.
            algorithm: as in the communicator's method.

        Raises:
            ArgumentError: a rank's bad argument, or tensors that differ; nothing was sent.
            RingcommError: a fault; see ``ringcomm.errors``.
        """
        ends = self._one_launch
        if ends and _native.all_reduce_together(ends, tensors, op, algorithm) == 0:
            return
        self._together("all_reduce", [(tensor, op) for tensor in tensors], algorithm)

    def reduce_scatter_tensor(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        op: Any = SUM,
        *,
        algorithm: str = "auto",
    ) -> None:
        """Calls :meth:`Communicator.reduce_scatter_tensor` on all ranks, as :meth:`all_reduce`."""
        ends = self._one_launch
        if ends and _native.reduce_scatter_together(ends, outputs, inputs, op, algorithm) == 0:
            return
        arguments = [(out, given, op) for out, given in zip(outputs, inputs, strict=True)]
        self._together("reduce_scatter_tensor", arguments, algorithm)

    def all_gather_into_tensor(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *, algorithm: str = "auto"
    ) -> None:
        """Calls :meth:`Communicator.all_gather_into_tensor` on all ranks, as :meth:`all_reduce`."""
        ends = self._one_launch
        if ends and _native.all_gather_together(ends, outputs, inputs, algorithm) == 0:
            return
        arguments = list(zip(outputs, inputs, strict=True))
        self._together("all_gather_into_tensor", arguments, algorithm)

    def _together(self, name: str, arguments: list[tuple[Any, ...]], algorithm: str) -> None:
        if len(arguments) != len(self):
            raise ArgumentError(
                f"{name}: expected tensors of {len(self)} ranks, got those of {len(arguments)}"
            )
        self._check_alike(name, arguments)
        if not self[0].launches or self[0].num_nodes > 1:

            def call(communicator: Communicator) -> None:
                getattr(communicator, name)(*arguments[communicator.rank], algorithm=algorithm)

            self.run(call)
            return
        calls = [
            make_call(communicator, name, each, algorithm)
            for communicator, each in zip(self, arguments, strict=True)
        ]
        launch_calls(list(self), calls)

    def _check_alike(self, name: str, arguments: list[tuple[Any, ...]]) -> None:
        """Raises for tensors that differ between ranks: a call with them would abort the world."""
        for by_rank in zip(*arguments, strict=True):
            if not all(isinstance(each, Tensor) for each in by_rank):
                continue
            rows = [(each.numel(), str(each.dtype)) for each in by_rank]
            if rank := first_other(rows):
                head, advice = where(name, rank, len(self)), "Give all ranks tensors alike"
                names = ("number of elements", "dtype")
                raise unequal(head, names, rows, rank, advice, kind=ArgumentError)

    def _abort(self, rank: int, error: BaseException) -> None:
        self[rank].abort(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Closes all communicators; a second call does nothing.

        Raises:
            RingcommError: the first error of a close; all communicators are closed nevertheless.
        """
        errors: list[RingcommError] = []
        for communicator in self:
            try:
                communicator.close()
            except RingcommError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def __enter__(self) -> LocalWorld:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            for rank in range(len(self)):
                self._abort(rank, error)
        self.close()


def _calls_of_one_device(communicators: Sequence[Communicator]) -> list[_native.DeviceCalls]:
    """Returns the native call objects of the ranks; [] unless all ranks are on one device."""
    engines = [each.engine for each in communicators]
    on_device = [each for each in engines if isinstance(each, DeviceCallEngine)]
    if len(on_device) < len(engines) or len({each.device_ref[1] for each in on_device}) > 1:
        return []
    if any(each.kernels for each in on_device):
        return []
    return [each.calls for each in on_device]


def _count(ranks: int) -> str:
    return f"{ranks} rank{'s' if ranks > 1 else ''}"


def _bind(fn: Callable[[], T], communicator: Communicator, turn: RankContext) -> Callable[[], T]:
    def call() -> T:
        with turn.taken(), thread_default(communicator):
            return fn()

    return call


def _distance(error: BaseException) -> int:
    """Returns 0 for a cause, 1 for a peer's report of the cause, 2 for a consequence of an abort.

    A peer may raise before the failed rank does, so the first error need not be the cause.
    """
    if isinstance(error, AbortedError):
        return 2  # raised because of the abort
    return 1 if isinstance(error, RingcommError) and error.repeats else 0


class _Leaving:
    """Informs the ranks of a run about ranks that have left and make no more calls.

    Args:
        store: the store through which the world and the groups of its ranks were built.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._left: set[int] = set()

    def note(self, rank: int, raised: bool) -> bool:
        """Informs the other ranks that a rank has left; returns False while its calls still run.

        Args:
            rank: the rank that has returned or raised.
            raised: True if it raised; then its calls under way do not matter.
        """
        engines = engines_at(self._store)
        if not raised and any(each.is_busy() for each in engines if _outermost(each) == rank):
            return False
        self._left.add(rank)
        self._tell(rank, True)
        return True

    def _tell(self, rank: int, left: bool) -> None:
        for engine in engines_at(self._store):
            ranks = engine.membership.ranks
            if _outermost(engine) == rank:
                engine.set_left(left)
            elif rank in ranks:
                engine.set_peer_left(ranks.index(rank), left)

    def end(self) -> None:
        """Marks all ranks as present again, for the next run."""
        for rank in self._left:
            self._tell(rank, False)


def _outermost(engine: CallEngine) -> int:
    """Returns the rank of an engine in the outermost communicator."""
    return engine.membership.ranks[engine.rank]


def _stays(rank: int, raised: bool) -> bool:
    """The default for ``note_end``: does nothing and returns True."""
    return True


def _run_threads(
    calls: list[Callable[[], T]],
    on_error: Callable[[int, BaseException], None],
    note_end: Callable[[int, bool], bool] = _stays,
) -> list[T]:
    """Runs the ranks' calls, each on a thread of its own.

    Args:
        calls: by rank.
        on_error: called with a rank and the exception that its call raised.
        note_end: called with an ended rank, and whether it raised; called again until it returns
            True.
    """
    results: dict[int, T] = {}
    errors: list[BaseException] = []
    ended: SimpleQueue[int] = SimpleQueue()

    def body(rank: int) -> None:
        try:
            results[rank] = calls[rank]()
        except BaseException as error:
            errors.append(error)
            on_error(rank, error)
        finally:
            ended.put(rank)

    threads = [
        threading.Thread(target=body, args=(rank,), name=f"ringcomm-rank-{rank}", daemon=True)
        for rank in range(len(calls))
    ]
    try:
        for rank, thread in enumerate(threads):
            try:
                start_thread(thread, f"rank {rank} of local_world", "This rank did not run")
            except RingcommError as error:
                errors.append(error)
                on_error(rank, error)
                ended.put(rank)
        _await_all(ended, len(calls), lambda rank: note_end(rank, rank not in results))
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    except KeyboardInterrupt as interrupt:
        for rank in range(len(calls)):
            on_error(rank, interrupt)
        raise
    if errors:
        raise min(errors, key=_distance)
    return [results[rank] for rank in range(len(calls))]


def _await_all(ended: SimpleQueue[int], ranks: int, note_end: Callable[[int], bool]) -> None:
    """Waits for the end of all ranks; reports each end to ``note_end`` as it happens."""
    unnoted: list[int] = []
    for _ in range(ranks):
        while True:
            try:
                unnoted.append(ended.get(timeout=BUSY_POLL_S if unnoted else None))
                break
            except Empty:
                unnoted = [rank for rank in unnoted if not note_end(rank)]
        unnoted = [rank for rank in unnoted if not note_end(rank)]


def _node_ids(n: int, nodes: Sequence[int]) -> list[str]:
    """Returns the id of each rank's node; ArgumentError unless the sum of ``nodes`` is ``n``."""
    sizes = integers(nodes)
    if sizes is None or any(ranks < 1 for ranks in sizes) or sum(sizes) != n:
        raise ArgumentError(
            "local_world: nodes: expected a list of the number of ranks of each node, with the "
            f"sum {n}, got {nodes!r}"
        )
    return [f"node{node}" for node, ranks in enumerate(sizes) for _ in range(ranks)]


def local_world(
    n: int,
    *,
    timeout: timedelta | float | None = None,
    heap_bytes: int | None = None,
    options: CommOptions | None = None,
    device: Device | Sequence[Device] = None,
    nodes: Sequence[int] | None = None,
) -> LocalWorld:
    """Builds a world of ``n`` ranks in this process, one thread each; see :meth:`LocalWorld.run`.

    Args:
        n: number of ranks.
        timeout: how long a call waits for its peers; default 30 minutes.
        heap_bytes: capacity of the process's heap; used if the process has no heap yet.
        options: tunables; ``timeout`` overrides ``options.timeout``.
        device: None for CPU tensors; one device for all ranks, or one for each rank. Ranks that
            share a device (at most 8) run in one launch, so each call waits on the host until all
            of them have made it.
        nodes: the number of ranks of each node, in the order of the ranks: the threads then behave
            as if on that many machines, connected by the loopback interface. None: one node.

    Raises:
        ArgumentError: ``n`` is not a positive integer, or there are not ``n`` devices, or ``nodes``
            does not add up to ``n``.
        HeapError: no space for the heap or the communicators' regions in it.
        RingcommError: a rank's thread cannot be started.
    """
    ranks = integer(n, most=2**31 - 1)
    if ranks is None or ranks < 1:
        raise ArgumentError(
            f"local_world: expected the number of ranks, from 1 to 2^31 - 1, got {shown(n)}"
        )
    n = ranks
    store = HashStore()
    devices = [device] * n if isinstance(device, _ONE_DEVICE) else list(device)
    if len(devices) != n:
        raise ArgumentError(f"local_world: expected {n} devices, one per rank, got {len(devices)}")

    node_ids = [None] * n if nodes is None else _node_ids(n, nodes)

    def build(rank: int) -> Communicator:
        return Communicator.from_store(
            store,
            rank,
            n,
            name="local",
            timeout=timeout,
            heap_bytes=heap_bytes,
            options=options,
            device=devices[rank],
            node_id=node_ids[rank],
        )

    def leave(rank: int, error: BaseException) -> None:
        # A rank whose build failed has already informed the others; this covers other errors.
        lookout = Lookout(tuple(range(n)), {})
        Rendezvous(RendezvousSpec(store, "local", rank, n, Deadline(0.0), lookout)).fail(error)

    return LocalWorld(_run_threads([partial(build, rank) for rank in range(n)], leave))
