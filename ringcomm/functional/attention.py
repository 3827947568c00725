# SPDX-License-Identifier: Apache-2.0
"""Attention over a sequence that the ranks of a group share: context parallelism.

Each of W ranks has n tokens of a sequence of W n: queries, keys and values [batch, heads, n, dim].
:func:`context_positions` returns their positions. Two functions compute the attention over the
whole sequence:

* :func:`ring_attention` takes W steps. In each step a rank's queries attend to the keys and values
  of one rank, while the previous rank sends it the next keys and values. Partial results are merged
  by their log-sum-exp, so a rank holds at most two ranks' keys and values. In forward a rank sends
  W - 1 blocks of keys and values; in backward it sends these again, and W blocks of FP32 gradients.
* :func:`ulysses_attention` uses two all-to-alls, which exchange tokens for heads: each rank
  computes some heads of the whole sequence. A rank sends (W - 1) / W of its queries, keys, values
  and results. W must divide the number of heads.

With a causal mask the ranks with the last tokens have the most work. In the order "zigzag" a rank
has a chunk of the first half of the sequence and the mirrored chunk of the second half, so that all
ranks have equal work.

Sources: Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite
Context" (2023, arXiv:2310.01889); merging: Milakov, Gimelshein, "Online normalizer calculation for
softmax" (2018); zigzag: Brandon et al., "Striped Attention" (2023, arXiv:2311.09431) describes the
problem, with a different order; Jacobs et al., "DeepSpeed Ulysses" (2023, arXiv:2309.14509).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ringcomm.comm.agreement import first_other, unequal
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.functions import Group, P2POp, batch_isend_irecv, irecv, isend
from ringcomm.errors import ArgumentError, UnsupportedError, where
from ringcomm.functional.collectives import (
    Derivatives,
    GroupSpec,
    all_to_all,
    enter,
    find,
    group_spec_of,
    named,
    no_forward_mode,
    register,
)
from ringcomm.integers import integer
from ringcomm.json_reader import shown

Tensor = torch.Tensor

# Tags of the ring's messages, which a user's program is unlikely to use.
_KEYS_TAG, _GRADS_TAG = 0x52494E47, 0x52494E48


def context_positions(length: int, group: Group = None, *, zigzag: bool = False) -> Tensor:
    """Returns the positions of this rank's tokens in the sequence, for slicing and embeddings.

    Args:
        length: number of tokens in the sequence; a multiple of the world size, or with ``zigzag``
            of twice the world size.
        group: a Communicator, process group of the backend or mesh; None means the default group.
        zigzag: True if rank r has chunks r and 2 W - 1 - r of 2 W, instead of chunk r of W.

    Returns:
        int64 [length / W] on the CPU.

    Raises:
        ArgumentError: the ranks cannot divide the length.
    """
    spec = group_spec_of(group, named("context_positions"))
    _, rank, world_size = spec
    chunks = world_size * (2 if zigzag else 1)
    number = integer(length)
    if number is None or number < 1 or number % chunks:
        raise ArgumentError(
            f"{_head('context_positions', spec)}: length: expected a positive multiple of {chunks}"
            f"{' (twice the world size, for zigzag)' if zigzag else ''} below 2^63, got "
            f"{shown(length)}; pad it"
        )
    return _positions(number, world_size, rank, zigzag)


def _positions(length: int, world_size: int, rank: int, zigzag: bool) -> Tensor:
    whole = torch.arange(length, device="cpu")
    if not zigzag:
        return whole.chunk(world_size)[rank]
    chunks = whole.chunk(2 * world_size)
    return torch.cat([chunks[rank], chunks[2 * world_size - 1 - rank]])


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: Group = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    zigzag: bool = False,
) -> Tensor:
    """Returns the attention of this rank's queries to the keys and values of all ranks.

    Computes ``torch.nn.functional.scaled_dot_product_attention`` over the whole sequence. Each rank
    passes its own tokens, and gets their results. Partial results are merged in FP32, in an order
    that depends only on the rank. Gradients flow to all ranks, so all must take part in backward.

    Args:
        query: [batch, heads, n, dim]; n tokens on every rank.
        key: [batch, key heads, n, dim]; the number of key heads divides the number of heads.
        value: as ``key``.
        group: a Communicator, process group of the backend or mesh; None means the default group.
        is_causal: True if a token attends only to itself and to earlier tokens in the sequence.
        scale: factor of the scores; None is 1 / sqrt(dim).
        zigzag: the tokens are in the order of :func:`context_positions` with ``zigzag``, which
            gives all ranks equal work with a causal mask.

    Raises:
        ArgumentError: a tensor has another shape, dtype or device.
        MismatchError: the ranks' shapes or, on the host, options differ.
        UnsupportedError: on a GPU, the dtype is not bfloat16 or float16; or backward would have to
            compute gradients of gradients.
        RingcommError: a fault; see ``ringcomm.errors``.
    """
    _checked("ring_attention", group, query, key, value, zigzag, scale)
    key_of_group, world_size = enter("ring_attention", query, group)
    form = (is_causal, zigzag, scale, key_of_group, world_size)
    result: Tensor = torch.ops.ringcomm.ring_attention(query, key, value, *form)[0]
    return result


def ulysses_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: Group = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    zigzag: bool = False,
) -> Tensor:
    """Computes the attention of :func:`ring_attention` by two all-to-alls of tokens and heads.

    Args:
        query: [batch, heads, n, dim]; n tokens per rank; the world size must divide heads.
        key: [batch, key heads, n, dim]; the number of key heads divides the number of heads. If
            there are fewer key heads than ranks, their number must divide the world size.
        value: as ``key``.
        group: a Communicator, process group of the backend or mesh; None means the default group.
        is_causal: see :func:`ring_attention`.
        scale: see :func:`ring_attention`.
        zigzag: see :func:`ring_attention`; here it changes only the order of the tokens.

    Raises:
        ArgumentError: a tensor has another shape, dtype or device.
        MismatchError: on the host, if the ranks' options differ.
        RingcommError: a fault; see ``ringcomm.errors``.
    """
    spec = _checked("ulysses_attention", group, query, key, value, zigzag, scale)
    key_of_group, world_size = enter("ulysses_attention", query, group)
    form = (is_causal, zigzag, scale, key_of_group, world_size)
    torch.ops.ringcomm.same_options(query.detach(), *form)
    key, value = (_for_all_ranks(world_size, each) for each in (key, value))
    if query.size(1) % world_size or key.size(1) % world_size:
        raise ArgumentError(
            f"{_head('ulysses_attention', spec)}: expected multiples of {world_size} heads and key "
            f"heads, got {query.size(1)} and {key.size(1)}; use ring_attention"
        )
    tokens = query.size(2)
    heads = [each.size(1) // world_size for each in (query, key, value)]
    together = torch.cat([_by_rank(each, world_size) for each in (query, key, value)], 2)
    exchanged = _tokens_for_heads(together, group)
    order = _order(world_size, tokens).to(query.device) if zigzag else None
    if order is not None:
        exchanged = exchanged.index_select(2, order.argsort())
    query, key, value = torch.split(exchanged, heads, 1)
    gqa = False
    if heads[0] != heads[1]:  # under torch.compile the comparison may be a symbol, not a bool
        gqa = True
    result = F.scaled_dot_product_attention(
        query, key, value, is_causal=is_causal, scale=scale, enable_gqa=gqa
    )
    if order is not None:
        result = result.index_select(2, order)
    return _heads_for_tokens(result, world_size, group)


def _order(world_size: int, tokens: int) -> Tensor:
    """Returns the positions of all ranks' tokens in zigzag order, one rank after the other."""
    length = world_size * tokens
    return torch.cat([_positions(length, world_size, rank, True) for rank in range(world_size)])


def _for_all_ranks(world_size: int, tensor: Tensor) -> Tensor:
    """Copies key or value heads so that each rank gets one, if their number divides W."""
    heads = tensor.size(1)
    if heads >= world_size or world_size % heads:
        return tensor
    return tensor.repeat_interleave(world_size // heads, 1)


def _divided(tensor: Tensor, dim: int, first: int) -> Tensor:
    """Returns a view with dimension ``dim`` split in two: size ``first``, then the quotient."""
    return tensor.reshape(*tensor.shape[:dim], first, -1, *tensor.shape[dim + 1 :])


def _by_rank(tensor: Tensor, world_size: int) -> Tensor:
    """Returns [batch, heads, n, dim] as [W, batch, heads / W, n, dim]."""
    return _divided(tensor, 1, world_size).movedim(1, 0)


def _tokens_for_heads(by_rank: Tensor, group: Group) -> Tensor:
    """Turns [W, batch, heads / W, n, dim] into [batch, heads / W, W n, dim] by an all-to-all."""
    came = _divided(all_to_all(by_rank.flatten(0, 1), group=group), 0, by_rank.size(0))
    return came.permute(1, 2, 0, 3, 4).flatten(2, 3)


def _heads_for_tokens(tensor: Tensor, world_size: int, group: Group) -> Tensor:
    """Turns [batch, heads / W, W n, dim] into [batch, heads, n, dim] by an all-to-all."""
    by_rank = _divided(tensor, 2, world_size).movedim(2, 0)
    came = _divided(all_to_all(by_rank.flatten(0, 1), group=group), 0, world_size)
    return came.movedim(0, 1).flatten(1, 2)


def _head(function: str, spec: GroupSpec) -> str:
    _, rank, world_size = spec
    return where(named(function), rank, world_size)


def _checked(
    function: str,
    group: Group,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    zigzag: bool,
    scale: float | None,
) -> GroupSpec:
    """Checks the arguments of a call, and returns the group's spec; traceable."""
    spec = group_spec_of(group, named(function))
    head = _head(function, spec)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor) or tensor.dim() != 4 or not tensor.numel():
            got = tuple(tensor.shape) if isinstance(tensor, Tensor) else tensor
            raise ArgumentError(
                f"{head}: {name}: expected a tensor [batch, heads, tokens, dim], got {got!r:.80}"
            )
        if not tensor.is_floating_point():
            raise ArgumentError(f"{head}: {name}: expected floating point, not {tensor.dtype}")
        if tensor.dtype != query.dtype or tensor.device != query.device:
            raise ArgumentError(
                f"{head}: {name}: expected {query.dtype} on {query.device} as the query, got "
                f"{tensor.dtype} on {tensor.device}"
            )
    batch, heads, tokens, dim = query.shape
    if key.shape != value.shape or key.shape != (batch, key.size(1), tokens, dim):
        raise ArgumentError(
            f"{head}: expected keys and values [{batch}, key heads, {tokens}, {dim}] for a query "
            f"{list(query.shape)}, got {list(key.shape)} and {list(value.shape)}"
        )
    if heads % key.size(1):
        raise ArgumentError(
            f"{head}: expected key heads that divide the {heads} heads, got {key.size(1)}"
        )
    if zigzag and query.size(2) % 2:
        raise ArgumentError(
            f"{head}: expected an even number of tokens with zigzag, got {query.size(2)}"
        )
    if scale is not None and not isinstance(scale, (int, float)):
        raise ArgumentError(f"{head}: scale: expected a number or None, got {scale!r:.80}")
    return spec


class _AttentionForm(NamedTuple):
    """The group and the options of one attention call; forward and backward use both."""

    comm: Communicator
    is_causal: bool
    zigzag: bool
    scale: float | None


def _form_of(
    is_causal: bool, zigzag: bool, scale: float | None, group: str, world_size: int
) -> _AttentionForm:
    return _AttentionForm(
        find(group, world_size, named("ring_attention")), is_causal, zigzag, scale
    )


def _check_same(form: _AttentionForm, function: str) -> None:
    """Compares the options of all ranks; collective on the host.

    With different options but equal shapes, the ranks would compute wrong results. On a device the
    options are not compared, since the host would have to wait for the device.

    Raises:
        MismatchError: on all ranks, if the options differ.
    """
    comm = form.comm
    if comm.world_size == 1 or comm.launches:
        return
    scale = math.nan if form.scale is None else form.scale
    mine = torch.tensor([form.is_causal, form.zigzag, scale], dtype=torch.float64, device="cpu")
    everyone = torch.empty(comm.world_size, 3, dtype=torch.float64, device="cpu")
    comm.all_gather_into_tensor(everyone, mine)
    rows = [
        (bool(is_causal), bool(zigzag), None if math.isnan(scale) else scale)
        for is_causal, zigzag, scale in everyone.tolist()
    ]
    if other := first_other(rows):
        raise unequal(
            where(named(function), comm.rank, comm.world_size),
            ("option is_causal", "option zigzag", "option scale"),
            rows,
            other,
            "Give all ranks the same options",
        )


class _TokenRange(NamedTuple):
    """The ranges of this rank's queries and of another rank's keys to which the queries attend."""

    queries: slice
    keys: slice
    is_causal: bool


def _range_of(form: _AttentionForm, owner: int, tokens: int) -> _TokenRange | None:
    """Returns which keys of rank ``owner`` this rank's queries attend to; None for no keys.

    In zigzag order rank r has chunks r and 2 W - 1 - r. The first chunk of a lower rank is earlier
    than both chunks of this rank, so all queries attend to it; its second chunk is later than both,
    so no queries do. Both chunks of a higher rank are between the two chunks of this rank, so only
    queries of this rank's second chunk attend to them.
    """
    everything = slice(0, tokens)
    rank, half = form.comm.rank, tokens // 2
    if not form.is_causal or owner == rank:
        return _TokenRange(everything, everything, form.is_causal)
    if not form.zigzag:
        return _TokenRange(everything, everything, False) if owner < rank else None
    if owner < rank:
        return _TokenRange(everything, slice(0, half), False)
    return _TokenRange(slice(half, tokens), everything, False)


def _passed_on(comm: Communicator, tensor: Tensor, tag: int) -> Callable[[], Tensor]:
    """Starts a send to the next rank; the returned function receives the previous rank's tensor."""
    came = torch.empty_like(tensor)
    after, before = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    works = batch_isend_irecv(
        [
            P2POp(isend, tensor, group=comm, tag=tag, group_peer=after),
            P2POp(irecv, came, group=comm, tag=tag, group_peer=before),
        ]
    )

    def end() -> Tensor:
        for work in works:
            work.wait()
        return came

    return end


# The operators: ring_attention also returns the log-sum-exp, for its gradient.


def _ring_attention(query: Tensor, key: Tensor, value: Tensor, *form: Any) -> tuple[Tensor, Tensor]:
    asked = _form_of(*form)
    _check_same(asked, "ring_attention")
    comm, tokens = asked.comm, query.size(2)
    keys = torch.stack((key, value))
    merged: tuple[Tensor, Tensor] | None = None
    for step in range(comm.world_size):
        last = step == comm.world_size - 1
        coming = None if last else _passed_on(comm, keys, _KEYS_TAG)
        span = _range_of(asked, (comm.rank - step) % comm.world_size, tokens)
        if span is not None:
            seen = keys[:, :, :, span.keys]
            found = _attend(query[:, :, span.queries], seen, span.is_causal, asked.scale)
            merged = _merge(merged, found, span.queries)
        if coming is not None:
            keys = coming()
    assert merged is not None
    return merged[0].to(query.dtype).contiguous(), merged[1].contiguous()


def _ring_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    result: Tensor,
    logs: Tensor,
    *form: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    asked = _form_of(*form)
    comm, tokens = asked.comm, query.size(2)
    keys = torch.stack((key, value))
    query_grad = torch.zeros_like(query, dtype=logs.dtype, memory_format=torch.contiguous_format)
    keys_grad = torch.zeros_like(keys, dtype=logs.dtype, memory_format=torch.contiguous_format)
    returning: Callable[[], Tensor] | None = None
    for step in range(comm.world_size):
        last = step == comm.world_size - 1
        coming = None if last else _passed_on(comm, keys, _KEYS_TAG)
        span = _range_of(asked, (comm.rank - step) % comm.world_size, tokens)
        found = None
        if span is not None:
            at = span.queries
            attended = _Attended(query[:, :, at], result[:, :, at], logs[:, :, at])
            seen = keys[:, :, :, span.keys]
            found = _attend_backward(grad[:, :, at], attended, seen, span.is_causal, asked.scale)
        if returning is not None:
            keys_grad = returning()
        if span is not None and found is not None:
            query_grad[:, :, span.queries] += found[0]
            keys_grad[:, :, :, span.keys] += found[1]
        if comm.world_size > 1:
            returning = _passed_on(comm, keys_grad, _GRADS_TAG)
        if coming is not None:
            keys = coming()
    if returning is not None:
        keys_grad = returning()
    # Copies, since an operator's results must not share memory.
    key_grad, value_grad = (each.to(key.dtype, copy=True) for each in keys_grad)
    return query_grad.to(query.dtype), key_grad, value_grad


def _shapes(query: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(query.dtype, torch.float32)
    return query.new_empty(query.shape), query.new_empty(query.shape[:3], dtype=wide)


def _shapes_of_gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _remember(ctx: Any, inputs: Sequence[Any], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.form = inputs[3:]
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    found = torch.ops.ringcomm.ring_attention_backward(grad, *ctx.saved_tensors, *ctx.form)
    return (*found, *[None] * len(ctx.form))


def _refuse_second_gradients(ctx: Any, *_: Any) -> tuple[Any, ...]:
    raise UnsupportedError(
        "functional.ring_attention: expected to be differentiated once, got a gradient of its "
        "gradient; ulysses_attention supports it where torch's attention does"
    )


def _refuse_tangents(inputs: Sequence[Any], has_tangent: bool) -> None:
    """Refuses tangents: the ring calls torch's flash attention, which has no forward mode."""
    if has_tangent:
        raise no_forward_mode(
            named("ring_attention"),
            "use ulysses_attention under torch.nn.attention.sdpa_kernel(SDPBackend.MATH), or "
            "reverse mode (backward, torch.func.grad, vjp, jacrev)",
        )


_FORM = "bool is_causal, bool zigzag, float? scale, str group, int world_size"
register(
    "ring_attention",
    f"(Tensor query, Tensor key, Tensor value, {_FORM}) -> (Tensor, Tensor)",
    _ring_attention,
    _shapes,
    derivatives=Derivatives(_gradients, None, _remember, _refuse_tangents),
)
register(
    "ring_attention_backward",
    "(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor result, Tensor logs, "
    f"{_FORM}) -> (Tensor, Tensor, Tensor)",
    _ring_attention_backward,
    _shapes_of_gradients,
    derivatives=Derivatives(
        _refuse_second_gradients, None, lambda ctx, inputs, output: None, _refuse_tangents
    ),
)


# The all-to-alls that ulysses_attention calls do not receive the options of ulysses_attention. A
# separate operator checks that all ranks have passed the same options.


def _same_options(query: Tensor, *form: Any) -> Tensor:
    _check_same(_form_of(*form), "ulysses_attention")
    return query.new_empty(0)


register(
    "same_options",
    f"(Tensor query, {_FORM}) -> Tensor",
    _same_options,
    lambda query, *_: query.new_empty(0),
    derivatives=None,
)


def _merge(
    merged: tuple[Tensor, Tensor] | None, found: tuple[Tensor, Tensor], queries: slice
) -> tuple[Tensor, Tensor]:
    """Merges a partial result into the earlier results, weighted by the sums of exponentials.

    Args:
        merged: result [batch, heads, n, dim] and log-sum-exp [batch, heads, n] so far.
        found: a partial result and its log-sum-exp, for the queries in the range ``queries``.
        queries: the range of the queries that ``found`` covers.
    """
    partial, partial_logs = found
    if merged is None:
        return partial.to(partial_logs.dtype), partial_logs
    result, logs = merged
    before = logs[:, :, queries]
    both = torch.logaddexp(before, partial_logs)
    kept = result[:, :, queries] * (before - both).exp().unsqueeze(-1)
    result[:, :, queries] = kept + partial * (partial_logs - both).exp().unsqueeze(-1)
    logs[:, :, queries] = both
    return result, logs


# The attention of one rank's queries to one rank's keys uses the kernels of torch's
# scaled_dot_product_attention, which also return the log-sum-exp. In backward the kernels get the
# result and the log-sum-exp over the whole sequence, so the gradients that they compute for one
# rank's keys are exactly the terms of these keys in the whole gradient.

_aten: Any = torch.ops.aten


def _per_head(keys: Tensor, heads: int) -> Tensor:
    """Repeats the key heads of keys and values [2, batch, key heads, n, dim] to ``heads`` heads."""
    return keys.repeat_interleave(heads // keys.size(2), 2)


def _attend(
    query: Tensor, keys: Tensor, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Returns the attention in the query's dtype, and its log-sum-exp in FP32 or FP64."""
    key, value = _per_head(keys, query.size(1))
    if query.is_cpu:
        result, logs = _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, scale=scale
        )
    else:
        _check_device(query)
        result, logs, *_ = _aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, is_causal, False, scale=scale
        )
    return result, logs


def _check_device(query: Tensor) -> None:
    if query.dtype not in (torch.bfloat16, torch.float16):
        raise UnsupportedError(
            f"functional.ring_attention: expected bfloat16 or float16, for which torch has flash "
            f"attention on {query.device}, got {query.dtype}"
        )


class _Attended(NamedTuple):
    """Queries, with their result and log-sum-exp over the whole sequence."""

    query: Tensor
    result: Tensor
    logs: Tensor


def _attend_backward(
    grad: Tensor, attended: _Attended, keys: Tensor, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Returns the gradient of the query, and the gradients of ``keys``, shaped like ``keys``."""
    query, result, logs = attended
    key, value = _per_head(keys, query.size(1))
    whole = (grad.contiguous(), query, key, value, result, logs.contiguous())
    if query.is_cpu:
        found = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *whole, 0.0, is_causal, scale=scale
        )
    else:
        tokens, seen = query.size(2), key.size(2)
        # Without dropout the kernels do not read the random state.
        shapes: list[tuple[int, ...]] = [(2,), ()]
        seeds = [torch.zeros(each, dtype=torch.uint64, device=query.device) for each in shapes]
        found = _aten._scaled_dot_product_flash_attention_backward(
            *whole, None, None, tokens, seen, 0.0, is_causal, *seeds, scale=scale
        )
    query_grad, key_grad, value_grad = found
    keys_grad = torch.stack((key_grad, value_grad)).to(logs.dtype)
    return query_grad, _divided(keys_grad, 2, keys.size(2)).sum(3)
