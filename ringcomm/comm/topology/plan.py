"""The choice of a world's algorithm family and rings from the connections between its GPUs.

A plan depends only on the topology and the ranks' GPUs. Ranks that know the same ones derive the
same plan without a message.

Sources: the rings of the DGX-1 are those that its double links suggest (NVIDIA DGX-1 With Tesla
V100 System Architecture, WP-08437-002, "NVLink"; S. Jeaugey, "Distributed Training and Fast
Inter-GPU Communication with NCCL", GTC 2019, S9656: one ring per link and direction); for the cost
of ring and direct see docs/algorithms.md.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations

from ringcomm.comm.topology.model import Connection, Gpu, Topology, plain_name
from ringcomm.errors import ArgumentError

__all__ = [
    "SEARCHED_DEVICES",
    "TopologyPlan",
    "best_ring",
    "disjoint_rings",
    "host_plan",
    "plan",
    "rings_gbps",
]

# The search for edge-disjoint Hamiltonian cycles is arithmetic over matrices, so tests need no such
# machine. A *ring* is an order of all devices. The one at place i sends to the one at place i + 1,
# the last to the first. An NVLink is full duplex: a ring takes one link of every hop in its own
# direction only, and leaves the other direction to its reverse.

# The search can enumerate (8 - 1)! orders, and no machine without a switch has more GPUs.
SEARCHED_DEVICES = 8
# So many steps take a fraction of a second. Every machine in the tests needs far fewer.
SEARCH_STEPS = 3000

Ring = tuple[int, ...]
Matrix = Sequence[Sequence[float]]


def disjoint_rings(links: Sequence[Sequence[int]]) -> tuple[tuple[Ring, ...], int]:
    """Finds as many rings as fit at once when each takes one link of every hop.

    No larger number of rings fits, unless the search ran out of steps, which no known machine comes
    near. A ring that is used several times is repeated, after division by the common factor of all
    rings: four links between every two of three devices make two rings, one each way, with four
    links per hop.

    Args:
        links: symmetric [n, n] numbers of links, n from 2 to ``SEARCHED_DEVICES``.

    Returns:
        The rings, which begin with device 0 (none if no ring exists), and the number of links that
        each ring has at every hop.
    """
    count = len(links)
    if count == 2:
        return (((0, 1),), links[0][1]) if links[0][1] else ((), 0)
    bound = _smallest_cut(links)
    search = _Search(links, directed=False)
    there = search.run(bound // 2)
    rings = [way for ring in there for way in (ring, (0, *reversed(ring[1:])))]
    if len(rings) < bound:
        # Rings that are not each other's reverse use an odd number of links, if anything does.
        search = _Search(links, directed=True)
        one_way = search.run(bound)
        rings = one_way if len(one_way) > len(rings) else rings
    repeats = Counter(rings)
    common = math.gcd(*repeats.values())
    return tuple(ring for ring in repeats for _ in range(repeats[ring] // common)), common


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


def _smallest_cut(links: Sequence[Sequence[int]]) -> int:
    """Returns the fewest links that leave any set of devices, since every ring leaves every set."""
    everyone = set(range(len(links)))
    sets = (
        {0, *more} for size in range(len(links) - 1) for more in combinations(everyone - {0}, size)
    )
    return min(sum(links[a][b] for a in inside for b in everyone - inside) for inside in sets)


class _Search:
    """A depth-first search for rings that together take no link twice."""

    def __init__(self, links: Sequence[Sequence[int]], directed: bool) -> None:
        count = len(links)
        pairs = permutations(range(count), 2) if directed else combinations(range(count), 2)
        self._edges = [(a, b) for a, b in pairs if links[a][b]]
        place = {edge: index for index, edge in enumerate(self._edges)}
        if not directed:
            place |= {(b, a): index for (a, b), index in place.items()}
        self._left = [links[a][b] for a, b in self._edges]
        self._per_device = 1 if directed else 2
        self._rings: list[tuple[Ring, int, list[int]]] = []
        for ring in _orders(count, directed):
            taken = [place[hop] for hop in hops(ring) if hop in place]
            if len(taken) == count:
                self._rings.append((ring, sum(1 << edge for edge in taken), taken))
        self._steps = 0
        self._best: list[Ring] = []

    def run(self, bound: int) -> list[Ring]:
        """Returns the largest set of rings found, of at most ``bound``."""
        for wanted in range(bound, 0, -1):
            if len(self._best) >= wanted or self._steps >= SEARCH_STEPS:
                break
            self._extend([], self._rings, wanted)
        return self._best

    def _extend(
        self, taken: list[Ring], candidates: list[tuple[Ring, int, list[int]]], wanted: int
    ) -> bool:
        if len(taken) > len(self._best):
            self._best = list(taken)
        if len(taken) == wanted:
            return True
        self._steps += 1
        free = sum(1 << edge for edge, left in enumerate(self._left) if left)
        candidates = [each for each in candidates if not each[1] & ~free]
        tight = self._tight_edge(candidates, wanted - len(taken))
        branches = candidates if tight is None else [c for c in candidates if c[1] >> tight & 1]
        for number, (ring, _, edges) in enumerate(branches):
            if self._steps >= SEARCH_STEPS:
                return False
            for edge in edges:
                self._left[edge] -= 1
            # The order of rings does not matter, so later branches skip what earlier ones tried.
            rest = candidates if tight is not None else candidates[number:]
            if self._extend([*taken, ring], rest, wanted):
                return True
            for edge in edges:
                self._left[edge] += 1
        return False

    def _tight_edge(
        self, candidates: list[tuple[Ring, int, list[int]]], missing: int
    ) -> int | None:
        """Returns an edge that must be used because its device has no link to spare.

        Of several such edges, this is the one that the fewest candidates use.
        """
        spare: Counter[int] = Counter()
        for (a, b), left in zip(self._edges, self._left, strict=True):
            spare[a] += left
            spare[b] += left if self._per_device == 2 else 0
        no_spare = {device for device in spare if spare[device] == missing * self._per_device}
        users = {
            edge: sum(mask >> edge & 1 for _, mask, _ in candidates)
            for edge, (a, b) in enumerate(self._edges)
            if self._left[edge] and (a in no_spare or (self._per_device == 2 and b in no_spare))
        }
        return min(users, key=lambda edge: (users[edge], edge), default=None)


@dataclass(frozen=True)
class TopologyPlan:
    """The algorithm and the rings of a world.

    Attributes:
        algorithm: "direct" (every rank reads from every other) or "ring" (from one neighbour).
        rings: orders of all ranks, each beginning with rank 0; the rank at place i sends to the
            one at place i + 1, the last to the first. Several rings run at once with equal shares
            of the data; together they take no NVLink twice in one direction. A plan of "direct"
            has rings, too, as a call may ask for "ring".
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
    rings = _nvlink_rings(count, between)
    if rings:
        return rings, f"rings: {len(rings)}, with NVLink at every hop"
    quality = [[_quality(_either(between, a, b)) for b in range(count)] for a in range(count)]
    ring = best_ring(quality)
    worst = min((_either(between, a, b) for a, b in hops(ring)), key=_quality)
    about = "" if worst.kind == "refused" else f"the slowest hop of the best ring is {worst}"
    return (ring,), about


def _nvlink_rings(count: int, between: dict[tuple[int, int], Connection]) -> tuple[Ring, ...]:
    """Finds the rings over direct NVLinks that carry most together; none if there is no ring."""
    direct = {ends: each.links for ends, each in between.items() if each.kind == "nvlink"}
    speeds = {links.link_gbps for links in direct.values()}
    # Rings have equal shares, so a slow link slows all of them. With links of two speeds, fewer
    # rings without the slow links may carry more. Unknown speeds count as equal.
    floors = [0.0] if None in speeds else sorted(speed for speed in speeds if speed is not None)
    best: tuple[float, tuple[Ring, ...]] = (0.0, ())
    for floor in floors:
        links = [[0] * count for _ in range(count)]
        for (a, b), bundle in direct.items():
            if (bundle.link_gbps or 0.0) >= floor:
                links[a][b] = links[b][a] = bundle.count
        rings, per_hop = disjoint_rings(links)
        carried = len(rings) * per_hop * (floor or 1.0)
        if carried > best[0]:
            best = (carried, rings)
    return best[1]


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
