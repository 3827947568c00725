# SPDX-License-Identifier: Apache-2.0
"""Plans of faults, drawn from a seed: the calls of a world, and which rank fails where."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random

FATAL = ("kill", "stop")
HARMLESS = ("delay", "slow")

# The kinds of calls, with their algorithms; see fault_calls.py.
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
# The kinds that Triton's interpreter can run as well.
INTERPRETED = ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor")
# From one element to several segments of several cache lines each.
ELEMS = (1, 7, 64, 500, 3000)
# Enough bytes for zero-copy: kZeroCopyMinBytes, in chunks of three ranks.
ZERO_COPY_ELEMS = 20_000
SEGMENT_BYTES = (256, 1024, 4096)


@dataclass(frozen=True)
class Call:
    """One call that all ranks make.

    Attributes:
        kind: a key of KINDS.
        elems: FP32 elements of a rank's part.
        algorithm: one of the kind's.
        heap: the buffers are in the heap.
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
        rank: the rank that fails.
        call: the index of the call in the schedule.
        step: the fault happens before this step of the call; steps are the rank's publications,
            acknowledgements and waits, from 0; modulo their number.
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


# Schedules that the same processes play in turn; after a fatal fault the survivors continue.
Chain = tuple[Schedule, ...]


def survivors(schedule: Schedule) -> int:
    """Returns the number of ranks that are left."""
    return schedule.world_size - schedule.fault.is_fatal


def is_chain(chain: Chain) -> bool:
    """True if each schedule has as many ranks as the schedule before it left."""
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
    # Few stops: peers of a stopped rank wait for their timeout, but notice a killed rank at once.
    action = draw.choices(FATAL, (9, 1))[0] if fatal else draw.choice(HARMLESS)
    seconds = {"delay": 0.02, "slow": 0.0002}.get(action, 0.0)
    rank, call = draw.randrange(world_size), draw.randrange(calls)
    return Fault(action, rank, call, draw.getrandbits(16), seconds)


def draw_chain(seed: int, world_size: int = 4) -> Chain:
    """Draws a chain from ``seed`` that ends with two ranks: about four different schedules.

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
    """Returns the chain with calls in the interpreter where possible; others stay native."""
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
