# SPDX-License-Identifier: Apache-2.0
"""Every call of torch.distributed, compared with Gloo or with the expected result."""

import datetime

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _make_nccl_premul_sum
from torch.distributed import ReduceOp, distributed_c10d

from ringcomm.errors import ArgumentError, MismatchError, UnsupportedError
from tests.support.rank_pool import default_group

SIZES = (1, 7, 1000, 70001)
INTEGERS = (torch.uint8, torch.int8, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def total(world_size: int, count: int) -> torch.Tensor:
    """Returns the sum of :func:`numbers` over all ranks."""
    return torch.stack([numbers(rank, count) for rank in range(world_size)]).sum(0)


def numbers(rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns small integers, so that every order of summing gives the same bits."""
    return ((torch.arange(count) * 7 + rank * 3) % 5).to(dtype)


def all_reduce(rank, world_size):
    results = []
    ops = (ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)
    for number, dtype in enumerate(INTEGERS + FLOATS):
        for turn, size in enumerate(SIZES):
            tensor = numbers(rank, size, dtype)
            dist.all_reduce(tensor, ops[(number + turn) % 4])
            results.append(tensor)
    for op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR):
        tensor = numbers(rank, 100, torch.int64)
        dist.all_reduce(tensor, op)
        results.append(tensor)
    cplx = torch.complex(numbers(rank, 9), numbers(rank + 1, 9))
    dist.all_reduce(cplx)
    return [*results, cplx]


def rooted(rank, world_size):
    results: list[object] = []
    for root in range(world_size):
        tensor = numbers(rank, 1001)
        dist.broadcast(tensor, root)
        results.append(tensor)
        tensor = numbers(rank, 1001)
        dist.reduce(tensor, root)
        results.append(tensor if rank == root else None)
        gathered = [torch.empty(5) for _ in range(world_size)] if rank == root else None
        dist.gather(numbers(rank, 5), gathered, root)
        results.append(gathered)
        parts = [numbers(peer, 6) for peer in range(world_size)] if rank == root else None
        out = torch.empty(6)
        dist.scatter(out, parts, root)
        results.append(out)
    return results


def gathers_and_scatters(rank, world_size):
    results = []
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        mine = numbers(rank, 12, dtype).view(3, 4)
        into = torch.empty(world_size * 3, 4, dtype=dtype)
        dist.all_gather_into_tensor(into, mine)
        listed = [torch.empty(3, 4, dtype=dtype) for _ in range(world_size)]
        dist.all_gather(listed, mine)
        results += [into, *listed]
    shard = torch.empty(5)
    dist.reduce_scatter_tensor(shard, numbers(rank, 5 * world_size))
    listed_shard = torch.empty(5)
    dist.reduce_scatter(listed_shard, [numbers(rank + peer, 5) for peer in range(world_size)])
    return [*results, shard, listed_shard]


def exchanges(rank, world_size):
    received = torch.empty(world_size * 3, 2)
    dist.all_to_all_single(received, numbers(rank, world_size * 6).view(-1, 2))
    sends = [1 + (rank + peer) % 3 for peer in range(world_size)]
    takes = [1 + (rank + peer) % 3 for peer in range(world_size)]
    uneven = torch.empty(sum(takes), 2)
    dist.all_to_all_single(uneven, numbers(rank, sum(sends) * 2).view(-1, 2), takes, sends)
    return received, uneven


def lists_of_uneven_tensors(rank, world_size):
    """Gloo accepts only equal sizes here, and also in the all-to-all of lists."""
    outputs = [torch.empty(peer + 1) for peer in range(world_size)]
    dist.all_gather(outputs, numbers(rank, rank + 1))
    for peer, output in enumerate(outputs):
        assert torch.equal(output, numbers(peer, peer + 1))
    outputs = [torch.empty(rank + 2 * peer + 1) for peer in range(world_size)]
    dist.all_to_all(outputs, [numbers(rank, 2 * rank + peer + 1) for peer in range(world_size)])
    for peer, output in enumerate(outputs):
        assert torch.equal(output, numbers(peer, rank + 2 * peer + 1))
    shard = torch.empty(rank + 1)
    dist.reduce_scatter(shard, [numbers(0, peer + 1) for peer in range(world_size)])
    assert torch.equal(shard, numbers(0, rank + 1) * world_size)


def ops_that_gloo_lacks(rank, world_size):
    expected = total(world_size, 100)
    average = numbers(rank, 100)
    dist.all_reduce(average, ReduceOp.AVG)
    assert torch.equal(average, expected / world_size)
    shard = torch.empty(100 // world_size)
    dist.reduce_scatter_tensor(shard, numbers(rank, 100), ReduceOp.AVG)
    assert torch.equal(shard, average.chunk(world_size)[rank])
    scaled = numbers(rank, 100)
    dist.all_reduce(scaled, _make_nccl_premul_sum(0.25))
    assert torch.equal(scaled, expected / 4)
    flags = torch.tensor([rank == 0, True, False])
    dist.all_reduce(flags, ReduceOp.MAX)
    assert flags.tolist() == [True, True, False]


def movement_of_8_bit_floats(rank, world_size):
    for dtype in FP8:
        mine = numbers(rank, 64).to(dtype)
        gathered = torch.empty(64 * world_size, dtype=dtype)
        dist.all_gather_into_tensor(gathered, mine)
        copy = numbers(rank, 64).to(dtype)
        dist.broadcast(copy, 1)
        assert torch.equal(copy.float(), numbers(1, 64))
        for peer, part in enumerate(gathered.float().chunk(world_size)):
            assert torch.equal(part, numbers(peer, 64))


def asynchronous(rank, world_size):
    tensors = [numbers(rank + step, 500) for step in range(6)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    gathered = torch.empty(4 * world_size)
    last = dist.all_gather_into_tensor(gathered, numbers(rank, 4), async_op=True)
    for work in reversed([*works, last]):
        assert work.wait()
        assert work.is_completed() and work.is_success()
    future = dist.all_reduce(tensors[0], async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2).wait()
    return tensors, gathered, doubled


def coalesced(rank, world_size):
    tensors = [numbers(rank, 5), numbers(rank, 9)]
    with distributed_c10d._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    gathered = [torch.empty(5 * world_size), torch.empty(2 * world_size)]
    with distributed_c10d._coalescing_manager(async_ops=True) as manager:
        for out, count in zip(gathered, (5, 2), strict=True):
            dist.all_gather_into_tensor(out, numbers(rank, count))
    manager.wait()
    shards = [torch.empty(5), torch.empty(2)]
    with distributed_c10d._coalescing_manager():
        for out in shards:
            dist.reduce_scatter_tensor(out, numbers(rank, out.numel() * world_size))
    with distributed_c10d._coalescing_manager(
        device=torch.device("cpu"), async_ops=True
    ) as manager:
        dist.broadcast(tensors[0], 0, async_op=True)
        dist.all_reduce(tensors[1], async_op=True)
    manager.wait()
    assert torch.equal(tensors[1], total(world_size, 9) * world_size)
    lists = [[torch.empty(3), torch.empty(2, 2)] for _ in range(world_size)]
    group = default_group()
    mine = [numbers(rank, 3), numbers(rank, 4).view(2, 2)]
    group.allgather_coalesced(lists, mine).wait()
    for peer, (three, four) in enumerate(lists):
        assert torch.equal(three, numbers(peer, 3))
        assert torch.equal(four.view(-1), numbers(peer, 4))
    for shard, out in zip(shards, gathered, strict=True):
        count = shard.numel()
        assert torch.equal(out, torch.cat([numbers(peer, count) for peer in range(world_size)]))
        whole = total(world_size, count * world_size)
        assert torch.equal(shard, whole.chunk(world_size)[rank])


def messages(rank, world_size):
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    outgoing = [numbers(rank, 10), numbers(rank, 70000)]
    incoming = [torch.empty(10), torch.empty(70000)]
    ops = [dist.P2POp(dist.isend, t, right, tag=i) for i, t in enumerate(outgoing)]
    ops += [dist.P2POp(dist.irecv, t, left, tag=i) for i, t in enumerate(incoming)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    # The receives' tags are in another order than the sends'.
    works = [dist.isend(numbers(rank, 3) + tag, right, tag=tag) for tag in range(3)]
    tagged = {tag: torch.empty(3) for tag in (2, 0, 1)}
    for tag, tensor in tagged.items():
        dist.recv(tensor, left, tag=tag)
    for sent in works:
        sent.wait()
    heard = []
    if rank == 0:
        for _ in range(world_size - 1):
            tensor = torch.empty(4)
            source = dist.recv(tensor)
            heard.append((source, tensor))
        heard.sort(key=lambda entry: entry[0])
    else:
        dist.send(numbers(rank, 4), 0)
    return incoming, tagged, heard


def objects(rank, world_size):
    gathered = [None] * world_size
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * rank})
    sent = [rank, "one"] if rank == 1 else [None, None]
    dist.broadcast_object_list(sent, src=1)
    taken = [None]
    dist.scatter_object_list(taken, list("abcd")[:world_size] if rank == 0 else None, src=0)
    at_root = [None] * world_size if rank == 0 else None
    dist.gather_object(("from", rank), at_root, dst=0)
    return gathered, sent, taken, at_root


def sparse(rank, world_size):
    results = []
    for entries in (0, 1, 3):
        positions = torch.stack([torch.arange(entries) * 2 + rank, torch.arange(entries)])
        tensor = torch.sparse_coo_tensor(positions, numbers(rank, entries), (20, 5))
        dist.all_reduce(tensor)
        results.append(tensor.to_dense())
    rows = torch.sparse_coo_tensor(
        torch.tensor([[rank, 3, 3]]), numbers(rank, 12).view(3, 4), (6, 4)
    )
    dist.all_reduce(rows)
    return [*results, rows.to_dense()]


def sparse_refusals(rank, world_size):
    tensor = torch.sparse_coo_tensor(torch.tensor([[rank]]), torch.ones(1), (4,))
    with pytest.raises(UnsupportedError, match="op SUM"):
        dist.all_reduce(tensor, ReduceOp.MAX)
    other = torch.sparse_coo_tensor(torch.tensor([[rank]]), torch.ones(1), (4 + rank,))
    with pytest.raises(MismatchError, match=r"Shape is \[4\] on rank 0 and \[5\] on rank 1"):
        dist.all_reduce(other)
    dist.all_reduce(tensor)
    assert tensor.to_dense().sum() == world_size


def layouts(rank, world_size):
    """Tensors that are not contiguous, and a tensor that requires a gradient.

    Gloo ignores the strides of every other element, and so broadcasts a wrong result.
    """
    expected = total(world_size, 12)
    transposed = numbers(rank, 12).view(3, 4).t()
    dist.all_reduce(transposed)
    assert torch.equal(transposed, expected.view(3, 4).t())
    every_other = numbers(rank, 12)[::2]
    dist.broadcast(every_other, 1)
    assert torch.equal(every_other, numbers(1, 12)[::2])
    tracked = torch.nn.Parameter(numbers(rank, 12))
    dist.all_reduce(tracked)
    assert torch.equal(tracked, expected)
    work = dist.broadcast(tracked.view(2, 6).t(), 0, async_op=True)
    work.wait()
    assert torch.equal(tracked, expected)


def older_forms(rank, world_size):
    """A group's methods in the older forms with single tensors, op, root and timeout."""
    group, long = default_group(), datetime.timedelta(seconds=30)
    results = [numbers(rank, 6) for _ in range(4)]
    group.allreduce(results[0], ReduceOp.MAX, long).wait()
    group.allreduce([results[1]]).wait()
    group.broadcast(results[2], 1, timeout=long).wait()
    group.reduce(results[3], 0, ReduceOp.SUM, long).wait()
    gathered = [torch.empty(6) for _ in range(world_size)]
    group.allgather(gathered, numbers(rank, 6)).wait()
    shard = torch.empty(3)
    group.reduce_scatter(
        shard, [numbers(rank, 3) for _ in range(world_size)], op=ReduceOp.SUM
    ).wait()
    group.barrier().wait()
    if rank:
        results[3].zero_()
    return results, gathered, shard


def timeouts(rank, world_size):
    """The timeout of a single call, on a separate group because a fault makes a group unusable."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=60))
    if rank == 0:
        with pytest.raises(RuntimeError, match="barrier"):
            group.barrier(timeout=datetime.timedelta(milliseconds=200)).wait()
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(1), group=group)
    dist.barrier()
    dist.destroy_process_group(group)


def wrong_arguments(rank, world_size):
    """Wrong arguments are refused before peers are disturbed, and the group stays usable."""
    group = default_group()
    with pytest.raises(ArgumentError, match="one tensor per rank"):
        group.allreduce([torch.ones(1), torch.ones(1)]).wait()
    with pytest.raises(ArgumentError):
        dist.all_gather_into_tensor(torch.empty(3), torch.ones(2))
    with pytest.raises(UnsupportedError, match="to_local"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import distribute_tensor

        group.allreduce([distribute_tensor(torch.ones(4), init_device_mesh("cpu", (world_size,)))])
    with pytest.raises(ArgumentError, match="AllgatherOptions"):
        group.allgather_coalesced([[torch.ones(1)]] * world_size, [torch.ones(1)], 3)
    with pytest.raises(ArgumentError, match="lists of 1"):
        group.allgather_coalesced([[]] * world_size, [torch.ones(1)])
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [world_size] * 2


def versions(rank, world_size):
    """Versions of outputs increase, also in synchronous calls; versions of inputs stay."""
    tensor, whole, chunk = torch.ones(4), torch.empty(4 * world_size), torch.empty(4)
    lists, received = [torch.empty(4) for _ in range(world_size)], torch.empty(4)
    dist.all_gather_into_tensor(whole, tensor)
    dist.all_gather(lists, tensor)
    dist.reduce_scatter_tensor(chunk, whole)
    dist.all_to_all_single(received, chunk)
    assert [tensor._version, whole._version > 0, chunk._version] == [0, True, 1]
    assert all(each._version > 0 for each in (*lists, received))
    for call in (
        lambda: dist.all_reduce(tensor),
        lambda: dist.all_reduce(tensor, async_op=True).wait(),
        lambda: dist.all_reduce(tensor[::2]),
    ):
        before = tensor._version
        call()
        assert tensor._version > before
    for changes, call in (
        (rank != 0, lambda: dist.broadcast(tensor, 0)),
        (rank == 0, lambda: dist.reduce(tensor, 0)),
    ):
        before = tensor._version
        call()
        assert (tensor._version > before) == changes


@pytest.mark.parametrize(
    "check",
    [all_reduce, rooted, gathers_and_scatters, exchanges, asynchronous, messages, objects, sparse],
)
def test_against_gloo(four_ranks, check):
    four_ranks.compare(check)


@pytest.mark.parametrize(
    "check",
    [
        lists_of_uneven_tensors,
        versions,
        ops_that_gloo_lacks,
        movement_of_8_bit_floats,
        coalesced,
        layouts,
        sparse_refusals,
        timeouts,
        wrong_arguments,
    ],
)
def test_on_ringcomm(two_ranks, check):
    two_ranks.run(check)


def test_older_forms(two_ranks):
    two_ranks.compare(older_forms)
