"""Ranks that the harness starts: each finds its place, and one that fails ends the others."""

from __future__ import annotations

import subprocess

from ringcomm.bench.launch import Wanted, run_ranks
from tests.support import ROOT, fork_server

FAILS = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit(3)
time.sleep(600)
"""


def test_ranks_find_their_places_and_one_store(tmp_path, monkeypatch):
    """They do so inside a job of MPI, too, whose places are other ones."""
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(subprocess, "Popen", fork_server.Popen)  # ranks that have torch already
    assert run_ranks(["tests.bench.places", str(tmp_path)], Wanted(3)) == 0
    assert sorted(each.name for each in tmp_path.iterdir()) == [f"{rank} of 3" for rank in range(3)]


def test_a_rank_that_fails_takes_the_others_with_it(tmp_path, monkeypatch):
    (tmp_path / "fails.py").write_text(FAILS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    assert run_ranks(["fails"], Wanted(2)) == 3
