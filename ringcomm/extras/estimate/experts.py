"""Memory and traffic of a layer of experts, by the ranks that divide the experts.

Tokens choose k of E experts with equal chances. Of a group over m nodes, with E / m experts each, a
node has none of a token's with the chance C(E - E / m, k) / C(E, k). So a token crosses to
(m - 1) (1 - C(E - E / m, k) / C(E, k)) other nodes, and k (m - 1) / m of its rows are there.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb
from typing import NamedTuple

from ringcomm.errors import ArgumentError
from ringcomm.extras.estimate.model import ModelElems, require_at_least
from ringcomm.extras.estimate.training import FP32_BYTES, Training, coded_bytes
from ringcomm.zero import ZeroOptions

# Words for each row that another node has: its token there, its number and its weight.
ENTRY_BYTES = 3 * 8


class ExpertBytes(NamedTuple):
    """Bytes that a rank sends to other nodes in each call and its backward, on average."""

    dispatch: float
    combine: float
    combine_backward: float
    dispatch_backward: float


@dataclass(frozen=True)
class ExpertLayer:
    """A layer of experts that ranks divide.

    Attributes:
        experts: experts of all ranks.
        top_k: experts of a token.
        hidden: elements of a token.
        tokens: tokens of a rank in a forward.
        params: elements of an expert.
        group: ranks that divide the experts: a divisor of a node's ranks, or whole nodes.
        ranks: ranks of all nodes; the ranks with the same experts share their state.
        nodes: nodes, each of equally many ranks.
        elem_bytes: bytes of an element of a token.
        wire: None, or the codes of dispatch, "int8" or "fp8".

    Raises:
        ArgumentError: a size is not positive, or the group does not divide experts and ranks.
    """

    experts: int
    top_k: int
    hidden: int
    tokens: int
    params: int
    group: int
    ranks: int
    nodes: int = 1
    elem_bytes: int = 2
    wire: str | None = None

    def __post_init__(self) -> None:
        sizes = {name: each for name, each in vars(self).items() if name != "wire"}
        require_at_least("experts", 1, **sizes)
        if self.top_k > self.experts:
            raise ArgumentError(f"experts: expected top-k of at most {self.experts} experts")
        fits = self.ranks % self.nodes == 0
        fits = fits and 0 in (self._mates % self.group, self.group % self._mates)
        if not fits or self.ranks % self.group or self.experts % self.group:
            raise ArgumentError(
                f"experts: expected a group that divides a node's ranks or is whole nodes, and "
                f"divides {self.ranks} ranks and {self.experts} experts, got {self.group}"
            )
        if self.wire not in (None, "int8", "fp8"):
            raise ArgumentError(f"experts: wire: expected None, int8 or fp8, got {self.wire!r}")

    @property
    def _mates(self) -> int:
        return self.ranks // self.nodes

    @property
    def row_bytes(self) -> int:
        """Bytes of a token or of a row that is not coded."""
        return self.hidden * self.elem_bytes

    @property
    def payload_bytes(self) -> int:
        """Bytes of a token in dispatch."""
        return self.row_bytes if self.wire is None else coded_bytes(self.wire, self.hidden)

    @property
    def memory_bytes(self) -> int:
        """Bytes of a rank's rows and two outboxes, if all experts get as many tokens."""
        rows = self.tokens * self.top_k * self.row_bytes
        return rows + 2 * max(rows, self.tokens * self.payload_bytes)

    def training(self, options: ZeroOptions) -> Training:
        """Returns the training of a rank's experts, whose state their replicas share."""
        replicas, per_node = self.ranks // self.group, max(1, self._mates // self.group)
        model = ModelElems(self.experts // self.group * self.params)
        return Training(model, replicas, replicas // per_node, options)

    def between_nodes(self) -> ExpertBytes:
        """Returns the bytes of tokens and rows, without headers and counts."""
        nodes, k = max(1, self.group // self._mates), self.top_k
        none = comb(self.experts - self.experts // nodes, k) / comb(self.experts, k)
        crossings = self.tokens * (nodes - 1) * (1 - none)
        rows = self.tokens * k * (nodes - 1) / nodes
        return ExpertBytes(
            dispatch=crossings * self.payload_bytes + rows * ENTRY_BYTES,
            combine=rows * self.row_bytes,
            combine_backward=crossings * self.row_bytes + rows * FP32_BYTES,
            dispatch_backward=rows * self.row_bytes,
        )
