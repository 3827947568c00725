"""Starts the ranks of a command as processes of this machine and answers for their end.

When a rank fails, or on Ctrl-C or SIGTERM, all ranks are ended before ``launch`` returns; when
this process is killed outright the kernel ends them (see ``rank.py``). Nothing is put on disk.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from ringcomm.memory.cores import available_cores

STORE_PORT_VARIABLE = "RINGCOMM_STORE_PORT"  # where rank 0 serves the store of this launch
STORE_FD_VARIABLE = "RINGCOMM_STORE_FD"  # rank 0 only: the socket, already bound and listening
POLL_S = 0.05
SETTLE_S = 0.3  # ranks that fail because of another's end are reaped before blame is laid
GRACE_S = 3.0
INTERRUPTED = 130


@dataclass(frozen=True)
class Plan:
    """``module.run_rank(config)`` on every rank; ``config`` must survive JSON."""

    module: str
    config: Mapping[str, object]
    ranks: int
    threads: int


def threads_per_rank(ranks: int) -> int:
    """Compute threads per rank so that ranks x threads fill the cores and no more."""
    return max(1, available_cores() // ranks)


def launch(plan: Plan) -> int:
    """Run the plan to its end: 0, the exit code of a rank that failed, or 130 after Ctrl-C."""
    processes: list[subprocess.Popen[bytes]] = []
    # The socket is bound here and inherited by rank 0, so the port cannot be lost to another
    # process between choosing and using it.
    with socket.create_server(("127.0.0.1", 0), backlog=4 * plan.ranks) as listener, _sigterm():
        try:
            for rank in range(plan.ranks):
                processes.append(_start(plan, rank, listener))
            return _supervise(processes)
        except KeyboardInterrupt:
            print("ringcomm: interrupted; all ranks were ended", file=sys.stderr)
            return INTERRUPTED
        finally:
            _end(processes)


def _start(plan: Plan, rank: int, listener: socket.socket) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(plan.ranks),
        "LOCAL_WORLD_SIZE": str(plan.ranks),
        STORE_PORT_VARIABLE: str(listener.getsockname()[1]),
        "OMP_NUM_THREADS": str(plan.threads),
        "MKL_NUM_THREADS": str(plan.threads),
    }
    # All ranks are here: Gloo need not resolve the host's name, which may lead nowhere.
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    inherited = [listener.fileno()] if rank == 0 else []
    if inherited:
        environment[STORE_FD_VARIABLE] = str(listener.fileno())
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "ringcomm.cli.rank"),
            *(str(os.getpid()), plan.module, json.dumps(plan.config)),
        ],
        env=environment,
        pass_fds=inherited,
        stdin=subprocess.DEVNULL,
        # Ctrl-C must reach this process alone, which then ends the ranks in order.
        start_new_session=True,
    )


def _supervise(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    while True:
        codes = [process.poll() for process in processes]
        if any(codes):
            break
        if all(code == 0 for code in codes):
            return 0
        time.sleep(POLL_S)
    time.sleep(SETTLE_S)
    failures = [(rank, process.poll()) for rank, process in enumerate(processes)]
    # A rank that a signal ended is the cause; its peers fail because they lost it.
    rank, code = min(
        ((rank, code) for rank, code in failures if code), key=lambda failure: failure[1] > 0
    )
    print(f"ringcomm: rank {rank} {_describe(code)}; all ranks were ended", file=sys.stderr)
    return code if code > 0 else 1


def _describe(code: int) -> str:
    if code > 0:
        return f"failed with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Leave no rank behind, also when Ctrl-C is pressed again while this runs."""
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
    """Treat SIGTERM like Ctrl-C, so that it too ends the ranks first."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
