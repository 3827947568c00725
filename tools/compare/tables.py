# SPDX-License-Identifier: Apache-2.0
"""The Markdown tables of a session: ringcomm's time, and how long each other system takes.

A ratio is the other system's time divided by ringcomm's: the median of the ratios of the rounds,
which the harness has formed. Below 1 ringcomm has lost, and its row says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ringcomm.bench.report import Report, Row, size_label
from ringcomm.bench.training import taken_by_rivals
from ringcomm.bench.training_deepspeed import STAGES as DEEPSPEED

from .session import (
    COLLECTIVE_PEERS,
    DEEPSPEED_NAME,
    LAUNCHES,
    SUBJECT,
    TENSORS,
    TORCH_PEERS,
    TRAINING_RUN,
    Session,
)

NOT_AVAILABLE = "not available"
# The largest collective of a session, unless it is a trial, has at least this size.
_LEAST_BYTES = 1 << 20
# Before the name of a system in the facts of a report.
_VERSION = "version of "
# ringcomm's stages that DeepSpeed has, too.
_STAGES = {f"stage {stage}": name for name, stage in DEEPSPEED.items()}


@dataclass(frozen=True)
class Line:
    """A row of a table.

    Attributes:
        cells: the texts of its first columns.
        time_us: ringcomm's time; None if it was not measured.
        ratios: each other system's time divided by ringcomm's, by the system's name for readers;
            None if the system was not measured.
    """

    cells: tuple[str, ...]
    time_us: float | None
    ratios: Mapping[str, float | None]

    @property
    def lost_to(self) -> list[str]:
        """The systems that were faster than ringcomm."""
        return [name for name, ratio in self.ratios.items() if ratio is not None and ratio < 1]

    @property
    def measured(self) -> int:
        """The number of systems that were measured."""
        return sum(ratio is not None for ratio in self.ratios.values())


def collective_lines(session: Session) -> list[Line]:
    """Returns a line per collective, size and kind of tensors.

    ringcomm's time is from the first run that has the case.
    """
    lines = []
    for tensors in TENSORS:
        ratios: dict[tuple[str, int], dict[str, float | None]] = {}
        times: dict[tuple[str, int], float | None] = {}
        for launch in LAUNCHES:
            report = session.reports.get(f"{tensors}-{launch}")
            for row in report.rows if report else []:
                case = row.collective, row.size_bytes
                of_case = ratios.setdefault(case, dict.fromkeys(COLLECTIVE_PEERS.values()))
                if row.system == SUBJECT:
                    times.setdefault(case, row.time_us)
                else:
                    of_case[COLLECTIVE_PEERS[row.system]] = row.ratio
        for (name, size_bytes), of_case in ratios.items():
            cells = (name, size_label(size_bytes), tensors)
            lines.append(Line(cells, times.get((name, size_bytes)), of_case))
    return lines


def largest_lines(session: Session) -> list[Line]:
    """Returns the lines of collectives at the largest size, without the size."""
    lines = collective_lines(session)
    largest = lines[-1].cells[1] if lines else ""
    return [
        Line((name, tensors), line.time_us, line.ratios)
        for line in lines
        for name, size, tensors in [line.cells]
        if size == largest
    ]


def training_lines(session: Session) -> list[Line]:
    """Returns a line for each of the stages 1 to 3."""
    report = session.reports.get(TRAINING_RUN)
    lines = []
    for row in report.rows if report else []:
        if row.system not in _STAGES:
            continue
        took = taken_by_rivals(row)
        ratios = {name: took.get(system) for system, name in TORCH_PEERS.items()}
        ratios[DEEPSPEED_NAME] = took.get(_STAGES[row.system])
        lines.append(Line((row.system, _megabytes(row)), row.time_us, ratios))
    return lines


def _megabytes(row: Row) -> str:
    if row.held_bytes is None:
        return ""
    return f"{row.held_bytes / 1e6:.{0 if row.held_bytes >= 10e6 else 1}f}"


def time_text(time_us: float | None) -> str:
    """Returns a time with three digits: "31.4 us", "2.71 ms"."""
    if time_us is None:
        return NOT_AVAILABLE
    return f"{time_us:.3g} us" if time_us < 1e3 else f"{time_us / 1e3:.3g} ms"


def ratio_text(ratio: float | None) -> str:
    """Returns a ratio with about three digits; with more if it would be rounded up to 1."""
    if ratio is None:
        return NOT_AVAILABLE
    if ratio < 0.1:
        return f"{ratio:.2g}"
    decimals = 0 if ratio >= 100 else 1 if ratio >= 10 else 2
    rounded = f"{ratio:.{decimals}f}"
    return f"{ratio:.4f}" if ratio < 1 and rounded == "1.00" else rounded


def markdown(head: Sequence[str], lines: Iterable[Line]) -> list[str]:
    """Returns a table; ``head`` has the titles of the lines' cells.

    The table has a column "result" if a line is lost.
    """
    lines = list(lines)
    names = list(lines[0].ratios) if lines else []
    results = ["result"] if any(line.lost_to for line in lines) else []
    rows = [[*head, SUBJECT, *names, *results]]
    rows += [["---"] * len(rows[0])]
    for line in lines:
        lost = f"lost to {', '.join(line.lost_to)}" if line.lost_to else ""
        ratios = map(ratio_text, line.ratios.values())
        rows.append([*line.cells, time_text(line.time_us), *ratios, *[lost][: len(results)]])
    return [f"| {' | '.join(row)} |".replace("|  |", "| |") for row in rows]


def summary(lines: Sequence[Line]) -> str:
    """Returns a sentence that counts the lost comparisons."""
    lost, measured = (sum(map(count, lines)) for count in (_lost, lambda line: line.measured))
    return f"ringcomm lost {lost} of {measured} comparisons in this table."


def _lost(line: Line) -> int:
    return len(line.lost_to)


def _circumstances(reports: Mapping[str, Report]) -> str:
    """Returns sentences about the machine, the versions and the load of a session."""
    facts = next(iter(reports.values())).provenance
    versions: dict[str, str] = {}
    for report in reports.values():
        for key, text in report.provenance.items():
            if key.startswith(_VERSION):
                versions.setdefault(key.removeprefix(_VERSION), _short_version(text))
    systems = "; ".join(
        f"DeepSpeed {text}" if name == "deepspeed" else text for name, text in versions.items()
    )
    loads = ", ".join(report.provenance["load"].split()[0] for report in reports.values())
    ranks = next(iter(reports.values())).rows[0].ranks
    return (
        f"Measured on {facts['cpu']} with {facts['cores']} cores on {facts['date']}: {ranks} "
        f"ranks, FP32, torch {facts['torch']}. Load at the end of each run: {loads}. "
        f"Versions: {systems}."
    )


def _short_version(text: str) -> str:
    """Returns "MPICH 5.0.2" for the longer sentence of a library about itself."""
    told = " ".join(text.split()).replace("Intel(R) MPI Library", "Intel MPI")
    return told.replace(" Version: ", " ").removesuffix(" for Linux* OS")


def _trial(session: Session) -> list[str]:
    """Returns a warning if the sizes are those of a trial."""
    sizes = [row.size_bytes for report in session.reports.values() for row in report.rows]
    if not sizes or max(sizes) >= _LEAST_BYTES:
        return []
    return ["A trial at small sizes: these figures say nothing about speed."]


def block(session: Session, picture: str) -> str:
    """Returns the chart and the tables of a session, with all that could not be measured."""
    parts: list[list[str]] = []
    if told := _trial(session):
        parts.append(told)
    if session.reports:
        parts.append([f"{_EXPLANATION} {_circumstances(session.reports)}"])
    if picture:
        size = collective_lines(session)[-1].cells[1]
        parts.append([f"![{_ALTERNATIVE.format(size=size)}]({picture})"])
    for lines, head in (
        (collective_lines(session), ("collective", "size", "tensors")),
        (training_lines(session), ("training step", "MB per rank")),
    ):
        if lines:
            parts += [markdown(head, lines), [summary(lines)]]
    parts += [[f"{name} was {NOT_AVAILABLE}: {why}"] for name, why in session.reasons.items()]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def readme_table(session: Session) -> str:
    """Returns the table of the README: collectives at the largest size."""
    lines = largest_lines(session)
    table = markdown(("collective", "tensors"), lines)
    collectives = {name: each for name, each in session.reports.items() if name != TRAINING_RUN}
    told = f"{summary(lines)} {_circumstances(collectives)}"
    return "\n".join([*table, "", told]) + "\n"


_EXPLANATION = (
    "Below the name of a library is its time divided by ringcomm's time: the median of the ratios "
    "of all rounds. Above 1, ringcomm is faster."
)
_ALTERNATIVE = (
    "time of Gloo, MPICH, Intel MPI and oneCCL for collectives of {size} over the time of ringcomm"
)
