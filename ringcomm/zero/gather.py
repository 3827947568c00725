"""Stage 3: brings a unit's parameters when they are needed, and the next unit's before that."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import torch

from ringcomm.comm.communicator import Communicator
from ringcomm.comm.device.launch import DeviceCallEngine
from ringcomm.cuda.runtime import Event
from ringcomm.errors import ArgumentError, no_thread
from ringcomm.zero.buckets import ShardedBucket
from ringcomm.zero.options import ZeroOptions
from ringcomm.zero.profile import StepProfile
from ringcomm.zero.units import Unit


class Copier(ABC):
    """Fills buckets, beside what the caller does."""

    @abstractmethod
    def begin(self, bucket: ShardedBucket) -> None:
        """Starts to fill an allocated bucket."""

    @abstractmethod
    def end(self, bucket: ShardedBucket) -> None:
        """What :meth:`begin` started is done for all that the caller does next."""

    @abstractmethod
    def close(self) -> None:
        """Gives threads back."""


class HostCopier(Copier):
    """In a thread."""

    def __init__(self, profile: StepProfile) -> None:
        self._profile = profile
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="ringcomm-gather")
        try:
            self._pool.submit(int).result()
        except RuntimeError as error:
            # Here rather than in a step, where a bucket would wait for what nobody does.
            raise no_thread("zero", error, "Stage 3 gathers in one of its own") from error

    def begin(self, bucket: ShardedBucket) -> None:
        bucket.coming = self._pool.submit(self._fill, bucket)

    def _fill(self, bucket: ShardedBucket) -> None:
        with self._profile.span("gather", bucket.flat.numel() * bucket.flat.element_size()):
            bucket.fill()

    def end(self, bucket: ShardedBucket) -> None:
        with self._profile.waiting("gather"):
            if bucket.coming is None:
                self._fill(bucket)  # Ctrl-C came before it was known to come
            else:
                bucket.coming.result()
        bucket.coming = None

    def close(self) -> None:
        self._pool.shutdown()


class HereCopier(Copier):
    """By the caller, when it needs them."""

    def __init__(self, profile: StepProfile) -> None:
        self._profile = profile

    def begin(self, bucket: ShardedBucket) -> None:
        return

    def end(self, bucket: ShardedBucket) -> None:
        size_bytes = bucket.flat.numel() * bucket.flat.element_size()
        with self._profile.waiting("gather"), self._profile.span("gather", size_bytes):
            bucket.fill()

    def close(self) -> None:
        return


class DeviceCopier(Copier):
    """On a stream of its own, by the copy engines.

    Memory is allocated and freed on the caller's stream. The side stream begins behind what that
    stream had when the memory was allocated, and the caller's stream waits before it uses or frees
    it, so torch's allocator need not know of the side stream.
    """

    def __init__(self, comm: DeviceCallEngine) -> None:
        self._runtime, self._device = comm.device_place
        self._side = self._runtime.make_stream(self._device, high_priority=True)
        self._done: dict[ShardedBucket, Event] = {}

    def begin(self, bucket: ShardedBucket) -> None:
        runtime, device, side = self._runtime, self._device, self._side
        current = runtime.current_stream(device)
        runtime.wait_event(device, side.handle, runtime.record_event(device, current))
        with runtime.on_stream(side):
            bucket.fill()
        self._done[bucket] = runtime.record_event(device, side.handle)

    def end(self, bucket: ShardedBucket) -> None:
        done = self._done.pop(bucket, None)
        if done is None:
            bucket.fill()  # Ctrl-C came before it was known to come
        else:
            runtime, device = self._runtime, self._device
            runtime.wait_event(device, runtime.current_stream(device), done)

    def close(self) -> None:
        self._done.clear()


class Gatherer:
    """Which buckets are here, which are coming, and which will be needed next.

    The order in which units were needed in the last iteration is what this one is guessed to have:
    a wrong guess costs a copy.
    """

    def __init__(
        self,
        units: Sequence[tuple[Unit, Sequence[ShardedBucket]]],
        comm: Communicator,
        options: ZeroOptions,
        profile: StepProfile,
    ) -> None:
        self._buckets = {id(unit): tuple(buckets) for unit, buckets in units}
        self._prefetch = options.prefetch if options.overlap else 0
        self._copier: Copier
        if isinstance(comm, DeviceCallEngine):
            self._copier = DeviceCopier(comm)
        else:
            self._copier = HostCopier(profile) if options.overlap else HereCopier(profile)
        self._coming: set[ShardedBucket] = set()
        # In order of arrival, so that of several errors the same is raised each time.
        self._here: dict[ShardedBucket, None] = {}
        self._pins = 0
        # Those that a forward with gradients has used in gathered().
        self._ran: set[ShardedBucket] = set()
        #: Whether nothing is freed that a graph refers to, since one of gradients may.
        self.held = False
        #: How many units run now, one inside another.
        self.running = 0
        self._last: list[int] = []
        self._now: list[int] = []
        self._backward_ended = False
        self._told: dict[ShardedBucket, list[Callable[[], None]]] = {}

    def tell(self, bucket: ShardedBucket, settle: Callable[[], None]) -> None:
        """Has ``settle`` called whenever the bucket has come or gone."""
        self._told.setdefault(bucket, []).append(settle)

    def buckets_of(self, unit: Unit) -> tuple[ShardedBucket, ...]:
        """What a unit's parameters lie in."""
        return self._buckets[id(unit)]

    def need(self, unit: Unit) -> None:
        """The unit's parameters are here when it returns, and the next ones are on their way."""
        if not self._now or self._now[-1] != id(unit):
            self._now.append(id(unit))
        self.bring(unit)
        for key in self._expected():
            for bucket in self._buckets[key]:
                self._start(bucket)

    def bring(self, unit: Unit) -> None:
        """The unit's parameters are here when it returns."""
        buckets = self._buckets[id(unit)]
        for bucket in buckets:
            self._start(bucket)
        for bucket in buckets:
            if not bucket.is_here:
                self._copier.end(bucket)
                self._show(bucket)

    def open(self, unit: Unit | None = None) -> None:
        """Code outside of the module sees what is here, of one unit or all, and may write to it."""
        for bucket in self._here if unit is None else self._buckets[id(unit)]:
            bucket.in_the_open = True

    def _show(self, bucket: ShardedBucket) -> None:
        self._coming.discard(bucket)
        bucket.show()
        self._here[bucket] = None
        self._settle(bucket)

    def _settle(self, bucket: ShardedBucket) -> None:
        for settle in self._told.get(bucket, ()):
            settle()

    def _start(self, bucket: ShardedBucket) -> None:
        if not bucket.is_here and bucket not in self._coming:
            bucket.allocate()
            self._coming.add(bucket)
            self._copier.begin(bucket)

    def _expected(self) -> list[int]:
        """What followed the last time, if it began alike."""
        at = len(self._now)
        if not self._prefetch or self._last[at - 1 : at] != self._now[-1:]:
            return []
        return self._last[at : at + self._prefetch]

    def free(self, bucket: ShardedBucket, keeps_views: bool = False) -> None:
        """Frees a bucket, if it is here and nothing is pinned or held."""
        if self._pins and torch.is_grad_enabled():
            self._ran.add(bucket)
        if bucket.is_here and not self._pins and not (self.held and bucket.is_in_graph):
            self._here.pop(bucket, None)
            try:
                bucket.hide(keeps_views)
            finally:
                self._settle(bucket)

    def free_used(self, bucket: ShardedBucket) -> None:
        """Frees a bucket in backward, unless a part of the graph still refers to its memory."""
        if not bucket.is_referred_to:
            self.free(bucket)

    def release(self) -> None:
        """A backward that made no graph has ended; what a graph still refers to stays held."""
        self.held = self.held and any(bucket.is_in_graph for bucket in self._here)

    def free_all(self) -> None:
        """Frees what is here or on its way.

        Raises:
            ArgumentError: a parameter was written to; all are freed even so.
        """
        self._free_but(set())

    def _free_but(self, kept: set[ShardedBucket], keeps_views: bool = False) -> None:
        failed: ArgumentError | None = None
        for bucket in [*self._coming, *self._here]:
            try:
                if bucket in self._coming:
                    self._copier.end(bucket)
                    self._show(bucket)
                if bucket in kept:
                    bucket.check()
                else:
                    # Of a forward's graph, backward gathers the memory again.
                    self.free(bucket, keeps_views and bucket not in self._ran)
            except ArgumentError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in the memory of a bucket that is here."""
        if not torch._C._has_storage(tensor):
            return False
        at = tensor.untyped_storage().data_ptr()
        return any(bucket.flat.data_ptr() == at for bucket in self._here)

    @property
    def pinned(self) -> bool:
        """Whether nothing is freed now."""
        return self._pins > 0

    @contextmanager
    def pin(self) -> Iterator[None]:
        """Inside, nothing is freed; what came meanwhile is freed at the end."""
        # A forward or backward may be under way, which needs what is here.
        kept = set(self._here)
        self._pins += 1
        try:
            yield
        except BaseException:
            self._pins -= 1
            # That changes are lost matters less than what was raised.
            with suppress(ArgumentError):
                self._end_pin(kept)
            raise
        self._pins -= 1
        self._end_pin(kept)

    def _end_pin(self, kept: set[ShardedBucket]) -> None:
        try:
            self._free_but(kept, keeps_views=True)
        finally:
            if not self._pins:
                self._ran.clear()

    def is_repeated(self, unit: Unit) -> bool:
        """Whether a call of a unit past the root begins an iteration.

        So it does after a backward, where it began the last iteration, and in evaluation where it
        was called before.
        """
        key = id(unit)
        again = self._now[:1] == [key] if torch.is_grad_enabled() else key in self._now
        return self._backward_ended or again

    def end_backward(self) -> None:
        """A backward through the module is over."""
        self._backward_ended = True
        self.free_all()

    def new_iteration(self) -> None:
        """What is needed from now on is compared with what was needed since the last call."""
        self._backward_ended = False
        if self._now:
            self._last, self._now = self._now, []

    def close(self) -> None:
        """Ends all copies."""
        self.held = False
        self.free_all()
        self._copier.close()
