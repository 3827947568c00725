"""The plan of a module's buckets: which parameters lie in which bucket, and where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import add

import torch
from torch import nn

from ringcomm.errors import ArgumentError
from ringcomm.optim.dtensors import Sharding, local_of
from ringcomm.optim.layout import (
    DTYPE_NAMES,
    DTYPES,
    PLACED_DTYPES,
    BucketLayout,
    ParamSpec,
    ShardLayout,
)
from ringcomm.zero.options import ZeroOptions
from ringcomm.zero.precision import ModuleDtypes
from ringcomm.zero.units import Unit

Tensor = torch.Tensor


@dataclass(frozen=True)
class BucketPlan:
    """The layout of a module's trainable parameters, or of its frozen ones; equal at every stage.

    Attributes:
        names: names, by parameter index.
        params: parameters, by index.
        layout: their layout.
        unit_of: by bucket number, the index of the unit that its parameters belong to.
    """

    names: tuple[str, ...]
    params: tuple[nn.Parameter, ...]
    layout: ShardLayout
    unit_of: tuple[int, ...]


def plan_buckets(
    units: Sequence[Unit], options: ZeroOptions, dtypes: ModuleDtypes, trainable: bool
) -> BucketPlan:
    """Lays out the trainable parameters of units, or the frozen ones; no bucket spans two units.

    Parameters of several dtypes in a unit have buckets of each. Frozen parameters of 8 bits keep
    their dtype, and those of other dtypes that no optimizer takes have no place.

    Raises:
        ArgumentError: a trainable parameter is of a dtype that no optimizer takes.
    """
    named: list[tuple[str, nn.Parameter]] = []
    specs: list[ParamSpec] = []
    buckets: list[BucketLayout] = []
    unit_of: list[int] = []
    for number, unit in enumerate(units):
        first = len(specs)
        for name, param in unit.params.items():
            if trainable and param.requires_grad and param.dtype not in DTYPE_NAMES:
                raise ArgumentError(
                    f"shard: parameter {name}: expected dtype {', '.join(DTYPES)}, got "
                    f"{param.dtype}, which no optimizer steps; freeze it (requires_grad_(False)), "
                    "and train others beside it, such as adapters"
                )
            if param.requires_grad == trainable and param.dtype in PLACED_DTYPES:
                named.append((name, param))
                specs.append(_spec(name, param, dtypes.of_param(param)))
        run = ShardLayout.plan(specs[first:], options.bucket_elems)
        for bucket in run.buckets:
            buckets.append(bucket.with_params(partial(add, first)))
            unit_of.append(number)
    return BucketPlan(
        tuple(name for name, _ in named),
        tuple(param for _, param in named),
        ShardLayout(tuple(specs), options.bucket_elems, tuple(buckets)),
        tuple(unit_of),
    )


def _spec(name: str, param: nn.Parameter, dtype: torch.dtype | None) -> ParamSpec:
    """Returns the spec of a parameter in its bucket: cast, contiguous, and placed even if frozen.

    It is contiguous so that in checkpoints a piece of a bucket is a piece of the flattened
    parameter.
    """
    shape = tuple(local_of(param).shape)
    if param.dtype not in DTYPE_NAMES:
        dtype = None
    return ParamSpec(shape, dtype or param.dtype, name=name, sharding=Sharding.of(param))


def by_optimizer(
    plan: BucketPlan, params: Sequence[Tensor], groups: Sequence[int], names: Sequence[str]
) -> ShardLayout:
    """Returns the layout with its parameters in an optimizer's order.

    Args:
        plan: plan of the trainable parameters.
        params: parameters in the optimizer's order; frozen ones and repetitions have no place, and
            the place of what is missing is padding.
        groups: param group of each.
        names: name of each; "" takes the module's name for it.
    """
    index_of = {id(param): index for index, param in enumerate(plan.params)}
    specs: list[ParamSpec] = []
    position: dict[int, int] = {}
    seen: dict[int, int] = {}
    for at, (param, group, name) in enumerate(zip(params, groups, names, strict=True)):
        index = index_of.get(id(param))
        tied_to = seen.setdefault(id(param), at)
        if index is None:
            frozen = ParamSpec.of(param, group, name, _earlier(tied_to, at))
            specs.append(replace(frozen, trainable=False, stride=None))
            continue
        spec = replace(plan.layout.params[index], group=group)
        if name:
            spec = replace(spec, name=name)
        specs.append(replace(spec, tied_to=_earlier(tied_to, at)))
        position.setdefault(index, at)
    buckets = tuple(bucket.with_params(position.get) for bucket in plan.layout.buckets)
    return ShardLayout(tuple(specs), plan.layout.bucket_elems, buckets)


def _earlier(first: int, at: int) -> int | None:
    return None if first == at else first
