# SPDX-License-Identifier: Apache-2.0
"""Unsharding of units' parameters at stage 3, when they are needed or ahead of time."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ringcomm.comm.communicator import Communicator
from ringcomm.comm.device.launch import DeviceCallEngine
from ringcomm.comm.host.engine import Work
from ringcomm.cuda.runtime import Event
from ringcomm.errors import ArgumentError, DiskError, no_thread
from ringcomm.zero.stages.buckets import AHEAD_BYTES, SMALL_BYTES, ShardedBucket
from ringcomm.zero.stages.options import ZeroOptions
from ringcomm.zero.stages.order import StepProfile, in_split_backward
from ringcomm.zero.stages.units import Unit

_flat_of: Callable[[ShardedBucket], torch.Tensor] = attrgetter("flat")


class Copier(ABC):
    """A copier fills buckets with the ranks' chunks, if possible while the caller computes."""

    #: True if several large units are begun together; see NOTE [Units begun together].
    joins_units = False

    @abstractmethod
    def begin(self, buckets: Sequence[ShardedBucket]) -> None:
        """Starts to fill buckets of one or more units; their memory was already allocated."""

    @abstractmethod
    def end(self, bucket: ShardedBucket) -> None:
        """Waits until ``bucket``, which :meth:`begin` started to fill, is filled."""

    @abstractmethod
    def close(self) -> None:
        """Ends the copier's threads."""


class HostCopier(Copier):
    """A copier that fills buckets of host memory in a thread."""

    def __init__(self, profile: StepProfile) -> None:
        self._profile = profile
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="ringcomm-unshard")
        try:
            self._pool.submit(int).result()
        except RuntimeError as error:
            # Raise here, not in a step, where a bucket would wait for a copy for ever.
            raise no_thread("zero", error, "Stage 3 unshards in a thread of its own") from error

    def begin(self, buckets: Sequence[ShardedBucket]) -> None:
        for bucket in buckets:
            bucket.coming = self._pool.submit(self._fill, bucket)

    def _fill(self, bucket: ShardedBucket) -> None:
        with self._profile.span("unshard", bucket.flat.numel() * bucket.flat.element_size()):
            bucket.fill()

    def end(self, bucket: ShardedBucket) -> None:
        with self._profile.waiting("unshard"):
            if bucket.coming is None:
                self._fill(bucket)  # Ctrl-C came before begin() had stored the future
            else:
                bucket.coming.result()
        bucket.coming = None

    def close(self) -> None:
        self._pool.shutdown()


class HereCopier(Copier):
    """A copier that fills buckets on the caller's thread, when they are needed."""

    def __init__(self, profile: StepProfile) -> None:
        self._profile = profile

    def begin(self, buckets: Sequence[ShardedBucket]) -> None:
        return

    def end(self, bucket: ShardedBucket) -> None:
        size_bytes = bucket.flat.numel() * bucket.flat.element_size()
        with self._profile.waiting("unshard"), self._profile.span("unshard", size_bytes):
            bucket.fill()

    def close(self) -> None:
        return


class WorldCopier(Copier):
    """A copier whose buckets all ranks fill together, in the communicator's order of calls."""

    def __init__(self, comm: Communicator, options: ZeroOptions, profile: StepProfile) -> None:
        self._comm = comm
        self._ahead = options.overlap is True
        self._profile = profile
        self._works: dict[ShardedBucket, Work] = {}

    def begin(self, buckets: Sequence[ShardedBucket]) -> None:
        if not self._ahead:
            return
        for bucket in buckets:
            fill = partial(self._fill, bucket)
            self._works[bucket] = self._comm.engine.submit(fill, "all_gather_bucket")

    def _fill(self, bucket: ShardedBucket) -> list[torch.Tensor]:
        with self._profile.span("unshard", bucket.flat.nbytes):
            bucket.fill()
        return []

    def end(self, bucket: ShardedBucket) -> None:
        work = self._works.pop(bucket, None)
        with self._profile.waiting("unshard"):
            if work is None:
                self._fill(bucket)
            else:
                work.wait()

    def close(self) -> None:
        self._works.clear()


@dataclass(eq=False)
class _Copies:
    """Copies into buckets, started by one call of ``begin()``.

    Attributes:
        stream: the stream on which the copies run.
        done: an event after the copies; None if it was not recorded yet.
        awaited_by: the last stream that waited for the copies.
    """

    stream: int
    done: Event | None
    awaited_by: int | None = None


class DeviceCopier(Copier):
    """A copier that fills buckets with the device's copy engines, on a side stream.

    Memory is allocated and freed on the caller's stream. The side stream waits for the work that
    the caller's stream had when the memory was allocated, and the caller's stream waits for the
    side stream before it uses or frees the memory, so torch's allocator may ignore the side stream.
    A unit of at most ``SMALL_BYTES`` is copied by one launch on the caller's stream.
    """

    joins_units = True

    def __init__(self, engine: DeviceCallEngine) -> None:
        self._runtime, self._device = engine.device_ref
        self._copy_chunks = engine.device_core.driver.copy_chunks
        self._side = self._runtime.make_stream(self._device, high_priority=True)
        self._begun: dict[ShardedBucket, _Copies] = {}

    def begin(self, buckets: Sequence[ShardedBucket]) -> None:
        runtime, device, side = self._runtime, self._device, self._side
        current = runtime.current_stream(device)
        size_bytes = 0
        for bucket in buckets:
            size_bytes += bucket.size_bytes
        if size_bytes <= SMALL_BYTES:
            chunks: list[torch.Tensor] = []
            sources: list[torch.Tensor] = []
            for bucket in buckets:
                chunks += bucket.chunks_of_flat
                sources += bucket.peers
            torch._foreach_copy_(chunks, sources)
            begun = _Copies(current, None)
        else:
            with runtime.on_device(device):
                runtime.wait_event(device, side.handle, runtime.record_event(device, current))
                for bucket in buckets:
                    ptrs, size_bytes = bucket.peer_ptrs, bucket.size_bytes // len(bucket.peer_ptrs)
                    self._copy_chunks(bucket.flat.data_ptr(), ptrs, size_bytes, side.handle)
                begun = _Copies(side.handle, runtime.record_event(device, side.handle))
        for bucket in buckets:
            self._begun[bucket] = begun

    def end(self, bucket: ShardedBucket) -> None:
        begun = self._begun.pop(bucket, None)
        if begun is None:
            bucket.fill()  # Ctrl-C came before begin() had noted the copies
            return
        runtime, device = self._runtime, self._device
        current = runtime.current_stream(device)
        if current in (begun.stream, begun.awaited_by):
            return
        if begun.done is None:
            begun.done = runtime.record_event(device, begun.stream)
        runtime.wait_event(device, current, begun.done)
        begun.awaited_by = current

    def close(self) -> None:
        self._begun.clear()


class Unsharder:
    """Unshards a module's units when they are needed or ahead of time, and reshards them.

    It expects that an iteration needs the units in the order of the last iteration. A wrong guess
    costs one needless copy.

    NOTE [Graphs without a hook]
    In backward, hooks on the outputs of a unit's module unshard the unit again. No such hook covers
    a parameter that is used outside of a call of the module, as in ``module.encode(x)`` or in
    ``unsharded()``, or an output that contains no tensor with a graph. The buckets of such
    parameters stay unsharded as long as a graph refers to them, or until their values change.

    NOTE [Units begun together]
    A unit of more than ``SMALL_BYTES`` is copied on a side stream, between two events that are each
    recorded and awaited: four driver calls. So further units are begun together with it, as long as
    all units ahead have at most ``AHEAD_BYTES``. The next units are begun when less than half of
    ``AHEAD_BYTES`` is being copied.

    Args:
        units: the units, each with its buckets.
        comm, options, profile: the attributes of the engine.
        tell_expected: called with the buckets that will be unsharded next, so that their chunks are
            read from the disk in time; None without a disk.
    """

    def __init__(
        self,
        units: Sequence[tuple[Unit, Sequence[ShardedBucket]]],
        comm: Communicator,
        options: ZeroOptions,
        profile: StepProfile,
        tell_expected: Callable[[Iterable[ShardedBucket]], None] | None = None,
    ) -> None:
        self._tell_expected = tell_expected
        # The buckets that stay unsharded from forward to backward, as in _UnitHooks.stays.
        self._staying = {
            bucket
            for unit, buckets in units
            for bucket in buckets
            if unit.name == "" or stays_after_forward(unit, options)
        }
        self._buckets = {id(unit): tuple(buckets) for unit, buckets in units}
        # By unit, the number of units that are unsharded ahead of their use while this unit runs.
        self._prefetch = {
            id(unit): (options.prefetch if unit.options.prefetch is None else unit.options.prefetch)
            for unit, _ in units
            if options.overlap
        }
        self._copier: Copier
        if options.params == "world" or options.offload_params is not None:
            self._copier = WorldCopier(comm, options, profile)
        elif isinstance(comm.engine, DeviceCallEngine):
            self._copier = DeviceCopier(comm.engine)
        else:
            self._copier = HostCopier(profile) if options.overlap else HereCopier(profile)
        # By unit, the bytes of each large unit; see NOTE [Units begun together].
        self._large: dict[int, int] = {}
        if self._copier.joins_units:
            sizes = {key: sum(b.size_bytes for b in each) for key, each in self._buckets.items()}
            self._large = {key: size for key, size in sizes.items() if size > SMALL_BYTES}
        # Dicts, since they are ordered: if there are several errors, the same one is raised each
        # time, and ranks that unshard together use the same order.
        self._coming: dict[ShardedBucket, None] = {}
        self._unsharded: dict[ShardedBucket, None] = {}
        self._pins = 0
        # Buckets that a forward with gradients has used inside unsharded().
        self._ran: set[ShardedBucket] = set()
        # See NOTE [Graphs without a hook]; the value is True if views keep the bucket's memory.
        self._unhooked: dict[ShardedBucket, bool] = {}
        # If unsharding is collective, ranks must reshard the same buckets, whatever graphs exist.
        self._together = options.params == "world" or options.offload_params is not None
        #: True if a graph of create_graph=True may refer to buckets, which must stay unsharded.
        self.held = False
        #: Number of units that are running now, nested in each other.
        self.running = 0
        self._last: list[int] = []
        self._now: list[int] = []
        self._backward_ended = False
        self._told: dict[ShardedBucket, Callable[[], None]] = {}
        # Buckets that a pipeline schedule has looked up; see NOTE [Split backwards].
        self._for_schedule: set[ShardedBucket] = set()
        # Buckets whose chunks may change before the step; see NOTE [Updates in backward] in
        # ``zero/stages/updates.py``.
        self._closed: set[ShardedBucket] = set()
        ask = partial(_unshard_for_schedule, weakref.ref(self))
        for each in self._buckets.values():
            for bucket in each:
                bucket.asked = ask

    def tell(self, bucket: ShardedBucket, settle: Callable[[], None]) -> None:
        """Registers ``settle``, to be called after each unsharding and resharding of the bucket."""
        self._told[bucket] = settle

    def buckets_of(self, unit: Unit) -> tuple[ShardedBucket, ...]:
        """Returns the buckets of a unit's parameters."""
        return self._buckets[id(unit)]

    def need(self, unit: Unit) -> None:
        """Unshards a unit, and starts to unshard the units that are expected next.

        Buckets that a backward has updated are left out: all their gradients have arrived, so this
        backward needs such a bucket only if it looks a parameter up.
        """
        key, now = id(unit), self._now
        if not now or now[-1] != key:
            now.append(key)
        buckets: Sequence[ShardedBucket] = self._open(key) if self._closed else self._buckets[key]
        for bucket in buckets:
            if not bucket.is_unsharded:
                if bucket not in self._coming:
                    self._start(buckets)
                self._end_coming(bucket)
        count, at, last = self._prefetch.get(key, 0), len(now), self._last
        if count and last[at - 1 : at] == now[-1:]:
            if self._large and at < len(last) and last[at] in self._large:
                self._start_ahead(last[at:], count)
            else:
                for ahead in last[at : at + count]:
                    self._start(self._open(ahead) if self._closed else self._buckets[ahead])
        if self._tell_expected is not None:
            self._tell(self._followers())

    def _open(self, key: int) -> list[ShardedBucket]:
        return [bucket for bucket in self._buckets[key] if bucket not in self._closed]

    def expect_first(self) -> None:
        """Reports the buckets that the next iteration is expected to unshard first."""
        self._tell(self._now or self._last)

    def _tell(self, units: Sequence[int]) -> None:
        """Reports that the buckets of these units will be unsharded next."""
        if self._tell_expected is not None:
            buckets = (bucket for key in units for bucket in self._buckets[key])
            # A bucket that is unsharded now will be resharded and needed again, unless it stays.
            self._tell_expected(b for b in buckets if not (b.is_unsharded and b in self._staying))

    def unshard(self, unit: Unit) -> None:
        """Unshards a unit; its parameters have values when the call returns."""
        self._unshard(self._buckets[id(unit)])

    def unshard_bucket(self, bucket: ShardedBucket) -> None:
        """Unshards a bucket; its parameters have values when the call returns.

        Raises:
            ArgumentError: a backward has updated the bucket already.
        """
        self._unshard([bucket])

    def _unshard(self, buckets: Sequence[ShardedBucket]) -> None:
        for bucket in buckets:
            if not bucket.is_unsharded:
                if bucket not in self._coming:
                    self._start(buckets)
                self._end_coming(bucket)

    def unshard_for_schedule(self, bucket: ShardedBucket) -> None:
        """Unshards a bucket for a pipeline schedule, until :meth:`reshard_for_change`."""
        self._unshard([bucket])
        self._for_schedule.add(bucket)

    def open(self, unit: Unit | None = None) -> None:
        """Marks the unsharded buckets, of one unit or of all, as open to writes by the user."""
        for bucket in self._unsharded if unit is None else self._buckets[id(unit)]:
            bucket.open()

    def _start(self, buckets: Sequence[ShardedBucket]) -> None:
        """Starts to fill the buckets that are neither unsharded nor being filled."""
        begun: list[ShardedBucket] = []
        try:
            for bucket in buckets:
                if bucket.is_unsharded or bucket in self._coming:
                    continue
                if bucket in self._closed:
                    raise ArgumentError(
                        f"zero: parameter {bucket.params[0].name} and others of its bucket are "
                        'needed again, and a backward has updated them already (update="in_'
                        'backward"). Call optimizer.step() before they are used again; where '
                        "backward itself uses them again, build the optimizer with "
                        'update="in_step"'
                    )
                bucket.flat.untyped_storage().resize_(bucket.size_bytes)
                self._coming[bucket] = None
                begun.append(bucket)
        finally:
            if begun:
                self._copier.begin(begun)

    def _start_ahead(self, units: Sequence[int], count: int) -> None:
        """Starts to fill the first ``count`` units, or more; see NOTE [Units begun together]."""
        ahead_bytes = coming_bytes = 0
        missing: list[ShardedBucket] = []
        is_due = False
        for number, key in enumerate(units):
            unit, size_bytes = self._buckets[key], self._large.get(key, 0)
            ahead_bytes += size_bytes
            if number >= count and (
                not size_bytes or ahead_bytes > AHEAD_BYTES or unit[0].is_unsharded
            ):
                break
            for bucket in self._open(key) if self._closed else unit:
                if bucket in self._coming:
                    coming_bytes += bucket.size_bytes
                elif not bucket.is_unsharded:
                    missing.append(bucket)
            is_due = is_due or (number < count and bool(missing))
        if missing and (is_due or coming_bytes < AHEAD_BYTES // 2):
            self._start(missing)

    def _followers(self) -> list[int]:
        """Returns the units that come next if this iteration continues as the last one did."""
        at = len(self._now)
        return self._last[at:] if self._last[at - 1 : at] == self._now[-1:] else []

    def reshard(self, bucket: ShardedBucket, keeps_views: bool = False) -> None:
        """Reshards a bucket, unless a pin, a pipeline schedule or a graph keeps it unsharded."""
        if self._pins and torch.is_grad_enabled():
            self._ran.add(bucket)
        stays = self._pins or bucket in self._for_schedule or (self.held and bucket.is_in_graph)
        if not stays and bucket in self._unhooked:
            stays = self._is_awaited(bucket)
        if bucket.is_unsharded and not stays:
            self._unsharded.pop(bucket, None)
            try:
                bucket.to_sharded(self._unhooked.pop(bucket, False) or keeps_views)
            finally:
                if bucket in self._told:
                    self._told[bucket]()

    def reshard_used(self, bucket: ShardedBucket) -> None:
        """Reshards a bucket in backward, unless a graph still needs the bucket's memory."""
        if bucket.is_referred_to:
            return
        # Graphs may need only unhooked and staying buckets later; see _is_awaited().
        may_wait = bucket in self._unhooked or bucket in self._staying
        if not may_wait or not self._is_awaited(bucket):
            self.reshard(bucket)

    def close_bucket(self, bucket: ShardedBucket) -> None:
        """Refuses to unshard a bucket until :meth:`reopen`, since ranks will change its chunks.

        An unsharded bucket stays unsharded, with its old values, for the rest of this backward.

        Raises:
            ArgumentError: a parameter was written to.
        """
        if bucket in self._coming:
            self._end_coming(bucket)
        bucket.shut()
        self._closed.add(bucket)

    def reopen(self) -> None:
        """Allows unsharding of the closed buckets, once all ranks have changed their chunks."""
        self._closed.clear()

    def release(self) -> None:
        """Called after a backward that made no graph; clears ``held`` if no graph uses a bucket."""
        self.held = self.held and any(bucket.is_in_graph for bucket in self._unsharded)

    def keep_for_graph(self, unit: Unit) -> None:
        """Keeps a unit unsharded for graphs that use it without a hook; see the class's note."""
        for bucket in self._buckets[id(unit)]:
            self._unhooked.setdefault(bucket, False)

    def reshard_all(self) -> None:
        """Reshards all buckets except those that graphs without a hook need.

        Raises:
            ArgumentError: a parameter was written to. The buckets are still resharded.
        """
        self._reshard_others({bucket for bucket in self._unsharded if self._is_awaited(bucket)})

    def reshard_for_change(self) -> None:
        """Reshards all buckets, even if graphs refer to them, since their values will change.

        Raises:
            ArgumentError: a parameter was written to. All buckets are still resharded.
        """
        self.held = False
        self._for_schedule.clear()
        viewed = {bucket for bucket, keeps in self._unhooked.items() if keeps}
        self._unhooked.clear()
        self._reshard_others(set(), viewed)

    def _is_awaited(self, bucket: ShardedBucket) -> bool:
        """True if a graph may need a bucket that no hook would unshard again."""
        if bucket in self._closed:
            return False  # its values are out of date
        unhooked = bucket in self._unhooked
        if not unhooked and (self._together or bucket not in self._staying):
            return False
        return bucket.is_in_graph

    def _reshard_others(
        self, kept: Container[ShardedBucket], viewed: Container[ShardedBucket] = ()
    ) -> None:
        """Reshards all buckets except ``kept``; views of the buckets in ``viewed`` stay valid."""
        failed: ArgumentError | DiskError | None = None
        for bucket in [*self._coming, *self._unsharded]:
            try:
                if bucket in self._coming:
                    self._end_coming(bucket)
                if bucket in kept:
                    bucket.check()
                else:
                    self.reshard(bucket, bucket in viewed)
            except (ArgumentError, DiskError) as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def _end_coming(self, bucket: ShardedBucket) -> None:
        try:
            self._copier.end(bucket)
        except DiskError:
            # The bucket cannot be filled, on any rank.
            self._coming.pop(bucket, None)
            bucket.to_sharded()
            raise
        self._coming.pop(bucket, None)
        bucket.to_unsharded()
        self._unsharded[bucket] = None
        if bucket in self._told:
            self._told[bucket]()

    def has(self, tensor: torch.Tensor) -> bool:
        """True if a tensor is in the memory of an unsharded bucket."""
        wrapper: Any = tensor
        if is_traceable_wrapper_subclass(wrapper):
            # A DTensor, or the pending result of a DTensor's collective: the memory is inside.
            inside = [getattr(wrapper, name) for name in wrapper.__tensor_flatten__()[0]]
            return any(self.has(each) for each in inside if isinstance(each, torch.Tensor))
        if not torch._C._has_storage(tensor):
            return False
        at = tensor.untyped_storage().data_ptr()
        return at in map(torch.Tensor.data_ptr, map(_flat_of, self._unsharded))

    @property
    def pinned(self) -> bool:
        """True inside :meth:`pin`, where nothing is resharded."""
        return self._pins > 0

    @contextmanager
    def pin(self) -> Iterator[None]:
        """Reshards nothing inside the context; at its end, reshards the buckets unsharded in it."""
        # A forward or backward may be running that needs the buckets that are unsharded now.
        kept = set(self._unsharded)
        self._pins += 1
        try:
            yield
        except BaseException:
            self._pins -= 1
            # The exception that was raised matters more than lost changes.
            with suppress(ArgumentError):
                self._end_pin(kept)
            raise
        self._pins -= 1
        self._end_pin(kept)

    def _end_pin(self, kept: set[ShardedBucket]) -> None:
        if not self._pins and torch.is_grad_enabled():
            used = {
                b for b in self._unsharded if b not in kept and b not in self._ran and b.is_used
            }
            self._unhooked.update(dict.fromkeys(used, True))
            kept = kept | used
        # Views in a forward's graph need no memory until backward, which unshards again.
        viewed = {*self._coming, *self._unsharded} - self._ran
        try:
            self._reshard_others(kept, viewed)
        finally:
            if not self._pins:
                self._ran.clear()

    def is_repeated(self, unit: Unit) -> bool:
        """True if a call of a unit, outside of a call of the root, begins an iteration.

        After a backward, every such call begins an iteration. Without a backward, an iteration
        begins if a unit is called again: any unit, or with gradients the iteration's first unit.
        """
        key = id(unit)
        again = self._now[:1] == [key] if torch.is_grad_enabled() else key in self._now
        return self._backward_ended or again

    def end_backward(self) -> None:
        """Called at the end of a backward through the module; reshards all buckets."""
        self._backward_ended = True
        self.reshard_all()

    def new_iteration(self) -> None:
        """Begins an iteration; its units are expected in the order of the iteration that ends."""
        self._backward_ended = False
        if self._now:
            self._last, self._now = self._now, []

    def close(self) -> None:
        """Ends all copies and reshards all buckets."""
        self.reshard_for_change()
        self._copier.close()


def stays_after_forward(unit: Unit, options: ZeroOptions) -> bool:
    """True if a unit stays unsharded from forward to backward."""
    chosen = unit.options.reshard_after_forward
    return not (options.reshard_after_forward if chosen is None else chosen)


def _unshard_for_schedule(reference: weakref.ref[Unsharder], bucket: ShardedBucket) -> bool:
    unsharder = reference()
    if unsharder is None or not in_split_backward():
        return False
    unsharder.unshard_for_schedule(bucket)
    return True
