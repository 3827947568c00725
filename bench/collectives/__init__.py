# SPDX-License-Identifier: Apache-2.0
"""Times collectives of ringcomm and other libraries, in one run and in turn."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist

from ringcomm.cli import table_lines
from ringcomm.cli.usage import suggestion

from .. import cases, devices, run
from ..cases import Case, Collective, Prepared, wrong_elements
from ..launch import LaunchError, RankInfo, Wanted, join, missing_of_mpich, started_by
from ..loops import SERIAL, SLICED
from ..options import choice, count, option, parse_size, positive, rounds
from ..report import COLLECTIVE_CELL, COLLECTIVE_KEY, IN_PLACE, OUT_OF_PLACE, Row, RowTable
from ..run import Bench, Run
from ..timing import Device, Entrant, Pace, measure, timed
from .systems import (
    ALGORITHMS,
    COMPRESSIONS,
    SYSTEMS,
    PeerSetup,
    System,
    Unavailable,
    is_system,
    open_system,
    runs_on,
)
from .torch_groups import init_default_group

# Rows with a chosen number of blocks have a note: the number, then this text.
BLOCKS = "blocks of a rank"
DEFAULT_COLLECTIVES = ("reduce_scatter", "all_gather", "all_reduce")
_DEFAULT_PEERS = {"cpu": "gloo,mpi", "cuda": "nccl,torch,copy"}
DEFAULTS = " or ".join(_DEFAULT_PEERS.values()) + ", by device; without mpi if it is not installed"
_DEFAULT_RANKS = 2
_HOST_ALGORITHMS = ("auto", "one_shot", "ring")
size = partial(option, type=parse_size, metavar="SIZE")
# Memory of ringcomm's heap besides the buffers of one case: signals, fragmentation, and a rank's
# staging.
_HEAP_SLACK_BYTES = 256 << 20
_STAGING_BYTES = 64 << 20
# Largest number of buffer sets: more sets make the set-up slow. Only small calls would need more
# sets to exceed the cache, and the time of small calls is spent on signals, not on bytes.
_MOST_SETS = 64
# Most bytes that the calls of one graph move together; graphs of large calls have fewer calls. The
# graph's launch then takes little of the time, and no row takes seconds. Chosen without measuring.
_GRAPH_BYTES = 4 << 30
_LEAST_GRAPH_CALLS = 2
# Size of a call divided by its time, for the estimate of a run's time. Roughly the mean of
# ringcomm, Gloo and MPICH on 2 cores, and of a GPU's memory; no other values were tried.
_BYTES_PER_S = {"cpu": 1e9, "cuda": 1e11}
_CASE_S = 0.2  # time of a case for its set-up and its check on 2 cores; no other values were tried

OPTIONS = (
    option(
        "collectives",
        f"{', '.join(cases.COLLECTIVES)}, or all (default: {' '.join(DEFAULT_COLLECTIVES)})",
        nargs="*",
        metavar="COLLECTIVE",
    ),
    size(
        "-b --minbytes",
        "smallest size of a rank's larger buffer: 16, 64K, 1M, 2G; skips sizes that are too small "
        "for an element of each rank",
        default="4K",
    ),
    size("-e --maxbytes", "largest size", default="64M"),
    option(
        *("-f --stepfactor", "factor from one size to the next; 1: only the smallest size"),
        type=positive,
        default=4,
        metavar="N",
    ),
    choice("-d --datatype", "type of the elements", *cases.DTYPES),
    choice("-o --op", "reduction operator", *cases.OPS),
    option("--root", "root rank of rooted collectives", type=int, default=0),
    choice(
        *("--placement", "usual: as in torch.distributed; out of place, in place, or both"),
        *("usual", "both", OUT_OF_PLACE, IN_PLACE),
    ),
    option("--subject", "the system to which ratios are relative", default="ringcomm"),
    option(
        "--peers",
        f"other systems, separated by commas: {', '.join(SYSTEMS)}; ringcomm:one_shot names an "
        f"algorithm, and ringcomm:int8 a compression between nodes (default {DEFAULTS})",
        metavar="LIST",
    ),
    option("--nodes", "nodes that ranks of this machine emulate", type=positive, default=1),
    choice("--tensors", "memory of ringcomm's tensors", "plain", "heap"),
    choice("--api", "call ringcomm directly, or through torch.distributed", "communicator", "dist"),
    choice("--algorithm", "algorithm of ringcomm's collectives", *ALGORITHMS),
    option("--channels", "blocks of a rank's kernels; 0: ringcomm chooses", type=count, default=0),
    choice("--device", "device of the tensors", "cpu", "cuda"),
    choice(
        "--mode",
        "how ranks share GPUs: one GPU per rank, processes on one GPU, or one process and one "
        "launch for all ranks on one GPU; auto: one GPU per rank if there are enough",
        *(devices.AUTO, *devices.DEVICE_MODES),
    ),
    option(
        "--graph",
        "time replays of CUDA graphs of several calls, which exclude the host's time; the default "
        "if one launch carries all ranks, where the host's time grows with their number",
        action=argparse.BooleanOptionalAction,
    ),
    option("--graph-calls", "calls in a graph of small tensors", type=positive, default=20),
    rounds(20, "--iters"),
    option("-w --warmup_iters", "untimed rounds before the timed ones", type=count, default=3),
    option("-c --check", "count wrong elements before timing", type=int, choices=(0, 1), default=1),
    option("--batch", "calls in a turn; 0: as many as fit into --turn-us", type=count, default=0),
    option("--turn-us", "turn length in us, at most 200 calls", type=float, default=2000.0),
)


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuses options that cannot be measured; adds ``systems``, the ratios' subject and peers.

    Also adds ``note``, a line about a default peer that is not installed here, or "".
    """
    known = list(cases.COLLECTIVES)
    names = known if "all" in options.collectives else options.collectives
    unknown = sorted(set(names) - set(known))
    if unknown:
        parser.error(f"unknown collective {', '.join(unknown)}; known: {', '.join(known)}")
    options.collectives = tuple(names or DEFAULT_COLLECTIVES)
    if options.minbytes < 1:
        parser.error("--minbytes 0: the smallest size must have a byte")
    if options.maxbytes < options.minbytes:
        parser.error(f"--maxbytes {options.maxbytes} is below --minbytes {options.minbytes}")
    if (options.ranks or _DEFAULT_RANKS) % options.nodes:
        parser.error(f"--nodes {options.nodes}: nodes have as many ranks as each other")
    if options.op == "avg" and not cases.DTYPES[options.datatype].is_floating_point:
        parser.error(f"--op avg needs a floating-point --datatype, not {options.datatype}")
    listed = _DEFAULT_PEERS[options.device] if options.peers is None else options.peers
    peers = [name for name in listed.split(",") if name and name != options.subject]
    missing = missing_of_mpich() if options.peers is None and "mpi" in peers else ""
    options.note = ""
    if missing:
        # Nobody asked for MPI, so the other systems are measured without it.
        peers.remove("mpi")
        options.note = f"note: MPI is left out: no {missing} (pip install mpi4py mpich)"
    options.peers = tuple(peers)
    options.systems = (options.subject, *options.peers)
    for what, specs in (("peer", options.peers), ("subject", (options.subject,))):
        unknown = sorted(spec for spec in set(specs) if not is_system(spec))
        if unknown:
            systems = ", ".join([*SYSTEMS, "ringcomm:ALGORITHM"])
            guess = suggestion(unknown[0], SYSTEMS)
            parser.error(f"unknown {what} {', '.join(unknown)}; known: {systems}{guess}")
        elsewhere = [spec for spec in specs if not runs_on(spec, options.device)]
        if elsewhere:
            parser.error(f"--device {options.device} cannot run {', '.join(elsewhere)}")
    if options.device == "cpu":
        named = (spec.partition(":")[2] or "auto" for spec in options.systems)
        if {options.algorithm, *named} - {*_HOST_ALGORITHMS, *COMPRESSIONS}:
            parser.error("the algorithms ll, copy_engine and multicast need --device cuda")
        if options.graph or options.mode != devices.AUTO:
            parser.error("--graph and --mode need --device cuda")
        return
    of_hosts = {"--pin": options.pin, "--busy": options.busy, "--threads": options.threads > 1}
    for name, is_given in of_hosts.items():
        if is_given:
            parser.error(f"{name} needs --device cpu")


def find_rank(options: argparse.Namespace, wanted: Wanted) -> RankInfo | None:
    """Returns this process's rank; None in a process that must start the ranks first."""
    launcher, ranks = started_by(os.environ), options.ranks or _DEFAULT_RANKS
    mode = None
    if options.device == "cuda":
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        started = ranks if launcher is None else int(os.environ.get("WORLD_SIZE", ranks))
        mode = devices.choose(options.mode, started, gpus, launcher)
    found = join(wanted) if launcher is not None else None
    if mode == devices.ONE_LAUNCH:
        found = RankInfo(0, ranks, dist.HashStore())
    if found is not None and mode is not None:
        found = replace(found, mode=mode)
    world = ranks if found is None else found.world
    if not 0 <= options.root < world:
        raise LaunchError(f"--root {options.root}: no such rank among {world}")
    for name in options.collectives:
        if not filled_sizes(options, cases.COLLECTIVES[name], world):
            need = world * cases.DTYPES[options.datatype].itemsize
            raise LaunchError(
                f"--minbytes {options.minbytes}, --maxbytes {options.maxbytes}: {name} has no "
                f"element for each of {world} ranks at any size; use -b {need}"
            )
    if options.check and world > cases.MOST_RANKS_CHECKED:
        raise LaunchError(
            f"inputs are exact for up to {cases.MOST_RANKS_CHECKED} ranks, not {world}: use -c 0"
        )
    return found


def placements_of(options: argparse.Namespace, collective: Collective) -> list[str]:
    """Returns the requested placements that the collective has."""
    asked = {"usual": collective.usual}.get(options.placement, options.placement)
    return [each for each in collective.placements if asked in ("both", each)]


def sizes_bytes(options: argparse.Namespace) -> list[int]:
    sizes = [options.minbytes]
    while options.stepfactor > 1 and sizes[-1] * options.stepfactor <= options.maxbytes:
        sizes.append(sizes[-1] * options.stepfactor)
    return sizes


def filled_sizes(options: argparse.Namespace, collective: Collective, world: int) -> list[int]:
    """Returns the sizes at which the buffers of a collective have an element for each rank."""
    of = (options.datatype, options.op, options.root, 0, world, collective.usual)
    return [size for size in sizes_bytes(options) if Case(collective, size, *of).count_elems]


def heap_bytes(options: argparse.Namespace, ranks_here: int, cache_bytes: int) -> int | None:
    """Returns the heap size for a process of ``ranks_here`` ranks; None: the default.

    The heap must hold one case of each system of ringcomm: two buffers per rank, or enough sets of
    buffers to exceed the cache.
    """
    if options.tensors != "heap":
        return None
    own = ("ringcomm", SERIAL, SLICED)
    own_systems = [spec for spec in options.systems if spec.startswith(own)]
    rank_bytes = 2 * int(options.maxbytes) + _STAGING_BYTES
    return len(own_systems) * (ranks_here * rank_bytes + 2 * cache_bytes) + _HEAP_SLACK_BYTES


def buffer_sets(case: Case, mode: str, cache_bytes: int) -> int:
    """Returns the number of buffer sets: together they have twice the size of the cache."""
    ranks_on_device = case.world if mode in devices.ONE_GPU_MODES else 1
    set_bytes = ranks_on_device * (case.input_elems + case.output_elems) * case.dtype.itemsize
    return min(_MOST_SETS, max(1, -(-2 * cache_bytes // max(set_bytes, 1))))


def graph_calls(case: Case, options: argparse.Namespace) -> int:
    """Counts the calls in a graph of a case; 0: no graph, single calls."""
    if not options.graph:
        return 0
    case_bytes = case.world * (case.input_elems + case.output_elems) * case.dtype.itemsize
    fitting = max(_LEAST_GRAPH_CALLS, _GRAPH_BYTES // max(case_bytes, 1))
    return int(min(options.graph_calls, fitting))


def nodes_of(options: argparse.Namespace) -> int:
    """Returns the number of nodes that the ranks are on, or emulate."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    return max(int(options.nodes), world // int(os.environ.get("LOCAL_WORLD_SIZE", world)))


def measure_all(run: Run, device: Device | None = None) -> None:
    """Measures all cases on ``device``, or by default on this rank's device."""
    options, info = run.options, run.info
    run.say(options.note)
    if options.graph is None:
        # With several processes on one GPU, calls wait milliseconds for a time slice, so the host's
        # time does not matter.
        options.graph = info.mode == devices.ONE_LAUNCH
    if device is None:
        gpu = info.rank if info.mode == devices.GPU_PER_RANK else 0
        device = devices.CudaDevice(gpu) if options.device == "cuda" else Device()
    ranks_here, nodes = info.world if info.mode == devices.ONE_LAUNCH else 1, nodes_of(options)
    setup = PeerSetup(
        **vars(info),
        heap_tensors=options.tensors == "heap",
        api=options.api,
        algorithm=options.algorithm,
        heap_bytes=heap_bytes(options, ranks_here, device.cache_bytes),
        device=device,
        channels=options.channels,
        on_nodes=nodes > 1,
    )
    if setup.on_nodes:
        init_default_group(setup)
        run.over_nodes = True
    seconds = expected_s(options, info.world)
    run.pacing.expect(seconds, about_s=sum(seconds))
    systems = {name: open_system(name, setup) for name in dict.fromkeys(options.systems)}
    run.versions = {name: system.version for name, system in systems.items()}
    run.facts = {**device.facts(), "mode": info.mode} if options.device != "cpu" else {}
    walk = Walk(run, device, systems, nodes)
    for name in options.collectives:
        walk.measure(cases.COLLECTIVES[name])
    notes = {
        f"# {row.system}, {row.collective} ({row.placement}): {row.note}": row.note
        for row in run.rows
    }
    run.say("\n".join(line for line, note in notes.items() if note))
    run.board.barrier()
    for system in reversed(systems.values()):
        system.close()


def expected_s(options: argparse.Namespace, world: int) -> list[float]:
    """Estimates the seconds of each case: of all turns, and of the bytes that calls move."""
    turns = len(options.systems) * (options.warmup_iters + options.rounds)
    calls, bytes_per_s = max(options.batch, 1), _BYTES_PER_S[options.device]
    return [
        len(placements_of(options, collective))
        * (_CASE_S + turns * (options.turn_us / 1e6 + calls * size / bytes_per_s))
        for collective in map(cases.COLLECTIVES.__getitem__, options.collectives)
        for size in filled_sizes(options, collective, world)
    ]


@dataclass(frozen=True)
class Walk:
    """Measures the cases in one process: prepares, checks, times, and makes rows."""

    run: Run
    device: Device
    systems: Mapping[str, System]
    nodes: int

    def measure(self, collective: Collective) -> None:
        options, info = self.run.options, self.run.info
        placements = placements_of(options, collective)
        dtype, kind = options.datatype, f" {options.op}" * collective.reduces
        root = f", root {options.root}" * collective.rooted
        graph = f", graphs of up to {options.graph_calls} calls" if options.graph else ""
        over = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        title = (
            f"# {collective.name}: {info.world} ranks{over}, {dtype}{kind}{root}\n"
            f"# {info.mode}: {devices.MEANINGS[info.mode]}; ringcomm's tensors: "
            f"{options.tensors}{graph}\n"
            f"# ratio: time over that of {options.subject}, median over rounds\n"
            f"# p95, ratio95: the 95th percentile of the rounds, and that over {options.subject}'s"
        )
        table = RowTable(title, COLLECTIVE_KEY, COLLECTIVE_CELL, tuple(placements))
        of = (options.datatype, options.op, options.root, info.rank, info.world)
        for size in filled_sizes(options, collective, info.world):
            cells = [Case(collective, size, *of, each, self.device.tensors) for each in placements]
            self.run.pacing.begin()
            rows = [row for cell in cells for row in self._rows(cell)]
            self.run.pacing.end()
            self.run.add(rows, table)

    def _rows(self, case: Case) -> list[Row]:
        options, mode = self.run.options, self.run.info.mode
        prepared, notes = self._prepare(case)
        blocks = f"{options.channels} {BLOCKS}" if options.channels else ""
        base = replace(case.row, mode=mode, nodes=self.nodes, note=blocks)
        rows = {
            name: replace(base, system=name, note=notes.get(name, blocks)) for name in self.systems
        }
        subject = options.subject
        if subject not in prepared:
            return list(rows.values())
        wrong = wrong_elements(self.run.board, self.device, prepared) if options.check else {}
        for buffers in chain(*(one.buffers for sets in prepared.values() for one in sets)):
            buffers.output.zero_()
            buffers.input.zero_()
        warm_up, batch = options.warmup_iters, options.batch
        pace = Pace(options.rounds, warm_up, batch, options.turn_us, self.run.rest_s)
        calls_each = graph_calls(case, options)
        entrants = {name: self._entrant(sets, calls_each) for name, sets in prepared.items()}
        shown = self.run.pacing.show_round
        timings = measure(self.run.board, entrants, pace, self.device, shown)
        for name, timing in timings.items():
            rows[name] = replace(
                timed(rows[name], timing, None if name == subject else timings[subject]),
                algbw_gbps=_shortened(case.algbw_gbps(timing.median_us)),
                busbw_gbps=_shortened(case.busbw_gbps(timing.median_us)),
                wrong=wrong.get(name),
                buffer_sets=len(prepared[name]),
                graph_calls=calls_each,
            )
        return list(rows.values())

    def _prepare(self, case: Case) -> tuple[dict[str, list[Prepared]], dict[str, str]]:
        prepared: dict[str, list[Prepared]] = {}
        notes: dict[str, str] = {}
        sets = buffer_sets(case, self.run.info.mode, self.device.cache_bytes)
        sets = min(sets, graph_calls(case, self.run.options) or sets)  # n calls use at most n sets
        for name, system in self.systems.items():
            try:
                prepared[name] = [system.prepare(case) for _ in range(sets)]
            except Unavailable as reason:
                notes[name] = str(reason)
        return prepared, notes

    def _entrant(self, sets: Sequence[Prepared], graph_calls: int) -> Entrant:
        calls: list[Callable[[], object]] = [prepared.call for prepared in sets]
        inputs = [each.input for prepared in sets for each in prepared.buffers]

        def refresh() -> None:
            for tensor in inputs:
                self.device.refresh(tensor)

        if graph_calls:
            if not self.run.options.check:  # the first call's set-up cannot be captured
                for call in calls:
                    call()
            return Entrant([self.device.capture(calls, graph_calls)], graph_calls, refresh)
        return Entrant(calls, refresh=refresh)


def _shortened(value: float) -> float:
    """Rounds to five significant digits, so that the bandwidth of slow, small calls is not 0."""
    return float(f"{value:.5g}")


ABOUT = """Times collectives of ringcomm and of other libraries in one run, in turn.

Without options it takes about 25 s on 2 cores. Runs alone (it starts its ranks itself), under
torchrun and under mpiexec. Other benches:

""" + "\n".join(table_lines((f"ringcomm bench {name}", text) for name, text in run.BENCHES.items()))
BENCH = Bench(
    run.COLLECTIVES,
    ABOUT,
    measure_all,
    OPTIONS,
    ranks=_DEFAULT_RANKS,
    rounds=0,
    on_nodes=True,
    check=check,
    find_rank=find_rank,
)
parse = BENCH.parse
