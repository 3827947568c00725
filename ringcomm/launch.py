# SPDX-License-Identifier: Apache-2.0
"""Starts ranks as processes on this machine, and reports how they ended; also runs in each rank."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any

from ringcomm.errors import RingcommError
from ringcomm.process import available_cores

if TYPE_CHECKING:
    from torch.distributed import Store

STORE_PORT_VARIABLE = "RINGCOMM_STORE_PORT"  # The port at which rank 0 serves the launch's store.
STORE_FD_VARIABLE = "RINGCOMM_STORE_FD"  # On rank 0: the socket, already bound and listening.
POLL_S = 0.05
SETTLE_S = 0.3  # before naming the culprit, wait for ranks that fail because another rank ended
GRACE_S = 3.0
INTERRUPTED = 130


@dataclass(frozen=True)
class RankLaunch:
    """A launch of ``module.run_rank(config)`` on every rank; ``config`` is written as JSON."""

    module: str
    config: Mapping[str, object]
    ranks: int
    threads: int


def threads_per_rank(ranks: int) -> int:
    """Returns the compute threads per rank with which all ranks together fill the cores."""
    return max(1, available_cores() // ranks)


def launch_ranks(start: RankLaunch) -> int:
    """Starts the ranks and waits for their end, like :func:`run_commands`; writes no file."""
    # The socket is bound here and inherited by rank 0, so that no other process can take the port
    # between its choice and its use.
    with socket.create_server(("127.0.0.1", 0), backlog=4 * start.ranks) as listener:
        return run_commands([_command(start, rank, listener) for rank in range(start.ranks)])


def rank_variables(
    rank: int, world_size: int, local_rank: int | None = None, local_size: int | None = None
) -> dict[str, str]:
    """Returns a rank's torchrun variables; by default all ranks are on this machine."""
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": rank if local_rank is None else local_rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size if local_size is None else local_size,
    }
    return {name: str(number) for name, number in numbers.items()}


def _command(start: RankLaunch, rank: int, listener: socket.socket) -> RankCommand:
    environment = {
        # All ranks are on this machine: Gloo need not resolve the host's name, which may fail.
        "GLOO_SOCKET_IFNAME": "lo",
        **os.environ,
        **rank_variables(rank, start.ranks),
        STORE_PORT_VARIABLE: str(listener.getsockname()[1]),
        "OMP_NUM_THREADS": str(start.threads),
        "MKL_NUM_THREADS": str(start.threads),
    }
    inherited = [listener.fileno()] if rank == 0 else []
    if inherited:
        environment[STORE_FD_VARIABLE] = str(listener.fileno())
    words = [sys.executable, "-m", "ringcomm.launch"]
    words += [str(os.getpid()), start.module, json.dumps(start.config)]
    return RankCommand(f"rank {rank}", words, environment, inherited)


@dataclass(frozen=True)
class RankCommand:
    """A process to start, and its name for messages."""

    name: str
    words: Sequence[str]  # the program and its arguments
    environment: Mapping[str, str] | None = None  # None: this process's environment
    files: Sequence[int] = ()  # inherited file descriptors


@contextmanager
def started(commands: Iterable[RankCommand], **how: Any) -> Iterator[list[subprocess.Popen[Any]]]:
    """Starts processes, and ends them at the end of the block.

    Only this process receives Ctrl-C. Each rank calls :func:`end_with`, so that the kernel ends the
    rank when this process ends. ``how`` are arguments of ``subprocess.Popen``.
    """
    processes: list[subprocess.Popen[Any]] = []
    how = {"stdin": subprocess.DEVNULL, "start_new_session": True, **how}
    try:
        for each in commands:
            processes.append(
                subprocess.Popen(each.words, env=each.environment, pass_fds=each.files, **how)
            )
        yield processes
    finally:
        _end(processes)


def run_commands(commands: Sequence[RankCommand]) -> int:
    """Runs ranks to their end; returns 0, the exit code of a failed rank, or 130 after Ctrl-C.

    If a rank fails, or on Ctrl-C or SIGTERM, this function ends all ranks before it returns.
    """
    with _sigterm():
        try:
            with started(commands) as processes:
                return _supervise([command.name for command in commands], processes)
        except KeyboardInterrupt:
            print("ringcomm: interrupted; all ranks were ended", file=sys.stderr)
            return INTERRUPTED


def _supervise(names: Sequence[str], processes: Sequence[subprocess.Popen[Any]]) -> int:
    while True:
        codes = [process.poll() for process in processes]
        if any(codes):
            break
        if all(code == 0 for code in codes):
            return 0
        time.sleep(POLL_S)
    time.sleep(SETTLE_S)
    ends = zip(names, [process.poll() for process in processes], strict=True)
    # A rank that a signal ended is the cause; its peers fail because they lost it.
    name, code = min(((name, code) for name, code in ends if code), key=lambda end: end[1] > 0)
    sys.stderr.write(f"ringcomm: {name} {describe_exit(code)}; all ranks were ended\n")
    return code if code > 0 else 1


def describe_exit(code: int) -> str:
    """Describes how a failed process ended; the code is negative if a signal ended it."""
    if code > 0:
        return f"failed with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _end(processes: Sequence[subprocess.Popen[Any]]) -> None:
    """Ends all processes, even if Ctrl-C is pressed again during this call."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for process in processes:
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + GRACE_S
        for process in processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _sigterm() -> Iterator[None]:
    """Treats SIGTERM like Ctrl-C, so that SIGTERM also ends the ranks first."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# The code that runs in each rank; ``launch_ranks`` or torchrun has started the rank's process.

PR_SET_PDEATHSIG = 1
TIMEOUT = timedelta(minutes=5)


def launch_store() -> Store:
    """Returns the store of ranks that ``launch.py`` started."""
    from torch.distributed import TCPStore

    listen_fd = os.environ.get(STORE_FD_VARIABLE)
    return TCPStore(
        "127.0.0.1",
        int(os.environ[STORE_PORT_VARIABLE]),
        is_master=listen_fd is not None,
        timeout=TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=None if listen_fd is None else int(listen_fd),
    )


def end_with(parent: int) -> None:
    """Makes the kernel end this process when the process ``parent`` ends, in whatever way."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # the parent ended before the request took effect
        sys.exit(INTERRUPTED)


def main() -> int:
    """Entry of ``python -m ringcomm.launch PARENT MODULE CONFIG``."""
    parent, module, config = sys.argv[1:]
    end_with(int(parent))
    hide_missing_numpy()
    try:
        code: int = importlib.import_module(module).run_rank(json.loads(config))
    except RingcommError as error:
        # In one write: print() makes two if stderr is unbuffered, and the ranks share stderr.
        sys.stderr.write(f"ringcomm: rank {os.environ['RANK']}: {error}\n")
        return 1
    return code


def hide_missing_numpy() -> None:
    """Hides torch's warning that NumPy is not installed; call it before importing torch.

    torch warns in every process that imports it (pytorch issue 125678), but nothing here needs
    NumPy. A NumPy that is installed but does not work is still reported.
    """
    said = "Failed to initialize NumPy: No module named 'numpy'"
    warnings.filterwarnings("ignore", said, UserWarning)


@contextmanager
def end_at_ctrl_c() -> Iterator[None]:
    """Makes Ctrl-C end this process with status 130 at once; put the import of torch in the block.

    C++ code that torch runs during its import can turn a ``KeyboardInterrupt`` into other errors.
    """
    is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_usual or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


if __name__ == "__main__":
    sys.exit(main())
