"""Muon: each whole matrix is orthogonalised by one rank; AdamW steps what is no such matrix.

Terms. A *direction* is what a gradient and its momentum make of a matrix, element by element; the
*update* is the direction orthogonalised, which takes the whole matrix. The *owner* of a matrix is
the rank that does this. W ranks, M elements of matrices in all.

The state is sharded as AdamW's is, by elements: chunk r of a bucket has pieces of several matrices.
So a step is, beside the reduction and the gathering of parameters that every optimizer has:

1. each rank makes the directions of its pieces, in bfloat16, as torch orthogonalises them;
2. an all-to-all gives each owner its whole matrices: 2 M (W-1)/W^2 bytes leave a rank;
3. owners orthogonalise; a matrix of m x n elements, m <= n, takes 2 m (2 m n + m^2) operations in
   each iteration, by which owners are balanced;
4. an all-to-all brings the pieces of the updates back: as many bytes again;
5. each rank applies them to its pieces.

All buckets go together, so that no owner waits for another but once. At stage 0 all ranks have all
directions: 2 falls away, and 4 sends whole updates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ringcomm import _native
from ringcomm.c10d.comm_argument import CommArgument
from ringcomm.comm.communicator import Communicator
from ringcomm.errors import ArgumentError, UnsupportedError
from ringcomm.module_names import matches, named_parameters
from ringcomm.optim.backends import Backend, DeviceBackend, HostBackend, StepTable
from ringcomm.optim.buckets import Bucket, Buckets
from ringcomm.optim.dtensors import is_distributed
from ringcomm.optim.layout import BucketLayout, Chunk, ParamSpec, ShardLayout
from ringcomm.optim.options import AdamWOptions
from ringcomm.optim.rules import (
    MOMENTS,
    AdamWRule,
    Group,
    ParamState,
    TensorBackend,
    TensorRule,
    check_betas,
    check_positive,
    check_rate,
    fail,
    numbers,
)
from ringcomm.optim.setting import LossScaler
from ringcomm.optim.sharded import Params, ShardedOptimizer, Sharing

Tensor = torch.Tensor


def owners_of(costs: Sequence[int], ranks: int) -> list[int]:
    """Gives each parameter an owner, the most expensive first and each to the least busy rank."""
    busy, owners = [0] * ranks, [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda each: -costs[each]):
        owners[number] = min(range(ranks), key=lambda rank: busy[rank])
        busy[owners[number]] += costs[number]
    return owners


@dataclass(frozen=True)
class OwnedParam:
    """A parameter that one rank computes with as a whole: elements [begin, end) of a bucket."""

    index: int
    bucket: int
    begin: int
    end: int
    spec: ParamSpec

    def within(self, chunk: Chunk) -> slice | None:
        """Returns the part of the parameter's elements that a chunk has, or None."""
        low, high = max(self.begin, chunk.begin), min(self.end, chunk.end)
        return slice(low - self.begin, high - self.begin) if low < high else None

    def piece_in(self, flat: Tensor, chunk: Chunk) -> Tensor | None:
        """Returns the parameter's piece of a tensor with a chunk's elements, or None."""
        inside = self.within(chunk)
        if inside is None:
            return None
        shift = self.begin - chunk.begin
        return flat[inside.start + shift : inside.stop + shift]


class OwnerExchange:
    """The way of pieces to the owners of parameters, and back.

    Args:
        params: those that travel, in the same order on all ranks.
        costs: of the work for each, by which owners are balanced.
        buckets: by number, those that they lie in.
        sharers: the ranks that share the work; None for this one alone.
        is_replicated: every rank has the pieces of all, as at stage 0.
        dtype: of all tensors.

    Attributes:
        mine: numbers of the parameters that this rank owns.
    """

    def __init__(
        self,
        params: Sequence[OwnedParam],
        costs: Sequence[int],
        buckets: Mapping[int, Bucket],
        sharers: Communicator | None,
        is_replicated: bool,
        dtype: torch.dtype,
    ) -> None:
        self._params = params
        self._dtype = dtype
        self._sharers = sharers
        self._is_replicated = is_replicated
        ranks = 1 if sharers is None else sharers.world_size
        self._ranks = range(ranks)
        self._rank = 0 if sharers is None else sharers.rank
        self._owners = owners_of(costs, ranks)
        self.mine = [number for number, owner in enumerate(self._owners) if owner == self._rank]
        # By parameter, the slices of it that the ranks have.
        self._slices = [self._slices_of(each, buckets[each.bucket]) for each in params]

    def _slices_of(self, param: OwnedParam, bucket: Bucket) -> list[slice | None]:
        if self._sharers is None or self._is_replicated:
            return [param.within(bucket.chunk)] * len(self._ranks)
        return [param.within(chunk) for chunk in bucket.layout.chunks(self._sharers)]

    def _is_whole(self, number: int) -> bool:
        """Tells whether the owner of a parameter has all of it."""
        inside = self._slices[number][self._owners[number]]
        return inside == slice(0, self._params[number].spec.elems)

    def to_owners(self, pieces: Sequence[Tensor | None]) -> dict[int, Tensor]:
        """Returns by number this rank's parameters, whole and flat, which may be changed.

        Args:
            pieces: by number, this rank's piece; None where it has none.
        """
        sent: list[list[Tensor]] = [[] for _ in self._ranks]
        for number, piece in enumerate(pieces):
            if piece is not None and not self._is_whole(number):
                sent[self._owners[number]].append(piece)
        found: dict[int, Tensor] = {}
        room: list[list[Tensor]] = [[] for _ in self._ranks]
        for number in self.mine:
            piece = pieces[number]
            if self._is_whole(number):
                assert piece is not None
                found[number] = piece.clone()
                continue
            found[number] = self._empty(self._params[number].spec.elems)
            for rank in self._ranks:
                inside = self._slices[number][rank]
                if inside is not None:
                    room[rank].append(found[number][inside])
        self._all_to_all(room, sent)
        return found

    def from_owners(
        self,
        wholes: Mapping[int, Tensor],
        room_for: Mapping[int, Tensor],
        shared: Sequence[Sequence[Tensor]] = (),
    ) -> None:
        """Fills each rank's pieces with those of the wholes that the owners have.

        Args:
            wholes: by number, this rank's parameters, flat.
            room_for: by number, this rank's piece of each parameter that it has a part of.
            shared: by number, tensors that all ranks get as the owner has them.
        """
        sent: list[list[Tensor]] = [[] for _ in self._ranks]
        for number, whole in wholes.items():
            for rank in self._ranks:
                inside = self._slices[number][rank]
                if inside is not None:
                    sent[rank].append(whole[inside])
                if rank != self._rank and shared:
                    sent[rank] += [each.reshape(-1) for each in shared[number]]
        room: list[list[Tensor]] = [[] for _ in self._ranks]
        for number, owner in enumerate(self._owners):
            if number in room_for:
                room[owner].append(room_for[number])
            if owner != self._rank and shared:
                room[owner] += [each.view(-1) for each in shared[number]]
        self._all_to_all(room, sent)

    def _empty(self, elems: int) -> Tensor:
        device = "cpu" if self._sharers is None else self._sharers.device
        return torch.empty(elems, dtype=self._dtype, device=device)

    def _all_to_all(self, room: Sequence[list[Tensor]], sent: Sequence[list[Tensor]]) -> None:
        """Fills the tensors of ``room[r]`` with those that rank r sends, in their order."""
        outputs = [self._empty(sum(each.numel() for each in tensors)) for tensors in room]
        inputs = [torch.cat(tensors) if tensors else self._empty(0) for tensors in sent]
        if self._sharers is None or self._sharers.world_size == 1:
            outputs = inputs
        else:
            self._sharers.all_to_all(outputs, inputs)
        for output, tensors in zip(outputs, room, strict=True):
            end = 0
            for tensor in tensors:
                begin, end = end, end + tensor.numel()
                tensor.copy_(output[begin:end])


def refuse_other_options(name: str, options: AdamWOptions) -> None:
    """Raises UnsupportedError unless the options are those that owners' steps have."""
    if options.kernels != "native" or options.master == "remainder":
        raise UnsupportedError(
            f'{name}: expected kernels="native" and master="fp32", got '
            f"kernels={options.kernels!r} and master={options.master!r}"
        )
    if options.rounding != "nearest":
        raise UnsupportedError(f'{name}: expected rounding="nearest", got "stochastic"')


def params_of(entries: Sequence[object]) -> list[tuple[str, Tensor]]:
    """Returns a group's parameters that are tensors, each with its words for an error."""
    bare = [entry[1] if isinstance(entry, tuple) else entry for entry in entries]
    return [
        (f"parameter {number}", param)
        for number, param in enumerate(bare)
        if isinstance(param, Tensor)
    ]


def is_divided(param: Tensor) -> bool:
    """Returns whether ranks of a mesh have different local tensors of a parameter."""
    return is_distributed(param) and any(each.is_shard() for each in param.placements)  # type: ignore[attr-defined]


# ---- Muon: each whole matrix is orthogonalised by one rank; AdamW steps what is no such matrix ---


MOMENTUM = "momentum_buffer"
_ALGORITHMS = ("muon", "adamw")
_ADJUSTMENTS = (None, "original", "match_rms_adamw")


def orthogonalized(direction: Tensor, group: Group) -> Tensor:
    """Returns nearly the orthogonal matrix that is nearest to a direction: bfloat16 [m, n].

    Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024: iterations of
    Newton and Schulz with a polynomial of degree 5, in the operations of ``torch.optim.Muon``.

    Args:
        direction: bfloat16 [m, n].
        group: has "ns_coefficients", "ns_steps" and "eps".
    """
    a, b, c = group["ns_coefficients"]
    is_tall = direction.size(0) > direction.size(1)
    x = direction.T if is_tall else direction
    x = x / x.norm().clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if is_tall else x


def adjusted_lr(group: Group, shape: Sequence[int]) -> float:
    """Returns the learning rate of a matrix, as ``torch.optim.Muon`` has it."""
    rows, columns = shape
    if group["adjust_lr_fn"] == "match_rms_adamw":
        return float(group["lr"]) * 0.2 * math.sqrt(max(rows, columns))
    return float(group["lr"]) * math.sqrt(max(1, rows / columns))


def cost_of(shape: Sequence[int]) -> int:
    """Returns the multiplications that an iteration takes for a matrix."""
    short, long = sorted(shape)
    return short * short * (2 * long + short)


class MuonRule(TensorRule):
    """Muon for matrices of groups with the algorithm "muon", AdamW for those of "adamw".

    The native kernels step AdamW's parameters, and then all matrices are updated together.
    """

    elementwise = False
    name = "Muon"
    hypers = (
        *("algorithm", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps"),
        *("ns_steps", "adjust_lr_fn", "betas", "adamw_eps"),
    )
    hyper_columns = AdamWRule.hyper_columns
    factors_bytes = AdamWRule.factors_bytes

    def __init__(self) -> None:
        self._adamw = AdamWRule()
        self.groups: Sequence[Group] = ()
        self.matrices: list[OwnedParam] = []
        #: Every rank keeps the whole state, as at stage 0.
        self.is_replicated = False
        # The buckets that this step has come to, and by their numbers the directions of the chunk.
        self._buckets: dict[int, Bucket] = {}
        self._directions: dict[int, Tensor] = {}

    def check_hyper(self, group: Group, index: int, device: torch.device) -> None:
        if group["algorithm"] not in _ALGORITHMS:
            fail(index, "algorithm", 'one of "muon", "adamw"', group["algorithm"])
        check_rate(group, index, device)
        check_betas(group, index)
        check_positive(group, index, "momentum", "weight_decay", "eps", "adamw_eps")
        coefficients = group["ns_coefficients"]
        if not isinstance(coefficients, (tuple, list)) or len(coefficients) != 3:
            fail(index, "ns_coefficients", "three numbers", coefficients)
        if type(group["ns_steps"]) is not int or not 0 < group["ns_steps"] < 100:
            fail(index, "ns_steps", "an integer from 1 to 99", group["ns_steps"])
        if group["adjust_lr_fn"] not in _ADJUSTMENTS:
            expected = 'None, "original" or "match_rms_adamw"'
            fail(index, "adjust_lr_fn", expected, group["adjust_lr_fn"])
        if group["algorithm"] == "muon":
            for called, param in params_of(group["params"]):
                _check_matrix(param, f"param group {index}, {called}")

    def replaced(self, group: Group) -> dict[str, Any]:
        coefficients = group["ns_coefficients"]
        as_tuple = tuple(coefficients) if isinstance(coefficients, list) else coefficients
        return {"betas": numbers(group["betas"]), "ns_coefficients": as_tuple}

    def row(self, group: Group) -> list[float]:
        return self._adamw.row(_as_adamw(group))

    def names(self, groups: Sequence[Group]) -> tuple[str, ...]:
        kinds = {group["algorithm"] for group in groups}
        return (*((MOMENTUM,) if "muon" in kinds else ()), *(MOMENTS if "adamw" in kinds else ()))

    def names_of(self, group: Group, groups: Sequence[Group]) -> tuple[str, ...]:
        return self.names([group])

    def names_in(
        self, bucket: BucketLayout, layout: ShardLayout, groups: Sequence[Group]
    ) -> tuple[str, ...]:
        return self.names([groups[layout.params[each.param].group] for each in bucket.segments])

    def names_by_bucket(
        self, buckets: Sequence[BucketLayout], layout: ShardLayout, groups: Sequence[Group]
    ) -> list[tuple[str, ...]]:
        return [self.names_in(bucket, layout, groups) for bucket in buckets]

    def misfit(self, names: Sequence[str], groups: Sequence[Group]) -> str:
        known = self.names(groups)
        return "" if names and set(names) <= set(known) else " and ".join(known)

    def backend(
        self, comm: Communicator | None, options: AdamWOptions, table: StepTable
    ) -> Backend:
        refuse_other_options(self.name, options)
        native: Backend
        if comm is not None and comm.launches:
            native = DeviceBackend(comm, options, table, MOMENTS)
        else:
            native = HostBackend(comm, options, table, MOMENTS)
        return TensorBackend(comm, options, table, self, native)

    def bind(
        self,
        layout: ShardLayout,
        groups: Sequence[Group],
        buckets: Buckets,
        chunks: int,
        states: Sequence[ParamState | None] = (),
    ) -> None:
        self.groups = groups
        self.is_replicated = chunks == 1
        self.matrices = [
            OwnedParam(param, number, begin, end, layout.params[param])
            for number, bucket in enumerate(layout.buckets)
            for begin, end, param in bucket.segments
            if groups[layout.params[param].group]["algorithm"] == "muon"
        ]

    def state_at(self, step: float, group: Group) -> ParamState | None:
        is_matrix = group["algorithm"] == "muon"
        return ParamState({}, (MOMENTUM,)) if is_matrix else super().state_at(step, group)

    def from_torch(self, entry: Mapping[str, Any], group: Group) -> ParamState | None:
        if group["algorithm"] == "adamw":
            return self._adamw.from_torch(entry, _as_adamw(group))
        if entry.get(MOMENTUM) is None:
            raise ValueError(f"expected {MOMENTUM}, got {sorted(entry)}")
        return ParamState({}, (MOMENTUM,))

    def begin_updates(self, run: TensorBackend) -> None:
        self._buckets.clear()
        # To the native kernels a matrix has no gradient.
        matrices = [matrix.index for matrix in self.matrices]
        flags_word = _native.OPTIMIZER_STRUCTURES["factors.flags"] // 4
        run.table.factors.view(torch.int32)[matrices, flags_word] = 0

    def update(self, run: TensorBackend, bucket: Bucket, grad: Tensor) -> None:
        assert run.native is not None
        self._buckets[bucket.number] = bucket
        with bucket.params_here(write=True):
            for piece in bucket.pieces():
                inside, _ = bucket.within(*piece.chunk)
                here = grad[inside]
                run.native.update_shard(piece, here)
                for matrix in self._active(run):
                    if matrix.bucket == bucket.number:
                        self._direct(run, piece, matrix, here)

    def _active(self, run: TensorBackend) -> list[OwnedParam]:
        return [each for each in self.matrices if run.control.active[each.index]]

    def _direct(
        self, run: TensorBackend, bucket: Bucket, matrix: OwnedParam, grads: Tensor
    ) -> None:
        """Moves the momentum of a matrix in a piece of its bucket and keeps the direction there."""
        given = matrix.piece_in(grads, bucket.chunk)
        momentum = matrix.piece_in(bucket.state.moments[MOMENTUM], bucket.chunk)
        if given is None or momentum is None:
            return
        whole = self._buckets[bucket.number]
        if bucket.number not in self._directions:
            self._directions[bucket.number] = torch.empty(
                whole.chunk.elems, dtype=torch.bfloat16, device=grads.device
            )
        here, _ = whole.within(*bucket.chunk)
        direction = matrix.piece_in(self._directions[bucket.number][here], bucket.chunk)
        assert direction is not None
        grad = run.control.scaled(given)
        group = self.groups[matrix.spec.group]
        momentum.lerp_(grad, 1 - group["momentum"])
        direction.copy_(grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum)

    def end_updates(self, run: TensorBackend) -> None:
        active, replicated = self._active(run), self.is_replicated
        costs = [cost_of(matrix.spec.shape) for matrix in active]
        exchange = OwnerExchange(
            active, costs, self._buckets, run.sharers, replicated, torch.bfloat16
        )
        wholes = exchange.to_owners([self._own_of(matrix) for matrix in active])
        for number, direction in wholes.items():
            matrix = active[number]
            group = self.groups[matrix.spec.group]
            update = orthogonalized(matrix.spec.view(direction), group)
            matrix.spec.view(direction).copy_(update)
        updates = {
            number: torch.empty_like(piece)
            for number, piece in enumerate(map(self._own_of, active))
            if piece is not None
        }
        exchange.from_owners(wholes, updates)
        for number, of_bucket in groupby(updates, key=lambda each: active[each].bucket):
            with self._buckets[number].params_here(write=True):
                for each in of_bucket:
                    self._apply(active[each], updates[each])
        self._directions.clear()
        run.publish(self._buckets.values())

    def _own_of(self, matrix: OwnedParam) -> Tensor | None:
        """Returns the direction of this rank's piece of a matrix, or None."""
        bucket = self._buckets[matrix.bucket]
        if matrix.within(bucket.chunk) is None:
            return None
        return matrix.piece_in(self._directions[matrix.bucket], bucket.chunk)

    def _apply(self, matrix: OwnedParam, update: Tensor) -> None:
        """Moves this rank's piece of a matrix; ``update`` has its elements."""
        group, whole = self.groups[matrix.spec.group], self._buckets[matrix.bucket]
        own = matrix.within(whole.chunk)
        assert own is not None
        pieces = [whole] if whole.state.master is None else whole.pieces(matrix.begin, matrix.end)
        for bucket in pieces:
            master = bucket.state.master
            here = matrix.within(bucket.chunk)
            values = matrix.piece_in(bucket.own_params if master is None else master, bucket.chunk)
            if values is None or here is None:
                continue
            values.mul_(1 - float(group["lr"]) * group["weight_decay"])
            moved = update[here.start - own.start : here.stop - own.start]
            values.add_(moved, alpha=-adjusted_lr(group, matrix.spec.shape))
            if master is not None:
                rounded = matrix.piece_in(bucket.own_params, bucket.chunk)
                assert rounded is not None
                rounded.copy_(values)


def _as_adamw(group: Group) -> dict[str, Any]:
    more = {"amsgrad": False, "maximize": False, "decoupled_weight_decay": True}
    return {**group, **more, "eps": group["adamw_eps"]}


def _check_matrix(param: Tensor, called: str) -> None:
    if param.dim() != 2:
        raise ArgumentError(
            f"{called}: expected a matrix, got shape {tuple(param.shape)}: Muon orthogonalises "
            'matrices. Put it in a group with "algorithm": "adamw", as muon_groups() does'
        )
    if is_divided(param):
        raise UnsupportedError(
            f"{called}: ranks of the mesh have parts of the matrix, which is orthogonalised whole. "
            'Put it in a group with "algorithm": "adamw"'
        )


def muon_groups(
    module: nn.Module, adamw: Sequence[str] = (), **settings: Any
) -> list[dict[str, Any]]:
    """Returns param groups of a module's trainable parameters: matrices for Muon, others for AdamW.

    Args:
        module: the module.
        adamw: names of parameters for AdamW although they are matrices, such as embeddings and the
            head, also while these are frozen; a ``*`` stands for any characters of one part of a
            name.
        settings: further entries of the group for AdamW, such as ``lr``; without them it has those
            of the optimizer, ``weight_decay``, too.

    Raises:
        ArgumentError: a name of ``adamw`` names no matrix.
    """
    everything = list(named_parameters(module))
    matrices = [name for name, param in everything if param.dim() == 2]
    named = [(name, param) for name, param in everything if param.requires_grad]
    for pattern in adamw:
        if not any(matches(pattern, name) for name in matrices):
            raise ArgumentError(f"muon_groups: adamw: {pattern!r} names no matrix")
    chosen = {name for name in matrices if not any(matches(pattern, name) for pattern in adamw)}
    muon = [param for name, param in named if name in chosen]
    rest = [param for name, param in named if name not in chosen]
    groups: list[dict[str, Any]] = [{"params": muon, "algorithm": "muon"}] if muon else []
    return groups + ([{"params": rest, "algorithm": "adamw", **settings}] if rest else [])


class Muon(ShardedOptimizer):
    """Muon, and AdamW for what is no matrix of a hidden layer, sharded over a communicator.

    Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024, as
    ``torch.optim.Muon`` has it; each matrix is orthogonalised by one rank. Otherwise as
    :class:`ringcomm.optim.AdamW`, whose ``comm``, ``options``, ``loss_scaler`` and ``mesh`` it
    takes. :func:`muon_groups` makes the groups of a module.

    Args:
        params: as torch takes them. Those of a group with ``"algorithm": "muon"``, the default, are
            matrices. A group with ``"algorithm": "adamw"`` has any, and AdamW steps them with its
            ``lr``, ``weight_decay``, ``betas`` and ``adamw_eps``.
        lr: learning rate.
        weight_decay: times lr, the fraction that each parameter loses.
        momentum: decay of the momentum.
        nesterov: orthogonalise Nesterov's momentum.
        ns_coefficients: of the polynomial of an iteration.
        eps: least norm that a direction is divided by.
        ns_steps: number of iterations.
        adjust_lr_fn: how the learning rate follows a matrix' shape: "original" (as None) or
            "match_rms_adamw".
        betas: of AdamW.
        adamw_eps: of AdamW.
        comm: see :class:`ringcomm.optim.AdamW`.
        options: see there; master weights are FP32, rounding is to nearest, kernels are native.
        loss_scaler: see there.
        mesh: see there.

    Raises:
        ArgumentError: see there; or a parameter for Muon that is no matrix.
        UnsupportedError: options that Muon has not; a matrix that ranks of a mesh divide.
    """

    def __init__(  # noqa: PLR0913 -- torch's signature
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        comm: CommArgument = None,
        options: AdamWOptions | None = None,
        loss_scaler: LossScaler | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "betas": betas,
            "adamw_eps": adamw_eps,
            "algorithm": "muon",
        }
        sharing = Sharing(comm, options, loss_scaler, mesh)
        super().__init__(params, defaults, sharing, MuonRule())
