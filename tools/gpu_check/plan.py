"""The stages, what time each may take, and how their commands are run within it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

OK, FAILED, UNAVAILABLE = "ok", "failed", "unavailable"
# A part of a stage, or all of it, had no time.
PARTIAL, LEFT_OUT = "partial", "left out"
_LEAST_S = 1.0
_PR_SET_PDEATHSIG = 1
_TAIL_LINES = 40


@dataclass(frozen=True)
class Stage:
    """A stage with its part of the time, and the least with which it is worth beginning."""

    name: str
    budget_s: float
    least_s: float


# In the order in which they run. Together below ten minutes.
STAGES = (
    Stage("build", 110.0, 30.0),
    Stage("test", 240.0, 40.0),
    Stage("sanitize", 55.0, 20.0),
    Stage("bench", 90.0, 30.0),
    Stage("steps", 66.0, 25.0),
    Stage("record", 8.0, 2.0),
)
BUDGET_S = sum(stage.budget_s for stage in STAGES)
# What a short time goes to first. Without a build nothing runs, and without a record nothing stays.
_WEIGHT = ("record", "build", "test", "bench", "steps", "sanitize")


@dataclass
class Result:
    """The end of one stage: a verdict, a line about it, and what later stages want of it.

    ``tail`` is the end of what a failed command printed.
    """

    name: str
    verdict: str
    detail: str
    tail: str = ""
    seconds: float = 0.0
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.verdict == OK


def select(text: str) -> tuple[Stage, ...]:
    """The stages that "build,test" names, in their own order.

    Raises:
        ValueError: no such stage, or none at all.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = [stage.name for stage in STAGES]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise ValueError(f"--stages {text}: expected some of {','.join(known)}")
    return tuple(stage for stage in STAGES if stage.name in names)


def fit(stages: Sequence[Stage], budget_s: float) -> tuple[tuple[Stage, ...], tuple[str, ...]]:
    """The stages with their parts of ``budget_s``, and the names of those that it has no room for.

    Every stage that runs has its least, in the order of their weight; the rest of the time is
    divided as the stages' own budgets are.
    """
    chosen: set[str] = set()
    least_s = 0.0
    for stage in sorted(stages, key=lambda stage: _WEIGHT.index(stage.name)):
        if least_s + stage.least_s <= budget_s:
            chosen.add(stage.name)
            least_s += stage.least_s
    fitting = [stage for stage in stages if stage.name in chosen]
    spare_s = budget_s - least_s
    wanted_s = sum(stage.budget_s - stage.least_s for stage in fitting) or 1.0
    parts = [
        replace(
            stage,
            budget_s=stage.least_s + spare_s * (stage.budget_s - stage.least_s) / wanted_s,
        )
        for stage in fitting
    ]
    left_out = tuple(stage.name for stage in stages if stage.name not in chosen)
    return tuple(parts), left_out


def limit_s(stages: Sequence[Stage], index: int, elapsed_s: float) -> float:
    """Seconds that stage ``index`` may take: its budget, and what those before it left over.

    What a stage overran is taken from the next ones, so that the sum of the budgets holds.
    """
    return max(_LEAST_S, sum(stage.budget_s for stage in stages[: index + 1]) - elapsed_s)


@dataclass(frozen=True)
class Finished:
    """A command that ended; ``status`` is None when it was stopped at its limit."""

    status: int | None
    output: str
    seconds: float

    @property
    def tail(self) -> str:
        return "\n".join(self.output.splitlines()[-_TAIL_LINES:])

    @property
    def last_line(self) -> str:
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        return lines[-1] if lines else "no output"


class Runner:
    """Runs commands in the source tree; everything they print goes to the log."""

    def __init__(self, root: Path, log: Path, environment: Mapping[str, str]) -> None:
        self.root, self._log = root, log
        paths = [str(root), environment.get("PYTHONPATH", "")]
        self._environment = {
            **environment,
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "PYTHONUNBUFFERED": "1",
        }

    def run(
        self, command: Sequence[str], limit_s: float, environment: Mapping[str, str] | None = None
    ) -> Finished:
        """Ends the command, and all that it started in its session, at the limit."""
        begin = time.monotonic()
        with self._log.open("a", encoding="utf-8") as log:
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
            try:
                status: int | None = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                _kill_session(process)
        seconds = time.monotonic() - begin
        with self._log.open("rb") as written:
            written.seek(at)
            output = written.read().decode(errors="replace")
        with self._log.open("a", encoding="utf-8") as log:
            ending = "stopped at its limit" if status is None else f"exit status {status}"
            log.write(f"# {ending} after {seconds:.1f} s\n")
        return Finished(status, output, seconds)


def _die_with_parent() -> None:
    """Has the kernel end the command when this process is killed, which could not do it then."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    """Ends what is left of the command's session, in which ninja has groups of its own."""
    while members := _members(process.pid):
        for member in members:
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                os.kill(member, signal.SIGKILL)
    process.wait()


def _members(session: int) -> list[int]:
    """The processes of a session, as /proc lists them now, without zombies."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended by itself
            state, _, _, of_session, *_ = stat.read_text().rpartition(")")[2].split()
            if int(of_session) == session and state != "Z":
                members.append(int(stat.parent.name))
    return members
