# SPDX-License-Identifier: Apache-2.0
"""The NUMA nodes of this machine, and the nodes to which this process's heap is bound.

A processor reaches the memory of its own node faster than other memory. Linux allocates a page on
the node of the thread that touches the page first. Mostly this is a thread of the heap's own rank,
but it may be a peer that reads the page before this rank writes it. So if a process may only use
the cores of some nodes, its heap is bound to these nodes (mbind(2)) before any page is touched.
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
        cpus: maps a node to its online CPUs; the set is empty for a node that has only memory.
        with_memory: the nodes that have memory.
        distances: maps a node to its relative access times to each node's memory (10: its own).
    """

    cpus: Mapping[int, frozenset[int]]
    with_memory: frozenset[int]
    distances: Mapping[int, Mapping[int, int]]

    def nodes_of(self, cpus: Collection[int]) -> tuple[int, ...]:
        """Returns the nodes of the given CPUs, ascending."""
        return tuple(sorted(node for node, own in self.cpus.items() if not own.isdisjoint(cpus)))

    @property
    def with_cpus(self) -> tuple[int, ...]:
        """The nodes that have CPUs, ascending."""
        return tuple(node for node, cpus in sorted(self.cpus.items()) if cpus)

    def nearest_memory(self, node: int) -> int:
        """Returns the node itself if it has memory, else the nearest node with memory."""
        return min(self.with_memory, key=lambda each: (self.distances[node][each], each))


def read_topology(folder: Path = SYSTEM_FOLDER) -> NodeTopology:
    """Reads the nodes from the kernel's folder; with a single node, reads only one file.

    Raises:
        OSError: a file of an online node cannot be read.
        ValueError: a file has another format; names the file.
    """
    # A kernel without NUMA does not have the folder.
    online = _numbers(folder / "online") if (folder / "online").exists() else frozenset({0})
    if len(online) == 1:
        return NodeTopology(dict.fromkeys(online, frozenset()), online, {})
    in_order = sorted(online)
    distances = {}
    for node in in_order:
        path = folder / f"node{node}" / "distance"
        row = path.read_text().split()
        # The file has one number for each online node.
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
    """Returns the numbers in a file with a list such as ``0-3,8``; none if the file is empty.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file has another format.
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
    """The nodes to which this process's heap is bound.

    Attributes:
        nodes: the nodes; empty if the first touch of each page chooses its node.
        reason: why ``nodes`` is empty, as the end of a sentence.
    """

    nodes: tuple[int, ...]
    reason: str = ""


def own_binding(folder: Path = SYSTEM_FOLDER) -> NodeBinding:
    """Returns the nodes for the heap of this process, from its current CPU affinity mask.

    The heap is not bound if the process may run on all nodes that have CPUs: each thread then
    touches the memory that it works on. It is also not bound if the user has set a memory policy.
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
    """Returns how many bytes of a mapping this process has touched on each NUMA node.

    Args:
        ptr: the beginning of the mapping.
        maps: the kernel's file that lists this process's mappings and their nodes.

    Returns:
        An empty dict if the kernel lacks the file, or the file lacks the mapping.
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
