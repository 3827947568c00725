# SPDX-License-Identifier: Apache-2.0
"""Matrix products with rows divided over ranks: the linear layers of tensor parallelism.

Each of W ranks has n of W n rows of a matrix (tokens of a sequence), and a matrix of weights:

* :func:`all_gather_matmul` multiplies the rows of all ranks by this rank's weights. On the host it
  reads the peers' rows directly from their heaps, without a gathered copy.
* :func:`matmul_reduce_scatter` multiplies all W n rows by this rank's weights, and returns this
  rank's n rows of the sum over all ranks. On the host it computes the products in the heap, where
  the peers read them.

Each function computes the gradient of the other function's rows. :func:`_weight_gradient` computes
the gradient of the weights; the two functions compute the gradients of this gradient. On several
nodes and on devices the collectives of ``ringcomm.functional`` are used instead.

Sources: decomposition by ranks: Wang et al., "Overlap Communication with Dependent Computation via
Decomposition in Large Deep Learning Models" (ASPLOS 2023); layers: Korthikanti et al., "Reducing
Activation Recomputation in Large Transformer Models" (2022, arXiv:2205.05198).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch

from ringcomm.comm.communicator import Communicator
from ringcomm.comm.functions import Group
from ringcomm.comm.host.arguments import readable
from ringcomm.comm.peer_memory import lent_to_peers
from ringcomm.functional.collectives import (
    Batching,
    Derivatives,
    Tangent,
    enter,
    find,
    linear_tangent,
    named,
    register,
)
from ringcomm.memory import empty

# ---- Sequence parallelism: splits a sequence that all ranks have, and joins it again ------------
# The two functions are each other's gradient. The gradient of :func:`split_sequence` gathers, so
# operations before it get the gradient of the whole sequence on all ranks. The gradient of
# :func:`join_sequence` is this rank's part of a gradient that is equal on all ranks, so a loss that
# all ranks compute counts once.

Tensor = torch.Tensor


def split_sequence(tensor: Tensor, group: Group = None) -> Tensor:
    """Returns this rank's part of a sequence that is equal on all ranks; backward gathers.

    Args:
        tensor: [..., world_size * n, k], equal on all ranks.
        group: a Communicator, process group of the backend or mesh; None means the default group.

    Returns:
        [..., n, k]: the n tokens that begin at rank * n.

    Raises:
        ArgumentError: bad argument; nothing was sent, and peers wait for this rank.
    """
    return _call_on_sequence("split_sequence", tensor, group)


def join_sequence(tensor: Tensor, group: Group = None) -> Tensor:
    """Returns the tokens of all ranks; the gradient is this rank's part of the result's gradient.

    So all ranks must compute the same values from the result. If they compute different values, use
    ``all_gather``, whose gradient is the sum over the ranks.

    Args:
        tensor: [..., n, k], of one shape and dtype on all ranks.
        group: a Communicator, process group of the backend or mesh; None means the default group.

    Returns:
        [..., world_size * n, k], rank by rank.

    Raises:
        ArgumentError: bad argument; nothing was sent, and peers wait for this rank.
        RingcommError: a fault; see ``ringcomm.errors``.
    """
    return _call_on_sequence("join_sequence", tensor, group)


def _call_on_sequence(function: str, tensor: Tensor, group: Group) -> Tensor:
    key, world_size = enter(function, tensor, group)
    return cast(Tensor, getattr(torch.ops.ringcomm, function)(tensor, key, world_size))


def _split(tensor: Tensor, group: str, world_size: int) -> Tensor:
    communicator = find(group, world_size, named("split_sequence"))
    checks = communicator.engine.checks(named("split_sequence"))
    checks.tensor("tensor", tensor)
    if tensor.dim() < 2 or tensor.size(-2) % world_size:
        checks.fail(
            f"tensor: expected [..., tokens, columns] with tokens that world_size {world_size} "
            f"divides, got {tuple(tensor.shape)}; pad it"
        )
    rows = tensor.size(-2) // world_size
    own = tensor.narrow(-2, communicator.rank * rows, rows)
    return own.clone(memory_format=torch.contiguous_format)


def _shape_of_shard(tensor: Tensor, group: str, world_size: int) -> Tensor:
    return tensor.new_empty((*tensor.shape[:-2], tensor.size(-2) // world_size, tensor.size(-1)))


def _join(tensor: Tensor, group: str, world_size: int) -> Tensor:
    communicator = find(group, world_size, named("join_sequence"))
    checks = communicator.engine.checks(named("join_sequence"))
    checks.tensor("tensor", tensor)
    if tensor.dim() < 2:
        checks.fail(f"tensor: expected [..., tokens, columns], got {tuple(tensor.shape)}")
    return gathered_rows(communicator, tensor)


def gathered_rows(communicator: Communicator, tensor: Tensor) -> Tensor:
    """Returns [..., n, k] of all ranks as [..., world_size * n, k], rank by rank."""
    if tensor.dim() == 2:
        whole = tensor.new_empty((communicator.world_size * tensor.size(0), tensor.size(1)))
        communicator.all_gather_into_tensor(whole, readable(tensor))
        return whole
    by_rank = tensor.new_empty((communicator.world_size, *tensor.shape))
    communicator.all_gather_into_tensor(by_rank, readable(tensor))
    return by_rank.movedim(0, -3).flatten(-3, -2)


def _shape_of_whole(tensor: Tensor, group: str, world_size: int) -> Tensor:
    return tensor.new_empty((*tensor.shape[:-2], tensor.size(-2) * world_size, tensor.size(-1)))


_SCHEMA = "(Tensor tensor, str group, int world_size) -> Tensor"
_ops = torch.ops.ringcomm


def _remember_group(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
    ctx.group = inputs[1:]


def _gradient_of_shard(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return _ops.join_sequence(grad, *ctx.group), None, None


def _gradient_of_whole(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return _ops.split_sequence(grad, *ctx.group), None, None


def _register(
    name: str,
    kernel: Callable[..., Tensor],
    shape: Callable[..., Tensor],
    gradient: Callable[..., tuple[Any, ...]],
) -> None:
    derivatives = Derivatives(gradient, linear_tangent(name), _remember_group)
    batching = Batching(0, least_dims=2)
    register(name, _SCHEMA, kernel, shape, derivatives=derivatives, batching=batching)


_register("split_sequence", _split, _shape_of_shard, _gradient_of_shard)
_register("join_sequence", _join, _shape_of_whole, _gradient_of_whole)


Bias = Tensor | None

# Choices by size. They depend only on values that are equal on all ranks, so all ranks make the
# same choice. They were measured with torch 2.13 in float32, on 2 ranks of one thread each, on two
# virtual cores of an Intel Xeon (family 6 model 207, AVX-512), for n from 64 to 4096 and for k and
# m from 256 to 4096 (docs/performance.md). The figures are medians of ratios of interleaved runs.
#
# A rank's rows of at least READ_FROM_BYTES are read in place; smaller ones are gathered. In place,
# the product with each rank's rows packs the weights again. Compared to all-gather and one product,
# reading in place was 0.6 to 0.8 times as fast at 64 KiB, 0.95 to 1.0 at 1 MiB, 0.98 to 1.13 at
# 2 MiB, 1.02 to 1.13 at 4 MiB with m = 256 (0.93 to 1.03 with m = 1024, whose product takes 20
# times as long as the copy) and 1.6 to 1.8 at 16 MiB, where a gathered copy needs new pages. With 4
# ranks on the two cores it was 0.66 to 1.08 times as fast at 1 MiB and 1.01 to 1.11 at 4 MiB.
READ_FROM_BYTES = 4 << 20
# Products of at least IN_HEAP_FROM_BYTES are computed in the heap. Compared to products outside the
# heap, this was 0.8 to 0.87 times as fast at 128 KiB, 0.93 at 512 KiB, 0.94 to 1.05 at 2 MiB, 1.0
# to 1.25 at 8 MiB and 1.1 to 1.5 at 32 MiB.
IN_HEAP_FROM_BYTES = 2 << 20
# If each sequence of a batch has at least ROWS_OF_A_PRODUCT rows per rank, the rows of each
# sequence and rank are multiplied separately, into the result. Else the batch is one product, which
# is then copied.
ROWS_OF_A_PRODUCT = 128


def all_gather_matmul(
    tensor: Tensor, weight: Tensor, group: Group = None, *, bias: Bias = None
) -> Tensor:
    """Multiplies the rows of all ranks, one rank after the other, by this rank's ``weight``.

    The gradient of ``tensor`` is computed by :func:`matmul_reduce_scatter`, the gradient of
    ``weight`` from the gathered rows; so all ranks must take part in backward.

    Args:
        tensor: [n, k] or [batch, n, k], of one shape and dtype on all ranks; any strides. On the
            host, a tensor in the heap (``ringcomm.empty``) is not copied.
        weight: [k, m], of the same dtype; m may differ between ranks; any strides.
        group: a Communicator, process group of the backend or mesh; None means the default group.
        bias: [m], of the same dtype; added to each row.

    Returns:
        [world_size * n, m] or [batch, world_size * n, m], contiguous.

    Raises:
        ArgumentError: bad argument; nothing was sent, and peers wait for this rank.
        RingcommError: a fault; see ``ringcomm.errors``.
    """
    return _called("all_gather_matmul", tensor, weight, group, bias)


def matmul_reduce_scatter(
    tensor: Tensor, weight: Tensor, group: Group = None, *, bias: Bias = None
) -> Tensor:
    """Returns this rank's rows of the sum over all ranks of ``tensor @ weight``.

    The products are rounded to their dtype, and then summed as by ``reduce_scatter``. The gradient
    of ``tensor`` is computed by :func:`all_gather_matmul`, the gradient of ``weight`` from
    ``tensor`` and the gathered gradient; so all ranks must take part in backward.

    Args:
        tensor: [world_size * n, k] or [batch, world_size * n, k]; k may differ between ranks, the
            other sizes and the dtype are the same on all ranks; any strides.
        weight: [k, m], of the same dtype; any strides.
        group: a Communicator, process group of the backend or mesh; None means the default group.
        bias: [m], of the same dtype; added to each row of this rank's product, so that the result
            has the sum of all ranks' biases. Pass it on all ranks or on none.

    Returns:
        [n, m] or [batch, n, m], contiguous: the rows from rank * n on.

    Raises:
        ArgumentError: bad argument; nothing was sent, and peers wait for this rank.
        RingcommError: a fault; see ``ringcomm.errors``.
    """
    return _called("matmul_reduce_scatter", tensor, weight, group, bias)


def _called(function: str, tensor: Tensor, weight: Tensor, group: Group, bias: Bias) -> Tensor:
    key, world_size = enter(function, tensor, group)
    # Each tensor must need a gradient on all ranks or on no rank; enter() may check this.
    enter(function, weight, group)
    if bias is not None:
        enter(function, bias, group)
    kind = tensor.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        tensor, weight = tensor.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    operator = getattr(torch.ops.ringcomm, function)
    return cast(Tensor, operator(tensor, weight, key, world_size, bias))


# ---- kernels of the operators ---------------------------------------------------------------


def _find(function: str, group: str, world_size: int, **tensors: Tensor) -> Communicator:
    """Checks two tensors, the first with its rows divided over ranks; returns the communicator."""
    communicator = find(group, world_size, named(function))
    checks = communicator.engine.checks(named(function))
    (_, first), (name, second) = tensors.items()
    checks.tensor("tensor", first)
    checks.tensor(name, second)
    if second.dtype is not first.dtype:
        checks.fail(f"{name}: expected {first.dtype} as tensor has, got {second.dtype}")
    if first.dim() not in (2, 3):
        checks.fail(
            f"tensor: expected [rows, columns] or [batch, rows, columns], got {tuple(first.shape)}"
        )
    if name == "weight" and (second.dim() != 2 or second.size(0) != first.size(-1)):
        checks.fail(
            f"weight: expected a matrix of {first.size(-1)} rows, as tensor {tuple(first.shape)} "
            f"has columns, got {tuple(second.shape)}"
        )
    return communicator


def _check_bias(communicator: Communicator, operation: str, bias: Tensor, weight: Tensor) -> None:
    checks = communicator.engine.checks(named(operation))
    checks.tensor("bias", bias)
    if bias.dtype is not weight.dtype or bias.shape != weight.shape[1:]:
        checks.fail(
            f"bias: expected {weight.size(1)} elements of {weight.dtype}, as weight has columns, "
            f"got {tuple(bias.shape)} of {bias.dtype}"
        )


def _reads_peers(communicator: Communicator, tensor: Tensor) -> bool:
    """True if this rank reads its peers' rows in their heaps instead of gathering them."""
    return (
        not communicator.launches
        and communicator.num_nodes == 1
        and communicator.world_size > 1
        and tensor.nbytes >= READ_FROM_BYTES
    )


def _rows_of(tensor: Tensor, rank: int, rows: int) -> Tensor:
    return tensor.narrow(-2, rank * rows, rows)


def _own_first(communicator: Communicator) -> Iterator[int]:
    """Yields all ranks, this rank first, so that no two ranks read from one peer at once."""
    world_size = communicator.world_size
    return ((communicator.rank + step) % world_size for step in range(world_size))


def _product(rows: Tensor, weight: Tensor, bias: Bias) -> Tensor:
    if bias is None:
        return torch.matmul(rows, weight)
    product = torch.addmm(bias, rows.flatten(0, -2), weight)
    return product.view(*rows.shape[:-1], weight.size(1))


def _product_into(out: Tensor, rows: Tensor, weight: Tensor, bias: Bias) -> None:
    if bias is None:
        torch.mm(rows, weight, out=out)
    else:
        torch.addmm(bias, rows, weight, out=out)


def _multiply(rows: Tensor, weight: Tensor, bias: Bias, out: Tensor) -> None:
    """Writes the product to ``out``, where each sequence is contiguous, but not the whole batch."""
    if rows.dim() == 2:
        _product_into(out, rows, weight, bias)
    elif rows.size(-2) < ROWS_OF_A_PRODUCT:
        out.copy_(_product(rows, weight, bias))
    else:
        for each, its in zip(rows, out, strict=True):
            _product_into(its, each, weight, bias)


def _all_gather_matmul(
    tensor: Tensor, weight: Tensor, group: str, world_size: int, bias: Bias
) -> Tensor:
    operation = "all_gather_matmul"
    communicator = _find(operation, group, world_size, tensor=tensor, weight=weight)
    if bias is not None:
        _check_bias(communicator, operation, bias, weight)
    if not _reads_peers(communicator, tensor):
        return _product(gathered_rows(communicator, tensor), weight, bias)
    out = _shape_of_gathered(tensor, weight, group, world_size, bias)
    with lent_to_peers(communicator, tensor, named(operation)) as lent:
        for rank in _own_first(communicator):
            _multiply(lent[rank], weight, bias, _rows_of(out, rank, tensor.size(-2)))
    return out


def _shape_of_gathered(
    tensor: Tensor, weight: Tensor, group: str, world_size: int, bias: Bias
) -> Tensor:
    shape = (*tensor.shape[:-2], tensor.size(-2) * world_size, weight.size(1))
    return tensor.new_empty(shape)


def _matmul_reduce_scatter(
    tensor: Tensor, weight: Tensor, group: str, world_size: int, bias: Bias
) -> Tensor:
    operation = "matmul_reduce_scatter"
    communicator = _find(operation, group, world_size, tensor=tensor, weight=weight)
    if bias is not None:
        _check_bias(communicator, operation, bias, weight)
    if tensor.size(-2) % world_size:
        communicator.engine.checks(named(operation)).fail(
            f"tensor: expected rows that world_size {world_size} divides, got {tensor.size(-2)} "
            f"of {tuple(tensor.shape)}; pad it"
        )
    out = _shape_of_scattered(tensor, weight, group, world_size, bias)
    shape = (world_size, *out.shape)
    if communicator.launches or out.nbytes * world_size < IN_HEAP_FROM_BYTES:
        products = out.new_empty(shape)
    else:
        products = empty(shape, dtype=out.dtype)
    if tensor.dim() == 2:
        _product_into(products.flatten(0, 1), tensor, weight, bias)
    # The rows of a batch are ordered by sequence, but reduce-scatter needs them by rank.
    elif out.size(-2) < ROWS_OF_A_PRODUCT:
        whole = _product(tensor, weight, bias)
        for rank, its in enumerate(products):
            its.copy_(_rows_of(whole, rank, out.size(-2)))
    else:
        for rank, its in enumerate(products):
            _multiply(_rows_of(tensor, rank, out.size(-2)), weight, bias, its)
    communicator.reduce_scatter_tensor(out, products)
    return out


def _shape_of_scattered(
    tensor: Tensor, weight: Tensor, group: str, world_size: int, bias: Bias
) -> Tensor:
    shape = (*tensor.shape[:-2], tensor.size(-2) // world_size, weight.size(1))
    return tensor.new_empty(shape)


def _weight_gradient(tensor: Tensor, grad: Tensor, group: str, world_size: int) -> Tensor:
    """Returns (rows of all ranks)^T @ ``grad``: tensor [n, k] and grad [W n, m] give [k, m]."""
    operation = "weight_gradient"
    communicator = _find(operation, group, world_size, tensor=tensor, grad=grad)
    # In 16-bit dtypes a sum of separately rounded products is less exact than one product.
    wide = tensor.dtype.itemsize >= 4
    if not (wide and _reads_peers(communicator, tensor)):
        gathered = gathered_rows(communicator, tensor).flatten(0, -2)
        return torch.mm(gathered.mH, grad.flatten(0, -2))
    out = _shape_of_weights(tensor, grad, group, world_size)
    with lent_to_peers(communicator, tensor, named(operation)) as lent:
        for rank in range(communicator.world_size):
            rows = lent[rank].flatten(0, -2)
            theirs = _rows_of(grad, rank, tensor.size(-2)).flatten(0, -2)
            torch.addmm(out, rows.mH, theirs, beta=1 if rank else 0, out=out)
    return out


def _shape_of_weights(tensor: Tensor, grad: Tensor, group: str, world_size: int) -> Tensor:
    return tensor.new_empty((tensor.size(-1), grad.size(-1)))


# ---- the operators --------------------------------------------------------------------------


def _remember(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.group = inputs[2:4]


def _gradients_of_gathered(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    tensor, weight = ctx.saved_tensors
    for_tensor, for_weight = ctx.needs_input_grad[:2]
    return (
        _ops.matmul_reduce_scatter(grad, weight.mH, *ctx.group, None) if for_tensor else None,
        _ops.weight_gradient(tensor, grad, *ctx.group) if for_weight else None,
        None,
        None,
        grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[4] else None,
    )


def _gradients_of_scattered(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    tensor, weight = ctx.saved_tensors
    for_tensor, for_weight = ctx.needs_input_grad[:2]
    return (
        _ops.all_gather_matmul(grad, weight.mH, *ctx.group, None) if for_tensor else None,
        _ops.weight_gradient(grad, tensor, *ctx.group).mH if for_weight else None,
        None,
        None,
        _sum_of_all_rows(grad, *ctx.group) if ctx.needs_input_grad[4] else None,
    )


def _sum_of_all_rows(tensor: Tensor, group: str, world_size: int) -> Tensor:
    """Returns the sum of all ranks' rows; a 16-bit sum is rounded once, at the end."""
    wide = torch.promote_types(tensor.dtype, torch.float32)
    sums = tensor.flatten(0, -2).sum(0, dtype=wide)
    total: Tensor = _ops.all_reduce(sums, "SUM", 1.0, group, world_size)
    return total.to(tensor.dtype)


def _gradients_of_weights(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    tensor, of_gathered = ctx.saved_tensors
    for_tensor, for_gathered = ctx.needs_input_grad[:2]
    return (
        _ops.matmul_reduce_scatter(of_gathered, grad.mH, *ctx.group, None) if for_tensor else None,
        _ops.all_gather_matmul(tensor, grad, *ctx.group, None) if for_gathered else None,
        None,
        None,
    )


# The operators are linear in each matrix. In a tangent, bias= belongs to the first term only.


def _tangent_of_product(name: str) -> Tangent:
    def tangent(inputs: Sequence[Any], results: Sequence[Any], tangents: Sequence[Any]) -> Tensor:
        tensor, weight, group, world_size, _ = inputs
        of_tensor, of_weight, _, _, of_bias = tangents
        operator = getattr(_ops, name)
        total: Tensor = operator(of_tensor, weight, group, world_size, of_bias)
        total = total + operator(tensor, of_weight, group, world_size, None)
        return total

    return tangent


def _tangent_of_weights(
    inputs: Sequence[Any], results: Sequence[Any], tangents: Sequence[Any]
) -> Tensor:
    tensor, of_gathered, *group = inputs
    total: Tensor = _ops.weight_gradient(tangents[0], of_gathered, *group)
    total = total + _ops.weight_gradient(tensor, tangents[1], *group)
    return total


_GROUP = "str group, int world_size"
register(
    "all_gather_matmul",
    f"(Tensor tensor, Tensor weight, {_GROUP}, Tensor? bias) -> Tensor",
    _all_gather_matmul,
    _shape_of_gathered,
    derivatives=Derivatives(
        _gradients_of_gathered, _tangent_of_product("all_gather_matmul"), _remember
    ),
)
register(
    "matmul_reduce_scatter",
    f"(Tensor tensor, Tensor weight, {_GROUP}, Tensor? bias) -> Tensor",
    _matmul_reduce_scatter,
    _shape_of_scattered,
    derivatives=Derivatives(
        _gradients_of_scattered, _tangent_of_product("matmul_reduce_scatter"), _remember
    ),
)
register(
    "weight_gradient",
    f"(Tensor tensor, Tensor grad, {_GROUP}) -> Tensor",
    _weight_gradient,
    _shape_of_weights,
    derivatives=Derivatives(_gradients_of_weights, _tangent_of_weights, _remember),
)
