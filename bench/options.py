"""The command line of the harness: the options of nccl-tests that make sense on one machine."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .cases import COLLECTIVES, DTYPES, IN_PLACE, OPS, OUT_OF_PLACE, Collective
from .modes import AUTO, DEVICE_MODES
from .peers import ALGORITHMS, SYSTEMS, is_system, runs_on

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
OUTPUT_OPTIONS = ("--json", "--csv", "--plot")
PLOT_SUFFIXES = (".png", ".svg", ".pdf")
DEFAULT_COLLECTIVES = ("reduce_scatter", "all_gather", "all_reduce")
_DEFAULT_PEERS = {"cpu": "gloo,mpi", "cuda": "nccl,torch,copy"}
_HOST_ALGORITHMS = ("auto", "direct", "ring")


@dataclass(frozen=True)
class Options:
    """A parsed command line; sizes in bytes, ``turn_us`` in microseconds.

    ``graph_calls`` is 0 where calls are made one by one.
    """

    collectives: tuple[str, ...]
    min_bytes: int
    max_bytes: int
    step_factor: int
    rounds: int
    warmup_rounds: int
    check: bool
    dtype_name: str
    op: str
    root: int
    subject: str
    peers: tuple[str, ...]
    ranks: int
    heap_tensors: bool
    placement: str
    api: str
    algorithm: str
    batch: int
    turn_us: float
    pin: bool
    busy: int
    device: str
    mode: str
    graph_calls: int
    json_path: str | None
    csv_path: str | None
    plot_path: str | None

    @property
    def systems(self) -> tuple[str, ...]:
        return (self.subject, *self.peers)

    def placements_of(self, collective: Collective) -> list[str]:
        """Returns the placements that were asked for and that the collective has."""
        asked = {
            "both": (OUT_OF_PLACE, IN_PLACE),
            "usual": (collective.usual,),
        }.get(self.placement, (self.placement,))
        return [placement for placement in asked if placement in collective.placements]

    def sizes_bytes(self) -> list[int]:
        sizes = [self.min_bytes]
        while self.step_factor > 1 and sizes[-1] * self.step_factor <= self.max_bytes:
            sizes.append(sizes[-1] * self.step_factor)
        return sizes


def parse_size(text: str) -> int:
    """Bytes of "4096", "4K", "4KiB", "1M", "1G" (powers of 1024, as nccl-tests reads them)."""
    match = re.fullmatch(r"(\d+)\s*([KMG]?)(?:I?B)?", text.strip().upper())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 4096, 4K, 1M or 1G")
    return int(match[1]) * _UNITS[match[2]]


def parse(argv: Sequence[str] | None = None) -> Options:
    """Parses a command line; a wrong one prints why and exits with status 2."""
    parser = build_parser()
    args = parser.parse_args(argv)
    names = list(COLLECTIVES) if "all" in args.collectives else args.collectives
    unknown = sorted(set(names) - set(COLLECTIVES))
    if unknown:
        parser.error(f"unknown collective {', '.join(unknown)}; known: {', '.join(COLLECTIVES)}")
    peers = _systems(parser, args)
    if args.max_bytes < args.min_bytes:
        parser.error(f"--maxbytes {args.max_bytes} is below --minbytes {args.min_bytes}")
    _check_outputs(parser, args)
    if args.op == "avg" and not DTYPES[args.datatype].is_floating_point:
        parser.error(f"--op avg needs a floating-point --datatype, not {args.datatype}")
    return Options(
        collectives=tuple(names or DEFAULT_COLLECTIVES),
        min_bytes=args.min_bytes,
        max_bytes=args.max_bytes,
        step_factor=args.step_factor,
        rounds=args.iters,
        warmup_rounds=args.warmup_iters,
        check=bool(args.check),
        dtype_name=args.datatype,
        op=args.op,
        root=args.root,
        subject=args.subject,
        peers=peers,
        ranks=args.ranks,
        heap_tensors=args.tensors == "heap",
        placement=args.placement,
        api=args.api,
        algorithm=args.algorithm,
        batch=args.batch,
        turn_us=args.turn_us,
        pin=args.pin,
        busy=args.busy,
        device=args.device,
        mode=args.mode,
        graph_calls=args.graph_calls if args.graph else 0,
        json_path=args.json,
        csv_path=args.csv,
        plot_path=args.plot,
    )


def _check_outputs(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuses files that could not be written, before the time of a measurement is spent."""
    for option in OUTPUT_OPTIONS:
        path = getattr(args, option.removeprefix("--"))
        if path is not None and not Path(path).absolute().parent.is_dir():
            parser.error(f"{option} {path}: its folder does not exist")
    if args.plot is not None and Path(args.plot).suffix.lower() not in PLOT_SUFFIXES:
        parser.error(f"--plot {args.plot}: expected a name in {', '.join(PLOT_SUFFIXES)}")


def _systems(parser: argparse.ArgumentParser, args: argparse.Namespace) -> tuple[str, ...]:
    """The peers, after a look at what the command line asks of all systems."""
    listed = _DEFAULT_PEERS[args.device] if args.peers is None else args.peers
    peers = tuple(name for name in listed.split(",") if name and name != args.subject)
    for what, specs in (("peer", peers), ("subject", (args.subject,))):
        unknown = sorted(spec for spec in set(specs) if not is_system(spec))
        if unknown:
            known = f"{', '.join(SYSTEMS)}, ringcomm:ALGORITHM"
            parser.error(f"unknown {what} {', '.join(unknown)}; known: {known}")
        elsewhere = [spec for spec in specs if not runs_on(spec, args.device)]
        if elsewhere:
            parser.error(f"--device {args.device} cannot run {', '.join(elsewhere)}")
    if args.device == "cpu":
        named = (spec.partition(":")[2] or "auto" for spec in (args.subject, *peers))
        asked = {args.algorithm, *named}
        if asked - set(_HOST_ALGORITHMS):
            parser.error("the algorithms packet and copy need --device cuda")
        if args.graph or args.mode != AUTO:
            parser.error("--graph and --mode need --device cuda")
    elif args.pin or args.busy:
        parser.error(f"{'--pin' if args.pin else '--busy'} needs --device cpu")
    return peers


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ringcomm bench",
        description="Times collectives of ringcomm and of other libraries in one run, in turn.",
        epilog="Runs alone (it starts its ranks itself), under torchrun and under mpiexec.",
    )
    _add_cases(parser)
    _add_systems(parser)
    _add_device(parser)
    _add_pace(parser)
    _add_outputs(parser)
    return parser


def _add_cases(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    default = " ".join(DEFAULT_COLLECTIVES)
    text = f"{', '.join(COLLECTIVES)}, or all (default: {default})"
    add("collectives", nargs="*", metavar="COLLECTIVE", help=text)
    size: dict[str, Any] = {"type": parse_size, "metavar": "SIZE"}
    text = "smallest size, of the larger buffer of a rank (default 4K; 16, 64K, 1M, 2G)"
    add("-b", "--minbytes", dest="min_bytes", default="4K", help=text, **size)
    text = "largest, in the same form (default 256M)"
    add("-e", "--maxbytes", dest="max_bytes", default="256M", help=text, **size)
    text = "factor from one size to the next; 1: the smallest size alone (default 4)"
    add("-f", "--stepfactor", dest="step_factor", type=_positive, default=4, help=text, metavar="N")
    add(
        "-d",
        "--datatype",
        choices=tuple(DTYPES),
        default="float",
        help="type of the elements (default float)",
    )
    add("-o", "--op", choices=OPS, default="sum", help="reduction operator (default sum)")
    add("-r", "--root", type=int, default=0, help="root rank of rooted collectives (default 0)")
    text = "out of place, in place, both (default), or usual: the one torch.distributed has"
    choices = ("both", OUT_OF_PLACE, IN_PLACE, "usual")
    add("--placement", choices=choices, default="both", help=text)


def _add_systems(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = "the system that the ratios compare with (default ringcomm)"
    add("--subject", default="ringcomm", metavar="SYSTEM", help=text)
    defaults = " or ".join(_DEFAULT_PEERS.values())
    text = (
        f"other systems, separated by commas: {', '.join(SYSTEMS)}; ringcomm:direct and so on "
        f"name an algorithm of ringcomm (default {defaults}, by device)"
    )
    add("--peers", metavar="LIST", help=text)
    text = "ranks to start when running alone (default 2)"
    add("--ranks", type=_positive, default=2, metavar="W", help=text)
    text = "ringcomm's buffers: ordinary memory or its heap (default plain)"
    add("--tensors", choices=("plain", "heap"), default="plain", help=text)
    text = "call ringcomm itself or through torch.distributed (default communicator)"
    add("--api", choices=("communicator", "dist"), default="communicator", help=text)
    text = "ringcomm's algorithm where a call takes one (default auto)"
    add("--algorithm", choices=ALGORITHMS, default="auto", help=text)


def _add_device(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = "where tensors lie and collectives run (default cpu)"
    add("--device", choices=("cpu", "cuda"), default="cpu", help=text)
    text = (
        "how ranks share GPUs: one GPU each, processes on one GPU, or one process and one launch "
        "for all on one GPU (default auto: a GPU each where there are enough)"
    )
    add("--mode", choices=(AUTO, *DEVICE_MODES), default=AUTO, help=text)
    text = "time replays of CUDA graphs that hold several calls each"
    add("--graph", action="store_true", help=text)
    text = "calls in a graph (default 20)"
    add("--graph-calls", type=_positive, default=20, metavar="N", help=text)


def _add_pace(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = "rounds; in each, every system has one turn (default 20)"
    add("-n", "--iters", type=_positive, default=20, metavar="N", help=text)
    text = "rounds before those that count (default 3)"
    add("-w", "--warmup_iters", type=int, default=3, metavar="N", help=text)
    text = "1: count wrong elements, in a pass of its own before timing (default); 0: do not"
    add("-c", "--check", type=int, choices=(0, 1), default=1, help=text)
    text = "calls in a turn; 0 takes as many as fit --turn-us (default 0)"
    add("--batch", type=int, default=0, metavar="N", help=text)
    text = "length of a turn of short calls, of at most 200 calls (default 2000)"
    add("--turn-us", type=float, default=2000.0, metavar="US", help=text)
    text = "pin each rank, and the threads of its libraries, to a core"
    add("--pin", action="store_true", help=text)
    text = "run beside K processes that keep a core busy (default 0)"
    add("--busy", type=_count, default=0, metavar="K", help=text)


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    what = (
        "rows and provenance as JSON",
        "rows and provenance as CSV",
        "a picture (PNG, SVG, PDF)",
    )
    for option, text in zip(OUTPUT_OPTIONS, what, strict=True):
        parser.add_argument(option, metavar="PATH", help=f"write {text}")


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 0 or more")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)
