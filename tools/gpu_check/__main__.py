# SPDX-License-Identifier: Apache-2.0
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
from pathlib import Path

from ringcomm.bench.devices import COPY_FACT
from ringcomm.bench.report import commit
from ringcomm.cli import table_lines

from .result_files import REHEARSAL, ResultFiles, goal_lines
from .runner import BUDGET_S, FAILED, LEFT_OUT, STAGES, Result, Runner, Stage, limit_s, select
from .stages import MARK, NOT_A_GPU, RUN, CheckRun

ROOT = Path(__file__).resolve().parents[2]
# Output and files of the commands; git ignores this folder.
FOLDER = ROOT / "build" / "gpu-check"
LOG_NAME = "gpu-check.log"
NO_GPU_STATUS = 2
# Runs in its own process: a CUDA context in this one would hold memory during the whole run.
_PROBE = "import json; from {} import {} as Device; print(json.dumps(Device(0).facts()))"
_GPU, _EMULATED = ("ringcomm.bench.devices", "CudaDevice"), ("tests.gpu.rehearsed", "EmulatedGpu")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if a stage failed, 2 without a usable GPU, else 0, even if goals are missed."""
    begin = time.monotonic()
    stages, rehearsal = _parse(argv)
    # The exception ends the running command, too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    folder = FOLDER.with_name(f"{FOLDER.name}-{rehearsal}") if rehearsal else FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    # Hide GPUs from a rehearsal, since its tests would run on them.
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if rehearsal else {}
    runner = Runner(ROOT, folder / LOG_NAME, {**os.environ, **hidden})
    probe = _PROBE.format(*(_EMULATED if rehearsal else _GPU))
    probed = runner.run([sys.executable, "-c", probe], 60.0)
    if probed.status != 0:
        print(f"gpu-check: no usable GPU here: {probed.why}")
        print("REHEARSE=1 runs all stages on an emulated device, at small sizes")
        return NO_GPU_STATUS
    facts = json.loads(probed.why)
    facts |= {"commit": commit(), "date": time.strftime("%Y-%m-%d", time.gmtime())}
    if rehearsal:
        facts |= {COPY_FACT: f"none, {MARK}", REHEARSAL: NOT_A_GPU}
    out = Path(os.environ["OUT"]) if os.environ.get("OUT") else None
    results_folder = folder if rehearsal else ROOT / "bench" / "results"
    files = ResultFiles(facts, results_folder, out, folder / LOG_NAME)
    check = CheckRun(runner, folder, files, rehearsal)
    results = run_stages(stages, check, RUN, begin)
    written = check.save(ended=True)
    print("\n".join(summary(facts, results)))
    return 1 if not written or any(each.verdict == FAILED for each in results) else 0


def _parse(argv: Sequence[str] | None) -> tuple[tuple[Stage, ...], str]:
    """Returns the stages with their shares of the budget, and the kind of rehearsal or ""."""
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__, allow_abbrev=False)
    names = ",".join(stage.name for stage in STAGES)
    add = parser.add_argument
    add("--stages", default=names, metavar="LIST", help=f"some of {names}")
    told = "for all stages together; a stage without time is skipped, and listed in the results"
    add("--budget", type=float, default=BUDGET_S, metavar="SECONDS", help=told)
    told = "on an emulated device, with marked figures; or a sample of the rehearsal"
    kinds = ("rehearsal", "sample")
    add("--rehearse", nargs="?", const=kinds[0], default="", choices=kinds, help=told)
    given = parser.parse_args(argv)
    try:
        return select(given.stages, given.budget), given.rehearse
    except ValueError as error:
        parser.error(str(error))


def run_stages(
    stages: Sequence[Stage],
    check: CheckRun,
    run: Mapping[str, Callable[[CheckRun, float], Result]],
    begin: float,
) -> list[Result]:
    """Runs the stages, even after one fails or raises. Their time counts from ``begin``."""
    results = check.files.results
    for index, stage in enumerate(stages):
        started = time.monotonic()
        limit = limit_s(stages, index, started - begin)
        print(f"gpu-check: {stage.name}, {limit:.0f} s at most", flush=True)
        if limit < stage.least_s:
            result = Result(stage.name, LEFT_OUT, f"{limit:.0f} s were left for it")
        else:
            try:
                result = run[stage.name](check, limit)
            except Exception as error:
                result = Result(stage.name, FAILED, f"{type(error).__name__}: {error}")
        result.seconds = time.monotonic() - started
        results.append(result)
        check.save()
        if result.verdict == FAILED and result.tail:
            print(result.tail)
        print(f"gpu-check: {stage.name}: {result.verdict}: {result.detail}", flush=True)
    return results


def summary(facts: Mapping[str, str], results: Sequence[Result]) -> list[str]:
    """Returns the summary that is printed at the end of a run."""
    lines = ["", f"gpu-check: {facts['gpu']}, commit {facts['commit']}"]
    lines += [f"{REHEARSAL} {facts[REHEARSAL]}"] if REHEARSAL in facts else []
    if any(result.reports for result in results):
        lines += goal_lines([report for result in results for report in result.reports])
    rows = [(each.name, each.verdict, f"{each.seconds:.0f} s", each.detail) for each in results]
    return lines + table_lines(rows, right=(False, False, True, False))


if __name__ == "__main__":
    sys.exit(main())
