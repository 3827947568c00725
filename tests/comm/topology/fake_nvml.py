# SPDX-License-Identifier: Apache-2.0
"""A fake NVML with nvidia-ml-py's interface, which answers from a recorded topology."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

from ringcomm.comm.device.topology import Gpu, Topology, load

RECORDINGS = Path(__file__).parent / "topologies"
NAMES = sorted(path.stem for path in RECORDINGS.glob("*.json"))
LEVEL_NUMBERS = {"PSB": 0, "PIX": 10, "PXB": 20, "PHB": 30, "NODE": 40, "SYS": 50}
VERSION_NUMBERS = {"1.0": 1, "2.0": 2, "2.2": 3, "3.0": 4, "3.1": 5, "4.0": 6, "5.0": 7}
SWITCH = "switch"
# The name of a GPU that no recording contains.
ELSEWHERE = "GPU-ffffffff-0000-0000-0000-000000000000"


class NVMLError(Exception):
    """The error class of nvidia-ml-py, which has one subclass per error code."""


class NVMLError_NotSupported(NVMLError): ...


class NVMLError_FunctionNotFound(NVMLError): ...


class NVMLError_InvalidArgument(NVMLError): ...


class NVMLError_DriverNotLoaded(NVMLError): ...


class NVMLError_Unknown(NVMLError): ...


@cache
def recorded(name: str) -> Topology:
    return load(RECORDINGS / f"{name}.json")


def words_of(numbers: list[int], count: int) -> list[int]:
    """Encodes a set of numbers as `count` 64-bit words."""
    return [sum(1 << n - 64 * i for n in numbers if n // 64 == i) for i in range(count)]


class FakeNvml:
    """Replaces the module ``pynvml``.

    Args:
        topology: the source of the answers.
        errors: by function name, the error that it raises instead of answering.
        lacking: functions that this version does not have.
        answers: by function name, a replacement, which gets the function as its first argument.
    """

    NVMLError = NVMLError

    def __init__(self, topology, *, errors=None, lacking=(), answers=None):
        self._gpus = topology.gpus
        self._topology = topology
        self._errors = dict(errors or {})
        self._lacking = set(lacking)
        self._answers = dict(answers or {})
        self._links = [self._links_of(gpu) for gpu in topology.gpus]
        self.open = 0

    def __getattribute__(self, name):
        if not name.startswith("nvml"):
            return super().__getattribute__(name)
        if name in self._lacking:
            raise AttributeError(name)
        if name in self._errors:
            return self._raising(name)
        function = super().__getattribute__(name)
        if name in self._answers:
            return partial(self._answers[name], function)
        return function

    def _raising(self, name):
        def call(*arguments):
            raise self._errors[name]

        return call

    def _links_of(self, gpu: Gpu) -> list[tuple[object, object]]:
        """Returns for each link of a GPU its far end, and the group of links that it belongs to."""
        found: list[tuple[object, object]] = []
        for other in self._gpus:
            if other is not gpu:
                links = self._topology.pair(gpu, other).nvlinks
                found += [(other.pci_bus_id, links)] * links.count
        return found + [(SWITCH, gpu.switch)] * gpu.switch.count

    def _link(self, handle, link):
        if link >= len(self._links[handle]):
            raise NVMLError_InvalidArgument("Invalid Argument")
        return self._links[handle][link]

    def nvmlInit(self):
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlSystemGetDriverVersion(self):
        return (self._topology.driver or "").encode()

    def nvmlDeviceGetCount(self):
        return len(self._gpus)

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetUUID(self, handle):
        if isinstance(handle, tuple):
            return self._gpus[handle[0]].mig_instances[handle[1]]
        return self._gpus[handle].uuid

    def nvmlDeviceGetName(self, handle):
        return self._gpus[handle].name

    def nvmlDeviceGetPciInfo(self, handle):
        return SimpleNamespace(busId=f"0000{self._gpus[handle].pci_bus_id}".upper().encode())

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle):
        return self._gpus[handle].pcie[0]

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle):
        return self._gpus[handle].pcie[1]

    def nvmlDeviceGetMigMode(self, handle):
        mode = int(self._gpus[handle].mig)
        return [mode, mode]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle):
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle, index):
        if index >= len(self._gpus[handle].mig_instances):
            raise NVMLError_NotSupported("Not Supported")
        return (handle, index)

    def nvmlDeviceGetMemoryAffinity(self, handle, words, scope):
        assert scope == 0
        return words_of([self._gpus[handle].numa_node], words)

    def nvmlDeviceGetCpuAffinity(self, handle, words):
        ranges = [part.split("-") for part in self._gpus[handle].cpus.split(",")]
        return words_of([n for a, b in ranges for n in range(int(a), int(b) + 1)], words)

    def nvmlDeviceGetNvLinkState(self, handle, link):
        self._link(handle, link)
        return 1

    def nvmlDeviceGetNvLinkCapability(self, handle, link, capability):
        assert capability == 0
        return int(self._link(handle, link) is not None)

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle, link):
        return 2 if self._link(handle, link)[0] == SWITCH else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle, link):
        end = self._link(handle, link)[0]
        return SimpleNamespace(busId="0000:FE:00.0" if end == SWITCH else f"0000{end}")

    def nvmlDeviceGetNvLinkVersion(self, handle, link):
        return VERSION_NUMBERS[self._link(handle, link)[1].version]

    def nvmlDeviceGetFieldValues(self, handle, which):
        # The line rate, which is slightly higher than the data rate in topologies.
        (_, link) = which[0]
        rate = self._link(handle, link)[1].link_gbps * 1.03125
        return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=int(rate * 1000)))]

    def nvmlDeviceGetTopologyCommonAncestor(self, one, other):
        level = self._topology.pair(self._gpus[one], self._gpus[other]).level
        if level is None:
            raise NVMLError_NotSupported("Not Supported")
        return LEVEL_NUMBERS[level]

    def nvmlDeviceGetP2PStatus(self, one, other, index):
        assert index == 0
        access = self._topology.pair(self._gpus[one], self._gpus[other]).peer_access
        if access is None:
            raise NVMLError_NotSupported("Not Supported")
        return 0 if access else 3
