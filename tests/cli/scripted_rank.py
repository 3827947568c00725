# SPDX-License-Identifier: Apache-2.0
"""A rank that acts as its test tells it; started by ``ringcomm.launch``."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ringcomm.errors import ArgumentError
from tests.cli.processes import is_running, wait_until


def run_rank(config: Mapping[str, Any]) -> int:
    """Performs the act of this rank in ``config["acts"]``."""
    rank = int(os.environ["RANK"])
    act = config["acts"][rank]
    if "folder" in config:
        Path(config["folder"], f"rank{rank}").write_text(str(os.getpid()))
    if act == "follow":
        # Ends like a rank that loses its peer.
        other = Path(config["folder"], f"rank{1 - rank}")
        wait_until(lambda: other.exists() and other.read_text() != "", "the other rank's start")
        wait_until(lambda: not is_running(int(other.read_text())), "its end")
    if act in ("fail", "follow"):
        return 3
    if act == "raise":
        raise ArgumentError("the value is bad")
    if act == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if act == "cling":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if act in ("sleep", "cling"):
        time.sleep(600)
    if act == "say":
        names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
        said = " ".join(os.environ[name] for name in names)
        Path(config["folder"], f"said{rank}").write_text(said)
    return 0
