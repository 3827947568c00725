# SPDX-License-Identifier: Apache-2.0
"""Plays plans of faults: each rank makes the calls, and reports their ends and any leaks."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed import HashStore

import ringcomm
from ringcomm import CommOptions, Communicator, RingcommError, _native
from tests.support.fault_calls import make
from tests.support.fault_schedules import Call, Chain, Schedule
from tests.support.faults import is_stopped

# Only a hanging rank exceeds this; a slow rank does not.
TIMEOUT_S = 60.0
# The timeout of a stopped rank's peers. A call keeps the timeout that was set when it began.
STOPPED_TIMEOUT_S = {"native": 1.0, "triton": 8.0}
# The timeout of a native call that begins before the rank has stopped.
UNSTOPPED_TIMEOUT_S = 8.0
POLL_S = 0.005
# Made by all ranks after a schedule's own calls, so that every rank learns of a fault.
LAST = Call("all_reduce", 3)
EXACT, WRONG = "exact", "wrong"


@dataclass(frozen=True)
class Ended:
    """How one call ended on one rank: EXACT, WRONG or the class of the error, and a text."""

    kind: str
    outcome: str
    text: str = ""

    @property
    def raised(self) -> bool:
        return self.outcome not in (EXACT, WRONG)


@dataclass(frozen=True)
class Report:
    """The report of one rank about one schedule.

    Attributes:
        rank: in the schedule's communicator.
        ended: the ends of the calls, in order, up to LAST.
        steps: of the disturbed call, on the rank that is to fail; else 0.
        fresh: the call on a new communicator of the survivors; None when all survive.
        leaks: resources that were not released.
    """

    rank: int
    ended: tuple[Ended, ...]
    steps: int
    fresh: Ended | None
    leaks: tuple[str, ...]


@dataclass
class Held:
    """The resources of this process that a communicator could leak."""

    descriptors: Counter[str] = field(default_factory=Counter)
    threads: int = 0
    heap_bytes: int = 0
    mapped_heaps: int = 0

    @classmethod
    def now(cls) -> Held:
        # An error's traceback, its frames and the communicator that keeps the error form a cycle.
        gc.collect()
        # Building a communicator frees what closed communicators have left.
        Communicator.from_store(HashStore(), 0, 1, name="alone").close()
        held = cls()
        for entry in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # the descriptor of the listing itself
                held.descriptors[os.readlink(entry).partition(":[")[0]] += 1
        held.threads = len(list(Path("/proc/self/task").iterdir()))
        held.heap_bytes = ringcomm.heap_stats()["used_bytes"]
        maps = Path("/proc/self/maps").read_text().splitlines()
        held.mapped_heaps = sum("ringcomm" in line and "memfd" in line for line in maps)
        return held

    def leaks(self, settle_s: float) -> tuple[str, ...]:
        """Returns the resources held in addition to these, after time to release them."""
        deadline = time.monotonic() + settle_s
        while (found := self._beyond(Held.now())) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return found

    def _beyond(self, now: Held) -> tuple[str, ...]:
        found = [f"descriptor {name}" for name in (now.descriptors - self.descriptors).elements()]
        for name in ("threads", "heap_bytes", "mapped_heaps"):
            before, after = getattr(self, name), getattr(now, name)
            if after > before:
                found.append(f"{name}: {after}, before {before}")
        return tuple(found)


class Player:
    """One rank of a chain. Tests of the checks override methods."""

    settle_s = 30.0

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self.store = store
        self.me = rank
        self.members = list(range(world_size))
        store.set(f"pid/{rank}", str(os.getpid()))
        ringcomm.heap_stats()  # makes the heap

    def play(self, chain: Chain, folder: Path) -> None:
        for number, schedule in enumerate(chain):
            before = Held.now()
            report = self.play_one(f"{number}", schedule)
            report = replace(report, leaks=before.leaks(self.settle_s))
            # Written to a file, not returned by the process: the rank may be killed next.
            report_path(folder, number, self.me).write_bytes(pickle.dumps(report))

    def connect(self, name: str, segment_bytes: int) -> Communicator:
        options = CommOptions(timeout=TIMEOUT_S, segment_bytes=segment_bytes)
        rank = self.members.index(self.me)
        return Communicator.from_store(
            self.store, rank, len(self.members), name=name, options=options
        )

    def play_one(self, name: str, schedule: Schedule) -> Report:
        with self.connect(name, schedule.segment_bytes) as comm:
            rank = comm.rank
            ended, steps = self.make_calls(comm, schedule)
        fresh = None
        if schedule.fault.is_fatal:
            self.bury(name, schedule)
            with self.connect(f"{name}-fresh", schedule.segment_bytes) as comm:
                fresh = self.attempt(comm, LAST, 0)
        return Report(rank, tuple(ended), steps, fresh, leaks=())

    def make_calls(self, comm: Communicator, schedule: Schedule) -> tuple[list[Ended], int]:
        fault = schedule.fault
        ended: list[Ended] = []
        steps = 0
        for number, call in enumerate(schedule.calls):
            if number == fault.call:
                # First without the fault, to count the steps.
                _native.arm_fault("none")
                ended.append(self.attempt(comm, call, number))
                steps = sum(_native.fault_passages().values())
                _native.disarm_fault()
                if fault.action == "stop" and comm.rank != fault.rank:
                    self.expect_stop(comm, call, fault.rank)
                if comm.rank == fault.rank:
                    _native.arm_fault(fault.action, 1 + fault.step % max(steps, 1), fault.seconds)
            ended.append(self.attempt(comm, call, len(schedule.calls) + number))
        ended.append(self.attempt(comm, LAST, 2 * len(schedule.calls)))
        _native.disarm_fault()
        return ended, steps if comm.rank == fault.rank else 0

    def expect_stop(self, comm: Communicator, call: Call, rank: int) -> None:
        """Sets the timeout of the call in which ``rank`` stops; after the stop, a short one."""
        pid = int(self.store.get(f"pid/{self.members[rank]}"))

        def hasten() -> None:
            deadline = time.monotonic() + TIMEOUT_S
            while not is_stopped(pid) and time.monotonic() < deadline:
                time.sleep(POLL_S)
            comm.timeout = STOPPED_TIMEOUT_S["native"]

        if call.kernels == "native":
            comm.timeout = UNSTOPPED_TIMEOUT_S
            threading.Thread(target=hasten).start()
        else:
            comm.timeout = STOPPED_TIMEOUT_S["triton"]

    def attempt(self, comm: Communicator, call: Call, number: int) -> Ended:
        try:
            wrong = make(comm, call, number)
        except RingcommError as error:
            return Ended(call.kind, type(error).__name__, str(error))
        return Ended(call.kind, WRONG if wrong else EXACT, wrong)

    def bury(self, name: str, schedule: Schedule) -> None:
        """Removes the failed rank from the members; kills it if it is only stopped."""
        gone = self.members.pop(schedule.fault.rank)
        if schedule.fault.action != "stop":
            return
        self.store.set(f"{name}/learnt/{self.me}", "")
        if self.me == self.members[0]:
            self.store.wait([f"{name}/learnt/{each}" for each in self.members])
            pid = int(self.store.get(f"pid/{gone}"))
            assert is_stopped(pid), f"rank {schedule.fault.rank} was not stopped"
            os.kill(pid, signal.SIGKILL)


def report_path(folder: Path, number: int, rank: int) -> Path:
    """Returns the file for a rank's report of a schedule; ranks as in the first schedule."""
    return folder / f"{number}-{rank}"


def play(
    store: Any, rank: int, world_size: int, chain: Chain, folder: Path, player: type[Player]
) -> None:
    """Plays a chain as one rank; if the chain kills this rank, does not return."""
    torch.set_num_threads(1)
    gc.freeze()  # garbage collections skip the modules that the server loaded
    if any(call.kernels == "triton" for schedule in chain for call in schedule.calls):
        os.environ["TRITON_INTERPRET"] = "1"
    player(store, rank, world_size).play(chain, folder)
