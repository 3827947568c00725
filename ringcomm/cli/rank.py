"""One rank of a command: started by ``launch.py``, or by torchrun through the command itself."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from ringcomm.cli import hide_missing_numpy
from ringcomm.cli.launch import (
    INTERRUPTED,
    STORE_FD_VARIABLE,
    STORE_PORT_VARIABLE,
)
from ringcomm.errors import RingcommError

if TYPE_CHECKING:
    from torch.distributed import Store

PR_SET_PDEATHSIG = 1
TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True)
class World:
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
    """Entry of ``python -m ringcomm.cli.rank PARENT MODULE CONFIG``."""
    parent, module, config = sys.argv[1:]
    _die_with(int(parent))
    hide_missing_numpy()
    try:
        code: int = importlib.import_module(module).run_rank(json.loads(config))
    except RingcommError as error:
        print(f"ringcomm: rank {os.environ['RANK']}: {error}", file=sys.stderr)
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
