"""The NUMA nodes of this machine, and the ones on which this process's heap shall lie.

A processor reaches the memory of its own node faster than the memory of others. Linux takes a page
from the node of the thread that touches it first. For most of the heap that is a thread of its own
rank, but a peer that reads memory that nobody has written yet touches it first, too. So the heap of
a process that may only use the cores of some nodes is bound to them (mbind(2)) before any touch.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from ringcomm import _native

SYSTEM_FOLDER = Path("/sys/devices/system/node")
_MAPS = Path("/proc/self/numa_maps")


@dataclass(frozen=True)
class NodeTopology:
    """The NUMA nodes of a machine that are online.

    Attributes:
        cpus: by node, its CPUs that are online; a node that is only memory has none.
        with_memory: the nodes that have memory.
        distances: by node, the relative time of an access to each node (10: its own).
    """

    cpus: Mapping[int, frozenset[int]]
    with_memory: frozenset[int]
    distances: Mapping[int, Mapping[int, int]]

    def nodes_of(self, cpus: Collection[int]) -> tuple[int, ...]:
        """Returns the nodes on which some of the CPUs lie, ascending."""
        return tuple(sorted(node for node, own in self.cpus.items() if not own.isdisjoint(cpus)))

    @property
    def with_cpus(self) -> tuple[int, ...]:
        """The nodes that have CPUs, ascending."""
        return tuple(node for node, cpus in sorted(self.cpus.items()) if cpus)

    def nearest_memory(self, node: int) -> int:
        """Returns the node itself if it has memory, or else the nearest node that has some."""
        return min(self.with_memory, key=lambda each: (self.distances[node][each], each))


def read_topology(folder: Path = SYSTEM_FOLDER) -> NodeTopology:
    """Reads the nodes from the kernel's folder of them; of a machine with one node, one file.

    Raises:
        OSError: a file of a node that is online cannot be read.
        ValueError: a file has another format; named.
    """
    # A kernel without NUMA has no such folder.
    online = _numbers(folder / "online") if (folder / "online").exists() else frozenset({0})
    if len(online) == 1:
        return NodeTopology(dict.fromkeys(online, frozenset()), online, {})
    in_order = sorted(online)
    distances = {}
    for node in in_order:
        path = folder / f"node{node}" / "distance"
        row = path.read_text().split()
        # One number for each node that is online.
        if len(row) != len(in_order) or not all(each.isdecimal() for each in row):
            raise ValueError(f"{path}: expected {len(in_order)} distances, got {row}")
        distances[node] = dict(zip(in_order, map(int, row), strict=True))
    with_memory = _numbers(folder / "has_memory") & online
    if not with_memory:
        raise ValueError(f"{folder / 'has_memory'}: none of the nodes {in_order} has memory")
    return NodeTopology(
        {node: _numbers(folder / f"node{node}" / "cpulist") for node in in_order},
        with_memory,
        distances,
    )


def _numbers(path: Path) -> frozenset[int]:
    """Returns the numbers of a list such as ``0-3,8``; the file of an empty list is empty.

    Raises:
        OSError: the file cannot be read.
        ValueError: it has another format.
    """
    text = path.read_text().strip()
    found: set[int] = set()
    for part in text.split(",") if text else []:
        first, hyphen, last = part.partition("-")
        last = last if hyphen else first
        if not first.isdecimal() or not last.isdecimal():
            raise ValueError(f"{path}: expected a list such as 0-3,8, got {text[:80]!r}")
        found.update(range(int(first), int(last) + 1))
    return frozenset(found)


@dataclass(frozen=True)
class NodeBinding:
    """The nodes on which this process's heap shall lie.

    Attributes:
        nodes: what the heap is bound to; none: each page lies where it is first touched.
        reason: why there are none, as the end of a sentence.
    """

    nodes: tuple[int, ...]
    reason: str = ""


def own_binding(folder: Path = SYSTEM_FOLDER) -> NodeBinding:
    """Returns where the heap of this process shall lie, from its affinity mask as of now.

    A process whose CPUs lie on all nodes that have CPUs is bound to none: its threads run anywhere,
    and each touches what it works on. Neither is a process whose user has set a memory policy.
    """
    try:
        machine = read_topology(folder)
    except (OSError, ValueError) as error:
        return NodeBinding((), f"the nodes cannot be read: {error}")
    if len(machine.cpus) == 1:
        return NodeBinding((), "the machine has one node")
    own = machine.nodes_of(os.sched_getaffinity(0))
    if not own:
        return NodeBinding((), "the process's CPUs are on no node that is online")
    if own == machine.with_cpus:
        return NodeBinding((), "the process may use the CPUs of all nodes")
    if _native.has_memory_policy():
        return NodeBinding((), "the process has a memory policy of its own (numactl)")
    return NodeBinding(tuple(sorted({machine.nearest_memory(node) for node in own})))


def bytes_by_node(ptr: int, maps: Path = _MAPS) -> dict[int, int]:
    """Returns the bytes of a mapping that this process has touched, by the node where they lie.

    Args:
        ptr: where the mapping begins.
        maps: the kernel's file of the process's mappings by node.

    Returns:
        Nothing where the kernel has no such file, or the file no such mapping.
    """
    if not maps.exists():
        return {}
    for line in maps.read_text().splitlines():
        start, *fields = line.split()
        if int(start, 16) != ptr:
            continue
        values = dict(field.split("=", 1) for field in fields if "=" in field)
        page_bytes = int(values.get("kernelpagesize_kB", "4")) << 10
        return {
            int(name[1:]): int(pages) * page_bytes
            for name, pages in values.items()
            if name[0] == "N" and name[1:].isdecimal()
        }
    return {}
