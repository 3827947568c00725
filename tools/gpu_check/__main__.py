"""The command: ``python -m tools.gpu_check [--stages build,test,sanitize,bench,steps,record]``."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bench.provenance import commit
from bench.report import Report

from .goals import evaluate
from .plan import FAILED, OK, STAGES, Result, Runner, Stage, limit_s, select
from .record import LOG_NAME, Record, goal_lines, write
from .stages import RUN, Workplace

ROOT = Path(__file__).resolve().parents[2]
# What the commands print and write; git does not see it.
FOLDER = ROOT / "build" / "gpu-check"
NO_GPU_STATUS = 2
_PROBE_LIMIT_S = 60.0
# In a process of its own: a context here would hold memory during the whole run.
_PROBE = "import json; from bench.devices import Gpu; print(json.dumps(Gpu(0).facts()))"

Stages = Mapping[str, Callable[[Workplace, float], Result]]


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, 1 when a stage failed, 2 without a usable GPU. A missed goal is no failure."""
    begin = time.monotonic()
    stages = _parse(argv)
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    runner = Runner(ROOT, FOLDER / LOG_NAME, os.environ)
    probed = runner.run([sys.executable, "-c", _PROBE], _PROBE_LIMIT_S)
    if probed.status != 0:
        why = "it did not answer in time" if probed.status is None else probed.last_line
        print(f"gpu-check: no usable GPU here: {why}")
        return NO_GPU_STATUS
    facts = json.loads(probed.last_line)
    facts |= {"commit": commit(), "date": time.strftime("%Y-%m-%d", time.gmtime())}
    place = Workplace(runner, FOLDER, facts)
    results = run_stages(stages, place, RUN, begin)
    out = os.environ.get("OUT")
    if any(stage.name == "record" for stage in stages):
        results.append(_record(place, results, Path(out) if out else None))
    print("\n".join(summary(place, results)))
    return 1 if any(result.verdict == FAILED for result in results) else 0


def _parse(argv: Sequence[str] | None) -> tuple[Stage, ...]:
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__)
    names = ",".join(stage.name for stage in STAGES)
    parser.add_argument("--stages", default=names, metavar="LIST", help=f"some of {names}")
    try:
        return select(parser.parse_args(argv).stages)
    except ValueError as error:
        parser.error(str(error))


def run_stages(
    stages: Sequence[Stage], place: Workplace, run: Stages, begin: float
) -> list[Result]:
    """Runs those of ``stages`` that ``run`` knows; one that fails or raises stops no other.

    The time they have together counts from ``begin``.
    """
    results: list[Result] = []
    for index, stage in enumerate(stages):
        body = run.get(stage.name)
        if body is None:
            continue
        started = time.monotonic()
        limit = limit_s(stages, index, started - begin)
        print(f"gpu-check: {stage.name}, {limit:.0f} s at most", flush=True)
        try:
            result = body(place, limit)
        except Exception as error:
            result = Result(stage.name, FAILED, f"{type(error).__name__}: {error}")
        result.seconds = time.monotonic() - started
        results.append(result)
        if result.verdict == FAILED and result.tail:
            print(result.tail)
        print(f"gpu-check: {stage.name}: {result.verdict}: {result.detail}", flush=True)
    return results


def reports_of(results: Sequence[Result]) -> list[Report]:
    return [report for result in results for report in result.data.get("reports", [])]


def _record(place: Workplace, results: Sequence[Result], out: Path | None) -> Result:
    begin = time.monotonic()
    reports = reports_of(results)
    record = Record(place.facts, results, evaluate(reports), reports)
    files = write(record, ROOT / "bench" / "results", out, place.folder / LOG_NAME)
    names = ", ".join(str(file.relative_to(ROOT)) for file in files)
    return Result("record", OK, names, seconds=time.monotonic() - begin)


def summary(place: Workplace, results: Sequence[Result]) -> list[str]:
    """The short table that a run ends with."""
    lines = ["", f"gpu-check: {place.facts['gpu']}, commit {place.facts['commit']}"]
    if any(result.name in ("bench", "steps") for result in results):
        lines += goal_lines(evaluate(reports_of(results)))
    lines += [
        f"{result.name:<9} {result.verdict:<12} {result.seconds:>5.0f} s  {result.detail}"
        for result in results
    ]
    return lines


if __name__ == "__main__":
    sys.exit(main())
