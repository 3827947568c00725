# SPDX-License-Identifier: Apache-2.0
"""Writes folders like the kernel's for NUMA nodes, to simulate other machines."""

from collections.abc import Mapping
from pathlib import Path


def write_machine(
    folder: Path, cpus: Mapping[int, str], online: str = "", has_memory: str | None = None
) -> Path:
    """Writes the files of a machine, and returns its folder.

    Args:
        folder: an empty folder.
        cpus: by node, the list of its CPUs; the nodes also are at distances 10 + 11 steps.
        online: the list of nodes that are online; "": all.
        has_memory: the list of nodes with memory; None: as ``online``.
    """
    online = online or ",".join(map(str, sorted(cpus)))
    (folder / "online").write_text(f"{online}\n")
    (folder / "has_memory").write_text(f"{online if has_memory is None else has_memory}\n")
    for node, listed in cpus.items():
        (folder / f"node{node}").mkdir()
        (folder / f"node{node}" / "cpulist").write_text(f"{listed}\n")
        distances = (str(10 + 11 * abs(node - other)) for other in sorted(cpus))
        (folder / f"node{node}" / "distance").write_text(" ".join(distances) + "\n")
    return folder
