"""What the codes of gradients have lost, as state that is saved and loaded; for any nodes.

NOTE [Residuals of other nodes]
Each node has a residual of each bucket, over its ranks, of partial sums that are not averaged yet.
Where as many nodes load as have saved, each takes its own, and training continues with its bits.
Of M nodes that have saved, node n of N others takes the residuals of nodes n, n + N, ... to their
sum: what the training owes as a whole stays what it was. With ``reduce="avg"`` it is the mean
gradient to which something is owed, so residuals grow with the ranks by whose number sums are
divided. One node codes nothing, and takes nothing.

With copies of the state on nodes, sums are coded as well, each element by one rank; what these
codes have lost is in units of the sums. Where sums are not coded, node 0 takes that over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ringcomm.comm.nodes.wires import Residual
from ringcomm.errors import CheckpointError
from ringcomm.optim.buckets import Bucket
from ringcomm.optim.layout import BucketLayout, ShardLayout
from ringcomm.optim.step import ShardedStep

Tensor = torch.Tensor

#: Fills a tensor with elements of a bucket from one on, of the residual of a node that has saved,
#: or for None of what the codes of sums have lost; with zeros where there are none.
Read = Callable[[int | None, int, Tensor], None]


@dataclass(frozen=True)
class Debtors:
    """The ranks that keep residuals, or have saved them.

    Attributes:
        nodes: the number of nodes.
        divide_by: what partial sums are divided by in the end: the number of ranks, or 1.
        scale: the loss scale of the gradients.
    """

    nodes: int
    divide_by: int
    scale: float

    @classmethod
    def of(cls, sharded: ShardedStep) -> Debtors | None:
        """Returns those of an optimizer; None if nothing is kept."""
        comm, options = sharded.setting.comm, sharded.setting.options
        if comm is None or not any(with_residuals(sharded)):
            return None
        divide_by = comm.world_size if options.reduce == "avg" else 1
        return cls(comm.num_nodes, divide_by, sharded.setting.loss_scale())

    @classmethod
    def read(cls, described: Mapping[str, Any]) -> Debtors:
        """Undoes :meth:`describe`.

        Raises:
            KeyError, TypeError, ValueError: it is damaged.
        """
        found = cls(int(described["nodes"]), int(described["divide_by"]), float(described["scale"]))
        if found.nodes < 2 or found.divide_by < 1 or not found.scale > 0.0:
            raise ValueError(f"residuals of {described}")
        return found

    def describe(self) -> dict[str, Any]:
        """Returns it as plain JSON types."""
        return asdict(self)


def with_residuals(sharded: ShardedStep) -> Iterator[tuple[Bucket, Residual]]:
    """Yields the buckets that keep what codes lose, in the scale of the next gradients."""
    for bucket in sharded.buckets:
        if bucket.residual is not None:
            bucket.residual.follow_scale()
            yield bucket, bucket.residual


def nodes_for(saved: Debtors, sharded: ShardedStep) -> range:
    """Returns the nodes that have saved whose residuals this rank's node takes."""
    comm = sharded.setting.comm
    assert comm is not None  # alone nothing is kept
    return range(comm.node_of(comm.rank), saved.nodes, comm.num_nodes)


def take(sharded: ShardedStep, residual: Residual, saved: Debtors, read: Read) -> None:
    """Takes over one bucket's residuals; see NOTE [Residuals of other nodes]."""
    mine = Debtors.of(sharded)
    assert mine is not None
    grows, owed = mine.divide_by / saved.divide_by, nodes_for(saved, sharded)
    residual.forget()
    residual.scale = saved.scale
    for number, node in enumerate(owed):
        more = residual.partial if number == 0 else torch.empty_like(residual.partial)
        read(node, residual.begin, more)
        if number:
            residual.partial.add_(more)
    residual.partial.mul_(grows)
    if residual.sums.numel():
        read(None, residual.sums_begin, residual.sums)
    elif 0 in owed:
        of_sums = torch.empty_like(residual.partial)
        read(None, residual.begin, of_sums)
        residual.partial.add_(of_sums, alpha=mine.divide_by)


def forget_all(sharded: ShardedStep) -> None:
    """Owes nothing any more."""
    for _, residual in with_residuals(sharded):
        residual.forget()


# As part of a shard, as ringcomm.optim.state has it.


def tensors_of(sharded: ShardedStep) -> list[dict[str, Tensor] | None]:
    """Returns this rank's residuals by bucket, no copies; None for a bucket without one."""
    kept = {bucket.number: residual for bucket, residual in with_residuals(sharded)}
    return [
        {"partial": kept[n].partial, "sums": kept[n].sums} if n in kept else None
        for n in range(len(sharded.buckets))
    ]


def told_of(sharded: ShardedStep, debtors: Debtors) -> dict[str, Any]:
    """Returns what a shard says of them, as plain JSON types."""
    comm = sharded.setting.comm
    assert comm is not None
    kept = {bucket.number: residual for bucket, residual in with_residuals(sharded)}
    begins = {str(number): [each.begin, each.sums_begin] for number, each in kept.items()}
    return {**debtors.describe(), "node": comm.node_of(comm.rank), "begins": begins}


@dataclass(frozen=True)
class SavedResiduals:
    """The residuals of one rank's shard.

    Attributes:
        debtors: of the world that saved.
        node: that of the rank.
        layout: of the parameters there.
        runs: by number of the bucket, the first element and the values of partial sums, and of
            sums.
    """

    debtors: Debtors
    node: int
    layout: ShardLayout
    runs: Mapping[int, tuple[tuple[int, Tensor], tuple[int, Tensor]]]

    @classmethod
    def read(cls, told: Any, tensors: Any, layout: ShardLayout) -> SavedResiduals:
        """Reads what :func:`told_of` and :func:`tensors_of` returned.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: it is damaged.
        """
        runs = {}
        for number, begins in told["begins"].items():
            bucket, found = layout.buckets[int(number)], []
            for begin, name in zip(begins, ("partial", "sums"), strict=True):
                values = tensors[int(number)][name]
                if (
                    values.dtype is not torch.float32
                    or values.dim() != 1
                    or not 0 <= begin <= begin + values.numel() <= bucket.elems
                ):
                    raise ValueError(f"residuals of bucket {number}: {name}")
                found.append((int(begin), values))
            runs[int(number)] = (found[0], found[1])
        debtors, node = Debtors.read(told), int(told["node"])
        if not 0 <= node < debtors.nodes:
            raise ValueError(f"residuals of node {node} of {debtors.nodes}")
        return cls(debtors, node, layout, runs)

    def add_to(self, out: Tensor, begin: int, param: int, of_sums: bool) -> None:
        """Adds what there is of elements from ``begin`` on of a parameter."""
        number, segment = self.layout.places[param]
        if number not in self.runs:
            return
        first, values = self.runs[number][of_sums]
        low = segment.begin + begin
        a, b = max(low, first), min(low + out.numel(), first + values.numel())
        if a < b:
            out[a - low : b - low].add_(values[a - first : b - first])

    def fits(self, sharded: ShardedStep) -> bool:
        """Tells whether they are those that this rank keeps, element by element."""
        comm = sharded.setting.comm
        assert comm is not None
        mine = {
            bucket.number: [(each.begin, each.partial), (each.sums_begin, each.sums)]
            for bucket, each in with_residuals(sharded)
        }
        return (
            self.layout.buckets == sharded.layout.buckets
            and (self.debtors.nodes, self.node) == (comm.num_nodes, comm.node_of(comm.rank))
            and {n: _extents(each) for n, each in self.runs.items()}
            == {n: _extents(each) for n, each in mine.items()}
        )


def _extents(runs: Sequence[tuple[int, Tensor]]) -> list[tuple[int, int]]:
    return [(begin, values.numel()) for begin, values in runs]


def check_residuals(
    sharded: ShardedStep, saved: Sequence[SavedResiduals], complete: bool, operation: str
) -> None:
    """Raises CheckpointError if residuals are to be taken over that are not all there.

    Args:
        sharded: the optimizer, which may keep none.
        saved: of the shards that are given.
        complete: they are those of all ranks.
        operation: named in errors.
    """
    if not saved or Debtors.of(sharded) is None or complete:
        return
    if not (len(saved) == 1 and saved[0].fits(sharded)):
        raise CheckpointError(
            f"{operation}: the residuals of coded gradients are of other nodes than here; pass "
            "the shards of all ranks"
        )


def take_residuals(sharded: ShardedStep, saved: Sequence[SavedResiduals]) -> None:
    """Takes over what :func:`check_residuals` has checked; without any, nothing is owed."""
    forget_all(sharded)
    if not saved or Debtors.of(sharded) is None:
        return
    for bucket, residual in with_residuals(sharded):

        def read(
            node: int | None, begin: int, out: Tensor, layout: BucketLayout = bucket.layout
        ) -> None:
            out.zero_()
            for low, high, param in layout.segments:
                a, b = max(low, begin), min(high, begin + out.numel())
                for each in saved if a < b else ():
                    if node is None or each.node == node:
                        each.add_to(out[a - begin : b - begin], a - low, param, node is None)

        take(sharded, residual, saved[0].debtors, read)
