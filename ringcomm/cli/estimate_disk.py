"""The sections of ``ringcomm estimate`` on what is on a disk, or on the host."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ringcomm.errors import ArgumentError
from ringcomm.memory.scratch import Disk
from ringcomm.zero.estimate_tier import DiskRates, DiskTime, ParamTierBytes, TierBytes
from ringcomm.zero.estimate_time import GIGA, bandwidth_needed, efficiency

MIB = 1 << 20
PLACES = ("memory", "cpu", "disk")
ACTIVATION_OPTIONS = ("activations_buffer_mib", "activations_resident_gb")
DISK_OPTIONS = ("buffer_mib", "resident_gb")
PARAMS_OPTIONS = ("params_buffer_mib", "params_resident_gb")
RATES = ("disk_read_gbps", "disk_write_gbps")
# The efficiency for which the table says what bandwidth it needs.
WANTED_SHARE = 0.9


@dataclass(frozen=True)
class StateDisk:
    """Where the state lies, and what a disk moves; ``rates`` is None if that is not known."""

    tier: Disk | str
    rates: DiskRates | None


@dataclass(frozen=True)
class ActivationsDisk:
    """Where activations are kept, and what the disk moves; ``rates`` is None if not known."""

    disk: Disk
    rates: DiskRates | None

    def times_s(self, moved: int, mates: int) -> tuple[float, float] | None:
        """Returns the seconds of a step's writes and reads, of so many ranks of a node."""
        if self.rates is None:
            return None
        total = mates * moved / GIGA
        return total / self.rates.write_gbps, total / self.rates.read_gbps


@dataclass(frozen=True)
class ParamsDisk:
    """The disk where parameters lie at stage 3; ``rates`` is None if that is not known."""

    tier: Disk
    rates: DiskRates | None


@dataclass(frozen=True)
class ParamsRow:
    """Parameters on a disk at stage 3.

    Attributes:
        moved: bytes of a rank.
        time: of a step's reads and writes, of all ranks of a node; None without rates.
        added_s: of it, what a step takes longer; None where the time of computing is not known.
        hidden_share: of it, what is behind forward and backward, 0 to 1; None likewise.
    """

    moved: ParamTierBytes
    time: DiskTime | None = None
    added_s: float | None = None
    hidden_share: float | None = None


@dataclass(frozen=True)
class DiskRow:
    """The state on a disk, or on the host, at one stage.

    Attributes:
        moved: bytes of a rank.
        time: of a step's reads and writes, of all ranks of a node; None without rates.
        added_s: of it, what a step takes longer; None where the time of computing is not known.
        hidden_share: of it, what is behind forward and backward, 0 to 1; None likewise.
        efficiency: share of the time that is computing if reads and writes take turns with it; None
            likewise, or where nothing moves.
        needed_gbps: of a node's disk, for an efficiency of 90 %; None likewise.
    """

    moved: TierBytes
    time: DiskTime | None = None
    added_s: float | None = None
    hidden_share: float | None = None
    efficiency: float | None = None
    needed_gbps: float | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of what is on a disk."""
    told = "as with AdamWOptions(tier=) and ZeroOptions(tier=)"
    add = parser.add_argument_group("state and parameters elsewhere", told).add_argument
    add(
        "--state-on",
        choices=PLACES,
        default="memory",
        help="cpu: the host's memory, for parameters on a GPU (default: %(default)s)",
    )
    default = Disk("disk").buffer_bytes // MIB
    add("--buffer-mib", type=float, help=f"of a rank, in 2^20 bytes (default: {default})")
    add("--resident-gb", type=float, help="of a rank's state, stays in memory (default: 0)")
    add(
        "--activations-on",
        choices=("memory", "disk"),
        default="memory",
        help="disk: as within zero.activations_on() (default: %(default)s)",
    )
    add("--activations-buffer-mib", type=float, help=f"likewise (default: {default})")
    add("--activations-resident-gb", type=float, help="likewise (default: 0)")
    add("--params-on", choices=("memory", "disk"), default="memory", help="at stage 3")
    add("--params-buffer-mib", type=float, help=f"of a rank, in 2^20 bytes (default: {default})")
    add("--params-resident-gb", type=float, help="of a rank's, stay in memory (default: 0)")
    for what in ("read", "write"):
        add(
            f"--disk-{what}-gbps",
            type=float,
            metavar="GB/s",
            help=f"what a node's disk {what}s, which its ranks share; with both, times",
        )


def read_disk(args: argparse.Namespace) -> StateDisk | None:
    """Reads the options; returns None if the state is in memory.

    Raises:
        ArgumentError: the options do not go together, or are out of range.
    """
    elsewhere = (args.state_on, args.params_on, args.activations_on)
    _expect_with(args, RATES, "--state-on disk", "disk" in elsewhere)
    _expect_with(args, DISK_OPTIONS, "--state-on disk", args.state_on == "disk")
    if args.state_on != "disk":
        return None if args.state_on == "memory" else StateDisk(args.state_on, None)
    return StateDisk(_read_sizes(args, DISK_OPTIONS), _read_rates(args))


def read_activations_disk(args: argparse.Namespace) -> ActivationsDisk | None:
    """Reads the options of activations; returns None if they are in memory.

    Raises:
        ArgumentError: the options do not go together, or are out of range.
    """
    is_there = args.activations_on == "disk"
    _expect_with(args, ACTIVATION_OPTIONS, "--activations-on disk", is_there)
    if not is_there:
        return None
    if args.layers is None:
        raise ArgumentError("--activations-on disk: expected --layers and the other sizes")
    if args.pp > 1:
        raise ArgumentError("--activations-on disk: expected --pp 1 with it")
    return ActivationsDisk(_read_sizes(args, ACTIVATION_OPTIONS), _read_rates(args))


def read_params_disk(args: argparse.Namespace) -> ParamsDisk | None:
    """Reads the options; returns None if the parameters are in memory.

    Raises:
        ArgumentError: the options do not go together, or are out of range.
    """
    _expect_with(args, PARAMS_OPTIONS, "--params-on disk", args.params_on == "disk")
    if args.params_on != "disk":
        return None
    if args.stage not in (None, 3):
        raise ArgumentError(
            f"--params-on disk: expected --stage 3 or none with it, got {args.stage}, where each "
            "rank has all parameters in memory"
        )
    return ParamsDisk(_read_sizes(args, PARAMS_OPTIONS), _read_rates(args))


def _expect_with(
    args: argparse.Namespace, names: Sequence[str], other: str, is_there: bool
) -> None:
    given = [name for name in names if getattr(args, name) is not None]
    if given and not is_there:
        raise ArgumentError(f"--{given[0].replace('_', '-')}: expected {other} with it")


def _read_sizes(args: argparse.Namespace, names: Sequence[str]) -> Disk:
    sizes = {}
    fields = (("buffer_bytes", MIB), ("resident_bytes", 10**9))
    for name, (field, unit) in zip(names, fields, strict=True):
        value = getattr(args, name)
        if value is not None:
            if not 0 <= value * unit < 2**63:
                option = name.replace("_", "-")
                raise ArgumentError(f"--{option}: expected a size of 0 or more, got {value:g}")
            sizes[field] = round(value * unit)
    return Disk("disk", **sizes)


def _read_rates(args: argparse.Namespace) -> DiskRates | None:
    rates = [args.disk_read_gbps, args.disk_write_gbps]
    if rates == [None, None]:
        return None
    if None in rates:
        raise ArgumentError("--disk-read-gbps and --disk-write-gbps: expected both, or none")
    return DiskRates(*rates)


@dataclass(frozen=True)
class Computing:
    """A rank's computing in a step: operations, seconds, and 1e12 operations/s."""

    flops: int
    seconds: float
    peak_tflops: float


def disk_row(
    moved: TierBytes, rates: DiskRates | None, mates: int, computing: Computing | None
) -> DiskRow:
    """Returns the figures of one stage.

    Args:
        moved: bytes of a rank.
        rates: of the disk, or None.
        mates: ranks of a node, which share its disk.
        computing: of a rank, or None where it is not known.
    """
    time = None if rates is None else rates.time(moved, mates)
    if rates is None or time is None or computing is None:
        return DiskRow(moved, time)
    share, needed = None, None
    if moved.moved:
        # A rank has its share of the disk, by turns for reads and writes.
        intensity, peak = computing.flops / (2 * moved.moved), computing.peak_tflops
        share = efficiency(intensity, rates.both_gbps / mates, peak)
        needed = mates * bandwidth_needed(WANTED_SHARE, intensity, peak)
    return DiskRow(
        moved,
        time,
        time.added_s(computing.seconds),
        time.hidden_share(computing.seconds),
        share,
        needed,
    )


def params_row(
    moved: ParamTierBytes, rates: DiskRates | None, mates: int, computing: Computing | None
) -> ParamsRow:
    """Returns the figures of parameters; arguments as of :func:`disk_row`."""
    if rates is None:
        return ParamsRow(moved)
    time = rates.time_of_params(moved, mates)
    if computing is None:
        return ParamsRow(moved, time)
    seconds = computing.seconds
    return ParamsRow(moved, time, time.added_s(seconds), time.hidden_share(seconds))


def as_json(row: DiskRow | ParamsRow) -> dict[str, Any]:
    """The row as plain JSON types: bytes and seconds."""
    told = asdict(row)
    told.update({f"{name}_bytes": size for name, size in told.pop("moved").items()})
    return told
