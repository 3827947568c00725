"""The command: ``python -m tools.gpu_check [--stages LIST] [--budget SECONDS] [--rehearse]``."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ringcomm.bench.provenance import commit
from ringcomm.bench.report import Report

from . import rehearsal as rehearsed
from .goals import Goal, evaluate
from .plan import (
    BUDGET_S,
    FAILED,
    LEFT_OUT,
    OK,
    STAGES,
    Result,
    Runner,
    Stage,
    fit,
    limit_s,
    select,
)
from .record import LOG_NAME, Record, goal_lines, write
from .rehearsal import Rehearsal
from .stages import RUN, Workplace

ROOT = Path(__file__).resolve().parents[2]
# What the commands print and write; git does not see it.
FOLDER = ROOT / "build" / "gpu-check"
NO_GPU_STATUS = 2
_PROBE_LIMIT_S = 60.0
# In a process of its own: a context here would hold memory during the whole run.
_PROBE = "import json; from ringcomm.bench.devices import Gpu; print(json.dumps(Gpu(0).facts()))"

Stages = Mapping[str, Callable[[Workplace, float], Result]]


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, 1 when a stage failed, 2 without a usable GPU. A missed goal is no failure."""
    begin = time.monotonic()
    stages, left_out, rehearsal = _parse(argv)
    # As an exception it ends the command that runs, too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    folder = FOLDER if rehearsal is None else rehearsal.folder(FOLDER)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    usual = os.environ
    environment = usual if rehearsal is None else rehearsal.environment(usual)
    runner = Runner(ROOT, folder / LOG_NAME, environment)
    probe = _PROBE if rehearsal is None else rehearsed.PROBE
    probed = runner.run([sys.executable, "-c", probe], _PROBE_LIMIT_S)
    if probed.status != 0:
        why = "it did not answer in time" if probed.status is None else probed.last_line
        what = "usable GPU" if rehearsal is None else "emulated device"
        print(f"gpu-check: no {what} here: {why}")
        if rehearsal is None:
            print("REHEARSE=1 runs all of it on an emulated device, at small sizes")
        return NO_GPU_STATUS
    facts = json.loads(probed.last_line)
    facts |= {"commit": commit(), "date": time.strftime("%Y-%m-%d", time.gmtime())}
    if rehearsal is not None:
        facts = rehearsal.facts(facts)
    results = [
        Result(name, LEFT_OUT, "the budget has no room for it", data={"left out": [name]})
        for name in left_out
    ]
    out = os.environ.get("OUT")
    record = any(stage.name == "record" for stage in stages)
    results_folder = ROOT / "bench" / "results" if rehearsal is None else folder
    saver = Saver(facts, results_folder, Path(out) if out else None, folder / LOG_NAME)
    place = Workplace(runner, folder, facts, saver if record else None, rehearsal=rehearsal)
    results += run_stages(stages, place, RUN, begin, results)
    if record:
        results.append(_record(saver, results))
    print("\n".join(summary(place, results)))
    return 1 if any(result.verdict == FAILED for result in results) else 0


def _parse(
    argv: Sequence[str] | None,
) -> tuple[tuple[Stage, ...], tuple[str, ...], Rehearsal | None]:
    """The stages that are to run, those that the budget has no room for, and whether it is real."""
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__)
    names = ",".join(stage.name for stage in STAGES)
    parser.add_argument("--stages", default=names, metavar="LIST", help=f"some of {names}")
    parser.add_argument(
        "--budget",
        type=float,
        default=BUDGET_S,
        metavar="SECONDS",
        help="for all stages together; what finds no room is left out and named in the record",
    )
    parser.add_argument(
        "--rehearse",
        nargs="?",
        const="all",
        choices=("all", "sample"),
        help="on an emulated device, whose figures are no GPU's and are marked; or a sample of it",
    )
    given = parser.parse_args(argv)
    try:
        chosen = select(given.stages)
    except ValueError as error:
        parser.error(str(error))
    stages, left_out = fit(chosen, given.budget)
    if not set(RUN) & {stage.name for stage in stages}:
        least_s = min(stage.least_s for stage in chosen)
        parser.error(f"--budget {given.budget:g}: no stage fits, the shortest takes {least_s:g} s")
    return stages, left_out, Rehearsal(given.rehearse == "sample") if given.rehearse else None


def run_stages(
    stages: Sequence[Stage],
    place: Workplace,
    run: Stages,
    begin: float,
    before: Sequence[Result] = (),
) -> list[Result]:
    """Runs those of ``stages`` that ``run`` knows; one that fails or raises stops no other.

    The time they have together counts from ``begin``. What they found, and what stands ``before``
    it, is saved as it comes.
    """
    results: list[Result] = []
    for index, stage in enumerate(stages):
        body = run.get(stage.name)
        if body is None:
            continue
        started = time.monotonic()
        limit = limit_s(stages, index, started - begin)
        print(f"gpu-check: {stage.name}, {limit:.0f} s at most", flush=True)
        place.results = [*before, *results]
        if limit < stage.least_s:
            result = Result(stage.name, LEFT_OUT, f"{limit:.0f} s were left for it")
            result.data = {"left out": [stage.name]}
        else:
            try:
                result = body(place, limit)
            except Exception as error:
                result = Result(stage.name, FAILED, f"{type(error).__name__}: {error}")
        result.seconds = time.monotonic() - started
        results.append(result)
        place.save(result)
        if result.verdict == FAILED and result.tail:
            print(result.tail)
        print(f"gpu-check: {stage.name}: {result.verdict}: {result.detail}", flush=True)
    return results


def reports_of(results: Sequence[Result]) -> list[Report]:
    return [report for result in results for report in result.data.get("reports", [])]


@dataclass(frozen=True)
class Saver:
    """Writes the record, as often as there is something new: whatever ends the run, that stays."""

    facts: Mapping[str, str]
    folder: Path
    out: Path | None
    log: Path

    def __call__(self, results: Sequence[Result], *, ended: bool = False) -> list[Path]:
        reports = reports_of(results)
        goals = judged(self.facts, reports)
        if rehearsed.FACT in self.facts:
            reports = [rehearsed.marked(report) for report in reports]
        record = Record(self.facts, results, goals, reports, ended)
        return write(record, self.folder, self.out, self.log)


def judged(facts: Mapping[str, str], reports: Sequence[Report]) -> list[Goal]:
    """All goals; those of a rehearsal without a judgement."""
    if rehearsed.FACT not in facts:
        return evaluate(reports)
    goals = evaluate([rehearsed.enlarged(report) for report in reports])
    return [rehearsed.unjudged(goal) for goal in goals]


def _record(saver: Saver, results: Sequence[Result]) -> Result:
    begin = time.monotonic()
    try:
        files = saver(results, ended=True)
    except OSError as error:
        return Result("record", FAILED, f"cannot be written: {error}")
    names = ", ".join(str(file.relative_to(ROOT)) for file in files)
    return Result("record", OK, names, seconds=time.monotonic() - begin)


def summary(place: Workplace, results: Sequence[Result]) -> list[str]:
    """The short table that a run ends with."""
    lines = ["", f"gpu-check: {place.facts['gpu']}, commit {place.facts['commit']}"]
    if rehearsed.FACT in place.facts:
        lines += [f"{rehearsed.FACT} {place.facts[rehearsed.FACT]}"]
    if any(result.name in ("bench", "steps") for result in results):
        lines += goal_lines(judged(place.facts, reports_of(results)))
    lines += [
        f"{result.name:<9} {result.verdict:<12} {result.seconds:>5.0f} s  {result.detail}"
        for result in results
    ]
    return lines


if __name__ == "__main__":
    sys.exit(main())
