"""The time of a pipelined schedule, as max-plus over its segments, stages and links.

A *flow* carries the segments of one rank's data through its stages. A segment enters a stage when
it has left the one before (plus that one's latency), and when the link of the stage is free: with
o the time that a stage occupies its link and l its latency,

    start(segment, stage) = max(arrived(segment, stage - 1), free(link))
    free(link)            = start + o
    arrived               = start + o + l

A link serves in the order of arrival, of those that arrive together the earlier segment first.
Flows share links: the ranks of a node share a NIC. The same recurrence with one link and equal
stages has a closed form, :func:`ring_us`, which tests compare with it.

Max-plus: Baccelli, Cohen, Olsder, Quadrat, "Synchronization and Linearity" (1992). Latency and
occupation are told apart as in LogGP: Alexandrov et al. (SPAA'95).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

__all__ = ["Flow", "LinkStage", "StageSequence", "finish_us", "least_us", "ring_us"]

# Longer schedules have their repeats cut short (some 5 ms of Python for as many).
MOST_TASKS = 4_000
FEWEST_REPEATS = 16
SETTLED_REPEATS = 3


@dataclass(frozen=True)
class LinkStage:
    """The work of one segment on one link.

    Attributes:
        link: by its name; stages of the same name wait for each other.
        occupied_us: how long the link is busy with a segment.
        latency_us: from then until the segment has arrived; others may use the link meanwhile.
        nic_bytes: of a segment that leave the node here.
    """

    link: str
    occupied_us: float
    latency_us: float = 0.0
    nic_bytes: float = 0.0


@dataclass(frozen=True)
class StageSequence:
    """Stages that follow each other, ``repeats`` times."""

    stages: tuple[LinkStage, ...]
    repeats: int = 1


@dataclass(frozen=True)
class Flow:
    """``segments`` equal segments, each of which goes through all parts in their order."""

    parts: tuple[StageSequence, ...]
    segments: int = 1

    @property
    def nic_bytes(self) -> float:
        """Bytes that leave the node, of all segments."""
        return self.segments * sum(
            part.repeats * stage.nic_bytes for part in self.parts for stage in part.stages
        )

    @property
    def tasks(self) -> int:
        """Stages of all segments."""
        return self.segments * sum(part.repeats * len(part.stages) for part in self.parts)


def finish_us(flows: Sequence[Flow], most_tasks: int = MOST_TASKS) -> float:
    """Returns when the last segment of all flows has arrived, in microseconds.

    A schedule of more than ``most_tasks`` stages has its repeated parts evaluated at two smaller
    numbers of repeats and continued along the line through both: a max-plus system that repeats
    itself takes equal time for each further period, once it has settled. Parts of different repeats
    are cut in proportion, rounded.
    """
    tasks = sum(flow.tasks for flow in flows)
    most_repeats = max((part.repeats for flow in flows for part in flow.parts), default=1)
    # A pipeline has not settled before its segments are all under way.
    segments = max((flow.segments for flow in flows), default=1)
    fewest = max(FEWEST_REPEATS, SETTLED_REPEATS * segments)
    shortened = max(fewest, most_repeats * most_tasks // max(tasks, 1))
    if shortened >= most_repeats:
        return _simulated_us(flows)
    half = shortened // 2
    long_us = _simulated_us(_shortened(flows, shortened, most_repeats))
    short_us = _simulated_us(_shortened(flows, half, most_repeats))
    continued_us = long_us + (most_repeats - shortened) * (long_us - short_us) / (shortened - half)
    return max(continued_us, least_us(flows))


def least_us(flows: Sequence[Flow]) -> float:
    """The time that no schedule of these flows beats.

    Each link is busy with all that it carries, and the first segment goes through all its stages.
    """
    busy_us: dict[str, float] = {}
    through_us = [0.0]
    for flow in flows:
        through_us.append(0.0)
        for part in flow.parts:
            for stage in part.stages:
                through_us[-1] += part.repeats * (stage.occupied_us + stage.latency_us)
                carried_us = flow.segments * part.repeats * stage.occupied_us
                busy_us[stage.link] = busy_us.get(stage.link, 0.0) + carried_us
    return max(*through_us, *busy_us.values())


def _shortened(flows: Sequence[Flow], repeats: int, of: int) -> list[Flow]:
    """The flows with ``repeats`` in place of ``of``, and other repeats in proportion."""
    return [
        replace(
            flow,
            parts=tuple(
                replace(part, repeats=max(1, round(part.repeats * repeats / of)))
                for part in flow.parts
            ),
        )
        for flow in flows
    ]


def _simulated_us(flows: Sequence[Flow]) -> float:
    names: dict[str, int] = {}
    stages = [
        [
            (names.setdefault(stage.link, len(names)), stage.occupied_us, stage.latency_us)
            for part in flow.parts
            for stage in part.stages * part.repeats
        ]
        for flow in flows
    ]
    free_us = [0.0] * len(names)
    finished_us = 0.0
    # (ready, segment, flow, stage): the next segment of a flow joins when one has begun.
    waiting = [(0.0, 0, flow, 0) for flow, through in enumerate(stages) if through]
    while waiting:
        ready_us, segment, flow, number = waiting[0]
        link, occupied_us, latency_us = stages[flow][number]
        free_us[link] = max(ready_us, free_us[link]) + occupied_us
        arrived_us = free_us[link] + latency_us
        if number + 1 < len(stages[flow]):
            heapq.heapreplace(waiting, (arrived_us, segment, flow, number + 1))
        else:
            finished_us = max(finished_us, arrived_us)
            heapq.heappop(waiting)
        if number == 0 and segment + 1 < flows[flow].segments:
            heapq.heappush(waiting, (0.0, segment + 1, flow, 0))
    return finished_us


def ring_us(steps: int, segments: int, occupied_us: float, latency_us: float) -> float:
    """The closed form of ``steps`` equal stages on one link.

    S o + (steps - 1) max(S o, o + l) + l: a step follows the one before when the link has passed
    all S segments on, or when its first segment has come back, whichever is later.
    """
    link_us = segments * occupied_us
    return link_us + (steps - 1) * max(link_us, occupied_us + latency_us) + latency_us
