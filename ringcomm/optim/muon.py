# SPDX-License-Identifier: Apache-2.0
"""Muon: one rank orthogonalises each whole matrix; AdamW steps the other parameters.

Terms. The *direction* of a matrix is computed from its gradient and momentum, element by element.
The *update* is the orthogonalised direction, which needs the whole matrix. The *owner* of a matrix
is the rank that orthogonalises it. There are W ranks, and M elements in all matrices.

The state is sharded by elements, like AdamW's: chunk r of a bucket has pieces of several matrices.
As in every optimizer, a step reduces gradients and gathers parameters; between the two:

1. each rank computes the directions of its pieces, in bfloat16, the dtype in which torch
   orthogonalises;
2. an all-to-all gives each owner its whole matrices: each rank sends 2 M (W-1)/W^2 bytes;
3. owners orthogonalise; a matrix of m x n elements, m <= n, takes 2 m (2 m n + m^2) operations per
   iteration, and owners are chosen to balance this number;
4. an all-to-all returns the pieces of the updates: each rank sends as many bytes as in phase 2;
5. each rank applies the updates to its pieces.

All buckets are exchanged together, so that owners wait for each other only once. At stage 0 all
ranks have all directions: phase 2 is omitted, and phase 4 sends whole updates.
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
    """Returns owners: each parameter, costliest first, goes to the rank with the least cost yet."""
    busy, owners = [0] * ranks, [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda each: -costs[each]):
        owners[number] = min(range(ranks), key=lambda rank: busy[rank])
        busy[owners[number]] += costs[number]
    return owners


@dataclass(frozen=True)
class OwnedParam:
    """A parameter that one rank updates as a whole: elements [begin, end) of a bucket."""

    index: int
    bucket: int
    begin: int
    end: int
    spec: ParamSpec

    def within(self, chunk: Chunk) -> slice | None:
        """Returns the slice of the parameter's elements that are in ``chunk``, or None."""
        low, high = max(self.begin, chunk.begin), min(self.end, chunk.end)
        return slice(low - self.begin, high - self.begin) if low < high else None

    def piece_in(self, flat: Tensor, chunk: Chunk) -> Tensor | None:
        """Returns the parameter's elements in ``flat`` [chunk elements] as a view, or None."""
        inside = self.within(chunk)
        if inside is None:
            return None
        shift = self.begin - chunk.begin
        return flat[inside.start + shift : inside.stop + shift]


class OwnerExchange:
    """Sends pieces of parameters to the parameters' owners, and sends the results to all ranks.

    Args:
        params: the parameters to exchange, in the same order on all ranks.
        costs: the cost of each parameter's update; owners are chosen to balance the costs.
        buckets: by number, the buckets of the parameters.
        sharers: the ranks that share the work; None for this rank alone.
        is_replicated: True if every rank has all pieces, as at stage 0.
        dtype: dtype of all tensors.

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
        # For each parameter, the slice of its elements that each rank has.
        self._slices = [self._slices_of(each, buckets[each.bucket]) for each in params]

    def _slices_of(self, param: OwnedParam, bucket: Bucket) -> list[slice | None]:
        if self._sharers is None or self._is_replicated:
            return [param.within(bucket.chunk)] * len(self._ranks)
        return [param.within(chunk) for chunk in bucket.layout.chunks(self._sharers)]

    def _is_whole(self, number: int) -> bool:
        """True if the owner of a parameter already has all of it."""
        inside = self._slices[number][self._owners[number]]
        return inside == slice(0, self._params[number].spec.elems)

    def to_owners(self, pieces: Sequence[Tensor | None]) -> dict[int, Tensor]:
        """Sends pieces to owners; returns the parameters that this rank owns, flat, by number.

        The returned tensors are whole parameters, which the caller may change.

        Args:
            pieces: this rank's piece of each parameter; None if this rank has no piece.
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
        """Sends the owners' whole parameters, and fills each rank's pieces of them.

        Args:
            wholes: by number, the parameters that this rank owns, flat.
            room_for: by number, memory for this rank's pieces.
            shared: by number, tensors that all ranks receive whole from the parameter's owner.
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
        """Sends ``sent[r]`` to rank r, and fills ``room[r]`` with rank r's tensors, in order."""
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
    """Raises UnsupportedError for options that optimizers with owned parameters do not support."""
    if options.kernels != "native" or options.master == "remainder":
        raise UnsupportedError(
            f'{name}: expected kernels="native" and master="fp32", got '
            f"kernels={options.kernels!r} and master={options.master!r}"
        )
    if options.rounding != "nearest":
        raise UnsupportedError(f'{name}: expected rounding="nearest", got "stochastic"')


def params_of(entries: Sequence[object]) -> list[tuple[str, Tensor]]:
    """Returns the tensors among a group's entries, each with a name for errors."""
    bare = [entry[1] if isinstance(entry, tuple) else entry for entry in entries]
    return [
        (f"parameter {number}", param)
        for number, param in enumerate(bare)
        if isinstance(param, Tensor)
    ]


def is_divided(param: Tensor) -> bool:
    """True if a parameter is a DTensor that is sharded over its mesh."""
    return is_distributed(param) and any(each.is_shard() for each in param.placements)  # type: ignore[attr-defined]


# ---- Muon: one rank orthogonalises each whole matrix; AdamW steps the other parameters -----------


MOMENTUM = "momentum_buffer"
_ALGORITHMS = ("muon", "adamw")
_ADJUSTMENTS = (None, "original", "match_rms_adamw")


def orthogonalized(direction: Tensor, group: Group) -> Tensor:
    """Returns an approximation of the orthogonal matrix nearest to a direction: bfloat16 [m, n].

    Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024: Newton-Schulz
    iterations with a polynomial of degree 5, by the operations of ``torch.optim.Muon``.

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
    """Returns the learning rate of a matrix, as ``torch.optim.Muon`` computes it."""
    rows, columns = shape
    if group["adjust_lr_fn"] == "match_rms_adamw":
        return float(group["lr"]) * 0.2 * math.sqrt(max(rows, columns))
    return float(group["lr"]) * math.sqrt(max(1, rows / columns))


def cost_of(shape: Sequence[int]) -> int:
    """Returns the number of multiplications of one iteration for a matrix."""
    short, long = sorted(shape)
    return short * short * (2 * long + short)


class MuonRule(TensorRule):
    """Muon for the groups with the algorithm "muon", AdamW for the groups with "adamw".

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
        #: True if every rank keeps the whole state, as at stage 0.
        self.is_replicated = False
        # Map bucket numbers to the buckets that this step has visited, and to their directions.
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
        # Make the native kernels skip matrices, like parameters without gradient.
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
        """Updates a matrix's momentum in this rank's chunk, and stores the matrix's direction."""
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
        """Applies ``update`` [elements of the piece] to this rank's piece of a matrix."""
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
            f"{called}: each rank of the mesh has a part of the matrix, but Muon needs all of it. "
            'Put it in a group with "algorithm": "adamw"'
        )


def muon_groups(
    module: nn.Module, adamw: Sequence[str] = (), **settings: Any
) -> list[dict[str, Any]]:
    """Returns param groups of a module's trainable parameters: matrices for Muon, others for AdamW.

    Args:
        module: the module.
        adamw: names of matrices that AdamW steps, such as embeddings and the head; a matrix may be
            frozen. A ``*`` matches any characters between two dots of a name.
        settings: further entries of AdamW's group, such as ``lr``; the optimizer's values apply to
            missing entries, including ``weight_decay``.

    Raises:
        ArgumentError: a name in ``adamw`` matches no matrix.
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
    """Muon for matrices of hidden layers, and AdamW for other parameters, both sharded.

    Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024, as in
    ``torch.optim.Muon``; one rank orthogonalises each matrix. The arguments ``comm``, ``options``,
    ``loss_scaler`` and ``mesh`` are as in :class:`ringcomm.optim.AdamW`. :func:`muon_groups` makes
    the groups of a module.

    Args:
        params: as torch takes them. A group with ``"algorithm": "muon"``, the default, has only
            matrices. A group with ``"algorithm": "adamw"`` has any parameters, and AdamW steps them
            with the group's ``lr``, ``weight_decay``, ``betas`` and ``adamw_eps``.
        lr: learning rate.
        weight_decay: a step multiplies each parameter by 1 - lr * weight_decay.
        momentum: decay of the momentum.
        nesterov: orthogonalise Nesterov's momentum.
        ns_coefficients: coefficients of the polynomial in each Newton-Schulz iteration.
        eps: lower bound of the norm by which a direction is divided.
        ns_steps: number of Newton-Schulz iterations.
        adjust_lr_fn: how the learning rate depends on a matrix's shape: "original" (the same as
            None) or "match_rms_adamw".
        betas: AdamW's betas.
        adamw_eps: AdamW's eps.
        comm: see :class:`ringcomm.optim.AdamW`.
        options: see there; master weights are FP32, rounding is to nearest, kernels are native.
        loss_scaler: see there.
        mesh: see there.

    Raises:
        ArgumentError: see there; or a parameter for Muon is not a matrix.
        UnsupportedError: Muon does not support an option; or a matrix is sharded over a mesh.
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
