"""Collectives of ringcomm and of other libraries, in one run and in turn."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from . import run
from .cases import (
    COLLECTIVES,
    DTYPES,
    IN_PLACE,
    MOST_RANKS_CHECKED,
    OPS,
    OUT_OF_PLACE,
    Case,
    Collective,
)
from .devices import (
    AUTO,
    DEVICE_MODES,
    MEANINGS,
    ONE_GPU_MODES,
    ONE_LAUNCH,
    Device,
    Gpu,
    Host,
    choose,
    device_index,
)
from .launch import LaunchError, Placing, Wanted, join, started_by
from .options import count, option, parse_size, positive
from .peers import (
    ALGORITHMS,
    SYSTEMS,
    WIRES,
    PeerSetup,
    Prepared,
    System,
    Unavailable,
    is_system,
    open_system,
    runs_on,
)
from .peers.torch_groups import init_default_group
from .report import COLLECTIVE_CELL, COLLECTIVE_KEY, Row, Table
from .run import Bench, Run
from .timing import Entrant, Pace, measure, timed
from .verify import wrong_elements

DEFAULT_COLLECTIVES = ("reduce_scatter", "all_gather", "all_reduce")
_DEFAULT_PEERS = {"cpu": "gloo,mpi", "cuda": "nccl,torch,copy"}
DEFAULTS = " or ".join(_DEFAULT_PEERS.values()) + ", by device"
_DEFAULT_RANKS = 2
_HOST_ALGORITHMS = ("auto", "direct", "ring")
# Room in ringcomm's heap besides the buffers of one case: signals and fragmentation, and the
# staging of a rank.
_HEAP_SLACK_BYTES = 256 << 20
_STAGING_BYTES = 64 << 20
# Sets of buffers at most: more cost set-up, and calls that small wait for signals, not for bytes.
_MOST_SETS = 64

OPTIONS = (
    option(
        "collectives",
        f"{', '.join(COLLECTIVES)}, or all (default: {' '.join(DEFAULT_COLLECTIVES)})",
        nargs="*",
        metavar="COLLECTIVE",
    ),
    option(
        *("-b --minbytes", "smallest size, of the larger buffer of a rank: 16, 64K, 1M, 2G"),
        dest="min_bytes",
        type=parse_size,
        default="4K",
        metavar="SIZE",
    ),
    option(
        *("-e --maxbytes", "largest size"),
        dest="max_bytes",
        type=parse_size,
        default="256M",
        metavar="SIZE",
    ),
    option(
        *("-f --stepfactor", "factor from one size to the next; 1: the smallest size alone"),
        type=positive,
        default=4,
        metavar="N",
    ),
    option("-d --datatype", "type of the elements", choices=tuple(DTYPES), default="float"),
    option("-o --op", "reduction operator", choices=OPS, default="sum"),
    option("-r --root", "root rank of rooted collectives", type=int, default=0),
    option(
        *("--placement", "out of place, in place, both, or usual: the one torch.distributed has"),
        choices=("both", OUT_OF_PLACE, IN_PLACE, "usual"),
        default="both",
    ),
    option("--subject", "the system that the ratios are over", default="ringcomm"),
    option(
        "--peers",
        f"other systems, separated by commas: {', '.join(SYSTEMS)}; ringcomm:direct and so on "
        f"name an algorithm of ringcomm, ringcomm:int8 a wire between nodes (default {DEFAULTS})",
        metavar="LIST",
    ),
    option("--nodes", "that ranks of this machine stand for", type=positive, default=1),
    option("--tensors", "ringcomm's memory", choices=("plain", "heap"), default="plain"),
    option(
        *("--api", "call ringcomm itself or through torch.distributed"),
        choices=("communicator", "dist"),
        default="communicator",
    ),
    option("--algorithm", "ringcomm's, where it has several", choices=ALGORITHMS, default="auto"),
    option("--device", "where tensors lie", choices=("cpu", "cuda"), default="cpu"),
    option(
        "--mode",
        "how ranks share GPUs: one GPU each, processes on one GPU, or one process and one launch "
        "for all on one GPU; auto: a GPU each where there are enough",
        choices=(AUTO, *DEVICE_MODES),
        default=AUTO,
    ),
    option("--graph", "time replays of CUDA graphs of several calls", action="store_true"),
    option("--graph-calls", "calls in a graph", type=positive, default=20),
    option(
        "-n --iters", "rounds: a turn of every system", dest="rounds", type=positive, default=20
    ),
    option("-w --warmup_iters", "rounds before those that count", type=count, default=3),
    option("-c --check", "count wrong elements before timing", type=int, choices=(0, 1), default=1),
    option("--batch", "calls in a turn; 0: as many as fit --turn-us", type=count, default=0),
    option("--turn-us", "length of a turn, of at most 200 calls", type=float, default=2000.0),
)


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuses what cannot be measured; adds the tuple ``systems``, whose first is the subject."""
    names = list(COLLECTIVES) if "all" in options.collectives else options.collectives
    unknown = sorted(set(names) - set(COLLECTIVES))
    if unknown:
        parser.error(f"unknown collective {', '.join(unknown)}; known: {', '.join(COLLECTIVES)}")
    options.collectives = tuple(names or DEFAULT_COLLECTIVES)
    if options.max_bytes < options.min_bytes:
        parser.error(f"--maxbytes {options.max_bytes} is below --minbytes {options.min_bytes}")
    if (options.ranks or _DEFAULT_RANKS) % options.nodes:
        parser.error(f"--nodes {options.nodes}: nodes have as many ranks as each other")
    if options.op == "avg" and not DTYPES[options.datatype].is_floating_point:
        parser.error(f"--op avg needs a floating-point --datatype, not {options.datatype}")
    listed = _DEFAULT_PEERS[options.device] if options.peers is None else options.peers
    options.peers = tuple(name for name in listed.split(",") if name and name != options.subject)
    options.systems = (options.subject, *options.peers)
    for what, specs in (("peer", options.peers), ("subject", (options.subject,))):
        unknown = sorted(spec for spec in set(specs) if not is_system(spec))
        if unknown:
            known = f"{', '.join(SYSTEMS)}, ringcomm:ALGORITHM"
            parser.error(f"unknown {what} {', '.join(unknown)}; known: {known}")
        elsewhere = [spec for spec in specs if not runs_on(spec, options.device)]
        if elsewhere:
            parser.error(f"--device {options.device} cannot run {', '.join(elsewhere)}")
    if options.device == "cpu":
        named = (spec.partition(":")[2] or "auto" for spec in options.systems)
        if {options.algorithm, *named} - {*_HOST_ALGORITHMS, *WIRES}:
            parser.error("the algorithms packet and copy need --device cuda")
        if options.graph or options.mode != AUTO:
            parser.error("--graph and --mode need --device cuda")
    elif options.pin or options.busy:
        parser.error(f"{'--pin' if options.pin else '--busy'} needs --device cpu")
    options.graph_calls = options.graph_calls if options.graph else 0


def place(options: argparse.Namespace, wanted: Wanted) -> Placing | None:
    """This process's place; None in the process that has ranks to start first."""
    launcher, ranks = started_by(os.environ), options.ranks or _DEFAULT_RANKS
    mode = None
    if options.device == "cuda":
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        started = ranks if launcher is None else int(os.environ.get("WORLD_SIZE", ranks))
        mode = choose(options.mode, started, gpus, launcher)
    found = join(wanted) if launcher is not None else None
    if mode == ONE_LAUNCH:
        found = Placing(0, ranks, dist.HashStore())
    if found is not None and mode is not None:
        found = replace(found, mode=mode)
    world = ranks if found is None else found.world
    if not 0 <= options.root < world:
        raise LaunchError(f"--root {options.root}: no such rank among {world}")
    if options.check and world > MOST_RANKS_CHECKED:
        raise LaunchError(
            f"inputs are exact for up to {MOST_RANKS_CHECKED} ranks, not {world}: use -c 0"
        )
    return found


def placements_of(options: argparse.Namespace, collective: Collective) -> list[str]:
    """The placements that were asked for and that the collective has."""
    several = {"both": (OUT_OF_PLACE, IN_PLACE), "usual": (collective.usual,)}
    asked = several.get(options.placement, (options.placement,))
    return [each for each in asked if each in collective.placements]


def sizes_bytes(options: argparse.Namespace) -> list[int]:
    sizes = [options.min_bytes]
    while options.stepfactor > 1 and sizes[-1] * options.stepfactor <= options.max_bytes:
        sizes.append(sizes[-1] * options.stepfactor)
    return sizes


def heap_bytes(options: argparse.Namespace, ranks_here: int, cache_bytes: int) -> int | None:
    """Capacity that ringcomm's heap needs in a process of ``ranks_here`` ranks; None: the default.

    Room for one case of each of its systems: two buffers per rank, or as many sets of them as go
    beyond the cache.
    """
    if options.tensors != "heap":
        return None
    systems: tuple[str, ...] = options.systems
    own_systems = sum(spec.startswith("ringcomm") for spec in systems)
    max_bytes: int = options.max_bytes
    own_bytes = 2 * max_bytes * ranks_here + 2 * cache_bytes + ranks_here * _STAGING_BYTES
    return own_systems * own_bytes + _HEAP_SLACK_BYTES


def buffer_sets(case: Case, mode: str, cache_bytes: int) -> int:
    """Counts the sets of buffers to take in turn: twice the cache goes by between two uses."""
    ranks_on_device = case.world if mode in ONE_GPU_MODES else 1
    set_bytes = ranks_on_device * (case.input_elems + case.output_elems) * case.dtype.itemsize
    return min(_MOST_SETS, max(1, -(-2 * cache_bytes // max(set_bytes, 1))))


def nodes_of(options: argparse.Namespace) -> int:
    """The number of nodes that the ranks are on, or stand for."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    asked: int = options.nodes
    return max(asked, world // int(os.environ.get("LOCAL_WORLD_SIZE", world)))


def measure_all(run: Run, device: Device | None = None) -> None:
    """Walks through the cases on ``device``: this rank's, if it is left out."""
    options, place = run.options, run.place
    if device is None:
        on_gpu = options.device == "cuda"
        device = Gpu(device_index(place.mode, place.rank)) if on_gpu else Host()
    setup = PeerSetup(
        store=place.store,
        rank=place.rank,
        world=place.world,
        heap_tensors=options.tensors == "heap",
        api=options.api,
        algorithm=options.algorithm,
        heap_bytes=heap_bytes(
            options, place.world if place.mode == ONE_LAUNCH else 1, device.cache_bytes
        ),
        device=device,
        mode=place.mode,
        on_nodes=nodes_of(options) > 1,
    )
    if setup.on_nodes:
        init_default_group(setup)
        run.set_board(dist.group.WORLD)
    systems = {name: open_system(name, setup) for name in dict.fromkeys(options.systems)}
    run.versions = {name: system.version for name, system in systems.items()}
    run.facts = {**device.facts(), "mode": place.mode} if options.device != "cpu" else {}
    walk = Walk(run, device, systems, nodes_of(options))
    for name in options.collectives:
        walk.measure(COLLECTIVES[name])
    notes = [
        f"# {row.system}, {row.collective} ({row.placement}): {row.note}"
        for row in run.rows
        if row.note
    ]
    run.say("\n".join(dict.fromkeys(notes)))
    run.board.barrier()
    for system in reversed(systems.values()):
        system.close()


@dataclass(frozen=True)
class Walk:
    """One process's walk through the cases: prepare, check, time, and turn into rows."""

    run: Run
    device: Device
    systems: Mapping[str, System]
    nodes: int

    def measure(self, collective: Collective) -> None:
        options, place = self.run.options, self.run.place
        placements = placements_of(options, collective)
        graph = f", graphs of {options.graph_calls} calls" if options.graph_calls else ""
        over = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        title = (
            f"# {collective.name}: {place.world} ranks{over} ({place.mode}: "
            f"{MEANINGS[place.mode]}), ringcomm's tensors: {options.tensors}{graph}\n"
            f"# ratio: time over that of {options.subject}, median over rounds\n"
            f"# p95, ratio95: the 95th percentile of the rounds, and that over {options.subject}'s"
        )
        table = Table(title, COLLECTIVE_KEY, COLLECTIVE_CELL, tuple(placements))
        for size_bytes in sizes_bytes(options):
            rows: list[Row] = []
            for placement in placements:
                case = Case(
                    collective=collective,
                    requested_bytes=size_bytes,
                    dtype_name=options.datatype,
                    op=options.op,
                    root=options.root,
                    rank=place.rank,
                    world=place.world,
                    placement=placement,
                    tensors=self.device.tensors,
                )
                rows.extend(self._rows(case))
            self.run.add(rows, table)

    def _rows(self, case: Case) -> list[Row]:
        options, mode = self.run.options, self.run.place.mode
        prepared, notes = self._prepare(case)
        empty = {
            name: replace(cell_row(case, name, mode), note=notes.get(name, ""), nodes=self.nodes)
            for name in self.systems
        }
        subject = options.subject
        if subject not in prepared or case.count_elems == 0:
            return list(empty.values())
        board = self.run.board
        wrong = wrong_elements(board, self.device, prepared) if options.check else {}
        for sets in prepared.values():
            _clear(sets)
        rounds, warm_up = options.rounds, options.warmup_iters
        pace = Pace(rounds, warm_up, options.batch, options.turn_us, self.run.rest_s)
        entrants = {name: self._entrant(sets) for name, sets in prepared.items()}
        timings = measure(board, entrants, pace, self.device)
        for name, timing in timings.items():
            row = timed(empty[name], timing, None if name == subject else timings[subject])
            empty[name] = replace(
                row,
                algbw_gbps=_shortened(case.algbw_gbps(timing.median_us)),
                busbw_gbps=_shortened(case.busbw_gbps(timing.median_us)),
                wrong=wrong.get(name),
                buffer_sets=len(prepared[name]),
                graph_calls=options.graph_calls,
            )
        return list(empty.values())

    def _prepare(self, case: Case) -> tuple[dict[str, list[Prepared]], dict[str, str]]:
        prepared: dict[str, list[Prepared]] = {}
        notes: dict[str, str] = {}
        sets = buffer_sets(case, self.run.place.mode, self.device.cache_bytes)
        if self.run.options.graph_calls:
            sets = min(sets, self.run.options.graph_calls)  # a graph uses no more
        for name, system in self.systems.items():
            try:
                prepared[name] = [system.prepare(case) for _ in range(sets)]
            except Unavailable as reason:
                notes[name] = str(reason)
        return prepared, notes

    def _entrant(self, sets: Sequence[Prepared]) -> Entrant:
        calls: list[Callable[[], object]] = [prepared.call for prepared in sets]
        inputs = [each.input for prepared in sets for each in prepared.buffers]
        device, graph_calls = self.device, self.run.options.graph_calls

        def refresh() -> None:
            for tensor in inputs:
                device.refresh(tensor)

        if graph_calls:
            return Entrant([device.capture(calls, graph_calls)], graph_calls, refresh)
        return Entrant(calls, refresh=refresh)


def _clear(sets: Sequence[Prepared]) -> None:
    for prepared in sets:
        for buffers in prepared.buffers:
            buffers.output.zero_()
            buffers.input.zero_()


def cell_row(case: Case, system: str, mode: str) -> Row:
    """The row of one cell, with nothing measured in it."""
    kind = case.collective
    return Row(
        collective=kind.name,
        size_bytes=case.size_bytes,
        count=case.count_elems,
        dtype=case.dtype_name,
        op=case.op if kind.reduces else "none",
        root=case.root if kind.rooted else -1,
        ranks=case.world,
        system=system,
        placement=case.placement,
        mode=mode,
    )


def _shortened(value: float) -> float:
    """Five significant digits: a slow call of a few bytes has a bandwidth, too."""
    return float(f"{value:.5g}")


ABOUT = """Times collectives of ringcomm and of other libraries in one run, in turn.

Runs alone (it starts its ranks itself), under torchrun and under mpiexec. Other benches:

""" + "\n".join(f"ringcomm bench {name:16}{text}" for name, text in run.BENCHES.items())
BENCH = Bench(
    run.COLLECTIVES,
    ABOUT,
    measure_all,
    OPTIONS,
    ranks=_DEFAULT_RANKS,
    rounds=0,
    on_nodes=True,
    check=check,
    place=place,
)
parse = BENCH.parse
