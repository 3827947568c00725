"""The entry of the harness: ``ringcomm bench``, or ``python -m ringcomm.bench.collectives``.

In the process that a user starts it starts the ranks; in a rank it measures.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from .board import Board
from .busy import lead_session
from .cases import MOST_RANKS_CHECKED
from .devices import Device, Gpu, Host
from .launch import LaunchError, Placing, join, run_ranks, started_by
from .modes import ONE_LAUNCH, ModeError, choose, device_index
from .options import Options, parse
from .peers import PeerSetup, open_system
from .provenance import collect
from .report import Report, write_csv, write_json
from .session import Session

# Room in ringcomm's heap besides the buffers of one case: signals and fragmentation, and what a
# rank's staging takes.
_HEAP_SLACK_BYTES = 256 << 20
_STAGING_BYTES = 64 << 20


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the harness. Returns 1 when an element was wrong, 2 when it cannot run as asked."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = parse(arguments)
    try:
        placing = _place(options)
        if placing is None:
            return run_ranks(options, arguments)
        _require_fit(options, placing.world)
        device: Device = Host()
        if options.device == "cuda":
            device = Gpu(device_index(placing.mode, placing.rank))
    except (LaunchError, ModeError) as error:
        print(f"ringcomm bench: {error}", file=sys.stderr)
        return 2
    return run_rank(options, placing, device, arguments)


def _place(options: Options) -> Placing | None:
    """This process's place; None in the process that has ranks to start first."""
    launcher = started_by(os.environ)
    ranks = options.ranks if launcher is None else int(os.environ.get("WORLD_SIZE", options.ranks))
    mode = None
    if options.device == "cuda":
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        mode = choose(options.mode, ranks, gpus, launcher)
    if launcher is None:
        _require_fit(options, ranks)
        return Placing(0, ranks, dist.HashStore(), mode) if mode == ONE_LAUNCH else None
    placing = join(options)
    return placing if mode is None else replace(placing, mode=mode)


def _require_fit(options: Options, world: int) -> None:
    if not 0 <= options.root < world:
        raise LaunchError(f"--root {options.root}: no such rank among {world}")
    if options.check and world > MOST_RANKS_CHECKED:
        raise LaunchError(
            f"inputs are exact for up to {MOST_RANKS_CHECKED} ranks, not {world}: use -c 0"
        )


def heap_bytes(options: Options, ranks_here: int, cache_bytes: int) -> int | None:
    """Capacity that ringcomm's heap needs in a process of ``ranks_here`` ranks; None: the default.

    Room for one case of each of its systems: two buffers per rank, or as many sets of them as go
    beyond the cache.
    """
    if not options.heap_tensors:
        return None
    own_systems = sum(spec.startswith("ringcomm") for spec in options.systems)
    buffers_bytes = 2 * options.max_bytes * ranks_here + 2 * cache_bytes
    return own_systems * (buffers_bytes + ranks_here * _STAGING_BYTES) + _HEAP_SLACK_BYTES


def run_rank(options: Options, placing: Placing, device: Device, arguments: Sequence[str]) -> int:
    """Measures as this rank, or as all of them in "one-launch"; returns the exit status."""
    if options.pin:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[placing.rank % len(cores)]})
    if options.busy:
        lead_session()
    torch.set_num_threads(1)
    one_launch = placing.mode == ONE_LAUNCH
    board = Board(placing.store, placing.rank, 1 if one_launch else placing.world)
    place = PeerSetup(
        store=placing.store,
        rank=placing.rank,
        world=placing.world,
        heap_tensors=options.heap_tensors,
        api=options.api,
        algorithm=options.algorithm,
        heap_bytes=heap_bytes(options, placing.world if one_launch else 1, device.cache_bytes),
        device=device,
        mode=placing.mode,
    )
    systems = {name: open_system(name, place) for name in dict.fromkeys(options.systems)}
    versions = {name: system.version for name, system in systems.items()}
    facts = {**device.facts(), "mode": placing.mode} if options.device != "cpu" else {}
    report = Report(collect(arguments, versions, facts), [])
    session = Session(options, placing, board, device, systems)
    for name in options.collectives:
        report.rows.extend(session.run_collective(name))
    board.barrier()
    for system in reversed(systems.values()):
        system.close()
    if placing.rank == 0:
        _write(report, options)
    return 1 if report.wrong else 0


def _write(report: Report, options: Options) -> None:
    wrong = [row for row in report.rows if row.wrong]
    notes = [
        f"# {row.system}, {row.collective} ({row.placement}): {row.note}"
        for row in report.rows
        if row.note
    ]
    print("\n".join(dict.fromkeys(notes)))
    print(f"\n# {'FAILED' if wrong else 'OK'}: {report.wrong} wrong elements")
    for key, value in report.provenance.items():
        print(f"# {key}: {value}")
    if options.json_path:
        write_json(report, options.json_path)
    if options.csv_path:
        write_csv(report, options.csv_path)
    if options.plot_path:
        from .plot import draw

        draw(report, options.plot_path)


def _run_process() -> int:
    try:
        return main()
    except KeyboardInterrupt:
        return 130
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        if started_by(os.environ) is not None:
            # A rank that fails must not wait at exit for the others, as MPI's finalizer would.
            os._exit(1)
        return 1


if __name__ == "__main__":
    sys.exit(_run_process())
