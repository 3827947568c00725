# SPDX-License-Identifier: Apache-2.0
"""The runs of a session, their result files, and the systems that could not be measured."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

from ringcomm.bench.report import Report, read
from ringcomm.bench.training_deepspeed import MISSING as NO_DEEPSPEED
from ringcomm.bench.training_deepspeed import installed_version
from ringcomm.cli.bench import COLLECTIVES, TRAINING, run_harness
from ringcomm.cli.phases import INTERRUPTED, Phase

SUBJECT = "ringcomm"
# Systems of the harness, with the names that a reader sees.
COLLECTIVE_PEERS = {"gloo": "Gloo", "mpi": "MPICH", "impi": "Intel MPI", "oneccl": "oneCCL"}
TORCH_PEERS = {"ddp on gloo": "DDP on Gloo", "fsdp2 on gloo": "FSDP2 on Gloo"}
DEEPSPEED_NAME = "DeepSpeed"
# A process can load one MPI, so each MPI has a run of its own beside ringcomm. oneCCL moves its
# data over Intel MPI.
TENSORS = ("heap", "plain")
LAUNCHES = {"mpich": ("gloo", "mpi"), "intel": ("impi", "oneccl")}
TRAINING_RUN = "training"
_REASONS = "not-available.json"
# Lines of the harness: it cannot run as requested; the last line of a traceback.
_REFUSED = "ringcomm bench: "
_ERROR = re.compile(r"[\w.]*(?:Error|Exception)\b.*:")
_NAMES = ("reduce_scatter", "all_gather", "all_reduce", "broadcast")


class Pace(NamedTuple):
    """The sizes and rounds of a session, and the seconds of each kind of run on two cores."""

    collectives: str
    training: str
    seconds: Mapping[str, float]


# The seconds are estimates, which the session prints before it begins.
FULL = Pace(
    "-b 64K -e 64M -f 32 -r 25",
    "--width 512 --depth 8 --heads 8 --context 16 -r 11",
    {"mpich": 45.0, "intel": 35.0, TRAINING_RUN: 100.0},
)
QUICK = Pace(
    "-b 64K -e 128K -f 2 -r 3 -w 1 --turn-us 500",
    "--width 32 --depth 1 --heads 2 --context 16 -r 3",
    {"mpich": 10.0, "intel": 10.0, TRAINING_RUN: 20.0},
)


@dataclass(frozen=True)
class Session:
    """The results of one session.

    Attributes:
        reports: the report of each run that wrote one, by the run's name.
        reasons: why a system was not measured, by its name for readers.
    """

    reports: Mapping[str, Report]
    reasons: Mapping[str, str]


def probes() -> dict[str, Phase]:
    """Returns a short run of each system of collectives that not every machine can run."""
    words = "all_reduce -b 4K -e 4K -r 1 -w 1 --batch 1 --peers"
    return {
        system: Phase(f"does {name} run here?", COLLECTIVES, (*words.split(), system))
        for system, name in COLLECTIVE_PEERS.items()
        if system != "gloo"
    }


def deepspeed_reason() -> str:
    """Returns why DeepSpeed cannot be measured; "" if it is installed."""
    return "" if installed_version() else NO_DEEPSPEED


def runs(pace: Pace, available: Sequence[str]) -> dict[str, Phase]:
    """Returns the runs of a session by name, with those systems of collectives that run here."""
    found = {}
    for tensors in TENSORS:
        for launch, systems in LAUNCHES.items():
            peers = [system for system in systems if system in available]
            if not peers:
                continue
            names = ", ".join(COLLECTIVE_PEERS[system] for system in peers)
            title = f"collectives of {tensors} tensors: {SUBJECT}, {names}"
            how = f"{pace.collectives} --placement usual --tensors {tensors}"
            words = (*_NAMES, *how.split(), "--peers", ",".join(peers))
            found[f"{tensors}-{launch}"] = Phase(title, COLLECTIVES, words, pace.seconds[launch])
    names = ", ".join([*TORCH_PEERS.values(), *[DEEPSPEED_NAME] * (not deepspeed_reason())])
    title = f"a training step: {SUBJECT}'s stages, {names}"
    seconds = pace.seconds[TRAINING_RUN]
    found[TRAINING_RUN] = Phase(title, TRAINING, tuple(pace.training.split()), seconds)
    return found


def reason(probe: Phase, log: IO[str]) -> str:
    """Runs a probe with its output in ``log``; returns why its system cannot run here, or ""."""
    log.write(f"\n=== {probe.title}\n")
    log.flush()
    start = log.tell()
    status = run_harness(probe.bench, *probe.words, output=log)
    log.seek(start)
    lines = [line.strip() for line in log if line.strip()]
    log.seek(0, 2)
    if status == INTERRUPTED:
        raise KeyboardInterrupt
    if status == 0:
        return ""
    refusals = [line.removeprefix(_REFUSED) for line in lines if line.startswith(_REFUSED)]
    errors = [line for line in lines if _ERROR.match(line)]
    return [f"its trial call failed with status {status}", *errors, *refusals][-1]


def systems_of(run: str) -> list[str]:
    """Returns the names for readers of the systems that a run compares with ringcomm."""
    if run == TRAINING_RUN:
        return [*TORCH_PEERS.values(), DEEPSPEED_NAME]
    return [COLLECTIVE_PEERS[system] for system in LAUNCHES[run.partition("-")[2]]]


def results_of(folder: Path) -> dict[str, Path]:
    """Returns the paths of all result files that a session may write, by run."""
    names = [f"{tensors}-{launch}" for tensors in TENSORS for launch in LAUNCHES]
    return {run: folder / f"{run}.csv" for run in [*names, TRAINING_RUN]}


def remove(folder: Path) -> None:
    """Removes the results of an earlier session."""
    for path in [*results_of(folder).values(), folder / _REASONS]:
        path.unlink(missing_ok=True)


def write_reasons(folder: Path, reasons: Mapping[str, str]) -> None:
    (folder / _REASONS).write_text(json.dumps(reasons, indent=1) + "\n", encoding="utf-8")


def read_session(folder: Path) -> Session:
    """Reads the results in a folder.

    Raises ``FileNotFoundError`` if no session has ended there.
    """
    reasons = json.loads((folder / _REASONS).read_text(encoding="utf-8"))
    files = {run: file for run, file in results_of(folder).items() if file.exists()}
    return Session({run: read(file) for run, file in files.items()}, reasons)


def copy(folder: Path, to: Path) -> None:
    """Replaces the results in the folder ``to``, which may not exist, by those in ``folder``."""
    to.mkdir(parents=True, exist_ok=True)
    if folder.resolve() == to.resolve():  # remove() would delete the results themselves
        return
    remove(to)
    for path in [*results_of(folder).values(), folder / _REASONS]:
        if path.exists():
            shutil.copyfile(path, to / path.name)
