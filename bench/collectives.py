"""The harness's entry: ``ringcomm bench``, or ``python -m bench.collectives`` in a source tree.

In the process that a user starts it starts the ranks; in a rank it measures.
"""

from __future__ import annotations

import os
import statistics
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from .board import Board
from .cases import COLLECTIVES, MOST_RANKS_CHECKED, Case
from .launch import LaunchError, Placing, join, run_ranks, started_by
from .options import Options, parse
from .peers import Place, Prepared, System, Unavailable, open_system
from .provenance import collect
from .report import Report, Row, table_head, table_lines, write_csv, write_json
from .timing import Pace, Timing, measure, ratios
from .verify import wrong_elements

# Room in ringcomm's heap besides the buffers of one case: staging, signals and fragmentation.
_HEAP_SLACK_BYTES = 256 << 20


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the harness. Returns 1 when an element was wrong, 2 when it cannot run as asked."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = parse(arguments)
    try:
        if started_by(os.environ) is None:
            _require_fit(options, options.ranks)
            return run_ranks(options.ranks, options.systems, arguments)
        placing = join(options.systems)
        _require_fit(options, placing.world)
    except LaunchError as error:
        print(f"ringcomm bench: {error}", file=sys.stderr)
        return 2
    return _run_rank(options, placing, arguments)


def _require_fit(options: Options, world: int) -> None:
    if not 0 <= options.root < world:
        raise LaunchError(f"--root {options.root}: no such rank among {world}")
    if options.check and world > MOST_RANKS_CHECKED:
        raise LaunchError(
            f"inputs are exact for up to {MOST_RANKS_CHECKED} ranks, not {world}: use -c 0"
        )


def _run_rank(options: Options, placing: Placing, arguments: Sequence[str]) -> int:
    if options.pin:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[placing.rank % len(cores)]})
    torch.set_num_threads(1)
    board = Board(placing.store, placing.rank, placing.world)
    place = Place(
        store=placing.store,
        rank=placing.rank,
        world=placing.world,
        heap_tensors=options.heap_tensors,
        api=options.api,
        algorithm=options.algorithm,
        heap_bytes=2 * options.max_bytes + _HEAP_SLACK_BYTES if options.heap_tensors else None,
    )
    systems = {name: open_system(name, place) for name in dict.fromkeys(options.systems)}
    versions = {name: system.version for name, system in systems.items()}
    report = Report(collect(arguments, versions), [])
    session = Session(options, placing, board, systems)
    for name in options.collectives:
        report.rows.extend(session.run_collective(name))
    board.barrier()
    for system in reversed(systems.values()):
        system.close()
    if placing.rank == 0:
        _write(report, options)
    return 1 if report.wrong else 0


class Session:
    """One rank's walk through the cases; rank 0 prints as it goes."""

    def __init__(
        self, options: Options, placing: Placing, board: Board, systems: Mapping[str, System]
    ) -> None:
        self._options, self._placing = options, placing
        self._board, self._systems = board, systems

    def run_collective(self, name: str) -> list[Row]:
        options, collective = self._options, COLLECTIVES[name]
        placements = [place for place in options.placements if place in collective.placements]
        kind = "heap" if options.heap_tensors else "plain"
        self._say(f"\n# {name}: {self._placing.world} ranks, ringcomm's tensors: {kind}")
        self._say(table_head(options.subject, placements))
        rows: list[Row] = []
        for size_bytes in options.sizes_bytes():
            of_size: list[Row] = []
            for placement in placements:
                case = Case(
                    collective=collective,
                    requested_bytes=size_bytes,
                    dtype_name=options.dtype_name,
                    op=options.op,
                    root=options.root,
                    rank=self._placing.rank,
                    world=self._placing.world,
                    placement=placement,
                )
                of_size.extend(self._run_case(case))
            self._say("\n".join(table_lines(of_size, placements)))
            rows.extend(of_size)
        return rows

    def _run_case(self, case: Case) -> list[Row]:
        prepared, notes = self._prepare(case)
        subject = self._options.subject
        if subject not in prepared or case.count_elems == 0:
            return [
                make_row(case, name, None, None, None, notes.get(name, ""))
                for name in self._systems
            ]
        wrong = wrong_elements(self._board, case, prepared) if self._options.check else {}
        for buffers in prepared.values():
            buffers.output.zero_()
            buffers.input.zero_()
        options = self._options
        pace = Pace(options.rounds, options.warmup_rounds, options.batch, options.turn_us)
        timings = measure(self._board, prepared, pace)
        return [
            make_row(
                case,
                name,
                timings.get(name),
                timings[subject] if name != subject else None,
                wrong.get(name),
                notes.get(name, ""),
            )
            for name in self._systems
        ]

    def _prepare(self, case: Case) -> tuple[dict[str, Prepared], dict[str, str]]:
        prepared: dict[str, Prepared] = {}
        notes: dict[str, str] = {}
        for name, system in self._systems.items():
            try:
                prepared[name] = system.prepare(case)
            except Unavailable as reason:
                notes[name] = str(reason)
        return prepared, notes

    def _say(self, text: str) -> None:
        if self._placing.rank == 0 and text:
            print(text, flush=True)


def make_row(
    case: Case,
    system: str,
    timing: Timing | None,
    subject: Timing | None,
    wrong: int | None,
    note: str,
) -> Row:
    """The row of one cell; without ``timing`` it only says why there is none."""
    collective = case.collective
    key = Row(
        collective=collective.name,
        size_bytes=case.size_bytes,
        count=case.count_elems,
        dtype=case.dtype_name,
        op=case.op if collective.reduces else "none",
        root=case.root if collective.rooted else -1,
        ranks=case.world,
        system=system,
        placement=case.placement,
        note=note,
    )
    if timing is None:
        return key
    low, middle, high = quartiles(ratios(timing, subject) if subject else [])
    return replace(
        key,
        time_us=round(timing.median_us, 3),
        best_us=round(timing.best_us, 3),
        algbw_gbps=round(case.algbw_gbps(timing.median_us), 4),
        busbw_gbps=round(case.busbw_gbps(timing.median_us), 4),
        wrong=wrong,
        rounds=len(timing.times_us),
        batch=timing.batch,
        ratio=middle,
        ratio_low=low,
        ratio_high=high,
    )


def quartiles(values: Sequence[float]) -> tuple[float | None, float | None, float | None]:
    """Lower quartile, median and upper quartile; None of nothing."""
    if not values:
        return None, None, None
    spread = list(values) if len(values) > 1 else [values[0]] * 2
    low, middle, high = statistics.quantiles(spread, n=4, method="inclusive")
    return round(low, 4), round(middle, 4), round(high, 4)


def _write(report: Report, options: Options) -> None:
    wrong = [row for row in report.rows if row.wrong]
    notes = [
        f"# {row.system}, {row.collective} ({row.placement}): {row.note}"
        for row in report.rows
        if row.note
    ]
    print("\n".join(dict.fromkeys(notes)))
    print(f"\n# {'FAILED' if wrong else 'OK'}: {report.wrong} wrong elements")
    for key, value in report.provenance.items():
        print(f"# {key}: {value}")
    if options.json_path:
        write_json(report, options.json_path)
    if options.csv_path:
        write_csv(report, options.csv_path)
    if options.plot_path:
        from .plot import draw

        draw(report, options.plot_path)


def _run_process() -> int:
    try:
        return main()
    except KeyboardInterrupt:
        return 130
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        if started_by(os.environ) is not None:
            # A rank that fails must not wait at exit for the others, as MPI's finalizer would.
            os._exit(1)
        return 1


if __name__ == "__main__":
    sys.exit(_run_process())
