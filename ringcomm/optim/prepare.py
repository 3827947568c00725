"""From a list of parameters to buckets in the heap, once all ranks agree on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from ringcomm.comm.communicator import Communicator
from ringcomm.errors import ArgumentError
from ringcomm.optim.agreement import check_agreement
from ringcomm.optim.buckets import Buckets
from ringcomm.optim.gradients import label
from ringcomm.optim.layout import ShardLayout
from ringcomm.optim.options import AdamWOptions
from ringcomm.optim.params import ParamSpec

Tensor = torch.Tensor
Group = Mapping[str, Any]

OPERATION = "optimizer.prepare"
_COMPARED = ("betas", "eps", "weight_decay", "amsgrad", "maximize", "decoupled_weight_decay")


def all_params(groups: Sequence[Group]) -> list[Tensor]:
    """The parameters of all groups, in order; where one occurs twice, twice."""
    return [param for group in groups for param in group["params"]]


def specs_of(groups: Sequence[Group]) -> list[ParamSpec]:
    """The specs of :func:`all_params`; a tensor that comes again is tied to its first entry."""
    specs: list[ParamSpec] = []
    first: dict[int, int] = {}
    for number, group in enumerate(groups):
        names = group.get("param_names") or [""] * len(group["params"])
        for param, name in zip(group["params"], names, strict=True):
            specs.append(ParamSpec.of(param, number, name, first.get(id(param))))
            first.setdefault(id(param), len(specs) - 1)
    return specs


def check_memory(params: Sequence[Tensor], layout: ShardLayout) -> None:
    """Checks that no two parameters share memory, which moving them would separate silently.

    Raises:
        ArgumentError: two do; both are named.
    """
    spans = sorted(
        (params[index].data_ptr(), params[index].data_ptr() + _extent_bytes(params[index]), index)
        for index in layout.places
        if params[index].device.type != "meta"
    )
    for (_, end, index), (begin, _, other) in pairwise(spans):
        if begin < end:
            names = [label(each, layout.params[each]) for each in sorted((index, other))]
            raise ArgumentError(
                f"{names[0]} and {names[1]} are two tensors that share memory. To tie them, use "
                "one Parameter in both places; else give each its own memory with .clone()"
            )


def _extent_bytes(tensor: Tensor) -> int:
    """Bytes from the first to the last element."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.element_size()


def check_masters(layout: ShardLayout, options: AdamWOptions) -> None:
    """Checks that the options can serve the parameters' dtypes.

    Raises:
        ArgumentError: a float16 parameter with a remainder.
    """
    for index in layout.places:
        if options.master == "remainder" and layout.params[index].dtype is torch.float16:
            raise ArgumentError(
                f"{label(index, layout.params[index])}: master: expected bfloat16 or float32 "
                'parameters with "remainder" (the low half of an FP32 number), got float16; use '
                'master="fp32"'
            )


def check_ranks(
    comm: Communicator, layout: ShardLayout, groups: Sequence[Group], options: AdamWOptions
) -> None:
    """Compares parameters, hyper-parameters (lr excepted) and options of all ranks; collective.

    Raises:
        MismatchError: two ranks differ; both are named, and the first parameter that differs.
    """
    compared = [{name: _plain(group[name]) for name in _COMPARED} for group in groups]
    mine = {"layout": layout.describe(), "options": options.describe(), "groups": compared}
    check_agreement(comm, OPERATION, mine)


def check_hyper_parameters(comm: Communicator, groups: Sequence[Group]) -> None:
    """Compares the hyper-parameters of all ranks, lr too; collective.

    Raises:
        MismatchError: two ranks differ; both are named, and the first group that differs.
    """
    compared = [{name: _plain(group[name]) for name in ("lr", *_COMPARED)} for group in groups]
    check_agreement(comm, "optimizer.step", {"groups": compared})


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value


def move_parameters(
    params: list[Tensor], buckets: Buckets, comm: Communicator | None, broadcast: bool
) -> None:
    """Makes the parameters views of their buckets; with ``broadcast``, those of rank 0."""
    buckets.adopt(params)
    for bucket in buckets:
        if comm is not None and broadcast:
            comm.broadcast(bucket.params, 0)
        bucket.refresh_master()


def share_params(comm: Communicator, buckets: Buckets) -> None:
    """Gives all ranks each other's chunks of the parameters, where ranks keep them all."""
    for bucket in buckets:
        if bucket.has_all_params:
            chunks = [bucket.layout.chunk(rank, comm.world_size) for rank in range(comm.world_size)]
            own = bucket.own_params.clone()
            comm.all_gather([bucket.params[chunk.begin : chunk.end] for chunk in chunks], own)
