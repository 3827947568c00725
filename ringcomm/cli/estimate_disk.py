"""The section of ``ringcomm estimate`` on optimizer state on a disk, or on the host."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import Any

from ringcomm.errors import ArgumentError
from ringcomm.memory.scratch import Disk
from ringcomm.zero.estimate_tier import DiskRates, DiskTime, TierBytes
from ringcomm.zero.estimate_time import GIGA, bandwidth_needed, efficiency

MIB = 1 << 20
PLACES = ("memory", "cpu", "disk")
ACTIVATION_OPTIONS = ("activations_buffer_mib", "activations_resident_gb")
DISK_OPTIONS = ("buffer_mib", "resident_gb", "disk_read_gbps", "disk_write_gbps")
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
    """Declare the options of a state on a disk."""
    group = parser.add_argument_group("state elsewhere", "as with AdamWOptions(tier=)")
    add = group.add_argument
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
    options = DISK_OPTIONS if args.activations_on == "memory" else DISK_OPTIONS[:2]
    given = [name for name in options if getattr(args, name) is not None]
    if given and args.state_on != "disk":
        option = given[0].replace("_", "-")
        raise ArgumentError(f"--{option}: expected --state-on disk with it")
    if args.state_on != "disk":
        return None if args.state_on == "memory" else StateDisk(args.state_on, None)
    return StateDisk(_disk(args, ""), _rates(args))


def read_activations_disk(args: argparse.Namespace) -> ActivationsDisk | None:
    """Reads the options of activations; returns None if they are in memory.

    Raises:
        ArgumentError: the options do not go together, or are out of range.
    """
    if args.activations_on == "disk":
        if args.layers is None:
            raise ArgumentError("--activations-on disk: expected --layers and the other sizes")
        if args.pp > 1:
            raise ArgumentError("--activations-on disk: expected --pp 1 with it")
        return ActivationsDisk(_disk(args, "activations_"), _rates(args))
    for name in ACTIVATION_OPTIONS:
        if getattr(args, name) is not None:
            option = name.replace("_", "-")
            raise ArgumentError(f"--{option}: expected --activations-on disk with it")
    return None


def _disk(args: argparse.Namespace, prefix: str) -> Disk:
    sizes = {}
    for name, field, unit in (
        (f"{prefix}buffer_mib", "buffer_bytes", MIB),
        (f"{prefix}resident_gb", "resident_bytes", 10**9),
    ):
        value = getattr(args, name)
        if value is not None:
            if not 0 <= value * unit < 2**63:
                option = name.replace("_", "-")
                raise ArgumentError(f"--{option}: expected a size of 0 or more, got {value:g}")
            sizes[field] = round(value * unit)
    return Disk("disk", **sizes)


def _rates(args: argparse.Namespace) -> DiskRates | None:
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


def as_json(row: DiskRow) -> dict[str, Any]:
    """The row as plain JSON types: bytes and seconds."""
    told = asdict(row)
    told.update({f"{name}_bytes": size for name, size in told.pop("moved").items()})
    return told
