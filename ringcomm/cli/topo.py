# SPDX-License-Identifier: Apache-2.0
"""``ringcomm topo``: shows the links between GPUs, and the algorithm and rings that they select."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from ringcomm.cli import table_lines
from ringcomm.comm.device.topology import (
    LEVELS,
    Connection,
    Gpu,
    Topology,
    TopologyChoice,
    host_choice,
    load,
    read_machine,
    save,
)
from ringcomm.errors import ArgumentError
from ringcomm.process import available_cores

# A limit for a readable table.
MOST_RANKS = 65536


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--file", help="read a recorded topology instead of this machine's")
    parser.add_argument("--save", metavar="FILE", help="record the topology as JSON")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--ranks",
        type=int,
        help="choose rings for this many ranks, distributed over the GPUs (default: 1 each)",
    )
    which.add_argument(
        "--placement",
        metavar="GPU,GPU,...",
        help="the GPU of each rank: its number in the matrix, its UUID or its PCI bus id",
    )
    parser.add_argument("--json", action="store_true", help="print topology and choice as JSON")


def run(args: argparse.Namespace) -> int:
    """Prints matrix, rings and algorithm.

    A machine without a GPU is not an error: its ranks run on CPUs, and the choice is for CPUs.

    Raises:
        ArgumentError: a file or the placement is invalid.
    """
    topology = load(args.file) if args.file else read_machine()
    placements = _placements(topology, args)
    if args.save:
        save(topology, args.save)
    chosen = topology.choose(placements) if topology.gpus else host_choice(len(placements))
    gbps = topology.rings_gbps(placements, chosen.rings)
    if args.json:
        whole = {
            "topology": json.loads(topology.to_json()),
            "placements": placements,
            "choice": asdict(chosen),
            "rings_gbps": gbps,
        }
        print(json.dumps(whole, indent=1))
    else:
        lines = _machine_lines(topology)
        lines += [] if args.file else _order_note(topology, os.environ)
        lines += ["", *_choice_lines(topology, placements, chosen, gbps)]
        print("\n".join(lines))
    return 0


def _order_note(topology: Topology, environment: Mapping[str, str]) -> list[str]:
    words = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
    numbers = any(word.strip().isdecimal() for word in words)
    models = {gpu.name for gpu in topology.gpus}
    if numbers and len(models) > 1 and environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        return [
            "note: CUDA numbers GPUs of different models by speed, this page by PCI bus id; with "
            "CUDA_DEVICE_ORDER=PCI_BUS_ID, or UUIDs in CUDA_VISIBLE_DEVICES, both agree"
        ]
    return []


def _placements(topology: Topology, args: argparse.Namespace) -> list[str | None]:
    """Returns the GPU of each rank; None for ranks on CPUs.

    Raises:
        ArgumentError: a GPU does not exist, or the number of ranks is not positive.
    """
    if args.ranks is not None and not 1 <= args.ranks <= MOST_RANKS:
        wanted = "at least 1" if args.ranks < 1 else f"at most {MOST_RANKS}"
        raise ArgumentError(f"--ranks: expected {wanted}, got {args.ranks}")
    if args.placement:
        return [_named_device(topology, word.strip()) for word in args.placement.split(",")]
    devices = topology.visible_devices({} if args.file else os.environ)
    if topology.gpus and not devices:
        raise ArgumentError(
            f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']!r} leaves none of the "
            f"{len(topology.gpus)} GPUs visible; unset it, or give --placement"
        )
    if not devices:
        return [None] * (args.ranks or available_cores())
    return [devices[rank % len(devices)] for rank in range(args.ranks or len(devices))]


def _named_device(topology: Topology, word: str) -> str:
    if word.isdecimal() and len(word) < 10 and int(word) < len(topology.gpus):
        return topology.gpus[int(word)].pci_bus_id
    if not word.isdecimal() and topology.find(word):
        return word
    if topology.gpus:
        have = f"there are GPUs 0 to {len(topology.gpus) - 1}"
    else:
        have = f"no GPU was found ({topology.absent or 'the machine has none'})"
    raise ArgumentError(f"--placement: there is no GPU {word!r}: {have}")


def _machine_lines(topology: Topology) -> list[str]:
    if not topology.gpus:
        return [f"no NVIDIA GPU found: {topology.absent or 'the machine has none'}"]
    driver = f", driver {topology.driver}" if topology.driver else ""
    lines = [f"{topology.machine or 'machine'}: {len(topology.gpus)} GPUs{driver}", ""]
    lines += _matrix(topology)
    lines += ["", *_legend(topology), ""]
    lines += table_lines((f"GPU{index}", _describe(gpu)) for index, gpu in enumerate(topology.gpus))
    return lines + [f"note: {note}" for note in topology.notes]


def _describe(gpu: Gpu) -> str:
    parts = [gpu.name or "unknown model", gpu.pci_bus_id, gpu.uuid]
    parts += [f"NUMA node {gpu.numa_node}"] if gpu.numa_node is not None else []
    parts += [f"CPUs {gpu.cpus}"] if gpu.cpus else []
    parts += [f"PCIe {gpu.pcie[0]}.0 x{gpu.pcie[1]}"] if gpu.pcie else []
    parts += [f"MIG: {', '.join(gpu.mig_instances) or 'no instance'}"] if gpu.mig else []
    return "  ".join(parts)


def _cell(connection: Connection) -> str:
    kinds = {"nvlink": f"NV{connection.links.count}", "nvswitch": f"NVS{connection.links.count}"}
    if connection.kind in kinds:
        gbps = connection.links.gbps
        return f"{kinds[connection.kind]} {gbps:g}" if gbps else f"{kinds[connection.kind]} ?"
    return (connection.level or "?") + "!" * (connection.kind == "refused")


def _matrix(topology: Topology) -> list[str]:
    names = [f"GPU{index}" for index in range(len(topology.gpus))]
    rows = [["", *names]]
    for name, one in zip(names, topology.gpus, strict=True):
        cells = [
            "X" if one is other else _cell(topology.connection(one, other))
            for other in topology.gpus
        ]
        rows.append([name, *cells])
    return table_lines(rows)


def _legend(topology: Topology) -> list[str]:
    """Returns the legend of the symbols that the matrix uses."""
    connections = [each for _, _, each in topology.connections()]
    kinds = {each.kind for each in connections}
    through = {each.level for each in connections if each.kind in ("pcie", "refused")}
    words = {
        "NV# B": "# NVLinks from one to the other, B GB/s per direction" * ("nvlink" in kinds),
        "NVS# B": "# NVLinks to NVSwitches, B GB/s per direction" * ("nvswitch" in kinds),
        **{level: f"PCIe through {LEVELS[level]}" * (level in through) for level in LEVELS},
        "!": "neither can access the other's memory" * ("refused" in kinds),
        "?": "not known" * ("unknown" in kinds),
    }
    return table_lines([row for row in words.items() if row[1]])


def _choice_lines(
    topology: Topology, placements: Sequence[str | None], chosen: TopologyChoice, gbps: float | None
) -> list[str]:
    if topology.gpus:
        numbers = {gpu.pci_bus_id: index for index, gpu in enumerate(topology.gpus)}
        found = [topology.find(name or "") for name in placements]
        where = " ".join(f"{rank}:GPU{numbers[g.pci_bus_id]}" for rank, g in enumerate(found) if g)
    else:
        where = f"{len(placements)} on CPUs"
    rows = [("ranks", where)]
    for index, ring in enumerate(chosen.rings):
        rows.append((f"ring {index}", " -> ".join(map(str, (*ring, ring[0])))))
    if gbps:
        rows.append(("rings", f"{gbps:g} GB/s per direction, by the links' data rate"))
    return table_lines([*rows, ("algorithm", f"{chosen.algorithm}: {chosen.reason}")])
