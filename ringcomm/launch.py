"""Starts the ranks of a command on this machine, runs each, and answers for their end."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING

from ringcomm.errors import RingcommError
from ringcomm.process import available_cores

if TYPE_CHECKING:
    from torch.distributed import Store

# Starts the ranks of a command as processes of this machine and answers for their end.
#
# When a rank fails, or on Ctrl-C or SIGTERM, all ranks are ended before ``launch`` returns; when
# this process is killed outright the kernel ends them. Nothing is put on disk.

STORE_PORT_VARIABLE = "RINGCOMM_STORE_PORT"  # where rank 0 serves the store of this launch
STORE_FD_VARIABLE = "RINGCOMM_STORE_FD"  # rank 0 only: the socket, already bound and listening
POLL_S = 0.05
SETTLE_S = 0.3  # ranks that fail because of another's end are reaped before blame is laid
GRACE_S = 3.0
INTERRUPTED = 130


@dataclass(frozen=True)
class LaunchPlan:
    """``module.run_rank(config)`` on every rank; ``config`` must survive JSON."""

    module: str
    config: Mapping[str, object]
    ranks: int
    threads: int


def threads_per_rank(ranks: int) -> int:
    """Compute threads per rank so that ranks x threads fill the cores and no more."""
    return max(1, available_cores() // ranks)


def launch(plan: LaunchPlan) -> int:
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


def _start(plan: LaunchPlan, rank: int, listener: socket.socket) -> subprocess.Popen[bytes]:
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
            *(sys.executable, "-m", "ringcomm.launch"),
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


# One rank of a command: started by ``launch.py``, or by torchrun through the command itself.

PR_SET_PDEATHSIG = 1
TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True)
class RankPlace:
    """This process's place among the ranks."""

    rank: int
    size: int
    threads: int


def launch_store() -> Store:
    """The store of ranks that ``launch.py`` started."""
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


def _die_with(parent: int) -> None:
    """Have the kernel end this process when the launching process ends, however it ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it ended before the request was in place
        sys.exit(INTERRUPTED)


def main() -> int:
    """Entry of ``python -m ringcomm.launch PARENT MODULE CONFIG``."""
    parent, module, config = sys.argv[1:]
    _die_with(int(parent))
    hide_missing_numpy()
    try:
        code: int = importlib.import_module(module).run_rank(json.loads(config))
    except RingcommError as error:
        print(f"ringcomm: rank {os.environ['RANK']}: {error}", file=sys.stderr)
        return 1
    return code


def hide_missing_numpy() -> None:
    """Hides torch's warning that NumPy is not installed; to be called before torch is imported.

    torch says it in every process that imports it (pytorch issue 125678), and nothing here needs
    NumPy. A NumPy that is there and does not work is still reported.
    """
    said = "Failed to initialize NumPy: No module named 'numpy'"
    warnings.filterwarnings("ignore", said, UserWarning)


if __name__ == "__main__":
    sys.exit(main())
