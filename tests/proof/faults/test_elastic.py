# SPDX-License-Identifier: Apache-2.0
"""Jobs that torchrun restarts continue from their last checkpoint, with the same bits."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from ringcomm import CollectiveTimeout, Communicator, RendezvousError
from ringcomm.c10d.process_group import MonitoredBarrier
from ringcomm.rendezvous.same_node import Lookout
from tests.cli.processes import clean_environment
from tests.support import ROOT, fork_server

EXAMPLE = ROOT / "docs" / "examples" / "elastic.py"
RANKS, LIMIT_S = 2, 300
ATTEMPT = "TORCHELASTIC_RESTART_COUNT"

# Runs the example after another kind of rendezvous, and kills rank 1: in the first attempt before
# it joins, in the second at a step of its communication. Without a step it prints the number of
# steps.
PROGRAM = f"""
import os, runpy, signal, sys
from ringcomm import Communicator, _native
from ringcomm.c10d import register
register()  # torch knows an installed ringcomm only
step = int(sys.argv.pop(1))
attempt = int(os.environ["{ATTEMPT}"]) if os.environ["RANK"] == "1" else -1
if step and attempt == 0:
    os.kill(os.getpid(), signal.SIGKILL)
with Communicator.from_env(timeout=60) as comm:
    comm.barrier()
_native.arm_fault("kill" if step and attempt == 1 else "none", max(step, 1))
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
print("steps", sum(_native.fault_passages().values()), flush=True)
"""


def torchrun(folder: Path, step: int, *options: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    program = folder / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={RANKS}", "--max-restarts=3", str(program), str(step)]
    return fork_server.run(
        [*command, str(EXAMPLE), str(folder / "saved"), *options],
        LIMIT_S,
        cwd=folder,
        env={**clean_environment(), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )


def final(folder: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(folder / "saved" / "final.pt")
    return state


def test_a_restarted_job_ends_as_if_nothing_had_happened(tmp_path):
    """The job restarts twice; each attempt joins in both ways in the first attempt's store."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    done = torchrun(whole, 0)
    assert done.returncode == 0, done.stderr
    assert "begins at step 0" in done.stdout
    steps = int(re.findall(r"steps (\d+)", done.stdout)[0])
    done = torchrun(broken, steps * 3 // 5, "--group")
    assert done.returncode == 0, done.stderr
    begun = re.findall(r"rank 1 begins at step (\d+)", done.stdout)
    assert begun == ["0", "4"], done.stdout
    state, wanted = final(broken), final(whole)
    assert "loss" in state
    assert state.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(state[name], tensor), name


def _join(store, rank, timeout):
    with Communicator.from_store(store, rank, RANKS, timeout=timeout) as comm:
        total = torch.ones(3)
        comm.all_reduce(total)
        return total.tolist()


def _all_join(store):
    """Two ranks as threads."""
    other = threading.Thread(target=_join, args=(store, 1, 60.0))
    other.start()
    try:
        return _join(store, 0, 20.0)
    finally:
        other.join()


def test_ranks_join_in_a_store_where_an_attempt_before_has_failed(monkeypatch):
    """Rank 1 died before it joined, so the ranks have joined a different number of times."""
    store = HashStore()
    monkeypatch.setenv(ATTEMPT, "0")
    with pytest.raises(RendezvousError, match="rank 1, which did not come"):
        _join(store, 0, 0.05)
    monkeypatch.setenv(ATTEMPT, "1")
    assert _all_join(store) == [2.0] * 3


def test_attempts_are_what_tells_them_apart(monkeypatch):
    """The negative control of the test above: the second attempt has the first one's number."""
    store = HashStore()
    monkeypatch.setenv(ATTEMPT, "1")
    with pytest.raises(RendezvousError):
        _join(store, 0, 0.05)
    with pytest.raises(RendezvousError, match="rank 1, which did not come"):
        _join(store, 0, 0.05)
    monkeypatch.delenv(ATTEMPT)
    assert _all_join(store) == [2.0] * 3


@pytest.mark.parametrize("attempt", ["0", "1"])
def test_a_rank_of_an_attempt_before_has_not_come_to_a_monitored_barrier(monkeypatch, attempt):
    store, nobody = HashStore(), Lookout(tuple(range(RANKS)), {})
    short = timedelta(milliseconds=50)

    def report():
        MonitoredBarrier(store, 1, RANKS, nobody)(timedelta(seconds=60), False)

    monkeypatch.setenv(ATTEMPT, "0")
    other = threading.Thread(target=report)
    other.start()
    MonitoredBarrier(store, 0, RANKS, nobody)(timedelta(seconds=60), False)
    other.join()
    monkeypatch.setenv(ATTEMPT, attempt)
    again = MonitoredBarrier(store, 0, RANKS, nobody)
    if attempt == "0":
        again(short, False)  # the failed attempt already counted this rank
    else:
        with pytest.raises(CollectiveTimeout, match="Rank 1 failed"):
            again(short, False)
