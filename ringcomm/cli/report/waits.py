"""What waited for whom, as far as the records of calls tell it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ringcomm.cli.report.parts import Block, Figure, Matrix, Table, Text, duration
from ringcomm.comm.recorder.records import FAILED, RUNNING, RankRecording, Record, Recording
from ringcomm.comm.recorder.records import inner_calls as numbers_of_inner_calls

__all__ = ["Wait", "blocks_of", "waits_of"]

_FROM_ROOT = ("broadcast", "scatter")
_TO_ROOT = ("reduce", "gather")
_MOST_RANKS = 32


@dataclass(frozen=True)
class Wait:
    """A rank that waited for another one.

    Attributes:
        rank: who waited.
        awaited: for whom.
        track, number: name the call, as in its record.
        seconds: for how long.
        is_told: the recorder said so; else it follows from when the ranks began the call.
    """

    rank: int
    awaited: int
    track: str
    number: int
    seconds: float
    is_told: bool


def waits_of(recording: Recording, expected: int) -> list[Wait]:
    """All waits of a recording that has ``expected`` ranks, if none is missing.

    A call that has not ended, or failed, waits for the rank that the recorder names, from its
    beginning to its end or to the moment of the recording. A collective that ended well on all
    ranks is taken to have waited, on each rank, until the last one began it: for the root alone
    where only the root gives, and on the root alone where only that takes. Finished messages are
    left out, and so are calls on devices, of which hosts do not know when they ran. Where a rank is
    missing nobody knows which one was last.
    """
    ranks = [rank for rank in recording.ranks if not rank.on_device]
    found = [wait for rank in ranks for wait in _told(rank, recording.taken_ns)]
    if len(ranks) < expected:
        return found
    inner: set[int] = set()
    for rank in ranks:
        inner |= numbers_of_inner_calls(rank.collectives)
    of_ranks = [{each.number: each for each in rank.collectives} for rank in ranks]
    for number in sorted(set.intersection(*map(set, of_ranks)) - inner if of_ranks else ()):
        calls = {rank.rank: calls[number] for rank, calls in zip(ranks, of_ranks, strict=True)}
        if all(call.end_ns and not call.status for call in calls.values()):
            found += _of_arrivals(number, calls)
    return found


def _told(rank: RankRecording, taken_ns: int) -> Iterator[Wait]:
    """Yields the waits of a rank that its own records name a peer for."""
    running = [each for each in rank.collectives if each.state == RUNNING]
    innermost = max(running, key=lambda each: each.begin_ns, default=None)
    for record in (*rank.collectives, *rank.messages):
        awaited = -1
        if record.state == FAILED or (record.track == "messages" and record.state == RUNNING):
            awaited = record.peer
        elif record is innermost:
            awaited = rank.waits_for
        if awaited >= 0 and awaited != rank.rank:
            seconds = ((record.end_ns or taken_ns) - record.begin_ns) / 1e9
            yield Wait(
                rank.rank, awaited, record.track, record.number, max(seconds, 0.0), is_told=True
            )


def _of_arrivals(number: int, calls: dict[int, Record]) -> Iterator[Wait]:
    some = next(iter(calls.values()))
    last = max(calls, key=lambda rank: calls[rank].begin_ns)
    waiting, awaited = list(calls), last
    if some.collective in _FROM_ROOT:
        awaited = some.root
    elif some.collective in _TO_ROOT:
        waiting = [some.root]
    if awaited not in calls:
        return
    for rank in waiting:
        if rank == awaited or rank not in calls:
            continue
        until_ns = min(calls[rank].end_ns, calls[awaited].begin_ns)
        if until_ns > calls[rank].begin_ns:
            seconds = (until_ns - calls[rank].begin_ns) / 1e9
            yield Wait(rank, awaited, "collectives", number, seconds, is_told=False)


def blocks_of(waits: Sequence[Wait], ranks: Sequence[int]) -> list[Block]:
    """The ranking and the matrix of waits, of ``ranks`` and those that they awaited."""
    if not waits:
        return [Text("No rank is known to have waited for another one.")]
    names = sorted({*ranks, *(wait.awaited for wait in waits)})
    totals: dict[tuple[int, int], float] = {}
    for wait in waits:
        key = wait.rank, wait.awaited
        totals[key] = totals.get(key, 0.0) + wait.seconds
    blocks: list[Block] = [_ranking(waits, names)]
    return [*blocks, _matrix(totals, names)]


def _ranking(waits: Sequence[Wait], names: Sequence[int]) -> Figure:
    """Ranks by the time that others waited for them, longest first."""
    told = dict.fromkeys(names, 0.0)
    reckoned = dict.fromkeys(names, 0.0)
    count = dict.fromkeys(names, 0)
    own = dict.fromkeys(names, 0.0)
    for wait in waits:
        (told if wait.is_told else reckoned)[wait.awaited] += wait.seconds
        count[wait.awaited] += 1
        own[wait.rank] = own.get(wait.rank, 0.0) + wait.seconds
    order = sorted(names, key=lambda rank: (-told[rank] - reckoned[rank], rank))
    table = Table(
        ("rank", "others waited for it", "of it in calls that did not end", "calls", "it waited"),
        [
            (
                f"rank {rank}",
                duration(told[rank] + reckoned[rank]),
                duration(told[rank]),
                str(count[rank]),
                duration(own[rank]),
            )
            for rank in order
        ],
        "ranks by the time that others waited for them",
        frozenset({1, 2, 3, 4}),
    )
    shown = order[:_MOST_RANKS]
    labels = [f"rank {rank}" for rank in shown]
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": labels,
            "x": [round(seconds[rank], 9) for rank in shown],
            "marker": {"color": colour},
            "hovertemplate": f"%{{y}}: %{{x:.4s}}s, {name}<extra></extra>",
        }
        for name, seconds, colour in (
            ("calls that ended", reckoned, "#56B4E9"),
            ("calls that failed or are open", told, "#D55E00"),
        )
    ]
    notes = [
        "Summed over the ranks that waited. Of calls that failed or are open the recorder says who "
        "is awaited; of those that ended it is the rank that began the call last, until it did."
    ]
    if len(order) > len(shown):
        notes.append(f"The first {len(shown)} of {len(order)} ranks; the table has all.")
    layout = {
        "barmode": "stack",
        "dragmode": False,
        "xaxis": {"title": {"text": "time waited for it"}, "ticksuffix": "s"}
        | {"exponentformat": "SI", "rangemode": "tozero", "fixedrange": True},
        "yaxis": {"autorange": "reversed", "type": "category", "fixedrange": True},
    }
    return Figure("Whom the others waited for", data, layout, table, notes, 130 + 28 * len(shown))


def _matrix(totals: dict[tuple[int, int], float], names: Sequence[int]) -> Matrix:
    shown = names
    left_out = 0
    if len(names) > _MOST_RANKS:
        weight = dict.fromkeys(names, 0.0)
        for key, seconds in totals.items():
            for name in {*key}:
                weight[name] += seconds
        shown = sorted(sorted(names, key=lambda name: -weight[name])[:_MOST_RANKS])
        left_out = len(names) - len(shown)
    most = max(totals.values()) or 1.0
    cells = [[totals.get((row, column), 0.0) for column in shown] for row in shown]
    table = Table(
        ["waited", *(f"for rank {column}" for column in shown)],
        [
            [f"rank {row}", *(duration(s) if s else "" for s in line)]
            for row, line in zip(shown, cells, strict=True)
        ],
        "What waited for whom",
        frozenset(range(1, len(shown) + 1)),
    )
    notes = (
        [f"The {len(shown)} ranks of the longest waits; {left_out} are left out."]
        if left_out
        else []
    )
    return Matrix(table, [[s / most for s in line] for line in cells], notes)
