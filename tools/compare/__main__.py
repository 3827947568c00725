# SPDX-License-Identifier: Apache-2.0
"""Times ringcomm and other libraries in one session, and writes the tables and the chart.

The collectives of ringcomm, Gloo, MPICH, Intel MPI and oneCCL, and a training step of ringcomm's
stages, DDP, FSDP2 and DeepSpeed's ZeRO. In each run all systems take turns in the same processes.
The session first prints an estimate of its length. Without options it changes no file of the
repository: results, tables and chart go to build/compare.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from ringcomm.cli.phases import INTERRUPTED, Phase, run_phase
from tools.pictures import ratio_bars

from . import session as plan
from .page import PAGE, PICTURES, README, ROOT, replaced
from .tables import block, readme_table

FOLDER = ROOT / "build" / "compare"
RECORDED = ROOT / "bench" / "results" / "compare"
CHART = "compare.svg"
_LOG, _TABLES = "session.txt", "tables.md"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the session. Returns 1 if a run failed, 130 after Ctrl-C, else 0."""
    given = _parse(argv)
    status, folder = 0, given.results
    if not given.render:
        try:
            status = run_session(plan.QUICK if given.quick else plan.FULL, folder)
        except KeyboardInterrupt:
            status = INTERRUPTED
        if status == INTERRUPTED:
            print("Interrupted: no tables were written.")
            return status
    session = plan.read_session(folder)
    print("\n" + block(session, ""))
    written = write(session, folder / _TABLES, folder / CHART)
    if given.record and status == 0:
        plan.copy(folder, RECORDED)
        written += [RECORDED, *record(session)]
    print(f"Wrote {', '.join(map(_shown, written))}")
    if status:
        print(f"A run FAILED, so nothing was recorded; {_shown(FOLDER / _LOG)} has its output.")
    return status


def write(session: plan.Session, tables: Path, picture: Path) -> list[Path]:
    """Writes the tables and the chart of a session to files; returns their paths."""
    drawn = chart(session)
    tables.write_text(block(session, picture.name if drawn else ""), encoding="utf-8")
    if drawn:
        picture.write_text(drawn, encoding="utf-8")
    return [tables, picture] if drawn else [tables]


def record(session: plan.Session) -> list[Path]:
    """Puts the tables into the pages, and the chart beside the pictures; returns the paths."""
    (PICTURES / CHART).write_text(chart(session), encoding="utf-8")
    for path, tables in ((PAGE, recorded_tables(session)), (README, readme_table(session))):
        path.write_text(replaced(path.read_text(encoding="utf-8"), tables), encoding="utf-8")
    return [PAGE, README, PICTURES / CHART]


def recorded_tables(session: plan.Session) -> str:
    """Returns the tables of a session as docs/performance.md has them."""
    return block(session, f"{PICTURES.name}/{CHART}")


def chart(session: plan.Session) -> str:
    """Draws the ratios of heap tensors at the largest size; "" if no system was measured."""
    runs = [f"{plan.TENSORS[0]}-{launch}" for launch in plan.LAUNCHES]
    reports = [session.reports[run] for run in runs if run in session.reports]
    return ratio_bars(reports).svg() if reports else ""


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="compare", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    told = "folder of the results, the tables and the chart (default: build/compare)"
    add("--results", type=Path, default=FOLDER, metavar="FOLDER", help=told)
    told = f"also copy the results to {_shown(RECORDED)}, and the tables and the chart to"
    add("--record", action="store_true", help=f"{told} {_shown(PAGE)} and {README.name}")
    add("--quick", action="store_true", help="small sizes and a small model: a trial of a minute")
    told = "measure nothing: write the tables and the chart from existing results"
    add("--render", action="store_true", help=told)
    given = parser.parse_args(argv)
    if given.record and given.quick:
        parser.error("--record: the figures of --quick are not for the page")
    return given


def _shown(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def run_session(pace: plan.Pace, folder: Path) -> int:
    """Finds out which systems run here, and runs the session with its results in ``folder``."""
    for each in (folder, FOLDER):
        each.mkdir(parents=True, exist_ok=True)
    plan.remove(folder)
    with (FOLDER / _LOG).open("w+", encoding="utf-8") as log:
        reasons = missing(log)
        available = [each for each in plan.COLLECTIVE_PEERS if each not in reasons]
        runs = plan.runs(pace, available)
        names = {plan.COLLECTIVE_PEERS.get(each, each): why for each, why in reasons.items()}
        print("\n".join(announcement(runs, names)), flush=True)
        status = 0
        for number, (name, phase) in enumerate(runs.items(), 1):
            files = ("--csv", str(plan.results_of(folder)[name]))
            ended = run_phase(phase, f"{number}/{len(runs)}", log, files)
            if ended == INTERRUPTED:
                return ended
            if ended != 0:
                status = 1
                plan.results_of(folder)[name].unlink(missing_ok=True)
                why = f"the run {name!r} failed with status {ended}"
                names = {**dict.fromkeys(plan.systems_of(name), why), **names}
    plan.write_reasons(folder, names)
    return status


def missing(log: IO[str]) -> dict[str, str]:
    """Returns why systems cannot run here, by system."""
    reasons = {}
    for system, phase in plan.probes().items():
        name = plan.COLLECTIVE_PEERS[system]
        print(f"{name}: trying a call", flush=True)
        why = plan.reason(phase, log)
        if why:
            reasons[system] = why
    if why := plan.deepspeed_reason():
        reasons[plan.DEEPSPEED_NAME] = why
    return reasons


def announcement(runs: Mapping[str, Phase], reasons: Mapping[str, str]) -> list[str]:
    """Returns lines about the runs of the session and their time, before it begins."""
    minutes = max(1, sum(phase.about_s for phase in runs.values()) / 60)
    return [
        *(f"{name}: not available: {why}" for name, why in reasons.items()),
        f"{len(runs)} runs on 2 ranks, about {minutes:.0f} min on two idle cores:",
        *(f"  {each.title}, about {each.about_s:.0f} s" for each in runs.values()),
    ]


if __name__ == "__main__":
    sys.exit(main())
