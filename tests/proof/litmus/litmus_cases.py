# SPDX-License-Identifier: Apache-2.0
"""The litmus tests of the protocol: the ordered loads and stores of its functions, as programs.

Each mutant weakens one operation. outlines.txt lists the functions' operations; test_outlines.py
compares these lists with the sources and with the programs here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tests.proof.litmus.litmus_ops import (
    Op,
    await_acquire,
    await_relaxed,
    exchange_acq_rel_sys,
    fence_acq_rel_sys,
    fence_seq_cst_sys,
    futex_wait,
    futex_wake,
    load_acquire_sys,
    load_relaxed_sys,
    only_if,
    peek,
    read,
    store_relaxed_sys,
    store_release_sys,
    write,
)

Program = list[Op]
Registers = dict[str, int]
RACE, STUCK, WRONG = "a data race", "waits for good", "a wrong value"


@dataclass(frozen=True)
class Weakened:
    """A mutant: operation ``at`` of thread ``thread`` is replaced by ``op``, or removed."""

    thread: int
    at: int
    op: Op | None
    found_as: str


@dataclass(frozen=True)
class Litmus:
    """``right``: the condition on the registers of all threads, by name.

    ``code``: by thread, the functions that its program models, one after the other.
    """

    code: Sequence[Sequence[str]]
    programs: Sequence[Program]
    right: Callable[[Registers], bool]
    mutants: Mapping[str, Weakened] = field(default_factory=dict)


# An item: data, then `ready`; the next item's store must wait until the reader sets `consumed`.
STREAM = Litmus(
    [["publish", "await_alone", "publish"], ["await_alone", "acknowledge", "await_alone"]],
    [
        [
            write("slot", 1),
            store_release_sys("ready", 1),
            await_acquire("consumed", 1),
            write("slot", 2),
            store_release_sys("ready", 2),
        ],
        [
            await_acquire("ready", 1),
            read("first", "slot"),
            store_release_sys("consumed", 1),
            await_acquire("ready", 2),
            read("second", "slot"),
        ],
    ],
    lambda r: (r["first"], r["second"]) == (1, 2),
    {
        "published without release": Weakened(0, 1, store_relaxed_sys("ready", 1), RACE),
        "awaited without acquire": Weakened(1, 0, await_relaxed("ready", 1), RACE),
        "not awaited": Weakened(1, 0, None, RACE),
        "acknowledged without release": Weakened(1, 2, store_relaxed_sys("consumed", 1), RACE),
        "slot awaited without acquire": Weakened(0, 2, await_relaxed("consumed", 1), RACE),
        "slot not awaited": Weakened(0, 2, None, RACE),
    },
)

# The lanes of two teams: one lane stores and another publishes, one awaits and another loads. A
# release and an acquire model team.sync().
TEAMS = Litmus(
    [["send"], ["send"], ["await"], ["await"]],
    [
        [write("slot", 1), store_release_sys("my team's sync", 1)],
        [await_acquire("my team's sync", 1), store_release_sys("ready", 1)],
        [await_acquire("ready", 1), store_release_sys("their team's sync", 1)],
        [await_acquire("their team's sync", 1), read("loaded", "slot")],
    ],
    lambda r: r["loaded"] == 1,
    {
        "no sync before it is published": Weakened(1, 0, None, RACE),
        "no sync before it is loaded": Weakened(3, 0, None, RACE),
        "published without release": Weakened(1, 1, store_relaxed_sys("ready", 1), RACE),
        "awaited without acquire": Weakened(2, 0, await_relaxed("ready", 1), RACE),
    },
)

# Zero copy over a ring of acknowledgements: the first rank sees the third rank's stores, although
# it acquires only from the second rank.
CHAIN = Litmus(
    [["publish"], ["await_alone", "publish"], ["await_alone"]],
    [
        [write("data", 1), store_release_sys("ready at 1", 1)],
        [await_acquire("ready at 1", 1), store_release_sys("ready at 2", 1)],
        [await_acquire("ready at 2", 1), read("loaded", "data")],
    ],
    lambda r: r["loaded"] == 1,
    {
        "handed on without acquire": Weakened(1, 0, await_relaxed("ready at 1", 1), RACE),
        "handed on without release": Weakened(1, 1, store_relaxed_sys("ready at 2", 1), RACE),
    },
)

# Two lanes fail at once; a peer reads the record of the lane that claimed it.
FAULT = Litmus(
    [["fail"], ["give_up"], ["aborted"]],
    [
        [
            exchange_acq_rel_sys("taken", "claimed", 1),
            only_if("taken", 0),
            write("record", 1),
            store_release_sys("aborted", 1),
        ],
        [
            exchange_acq_rel_sys("taken too", "claimed", 1),
            only_if("taken too", 0),
            write("record", 2),
            store_release_sys("aborted", 2),
        ],
        [load_acquire_sys("up", "aborted"), only_if("up", 1), read("found", "record")],
    ],
    lambda r: r["taken"] + r["taken too"] == 1 and r.get("found", 1) == 1,
    {
        "not claimed": Weakened(1, 0, load_relaxed_sys("taken too", "nothing"), RACE),
        "raised without release": Weakened(0, 3, store_relaxed_sys("aborted", 1), RACE),
        "seen without acquire": Weakened(2, 0, load_relaxed_sys("up", "aborted"), RACE),
    },
)

# The peer stores into a region, then sets its detach word; the owner then reuses the memory.
DETACH = Litmus(
    [["Comm::detach"], ["RetiredRegions::free_of_peers"]],
    [
        [write("region", 1), store_release_sys("detached", 1)],
        [
            load_acquire_sys("gone", "detached"),
            only_if("gone", 1),
            write("region", 2),
            read("mine", "region"),
        ],
    ],
    lambda r: r.get("mine", 2) == 2,
    {
        "said without release": Weakened(0, 1, store_relaxed_sys("detached", 1), RACE),
        "heard without acquire": Weakened(1, 0, load_relaxed_sys("gone", "detached"), RACE),
        "not waited for": Weakened(1, 1, None, RACE),
    },
)

# NOTE [signals]: of two fenced store-then-load sequences, at least one sees the other's store.
SLEEP = Litmus(
    [["Waiter::pause"], ["publish"]],
    [
        [
            store_relaxed_sys("sleeping", 1),
            fence_seq_cst_sys(),
            load_relaxed_sys("seen", "ready"),
            only_if("seen", 0),
            futex_wait("ready", 0),
        ],
        [
            store_release_sys("ready", 1),
            fence_seq_cst_sys(),
            load_relaxed_sys("asleep", "sleeping"),
            only_if("asleep", 1),
            futex_wake("ready"),
        ],
    ],
    lambda r: True,
    {
        "reader without fence": Weakened(0, 1, fence_acq_rel_sys(), STUCK),
        "writer without fence": Weakened(1, 1, fence_acq_rel_sys(), STUCK),
        "flag never raised": Weakened(0, 0, None, STUCK),
        "nobody woken": Weakened(1, 4, None, STUCK),
    },
)

# A sender that gives up raises its abort word, and its user then changes the buffer. The reader
# looks at the word after its reads: the value 1 tells that the data may be wrong.
BUFFER = Litmus(
    [["raise_fault"], ["verify_peer_buffers"]],
    [
        [store_release_sys("aborted", 1), fence_seq_cst_sys(), store_relaxed_sys("buffer", 2)],
        [peek("taken", "buffer"), fence_seq_cst_sys(), load_acquire_sys("up", "aborted")],
    ],
    lambda r: r["taken"] == 0 or r["up"] == 1,
    {
        "no fence behind the abort word": Weakened(0, 1, None, WRONG),
        "no fence behind the reads": Weakened(1, 1, None, WRONG),
    },
)

# As BUFFER, but another thread has the fault record, and the sender waits for the abort word.
CLAIM = Litmus(
    [["fail"], ["claim_fault", "await_raised"], ["verify_peer_buffers"]],
    [
        [
            exchange_acq_rel_sys("claimed by", "claimed", 1),
            only_if("claimed by", 0),
            store_release_sys("aborted", 1),
            fence_seq_cst_sys(),
        ],
        [
            exchange_acq_rel_sys("claimed too", "claimed", 1),
            only_if("claimed too", 1),
            await_acquire("aborted", 1),
            fence_seq_cst_sys(),
            store_relaxed_sys("buffer", 2),
        ],
        [peek("taken", "buffer"), fence_seq_cst_sys(), load_acquire_sys("up", "aborted")],
    ],
    lambda r: r.get("taken", 0) == 0 or r["up"] == 1,
    {
        "returned without waiting for the word": Weakened(1, 2, None, WRONG),
        "no fence behind the wait": Weakened(1, 3, None, WRONG),
        "no fence behind the reads of its buffer": Weakened(2, 1, None, WRONG),
    },
)

# As CLAIM, but the other thread stops before it raises the word, so this thread raises it, to 2.
STOPPED_OWNER = Litmus(
    [["claim_fault"], ["claim_fault", "await_raised"], ["verify_peer_buffers"]],
    [
        [exchange_acq_rel_sys("claimed by", "claimed", 1)],
        [
            exchange_acq_rel_sys("claimed too", "claimed", 1),
            only_if("claimed too", 1),
            load_acquire_sys("seen", "aborted"),
            store_relaxed_sys("aborted", 2),
            fence_seq_cst_sys(),
            store_relaxed_sys("buffer", 2),
        ],
        [peek("taken", "buffer"), fence_seq_cst_sys(), load_acquire_sys("up", "aborted")],
    ],
    lambda r: r.get("taken", 0) == 0 or r["up"] == 2,
    {
        "the word left to a stopped thread": Weakened(1, 3, None, WRONG),
        "no fence behind its own word": Weakened(1, 4, None, WRONG),
    },
)

# As STOPPED_OWNER, but the other thread continues later: nobody reads its incomplete record.
LATE_OWNER = Litmus(
    [["fail"], ["claim_fault", "await_raised"], ["Comm::faulted"]],
    [
        [
            exchange_acq_rel_sys("claimed by", "claimed", 1),
            only_if("claimed by", 0),
            write("record", 1),
            store_release_sys("aborted", 1),
        ],
        [
            exchange_acq_rel_sys("claimed too", "claimed", 1),
            only_if("claimed too", 1),
            store_relaxed_sys("aborted", 2),
        ],
        [load_acquire_sys("up", "aborted"), only_if("up", 1), read("found", "record")],
    ],
    lambda r: r.get("found", 1) == 1,
    {
        "a record read that nobody announced": Weakened(2, 1, only_if("up", 2), RACE),
        "raised by the waiter to 1": Weakened(1, 2, store_relaxed_sys("aborted", 1), RACE),
    },
)

# 8 bytes hold payload and flag. A set is used again two calls later, after the peer's packets of
# the call in between. The end of a kernel orders like a fence. (An answer is never stored before
# the load that it answers; the opposite is load buffering, which the machine leaves out.)
LL = Litmus(
    [["send_payload", "await_packets", "send_payload"], ["await_packets", "send_payload"]],
    [
        [
            store_relaxed_sys("set 0 at 1", 10),
            await_relaxed("set 1 at 0", 1),
            fence_acq_rel_sys(),
            store_relaxed_sys("set 0 at 1", 30),
        ],
        [
            await_relaxed("set 0 at 1", 10),
            load_relaxed_sys("taken", "set 0 at 1"),
            fence_acq_rel_sys(),
            store_relaxed_sys("set 1 at 0", 20),
        ],
    ],
    lambda r: r["taken"] == 10,
    {
        "not answered": Weakened(0, 1, None, WRONG),
    },
)

CASES = {
    "stream": STREAM,
    "teams": TEAMS,
    "chain": CHAIN,
    "fault": FAULT,
    "detach": DETACH,
    "sleep": SLEEP,
    "buffer": BUFFER,
    "claim": CLAIM,
    "stopped owner": STOPPED_OWNER,
    "late owner": LATE_OWNER,
    "message": replace(BUFFER, code=[["raise_fault"], ["Messenger::take_item", "abort_seen"]]),
    "messenger's sleep": replace(SLEEP, code=[["Messenger::sleep"], ["publish"]]),
    "ll": LL,
}
