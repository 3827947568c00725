"""The cost model's parameters from measured collectives, and how well it then predicts others.

``python -m ringcomm.comm.topology.fit ROWS.csv --fit-at 0.1 0.4`` fits on the rows of these rates
and compares the model with all other rows. The rows are those of ``ringcomm.bench.nodes``, as CSV
or as a JSON list of objects.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ringcomm import _native
from ringcomm.comm.topology.cost import (
    ALGORITHMS,
    COLLECTIVES,
    Cluster,
    Coding,
    collective_cost,
)
from ringcomm.comm.topology.network import Network
from ringcomm.errors import ArgumentError, RingcommError
from ringcomm.json_reader import read_bounded, read_object, shown

__all__ = ["Fitted", "Measured", "Validated", "fit", "predicted_ms", "read_rows", "validate"]

# An all-to-all of the rails alone: no stage in the node, no sum.
EXCHANGE = "exchange"
LARGEST_FILE_BYTES = 16 << 20
# Where rates within a node and of memory do not matter.
UNLIMITED_GBPS = 1e9
BITS_PER_BYTE = 8
FINEST_STEP = 1.01


@dataclass(frozen=True)
class Measured:
    """One row.

    Attributes:
        collective: of ``COLLECTIVES``, or "exchange".
        algorithm: of ``ALGORITHMS``.
        nodes: that took part.
        ranks_per_node: of each.
        nics_per_node: links of each.
        gbit_s: nominal rate of a link, 1e9 bits/s.
        bytes: of the whole buffer.
        ms: median of the slowest rank.
        rounds: that the median is of.
        segment_bytes: in which a rank's data were pipelined; 0 is not at all.
        wire: of the sums, as in :class:`ringcomm.comm.options.CommOptions`; "" is "fp32".
    """

    collective: str
    algorithm: str
    nodes: int
    ranks_per_node: int
    nics_per_node: int
    gbit_s: float
    bytes: int
    ms: float
    rounds: int = 1
    segment_bytes: int = 0
    wire: str = ""

    def __post_init__(self) -> None:
        if self.collective not in (*COLLECTIVES, EXCHANGE):
            raise ArgumentError(f"row: unknown collective {shown(self.collective)}")
        if self.algorithm not in ALGORITHMS:
            raise ArgumentError(f"row: unknown algorithm {shown(self.algorithm)}")
        if self.wire and self.wire not in _native.WIRES:
            raise ArgumentError(f"row: unknown wire {shown(self.wire)}")
        for name in ("gbit_s", "bytes", "ms"):
            if not 0 < getattr(self, name) < math.inf:
                raise ArgumentError(
                    f"row: expected {name} above 0, got {shown(getattr(self, name))}"
                )


@dataclass(frozen=True)
class Fitted:
    """The parameters of a machine that rows lead to.

    Attributes:
        alpha_us: of a message between nodes.
        payload: the share of a link's nominal rate that data get; the rest are headers and idling.
        node_gbps: at which neighbours in a node pass data on.
        coding_gbps: of FP32 that a rank codes, or decodes and adds, for a coded wire.
    """

    alpha_us: float
    payload: float
    node_gbps: float
    coding_gbps: float = 1.0

    def cluster(self, row: Measured) -> Cluster:
        """The machines that a row was measured on."""
        return Cluster(
            network=Network("switch", row.nodes),
            ranks_per_node=row.ranks_per_node,
            nics_per_node=row.nics_per_node,
            nic_gbps=row.gbit_s / BITS_PER_BYTE * self.payload,
            nic_alpha_us=self.alpha_us,
            nic_message_us=0.0,
            hop_us=0.0,
            node_gbps=self.node_gbps,
            node_alpha_us=self.alpha_us,
            memory_gbps=UNLIMITED_GBPS,
        )


@dataclass(frozen=True)
class Validated:
    """A row beside what the model says of it."""

    row: Measured
    predicted_ms: float

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted_ms / self.row.ms


def read_rows(path: Path) -> list[Measured]:
    """Reads rows from CSV (lines that begin with # are comments) or JSON.

    Raises:
        ArgumentError: the file cannot be read, or holds something else; says where.
    """
    try:
        text = read_bounded(path, LARGEST_FILE_BYTES).decode()
        if path.suffix == ".json":
            plain: Iterable[Any] = json.loads(text)
        else:
            lines = (line for line in text.splitlines() if not line.startswith("#"))
            plain = [_typed(row) for row in csv.DictReader(lines)]
        return [read_object(Measured, each, f"row {n}") for n, each in enumerate(plain, 1)]
    except (OSError, ValueError, TypeError) as error:
        raise ArgumentError(f"{path}: {error}") from error


def _typed(row: Mapping[str, str]) -> dict[str, Any]:
    kinds: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str}
    columns = {field.name: kinds[str(field.type)] for field in fields(Measured)}
    return {name: columns.get(name, str)(text) for name, text in row.items()}


def predicted_ms(row: Measured, fitted: Fitted) -> float:
    """The model's time for what a row measures."""
    cluster = fitted.cluster(row)
    collective = row.collective
    if collective == EXCHANGE:
        collective = "reduce_scatter"
        cluster = replace(cluster, node_gbps=UNLIMITED_GBPS, node_alpha_us=0.0)
    segment_bytes = row.segment_bytes or row.bytes
    coding = Coding.of_wire(row.wire, fitted.coding_gbps) if row.wire else None
    cost = collective_cost(cluster, collective, row.bytes, row.algorithm, segment_bytes, coding)
    return cost.time_us / 1e3


def fit(rows: Sequence[Measured]) -> Fitted:
    """The parameters whose predictions are nearest to the rows, as ratios.

    The mean of |log(predicted / measured)| is made least, one parameter after the other in steps
    that shrink: outliers count less than by squares.

    Raises:
        ArgumentError: there are no rows.
    """
    plain, coded = [[row for row in rows if bool(row.wire) is wired] for wired in (False, True)]
    if not plain:
        raise ArgumentError("fit: expected rows, got none")
    best = Fitted(alpha_us=1e3 * min(row.ms for row in plain), payload=0.9, node_gbps=1.0)
    best = _nearest(plain, best, ("payload", "alpha_us", "node_gbps"))
    # What the link does is known then, and coded rows tell the rate of coding.
    return _nearest(coded, best, ("coding_gbps",)) if coded else best


def _nearest(rows: Sequence[Measured], best: Fitted, names: Sequence[str]) -> Fitted:
    """Returns ``best`` with the parameters of ``names`` moved to where the rows are nearest."""

    def loss(fitted: Fitted) -> float:
        return statistics.fmean(abs(math.log(predicted_ms(row, fitted) / row.ms)) for row in rows)

    least, factor = loss(best), 2.0
    while factor > FINEST_STEP:
        improved = False
        for name in names:
            for step in (factor, 1 / factor):
                tried = replace(best, **{name: getattr(best, name) * step})
                if tried.payload <= 1 and (value := loss(tried)) < least:
                    best, least, improved = tried, value, True
        if not improved:
            factor = math.sqrt(factor)
    return best


def validate(rows: Sequence[Measured], fitted: Fitted) -> list[Validated]:
    """Each row beside its prediction."""
    return [Validated(row, predicted_ms(row, fitted)) for row in rows]


def _table(validated: Sequence[Validated]) -> list[str]:
    lines = [
        "collective  algorithm  wire  nodes x ranks  Gbit/s  bytes  measured ms  predicted  ratio"
    ]
    for each in validated:
        row = each.row
        lines.append(
            f"{row.collective}  {row.algorithm}  {row.wire or 'fp32'}  "
            f"{row.nodes} x {row.ranks_per_node}  {row.gbit_s:g}  {row.bytes}  {row.ms:.3g}  "
            f"{each.predicted_ms:.3g}  {each.ratio:.3f}"
        )
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Fits and compares; returns 2 for rows or rates that make no sense."""
    parser = argparse.ArgumentParser(
        prog="ringcomm.comm.topology.fit", description="Fits the cost model to measured rows."
    )
    parser.add_argument("rows", type=Path, help="CSV or JSON of ringcomm.bench.nodes")
    parser.add_argument(
        "--fit-at", type=float, nargs="+", required=True, help="Gbit/s of the rows to fit"
    )
    parser.add_argument("--least-bytes", type=int, default=1 << 20, help="of a validated row")
    args = parser.parse_args(argv)
    try:
        rows = read_rows(args.rows)
        fitted = fit([row for row in rows if row.gbit_s in args.fit_at])
    except RingcommError as error:
        print(f"ringcomm.comm.topology.fit: {error}", file=sys.stderr)
        return 2
    others = [row for row in rows if row.gbit_s not in args.fit_at]
    validated = validate([row for row in others if row.bytes >= args.least_bytes], fitted)
    print(fitted)
    print("\n".join(_table(validated)))
    within = sum(abs(each.ratio - 1) <= 0.1 for each in validated)
    print(f"within 10 %: {within} of {len(validated)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
