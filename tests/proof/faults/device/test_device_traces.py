# SPDX-License-Identifier: Apache-2.0
"""Faults on devices leave traces of all ranks; traces of hung or killed processes can be read."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from ringcomm import CollectiveTimeout, MismatchError, PeerLost, RingcommError
from ringcomm.cli import main
from ringcomm.comm.recorder import reader
from ringcomm.comm.recorder.reader import live_recordings
from tests.proof.faults.device.rig import LONG_S, Rig, first_error, until
from tests.support.faults import die, leaving_together
from tests.support.ranks import Ranks

pytestmark = pytest.mark.deadlines

TIMEOUT_S = 1.0


def line(function: Any, offset: int) -> str:
    return f"{__file__}:{function.__code__.co_firstlineno + offset}"


def fails(store: Any, rank: int, n: int, kind: str, how: str, folder: str) -> tuple[Any, str]:
    """Makes two good calls; then rank 1 fails, and rank 0 returns the error that it raised."""
    os.environ[reader.VARIABLE] = folder
    rig = Rig(kind)
    comm = rig.connect(store, rank, n)
    small, large = rig.full(10, 1.0), rig.full(5000, 1.0)
    comm.all_reduce(large)
    comm.all_reduce(small)
    rig.synchronize()
    comm.timeout = TIMEOUT_S if how == "timeout" else LONG_S
    if rank == 1 and how == "die":
        die()
    if rank == 1 and how == "timeout":
        os.kill(os.getpid(), signal.SIGSTOP)

    def call() -> None:
        if rank == 1:
            comm.broadcast(large, 0)
        else:
            comm.all_reduce(large, algorithm="two_shot")
            comm.barrier()

    error = first_error(rig, comm, call)
    (trace,) = Path(folder).glob("*.json")
    own = reader.read(trace).recording.rank(rank)
    assert own is not None and own.on_device
    comm.close()
    rig.close()
    return type(error), str(error)


KINDS = {"die": PeerLost, "timeout": CollectiveTimeout, "mismatch": MismatchError}


@pytest.mark.parametrize("how", KINDS)
def test_a_fault_leaves_a_trace(
    kind: str, how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heard = [0, 1] if how == "mismatch" else [0]
    with Ranks(fails, 2, kind, how, str(tmp_path)) as ranks:
        outcomes = ranks.wait(2 * LONG_S, heard)
    for outcome in outcomes:
        assert outcome.ok, outcome.describe()
    error, text = outcomes[0].value
    assert error is KINDS[how], text
    here = line(fails, 19)
    assert f"at {here}" in text and "What each rank did last: ringcomm trace " in text, text
    if how == "mismatch":
        assert f"at {line(fails, 17)}" in text, text
    else:
        assert "Rank 1 has not made this call. Rank 1's last call: all_reduce(" in text, text
    (path,) = tmp_path.glob("*.json")
    assert main(["trace", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "rank 0, pid" in shown and "rank 1, pid" in shown, shown
    if how == "mismatch":
        assert "the ranks diverge at call 3:" in shown, shown
        return
    assert "call 3 was enqueued by rank 0, but not yet by rank 1" in shown, shown
    own = reader.read(path).recording.ranks[0]
    wanted = ["completed", "completed", "failed"]
    assert [each.state for each in own.collectives][:3] == wanted, shown
    status = "timeout" if how == "timeout" else "peer_lost"
    assert (own.collectives[2].status, own.collectives[2].peer) == (status, 1)


def hangs(store: Any, rank: int, n: int, kind: str) -> None:
    rig = Rig(kind)
    comm = rig.connect(store, rank, n)
    tensor = rig.full(10, 1.0)
    comm.barrier()
    rig.synchronize()
    comm.recording()
    if rank == 0:
        comm.all_reduce(tensor)
    os.kill(os.getpid(), signal.SIGSTOP)


def test_the_records_of_a_killed_rank_are_in_its_peers_hands(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The traces are read through a stopped process's descriptors, without a driver or its help."""
    with Ranks(hangs, 2, kind) as ranks:

        def have_made_their_calls() -> bool:
            try:
                (recorded,) = live_recordings(ranks.pids[:1])
            except (RingcommError, ValueError):
                return False
            counts = [len(each.collectives) for each in recorded.ranks]
            return counts == [2, 1]

        until(have_made_their_calls)
        ranks.processes[1].kill()
        ranks.processes[1].join()
        (recorded,) = live_recordings(ranks.pids[:1])
        assert [each.pid for each in recorded.ranks] == ranks.pids
        assert all(each.on_device and each.waits_for == -1 for each in recorded.ranks)
        assert main(["trace", "--pid", str(ranks.pids[0])]) == 0
    shown = capsys.readouterr().out
    assert (
        f"rank 1 (pid {ranks.pids[1]}), whose process has ended, enqueued last: barrier(), call 1"
        in shown
    ), shown
    assert f"at {line(hangs, 8)}" in shown, shown
    assert "call 2 was enqueued by rank 0, but not yet by rank 1" in shown, shown


def test_a_rank_without_a_thread_leaves_a_trace(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call that waits on the host was never launched; its record says for whom it waited."""
    monkeypatch.setenv(reader.VARIABLE, str(tmp_path))
    world = rig.world(2, timeout=0.3)
    tensor = rig.full(10, 1.0)

    def body(comm: Any) -> RingcommError | None:
        try:
            if comm.rank == 0:
                comm.all_reduce(tensor)
        except RingcommError as error:
            return error
        return None

    error, _ = world.run(leaving_together(body, 2))
    assert isinstance(error, CollectiveTimeout)
    assert "Rank 1 has made no call yet" in str(error), error
    (path,) = tmp_path.glob("*.json")
    assert str(path) in str(error)
    ranks = reader.read(path).recording.ranks
    (record,) = ranks[0].collectives
    assert (record.state, record.status, record.peer) == ("failed", "timeout", 1)
    assert record.site == line(body, 3) and ranks[1].collectives == ()


def test_a_message_that_nobody_sends_is_the_one_that_failed(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message with that peer, direction and tag failed; the other may still succeed."""
    monkeypatch.setenv(reader.VARIABLE, str(tmp_path))
    world = rig.world(2, timeout=0.5)
    comm, tensors = world[0], [rig.full(10, 1.0), rig.full(10, 1.0)]
    small = comm.isend(tensors[0], 1, tag=3)
    lost = comm.irecv(tensors[1], 1, tag=7)
    here = line(test_a_message_that_nobody_sends_is_the_one_that_failed, 8)
    until(lambda: lost.is_completed())
    error = lost.exception()
    assert isinstance(error, CollectiveTimeout) and f"at {here}" in str(error), error
    (path,) = tmp_path.glob("*.json")
    sent, received = reader.read(path).recording.ranks[0].messages
    assert (received.collective, received.state, received.status) == ("recv", "failed", "timeout")
    assert (received.peer, received.root) == (1, 7)
    assert (sent.collective, sent.root) == ("send", 3) and sent.state in ("completed", "enqueued")
    rig.synchronize()
    del small
