"""The reader of NVML (nvidia-ml-py, imported only here and only on call) for this machine.

Sources: NVML API Reference Guide (docs.nvidia.com/deploy/nvml-api), chapters "NvLink Methods",
"Device Queries", "Field Value Enums" and "CPU and Memory Affinity"; the functions are named where
they are called. Constants are spelled out because their Python names come and go with versions of
nvidia-ml-py (``NVML_P2P_CAPS_INDEX_READ``, for one, has been a tuple).
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

from ringcomm.comm.topology.model import Gpu, NvLinks, Pair, Topology, plain_bus_id, weaker
from ringcomm.errors import ArgumentError

__all__ = ["read_machine"]

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

    Answers that cannot be read raise nothing. Without NVML the topology has no GPU and ``absent``
    says why. A missing answer is None, and ``notes`` mention it if it is unusual.
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
        return _Machine(_Nvml(pynvml)).read(machine)
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


@dataclass
class _Nvml:
    """NVML functions by name; a question that this driver or device does not answer gives None."""

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
        # These mean "there is none" or "this driver is too old", which is not worth a note.
        usual = ("NotSupported", "InvalidArgument", "FunctionNotFound", "NotFound")
        if type(error).__name__ not in {f"NVMLError_{name}" for name in usual}:
            note = f"{function}: {error}"
            if note not in self.notes:
                self.notes.append(note)


@dataclass
class _Links:
    """The active NVLinks of one GPU, by their other end."""

    to_gpu: dict[str, NvLinks]
    to_switch: NvLinks


class _Machine:
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
        """Asks nvmlDeviceGetPciInfo or nvmlDeviceGetNvLinkRemotePciInfo_v2 for a bus id.

        The Python name of the latter has no suffix.
        """
        info = self._nvml.ask(function, *arguments)
        text = getattr(info, "busId", None)
        if isinstance(text, bytes):
            text = text.decode(errors="replace")
        try:
            return plain_bus_id(text) if text else None
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
        # Not nvmlDeviceGetNumaNodeId: that is the node of the GPU's own memory, where it has one.
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

    def _links(self, bus_id: str) -> _Links:
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
        return _Links(bundles, switch)

    def _far_end(self, handle: Any, link: int) -> str:
        """Returns a bus id, "switch", "cpu", or words for an end that cannot be used."""
        kind = self._nvml.ask("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
        if kind == REMOTE_SWITCH:
            return "switch"
        bus_id = self._bus_id("nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
        # A driver that does not know the kind (before R460) still knows the address.
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

    def _pair(self, first: str, second: str, links: dict[str, _Links]) -> Pair:
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
