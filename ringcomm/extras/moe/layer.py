# SPDX-License-Identifier: Apache-2.0
"""A layer of experts that are divided over ranks, and its routing, optimizer and checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ringcomm import zero
from ringcomm.c10d.comm_argument import CommArgument, find_communicator
from ringcomm.comm.agreement import all_or_none
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.functions import Group, communicator_of
from ringcomm.comm.local_world import local_world
from ringcomm.errors import ArgumentError, CheckpointError, RingcommError, UnsupportedError, where
from ringcomm.extras.moe.dispatch import combine, dispatch
from ringcomm.functional import all_reduce
from ringcomm.integers import integer
from ringcomm.memory import normal_tensors
from ringcomm.module_names import named_modules
from ringcomm.optim.clipping import NormBound, NormTerm, agree_on_finite, clip_joint_norm
from ringcomm.optim.placement import SHARING, STAGES
from ringcomm.optim.sharded import ShardedOptimizer
from ringcomm.optim.step import Asked
from ringcomm.zero.checkpoint import Checkpoints
from ringcomm.zero.checkpoint.save_load import check_load, take_load
from ringcomm.zero.stages.sharding import check_module, check_step_number, is_sharded, path_of

# ---- Routing: the experts of a token, their weights, and the balance of the experts' load -------
# * The auxiliary loss of Fedus et al., "Switch Transformers" (2021, arXiv:2101.03961), equation 4,
#   for k experts per token as in Lepikhin et al., "GShard" (2020, arXiv:2006.16668). With E experts
#   it is E * sum of f_i P_i, where f_i is expert i's share of a rank's assignments, and P_i its
#   mean probability over the rank's tokens. It is 1 if all experts are equally busy.
# * The bias of Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts"
#   (2024, arXiv:2408.15664), algorithm 1, as in DeepSeek-V3: a number per expert is added to the
#   scores by which experts are chosen, but not to the weights. After a step it grows by a constant
#   for experts with fewer tokens than the mean, and shrinks for experts with more.

Tensor = torch.Tensor
_SCORES = ("softmax", "sigmoid")


@dataclass(frozen=True)
class RoutingOptions:
    """Options of a layer of experts; they must be equal on all ranks.

    Attributes:
        top_k: number of experts per token.
        scores: the function from the router's outputs to scores: "softmax" over all experts, or
            "sigmoid" of each output.
        normalized: True to divide the weights of a token's experts by their sum.
        balance_bias: amount by which ``update_bias()`` moves a bias that is added to the scores
            when experts are chosen; 0 for no bias.
        compression: as for :func:`ringcomm.extras.moe.dispatch`.
        max_rows: as for :func:`ringcomm.extras.moe.dispatch`.
    """

    top_k: int = 2
    scores: str = "softmax"
    normalized: bool = True
    balance_bias: float = 0.0
    compression: str | None = None
    max_rows: int | None = None

    def __post_init__(self) -> None:
        top_k = integer(self.top_k)
        if top_k is None or top_k < 1:
            raise ArgumentError(
                f"top_k: expected an integer from 1 to 2^63 - 1, got {self.top_k!r}"
            )
        object.__setattr__(self, "top_k", top_k)
        if self.scores not in _SCORES:
            raise ArgumentError(
                f"scores: expected one of {', '.join(_SCORES)}, got {self.scores!r}"
            )
        if not 0 <= self.balance_bias < float("inf"):
            raise ArgumentError(f"balance_bias: expected a number >= 0, got {self.balance_bias!r}")


class Routing(NamedTuple):
    """The experts of tokens.

    Attributes:
        topk_idx: int64 [tokens, k].
        topk_weights: float32 [tokens, k].
        counts: int64 [experts], number of tokens that go to each expert.
        auxiliary_loss: float32, a scalar; its gradient reaches only this rank's tokens.
    """

    topk_idx: Tensor
    topk_weights: Tensor
    counts: Tensor
    auxiliary_loss: Tensor


def route(
    logits: Tensor, bias: Tensor | None, options: RoutingOptions, counted_over: Group = None
) -> Routing:
    """Chooses the experts of tokens; collective with ``counted_over``.

    Args:
        logits: float32 [tokens, experts].
        bias: float32 [experts], added to the scores by which experts are chosen, or None.
        options: options of the layer.
        counted_over: the ranks whose tokens the auxiliary loss counts together; None for this rank.
    """
    softmax = options.scores == "softmax"
    scores = logits.softmax(-1) if softmax else logits.sigmoid()
    ranked = scores if bias is None else scores + bias
    topk_idx = ranked.detach().topk(options.top_k, -1).indices
    topk_weights = scores.gather(-1, topk_idx)
    if options.normalized:
        topk_weights = topk_weights / topk_weights.sum(-1, keepdim=True)
    experts = logits.size(-1)
    counts = torch.zeros(experts, dtype=torch.int64, device=logits.device)
    counts.scatter_add_(0, topk_idx.reshape(-1), torch.ones_like(topk_idx).reshape(-1))
    probabilities = scores if softmax else scores / scores.sum(-1, keepdim=True)
    of_all, ranks = torch.cat([counts, counts.new_tensor([logits.size(0)])]), 1
    if counted_over is not None:
        # Counts are integers without gradient, so summing them over the ranks is enough.
        of_all = all_reduce(of_all, group=counted_over)
        ranks = communicator_of(counted_over, "moe.MoE").world_size
    # Without tokens the loss is 0, but still depends on the router, as on other ranks.
    share = of_all[:-1] / of_all[:-1].sum().clamp(min=1)
    mean = probabilities.sum(0) / of_all[-1].clamp(min=1)
    return Routing(topk_idx, topk_weights, counts, ranks * experts * (share * mean).sum())


_MOE = "moe.MoE"


class MoE(nn.Module):
    """A mixture of experts that are divided evenly over the ranks of a group.

    Each token is sent to the experts that the router chooses; the layer returns the weighted sum of
    these experts' results. The router's outputs are computed in FP32, even under autocast. All
    ranks have the router's parameters; only the ranks that have an expert have its parameters.

    Args:
        router: maps float32 [tokens, hidden] to float32 [tokens, num_experts]; its parameters are
            float32.
        experts: this rank's experts: an ``nn.ModuleList``, whose modules each map their rows [n,
            hidden] to [n, ...], even if n is 0; or one module, which is called with all rows [n,
            hidden] and ``counts`` int64 [experts of this rank].
        group: the ranks over which the experts are divided: a Communicator, process group of the
            backend or one-dimensional mesh, such as ``mesh["ep"]``; None means the default group.
        num_experts: number of experts of all ranks; needed only if ``experts`` is not a list.
        options: options of the layer, equal on all ranks.
        counted_over: the ranks, usually all ranks that train the layer, whose tokens together
            balance the experts' load. ``auxiliary_loss`` then counts the tokens of all these ranks,
            by one small all-reduce; its mean over the ranks is the loss of all tokens.
            :meth:`update_bias` sums over these ranks. With None the loss covers only this rank's
            tokens, and :meth:`update_bias` sums over ``group``.

    Attributes:
        num_experts: number of experts of all ranks.
        auxiliary_loss: the loss of the last forward; add it to the model's loss, times a factor
            such as 0.01. None before the first forward.
        bias: float32 [num_experts], in the state dict; zeros without ``balance_bias``.
        tokens_by_expert: int64 [num_experts], number of this rank's tokens that went to each expert
            in training since the last :meth:`update_bias`.

    Raises:
        ArgumentError: the router's parameters are not float32, or the number of experts does not
            fit the ranks.
    """

    auxiliary_loss: Tensor | None
    bias: Tensor
    tokens_by_expert: Tensor

    def __init__(
        self,
        router: nn.Module,
        experts: nn.Module,
        group: Group = None,
        *,
        num_experts: int | None = None,
        options: RoutingOptions | None = None,
        counted_over: Group = None,
    ) -> None:
        super().__init__()
        comm = communicator_of(group, _MOE)
        self._head = where(_MOE, comm.rank, comm.world_size)
        self.router = router
        # Keeps ringcomm.zero from casting the FP32 outputs to the surrounding parameters' dtype.
        router.returns_fp32 = True  # type: ignore[assignment]
        self.experts = experts
        self.group = group
        self.counted_over = counted_over
        self.options = RoutingOptions() if options is None else options
        if num_experts is not None:
            num_experts = comm.engine.checks(_MOE).integer("num_experts", num_experts)
        self.num_experts = self._number(comm.world_size, num_experts)
        self._check_router()
        if self.options.top_k > self.num_experts:
            raise ArgumentError(
                f"{self._head}: top_k: expected at most the {self.num_experts} experts, got "
                f"{self.options.top_k}"
            )
        self.auxiliary_loss = None
        device = next((each.device for each in router.parameters()), torch.device("cpu"))
        numbers = torch.zeros(self.num_experts, device=device)
        self.register_buffer("bias", numbers.float())
        self.register_buffer("tokens_by_expert", numbers.long(), persistent=False)

    def _number(self, world_size: int, given: int | None) -> int:
        if not isinstance(self.experts, nn.ModuleList):
            if given is None:
                raise ArgumentError(
                    f"{self._head}: num_experts: expected the number of the experts of all ranks, "
                    f"which a {type(self.experts).__name__} does not show"
                )
            return given
        found = len(self.experts) * world_size
        if given not in (None, found) or not found:
            raise ArgumentError(
                f"{self._head}: experts: expected this rank's share of {given or 'all'} experts, "
                f"divided over {world_size} ranks, got {len(self.experts)} experts"
            )
        return found

    def _check_router(self) -> None:
        for name, param in self.router.named_parameters():
            if param.dtype is not torch.float32:
                raise ArgumentError(
                    f"{self._head}: router: expected float32 parameters, got {name} in "
                    f"{param.dtype}; leave the router out of casts (Precision.keep_fp32)"
                )

    def forward(self, x: Tensor) -> Tensor:
        """Returns the experts' results for tokens.

        Args:
            x: [..., hidden] in float32, bfloat16 or float16.
        """
        if isinstance(x, DTensor):
            raise ArgumentError(
                f"{self._head}: x: expected this rank's tokens as a local tensor, got a DTensor; "
                "if it is not sharded over the hidden dimension, pass x.to_local()"
            )
        tokens = x.reshape(-1, x.size(-1))
        with torch.autocast(tokens.device.type, enabled=False):
            logits = self.router(tokens.float())
            self._check_logits(tokens, logits)
            biased = self.options.balance_bias > 0
            routing = route(logits, self.bias if biased else None, self.options, self.counted_over)
        self.auxiliary_loss = routing.auxiliary_loss
        if self.training:
            with torch.no_grad():
                self.tokens_by_expert += routing.counts
        rows, counts, handle = dispatch(
            tokens,
            routing.topk_idx,
            routing.topk_weights,
            self.num_experts,
            self.group,
            compression=self.options.compression,
            max_rows=self.options.max_rows,
        )
        out = combine(self._of_experts(rows, counts), handle)
        return out.reshape(*x.shape[:-1], out.size(-1))

    def _check_logits(self, tokens: Tensor, logits: Tensor) -> None:
        scored = logits.dim() == 2 and logits.size(1) == self.num_experts
        if scored and logits.dtype == torch.float32:
            return
        message = (
            f"{self._head}: router: expected float32 [tokens, {self.num_experts}], a number for "
            f"each expert of all ranks, got {logits.dtype} {tuple(logits.shape)}"
        )
        # Other ranks, whose router is correct, wait for this rank, so take part in their calls.
        if self.counted_over is not None:
            all_reduce(logits.new_zeros(logits.size(-1) + 1).long(), group=self.counted_over)
        nowhere = torch.full((len(tokens), 1), -1, device=tokens.device)
        try:
            dispatch(tokens, nowhere, None, 0, self.group)
        except ArgumentError as refusal:
            raise ArgumentError(message) from refusal

    def _of_experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        if not isinstance(self.experts, nn.ModuleList):
            return self.experts(rows, counts)  # type: ignore[no-any-return]
        sizes = counts.tolist()
        parts = torch.split(rows, [*sizes, rows.size(0) - sum(sizes)])
        made = [expert(part) for expert, part in zip(self.experts, parts[:-1], strict=True)]
        made.append(made[0].new_zeros(len(parts[-1]), *made[0].shape[1:]))
        return torch.cat(made)

    @torch.no_grad()
    def update_bias(self, group: Group = None) -> None:
        """Moves the bias towards experts with few tokens, and resets the counts; collective.

        Call it after each optimizer step if ``balance_bias`` is above 0.

        Args:
            group: all ranks that train the layer; None means ``counted_over``, or the layer's
                ``group`` if ``counted_over`` is also None.
        """
        ranks = next((each for each in (group, self.counted_over) if each is not None), self.group)
        comm = communicator_of(ranks, f"{_MOE}.update_bias")
        counts = self.tokens_by_expert.clone()
        comm.all_reduce(counts)
        missing = counts.float().mean() - counts
        self.bias += self.options.balance_bias * missing.sign()
        self.tokens_by_expert.zero_()

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, options={self.options}"


# ---- Sharded state of modules with experts: dense layers over all ranks, experts over replicas ---
# The *dense layers* of a module are the parts that all ranks have: everything except the experts,
# including the routers. Each rank has its own experts; its *replicas* are the ranks with the same
# experts.

_SHARD = "moe.shard"
_EXPERTS, _TENSOR = "ep", "tp"
# The attribute of a module that holds its groups, so that module and groups are freed together.
_GROUPS = "_ringcomm_expert_groups"


@dataclass(frozen=True)
class ExpertGroups:
    """A module's experts, and the groups of ranks that have the experts and the dense layers.

    Attributes:
        everyone: the ranks that have the dense layers.
        experts: the experts of this rank, by layer; None if there are none.
        group: the ranks over which experts are divided, or None.
        replicas: the ranks with the same experts, or None.
        stages: the ranks with other stages of the model, or None.
        writes: True if this rank writes its experts to checkpoints. If tensor parallelism does not
            divide experts, several ranks have the same experts, and one of these ranks writes.
    """

    everyone: Communicator
    experts: nn.ModuleList | None = None
    group: Communicator | None = None
    replicas: Communicator | None = None
    stages: Communicator | None = None
    writes: bool = True


@dataclass(frozen=True)
class _ExpertRanks:
    """The ranks that train a module: the ranks of this pipeline stage, and of other stages."""

    everyone: Communicator
    stages: Communicator | None = None
    tensor_rank: int = 0


def shard(
    module: nn.Module,
    stage: int = 2,
    *,
    comm: CommArgument = None,
    mesh: DeviceMesh | None = None,
    options: zero.ZeroOptions | None = None,
    expert_options: zero.ZeroOptions | None = None,
) -> nn.Module:
    """Shards a module that has :class:`MoE` layers, as ``zero.shard`` does; collective.

    The dense layers are sharded over all ranks, and experts over the ranks that have the same
    experts. With ``reduce="avg"`` both get the gradient of the mean of all ranks' losses; with
    "sum", the gradient of the sum. Routers stay float32. Build :class:`Optimizer` on the module
    afterwards.

    Args:
        module: a module whose layers of experts are all divided over the same ranks.
        stage: stage of ZeRO, 0 to 3, for dense layers and experts.
        comm: all ranks that train the module; see ``zero.shard``.
        mesh: instead of ``comm``, a DeviceMesh with the axis "ep", axes of data parallelism, and
            perhaps "pp" and "tp".
        options: options of the dense layers.
        expert_options: options of the experts, whose parameters have names by layer, such as
            "0.1.weight"; None means ``options`` without the names of modules in them.

    Returns:
        ``module``.

    Raises:
        ArgumentError: layers have different groups, or groups do not divide the ranks evenly;
            experts have buffers, or are on the meta device; the mesh has no "ep".
        Exception: see ``zero.shard``.

    If one rank fails, all ranks raise, and the module is unchanged.
    """
    ranks = _ranks_of(comm, mesh, module)
    everyone, options = ranks.everyone, zero.ZeroOptions() if options is None else options
    with all_or_none(everyone, _SHARD):
        layers = {name: each for name, each in named_modules(module) if isinstance(each, MoE)}
        group = _group_of(layers, everyone)
        _check_experts(layers)
    if group is None:
        zero.shard(module, stage, comm=everyone, options=options)
        object.__setattr__(module, _GROUPS, ExpertGroups(everyone, stages=ranks.stages))
        return module
    replicas = _replicas_of(group, everyone)
    if group is everyone:
        # Make another communicator, since layers' calls and reductions have no common order.
        own = everyone.split(0)
        assert own is not None
        everyone = own
    experts = nn.ModuleList(layer.experts for layer in layers.values())
    chosen = _expert_options(layers, options, expert_options, group.world_size)
    zero.shard(module, stage, comm=everyone, options=_dense_options(layers, options))
    try:
        with all_or_none(everyone, _SHARD):
            zero.shard(experts, stage, comm=replicas, options=chosen)
    except Exception:
        if is_sharded(experts):
            zero.remove_sharding(experts)
        zero.remove_sharding(module)
        raise
    divided = any(getattr(each, "device_mesh", None) is not None for each in experts.parameters())
    writes = divided or ranks.tensor_rank == 0
    groups = ExpertGroups(everyone, experts, group, replicas, ranks.stages, writes)
    object.__setattr__(module, _GROUPS, groups)
    return module


def groups_of(module: nn.Module, operation: str) -> ExpertGroups:
    """Returns the groups of a module.

    Raises:
        ArgumentError: the module was not sharded by :func:`shard`.
    """
    check_module(module, operation)
    found = vars(module).get(_GROUPS)
    if not isinstance(found, ExpertGroups):
        raise ArgumentError(
            f"{operation}: expected the module that moe.shard() returned, got a "
            f"{type(module).__name__} that was not sharded by it"
        )
    return found


def remove_sharding(module: nn.Module) -> nn.Module:
    """Undoes :func:`shard`, as ``zero.remove_sharding`` does; each rank keeps its own experts."""
    groups = groups_of(module, "moe.remove_sharding")
    if groups.experts is not None:
        zero.remove_sharding(groups.experts)
    zero.remove_sharding(module)
    object.__delattr__(module, _GROUPS)
    return module


def _ranks_of(comm: CommArgument, mesh: DeviceMesh | None, module: nn.Module) -> _ExpertRanks:
    device = next((each.device for each in module.parameters()), None)
    if mesh is None:
        found = find_communicator(comm, _SHARD, device)
        return _ExpertRanks(local_world(1)[0] if found is None else found)
    names = tuple(mesh.mesh_dim_names or ())
    known = (STAGES, *SHARING, _EXPERTS, _TENSOR)
    if comm is not None:
        raise ArgumentError(f"{_SHARD}: expected comm= or mesh=, got both")
    if _EXPERTS not in names or not set(names) <= set(known):
        raise ArgumentError(
            f"{_SHARD}: mesh: expected a DeviceMesh with an axis {_EXPERTS!r} and others of "
            f"{', '.join(each for each in known if each != _EXPERTS)}, got the axes {names}"
        )
    axes = tuple(name for name in names if name in SHARING or name == _EXPERTS)
    shared = mesh[axes[0]] if len(axes) == 1 else mesh[axes]._flatten("_".join(axes))
    everyone = find_communicator(shared, _SHARD, device)
    assert everyone is not None
    stages = None
    if STAGES in names and mesh[STAGES].size() > 1:
        stages = find_communicator(mesh[STAGES], _SHARD, device)
    tensor_rank = mesh.get_local_rank(_TENSOR) if _TENSOR in names else 0
    return _ExpertRanks(everyone, stages, tensor_rank)


def _group_of(layers: Mapping[str, MoE], everyone: Communicator) -> Communicator | None:
    """Returns the ranks over which the experts of all layers are divided."""
    groups = {name: communicator_of(each.group, _SHARD) for name, each in layers.items()}
    first = next(iter(groups.items()), None)
    if first is None:
        return None
    for name, group in groups.items():
        if (group.rank, group.world_size) != (first[1].rank, first[1].world_size):
            raise ArgumentError(
                f"{_SHARD}: expected layers whose experts are divided over the same ranks, but "
                f"this process is rank {first[1].rank} of {first[1].world_size} for {first[0]!r}, "
                f"and rank {group.rank} of {group.world_size} for {name!r}"
            )
    if everyone.world_size % first[1].world_size:
        raise ArgumentError(
            f"{_SHARD}: comm: expected all ranks that train the module, a multiple of the "
            f"{first[1].world_size} ranks that divide its experts, got {everyone.world_size}"
        )
    return first[1]


def _replicas_of(group: Communicator, everyone: Communicator) -> Communicator:
    """Builds the communicator of the ranks that have the same experts; collective."""
    replicas = everyone.split(group.rank)
    assert replicas is not None
    with all_or_none(everyone, _SHARD):
        if replicas.world_size * group.world_size != everyone.world_size:
            raise ArgumentError(
                f"{_SHARD}: expected the {everyone.world_size} ranks to be divided into groups of "
                f"{group.world_size} ranks each, but {replicas.world_size} groups have a rank "
                f"{group.rank}"
            )
    return replicas


def _check_experts(layers: Mapping[str, MoE]) -> None:
    for name, layer in layers.items():
        for buffer, _ in layer.experts.named_buffers():
            raise ArgumentError(
                f"{_SHARD}: {name}.experts: expected no buffers, since all ranks would get "
                f"one rank's values, got {buffer}"
            )
        for param, each in layer.experts.named_parameters():
            if each.is_meta:
                raise ArgumentError(
                    f"{_SHARD}: {name}.experts: expected parameters with values, got {param} on "
                    "the meta device"
                )


def _dense_options(layers: Mapping[str, MoE], options: zero.ZeroOptions) -> zero.ZeroOptions:
    """Returns the options of the dense layers, with experts ignored and routers in FP32."""
    prefixes = [f"{name}." if name else "" for name in layers]
    experts = [
        f"{prefix}experts"
        for prefix, layer in zip(prefixes, layers.values(), strict=True)
        if any(True for _ in layer.experts.parameters())
    ]
    precision = options.precision
    if precision.param not in (None, torch.float32):
        routers = [
            f"{prefix}router"
            for prefix, layer in zip(prefixes, layers.values(), strict=True)
            if any(True for _ in layer.router.parameters())
        ]
        precision = replace(precision, keep_fp32=(*precision.keep_fp32, *routers))
    return replace(options, ignored=(*options.ignored, *experts), precision=precision)


def _expert_options(
    layers: Mapping[str, MoE],
    options: zero.ZeroOptions,
    given: zero.ZeroOptions | None,
    group_size: int,
) -> zero.ZeroOptions:
    """Returns the options of the experts.

    Backward already sums an expert's gradients over the tokens of all ranks in the group, so for
    ``reduce="avg"`` the sum is also divided by ``group_size``.
    """
    if given is None:
        precision = replace(options.precision, keep_fp32=())
        given = replace(options, units=None, ignored=(), per_unit={}, precision=precision)
    if given.units is None:
        called: set[int] = set()
        for layer in layers.values():
            listed = isinstance(layer.experts, nn.ModuleList)
            called.update(map(id, layer.experts.children() if listed else [layer.experts]))
        given = replace(given, units=lambda name, module: id(module) in called)
    return replace(given, divisor=group_size if given.reduce == "avg" else 1)


# ---- One optimizer of the dense layers and of the experts --------------------------------------


_OPTIMIZER = "moe.Optimizer"


class Optimizer:
    """The optimizers of the dense layers and of the experts, which step together.

    Norms cover the whole model. If ``check_finite`` makes one optimizer skip a step, both skip it.
    Make a learning-rate schedule for each of ``optimizers``::

        moe.shard(model, stage=2, comm=comm)
        optimizer = moe.Optimizer(model, lambda params: AdamW(params, lr=3e-4))
        schedulers = [LambdaLR(each, warmup) for each in optimizer.optimizers]

    Args:
        module: the module that :func:`ringcomm.extras.moe.shard` returned.
        make: function, equal on all ranks, that makes an optimizer of :mod:`ringcomm.optim` for a
            list of parameters; called for the dense layers, and on ranks with experts also for the
            experts.

    Attributes:
        dense: the optimizer of the dense layers.
        experts: the optimizer of the experts; None if this rank has no experts.

    Raises:
        ArgumentError: the module was not sharded, or ``make`` returns no ringcomm optimizer.
        UnsupportedError: an optimizer has a loss scaler, which can serve only one optimizer.
    """

    def __init__(self, module: nn.Module, make: Callable[[list[Tensor]], ShardedOptimizer]) -> None:
        self._groups = groups_of(module, _OPTIMIZER)
        experts = self._groups.experts
        of_experts: list[Tensor] = [] if experts is None else list(experts.parameters())
        known = set(map(id, of_experts))
        dense: list[Tensor] = [each for each in module.parameters() if id(each) not in known]
        self.dense = _made(make, dense)
        self.experts = _made(make, of_experts) if of_experts else None

    def __repr__(self) -> str:
        return f"<ringcomm.extras.moe.Optimizer dense: {self.dense!r}, experts: {self.experts!r}>"

    @property
    def optimizers(self) -> list[ShardedOptimizer]:
        """The optimizers, the dense layers' optimizer first."""
        return [self.dense] if self.experts is None else [self.dense, self.experts]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of both optimizers."""
        return [group for each in self.optimizers for group in each.param_groups]

    def prepare(self) -> None:
        """Prepares both optimizers; collective. See ``ShardedOptimizer.prepare``."""
        for each in self.optimizers:
            each.prepare()

    @normal_tensors()
    def step(self) -> None:
        """Takes one step of both optimizers; collective.

        Raises:
            Exception: see ``ShardedOptimizer.step``. If a hyper-parameter cannot be used, all ranks
                raise before anything is changed.
        """
        terms = self._norm_terms()
        steps = [term.step for term in terms]
        if not any(each.updates_in_backward for each in steps):
            try:
                for each in steps:
                    each.check_hyper()
            except RingcommError as error:
                steps[0].agree(Asked(refusal=error))
                raise
            if any(each.two_passes for each in steps):
                agree_on_finite(terms, self._groups.stages)
        for optimizer in self.optimizers:
            optimizer.step()

    @normal_tensors()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scales the next step's gradient down to a norm of ``max_norm``; collective.

        Args:
            max_norm: see ``ShardedOptimizer.clip_grad_norm_``.
            norm_type: see ``ShardedOptimizer.clip_grad_norm_``.
            error_if_nonfinite: see ``ShardedOptimizer.clip_grad_norm_``.

        Returns:
            The norm before clipping, of the dense layers (counted once) and all experts; with
            pipeline stages ("pp" in the mesh of :func:`ringcomm.extras.moe.shard`), of all stages.
        """
        bound_of = partial(NormBound.of, max_norm, norm_type, error_if_nonfinite)
        return clip_joint_norm(self._norm_terms(), self._groups.stages, bound_of)

    def clip_grad_value_(self, clip_value: float) -> None:
        """Limits each element of the gradient; see ``ShardedOptimizer.clip_grad_value_``."""
        for each in self.optimizers:
            each.clip_grad_value_(clip_value)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients of both optimizers."""
        for each in self.optimizers:
            each.zero_grad(set_to_none)

    def _norm_terms(self) -> list[NormTerm]:
        dense = NormTerm(self.dense.sharded_step())
        if self.experts is None:
            return [dense]
        return [dense, NormTerm(self.experts.sharded_step(), self._groups.group)]


def _made(
    make: Callable[[list[Tensor]], ShardedOptimizer], params: list[Tensor]
) -> ShardedOptimizer:
    optimizer = make(params)
    if not isinstance(optimizer, ShardedOptimizer):
        raise ArgumentError(
            f"{_OPTIMIZER}: make: expected it to return an optimizer of ringcomm.optim, got a "
            f"{type(optimizer).__name__}"
        )
    if optimizer.scales_losses:
        raise UnsupportedError(
            f"{_OPTIMIZER}: make: expected an optimizer without loss_scaler=, which would adapt to "
            "the overflows of one optimizer alone; train in bfloat16, which needs none"
        )
    return optimizer


# ---- Checkpoints: the dense layers in one folder, the experts of each rank in another ----------
#
# NOTE [When a checkpoint of both is whole]
# Experts are saved first, and the dense layers last. So a step's checkpoint is complete once the
# dense layers' part exists. If experts have a checkpoint of a later step, its save was interrupted;
# the next save removes it.

_SAVE, _LOAD = "moe.save", "moe.load"


def save(
    root: str | os.PathLike[str],
    step: int,
    module: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    data: Any = None,
    keep: int | None = 2,
) -> Path:
    """Saves dense layers and experts below ``root``; collective.

    Args:
        root: the run's folder, which all ranks can access; a different folder for each pipeline
            stage.
        step: see ``zero.save``.
        data: see ``zero.save``.
        keep: see ``zero.save``.
        module: the module that :func:`ringcomm.extras.moe.shard` returned.
        optimizer: the optimizer of the module, or None.

    Returns:
        The folder of the dense layers' checkpoint.

    Raises:
        Exception: see ``zero.save``.
    """
    root = path_of(root, _SAVE, "root")
    check_step_number(step, _SAVE)
    groups = groups_of(module, _SAVE)
    dense, experts = _optimizers(optimizer, _SAVE)
    if groups.experts is not None:
        with all_or_none(groups.everyone, _SAVE):
            _remove_cut_off(Path(root), groups)
        with all_or_none(groups.everyone, _SAVE):
            if groups.writes:
                zero.save(_expert_folder(root, groups), step, groups.experts, experts, keep=keep)
    return zero.save(_dense_folder(root), step, module, dense, data=data, keep=keep)


def load(
    root: str | os.PathLike[str],
    module: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    step: int | None = None,
) -> zero.Loaded:
    """Loads a checkpoint of :func:`save`, at any stage and with any number of replicas; collective.

    The experts must be divided over as many ranks as when they were saved.

    Args:
        root: see ``zero.load``.
        step: see ``zero.load``.
        module: the module that :func:`ringcomm.extras.moe.shard` returned.
        optimizer: the optimizer of the module, or None to load the module alone.

    Raises:
        CheckpointError: there is no checkpoint of both parts, experts were divided over another
            number of ranks, or a checkpoint is damaged; nothing was changed.
        ArgumentError: see ``zero.load``.
    """
    root = path_of(root, _LOAD, "root")
    groups = groups_of(module, _LOAD)
    dense, experts = _optimizers(optimizer, _LOAD)
    found = Checkpoints(_dense_folder(root)).latest() if step is None else step
    with all_or_none(groups.everyone, _LOAD):
        if groups.experts is not None:
            _check_there(Path(root), groups, found)
    loading = None
    with all_or_none(groups.everyone, _LOAD):
        if groups.experts is not None:
            loading = check_load(_expert_folder(root, groups), groups.experts, experts, step=found)
    of_dense = check_load(_dense_folder(root), module, dense, step=found)
    if loading is not None:
        with all_or_none(groups.everyone, _LOAD):
            take_load(loading)
    return take_load(of_dense)


def _dense_folder(root: str | os.PathLike[str]) -> Path:
    return Path(root) / "dense"


def _expert_folder(root: str | os.PathLike[str], groups: ExpertGroups) -> Path:
    assert groups.group is not None
    return Path(root) / f"experts-{groups.group.rank:05d}-of-{groups.group.world_size:05d}"


def _optimizers(
    optimizer: Any, operation: str
) -> tuple[ShardedOptimizer | None, ShardedOptimizer | None]:
    if optimizer is None:
        return None, None
    if not isinstance(optimizer, Optimizer):
        raise ArgumentError(
            f"{operation}: optimizer: expected a moe.Optimizer or None, got a "
            f"{type(optimizer).__name__}"
        )
    return optimizer.dense, optimizer.experts


def _remove_cut_off(root: Path, groups: ExpertGroups) -> None:
    """Removes checkpoints that only experts have; see NOTE [When a checkpoint of both is whole]."""
    assert groups.replicas is not None
    if groups.replicas.rank or not groups.writes:
        return
    whole, mine = (
        Checkpoints(_dense_folder(root)).steps(),
        Checkpoints(_expert_folder(root, groups)),
    )
    for step in mine.steps():
        if step > max(whole, default=-1):
            mine.remove(step)


def _check_there(root: Path, groups: ExpertGroups, step: int | None) -> None:
    folder = _expert_folder(root, groups)
    if step is None or step not in Checkpoints(folder).steps():
        others = sorted(each.name for each in root.glob("experts-*"))
        raise CheckpointError(
            f"{_LOAD}: {root}: expected a checkpoint of both parts, of step "
            f"{'any' if step is None else step} in dense and {folder.name}, found "
            f"{', '.join(others) or 'no experts'}; load experts on as many ranks as "
            "saved them"
        )
