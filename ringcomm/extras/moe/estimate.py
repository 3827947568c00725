"""What a layer of experts takes and moves, by where the experts are, from sizes alone.

Tokens choose k of E experts with equal chances. Of a group over m nodes, with E / m experts each, a
node has none of a token's with the chance C(E - E / m, k) / C(E, k), so that a token crosses to

    c = (m - 1) (1 - C(E - E / m, k) / C(E, k))

other nodes, and k (m - 1) / m of its rows are there. ``ringcomm/extras/moe/nodes.py`` says what
crosses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import comb

from ringcomm import _native
from ringcomm.errors import ArgumentError
from ringcomm.extras.moe.rows import FLOAT_BYTES, WIRES, WORD_BYTES
from ringcomm.zero.estimate import BytesPerElement, StateBytes, World, model_state
from ringcomm.zero.estimate_model import ModelElems, require_at_least

# What a rank of another node is told of each row: its token there, its number, and its weight.
ENTRY_BYTES = 3 * WORD_BYTES


@dataclass(frozen=True)
class ExpertLayer:
    """A layer of experts, as each rank runs it.

    Attributes:
        experts: of all ranks.
        top_k: experts of a token.
        hidden: elements of a token.
        tokens: of a rank, in a forward.
        params: elements of an expert.
        elem_bytes: of an element of a row.
        wire: None, or what codes the rows of dispatch: "int8" or "fp8".
    """

    experts: int
    top_k: int
    hidden: int
    tokens: int
    params: int
    elem_bytes: int = 2
    wire: str | None = None

    def __post_init__(self) -> None:
        sizes = {
            name: getattr(self, name)
            for name in ("experts", "top_k", "hidden", "tokens", "params", "elem_bytes")
        }
        require_at_least("experts", 1, **sizes)
        if self.top_k > self.experts:
            raise ArgumentError(
                f"experts: expected top-k of at most the {self.experts} experts, got {self.top_k}"
            )
        if self.wire not in (None, *WIRES):
            raise ArgumentError(f"experts: wire: expected None, int8 or fp8, got {self.wire!r}")

    @property
    def row_bytes(self) -> int:
        """Bytes of a row that is not coded."""
        return self.hidden * self.elem_bytes

    @property
    def payload_bytes(self) -> int:
        """Bytes of a row of dispatch."""
        if self.wire is None:
            return self.row_bytes
        return _native.wire_bytes(_native.WIRES[self.wire], self.hidden)


@dataclass(frozen=True)
class ExpertPlacement:
    """The ranks that experts are divided over.

    Attributes:
        group: how many; those of one node after the other.
        world: all ranks; those that have the same experts share their state.
    """

    group: int
    world: World

    def __post_init__(self) -> None:
        mates, ranks = self.world.mates, self.world.ranks
        require_at_least("experts", 1, group=self.group)
        within = mates % self.group == 0
        if ranks % mates or ranks % self.group or not (within or self.group % mates == 0):
            raise ArgumentError(
                f"experts: expected groups that divide a node's {mates} ranks or are whole nodes, "
                f"and divide all {ranks}, got {self.group}"
            )

    @property
    def nodes(self) -> int:
        """The nodes of a group."""
        return max(1, self.group // self.world.mates)

    @property
    def replicas(self) -> World:
        """The ranks that have the same experts."""
        per_node = max(1, self.world.mates // self.group)
        return replace(self.world, ranks=self.world.ranks // self.group, ranks_per_node=per_node)


@dataclass(frozen=True)
class Exchanged:
    """The bytes of a layer that a rank sends to other nodes, on average, in forward and backward.

    Attributes:
        dispatch: tokens, and what is told of their rows.
        combine: experts' rows.
        combine_backward: gradients of tokens, and back those of weights.
        dispatch_backward: gradients of rows.
    """

    dispatch: float
    combine: float
    combine_backward: float
    dispatch_backward: float

    @property
    def total(self) -> float:
        return self.dispatch + self.combine + self.combine_backward + self.dispatch_backward


def between_nodes(layer: ExpertLayer, placement: ExpertPlacement) -> Exchanged:
    """Returns what a rank sends to other nodes; zeros where its group is of one.

    Headers and counts, a few hundred bytes a rank and call, are left out.
    """
    nodes, experts, k = placement.nodes, layer.experts, layer.top_k
    _check(layer, placement)
    without = experts - experts // nodes
    crossings = layer.tokens * (nodes - 1) * (1 - comb(without, k) / comb(experts, k))
    rows = layer.tokens * k * (nodes - 1) / nodes
    return Exchanged(
        dispatch=crossings * layer.payload_bytes + rows * ENTRY_BYTES,
        combine=rows * layer.row_bytes,
        combine_backward=crossings * layer.row_bytes + rows * FLOAT_BYTES,
        dispatch_backward=rows * layer.row_bytes,
    )


def read_from_mates(layer: ExpertLayer, placement: ExpertPlacement) -> float:
    """Returns the bytes that a rank reads out of its node's memory, forward and backward.

    Those are rows of its experts, of its node's tokens and of what arrived there; and back, those
    of its tokens whose experts are on its node.
    """
    _check(layer, placement)
    rows = layer.tokens * layer.top_k
    forth = rows * (layer.payload_bytes + layer.row_bytes)
    back = rows / placement.nodes * 2 * layer.row_bytes
    return forth + back


def rows_memory(layer: ExpertLayer) -> int:
    """Returns the bytes of a rank's rows and two outboxes, if experts are loaded alike."""
    rows = layer.tokens * layer.top_k * layer.row_bytes
    return rows + 2 * max(rows, layer.tokens * layer.payload_bytes)


def of_experts(
    layer: ExpertLayer, placement: ExpertPlacement, stage: int, each: BytesPerElement
) -> StateBytes:
    """Returns the model state of a rank's experts, which zero shards over their replicas."""
    _check(layer, placement)
    here = layer.experts // placement.group * layer.params
    return model_state(ModelElems(here), stage, placement.replicas, each)


def gradients_between_nodes(
    layer: ExpertLayer, placement: ExpertPlacement, each: BytesPerElement
) -> float:
    """Returns what a rank sends to other nodes in a step for its experts' gradients and updates.

    Gradients as FP32, and back updated parameters, which a node's replicas share (stages 1 to 3).
    """
    _check(layer, placement)
    here = layer.experts // placement.group * layer.params
    replicas = placement.replicas
    share = (replicas.nodes - 1) / replicas.nodes / replicas.mates
    return here * share * (FLOAT_BYTES + each.param)


def placements(world: World) -> Iterator[tuple[str, ExpertPlacement]]:
    """Yields the placements that are compared: experts within each node, and over all ranks."""
    if world.nodes > 1:
        yield "in each node", ExpertPlacement(world.mates, world)
    yield "over all ranks", ExpertPlacement(world.ranks, world)


def _check(layer: ExpertLayer, placement: ExpertPlacement) -> None:
    if layer.experts % placement.group:
        raise ArgumentError(
            f"experts: expected a multiple of the {placement.group} ranks that they are divided "
            f"over, got {layer.experts}"
        )
