# SPDX-License-Identifier: Apache-2.0
"""The connections between one machine's GPUs, and the rings and algorithms planned for them.

A topology file holds NVML's answers and nothing else. Missing answers are null or left out::

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

An optional "source" entry says, for people, where a description comes from.

GPUs are named by UUID or PCI bus id, never by index: NVML numbers all GPUs of the machine, but a
process numbers only the GPUs in ``CUDA_VISIBLE_DEVICES``.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

from ringcomm.errors import ArgumentError
from ringcomm.json_reader import read_bounded, read_object, reason, shown

__all__ = [
    "LEVELS",
    "SEARCHED_DEVICES",
    "Connection",
    "Gpu",
    "NvLinks",
    "Pair",
    "Topology",
    "TopologyChoice",
    "best_ring",
    "from_json",
    "hops",
    "host_choice",
    "load",
    "mesh_rings",
    "normalized_bus_id",
    "normalized_name",
    "read_machine",
    "save",
]


# The kinds of nearest common ancestor of two GPUs on PCIe, nearest first, named as by nvidia-smi.
LEVELS = {
    "PSB": "one board",
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches under one host bridge",
    "PHB": "the PCIe host bridge",
    "NODE": "several host bridges of one NUMA node",
    "SYS": "the interconnect between NUMA nodes",
}

_BUS_ID = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})(?:\.([0-7]))?", re.I)


def normalized_bus_id(text: str) -> str:
    """Returns a PCI bus id as Linux writes it, ``0000:1b:00.0``; NVML's domain has eight digits.

    Raises:
        ArgumentError: ``text`` is not a PCI bus id.
    """
    match = _BUS_ID.fullmatch(text.strip())
    if not match:
        raise ArgumentError(f"PCI bus id: expected one like 0000:1b:00.0, got {shown(text)}")
    domain, bus, device, function = match.groups()
    return f"{int(domain or '0', 16):04x}:{bus}:{device}.{function or 0}".lower()


def normalized_name(text: str) -> str:
    """Returns a PCI bus id as :func:`normalized_bus_id` does, or a UUID in CUDA's spelling.

    NVML's spelling has a prefix (``GPU-...``, ``MIG-...``), CUDA's has none.
    """
    name = text.strip().lower()
    if _BUS_ID.fullmatch(name):
        return normalized_bus_id(name)
    for prefix in ("mig-", "gpu-"):
        name = name.removeprefix(prefix)
    return name


@dataclass(frozen=True)
class NvLinks:
    """Parallel NVLinks between two ends.

    Attributes:
        count: number of active links.
        version: NVLink version, such as "4.0"; None if unknown.
        link_gbps: bandwidth of one link in one direction, in 10^9 bytes per second; None if
            unknown.
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
        pci_bus_id: as Linux writes it; GPUs are sorted by it.
        numa_node: the nearest NUMA node with CPUs.
        cpus: the nearest CPUs, such as "0-19,40-59".
        pcie: highest PCIe generation and number of lanes of the slot's link, such as (5, 16).
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
    def position(self) -> tuple[bool, int, str, str]:
        """A sort key that keeps GPUs of one NUMA node (if unknown, of one CPU list) together."""
        return (self.numa_node is None, self.numa_node or 0, self.cpus or "", self.pci_bus_id)


@dataclass(frozen=True)
class Pair:
    """NVML's answers about two GPUs, which are given by PCI bus id.

    Attributes:
        nvlinks: the NVLinks that directly connect the two GPUs.
        level: a key of ``LEVELS``; None if unknown.
        peer_access: whether the driver lets one GPU read the other's memory; None if unknown.
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
        pairs: at most one per two GPUs; the connection of a missing pair is unknown.
        driver: version of the NVIDIA driver.
        absent: why no GPU could be read; "" if GPUs could be read.
        notes: messages about answers that could not be read or look wrong.

    Raises:
        ArgumentError: a GPU appears twice, or a pair names a GPU that is not in ``gpus``.
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
            for name in (gpu.pci_bus_id, *map(normalized_name, (gpu.uuid, *gpu.mig_instances)))
        ]
        by_name = dict(names)
        if len(by_name) < len(names):
            twice = sorted({name for name, gpu in names if by_name[name] is not gpu})
            what = ", ".join(twice) or "a name"
            raise ArgumentError(f"topology: expected each GPU once, but {what} appears twice")
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
        return self._by_name.get(normalized_name(name))

    def pair(self, one: Gpu, other: Gpu) -> Pair:
        """Returns the answers about two GPUs; a pair without answers if there are none."""
        first, second = sorted((one.pci_bus_id, other.pci_bus_id))
        return self._by_ends.get(frozenset((first, second)), Pair(first, second))

    def connection(self, one: Gpu, other: Gpu) -> Connection:
        """Returns the best connection of two GPUs, with at most the links that both ends have."""
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

    def visible_devices(self, environment: Mapping[str, str]) -> list[str]:
        """Returns the names of the GPUs, or MIG instances, that a CUDA process sees, in its order.

        ``CUDA_VISIBLE_DEVICES`` lists numbers or beginnings of UUIDs; CUDA reads it up to the first
        entry that does not exist (CUDA C++ Programming Guide, "CUDA Environment Variables"). NVML
        ignores it. Here GPUs are numbered by PCI bus id; CUDA does this if all are of one model.
        """
        everything = [
            name for gpu in self.gpus for name in (gpu.mig_instances or (gpu.pci_bus_id,))
        ]
        if "CUDA_VISIBLE_DEVICES" not in environment:
            return everything
        found: list[str] = []
        for word in environment["CUDA_VISIBLE_DEVICES"].split(","):
            name = self._visible_device(word.strip())
            if name is None:
                break
            if name in found:
                return []  # CUDA treats a repetition as an error and shows no device
            found.append(name)
        return found

    def _visible_device(self, word: str) -> str | None:
        if word.isdecimal():
            if int(word) >= len(self.gpus):
                return None
            gpu = self.gpus[int(word)]
            return gpu.mig_instances[0] if gpu.mig_instances else gpu.pci_bus_id
        prefix = normalized_name(word)
        for gpu in self.gpus if prefix else ():
            for instance in gpu.mig_instances:
                if normalized_name(instance).startswith(prefix):
                    return instance
            if normalized_name(gpu.uuid).startswith(prefix):
                return gpu.pci_bus_id
        return None

    def choose(self, placements: Sequence[str | None]) -> TopologyChoice:
        """Chooses algorithm and rings for a world whose ranks all run on this machine.

        Args:
            placements: for each rank, the UUID (NVML's spelling or CUDA's) or PCI bus id of its
                GPU; None if unknown. Ranks with equal placements share the GPU.

        Returns:
            A choice even if connections are unknown. It then assumes no links, and its reason says
            so.

        Raises:
            ArgumentError: there is no rank.
        """
        if not placements:
            raise ArgumentError("choose: expected the GPU of at least one rank, got none")
        devices = _devices(self, placements)
        between = {
            (a, b): _connection(self, one, other)
            for (a, one), (b, other) in combinations(enumerate(devices), 2)
        }
        algorithm, why = _algorithm(devices, between)
        rings, about_rings = _rings(devices, between)
        told = [why, about_rings, *_troubles(self, devices, between)]
        ranks = tuple(_expand(ring, devices) for ring in rings)
        return TopologyChoice(algorithm, ranks, "; ".join(part for part in told if part))

    def rings_gbps(self, placements: Sequence[str | None], rings: Sequence[Ring]) -> float | None:
        """Computes the bandwidth of rings that run at once with equal shares of the data.

        Returns:
            The bandwidth through every rank in one direction, in 10^9 bytes per second, computed
            from the NVLinks' data rate; None if a hop is not NVLink or is unknown, or if all ranks
            share a GPU.
        """
        devices = _devices(self, placements)
        home = {rank: index for index, device in enumerate(devices) for rank in device.ranks}
        load: dict[tuple[int, int], int] = {}
        for ring in rings:
            for sender, receiver in hops(ring):
                ends = (home[sender], home[receiver])
                if ends[0] != ends[1]:
                    load[ends] = load.get(ends, 0) + 1
        shares = []
        for (a, b), times in load.items():
            connection = _connection(self, devices[a], devices[b])
            if connection.links.gbps is None:
                return None
            # Hops from one GPU into the switch share the GPU's links. Direct links serve one pair.
            if connection.kind == "nvswitch":
                times = sum(n for (sender, _), n in load.items() if sender == a)
            shares.append(connection.links.gbps / times)
        return len(rings) * min(shares) if shares else None

    def to_json(self) -> str:
        """Returns the description as JSON text; equal topologies give equal text."""
        values: dict[str, Any] = {"format": FORMAT, **asdict(self)}
        public = {name: value for name, value in values.items() if not name.startswith("_")}
        return json.dumps(public, indent=1) + "\n"


def weaker(one: NvLinks, other: NvLinks) -> NvLinks:
    """Returns the lower count and the lower speed of two ends, and their version if equal."""
    speeds = {one.link_gbps, other.link_gbps}
    known = [speed for speed in speeds if speed is not None]
    return NvLinks(
        min(one.count, other.count),
        one.version if one.version == other.version else None,
        min(known) if len(known) == len(speeds) else None,
    )


FORMAT = "ringcomm topology 1"
# A file of 16 GPUs has about 40,000 bytes.
LARGEST_BYTES = 16 << 20
# More GPUs than any machine has; a topology stores a connection for every two GPUs.
MOST_GPUS = 256

Object = Mapping[str, object]


def from_json(text: str, name: str = "topology") -> Topology:
    """Returns the description that :func:`to_json` wrote.

    Args:
        text: the JSON text.
        name: the file's name, for messages.

    Raises:
        ArgumentError: ``text`` is not a topology; the message says where, and what was expected.
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
        raise ArgumentError(
            f"{path}: the recorded topology cannot be read: {reason(error)}"
        ) from error
    return from_json(text, str(path))


def save(topology: Topology, path: str | Path) -> None:
    """Records a description.

    Raises:
        ArgumentError: the file cannot be written.
    """
    try:
        Path(path).write_text(topology.to_json(), encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{path}: the topology cannot be recorded: {reason(error)}") from error


def _topology(value: Any) -> Topology:
    """Reads what ``to_json`` wrote. A missing entry is unknown; a GPU must have uuid and bus id."""
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
    gpus = [replace(gpu, pci_bus_id=normalized_bus_id(gpu.pci_bus_id)) for gpu in recorded.gpus]
    pairs = [
        replace(pair, first=normalized_bus_id(pair.first), second=normalized_bus_id(pair.second))
        for pair in recorded.pairs
    ]
    return Topology(**{**vars(recorded), "gpus": tuple(gpus), "pairs": tuple(pairs)})


@dataclass(frozen=True)
class _Recorded:
    """The entries of a file: the fields of a :class:`Topology`, not yet checked."""

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


# ---- The reader of NVML for this machine; its functions import nvidia-ml-py when called ----------
# Sources: NVML API Reference Guide (docs.nvidia.com/deploy/nvml-api), chapters "NvLink Methods",
# "Device Queries", "Field Value Enums" and "CPU and Memory Affinity"; the functions are named where
# they are called. Constants are written as numbers because nvidia-ml-py changes its names for them
# from version to version (``NVML_P2P_CAPS_INDEX_READ`` was once a tuple).


MAX_LINKS = 36  # NVML_NVLINK_MAX_LINKS of the newest header
REMOTE_GPU, REMOTE_SWITCH, REMOTE_UNKNOWN = 0x00, 0x02, 0xFF  # nvmlIntNvLinkDeviceType_t
CAP_P2P_SUPPORTED = 0  # nvmlNvLinkCapability_t
P2P_READ, P2P_OK = 0, 0  # nvmlGpuP2PCapsIndex_t, nvmlGpuP2PStatus_t
AFFINITY_NODE = 0  # nvmlAffinityScope_t
FIELD_LINK_SPEED, FIELD_COMMON_SPEED = 164, 90  # NVML_FI_DEV_NVLINK_GET_SPEED, .._MBPS_COMMON
LEVEL_NAMES = {0: "PSB", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
# nvmlNvlinkVersion_t, and the published data rate of one link in one direction in GB/s: 20 (P100
# whitepaper), 25 (V100, A100 and H100 whitepapers), 50 (Blackwell architecture brief). The driver
# reports the line rate, which is a few percent more (25.781, 26.562).
VERSIONS = {1: "1.0", 2: "2.0", 3: "2.2", 4: "3.0", 5: "3.1", 6: "4.0", 7: "5.0", 8: "6.0"}
DATA_RATES = {"1.0": 20.0, "2.0": 25.0, "2.2": 25.0, "3.0": 25.0, "3.1": 25.0, "4.0": 25.0}
DATA_RATES["5.0"] = 50.0


def read_machine() -> Topology:
    """Reads NVML's answers about all GPUs of this machine, regardless of ``CUDA_VISIBLE_DEVICES``.

    A failed query raises no error: its answer is None, and ``notes`` has the error unless the error
    is a usual one. Without NVML the topology has no GPU and ``absent`` says why.
    """
    machine = platform.node()
    try:
        import pynvml
    except (ImportError, OSError) as error:
        why = f"nvidia-ml-py is not installed ({error}): pip install nvidia-ml-py"
        return Topology(machine=machine, absent=why)
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError, AttributeError, OSError) as error:
        return Topology(machine=machine, absent=f"NVML does not start: {error}")
    try:
        return _MachineReader(_Nvml(pynvml)).read(machine)
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


@dataclass
class _Nvml:
    """Calls NVML functions by name; returns None if this driver or device does not answer."""

    module: Any
    notes: list[str] = field(default_factory=list)

    def ask(self, function: str, *arguments: object) -> Any:
        call = getattr(self.module, function, None)
        if call is None:
            return None
        try:
            value = call(*arguments)
        except self.module.NVMLError as error:
            self._note(function, error)
            return None
        return value.decode(errors="replace") if isinstance(value, bytes) else value

    def _note(self, function: str, error: Exception) -> None:
        # These errors mean "there is none" or "the driver is too old": no note is needed.
        usual = ("NotSupported", "InvalidArgument", "FunctionNotFound", "NotFound")
        if type(error).__name__ not in {f"NVMLError_{name}" for name in usual}:
            note = f"{function}: {error}"
            if note not in self.notes:
                self.notes.append(note)


@dataclass
class _DeviceLinks:
    """The active NVLinks of one GPU, by their other end."""

    to_gpu: dict[str, NvLinks]
    to_switch: NvLinks


class _MachineReader:
    def __init__(self, nvml: _Nvml) -> None:
        self._nvml = nvml
        self._handles: dict[str, Any] = {}
        self._uuids: dict[str, str] = {}

    def read(self, machine: str) -> Topology:
        count = self._nvml.ask("nvmlDeviceGetCount")
        if count is None:
            return Topology(machine=machine, absent=f"NVML counts no GPUs: {self._nvml.notes}")
        for index in range(count):
            self._find(index)
        links = {bus_id: self._links(bus_id) for bus_id in self._handles}
        gpus = tuple(self._gpu(bus_id, links[bus_id].to_switch) for bus_id in self._handles)
        pairs = tuple(self._pair(*ends, links) for ends in combinations(self._handles, 2))
        driver = self._nvml.ask("nvmlSystemGetDriverVersion")
        absent = "" if gpus else "NVML finds no GPU that it can name"
        notes = tuple(self._nvml.notes)
        return Topology(machine, gpus, pairs, driver, absent, notes)

    def _find(self, index: int) -> None:
        handle = self._nvml.ask("nvmlDeviceGetHandleByIndex", index)
        bus_id = None if handle is None else self._bus_id("nvmlDeviceGetPciInfo", handle)
        uuid = None if bus_id is None else self._nvml.ask("nvmlDeviceGetUUID", handle)
        if bus_id is None or uuid is None:
            self._nvml.notes.append(f"GPU {index} of NVML has no name; it is left out")
        elif bus_id in self._handles or uuid in self._uuids.values():
            self._nvml.notes.append(f"GPU {index} of NVML repeats another; it is left out")
        else:
            self._handles[bus_id] = handle
            self._uuids[bus_id] = uuid

    def _bus_id(self, function: str, *arguments: object) -> str | None:
        """Reads a bus id by nvmlDeviceGetPciInfo or nvmlDeviceGetNvLinkRemotePciInfo_v2.

        The Python name of the latter has no suffix.
        """
        info = self._nvml.ask(function, *arguments)
        text = getattr(info, "busId", None)
        if isinstance(text, bytes):
            text = text.decode(errors="replace")
        try:
            return normalized_bus_id(text) if text else None
        except ArgumentError:
            return None

    def _gpu(self, bus_id: str, switch: NvLinks) -> Gpu:
        handle, ask = self._handles[bus_id], self._nvml.ask
        pcie = (
            ask("nvmlDeviceGetMaxPcieLinkGeneration", handle),
            ask("nvmlDeviceGetMaxPcieLinkWidth", handle),
        )
        mig = ask("nvmlDeviceGetMigMode", handle)
        enabled = None if mig is None else bool(mig[0])
        return Gpu(
            uuid=self._uuids[bus_id],
            pci_bus_id=bus_id,
            name=ask("nvmlDeviceGetName", handle) or "",
            numa_node=self._numa_node(handle),
            cpus=self._cpus(handle),
            pcie=None if None in pcie else pcie,
            switch=switch,
            mig=enabled,
            mig_instances=tuple(self._mig_instances(handle)) if enabled else (),
        )

    def _numa_node(self, handle: Any) -> int | None:
        # Do not use nvmlDeviceGetNumaNodeId: it returns the node of the GPU's own memory, if any.
        words = self._nvml.ask("nvmlDeviceGetMemoryAffinity", handle, 16, AFFINITY_NODE)
        nodes = _bits(words)
        return nodes[0] if len(nodes) == 1 else None

    def _cpus(self, handle: Any) -> str | None:
        words = -(-(os.cpu_count() or 1) // 64)
        return _ranges(_bits(self._nvml.ask("nvmlDeviceGetCpuAffinity", handle, words))) or None

    def _mig_instances(self, handle: Any) -> list[str]:
        most = self._nvml.ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0
        parts = (
            self._nvml.ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, i) for i in range(most)
        )
        uuids = (self._nvml.ask("nvmlDeviceGetUUID", part) for part in parts if part is not None)
        return [uuid for uuid in uuids if uuid is not None]

    def _links(self, bus_id: str) -> _DeviceLinks:
        """Reads a GPU's links (nvmlDeviceGetNvLinkState, .._RemoteDeviceType, .._RemotePciInfo)."""
        handle = self._handles[bus_id]
        ends: dict[str, list[NvLinks]] = {}
        astray: Counter[str] = Counter()
        for link in range(MAX_LINKS):
            if not self._nvml.ask("nvmlDeviceGetNvLinkState", handle, link):
                continue
            can = self._nvml.ask("nvmlDeviceGetNvLinkCapability", handle, link, CAP_P2P_SUPPORTED)
            if can == 0:
                continue
            end = self._far_end(handle, link)
            if end in self._handles or end == "switch":
                ends.setdefault(end, []).append(self._link(handle, link))
            elif end != "cpu":
                astray[end] += 1
        for end, count in astray.items():
            self._nvml.notes.append(f"{count} NVLinks of {bus_id} lead to {end}; not counted")
        bundles = {end: _bundle(links) for end, links in ends.items()}
        switch = bundles.pop("switch", NvLinks())
        return _DeviceLinks(bundles, switch)

    def _far_end(self, handle: Any, link: int) -> str:
        """Returns a link's other end: bus id, "switch", "cpu", or why the end is unusable."""
        kind = self._nvml.ask("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
        if kind == REMOTE_SWITCH:
            return "switch"
        bus_id = self._bus_id("nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
        # A driver before R460 reports only the address of the link's other end, not its kind.
        if kind in (REMOTE_GPU, REMOTE_UNKNOWN, None):
            if bus_id in self._handles:
                return str(bus_id)
            return f"{bus_id}, which is no GPU seen here" if bus_id else "an unnamed device"
        return "cpu"

    def _link(self, handle: Any, link: int) -> NvLinks:
        number = self._nvml.ask("nvmlDeviceGetNvLinkVersion", handle, link)
        version = VERSIONS.get(number)
        rates = [DATA_RATES.get(version or ""), self._line_rate(handle, link)]
        return NvLinks(1, version, min((rate for rate in rates if rate), default=None))

    def _line_rate(self, handle: Any, link: int) -> float | None:
        for which in ((FIELD_LINK_SPEED, link), (FIELD_COMMON_SPEED, 0)):
            values = self._nvml.ask("nvmlDeviceGetFieldValues", handle, [which])
            if values is not None and values[0].nvmlReturn == 0 and values[0].value.uiVal:
                return float(values[0].value.uiVal) / 1000  # the field is in MB/s
        return None

    def _pair(self, first: str, second: str, links: dict[str, _DeviceLinks]) -> Pair:
        there, back = links[first].to_gpu.get(second), links[second].to_gpu.get(first)
        nvlinks = weaker(there or NvLinks(), back or NvLinks())
        if (there and there.count) != (back and back.count):
            self._nvml.notes.append(
                f"{first} has {there.count if there else 0} NVLinks to {second}, which has "
                f"{back.count if back else 0} back; {nvlinks.count} are counted"
            )
        ends = (self._handles[first], self._handles[second])
        level = self._nvml.ask("nvmlDeviceGetTopologyCommonAncestor", *ends)
        status = self._nvml.ask("nvmlDeviceGetP2PStatus", *ends, P2P_READ)
        access = None if status is None else status == P2P_OK
        return Pair(first, second, nvlinks, LEVEL_NAMES.get(level), access)


def _bundle(links: list[NvLinks]) -> NvLinks:
    joint = links[0]
    for link in links[1:]:
        joint = weaker(joint, link)
    return replace(joint, count=len(links))


def _bits(words: Any) -> list[int]:
    """Returns the numbers of the bits that are set in NVML's array of 64-bit words."""
    return [64 * i + b for i, word in enumerate(words or ()) for b in range(64) if word >> b & 1]


def _ranges(numbers: list[int]) -> str:
    """Formats ``[0, 1, 2, 5]`` as "0-2,5"."""
    firsts = [n for n in numbers if n - 1 not in numbers]
    lasts = [n for n in numbers if n + 1 not in numbers]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(firsts, lasts, strict=True))


# ---- The choice of a world's algorithm family and rings from the connections between its GPUs ---
# The choice depends only on the topology and the ranks' GPUs. Ranks with equal input make the same
# choice without a message.
#
# For the cost of ring and one-shot see docs/algorithms.md.


# A *ring* is an order of all devices. The device at position i sends to the device at position
# i + 1, the last to the first. An NVLink is full duplex: a ring uses one direction of each of its
# links, and the reversed ring uses the other direction.

# The search can enumerate (8 - 1)! orders, and no machine without a switch has more GPUs.
SEARCHED_DEVICES = 8
# The most GPUs with direct links between all pairs in a machine of sm_80 or later (HGX A100 4-GPU).
MESH_DEVICES = 4

Ring = tuple[int, ...]
Matrix = Sequence[Sequence[float]]


def mesh_rings(count: int) -> tuple[Ring, ...]:
    """Returns the rings of devices with links between all pairs: all orders that begin with 0.

    Each direction of each link is in (count - 2)! rings, so with equal shares of the data no link
    idles.
    """
    return tuple(_orders(count, directed=True))


def best_ring(quality: Matrix) -> Ring:
    """Returns the ring whose worst hop is best; ties are broken by the next worst hop, and so on.

    Args:
        quality: symmetric [n, n], larger is better, n from 1 to ``SEARCHED_DEVICES``.
    """
    orders = _orders(len(quality), directed=False)
    return max(orders, key=lambda ring: sorted(quality[a][b] for a, b in hops(ring)))


def hops(ring: Ring) -> Iterator[tuple[int, int]]:
    """Yields the sender and receiver of every hop of a ring."""
    return ((ring[at - 1], ring[at]) for at in range(len(ring)))


def _orders(count: int, directed: bool) -> Iterator[Ring]:
    for rest in permutations(range(1, count)):
        if directed or count < 3 or rest[0] < rest[-1]:
            yield (0, *rest)


@dataclass(frozen=True)
class TopologyChoice:
    """The algorithm and the rings of a world.

    Attributes:
        algorithm: "one_shot" (every rank reads from every other) or "ring" (from one neighbour).
        rings: orders of all ranks, each beginning with rank 0; the rank at position i sends to the
            rank at position i + 1, the last to the first. Several rings run at once with equal
            shares of the data, and no direction of an NVLink idles. The choice "one_shot" also has
            rings, since a call may request "ring".
        reason: why this choice was made, for people.
    """

    algorithm: str
    rings: tuple[Ring, ...]
    reason: str


@dataclass(frozen=True)
class _SharedDevice:
    """A device of one or more ranks: a GPU, an instance of a GPU, or an unknown device."""

    ranks: tuple[int, ...]
    gpu: Gpu | None
    instance: bool = False

    @property
    def known(self) -> bool:
        return self.gpu is not None

    def __str__(self) -> str:
        gpu = f"{self.gpu.name or 'GPU'} {self.gpu.pci_bus_id}" if self.gpu else "an unknown GPU"
        return f"an instance of {gpu}" if self.instance else gpu


def host_choice(ranks: int) -> TopologyChoice:
    """Returns the choice for ranks on CPUs: shared memory acts as a switch (docs/algorithms.md)."""
    reason = "ranks on CPUs share memory, so that every peer is one hop away"
    return TopologyChoice("one_shot", (tuple(range(ranks)),), reason)


def _devices(topology: Topology, placements: Sequence[str | None]) -> list[_SharedDevice]:
    """Lists the devices in canonical order: by NUMA node, then by bus id.

    Devices of unknown position follow, by their first rank.
    """
    ranks: dict[str, list[int]] = {}
    for rank, name in enumerate(placements):
        gpu = topology.find(name) if name is not None else None
        key = f"rank {rank}" if name is None else normalized_name(name)
        if gpu is not None and not _is_instance(gpu, name):
            key = gpu.pci_bus_id
        ranks.setdefault(key, []).append(rank)
    devices = []
    for members in ranks.values():
        name = placements[members[0]]
        gpu = topology.find(name) if name is not None else None
        instance = gpu is not None and _is_instance(gpu, name)
        devices.append(_SharedDevice(tuple(members), gpu, instance))
    return sorted(
        devices,
        key=lambda d: (not d.known, d.gpu.position if d.gpu else (), d.ranks[0]),
    )


def _is_instance(gpu: Gpu, name: str | None) -> bool:
    return name is not None and normalized_name(name) in map(normalized_name, gpu.mig_instances)


def _connection(topology: Topology, one: _SharedDevice, other: _SharedDevice) -> Connection:
    if one.gpu is None or other.gpu is None:
        return Connection("unknown")
    if one.gpu is other.gpu:
        # Two MIG instances of one GPU instance could share memory, but their names do not show
        # that they belong to one GPU instance.
        return Connection("refused")
    return topology.connection(one.gpu, other.gpu)


def _algorithm(
    devices: list[_SharedDevice], between: dict[tuple[int, int], Connection]
) -> tuple[str, str]:
    world = sum(len(device.ranks) for device in devices)
    if world == 1:
        return "one_shot", "one rank has no peer"
    if len(devices) == 1:
        return "one_shot", f"all {world} ranks share {devices[0]}"
    connections = list(between.values())
    worst = min(connections, key=_quality)
    if world == 2:
        return "one_shot", f"one peer is one hop away, over {worst}"
    gpus = f"all {len(devices)} GPUs" if len(devices) > 2 else "both GPUs"
    if all(each.kind == "nvswitch" for each in connections):
        return "one_shot", f"{gpus} are on {worst}, so that every peer is one hop away"
    bundles = {(each.links.count, each.links.link_gbps) for each in connections}
    if len(bundles) == 1 and worst.kind == "nvlink":
        return "one_shot", f"{gpus} are joined pair by pair by {worst}"
    return "ring", _why_ring(devices, between)


def _why_ring(devices: list[_SharedDevice], between: dict[tuple[int, int], Connection]) -> str:
    counts = [each.links.count for each in between.values()]
    if min(counts) > 0:
        return f"pairs of GPUs have different NVLinks, {min(counts)} to {max(counts)}"
    (a, b), worst = min(between.items(), key=lambda item: (_quality(item[1]), item[0]))
    ranks = f"ranks {devices[a].ranks[0]} and {devices[b].ranks[0]}"
    if worst.kind == "unknown":
        return f"the connection between {ranks} is not known"
    return f"not all pairs of GPUs have NVLink: {ranks} have {worst}"


def _troubles(
    topology: Topology, devices: list[_SharedDevice], between: dict[tuple[int, int], Connection]
) -> list[str]:
    """Returns the problems that a user should know before trusting the choice."""
    told = []
    unknown = [device.ranks[0] for device in devices if not device.known]
    if topology.absent:
        told.append(f"the GPUs' connections are not known: {topology.absent}")
    elif unknown:
        told.append(f"the GPU of rank {unknown[0]} is not in the topology")
    refused = [ends for ends, each in between.items() if each.kind == "refused"]
    if refused:
        pair = [devices[index] for index in refused[0]]
        ranks = f"ranks {pair[0].ranks[0]} and {pair[1].ranks[0]}"
        if any(device.gpu and device.gpu.mig for device in pair):
            told.append(f"{ranks} are in different MIG instances, which share no memory")
        else:
            told.append(f"the driver gives {ranks} no access to each other's memory")
    return told


def _rings(
    devices: list[_SharedDevice], between: dict[tuple[int, int], Connection]
) -> tuple[tuple[Ring, ...], str]:
    """Returns rings of the devices, and a text about them for the choice's reason."""
    count = len(devices)
    canonical = tuple(range(count))
    if count < 3 or all(each.kind == "nvswitch" for each in between.values()):
        return (canonical,), ""
    if not all(device.known for device in devices):
        return (canonical,), "the ring follows the ranks, with the ranks of one GPU together"
    if count > SEARCHED_DEVICES:
        return (canonical,), "the ring goes through the NUMA nodes one after the other"
    if count <= MESH_DEVICES and all(each.kind == "nvlink" for each in between.values()):
        rings = mesh_rings(count)
        return rings, f"rings: {len(rings)}, with NVLink at every hop"
    quality = [[_quality(_either(between, a, b)) for b in range(count)] for a in range(count)]
    ring = best_ring(quality)
    worst = min((_either(between, a, b) for a, b in hops(ring)), key=_quality)
    about = "" if worst.kind == "refused" else f"the slowest hop of the best ring is {worst}"
    return (ring,), about


def _either(between: dict[tuple[int, int], Connection], a: int, b: int) -> Connection:
    return between[min(a, b), max(a, b)] if a != b else Connection("unknown")


def _quality(connection: Connection) -> float:
    """Returns a sort key of a connection; a better connection has a larger key."""
    levels = {"SYS": 1, "NODE": 2, "PHB": 3, "PXB": 4, "PIX": 5, "PSB": 6}
    if connection.kind in ("nvlink", "nvswitch"):
        return 100 + (connection.links.gbps or connection.links.count)
    return 0 if connection.kind == "refused" else levels.get(connection.level or "", 0.5)


def _expand(ring: Ring, devices: list[_SharedDevice]) -> Ring:
    """Returns the ranks in the order of a ring of devices, beginning with rank 0."""
    ranks = [rank for index in ring for rank in devices[index].ranks]
    start = ranks.index(0)
    return (*ranks[start:], *ranks[:start])
