"""Writes the tables of docs/scaling.md from the model, and from the rows in bench/results/nodes.

`python tools/scaling_tables.py` after a change of the model or a new measurement; a test compares.
"""

import statistics
from dataclasses import replace
from pathlib import Path

from ringcomm.comm.topology import fit
from ringcomm.comm.topology.cost import (
    Cluster,
    algorithms_of,
    best_cost,
    best_rail,
    collective_cost,
    direct_until,
)
from ringcomm.comm.topology.network import Network, torus_network

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "scaling.md"
ROWS = ROOT / "bench" / "results" / "nodes" / "gloo.csv"
FIT_AT = (0.1, 0.4)
LEAST_BYTES = 1 << 20
NODES = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384)
MOST_NODES = 4096
MIB = 1 << 20
H100 = Cluster(Network("switch", 2))
# NCCL's model takes 4 us for a hop over NVLink; for a torus of TPUs the same is assumed.
NEAR_US = 4.0
TPU_MEMORY_GBPS = 1200.0


def torus(gbps: float, *dims: int) -> Cluster:
    """TPUs whose links send so much together."""
    network = torus_network(*dims)
    return Cluster(network, 1, nic_gbps=gbps, nic_alpha_us=NEAR_US, memory_gbps=TPU_MEMORY_GBPS)


PODS = {
    "DGX A100 SuperPOD, 32 x 8": Cluster(
        Network("fat-tree", 32), 8, nic_gbps=25.0, node_gbps=300.0, memory_gbps=2039.0
    ),
    "DGX H100 SuperPOD, 32 x 8": Cluster(Network("fat-tree", 32)),
    "NVLink network of 256 H100": Cluster(
        Network("switch", 32), nic_gbps=225.0, nic_alpha_us=NEAR_US
    ),
    "2D torus 16 x 16, 4 x 70 GB/s": torus(280.0, 16, 16),
    "3D torus 8 x 8 x 4, 6 x 50 GB/s": torus(300.0, 8, 8, 4),
    "DGX H100, 512 x 8, full fat tree": Cluster(Network("fat-tree", 512)),
    "the same, taper 2": Cluster(Network("fat-tree", 512, taper=2.0)),
    "2D torus 64 x 64, 4 x 75 GB/s": torus(300.0, 64, 64),
    "3D torus 16 x 16 x 16, 6 x 50 GB/s": torus(300.0, 16, 16, 16),
}


def number(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.3g}"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]]) + "\n"


def algorithms_table() -> str:
    """Reduce-scatter of a bucket by nodes and algorithm."""
    rows = []
    for nodes in NODES:
        cluster = H100.with_nodes(nodes)
        costs = [
            collective_cost(cluster, "reduce_scatter", 64 * MIB, each)
            for each in algorithms_of(cluster.network)
        ]
        best = min(costs, key=lambda cost: cost.time_us)
        shape = "x".join(map(str, costs[3].shape))
        times = [number(cost.time_us / 1e3) for cost in costs]
        times[3] += f" ({shape})" if nodes > 3 else ""
        rows.append([str(nodes), *times, best.algorithm, "predicted"])
    return table(
        ["nodes", *algorithms_of(H100.network), "fastest", ""],
        rows,
    )


def choice_table() -> str:
    """Direct, ring or levels, by nodes; and how far direct is nearly as fast as levels."""
    letters = {"rail-direct": "D", "rail-ring": "R", "rail-levels": "L"}
    rows = []
    for kind, message_us in (("switch", 1.0), ("switch", 0.1), ("torus", 1.0)):
        for size in (4, 64, 1024):
            cluster = replace(H100, network=Network(kind, 2), nic_message_us=message_us)
            chosen = [
                letters[
                    best_rail(cluster.with_nodes(nodes), "reduce_scatter", size * MIB).algorithm
                ]
                for nodes in NODES[:-1]
            ]
            until = direct_until(cluster, "reduce_scatter", size * MIB, MOST_NODES, 0.1)
            near = f"{MOST_NODES} or more" if until == MOST_NODES else str(until)
            rows.append([kind, f"{message_us:g}", f"{size} MiB", *chosen, near, "predicted"])
    head = ["network", "us a message", "buffer", *map(str, NODES[:-1])]
    return table([*head, "direct within 10 % of levels up to", ""], rows)


def pods_table() -> str:
    """Systems of 256 and of 4096 GPUs or TPUs."""
    rows = []
    for name, cluster in PODS.items():
        network, gib = cluster.network, 1 << 30
        scatter = best_cost(cluster, "reduce_scatter", gib)
        both = best_cost(cluster, "all_reduce", gib)
        rank_gbps = cluster.nics * cluster.nic_gbps / cluster.ranks_per_node
        exchange = rank_gbps / network.exchange_contention(network.nodes)
        rows.append(
            [
                name,
                number(rank_gbps),
                f"{network.diameter}, {network.mean_hops:.3g}",
                number(cluster.bisection_gbps / 1e3),
                f"{scatter.time_us / 1e3:.3g} ({scatter.algorithm})",
                f"{both.time_us / 1e3:.3g} ({both.algorithm})",
                number(exchange),
                "predicted",
            ]
        )
    head = ["system", "GB/s of a GPU", "links: most, mean", "bisection TB/s, one way"]
    head += ["reduce-scatter of 1 GiB, ms", "all-reduce of 1 GiB, ms", "all-to-all GB/s of a GPU"]
    return table([*head, ""], rows)


def measured_table() -> str:
    """The model, fitted at some rates, beside what was measured at others."""
    every = fit.read_rows(ROWS)
    fitted = fit.fit([row for row in every if row.gbit_s in FIT_AT])
    others = [row for row in every if row.gbit_s not in FIT_AT and row.bytes >= LEAST_BYTES]
    validated = fit.validate(others, fitted)
    groups: dict[tuple[str, str, str], list[fit.Validated]] = {}
    for each in validated:
        row = each.row
        place = f"{row.nodes} x {row.ranks_per_node}"
        groups.setdefault((row.collective, row.algorithm, place), []).append(each)
    rows = []
    for names, members in sorted(groups.items()):
        ratios = [each.ratio for each in members]
        within = sum(abs(ratio - 1) <= 0.1 for ratio in ratios)
        cells = [f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}"]
        rows.append([*names, *cells, f"{within} of {len(ratios)}"])
    within = sum(abs(each.ratio - 1) <= 0.1 for each in validated)
    head = ["collective", "algorithm", "nodes x ranks", "predicted / measured", "range"]
    return (
        f"Fitted: {fitted.alpha_us:.0f} us a message, {fitted.payload:.1%} of the nominal rate as "
        "payload.\n\n"
        + table([*head, "within 10 %"], rows)
        + f"\nWithin 10 %: {within} of {len(validated)} rows.\n"
    )


def filled(text: str) -> str:
    """The document's text with the tables in their places."""
    for name, made in (
        ("algorithms", algorithms_table),
        ("choice", choice_table),
        ("pods", pods_table),
        ("measured", measured_table),
    ):
        begin, end = f"<!-- {name}: tools/scaling_tables.py -->\n", f"<!-- end of {name} -->\n"
        before, _, rest = text.partition(begin)
        text = before + begin + made() + end + rest.partition(end)[2]
    return text


if __name__ == "__main__":
    DOCUMENT.write_text(filled(DOCUMENT.read_text()))
