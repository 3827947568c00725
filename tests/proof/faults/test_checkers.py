# SPDX-License-Identifier: Apache-2.0
"""The checks of the promises notice each promise that these tests break on purpose."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace

import pytest

import ringcomm
from ringcomm import _native
from tests.support.fault_checks import check_deadline, check_report, run_chain
from tests.support.fault_player import EXACT, WRONG, Ended, Player, Report
from tests.support.fault_schedules import Call, Fault, Schedule

CALLS = (Call("all_reduce", 500), Call("all_gather_into_tensor", 7))
KILLED = Schedule(3, 256, CALLS, Fault("kill", 2, 1, 3))
DELAYED = Schedule(2, 256, CALLS, Fault("delay", 1, 0, 3, 0.001))
HANG_S = 3.0


class Swallows(Player):
    """Errors end nowhere."""

    def attempt(self, comm, call, number):
        ended = super().attempt(comm, call, number)
        return Ended(call.kind, EXACT) if ended.raised else ended


class Hangs(Player):
    """A player that never looks for failed peers, so its calls never give up."""

    def attempt(self, comm, call, number):
        ended = super().attempt(comm, call, number)
        while ended.raised:
            time.sleep(1.0)
        return ended


class Keeps(Player):
    """The base of players that keep a resource on purpose."""

    settle_s = 0.05


class KeepsDescriptor(Keeps):
    def play_one(self, name, schedule):
        os.open("/dev/null", os.O_RDONLY)
        return super().play_one(name, schedule)


class KeepsMemory(Keeps):
    def play_one(self, name, schedule):
        self.kept = ringcomm.zeros(1000)
        return super().play_one(name, schedule)


class KeepsThread(Keeps):
    def play_one(self, name, schedule):
        threading.Thread(target=time.sleep, args=(1000.0,), daemon=True).start()
        return super().play_one(name, schedule)


class KeepsCommunicator(Keeps):
    """The kept communicator keeps the peers' heaps mapped."""

    def connect(self, name, segment_bytes):
        self.kept = super().connect(name, segment_bytes)
        return self.kept


class GivesOther(Player):
    """One rank contributes other data than its peers expect."""

    def attempt(self, comm, call, number):
        return super().attempt(comm, call, number + (comm.rank == 0))


class NeverFails(Player):
    def make_calls(self, comm, schedule):
        _, steps = super().make_calls(comm, replace(schedule, fault=DELAYED.fault))
        return [Ended("all_reduce", "PeerLost", "all_reduce on rank 2")], steps


class LeavesFile(Player):
    def play_one(self, name, schedule):
        with open(f"/dev/shm/ringcomm-planted-{os.getpid()}", "w"):
            pass
        return super().play_one(name, schedule)


# Per player: the schedule in which it breaks a promise, and the message about that.
BROKEN = {
    Swallows: (KILLED, "no call raised"),
    KeepsDescriptor: (DELAYED, "left behind: descriptor /dev/null"),
    KeepsMemory: (DELAYED, "left behind: heap_bytes"),
    KeepsThread: (DELAYED, "left behind: threads"),
    KeepsCommunicator: (DELAYED, "left behind: mapped_heaps"),
    GivesOther: (DELAYED, "returned a wrong result: element 0 is"),
    NeverFails: (KILLED, "the fault did not happen"),
    LeavesFile: (DELAYED, "/dev/shm/ringcomm-planted-"),
}


@pytest.fixture(autouse=True)
def no_planted_files():
    yield
    for path in os.listdir("/dev/shm"):
        if path.startswith("ringcomm-planted-"):
            os.unlink(f"/dev/shm/{path}")


@pytest.mark.parametrize("player", BROKEN)
def test_a_broken_promise_is_seen(player):
    schedule, expected = BROKEN[player]
    found = run_chain((schedule,), player)
    assert any(expected in text for text in found), found


def test_a_rank_that_hangs_is_seen():
    (found,) = run_chain((KILLED,), Hangs, deadline_s=HANG_S)
    assert "did not end in time" in found


@pytest.mark.parametrize("schedule", [KILLED, DELAYED])
def test_kept_promises_are_not_reported(schedule):
    assert run_chain((schedule,)) == []


TEXT = (
    "all_gather on rank 0 of 3: rank 1 in all_gather(float32) expected rank 2 to take part, but "
    "its process has ended (noticed after 0.004 s at item 0)."
)
FIRST = Ended("all_gather", "PeerLost", TEXT)
LATER = Ended("all_reduce", "AbortedError", f"unusable since: {TEXT}")
SUM = Ended("all_reduce", EXACT)
GOOD = Report(0, (SUM, Ended("all_gather", EXACT), FIRST, LATER), 0, SUM, ())
LATE = Report(0, (SUM, SUM, SUM), 8, None, ())


def ended(*calls):
    return replace(GOOD, ended=calls)


REPORTS = {
    "wrong": (ended(replace(SUM, outcome=WRONG), *GOOD.ended[1:]), "a wrong result"),
    "no error": (ended(SUM, SUM, SUM, SUM), "no call raised"),
    "too early": (ended(FIRST, LATER, LATER, LATER), "before the fault"),
    "class": (ended(*GOOD.ended[:2], replace(FIRST, outcome="AbortedError"), LATER), "PeerLost"),
    "peer": (
        ended(*GOOD.ended[:2], replace(FIRST, text=TEXT.replace("rank 2", "a peer")), LATER),
        "does not name 'rank 2'",
    ),
    "no item": (
        ended(*GOOD.ended[:2], replace(FIRST, text=TEXT.replace("item", "place")), LATER),
        "does not name an item",
    ),
    "item": (
        ended(*GOOD.ended[:2], replace(FIRST, text=TEXT.replace("item 0", "item 1")), LATER),
        "expected one of the waits",
    ),
    "no waiter": (
        ended(*GOOD.ended[:2], replace(FIRST, text=TEXT.replace("rank 1 in", "rank 0 in")), LATER),
        "expected one of the waits",
    ),
    "operation": (
        ended(*GOOD.ended[:2], replace(FIRST, kind="reduce"), LATER),
        "does not begin with its operation",
    ),
    "usable again": (ended(*GOOD.ended[:3], SUM), "repeat the first fault"),
    "forgotten": (ended(*GOOD.ended[:3], replace(LATER, text="?")), "repeat the first fault"),
    "no new world": (replace(GOOD, fresh=None), "does not work"),
    "bad new world": (replace(GOOD, fresh=FIRST), "does not work"),
    "leak": (replace(GOOD, leaks=("descriptor x",)), "left behind: descriptor x"),
}


STOPPED = replace(KILLED, fault=replace(KILLED.fault, action="stop"))


def timed_out(waited_s):
    text = (
        f"all_gather on rank 0 of 3: rank 1 in all_gather(float32) waited {waited_s:g} s, until "
        "its timeout ended, for rank 2 (item 0, epoch wanted 3, seen 2), which did not come."
    )
    first = Ended("all_gather", "CollectiveTimeout", text)
    later = replace(LATER, text=f"unusable since: {text}")
    return ended(*GOOD.ended[:2], first, later)


def test_a_wait_that_was_too_short_is_seen():
    assert list(check_report(STOPPED, timed_out(1))) == []
    (found,) = check_report(STOPPED, timed_out(0))
    assert "expected a wait of 1.0 s or more, got 0.0 s" in found


@pytest.mark.parametrize(
    ("waited_s", "elapsed_s", "expected"),
    [
        (1.0, 1.0, ""),
        (0.0, 1.0, "gave up after 0.0 s of 1.0 s"),
        (8.0, 8.1, "raised after 8.1 s"),
        (1.5, 1.1, "waited 1.5 s in a call of 1.1 s"),
    ],
)
def test_a_deadline_that_is_not_kept_is_seen(waited_s, elapsed_s, expected):
    text = timed_out(waited_s).ended[2].text
    found = list(check_deadline(text, 1, elapsed_s, 1.0))
    assert [expected in each for each in found] == [True] * bool(expected)


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_is_read(name):
    report, expected = REPORTS[name]
    assert any(expected in text for text in check_report(KILLED, report))


def test_what_is_as_promised_is_not_reported():
    # A fault that a test of another file has armed in this process must not count.
    _native.disarm_fault()
    assert list(check_report(KILLED, GOOD)) == []
    assert list(check_report(DELAYED, LATE)) == []
    assert list(check_report(DELAYED, GOOD)) != []
    assert not _native.fault_armed()
