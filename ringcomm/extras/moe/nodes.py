# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine over several nodes; ranks map only the memory of their own node.

NOTE [A token crosses once]
A rank sends each token once to every other node that has experts of the token: to its *proxy*, the
rank there with the sender's local rank. The proxy keeps arriving tokens in its outbox, where its
local peers read them like tokens of their own node. So a token of H bytes whose k experts are on n
other nodes costs n H bytes on the network, and not k H.

In combine a token's rows are summed in the order of k, in FP32, on the token's rank. So each row of
an expert on another node is sent separately. If each node summed its rows of a token and sent one
row, the bits would depend on which ranks share a node. The weights' gradients, one number per row,
are sent like rows.

The bits are the same as on one node, however the ranks are divided over nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ringcomm import _native
from ringcomm.comm.communicator import Communicator
from ringcomm.extras.moe.rows import (
    DISPATCH,
    ENTRY_WORDS,
    WORD_BYTES,
    Outboxes,
    Routes,
    RowsHeader,
    check_routes,
    exchange,
    outboxes_of,
    prepared,
    reading,
    rows_by_rank,
    tables_bytes,
    write_tables,
)

Tensor = torch.Tensor
# Addresses to read from, and the tensors at the addresses, which must live until they are read.
Lent = tuple[list[int], list[Tensor]]


def _gathered(comm: Communicator, own: Tensor) -> Tensor:
    """Returns all ranks' numbers: [world size, numbers]; collective."""
    everyone = own.new_empty((comm.world_size, own.numel()))
    comm.all_gather_into_tensor(everyone.view(-1), own.contiguous())
    return everyone


def _nodes_of_ranks(comm: Communicator) -> Tensor:
    """Returns the node of each rank; the last entry, for rank -1, is the number of nodes."""
    nodes = [comm.node_layout.node_of(rank) for rank in range(comm.world_size)]
    return torch.tensor([*nodes, comm.num_nodes], dtype=torch.int64, device="cpu")


def _proxy(comm: Communicator, rank: int, node: int) -> int:
    """Returns the proxy on ``node`` to which ``rank`` sends tokens."""
    ranks = comm.node_layout.nodes[node]
    return ranks[comm.node_layout.local_rank_of(rank) % len(ranks)]


def _needed(comm: Communicator, expert_rows: Tensor) -> Tensor:
    """Returns which other nodes need which tokens: bool [tokens, nodes]."""
    node_of = _nodes_of_ranks(comm)[expert_rows[..., 0]]
    needed = torch.zeros(len(expert_rows), comm.num_nodes + 1, dtype=torch.bool, device="cpu")
    needed.scatter_(1, node_of, True)
    needed[:, comm.node_layout.node] = False
    return needed[:, : comm.num_nodes]


def _local_ptrs(comm: Communicator, outboxes: Outboxes, tensors: Sequence[Tensor]) -> list[Lent]:
    """Returns, for each tensor, its address in each local rank's outbox; collective."""
    offsets = [outboxes.offset_of(tensor) for tensor in tensors]
    everyone = _gathered(comm.node, torch.tensor(offsets, dtype=torch.int64, device="cpu"))
    return [
        (outboxes.at(column.tolist()), [tensor])
        for column, tensor in zip(everyone.t(), tensors, strict=True)
    ]


def share_tokens(
    comm: Communicator,
    outboxes: Outboxes,
    expert_rows: Tensor,
    row_bytes: int,
    write: Callable[[Tensor], None],
) -> Lent:
    """Publishes a row for each token, on its node and on nodes that need it; collective.

    Args:
        comm: the ranks.
        outboxes: outboxes of the communicator.
        expert_rows: int64 [tokens, k, 2].
        row_bytes: bytes of a token's row.
        write: writes the rows to bytes [tokens * row_bytes].

    Returns:
        For each rank, the address at which its rows begin on this node: all its rows if the rank is
        on this node, else only the rows that this node needs, in the order of tokens.
    """
    layout, rank, node = comm.node_layout, comm.rank, comm.node_layout.node
    needed = _needed(comm, expert_rows)
    counts = _gathered(comm, needed.sum(0)).tolist()
    arriving = [
        counts[source][node]
        if layout.node_of(source) != node and _proxy(comm, source, node) == rank
        else 0
        for source in range(comm.world_size)
    ]
    own, arrived = outboxes.take(len(expert_rows) * row_bytes, sum(arriving) * row_bytes)
    write(own)
    leaving = [0] * comm.world_size
    sent = []
    for to, other in sorted((_proxy(comm, rank, other), other) for other in layout.others()):
        leaving[to] = counts[rank][other]
        sent.append(needed[:, other].nonzero().view(-1))
    leaves = own.view(-1, row_bytes).index_select(0, torch.cat(sent))
    comm.all_to_all_single(arrived.view(-1, row_bytes), leaves, arriving, leaving)
    (own_ptrs, kept), (arrived_ptrs, also) = _local_ptrs(comm, outboxes, [own, arrived])
    before = [0] * len(arrived_ptrs)
    ptrs = []
    for source in range(comm.world_size):
        if layout.node_of(source) == node:
            ptrs.append(own_ptrs[layout.local_rank_of(source)])
            continue
        proxy = layout.local_rank_of(_proxy(comm, source, node))
        ptrs.append(arrived_ptrs[proxy] + before[proxy] * row_bytes)
        before[proxy] += counts[source][node]
    return ptrs, [*kept, *also]


# ---- dispatch ---------------------------------------------------------------------------------


def dispatch(comm: Communicator, operation: str, routes: Routes) -> tuple[Tensor, ...]:
    """Dispatches tokens over several nodes, as ``_dispatch`` in ``dispatch.py`` does on one."""
    outboxes, experts = outboxes_of(comm), routes.experts

    def sort() -> Tensor:
        checks = comm.engine.checks(operation)
        check_routes(checks, routes)
        tables = torch.empty(tables_bytes(routes), dtype=torch.uint8, device="cpu")
        write_tables(checks, routes, tables)
        return tables

    tables, refusal = prepared(sort)
    mine = RowsHeader(DISPATCH, refused=1) if tables is None else routes.header()
    headers = exchange(comm, operation, mine, refusal)
    assert tables is not None
    outboxes.calls += 1
    assignments = routes.topk_idx.numel()
    words = tables[: (experts + assignments) * WORD_BYTES].view(torch.int64)
    everyone = _gathered(comm, words[:experts])
    counts_ptrs = [row.data_ptr() for row in everyone]
    count = rows_by_rank(comm, headers, counts_ptrs)
    with reading(comm, operation, headers):
        order = words[experts : experts + int(words[:experts].sum())]
        shape = (*routes.topk_idx.shape, ENTRY_WORDS)
        expert_rows = torch.empty(shape, dtype=torch.int64, device="cpu")
        order_ptrs = [words[experts:].data_ptr()] * comm.world_size
        _native.find_expert_rows(
            order_ptrs, counts_ptrs, comm.rank, experts, assignments, expert_rows.data_ptr()
        )
        sources, row_weights = _exchange_entries(comm, routes, order, everyone, expert_rows)
        ptrs, _kept = share_tokens(
            comm, outboxes, expert_rows, routes.payload_bytes, routes.write_payload
        )
        rows = routes.read_rows(comm, sources, ptrs)
    here = experts // comm.world_size
    counts = everyone[:, comm.rank * here : (comm.rank + 1) * here].sum(0)
    stamp = torch.tensor([outboxes.calls, count], dtype=torch.int64, device="cpu")
    return rows, counts, expert_rows, sources, row_weights, stamp


def _exchange_entries(
    comm: Communicator, routes: Routes, order: Tensor, counts: Tensor, expert_rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Sends each row's source to its expert's rank; returns the sources and weights received.

    Args:
        comm: the ranks.
        routes: the arguments.
        order: this rank's assignments, by expert.
        counts: [world size, experts], all ranks' rows by expert.
        expert_rows: int64 [tokens, k, 2].
    """
    world_size, k = comm.world_size, routes.topk_idx.size(1)
    here = routes.experts // world_size
    to = expert_rows.view(-1, ENTRY_WORDS)[order, 0]
    needed = _needed(comm, expert_rows)
    slots = needed.cumsum(0) - 1
    slots[:, comm.node_layout.node] = torch.arange(len(expert_rows), device="cpu")
    token = order // k
    slot = slots[token, _nodes_of_ranks(comm)[to]]
    bits = torch.zeros_like(order)
    if routes.topk_weights is not None:
        wide = routes.topk_weights.detach().float().reshape(-1)[order]
        bits = wide.view(torch.int32).long()
    leaving = counts[comm.rank].view(world_size, here).sum(1)
    of_here = counts.view(world_size, world_size, here)[:, comm.rank]
    total = int(of_here.sum())
    got = torch.empty(total, 3, dtype=torch.int64, device="cpu")
    comm.all_to_all_single(
        got, torch.stack([slot, order, bits], 1), of_here.sum(1).tolist(), leaving.tolist()
    )
    # Entries arrive by rank and then expert, but rows are ordered by expert and then rank.
    by_source = got.split(of_here.reshape(-1).tolist())  # type: ignore[no-untyped-call]
    got = torch.cat([by_source[rank * here + e] for e in range(here) for rank in range(world_size)])
    ranks = torch.arange(world_size, device="cpu").repeat(here)
    ranks = ranks.repeat_interleave(of_here.t().reshape(-1))
    room = total if routes.limit < 0 else routes.limit
    sources = torch.full((room, _native.SOURCE_WORDS), -1, dtype=torch.int64, device="cpu")
    sources[:total] = torch.stack([ranks, got[:, 0], ranks, got[:, 1]], 1)
    weighted = routes.topk_weights is not None
    row_weights = torch.zeros(room if weighted else 0, dtype=torch.float32, device="cpu")
    if weighted:
        row_weights[:total] = got[:, 2].int().view(torch.float32)
    return sources, row_weights


# ---- combine ----------------------------------------------------------------------------------


def _by_rank_and_row(expert_rows: Tensor) -> Tensor:
    """Returns the assignments that have a row, ordered by the row's rank and number."""
    ranks, rows = expert_rows.view(-1, ENTRY_WORDS).unbind(1)
    order = rows.argsort(stable=True)
    order = order[ranks[order].argsort(stable=True)]
    return order[ranks[order] >= 0]


def _send_back(
    comm: Communicator, rows: Tensor, sources: Tensor, expert_rows: Tensor, local: bool
) -> tuple[Tensor, Tensor]:
    """Sends rows to the ranks of their tokens; returns received rows and their assignments.

    Args:
        comm: the ranks.
        rows: [n, ...], the rows of this rank's experts.
        sources: int64 [n, 4].
        expert_rows: int64 [tokens, k, 2].
        local: True to send also to ranks of this node, including this rank.
    """
    node_of, node, world_size = _nodes_of_ranks(comm), comm.node_layout.node, comm.world_size
    to = sources[:, 0]
    order = to.argsort(stable=True)
    arriving = _by_rank_and_row(expert_rows)
    source_of = expert_rows.view(-1, ENTRY_WORDS)[arriving, 0]
    if not local:
        order = order[node_of[to[order]] != node]
        far = node_of[source_of] != node
        arriving, source_of = arriving[far], source_of[far]
    got = rows.new_empty((len(arriving), rows.size(1)))
    comm.all_to_all_single(
        got,
        rows.index_select(0, order),
        source_of.bincount(minlength=world_size).tolist(),
        to[order].bincount(minlength=world_size).tolist(),
    )
    return got, arriving


def fetch_rows(
    comm: Communicator, outboxes: Outboxes, y: Tensor, sources: Tensor, expert_rows: Tensor
) -> tuple[Tensor, Lent]:
    """Makes experts' rows readable for the ranks of the rows' tokens; collective.

    Args:
        comm: the ranks.
        outboxes: outboxes of the communicator.
        y: [n, hidden], the rows of this rank's experts.
        sources: int64 [n, 4].
        expert_rows: int64 [tokens, k, 2].

    Returns:
        A table like ``expert_rows``, and for each rank the address of its row number 0.
    """
    got, arriving = _send_back(comm, y, sources, expert_rows, local=False)
    [own] = outboxes.take(y.numel() * y.element_size())
    own.view(y.dtype).view(y.shape).copy_(y)
    [(own_ptrs, kept)] = _local_ptrs(comm, outboxes, [own])
    table = expert_rows.clone()
    table.view(-1, ENTRY_WORDS)[arriving, 1] = torch.arange(len(arriving), device="cpu")
    ptrs = [
        own_ptrs[comm.node_layout.local_rank_of(rank)]
        if comm.node_layout.node_of(rank) == comm.node_layout.node
        else got.data_ptr()
        for rank in range(comm.world_size)
    ]
    return table, (ptrs, [*kept, got])


def send_numbers(
    comm: Communicator, numbers: Tensor, sources: Tensor, expert_rows: Tensor
) -> Tensor:
    """Sends one number per row to its token's rank; returns float32 [tokens, k]; collective."""
    got, arriving = _send_back(comm, numbers, sources, expert_rows, local=True)
    found = torch.zeros(expert_rows.shape[:2], dtype=torch.float32, device="cpu")
    found.view(-1)[arriving] = got.view(-1)
    return found
