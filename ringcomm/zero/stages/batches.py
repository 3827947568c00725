# SPDX-License-Identifier: Apache-2.0
"""Batch normalization, buffers and uneven numbers of batches, over all ranks.

NOTE [Statistics of all ranks]
Each rank sends, by channel, the mean, the sum of squared deviations and the number of its own
elements, and merges the values of all ranks in the order of the ranks (Chan, Golub and LeVeque,
1983). So every rank has the same statistics to the bit, and no digits are lost by subtracting sums
of squares. Autograd computes the gradient; its only collective is the all-gather's backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ringcomm import functional
from ringcomm.c10d.comm_argument import CommArgument, find_communicator
from ringcomm.comm.agreement import all_or_none, check_agreement
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.host.arguments import ReduceOp
from ringcomm.errors import ArgumentError, RingcommError, where
from ringcomm.module_names import unwrapped_name
from ringcomm.optim.dtensors import local_of
from ringcomm.zero.stages.sharding import engine_of, is_sharded

Tensor = torch.Tensor


class SyncBatchNorm(_BatchNorm):
    """Batch normalization that trains with the statistics of all ranks' batches.

    Made by :func:`convert_sync_batchnorm`. In evaluation it does the same as ``nn.BatchNorm2d``.
    """

    group: Communicator

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ArgumentError(
                f"SyncBatchNorm: expected [batch, channels, ...], got shape {tuple(input.shape)}"
            )

    def forward(self, input: Tensor) -> Tensor:
        """Normalizes a batch. In training, forward and backward are collective."""
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        mean, var, count = self._statistics(input)
        self._follow(mean.detach(), var.detach(), count)
        scale = torch.rsqrt(var + self.eps)
        if self.weight is not None:
            scale = scale * self.weight.float()
        shift = -mean * scale
        if self.bias is not None:
            shift = shift + self.bias.float()
        shape = (1, -1, *[1] * (input.dim() - 2))
        return (input.float() * scale.view(shape) + shift.view(shape)).to(input.dtype)

    def _statistics(self, input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns all ranks' mean and variance by channel, and their number of elements."""
        dims = [dim for dim in range(input.dim()) if dim != 1]
        elems, own = input.numel() // max(1, input.size(1)), input.float()
        if elems:
            var, mean = torch.var_mean(own, dims, correction=0)
        else:
            var = mean = own.sum(dims)  # zeros, through which gradients still flow
        squares, count = var * elems, torch.full_like(mean[:1], elems)
        everyone = functional.all_gather(torch.cat([mean, squares, count])[None], self.group)
        means, sums, counts = torch.split(everyone, [len(mean), len(mean), 1], dim=1)
        total = counts.sum()
        whole = (means * counts).sum(0) / total
        deviations = sums.sum(0) + ((means - whole).square() * counts).sum(0)
        return whole, deviations / total, total.detach()

    @torch.no_grad()
    def _follow(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        """Moves the running mean and unbiased variance towards a batch's mean and variance."""
        if not self.track_running_stats or self.running_mean is None:
            return
        assert self.num_batches_tracked is not None and self.running_var is not None
        self.num_batches_tracked.add_(1)
        share: Any = self.momentum
        if share is None:
            share = self.num_batches_tracked.to(torch.float32).reciprocal()
        unbiased = var * (count / (count - 1).clamp_(min=1))
        for running, now in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.mul_(1 - share).add_((now * share).to(running.dtype))


def convert_sync_batchnorm(module: nn.Module, comm: CommArgument = None) -> nn.Module:
    """Makes a module's batch normalizations use the statistics of all ranks; collective.

    Does what ``torch.nn.SyncBatchNorm.convert_sync_batchnorm`` does, but also on CPUs, and over any
    ``comm``. Call it before ``shard()``, and before you build an optimizer. The module keeps its
    parameters and buffers.

    Args:
        module: any module that is not sharded.
        comm: the ranks, as for :func:`shard`. The layers get a communicator of their own, so that
            their calls and the reductions of gradients need no common order.

    Returns:
        The module; a new module if it is a batch normalization itself.

    Raises:
        ArgumentError: the module is sharded.
    """
    if any(is_sharded(each) for each in module.modules()):
        raise ArgumentError(
            "convert_sync_batchnorm: the module is sharded already; convert it before shard()"
        )
    layers = [each for each in module.modules() if isinstance(each, _BatchNorm)]
    first = next(module.parameters(), None)
    found = find_communicator(
        comm, "convert_sync_batchnorm", None if first is None else first.device
    )
    if not layers or found is None or found.world_size == 1:
        return module
    group = found.new_group(range(found.world_size))
    assert group is not None
    return _converted(module, group, {})


def _converted(module: nn.Module, group: Communicator, made: dict[int, nn.Module]) -> nn.Module:
    if id(module) in made:
        return made[id(module)]
    result = module
    if isinstance(module, _BatchNorm):
        result = SyncBatchNorm(
            module.num_features, module.eps, module.momentum, False, module.track_running_stats
        )
        result.group, result.affine = group, module.affine
        result.training = module.training
        result._parameters.update(module._parameters)
        result._buffers.update(module._buffers)
    made[id(module)] = result
    # named_children() would leave out further names of a module that has several.
    for name, child in module._modules.items():
        if child is not None:
            setattr(result, name, _converted(child, group, made))
    return result


@torch.no_grad()
def sync_buffers(module: nn.Module, how: str = "mean") -> None:
    """Makes the buffers of a sharded module equal on all ranks, at any stage; collective.

    Without it, running statistics of ``BatchNorm`` differ between ranks. Elements that are already
    equal on all ranks do not change, not even by rounding.

    Args:
        module: the module that ``shard()`` returned.
        how: "mean": the mean over the ranks; for integers and booleans, rank 0's values. "rank0":
            rank 0's values, as in ``DistributedDataParallel``.

    Raises:
        ArgumentError: the module is not sharded, or ``how`` has another value; on all ranks.
        MismatchError: the ranks' buffers have different names, shapes or dtypes, or the ranks pass
            a different ``how``; on all ranks, and nothing was changed.
    """
    engine = engine_of(module, "sync_buffers")
    comm, root = engine.comm, engine.setup.module
    with all_or_none(comm, "sync_buffers", engine.mesh):
        if how not in ("mean", "rank0"):
            head = where("sync_buffers", comm.rank, comm.world_size)
            raise ArgumentError(f'{head}: how: expected "mean" or "rank0", got {how!r}')
    buffers = ((unwrapped_name(root, name), each) for name, each in root.named_buffers())
    named = {name: local_of(each) for name, each in buffers if each.numel()}
    told = {name: [str(each.dtype), list(each.shape)] for name, each in named.items()}
    check_agreement(comm, "sync_buffers", {"options": {"how": how, **told}})
    for dtype in dict.fromkeys(each.dtype for each in named.values()):
        alike = [each for each in named.values() if each.dtype is dtype]
        flat = torch.cat([each.detach().reshape(-1) for each in alike])
        if how == "mean" and dtype.is_floating_point:
            flat = _mean(comm, flat)
        else:
            comm.broadcast(flat, 0)
        _spread(flat, alike)


def _mean(comm: Communicator, own: Tensor) -> Tensor:
    """Returns the mean over the ranks; elements equal on all ranks are kept, without rounding."""
    wide = own.to(torch.promote_types(own.dtype, torch.float32))
    least, most, mean = wide.clone(), wide.clone(), wide.clone()
    for tensor, op in ((least, ReduceOp.MIN), (most, ReduceOp.MAX), (mean, ReduceOp.AVG)):
        comm.all_reduce(tensor, op)
    return torch.where(least == most, wide, mean).to(own.dtype)


def _spread(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    begin = 0
    for tensor in tensors:
        tensor.copy_(flat[begin : begin + tensor.numel()].view(tensor.shape))
        begin += tensor.numel()


# ---- Ranks with different numbers of batches -----------------------------------------------------
# NOTE [No shadow] In ``torch.distributed.algorithms.Join`` a rank without batches repeats the
# collectives of the others. This is not enough with sharded state: a rank without batches still
# updates its shards, so between the collectives it must also clip, scale, and change learning rates
# as other ranks do. So the training loop itself continues on all ranks, and the results of a rank
# without batches have the weight 0. This works at every stage and with every model.

Batch = TypeVar("Batch")


def uneven(
    batches: Iterable[Batch],
    *,
    comm: CommArgument = None,
    divide_by_initial_world_size: bool = True,
) -> Iterator[tuple[Batch, float]]:
    """Yields batches until no rank has one left, with a weight for the loss; collective.

    A rank that has no more batches gets its last batch again, with the weight 0. Multiply the loss
    by the weight, and change nothing else: all ranks run equally many backwards and steps. Ranks
    agree on each batch in one small all-reduce; no rank may leave the loop before the others.

    Args:
        batches: this rank's batches; at least one, unless no rank has any.
        comm: the ranks that share the work, as for :func:`shard`.
        divide_by_initial_world_size: as for ``DistributedDataParallel.join()``. True: the gradient
            is the sum divided by the number of all ranks; a weight is 1 or 0. False: the gradient
            is the mean over the ranks that still have batches; fewer ranks have larger weights.

    Raises:
        ArgumentError: one rank has no batch at all and others have some; on all ranks.
        RingcommError: the batches of another rank raised an exception.
    """
    found = find_communicator(comm, "uneven", None)
    remaining, batch, has_any = iter(batches), None, False
    while True:
        error: BaseException | None = None
        here = False
        try:
            batch = next(remaining)
            here = has_any = True
        except StopIteration:
            pass
        except Exception as raised:
            error = raised
        present = 1 if here else 0
        if found is not None:
            present = _agree(found, here, has_any, error)
        if error is not None:
            raise error
        if not present:
            return
        ranks = 1 if found is None else found.world_size
        share = 1.0 if divide_by_initial_world_size else ranks / present
        yield batch, share if here else 0.0  # type: ignore[misc]


def _agree(comm: Communicator, here: bool, has_any: bool, error: BaseException | None) -> int:
    """Returns the number of ranks that still have a batch; collective."""
    told = torch.tensor([here, not has_any, error is not None], dtype=torch.int64, device="cpu")
    told = told.to(comm.device)
    comm.all_reduce(told, ReduceOp.SUM)
    comm.engine.finish_host_side()
    present, without, failed = told.tolist()
    head = where("uneven", comm.rank, comm.world_size)
    if failed and error is None:
        raise RingcommError(
            f"{head}: the batches of another rank raised an exception, which that rank reports; "
            "so no rank continues"
        )
    if present and without:
        mine = "this rank has batches" if has_any else "this rank has no batch"
        raise ArgumentError(
            f"{head}: batches: expected at least one on each rank, got none on {without} of "
            f"{comm.world_size} ({mine}); a rank that has no more batches repeats its last batch, "
            "so give each rank at least one"
        )
    return int(present)
