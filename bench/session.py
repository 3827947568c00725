"""One process's walk through the cases: prepare, check, time, and turn into rows."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from .board import Board
from .busy import REST_S
from .cases import COLLECTIVES, Case
from .devices import Device
from .launch import Placing
from .modes import MEANINGS, ONE_GPU_MODES
from .options import Options
from .peers import Prepared, System, Unavailable
from .report import Row, table_head, table_lines
from .timing import Entrant, Pace, Timing, measure, ratios
from .verify import wrong_elements

# Sets of buffers at most: more cost set-up, and calls that small wait for signals, not for bytes.
_MOST_SETS = 64


class Session:
    """One process's walk through the cases; the first rank's prints as it goes."""

    def __init__(
        self,
        options: Options,
        placing: Placing,
        board: Board,
        device: Device,
        systems: Mapping[str, System],
    ) -> None:
        self._options, self._placing = options, placing
        self._board, self._device, self._systems = board, device, systems

    def run_collective(self, name: str) -> list[Row]:
        options, collective = self._options, COLLECTIVES[name]
        mode = self._placing.mode
        placements = options.placements_of(collective)
        kind = "heap" if options.heap_tensors else "plain"
        graph = f", graphs of {options.graph_calls} calls" if options.graph_calls else ""
        self._say(
            f"\n# {name}: {self._placing.world} ranks ({mode}: {MEANINGS[mode]}), "
            f"ringcomm's tensors: {kind}{graph}"
        )
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
                    tensors=self._device.tensors,
                )
                of_size.extend(self._run_case(case))
            self._say("\n".join(table_lines(of_size, placements)))
            rows.extend(of_size)
        return rows

    def _run_case(self, case: Case) -> list[Row]:
        prepared, notes = self._prepare(case)
        subject, mode = self._options.subject, self._placing.mode
        if subject not in prepared or case.count_elems == 0:
            return [
                replace(make_row(case, name, mode), note=notes.get(name, ""))
                for name in self._systems
            ]
        wrong = wrong_elements(self._board, self._device, prepared) if self._options.check else {}
        for sets in prepared.values():
            _clear(sets)
        options = self._options
        pace = Pace(
            options.rounds,
            options.warmup_rounds,
            options.batch,
            options.turn_us,
            rest_s=REST_S if options.busy else 0.0,
        )
        entrants = {name: self._entrant(sets) for name, sets in prepared.items()}
        timings = measure(self._board, entrants, pace, self._device)
        rows = []
        for name in self._systems:
            row = replace(make_row(case, name, mode), note=notes.get(name, ""))
            if name in timings:
                against = timings[subject] if name != subject else None
                row = timed_row(row, case, timings[name], against)
                row = replace(
                    row,
                    wrong=wrong.get(name),
                    buffer_sets=len(prepared[name]),
                    graph_calls=options.graph_calls,
                )
            rows.append(row)
        return rows

    def _prepare(self, case: Case) -> tuple[dict[str, list[Prepared]], dict[str, str]]:
        prepared: dict[str, list[Prepared]] = {}
        notes: dict[str, str] = {}
        sets = buffer_sets(case, self._placing.mode, self._device.cache_bytes)
        if self._options.graph_calls:
            sets = min(sets, self._options.graph_calls)  # a graph uses no more
        for name, system in self._systems.items():
            try:
                prepared[name] = [system.prepare(case) for _ in range(sets)]
            except Unavailable as reason:
                notes[name] = str(reason)
        return prepared, notes

    def _entrant(self, sets: Sequence[Prepared]) -> Entrant:
        calls: list[Callable[[], object]] = [prepared.call for prepared in sets]
        inputs = [each.input for prepared in sets for each in prepared.buffers]
        device, graph_calls = self._device, self._options.graph_calls

        def refresh() -> None:
            for tensor in inputs:
                device.refresh(tensor)

        if graph_calls:
            return Entrant([device.capture(calls, graph_calls)], graph_calls, refresh)
        return Entrant(calls, refresh=refresh)

    def _say(self, text: str) -> None:
        if self._placing.rank == 0 and text:
            print(text, flush=True)


def _clear(sets: Sequence[Prepared]) -> None:
    for prepared in sets:
        for buffers in prepared.buffers:
            buffers.output.zero_()
            buffers.input.zero_()


def buffer_sets(case: Case, mode: str, cache_bytes: int) -> int:
    """Counts the sets of buffers to take in turn: twice the cache goes by between two uses."""
    ranks_on_device = case.world if mode in ONE_GPU_MODES else 1
    set_bytes = ranks_on_device * (case.input_elems + case.output_elems) * case.dtype.itemsize
    return min(_MOST_SETS, max(1, -(-2 * cache_bytes // max(set_bytes, 1))))


def make_row(case: Case, system: str, mode: str) -> Row:
    """The row of one cell, with nothing measured in it."""
    collective = case.collective
    return Row(
        collective=collective.name,
        size_bytes=case.size_bytes,
        count=case.count_elems,
        dtype=case.dtype_name,
        op=case.op if collective.reduces else "none",
        root=case.root if collective.rooted else -1,
        ranks=case.world,
        system=system,
        placement=case.placement,
        mode=mode,
    )


def timed_row(row: Row, case: Case, timing: Timing, subject: Timing | None) -> Row:
    """``row`` with the times of the cell, and how they compare with those of ``subject``."""
    low, middle, high = quartiles(ratios(timing, subject) if subject else [])
    return replace(
        row,
        time_us=round(timing.median_us, 3),
        best_us=round(timing.best_us, 3),
        p95_us=round(timing.p95_us, 3),
        algbw_gbps=_shortened(case.algbw_gbps(timing.median_us)),
        busbw_gbps=_shortened(case.busbw_gbps(timing.median_us)),
        rounds=len(timing.times_us),
        batch=timing.batch,
        ratio=middle,
        ratio_p95=timing.p95_us / subject.p95_us if subject else None,
        ratio_low=low,
        ratio_high=high,
    )


def _shortened(value: float) -> float:
    """Five significant digits: a slow call of a few bytes has a bandwidth, too."""
    return float(f"{value:.5g}")


def quartiles(values: Sequence[float]) -> tuple[float | None, float | None, float | None]:
    """Lower quartile, median and upper quartile; None of nothing."""
    if not values:
        return None, None, None
    spread = list(values) if len(values) > 1 else [values[0]] * 2
    low, middle, high = statistics.quantiles(spread, n=4, method="inclusive")
    return round(low, 4), round(middle, 4), round(high, 4)
