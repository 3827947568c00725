"""Ranks that the harness starts: each finds its place, and one that fails ends the others."""

from __future__ import annotations

import pytest

from ringcomm.bench.launch import run_processes

PLACES = """
import sys
from pathlib import Path
from ringcomm.bench.launch import placed
place = placed()
Path(sys.argv[1], f"{place.rank} of {place.world}").touch()
place.store.set(f"rank {place.rank}", "here")
place.store.wait([f"rank {rank}" for rank in range(place.world)])
"""
FAILS = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit(3)
time.sleep(600)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Makes a module of a text, which ranks can run by its name."""

    def make(name: str, text: str) -> str:
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
        return name

    return make


def test_ranks_find_their_places_and_one_store(module, tmp_path, monkeypatch):
    """They do so inside a job of MPI, too, whose places are other ones."""
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "1")
    seen = tmp_path / "seen"
    seen.mkdir()
    assert run_processes(module("places", PLACES), [str(seen)], 3) == 0
    assert sorted(each.name for each in seen.iterdir()) == [f"{rank} of 3" for rank in range(3)]


def test_a_rank_that_fails_takes_the_others_with_it(module):
    assert run_processes(module("fails", FAILS), [], 2) == 3
