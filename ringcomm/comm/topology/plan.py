"""The choice of a world's algorithm family and rings from the connections between its GPUs.

A plan depends only on the topology and the ranks' GPUs. Ranks that know the same ones derive the
same plan without a message.

For the cost of ring and direct see docs/algorithms.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations

from ringcomm.comm.topology.model import Connection, Gpu, Topology, plain_name
from ringcomm.errors import ArgumentError

__all__ = [
    "SEARCHED_DEVICES",
    "TopologyPlan",
    "best_ring",
    "hops",
    "host_plan",
    "mesh_rings",
    "plan",
    "rings_gbps",
]

# A *ring* is an order of all devices. The one at place i sends to the one at place i + 1, the last
# to the first. An NVLink is full duplex: a ring takes the direction of each hop, and leaves the
# other one to its reverse.

# The search can enumerate (8 - 1)! orders, and no machine without a switch has more GPUs.
SEARCHED_DEVICES = 8
# Machines of sm_80 and later without a switch join no more GPUs pair by pair (HGX A100 4-GPU).
MESH_DEVICES = 4

Ring = tuple[int, ...]
Matrix = Sequence[Sequence[float]]


def mesh_rings(count: int) -> tuple[Ring, ...]:
    """Returns the rings of devices that are joined pair by pair: all orders that begin with 0.

    Each direction of each pair is a hop of equally many of them, (count - 2)!, so with equal shares
    of the data no link idles.
    """
    return tuple(_orders(count, directed=True))


def best_ring(quality: Matrix) -> Ring:
    """Finds the ring whose worst hop is best; ties are broken by the next worst hop, and so on.

    Args:
        quality: symmetric [n, n], larger is better, n from 1 to ``SEARCHED_DEVICES``.
    """
    orders = _orders(len(quality), directed=False)
    return max(orders, key=lambda ring: sorted(quality[a][b] for a, b in hops(ring)))


def hops(ring: Ring) -> Iterator[tuple[int, int]]:
    """Yields the sender and receiver of every hop of a ring."""
    return ((ring[place - 1], ring[place]) for place in range(len(ring)))


def _orders(count: int, directed: bool) -> Iterator[Ring]:
    for rest in permutations(range(1, count)):
        if directed or count < 3 or rest[0] < rest[-1]:
            yield (0, *rest)


@dataclass(frozen=True)
class TopologyPlan:
    """The algorithm and the rings of a world.

    Attributes:
        algorithm: "direct" (every rank reads from every other) or "ring" (from one neighbour).
        rings: orders of all ranks, each beginning with rank 0; the rank at place i sends to the
            one at place i + 1, the last to the first. Several rings run at once with equal shares
            of the data, and no direction of an NVLink idles. A plan of "direct" has rings, too, as
            a call may ask for "ring".
        reason: of the choice, for people.
    """

    algorithm: str
    rings: tuple[Ring, ...]
    reason: str


@dataclass(frozen=True)
class _Device:
    """A device that some ranks share: a GPU, an instance of one, or an unknown device."""

    ranks: tuple[int, ...]
    gpu: Gpu | None
    instance: bool = False

    @property
    def known(self) -> bool:
        return self.gpu is not None

    def __str__(self) -> str:
        gpu = f"{self.gpu.name or 'GPU'} {self.gpu.pci_bus_id}" if self.gpu else "an unknown GPU"
        return f"an instance of {gpu}" if self.instance else gpu


def plan(topology: Topology, placements: Sequence[str | None]) -> TopologyPlan:
    """Makes the plan of a world.

    Args:
        topology: of the machine that all ranks run on.
        placements: of each rank, the UUID (NVML's spelling or CUDA's) or PCI bus id of its GPU;
            None if unknown. Ranks with equal placements share the GPU.

    Returns:
        A plan even if connections are unknown. It then assumes no links, and its reason says so.

    Raises:
        ArgumentError: there is no rank.
    """
    if not placements:
        raise ArgumentError("plan: expected the GPU of at least one rank, got none")
    devices = _devices(topology, placements)
    between = {
        (a, b): _connection(topology, one, other)
        for (a, one), (b, other) in combinations(enumerate(devices), 2)
    }
    algorithm, why = _algorithm(devices, between)
    rings, about_rings = _rings(devices, between)
    told = [why, about_rings, *_troubles(topology, devices, between)]
    ranks = tuple(_expand(ring, devices) for ring in rings)
    return TopologyPlan(algorithm, ranks, "; ".join(part for part in told if part))


def host_plan(ranks: int) -> TopologyPlan:
    """Makes the plan of ranks on CPUs: shared memory acts as a switch (docs/algorithms.md)."""
    reason = "ranks on CPUs share memory, so that every peer is one hop away"
    return TopologyPlan("direct", (tuple(range(ranks)),), reason)


def rings_gbps(
    topology: Topology, placements: Sequence[str | None], rings: Sequence[Ring]
) -> float | None:
    """Computes the bandwidth of rings that run at once with equal shares of the data.

    Returns:
        10^9 bytes per second in one direction through every rank, by the data rate of the NVLinks;
        None if a hop is not NVLink or is unknown, or if all ranks share a GPU.
    """
    devices = _devices(topology, placements)
    home = {rank: index for index, device in enumerate(devices) for rank in device.ranks}
    load: dict[tuple[int, int], int] = {}
    for ring in rings:
        for sender, receiver in hops(ring):
            ends = (home[sender], home[receiver])
            if ends[0] != ends[1]:
                load[ends] = load.get(ends, 0) + 1
    shares = []
    for (a, b), times in load.items():
        connection = _connection(topology, devices[a], devices[b])
        if connection.links.gbps is None:
            return None
        # All hops from one GPU into the switch share its links. Direct links serve one pair.
        if connection.kind == "nvswitch":
            times = sum(n for (sender, _), n in load.items() if sender == a)
        shares.append(connection.links.gbps / times)
    return len(rings) * min(shares) if shares else None


def _devices(topology: Topology, placements: Sequence[str | None]) -> list[_Device]:
    """Lists the devices in canonical order: by NUMA node, then by bus id.

    Devices of unknown place follow, by their first rank.
    """
    ranks: dict[str, list[int]] = {}
    for rank, name in enumerate(placements):
        gpu = topology.find(name) if name is not None else None
        key = f"rank {rank}" if name is None else plain_name(name)
        if gpu is not None and not _is_instance(gpu, name):
            key = gpu.pci_bus_id
        ranks.setdefault(key, []).append(rank)
    devices = []
    for members in ranks.values():
        name = placements[members[0]]
        gpu = topology.find(name) if name is not None else None
        instance = gpu is not None and _is_instance(gpu, name)
        devices.append(_Device(tuple(members), gpu, instance))
    return sorted(
        devices,
        key=lambda d: (not d.known, d.gpu.place if d.gpu else (), d.ranks[0]),
    )


def _is_instance(gpu: Gpu, name: str | None) -> bool:
    return name is not None and plain_name(name) in map(plain_name, gpu.mig_instances)


def _connection(topology: Topology, one: _Device, other: _Device) -> Connection:
    if one.gpu is None or other.gpu is None:
        return Connection("unknown")
    if one.gpu is other.gpu:
        # Two MIG instances of one GPU instance could share memory, but their names do not tell
        # that they belong to the same one.
        return Connection("refused")
    return topology.connection(one.gpu, other.gpu)


def _algorithm(
    devices: list[_Device], between: dict[tuple[int, int], Connection]
) -> tuple[str, str]:
    world = sum(len(device.ranks) for device in devices)
    if world == 1:
        return "direct", "one rank has no peer"
    if len(devices) == 1:
        return "direct", f"all {world} ranks share {devices[0]}"
    connections = list(between.values())
    worst = min(connections, key=_quality)
    if world == 2:
        return "direct", f"one peer is one hop away, over {worst}"
    gpus = f"all {len(devices)} GPUs" if len(devices) > 2 else "both GPUs"
    if all(each.kind == "nvswitch" for each in connections):
        return "direct", f"{gpus} are on {worst}, so that every peer is one hop away"
    bundles = {(each.links.count, each.links.link_gbps) for each in connections}
    if len(bundles) == 1 and worst.kind == "nvlink":
        return "direct", f"{gpus} are joined pair by pair by {worst}"
    return "ring", _why_ring(devices, between)


def _why_ring(devices: list[_Device], between: dict[tuple[int, int], Connection]) -> str:
    counts = [each.links.count for each in between.values()]
    if min(counts) > 0:
        return f"pairs of GPUs have different NVLinks, {min(counts)} to {max(counts)}"
    (a, b), worst = min(between.items(), key=lambda item: (_quality(item[1]), item[0]))
    ranks = f"ranks {devices[a].ranks[0]} and {devices[b].ranks[0]}"
    if worst.kind == "unknown":
        return f"what connects {ranks} is not known"
    return f"not all pairs of GPUs have NVLink: {ranks} have {worst}"


def _troubles(
    topology: Topology, devices: list[_Device], between: dict[tuple[int, int], Connection]
) -> list[str]:
    """Lists what a user should know before trusting the plan."""
    told = []
    unknown = [device.ranks[0] for device in devices if not device.known]
    if topology.absent:
        told.append(f"nothing is known of the GPUs' connections: {topology.absent}")
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
    devices: list[_Device], between: dict[tuple[int, int], Connection]
) -> tuple[tuple[Ring, ...], str]:
    """Returns orders of the devices, and words about them for the plan's reason."""
    count = len(devices)
    canonical = tuple(range(count))
    if count < 3 or all(each.kind == "nvswitch" for each in between.values()):
        return (canonical,), ""
    if not all(device.known for device in devices):
        return (canonical,), "the ring follows the ranks, those of one GPU together"
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
    """Rates a connection; better ones have larger numbers."""
    levels = {"SYS": 1, "NODE": 2, "PHB": 3, "PXB": 4, "PIX": 5, "PSB": 6}
    if connection.kind in ("nvlink", "nvswitch"):
        return 100 + (connection.links.gbps or connection.links.count)
    return 0 if connection.kind == "refused" else levels.get(connection.level or "", 0.5)


def _expand(ring: Ring, devices: list[_Device]) -> Ring:
    """Returns the ranks in the order of a ring of devices, beginning with rank 0."""
    ranks = [rank for index in ring for rank in devices[index].ranks]
    start = ranks.index(0)
    return (*ranks[start:], *ranks[:start])
