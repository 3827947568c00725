# SPDX-License-Identifier: Apache-2.0
"""Runs ranks as processes: starts them, collects results and errors, and leaves none behind."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ForkServer
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed import FileStore, Store

import ringcomm
from ringcomm.launch import describe_exit
from tests.support import fork_server

POLL_S = 0.01
# A process's exit status can be read only once, and start() reads the status of all processes. A
# thread that reads a status at the same time as another thread gets exit code 255.
_READING = threading.Lock()


@dataclass
class Outcome:
    """The end of one rank: a value, or an exception with its text, or only an exit code.

    There is no exit code if the rank has answered and stays up.
    """

    rank: int
    exitcode: int | None = None
    value: Any = None
    error: BaseException | None = None
    trace: str = ""

    @property
    def ok(self) -> bool:
        return self.error is None and not self.exitcode

    def describe(self) -> str:
        end = f" {describe_exit(self.exitcode)}" if self.exitcode else ""
        raised = "" if self.error is None else repr(self.error)
        return f"rank {self.rank}{end}: {self.trace or raised}"

    def read(self, answer: Connection) -> None:
        """Reads an answer of :func:`answer_of` from a pipe."""
        self.value, self.error, self.trace = pickle.loads(answer.recv_bytes())


class RanksFailed(AssertionError):
    """At least one rank raised, died or did not end."""


def context(server: ForkServer = forkserver._forkserver) -> ForkServerContext:
    """Returns how ranks are started: as forks of a server that has torch, within milliseconds."""
    fork_server.start_multiprocessing(server)
    return multiprocessing.get_context("forkserver")


def _main(
    fn: Callable[..., Any],
    rank: int,
    store_path: str,
    answer: Connection,
    arguments: tuple[Any, ...],
) -> None:
    world_size, *args = arguments
    answer.send_bytes(
        answer_of(lambda: fn(FileStore(store_path, world_size), rank, world_size, *args))
    )
    answer.close()


def answer_of(call: Callable[[], Any]) -> bytes:
    """Runs a rank's function; returns its value, error and traceback, pickled."""
    try:
        # Plain pickle: torch's own reductions would pass file descriptors of a process that ends.
        return pickle.dumps((call(), None, ""))
    except BaseException as error:
        trace = traceback.format_exc()
        try:
            answer = pickle.dumps((None, error, trace))
            pickle.loads(answer)  # some exceptions can be pickled but not unpickled
        except Exception:
            answer = pickle.dumps((None, RuntimeError(repr(error)), trace))
        return answer


def values_of(outcomes: Sequence[Outcome]) -> list[Any]:
    """Returns the results by rank; if a rank has none, raises RanksFailed with all traces."""
    failed = [outcome.describe() for outcome in outcomes if not outcome.ok]
    if failed:
        raise RanksFailed("\n".join(failed))
    return [outcome.value for outcome in outcomes]


def gather(
    pipes: Sequence[Connection],
    answered: Callable[[int], Outcome],
    late: Callable[[int], Outcome],
    timeout_s: float,
    grace_s: float | None = None,
) -> list[Outcome]:
    """Waits for the answers of ranks that stay up; returns the outcomes by rank.

    Args:
        pipes: to the ranks.
        answered: returns the outcome of a rank whose pipe has an answer, or was closed.
        late: returns the outcome of a rank that did not answer in time.
        timeout_s: how long the slowest rank may take.
        grace_s: how long to wait for the others once a rank has failed; None: until the timeout.
    """
    deadline = time.monotonic() + timeout_s
    outcomes: dict[int, Outcome] = {}
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting:
        ready = wait(list(waiting), max(deadline - time.monotonic(), 0))
        for pipe in [pipe for pipe in waiting if not ready or pipe in ready]:
            rank = waiting.pop(pipe)
            outcomes[rank] = answered(rank) if ready else late(rank)
            if not outcomes[rank].ok and grace_s is not None:
                deadline = min(deadline, time.monotonic() + grace_s)
    return [outcomes[rank] for rank in range(len(pipes))]


def join_nodes(
    store: Store, rank: int, world_size: int, nodes: Sequence[Sequence[int]], **settings: Any
) -> ringcomm.Communicator:
    """Builds the communicator of processes that claim to be on several nodes.

    Args:
        store, rank, world_size: as :func:`run_ranks` passes them.
        nodes: the ranks of each node.
        settings: of ``Communicator.from_store``.
    """
    node = next(number for number, ranks in enumerate(nodes) if rank in ranks)
    os.environ["RINGCOMM_NODE_ID"] = f"node{node}"
    torch.set_num_threads(1)  # all ranks share the machine
    return ringcomm.Communicator.from_store(store, rank, world_size, **{"timeout": 60, **settings})


def _handle_of(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def _join(process: BaseProcess, timeout_s: float | None = None) -> int | None:
    """Waits for the end of a process; returns its exit code, or None after the timeout."""
    wait([process.sentinel], timeout_s)
    with _READING:
        return process.exitcode


class Ranks:
    """Started ranks; a context manager that kills the remaining ranks."""

    # The server that forks the ranks; a subclass may use one that imports more modules first.
    server = forkserver._forkserver

    def __init__(self, fn: Callable[..., Any], world_size: int, *args: Any) -> None:
        how = context(self.server)
        connect = self.server.connect_to_new_process
        self._directory = tempfile.TemporaryDirectory()
        store_path = self.store_path
        self._answers: list[Connection] = []
        self.processes: list[BaseProcess] = []
        # Descriptors (pidfd) of the processes. The server reads their statuses at once, so their
        # ids may be reused; a signal by descriptor cannot hit another process. None: the process
        # ended before its descriptor was opened.
        self._handles: list[int | None] = []
        for rank in range(world_size):
            mine, theirs = how.Pipe(duplex=False)
            process = how.Process(
                target=_main,
                args=(fn, rank, store_path, theirs, (world_size, *args)),
                daemon=True,
            )
            with _READING, mock.patch.object(forkserver, "connect_to_new_process", connect):
                process.start()
            theirs.close()
            self._answers.append(mine)
            self.processes.append(process)
            self._handles.append(_handle_of(process.pid or 0))

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for rank, process in enumerate(self.processes):
            for number in (signal.SIGCONT, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):  # it has ended
                    self.signal(rank, number)
            _join(process)
            handle = self._handles[rank]
            if handle is not None:
                os.close(handle)
        for answer in self._answers:
            answer.close()
        self._directory.cleanup()

    @property
    def store_path(self) -> str:
        """The path of the store's file, which the ranks get."""
        return str(Path(self._directory.name) / "store")

    @property
    def pids(self) -> list[int]:
        return [process.pid or 0 for process in self.processes]

    def signal(self, rank: int, number: signal.Signals) -> None:
        handle = self._handles[rank]
        if handle is None:
            raise ProcessLookupError(f"rank {rank} has ended")
        signal.pidfd_send_signal(handle, number)

    def wait(self, timeout_s: float = 60.0, ranks: list[int] | None = None) -> list[Outcome]:
        """Returns the outcomes of ``ranks`` (default all); fails if a rank does not end in time."""
        deadline = time.monotonic() + timeout_s
        return [self._outcome(rank, deadline) for rank in (ranks or range(len(self.processes)))]

    def _outcome(self, rank: int, deadline: float) -> Outcome:
        answer, process = self._answers[rank], self.processes[rank]
        outcome = Outcome(rank)
        while True:
            if answer.poll(POLL_S):
                with contextlib.suppress(EOFError):  # it died
                    outcome.read(answer)
                break
            # The process may have answered and ended since the poll above.
            if wait([process.sentinel], 0) and not answer.poll():
                break
            if time.monotonic() > deadline:
                raise RanksFailed(f"rank {rank} did not end in time")
        outcome.exitcode = _join(process, max(deadline - time.monotonic(), 1.0))
        if outcome.exitcode is None:
            raise RanksFailed(f"rank {rank} answered but its process did not end")
        return outcome


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60.0,
    kind: type[Ranks] = Ranks,
) -> list[Any]:
    """Calls ``fn(store, rank, world_size, *args)`` in ``world_size`` processes.

    ``fn`` must be a module-level function.

    Returns:
        The results by rank.

    Raises:
        RanksFailed: a rank raised (all traces are shown), died, or did not end in time.
    """
    with kind(fn, world_size, *args) as ranks:
        outcomes = ranks.wait(timeout_s)
    return values_of(outcomes)
