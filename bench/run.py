# SPDX-License-Identifier: Apache-2.0
"""The runner: parses the command line of a benchmark, starts its ranks, and writes its rows.

A benchmark is a module with a :class:`Bench`, whose ``measure`` runs in each rank. The process that
a user starts launches the ranks, unless torchrun or mpiexec has started them.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

import ringcomm
from ringcomm.cli.usage import suggestion

from . import cases
from .board import Board
from .devices import ONE_LAUNCH, ModeError
from .launch import REST_S, LaunchError, RankInfo, Wanted, join, lead_session, run_ranks, started_by
from .options import (
    BUSY,
    CSV,
    JSON,
    PIN,
    THREADS,
    Option,
    build_parser,
    ranks,
    rounds,
    without_files,
)
from .pacing import Pacing, progress_of_rank
from .report import TIMES, Report, Row, RowTable, collect, write_csv, write_json
from .timing import Call, Device, Entrant, Pace, Timing, measure, rows_of

COLLECTIVES = "collectives"
CANNOT_RUN = 2
BENCHES = {
    COLLECTIVES: "collectives of ringcomm and of other libraries; the default",
    "training": "training steps at each ZeRO stage, beside DDP, FSDP2 and DeepSpeed",
    "steps": "the optimizer's step on the CPU, beside torch's and DeepSpeed's",
    "device_calls": "what calls on a GPU cost the host, beside torch's add_",
    "device_steps": "the optimizer's step on a GPU, beside torch's and a copy",
    "model_parallel": "training steps under pipeline, data and tensor parallelism",
    "layers": "a tensor-parallel layer, beside torch's plan for it",
    "products": "matrix products over ranks, beside the collective and the product",
    "moe": "tokens to their experts and back, beside all_to_all_single",
    "curves": "losses by optimizer, and by compression of the gradients",
    "disk": "the rates of a disk under loops of direct I/O",
}


def usual_rank(options: argparse.Namespace, wanted: Wanted) -> RankInfo | None:
    """Returns this process's rank; None in the process that a user started."""
    return None if started_by(os.environ) is None else join(wanted)


@dataclass(frozen=True)
class Bench:
    """One benchmark."""

    name: str  # name of its module, and the word after ``ringcomm bench``
    about: str
    measure: Callable[[Run], object]  # adds rows to the run; called on every rank
    options: Sequence[Option] = ()  # options that only this benchmark has
    ranks: int = 2  # default number of ranks; 0: measures in the user's process
    rounds: int = 9  # default number of rounds; 0: no such option
    on_nodes: bool = False  # True if its ranks may be on several machines
    # Checks the options before ranks start, and may add attributes to them.
    check: Callable[[argparse.ArgumentParser, argparse.Namespace], object] | None = None
    # Returns this process's rank; None in a process that must start ranks first.
    find_rank: Callable[[argparse.Namespace, Wanted], RankInfo | None] = usual_rank

    def build_parser(self) -> argparse.ArgumentParser:
        of_ranks = [ranks(self.ranks), THREADS, BUSY, PIN] if self.ranks else []
        of_rounds = [rounds(self.rounds)] if self.rounds else []
        options = (*self.options, *of_ranks, *of_rounds, JSON, CSV)
        return build_parser(" ".join(self.command([])), self.about, options)

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Parses a command line; prints an error and exits with status 2 if it is wrong."""
        parser = self.build_parser()
        options = parser.parse_args(words)
        if self.check:
            self.check(parser, options)
        return options

    def command(self, words: Iterable[str]) -> list[str]:
        """The ``ringcomm`` command that runs this benchmark."""
        return ["ringcomm bench", *[self.name] * (self.name != COLLECTIVES), *without_files(words)]

    def run_as_main(self, module: str) -> None:
        """Runs this benchmark and exits, if ``python -m`` runs its module."""
        if module == "__main__":
            sys.exit(run([self.name, *sys.argv[1:]]))

    def wanted(self, options: argparse.Namespace) -> Wanted:
        more = {name: each for name, each in vars(options).items() if name in ("systems", "nodes")}
        return Wanted(options.ranks, busy=options.busy, on_nodes=self.on_nodes, **more)


@dataclass
class Run:
    """A running benchmark on one rank."""

    bench: Bench
    options: argparse.Namespace
    info: RankInfo
    words: Sequence[str] = ()  # words of the command line
    # Facts about systems and device, for the report.
    versions: dict[str, str] = field(default_factory=lambda: {"ringcomm": ringcomm.__version__})
    facts: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    over_nodes: bool = False  # torch's default group has all ranks, on several nodes
    _close: Callable[[], object] = lambda: None
    _table: RowTable | None = None

    def __post_init__(self) -> None:
        self.rank, self.world = self.info.rank, self.info.world
        self.rest_s = REST_S if getattr(self.options, "busy", 0) else 0.0

    @cached_property
    def board(self) -> Board:
        processes = 1 if self.info.mode == ONE_LAUNCH else self.world
        group = dist.group.WORLD if self.over_nodes else None
        return Board(self.info.store, self.rank, processes, group)

    @cached_property
    def pacing(self) -> Pacing:
        title = " ".join(self.bench.command([]))
        return Pacing(title, progress_of_rank() if self.rank == 0 else None)

    def connect(self, backend: str = "ringcomm", **how: Any) -> ringcomm.Communicator:
        """Creates torch's default group, and a communicator by ``from_store``; collective."""
        store, rank, world = self.info.store, self.rank, self.world
        dist.init_process_group(
            backend, store=dist.PrefixStore("torch", store), rank=rank, world_size=world
        )
        comm = ringcomm.Communicator.from_store(
            dist.PrefixStore("ringcomm", store), rank, world, **how
        )
        self.over_nodes, self._close = comm.num_nodes > 1, comm.close
        return comm

    def say(self, text: str) -> None:
        if self.rank == 0 and text:
            self.pacing.clear()
            print(text, flush=True)

    def time(
        self,
        calls: Mapping[str, Call],
        *,
        warmup_rounds: int = 2,
        batch: int = 1,
        device: Device | None = None,
    ) -> dict[str, Timing]:
        """Times ``batch`` calls of each system per round; systems take turns within a round."""
        pace = Pace(self.options.rounds, warmup_rounds, batch, turn_us=0, rest_s=self.rest_s)
        entrants = {name: Entrant([call]) for name, call in calls.items()}
        self.pacing.begin()
        clock = device or Device()
        timings = measure(self.board, entrants, pace, clock, self.pacing.show_round)
        self.pacing.end()
        return timings

    def compare(
        self, case: Row, calls: Mapping[str, Call], subject: str | Mapping[str, str]
    ) -> None:
        """Times the calls, and adds their rows; see :func:`.timing.rows_of`."""
        self.add(rows_of(case, self.time(calls), subject))

    def add(self, rows: Sequence[Row], table: RowTable = TIMES) -> None:
        """Stores and prints rows, with the table's head before its first row.

        Writes them to the result files at once, so that they remain if the run fails later.
        """
        self.rows.extend(rows)
        if self.rank == 0:
            self._write()
        if table != self._table:
            self.say("\n" + table.head())
            self._table = table
        self.say("\n".join(table.lines(rows)))

    def _report(self) -> Report:
        command = self.bench.command(self.words)
        return Report(collect(command, self.versions, self.facts), self.rows)

    def _write(self, ended: bool = False) -> None:
        files = [(write_json, self.options.json), (write_csv, self.options.csv)]
        report = self._report() if any(file for _, file in files) else None
        for write, file in files:
            if report is None or file is None:
                continue
            if file.exists() and not file.is_file():  # a pipe accepts only one report
                if ended:
                    write(report, file)
                continue
            # Replace the file atomically: if the run is stopped while it writes, the old file
            # remains.
            part = file.with_name(f"{file.name}.unfinished")
            write(report, part)
            part.replace(file)

    def finish(self) -> int:
        """Leaves the groups; rank 0 writes the report. Returns the exit status of this rank."""
        self.board.barrier()
        status = 0
        if self.rank == 0 and self.rows:
            self._write(ended=True)
            report = self._report()
            verdict = f"{'FAILED' if report.wrong else 'OK'}: {report.wrong} wrong elements"
            if all(row.wrong is None for row in report.rows):
                verdict = "results were not checked"
            print(f"\n# {verdict}\n{report.head}")
            # Only rank 0 reports wrong elements by its exit status. If another rank exited with 1,
            # the launcher would end rank 0, perhaps before rank 0 has written the report.
            status = 1 if report.wrong else 0
        self._close()
        if dist.is_initialized():
            dist.destroy_process_group()
        return status


def take_cores(options: argparse.Namespace, rank: int) -> None:
    """Applies ``--pin`` and ``--threads`` to this process."""
    if options.pin:
        cores = sorted(os.sched_getaffinity(0))
        first = rank * options.threads
        own = {cores[(first + i) % len(cores)] for i in range(options.threads)}
        os.sched_setaffinity(0, own)
    if options.busy:
        lead_session()
    torch.set_num_threads(options.threads)
    # The variable applies to every communicator, also in groups of torch.distributed.
    os.environ["RINGCOMM_THREADS"] = str(options.threads)


def run_rank(
    bench: Bench, options: argparse.Namespace, info: RankInfo, words: Sequence[str]
) -> int:
    """Measures as this rank; returns the exit status."""
    run = Run(bench, options, info, words)
    if bench.ranks:
        take_cores(options, info.rank)
    try:
        bench.measure(run)
    finally:
        run.pacing.clear()
    return run.finish()


def main(bench: Bench, words: Sequence[str]) -> int:
    """Runs a benchmark. Returns 1 if an element was wrong, 2 if it cannot run as requested."""
    options = bench.parse(words)
    try:
        if not bench.ranks:
            return run_rank(bench, options, RankInfo(0, 1, dist.HashStore()), words)
        wanted = bench.wanted(options)
        info = bench.find_rank(options, wanted)
        if info is not None:
            return run_rank(bench, options, info, words)
        wanted = replace(wanted, ranks=wanted.ranks or bench.ranks)
        return run_ranks(["ringcomm.bench", bench.name, *words], wanted)
    except (LaunchError, ModeError) as error:
        # Print with one write, since ranks share stderr.
        sys.stderr.write(f"ringcomm bench: {error}\n")
        return CANNOT_RUN


def run(words: Sequence[str]) -> int:
    """Runs the benchmark that the first word names, or collectives; returns the exit status."""
    name, rest = COLLECTIVES, list(words)
    if rest and not rest[0].startswith("-"):
        if rest[0].replace("-", "_") in BENCHES:
            name = rest.pop(0).replace("-", "_")
        elif rest[0] not in (*cases.COLLECTIVES, "all"):
            return _refuse(rest[0])
    try:
        return main(importlib.import_module(f"{__package__}.{name}").BENCH, rest)
    except KeyboardInterrupt:
        return 130
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        if started_by(os.environ) is not None:
            # A failed rank must not wait for other ranks at exit, as MPI's finalizer would.
            os._exit(1)
        return 1


def _refuse(word: str) -> int:
    """Prints the error for a first word that names neither a benchmark nor a collective."""
    guess = suggestion(word, (*BENCHES, *cases.COLLECTIVES))
    # The usage lines lead to the help of collectives, which lists both.
    parser = importlib.import_module(f"{__package__}.{COLLECTIVES}").BENCH.build_parser()
    parser.report(f"unknown benchmark or collective {word!r}{guess}")
    return CANNOT_RUN
