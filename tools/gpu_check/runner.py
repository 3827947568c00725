# SPDX-License-Identifier: Apache-2.0
"""The stages with their time budgets, and the runner of commands with time limits."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ringcomm.bench.report import Report
from ringcomm.launch import end_with

OK, FAILED, UNAVAILABLE = "ok", "failed", "unavailable"
# No time was left for a part of the stage, or for the whole stage.
PARTIAL, LEFT_OUT = "partial", "left out"


@dataclass(frozen=True)
class Stage:
    """A stage with its time budget; it is left out if less than ``least_s`` seconds remain."""

    name: str
    budget_s: float
    least_s: float


# In running order: measurements first (they check their results, too), among them profiles that
# show why a kernel is slow. The budgets' sum is below ten minutes, with a few seconds left for the
# files. On an H100 a process took about ten seconds to start.
STAGES = (
    Stage("build", 110.0, 10.0),
    Stage("calls", 35.0, 15.0),
    Stage("profile", 40.0, 15.0),
    Stage("grid", 70.0, 25.0),
    Stage("steps", 60.0, 25.0),
    Stage("bench", 80.0, 30.0),
    Stage("training", 90.0, 25.0),
    Stage("test", 60.0, 30.0),
    Stage("sanitize", 30.0, 20.0),
)
BUDGET_S = sum(stage.budget_s for stage in STAGES)


def select(text: str, budget_s: float = BUDGET_S) -> tuple[Stage, ...]:
    """Returns the stages that ``text`` ("build,test") names, in running order, with budgets.

    Raises:
        ValueError: ``text`` names an unknown stage, or no stage.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = [stage.name for stage in STAGES]
    if not names or set(names) - set(known):
        raise ValueError(f"--stages {text}: expected some of {','.join(known)}")
    chosen = [stage for stage in STAGES if stage.name in names]
    scale = budget_s / sum(stage.budget_s for stage in chosen)
    return tuple(replace(stage, budget_s=stage.budget_s * scale) for stage in chosen)


def limit_s(stages: Sequence[Stage], index: int, elapsed_s: float) -> float:
    """Returns the seconds for stage ``index``: its budget, and the rest of earlier stages' budgets.

    A stage that overruns takes time from later stages, so that the sum of the budgets holds.
    """
    return max(1.0, sum(stage.budget_s for stage in stages[: index + 1]) - elapsed_s)


@dataclass
class Result:
    """The result of one stage: a verdict, a line about it, and the tail of a failed command.

    The result files also have the figures in ``noted``, and the benchmarks' ``reports``.
    """

    name: str
    verdict: str
    detail: str
    tail: str = ""
    seconds: float = 0.0
    noted: dict[str, str] = field(default_factory=dict)
    reports: list[Report] = field(default_factory=list)


@dataclass(frozen=True)
class Finished:
    """A command that has ended; ``status`` is None if it was stopped at its limit."""

    status: int | None
    output: str

    @property
    def tail(self) -> str:
        return "\n".join(self.output.splitlines()[-40:])

    @property
    def why(self) -> str:
        """The reason that the command ended."""
        last_line = (self.output.strip().splitlines() or ["no output"])[-1].strip()
        return "stopped at its limit" if self.status is None else last_line


class Runner:
    """Runs commands in the source tree, and appends their output to the log."""

    def __init__(self, root: Path, log: Path, environment: Mapping[str, str]) -> None:
        self.root, self._log = root, log
        path = os.pathsep.join(filter(None, [str(root), environment.get("PYTHONPATH", "")]))
        self._environment = {**environment, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}

    def run(
        self, command: Sequence[str], limit_s: float, environment: Mapping[str, str] | None = None
    ) -> Finished:
        """Runs a command; at the limit, kills all processes of the command's session."""
        begin = time.monotonic()
        with self._log.open("a+", encoding="utf-8", errors="replace") as log:
            log.write(f"\n$ {' '.join(command)}\n")
            log.flush()
            at = log.tell()
            process = subprocess.Popen(
                command,
                cwd=self.root,
                env={**self._environment, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
            status: int | None = None
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = process.wait(limit_s)
            finally:
                _kill_session(process)
            log.seek(at)
            output = log.read()
            log.write(f"# exit status {status} after {time.monotonic() - begin:.1f} s\n")
        return Finished(status, output)


def _die_with_parent() -> None:
    """Makes the kernel end the command if this process is killed."""
    end_with(os.getppid())


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kills all processes of the command's session; ninja puts some into other process groups."""
    while members := _members(process.pid):
        for member in members:
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                os.kill(member, signal.SIGKILL)
    process.wait()


def _members(session: int) -> list[int]:
    """Returns the processes of a session, as /proc lists them now, without zombies."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended by itself
            state, _, _, of_session, *_ = stat.read_text().rpartition(")")[2].split()
            if int(of_session) == session and state != "Z":
                members.append(int(stat.parent.name))
    return members
