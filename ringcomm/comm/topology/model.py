"""A description of the connections between one machine's GPUs, also as a JSON file.

The file holds NVML's answers and nothing else. Missing answers are null or left out::

    {
      "format": "ringcomm topology 1",
      "machine": "DGX-1", "driver": "470.57.02", "absent": "", "notes": [],
      "gpus": [{"uuid": "GPU-...", "pci_bus_id": "0000:06:00.0", "name": "Tesla V100",
                "numa_node": 0, "cpus": "0-19", "pcie": [3, 16], "mig": false,
                "mig_instances": [], "switch": {"count": 0}}],
      "pairs": [{"first": "0000:06:00.0", "second": "0000:07:00.0", "level": "PIX",
                 "peer_access": true,
                 "nvlinks": {"count": 1, "version": "2.0", "link_gbps": 25.0}}]
    }

A "source" entry, for people, may say where a description comes from.

GPUs are named by UUID or PCI bus id, never by index: NVML numbers all GPUs of the machine, a
process only those that ``CUDA_VISIBLE_DEVICES`` leaves it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from ringcomm.errors import ArgumentError
from ringcomm.json_reader import read_bounded, read_object, shown

__all__ = [
    "LEVELS",
    "Connection",
    "Gpu",
    "NvLinks",
    "Pair",
    "Topology",
    "from_json",
    "load",
    "plain_bus_id",
    "plain_name",
    "save",
    "to_json",
]

# The nearest common ancestor of two GPUs on PCIe, nearest first, in the words of nvidia-smi.
LEVELS = {
    "PSB": "one board",
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches under one host bridge",
    "PHB": "the PCIe host bridge",
    "NODE": "several host bridges of one NUMA node",
    "SYS": "the interconnect between NUMA nodes",
}

_BUS_ID = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})(?:\.([0-7]))?", re.I)


def plain_bus_id(text: str) -> str:
    """Returns a PCI bus id as Linux writes it, ``0000:1b:00.0``; NVML's domain has eight digits.

    Raises:
        ArgumentError: ``text`` is no PCI bus id.
    """
    match = _BUS_ID.fullmatch(text.strip())
    if not match:
        raise ArgumentError(f"PCI bus id: expected one like 0000:1b:00.0, got {shown(text)}")
    domain, bus, device, function = match.groups()
    return f"{int(domain or '0', 16):04x}:{bus}:{device}.{function or 0}".lower()


def plain_name(text: str) -> str:
    """Returns a PCI bus id as :func:`plain_bus_id` does, or a UUID in CUDA's spelling.

    NVML's spelling has a prefix (``GPU-...``, ``MIG-...``), CUDA's has none.
    """
    plain = text.strip().lower()
    if _BUS_ID.fullmatch(plain):
        return plain_bus_id(plain)
    for prefix in ("mig-", "gpu-"):
        plain = plain.removeprefix(prefix)
    return plain


@dataclass(frozen=True)
class NvLinks:
    """NVLinks that run side by side.

    Attributes:
        count: number of active links.
        version: of the links, such as "4.0"; None if unknown.
        link_gbps: 10^9 bytes per second of one link in one direction; None if unknown.
    """

    count: int = 0
    version: str | None = None
    link_gbps: float | None = None

    @property
    def gbps(self) -> float | None:
        """Bandwidth of all links in one direction; None if unknown or if there are none."""
        return self.count * self.link_gbps if self.count and self.link_gbps else None


@dataclass(frozen=True)
class Gpu:
    """One physical GPU. Answers that NVML did not give are None.

    Attributes:
        uuid: as NVML writes it.
        pci_bus_id: as Linux writes it; orders the GPUs.
        numa_node: the CPUs' NUMA node that is nearest.
        cpus: the nearest CPUs, such as "0-19,40-59".
        pcie: generation and lanes of the slot's link at its best, such as (5, 16).
        switch: the NVLinks to NVSwitches.
        mig: whether the GPU is split into instances; they have no NVLink and no peer access.
        mig_instances: the UUIDs of the instances.
    """

    uuid: str
    pci_bus_id: str
    name: str = ""
    numa_node: int | None = None
    cpus: str | None = None
    pcie: tuple[int, int] | None = None
    switch: NvLinks = NvLinks()
    mig: bool | None = None
    mig_instances: tuple[str, ...] = ()

    @property
    def place(self) -> tuple[bool, int, str, str]:
        """A sort key that keeps GPUs of one NUMA node (if unknown, of one CPU list) together."""
        return (self.numa_node is None, self.numa_node or 0, self.cpus or "", self.pci_bus_id)


@dataclass(frozen=True)
class Pair:
    """NVML's answers about two GPUs, which are given by PCI bus id.

    Attributes:
        nvlinks: the NVLinks from one directly to the other.
        level: a key of ``LEVELS``; None if unknown.
        peer_access: whether the driver lets one read the other's memory; None if unknown.
    """

    first: str
    second: str
    nvlinks: NvLinks = NvLinks()
    level: str | None = None
    peer_access: bool | None = None


@dataclass(frozen=True)
class Connection:
    """The best connection between two GPUs.

    Attributes:
        kind: "nvswitch", "nvlink", "pcie", "refused" (no peer access) or "unknown".
        links: the NVLinks that data between the two can use.
        level: a key of ``LEVELS``; None if unknown.
    """

    kind: str
    links: NvLinks = NvLinks()
    level: str | None = None

    def __str__(self) -> str:
        rate = f" ({self.links.gbps:g} GB/s per direction)" if self.links.gbps else ""
        if self.kind == "nvlink":
            return f"{self.links.count} NVLink{'s' * (self.links.count > 1)}{rate}"
        if self.kind == "nvswitch":
            return f"NVSwitch{rate}"
        if self.kind == "pcie":
            return f"PCIe through {LEVELS[self.level or 'SYS']} ({self.level})"
        return "no access to each other's memory" if self.kind == "refused" else "an unknown path"


@dataclass(frozen=True)
class Topology:
    """The GPUs of a machine and the connections between them, in canonical order.

    Attributes:
        machine: a name for people; no decision depends on it.
        gpus: ordered by PCI bus id, however they were given.
        pairs: at most one per two GPUs; a missing one is unknown.
        driver: version of the NVIDIA driver.
        absent: why nothing could be read; "" if it could.
        notes: what could not be read, or looks wrong.

    Raises:
        ArgumentError: two GPUs are one, or a pair names a GPU that is not there.
    """

    machine: str = ""
    gpus: tuple[Gpu, ...] = ()
    pairs: tuple[Pair, ...] = ()
    driver: str | None = None
    absent: str = ""
    notes: tuple[str, ...] = ()
    _by_name: dict[str, Gpu] = field(init=False, repr=False, compare=False)
    _by_ends: dict[frozenset[str], Pair] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.gpus) > MOST_GPUS:
            raise ArgumentError(
                f"topology: expected at most {MOST_GPUS} GPUs of one machine, got {len(self.gpus)}"
            )
        gpus = sorted(self.gpus, key=lambda gpu: gpu.pci_bus_id)
        names = [
            (name, gpu)
            for gpu in gpus
            for name in (gpu.pci_bus_id, *map(plain_name, (gpu.uuid, *gpu.mig_instances)))
        ]
        by_name = dict(names)
        if len(by_name) < len(names):
            twice = sorted({name for name, gpu in names if by_name[name] is not gpu})
            what = ", ".join(twice) or "a name"
            raise ArgumentError(f"topology: each GPU must be there once, but {what} is twice")
        pairs = [
            pair
            if pair.first < pair.second
            else replace(pair, first=pair.second, second=pair.first)
            for pair in self.pairs
        ]
        by_ends = {frozenset((pair.first, pair.second)): pair for pair in pairs}
        buses = [gpu.pci_bus_id for gpu in gpus]
        expected = {frozenset(ends) for ends in combinations(buses, 2)}
        if len(by_ends) < len(pairs) or not by_ends.keys() <= expected:
            wrong = next((set(e) for e in by_ends if e not in expected), "one pair twice")
            raise ArgumentError(f"topology: expected pairs of {buses}, got {wrong}")
        object.__setattr__(self, "gpus", tuple(gpus))
        object.__setattr__(self, "pairs", tuple(sorted(pairs, key=lambda p: (p.first, p.second))))
        object.__setattr__(self, "_by_name", by_name)
        object.__setattr__(self, "_by_ends", by_ends)

    def find(self, name: str) -> Gpu | None:
        """Returns the GPU with this UUID or PCI bus id; None if there is none.

        The UUID may be the GPU's own or an instance's, in NVML's spelling or CUDA's.
        """
        return self._by_name.get(plain_name(name))

    def pair(self, one: Gpu, other: Gpu) -> Pair:
        """Returns the answers about two GPUs; a pair without answers if there are none."""
        first, second = sorted((one.pci_bus_id, other.pci_bus_id))
        return self._by_ends.get(frozenset((first, second)), Pair(first, second))

    def connection(self, one: Gpu, other: Gpu) -> Connection:
        """Returns the best connection of two GPUs, with no more links than both ends have."""
        pair = self.pair(one, other)
        # NVIDIA Multi-Instance GPU User Guide, "Application Considerations": in MIG mode there is
        # no access from GPU to GPU, neither over PCIe nor over NVLink.
        if one.mig or other.mig or pair.peer_access is False:
            return Connection("refused", level=pair.level)
        if pair.nvlinks.count:
            return Connection("nvlink", pair.nvlinks, pair.level)
        if one.switch.count and other.switch.count:
            return Connection("nvswitch", weaker(one.switch, other.switch), pair.level)
        return Connection("pcie" if pair.level else "unknown", level=pair.level)

    def connections(self) -> Iterator[tuple[Gpu, Gpu, Connection]]:
        """Yields every two GPUs once, with their connection."""
        return ((a, b, self.connection(a, b)) for a, b in combinations(self.gpus, 2))


def weaker(one: NvLinks, other: NvLinks) -> NvLinks:
    """Returns the links that two ends agree on: the lower count and speed, and an equal version."""
    speeds = {one.link_gbps, other.link_gbps}
    known = [speed for speed in speeds if speed is not None]
    return NvLinks(
        min(one.count, other.count),
        one.version if one.version == other.version else None,
        min(known) if len(known) == len(speeds) else None,
    )


FORMAT = "ringcomm topology 1"
# A file of 16 GPUs has some 40000 bytes.
LARGEST_BYTES = 16 << 20
# More than any machine has. Every two of them have a connection.
MOST_GPUS = 256

Object = Mapping[str, object]


def to_json(topology: Topology) -> str:
    """Returns the description as JSON text; equal topologies give equal text."""
    values: dict[str, Any] = {"format": FORMAT, **asdict(topology)}
    public = {name: value for name, value in values.items() if not name.startswith("_")}
    return json.dumps(public, indent=1) + "\n"


def from_json(text: str, name: str = "topology") -> Topology:
    """Returns the description that :func:`to_json` wrote.

    Args:
        text: the JSON text.
        name: the file's, for messages.

    Raises:
        ArgumentError: it is not one; the message says where and what was expected.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(
            f"{name}: expected a recorded topology (JSON), but it cannot be parsed: {error}. "
            "Record it again: ringcomm topo --save FILE"
        ) from error
    try:
        return _topology(value)
    except (ArgumentError, ValueError) as error:
        raise ArgumentError(
            f"{name}: not a recorded topology: {error}. Record it again: ringcomm topo --save FILE"
        ) from error


def load(path: str | Path) -> Topology:
    """Reads a recorded description.

    Raises:
        ArgumentError: the file cannot be read, or is damaged.
    """
    try:
        raw = read_bounded(Path(path), LARGEST_BYTES)
        text = raw.decode("utf-8")
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{path}: the recorded topology cannot be read: {error}") from error
    return from_json(text, str(path))


def save(topology: Topology, path: str | Path) -> None:
    """Records a description.

    Raises:
        ArgumentError: the file cannot be written.
    """
    try:
        Path(path).write_text(to_json(topology), encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{path}: the topology cannot be recorded: {error}") from error


def _topology(value: Any) -> Topology:
    """Undoes ``to_json``; missing entries are unknown, but for the names of GPUs."""
    if type(value) is dict:
        written = value.pop("format", "no format")
        if written != FORMAT:
            raise ArgumentError(f"format: expected {FORMAT!r}, got {shown(written)}")
        value.pop("source", None)
    recorded = read_object(_Recorded, value)
    for index, gpu in enumerate(recorded.gpus):
        if gpu.numa_node is not None and gpu.numa_node < 0:
            raise _out_of_range(f"gpus[{index}].numa_node", "a number >= 0", gpu.numa_node)
        _check_links(gpu.switch, f"gpus[{index}].switch")
    for index, pair in enumerate(recorded.pairs):
        if pair.level is not None and pair.level not in LEVELS:
            raise _out_of_range(f"pairs[{index}].level", f"one of {', '.join(LEVELS)}", pair.level)
        _check_links(pair.nvlinks, f"pairs[{index}].nvlinks")
    gpus = [replace(gpu, pci_bus_id=plain_bus_id(gpu.pci_bus_id)) for gpu in recorded.gpus]
    pairs = [
        replace(pair, first=plain_bus_id(pair.first), second=plain_bus_id(pair.second))
        for pair in recorded.pairs
    ]
    return Topology(**{**vars(recorded), "gpus": tuple(gpus), "pairs": tuple(pairs)})


@dataclass(frozen=True)
class _Recorded:
    """The entries of a file, which are those of a :class:`Topology` before they are checked."""

    machine: str = ""
    gpus: tuple[Gpu, ...] = ()
    pairs: tuple[Pair, ...] = ()
    driver: str | None = None
    absent: str = ""
    notes: tuple[str, ...] = ()


def _check_links(links: NvLinks, where: str) -> None:
    if links.count < 0:
        raise _out_of_range(f"{where}.count", "a number >= 0", links.count)
    if links.link_gbps is not None and not 0 < links.link_gbps < math.inf:
        raise _out_of_range(f"{where}.link_gbps", "a number > 0", links.link_gbps)


def _out_of_range(where: str, expected: str, got: object) -> ArgumentError:
    return ArgumentError(f"{where}: expected {expected}, got {shown(got)}")
