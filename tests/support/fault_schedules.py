# SPDX-License-Identifier: Apache-2.0
"""Plans of faults: what a world of ranks calls, and which rank fails where; drawn from a seed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random

FATAL = ("kill", "stop")
HARMLESS = ("delay", "slow")

# What can be called, with the algorithms that it has; see fault_calls.py.
KINDS: dict[str, tuple[str, ...]] = {
    "all_reduce": ("auto", "two_shot", "ring"),
    "reduce_scatter_tensor": ("auto", "one_shot", "ring"),
    "all_gather_into_tensor": ("auto", "one_shot", "ring"),
    "reduce": ("auto",),
    "broadcast": ("auto",),
    "gather": ("auto",),
    "scatter": ("auto",),
    "all_to_all_single": ("auto",),
    "barrier": ("auto",),
    "messages": ("auto",),
}
# Those that run in Triton's interpreter as well.
INTERPRETED = ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor")
# From one element to several segments each of which is several lines long.
ELEMS = (1, 7, 64, 500, 3000)
# A zero-copy item is one from this many bytes on (kZeroCopyMinBytes, for chunks of three ranks).
ZERO_COPY_ELEMS = 20_000
SEGMENT_BYTES = (256, 1024, 4096)


@dataclass(frozen=True)
class Call:
    """One call that all ranks make.

    Attributes:
        kind: a key of KINDS.
        elems: FP32 elements of a rank's part.
        algorithm: one of the kind's.
        heap: the buffers lie in the heap.
        async_op: issued as an asynchronous operation.
        kernels: "native" or "triton".
    """

    kind: str
    elems: int
    algorithm: str = "auto"
    heap: bool = False
    async_op: bool = False
    kernels: str = "native"


@dataclass(frozen=True)
class Fault:
    """A fault of one rank.

    Attributes:
        action: "kill", "stop", "delay" or "slow".
        rank: whose.
        call: in which call of the schedule.
        step: before which of the call's publications, acknowledgements and waits, from 0; modulo
            how many the call has on that rank.
        seconds: of a delay, or of each step from there on.
    """

    action: str
    rank: int
    call: int
    step: int
    seconds: float = 0.0

    @property
    def is_fatal(self) -> bool:
        return self.action in FATAL


@dataclass(frozen=True)
class Schedule:
    """Calls on one communicator, and the fault that happens in one of them."""

    world_size: int
    segment_bytes: int
    calls: tuple[Call, ...]
    fault: Fault


# Schedules that the same processes play one after the other: after a fatal one the survivors go on.
Chain = tuple[Schedule, ...]


def survivors(schedule: Schedule) -> int:
    """The number of ranks that are left."""
    return schedule.world_size - schedule.fault.is_fatal


def is_chain(chain: Chain) -> bool:
    """Tells whether each schedule takes the ranks that the one before it left."""
    return all(after.world_size == survivors(before) for before, after in pairwise(chain))


def _call(draw: Random) -> Call:
    kind = draw.choice(list(KINDS))
    heap = draw.random() < 0.4
    elems = ZERO_COPY_ELEMS if heap and draw.random() < 0.3 else draw.choice(ELEMS)
    return Call(
        kind,
        elems,
        algorithm=draw.choice(KINDS[kind]),
        heap=heap,
        async_op=draw.random() < 0.3,
    )


def _fault(draw: Random, world_size: int, calls: int, fatal: bool) -> Fault:
    # A stopped rank costs its peers their timeout; a killed one is noticed at once.
    action = draw.choices(FATAL, (9, 1))[0] if fatal else draw.choice(HARMLESS)
    seconds = {"delay": 0.02, "slow": 0.0002}.get(action, 0.0)
    rank, call = draw.randrange(world_size), draw.randrange(calls)
    return Fault(action, rank, call, draw.getrandbits(16), seconds)


def draw_chain(seed: int, world_size: int = 4) -> Chain:
    """A chain that ends with two ranks, drawn from ``seed``: about four schedules, all different.

    Args:
        seed: equal seeds give equal chains.
        world_size: of the first schedule.
    """
    draw = Random(seed)
    chain: list[Schedule] = []
    while world_size > 1:
        calls = tuple(_call(draw) for _ in range(draw.randint(1, 3)))
        fault = _fault(draw, world_size, len(calls), fatal=draw.random() < 0.6)
        chain.append(Schedule(world_size, draw.choice(SEGMENT_BYTES), calls, fault))
        world_size -= fault.is_fatal
    return tuple(chain)


def interpreted(chain: Chain) -> Chain:
    """The chain with those calls in the interpreter that can be; the others stay native."""
    return tuple(
        replace(
            schedule,
            calls=tuple(
                replace(call, kernels="triton", elems=min(call.elems, ELEMS[2]))
                if call.kind in INTERPRETED
                else call
                for call in schedule.calls
            ),
        )
        for schedule in chain
    )
