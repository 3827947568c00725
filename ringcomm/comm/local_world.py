"""Ranks as threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, TypeVar, overload

from torch.distributed import HashStore

from ringcomm.comm.communicator import Communicator
from ringcomm.comm.groups import thread_default
from ringcomm.comm.options import CommOptions
from ringcomm.errors import AbortedError, ArgumentError

T = TypeVar("T")


class LocalWorld(Sequence[Communicator]):
    """The communicators of a world whose ranks are threads, by rank. Closes them as a context."""

    def __init__(self, communicators: Sequence[Communicator]) -> None:
        self._communicators = tuple(communicators)

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

    def run(self, fn: Callable[..., T], *args: Any) -> list[T]:
        """Calls ``fn(communicator, *args)`` on every rank at once, each in a thread.

        Inside, the module-level functions (``ringcomm.all_reduce`` and so on) use that
        thread's communicator. When a rank raises, the communicators are aborted so that no
        other rank waits for it.

        Returns:
            The results by rank.

        Raises:
            BaseException: the first one that a rank raised.
        """
        return _run_threads([_bind(fn, communicator, args) for communicator in self], self._abort)

    def _abort(self, rank: int, error: BaseException) -> None:
        self[rank].abort(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Closes all communicators; a second call does nothing."""
        for communicator in self:
            communicator.close()

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


def _bind(
    fn: Callable[..., T], communicator: Communicator, args: tuple[Any, ...]
) -> Callable[[], T]:
    def call() -> T:
        with thread_default(communicator):
            return fn(communicator, *args)

    return call


def _run_threads(
    calls: list[Callable[[], T]], on_error: Callable[[int, BaseException], None]
) -> list[T]:
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def body(rank: int) -> None:
        try:
            results[rank] = calls[rank]()
        except BaseException as error:
            errors.append(error)
            on_error(rank, error)

    threads = [
        threading.Thread(target=body, args=(rank,), name=f"ringcomm-rank-{rank}", daemon=True)
        for rank in range(len(calls))
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except KeyboardInterrupt as interrupt:
        for rank in range(len(calls)):
            on_error(rank, interrupt)
        raise
    if errors:
        # Ranks that were woken by the abort are not the cause.
        raise next((e for e in errors if not isinstance(e, AbortedError)), errors[0])
    return [results[rank] for rank in range(len(calls))]


def _leave(rank: int, error: BaseException) -> None:
    """A rank that cannot be built has told the others through the store."""


def local_world(
    n: int,
    *,
    timeout: timedelta | float | None = None,
    heap_bytes: int | None = None,
    options: CommOptions | None = None,
) -> LocalWorld:
    """A world of ``n`` ranks in this process, one thread each; see :meth:`LocalWorld.run`.

    Args:
        n: how many ranks.
        timeout: how long a call waits for its peers; default 30 minutes.
        heap_bytes: capacity of the process's heap, if this is its first use.
        options: tunables; ``timeout`` wins over theirs.

    Raises:
        ArgumentError: ``n`` is not a positive integer.
        HeapError: no room for the heap or the communicators' regions in it.
    """
    if not isinstance(n, int) or n < 1:
        raise ArgumentError(f"local_world: expected the number of ranks, >= 1, got {n!r}")
    store = HashStore()

    def build(rank: int) -> Communicator:
        return Communicator.from_store(
            store, rank, n, name="local", timeout=timeout, heap_bytes=heap_bytes, options=options
        )

    return LocalWorld(_run_threads([partial(build, rank) for rank in range(n)], _leave))
