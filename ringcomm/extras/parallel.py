# SPDX-License-Identifier: Apache-2.0
"""Tensor and sequence parallelism of a module: linear layers that are divided over ranks.

Between :data:`SPLIT` and :data:`GATHER` each of W ranks of a mesh has 1/W of the tokens of every
sequence. A column-parallel layer gathers the tokens while it multiplies by its columns; a
row-parallel layer sums and scatters its products (``ringcomm.functional.all_gather_matmul`` and
``matmul_reduce_scatter``). Modules between the two work on some heads, or some columns, of all
tokens. Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022,
arXiv:2205.05198).

Parameters become ``DTensor`` objects, sharded or replicated over the mesh, so that optimizers,
``ringcomm.zero`` and checkpoints can find a rank's part of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.distributed import HashStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from ringcomm.c10d.comm_argument import find_communicator
from ringcomm.comm.agreement import all_or_none, check_agreement
from ringcomm.comm.communicator import Communicator
from ringcomm.errors import ArgumentError, where
from ringcomm.functional import (
    all_gather_matmul,
    join_sequence,
    matmul_reduce_scatter,
    split_sequence,
)
from ringcomm.functional.graph_pass import fuse_products
from ringcomm.module_names import find_modules, some

__all__ = [
    "COLUMN",
    "GATHER",
    "KINDS",
    "ROW",
    "SEQUENCE",
    "SPLIT",
    "WHOLE",
    "ColumnParallelLinear",
    "RowParallelLinear",
    "fuse_products",
    "parallelize",
]

Tensor = torch.Tensor

#: A linear layer that maps all features of a rank's tokens to some features of all tokens.
COLUMN = "column"
#: A linear layer that maps some features of all tokens to all features of a rank's tokens.
ROW = "row"
#: A module on a rank's tokens, with parameters that all ranks have, such as a norm.
SEQUENCE = "sequence"
#: A module on whole sequences; each rank keeps only its own tokens of the output.
SPLIT = "split"
#: A module on a rank's tokens, whose output is gathered.
GATHER = "gather"
#: A module on whole sequences, equal on all ranks, before a split or after a gather.
WHOLE = "whole"
KINDS = (COLUMN, ROW, SEQUENCE, SPLIT, GATHER, WHOLE)

_OPERATION = "parallelize"
# The attribute that zero.shard() sets on a module; this file does not import zero.
_ENGINE = "_ringcomm_engine"


def _local(param: Any, *, adds_up: bool = False) -> Tensor:
    """Returns this rank's local tensor of a parameter.

    Args:
        param: a DTensor.
        adds_up: True if each rank's gradient covers only its own tokens and must be summed.
    """
    local: Tensor = param.to_local(grad_placements=[Partial()] if adds_up else None)
    return local


class ColumnParallelLinear(nn.Linear):
    """An ``nn.Linear`` layer whose output features are divided over W ranks.

    Maps this rank's tokens [n, in] or [batch, n, in] to its features of all tokens [..., W n,
    out / W]. :func:`parallelize` makes it from a linear layer.
    """

    group: Communicator

    def forward(self, input: Tensor) -> Tensor:
        """Returns this rank's features of all tokens; collective."""
        bias = None if self.bias is None else _local(self.bias)
        return all_gather_matmul(input, _local(self.weight).mT, self.group, bias=bias)


class RowParallelLinear(nn.Linear):
    """An ``nn.Linear`` layer whose input features are divided over W ranks.

    Maps this rank's features of all tokens [W n, in / W] or [batch, W n, in / W] to all features of
    this rank's tokens [..., n, out]. :func:`parallelize` makes it from a linear layer.
    """

    group: Communicator

    def forward(self, input: Tensor) -> Tensor:
        """Returns all features of this rank's tokens; collective."""
        _check_features(self, input, self.in_features // self.group.world_size)
        out = matmul_reduce_scatter(input, _local(self.weight).mT, self.group)
        return out if self.bias is None else out + _local(self.bias, adds_up=True)


def _check_features(layer: nn.Linear, input: Tensor, features: int) -> None:
    """Raises ArgumentError unless the input has ``features`` features on this rank."""
    if input.size(-1) != features:
        raise ArgumentError(
            f"{type(layer).__name__}({layer.extra_repr()}): expected {features} features on this "
            f"rank, got {input.size(-1)}. Linear layers must come in pairs, {COLUMN!r} and "
            f"then {ROW!r}; heads must name all attributes that count heads"
        )


class _OnTokens(nn.Module):
    """A module that works on a rank's tokens, so that its gradients are partial sums.

    During its forward its parameters are local tensors.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, nn.Linear) and args:
            _check_features(self, args[0], self.in_features)
        held = dict(self._parameters)
        local: Any = {
            name: _local(param, adds_up=True) for name, param in held.items() if param is not None
        }
        self._parameters.update(local)
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._parameters.update(held)


@cache
def _on_tokens(kind: type) -> type[nn.Module]:
    return type(f"{kind.__name__}OnTokens", (_OnTokens, kind), {})


def parallelize(
    model: nn.Module,
    plan: Mapping[str, str],
    mesh: DeviceMesh,
    *,
    heads: Mapping[str, Sequence[str]] | None = None,
) -> nn.Module:
    """Divides the layers of ``model`` among the ranks of ``mesh``, in place; collective.

    Parameters that ``plan`` makes column-parallel, row-parallel, sequence or gather become DTensors
    with the values of the mesh's first rank. The modules stay the same objects, with other classes.
    Call it before ``ringcomm.zero.shard``, and before building an optimizer, which would otherwise
    keep the old parameters.

    Args:
        model: a model whose parameters are not DTensors; they may be on the meta device.
        plan: maps names of modules, as in ``named_modules()``, to one of ``KINDS``; a ``*`` matches
            any characters between two dots. A module that is not named has the kind of the nearest
            named module around it. Every module with parameters must have a kind.
        mesh: a mesh of one dimension, such as ``mesh["tp"]``.
        heads: maps names of modules to the names of their attributes that count heads; each such
            attribute is divided by the number of ranks.

    Returns:
        ``model``.

    Raises:
        ArgumentError: on some rank, the plan does not fit the model, or the model does not fit the
            mesh. All ranks raise, the message names all problems, and nothing was changed.
        MismatchError: the ranks' models or plans differ. All ranks raise, and nothing was changed.
        RingcommError: a fault; see ``ringcomm.errors``.
    """
    if not isinstance(mesh, DeviceMesh):
        raise ArgumentError(
            f"{_OPERATION}: mesh: expected a DeviceMesh of one dimension, such as mesh['tp'], got "
            f"{mesh!r:.80}"
        )
    group = find_communicator(mesh, _OPERATION, None)
    if group is None:
        group = Communicator.from_store(HashStore(), 0, 1, name=_OPERATION)
    found = _ParallelPlan(model, group.world_size)
    found.read(plan, {} if heads is None else heads)
    _check_agreement(found, group)
    _apply(found, group, mesh)
    return model


@dataclass
class _ParallelPlan:
    """The user's plan, checked against the model: the kind of each module, and all problems.

    Attributes:
        model: the whole model.
        world_size: number of ranks that divide the model.
        kinds: kinds of the modules that the plan names, by module name.
        divided: modules with the attributes that count their heads.
        wrong: one text for each problem.
    """

    model: nn.Module
    world_size: int
    kinds: dict[str, str] = field(default_factory=dict)
    divided: list[tuple[nn.Module, str]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def read(self, plan: Mapping[str, str], heads: Mapping[str, Sequence[str]]) -> None:
        """Reads and checks the user's arguments."""
        for argument, given in (("plan", plan), ("heads", heads)):
            if not isinstance(given, Mapping) or not all(isinstance(each, str) for each in given):
                self.wrong.append(
                    f"{argument}: expected a dict by names of modules, got {given!r:.80}"
                )
        if self.wrong:
            return
        for pattern, kind in plan.items():
            if kind not in KINDS:
                self.wrong.append(f"plan[{pattern!r}]: expected one of {_kinds()}, got {kind!r}")
                continue
            for name, module in self._named("plan", pattern):
                if self.kinds.setdefault(name, kind) != kind:
                    self.wrong.append(
                        f"plan: {name!r} is both {self.kinds[name]!r} and {kind!r}; let one name "
                        "match it"
                    )
                self._check_linear(name, module, kind)
        for pattern, attributes in heads.items():
            for name, module in self._named("heads", pattern):
                for attribute in (attributes,) if isinstance(attributes, str) else attributes:
                    self._check_heads(name, module, attribute)
        if not self.wrong:
            self._check_parameters()

    def _named(self, argument: str, pattern: str) -> list[tuple[str, nn.Module]]:
        found = find_modules(self.model, pattern)
        if not found:
            names = [name for name, _ in self.model.named_modules() if name]
            self.wrong.append(
                f"{argument}[{pattern!r}]: expected the name of a module, got one that none has; "
                f"there are {some(names)}"
            )
        return found

    def _check_linear(self, name: str, module: nn.Module, kind: str) -> None:
        if kind not in (COLUMN, ROW):
            return
        if type(module) is not nn.Linear:
            self.wrong.append(
                f"{name!r}: expected an nn.Linear as {kind!r}, got {type(module).__name__}"
            )
            return
        what = "out_features" if kind == COLUMN else "in_features"
        size = getattr(module, what)
        if size % self.world_size:
            self.wrong.append(
                f"{name!r}: expected {what} that the {self.world_size} ranks of the mesh divide, "
                f"got {size}"
            )

    def _check_heads(self, name: str, module: nn.Module, attribute: str) -> None:
        count = getattr(module, attribute, None)
        if type(count) is not int or count % self.world_size:
            self.wrong.append(
                f"heads: {name!r}: expected {attribute} to be a number that the {self.world_size} "
                f"ranks of the mesh divide, got {count!r}"
            )
        elif (module, attribute) not in self.divided:
            self.divided.append((module, attribute))

    def _check_parameters(self) -> None:
        if any(hasattr(module, _ENGINE) for module in self.model.modules()):
            self.wrong.append(
                "model: expected one that is not sharded yet, got one after zero.shard(); call "
                f"{_OPERATION} first"
            )
            return
        unnamed: list[str] = []
        of_others: list[str] = []
        kinds: dict[nn.Parameter, tuple[str, str]] = {}
        for name, module in self.model.named_modules():
            for param in module.parameters(recurse=False):
                kind = self.kind_of(name)
                if kind is None:
                    unnamed.append(name)
                    break
                if isinstance(param, DTensor):
                    of_others.append(name)
                before = kinds.setdefault(param, (_group_of(kind), name))
                if before[0] != _group_of(kind):
                    self.wrong.append(
                        f"plan: {before[1]!r} and {name!r} share a parameter, of which the former "
                        f"is {self.kind_of(before[1])!r} and the latter {kind!r}"
                        + _for_tied(before[0], _group_of(kind))
                    )
        if unnamed:
            self.wrong.append(
                "plan: expected every module with parameters, or one around it, got none for "
                f"{some(unnamed)}; one that works on a rank's tokens is {SEQUENCE!r}, one that "
                f"works on whole sequences {WHOLE!r}"
            )
        if of_others:
            self.wrong.append(
                f"expected parameters that are no DTensors, got DTensors in {some(of_others)}"
            )

    def describe(self) -> list[str]:
        """Returns a description of each module, which must be equal on all ranks."""
        counts: dict[int, dict[str, int]] = {}
        for module, attribute in self.divided:
            counts.setdefault(id(module), {})[attribute] = getattr(module, attribute)
        return [
            f"{name!r} as {self.kind_of(name)!r}"
            + (f", with the heads {counts[id(module)]}" if id(module) in counts else "")
            + f", with the parameters {_params_of(module)}"
            for name, module in self.model.named_modules()
        ]

    def kind_of(self, name: str) -> str | None:
        """Returns the kind of a module, or of the nearest module around it that the plan names."""
        while name not in self.kinds:
            if not name:
                return None
            name = name.rpartition(".")[0]
        return self.kinds[name]


def _check_agreement(found: _ParallelPlan, group: Communicator) -> None:
    """Raises on all ranks if a plan is wrong on any rank, or if plans differ; collective."""
    with all_or_none(group, _OPERATION):
        if found.wrong:
            head = where(_OPERATION, group.rank, group.world_size)
            raise ArgumentError(f"{head}: " + "; ".join(found.wrong))
    told = {"modules": found.describe()}
    check_agreement(group, _OPERATION, told, "Give all ranks the same model, plan and heads")


def _params_of(module: nn.Module) -> list[tuple[object, ...]]:
    return [
        (name, list(param.shape), str(param.dtype), param.requires_grad)
        for name, param in module.named_parameters(recurse=False)
    ]


def _kinds() -> str:
    return ", ".join(map(repr, KINDS))


def _group_of(kind: str) -> str:
    """Returns the kind that represents all kinds with the same placement of parameters."""
    return {SPLIT: WHOLE, GATHER: SEQUENCE}.get(kind, kind)


def _for_tied(first: str, second: str) -> str:
    """Returns advice for the case that an embedding and a head share a weight."""
    if {first, second} != {WHOLE, SEQUENCE}:
        return ""
    return (
        f"; where an embedding that is {SPLIT!r} and a head share their weight, let the last "
        f"module before the head, such as a norm, be {GATHER!r} and the head {WHOLE!r}"
    )


class _Region:
    """Finds modules between a split and a gather that the plan wrongly calls "whole".

    Attributes:
        tokens: all sizes but the last of the split's output in this forward, or None.
    """

    def __init__(self) -> None:
        self.tokens: torch.Size | None = None

    def watch(self, found: _ParallelPlan) -> None:
        """Hooks the modules that are "whole", and the beginning and the end of a forward."""
        found.model.register_forward_pre_hook(self._forget)
        found.model.register_forward_hook(self._forget)
        for name, module in found.model.named_modules():
            has_own = any(True for _ in module.parameters(recurse=False))
            if has_own and _group_of(found.kind_of(name) or "") == WHOLE:
                module.register_forward_pre_hook(partial(self._check, name))

    def _forget(self, *_: Any) -> None:
        self.tokens = None

    def remember(self, module: nn.Module, args: Any, output: Tensor) -> None:
        """Stores the sizes of a split's output; this hook runs after the splitting hook."""
        self.tokens = output.shape[:-1]

    def _check(self, name: str, module: nn.Module, args: Any) -> None:
        if self.tokens is None or not args or not isinstance(args[0], Tensor):
            return
        if args[0].shape[:-1] == self.tokens:
            raise ArgumentError(
                f"{_OPERATION}: {name!r}: expected a module that is {WHOLE!r} to be called before "
                f"{SPLIT!r} or after {GATHER!r}, got a call with a rank's tokens, whose partial "
                f"gradients no rank would sum; make the module {SEQUENCE!r}"
            )


def _apply(found: _ParallelPlan, group: Communicator, mesh: DeviceMesh) -> None:
    made: dict[nn.Parameter, nn.Parameter] = {}
    for name, module in list(found.model.named_modules()):
        kind = found.kind_of(name)
        if kind is None:
            continue
        for param_name, placement in _placements(module, kind):
            param = getattr(module, param_name)
            if param not in made:
                value = distribute_tensor(param.detach(), mesh, [placement])
                made[param] = nn.Parameter(value, requires_grad=param.requires_grad)
            setattr(module, param_name, made[param])
        if kind in (COLUMN, ROW):
            module.__class__ = ColumnParallelLinear if kind == COLUMN else RowParallelLinear
            module.group = group
        elif _group_of(kind) == SEQUENCE and any(True for _ in module.parameters(recurse=False)):
            own_kind: type = type(module)
            module.__class__ = _on_tokens(own_kind)
    region = _Region()
    for name, kind in found.kinds.items():
        if kind in (SPLIT, GATHER):
            call = split_sequence if kind == SPLIT else join_sequence
            hook = partial(_change_output, call, group)
            module = found.model.get_submodule(name)
            module.register_forward_hook(hook)
            if kind == SPLIT and group.world_size > 1:
                module.register_forward_hook(region.remember)
    region.watch(found)
    for module, attribute in found.divided:
        setattr(module, attribute, getattr(module, attribute) // group.world_size)


def _placements(module: nn.Module, kind: str) -> Iterator[tuple[str, Shard | Replicate]]:
    """Yields name and placement of each parameter that the module itself has and distributes."""
    for name, _ in list(module.named_parameters(recurse=False, remove_duplicate=False)):
        if _group_of(kind) == WHOLE:
            continue
        if kind == COLUMN:
            yield name, Shard(0)
        elif kind == ROW and name == "weight":
            yield name, Shard(1)
        else:
            yield name, Replicate()


def _change_output(
    call: Any, group: Communicator, module: nn.Module, args: Any, output: Tensor
) -> Tensor:
    changed: Tensor = call(output, group)
    return changed
