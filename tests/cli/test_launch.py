# SPDX-License-Identifier: Apache-2.0
"""The launcher: all ranks run, and no rank outlives its launch."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from ringcomm import launch as launcher
from ringcomm.launch import RankLaunch, launch_ranks, threads_per_rank
from tests.cli.processes import is_running, ranks_of, start, wait_until
from tests.support import ROOT

MODULE = "tests.cli.scripted_rank"


@pytest.fixture(autouse=True)
def _no_outer_launcher(monkeypatch):
    monkeypatch.chdir(ROOT)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def run_acts(*acts, **config):
    return launch_ranks(RankLaunch(MODULE, {"acts": acts, **config}, ranks=len(acts), threads=1))


def test_every_rank_knows_its_number(tmp_path):
    assert run_acts("say", "say", "say", folder=str(tmp_path)) == 0
    said = [(tmp_path / f"said{rank}").read_text() for rank in range(3)]
    assert said == ["0 3 3 1", "1 3 3 1", "2 3 3 1"]


def test_exit_code_of_a_failed_rank_is_returned_and_the_others_end(capfd):
    assert run_acts("sleep", "fail") == 3
    assert "rank 1 failed with exit code 3; all ranks were ended" in capfd.readouterr().err
    assert not ranks_of(os.getpid())


def test_killed_rank_is_named_rather_than_the_one_that_failed(capfd, tmp_path):
    assert run_acts("follow", "kill", folder=str(tmp_path)) == 1
    assert "rank 1 was killed by SIGKILL" in capfd.readouterr().err
    assert not ranks_of(os.getpid())


def test_error_of_a_rank_is_one_line(capfd):
    assert run_acts("raise") == 1
    errors = capfd.readouterr().err
    assert "ringcomm: rank 0: the value is bad\n" in errors
    assert "Traceback" not in errors


def test_a_line_of_a_rank_is_one_write(monkeypatch):
    """With two writes, as by an unbuffered print(), another rank's line could come between."""
    writes: list[str] = []
    config = json.dumps({"acts": ["raise"]})
    monkeypatch.setattr("sys.argv", ["launch", str(os.getppid()), MODULE, config])
    monkeypatch.setattr("sys.stderr", SimpleNamespace(write=writes.append, flush=lambda: None))
    monkeypatch.setattr(launcher, "end_with", lambda parent: None)
    monkeypatch.setenv("RANK", "0")
    assert launcher.main() == 1
    assert writes == ["ringcomm: rank 0: the value is bad\n"]


def test_rank_that_ignores_sigterm_is_ended_all_the_same(monkeypatch, tmp_path):
    monkeypatch.setattr(launcher, "GRACE_S", 0.2)
    assert run_acts("cling", "fail", folder=str(tmp_path)) == 3
    assert not ranks_of(os.getpid())


def ids_of_ranks(folder: Path, ranks: int) -> list[int]:
    """Returns the ranks' process ids once all files are filled: a new file is empty at first."""

    def said() -> list[str]:
        return [text for path in folder.glob("rank*") if (text := path.read_text())]

    wait_until(lambda: len(said()) == ranks, "the ranks' start")
    return [int(text) for text in said()]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_with_their_launcher(number, tmp_path):
    config = json.dumps({"acts": ["sleep", "sleep"], "folder": str(tmp_path)})
    program = (
        "import json, signal, sys; from ringcomm.launch import RankLaunch, launch_ranks;"
        "signal.signal(signal.SIGINT, signal.default_int_handler);"
        f"start = RankLaunch({MODULE!r}, json.loads(sys.argv[1]), ranks=2, threads=1);"
        "sys.exit(launch_ranks(start))"
    )
    with start("-c", program, config, anew=True) as process:
        pids = ids_of_ranks(tmp_path, 2)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    if number in (signal.SIGINT, signal.SIGTERM):
        assert process.returncode == 130
        assert "interrupted; all ranks were ended" in errors
        assert "Traceback" not in errors
    else:
        assert process.returncode == -number
    wait_until(lambda: not any(map(is_running, pids)), "the ranks' end")


def test_ranks_times_threads_fill_the_cores(monkeypatch):
    monkeypatch.setattr(launcher, "available_cores", lambda: 8)
    assert [threads_per_rank(ranks) for ranks in (1, 2, 3, 8, 16)] == [8, 4, 2, 1, 1]
