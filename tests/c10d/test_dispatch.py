# SPDX-License-Identifier: Apache-2.0
"""Modes, autograd, traces and works of torch see a group's calls as they see Gloo's."""

import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import OpType  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import AllreduceOptions
from torch.distributed.tensor.debug import CommDebugMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from ringcomm.c10d.calls import completed
from ringcomm.errors import UnsupportedError
from tests.support.rank_pool import default_group


class Watching(TorchDispatchMode):
    """Records the operators of c10d."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def every_call(rank, world_size, async_op):
    mine, how = torch.full((world_size,), rank + 1.0), {"async_op": async_op}
    many = [mine + each for each in range(world_size)]
    kept: list[torch.Tensor] = []

    def wait(work, *tensors):
        if work is not None:
            work.wait()
        kept.extend(tensor.clone() for tensor in tensors)

    tensor = mine.clone()
    wait(dist.all_reduce(tensor, **how), tensor)
    wait(dist.all_reduce(tensor, dist.ReduceOp.MAX, **how), tensor)
    wait(dist.broadcast(tensor, 1, **how), tensor)
    wait(dist.reduce(tensor, 0, **how), *([tensor] if rank == 0 else []))
    outs = [torch.zeros(world_size) for _ in many]
    wait(dist.all_gather(outs, mine, **how), *outs)
    wait(dist.gather(mine, outs if rank == 0 else None, 0, **how), *outs)
    wait(dist.scatter(outs[0], many if rank == 0 else None, 0, **how), outs[0])
    wait(dist.reduce_scatter(outs[0], many, **how), outs[0])
    wide, narrow = torch.zeros(world_size**2), torch.zeros(1)
    wait(dist.all_gather_into_tensor(wide, mine, **how), wide)
    wait(dist.reduce_scatter_tensor(narrow, mine, **how), narrow)
    wait(dist.all_to_all_single(outs[0], mine, **how), outs[0])
    wait(dist.barrier(**how))
    if rank < 2:
        peer = 1 - rank
        first, then = (dist.send, dist.recv) if rank else (dist.recv, dist.send)
        first(tensor, peer)
        then(tensor, peer)
        work = dist.isend(mine, peer)
        wait(dist.irecv(outs[1], peer), outs[1])
        work.wait()
    sparse = torch.eye(2).to_sparse()
    wait(dist.all_reduce(sparse, **how))
    kept.append(sparse.to_dense())
    objects = [None] * world_size
    dist.all_gather_object(objects, rank)
    return kept


def under_modes(rank, world_size):
    """Makes every call under nested modes; returns what the modes see, and the results."""
    results: list[object] = []
    for async_op in (False, True):
        with Watching() as outer, Watching() as inner:
            results.append(every_call(rank, world_size, async_op))
        assert outer.names == inner.names != []
        results.append(inner.names)
        assert torch._C._len_torch_dispatch_stack() == 0
    with CommDebugMode() as counts:
        every_call(rank, world_size, False)
    results.append(counts.get_total_counts())
    return results


def same_without_modes(rank, world_size):
    for async_op in (False, True):
        without = every_call(rank, world_size, async_op)
        with Watching():
            seen = every_call(rank, world_size, async_op)
        assert all(map(torch.equal, without, seen)) and len(without) == len(seen)


class Keeping(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            return args[0], completed([], 0).boxed()
        return func(*args, **(kwargs or {}))


def kept_by_a_mode(rank, world_size):
    """A mode may suppress a call; afterwards the stack is as before, and calls work."""
    tensor = torch.ones(2)
    with Keeping():
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, async_op=True).wait()
    assert tensor.tolist() == [1, 1]
    dist.all_reduce(tensor)
    assert tensor.tolist() == [world_size] * 2


def _warned(call):
    """Returns how often a backward through a call's results warns."""
    leaf = torch.ones(4, requires_grad=True)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        outs = call(leaf * 1)
        assert not [each for each in seen if "an autograd kernel" in str(each.message)]
        sum(out.sum() for out in outs if out.requires_grad).backward()
    return len([each for each in seen if "an autograd kernel was not" in str(each.message)])


def backward_warns(rank, world_size):
    """A backward warns in the same cases as with Gloo."""

    def in_place(call):
        def made(y):
            call(y)
            return [y]

        return made

    def listed(y):
        outs = [torch.zeros(4) for _ in range(world_size)]
        dist.all_gather(outs, y)
        return [*outs, y]

    parameter = torch.nn.Parameter(torch.ones(4))
    with torch.no_grad():
        dist.all_reduce(parameter)
        dist.broadcast(parameter, 0)
    return [
        _warned(in_place(dist.all_reduce)),
        _warned(in_place(lambda y: dist.all_reduce(y, async_op=True).wait())),
        _warned(in_place(lambda y: dist.broadcast(y, 0))),
        _warned(in_place(lambda y: dist.all_reduce(y.detach()))),
        _warned(listed),
        _warned(lambda y: [parameter * y]),
    ]


def backward_through_outputs_warns(rank, world_size):
    """Gloo's calls warn as well if autograd changes a view on another thread."""

    def gathered(y):
        out = torch.zeros(4 * world_size)
        dist.all_gather_into_tensor(out, y)
        return [out]

    def scattered(y):
        out = torch.zeros(4 // world_size)
        dist.reduce_scatter_tensor(out, y)
        return [out]

    def coalesced(y):
        dist.all_reduce_coalesced([y])
        return [y]

    assert [_warned(call) for call in (gathered, scattered, coalesced)] == [1, 1, 1]


def with_a_timeout(rank, world_size):
    """A call with its own timeout runs on another thread, but is checked on the calling thread."""
    group, opts = default_group(), AllreduceOptions()
    opts.timeout = timedelta(seconds=50)
    for async_op in (False, True):
        opts.asyncOp = async_op
        assert _warned(lambda y: (group.allreduce([y], opts).wait(), [y])[1]) == 1
        parameter = torch.nn.Parameter(torch.ones(4))
        with torch.no_grad():
            group.allreduce([parameter], opts).wait()
        assert _warned(lambda y: [parameter * y]) == 0  # noqa: B023
        with pytest.raises(UnsupportedError, match="ProxyTorchDispatchMode"):
            make_fx(lambda x: group.allreduce([x], opts) and x)(torch.ones(2))


def traces_are_refused(rank, world_size):
    def step(x):
        y = x * 2
        dist.all_reduce(y)
        return y

    for trace in (
        lambda: make_fx(step)(torch.ones(2)),
        lambda: torch.jit.trace(step, torch.ones(2), check_trace=False),
        lambda: torch.func.vmap(step)(torch.ones(2, 2)),
        lambda: torch.func.functionalize(step)(torch.ones(2)),
        lambda: torch.func.grad(lambda x: step(x).sum())(torch.ones(2)),
    ):
        with pytest.raises(UnsupportedError, match="all_reduce on rank"):
            trace()
    functional = torch.ops._c10d_functional

    def operators(x):
        name = default_group().group_name
        return functional.wait_tensor(functional.all_reduce(x * 2, "sum", name))

    traced = make_fx(operators)(torch.ones(2))
    assert traced(torch.full((2,), 5.0)).tolist() == [10 * world_size] * 2


def op_types(rank, world_size):
    """Each work returns the type of its operation."""
    group, peer = default_group(), 1 - rank
    one, many = torch.ones(2), [torch.ones(2) for _ in range(world_size)]
    wide = torch.ones(2 * world_size)
    works = [
        ("ALLREDUCE", dist.all_reduce(one, async_op=True)),
        ("ALLREDUCE", group.allreduce([one])),
        ("BROADCAST", dist.broadcast(one, 0, async_op=True)),
        ("REDUCE", dist.reduce(one, 0, async_op=True)),
        ("ALLGATHER", dist.all_gather(many, one.clone(), async_op=True)),
        ("_ALLGATHER_BASE", dist.all_gather_into_tensor(wide, one, async_op=True)),
        ("_REDUCE_SCATTER_BASE", dist.reduce_scatter_tensor(one, wide, async_op=True)),
        ("REDUCE_SCATTER", dist.reduce_scatter(one, many, async_op=True)),
        ("GATHER", dist.gather(one, many if rank == 0 else None, 0, async_op=True)),
        ("SCATTER", dist.scatter(one, many if rank == 0 else None, 0, async_op=True)),
        ("ALLTOALL", dist.all_to_all(many, [each.clone() for each in many], async_op=True)),
        ("ALLTOALL_BASE", dist.all_to_all_single(wide, wide.clone(), async_op=True)),
        ("BARRIER", dist.barrier(async_op=True)),
        ("ALLREDUCE_COALESCED", group.allreduce_coalesced([one])),
        ("ALLGATHER_COALESCED", group.allgather_coalesced([many[:1], many[1:]], [one])),
        ("ALLGATHER_COALESCED", group.all_gather_single_coalesced([wide], [one])),
        ("REDUCE_SCATTER_TENSOR_COALESCED", group.reduce_scatter_single_coalesced([one], [wide])),
        ("_ALLREDUCE_SPARSE", dist.all_reduce(torch.eye(2).to_sparse(), async_op=True)),
        ("SEND", dist.isend(one, peer)),
        ("RECV", dist.irecv(many[0], peer)),
        ("SEND", group.send([one], peer, 1)),
        ("RECVANYSOURCE", group.recv_anysource([many[1]], 1)),
    ]
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(one)
        dist.all_reduce(wide)
    for work in manager.works:
        work.wait()
    for name, work in works:
        work.wait()
        assert work._get_op_type() == int(getattr(OpType, name)), name
    group._start_coalescing(torch.device("cpu"))
    dist.all_reduce(one, async_op=True)
    work = group._end_coalescing(torch.device("cpu"))
    work.wait()
    assert work._get_op_type() == int(OpType.COALESCED)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("check", [under_modes, backward_warns])
def test_as_on_gloo(two_ranks, check):
    two_ranks.compare(check)


@pytest.mark.parametrize(
    "check",
    [
        same_without_modes,
        kept_by_a_mode,
        backward_through_outputs_warns,
        with_a_timeout,
        traces_are_refused,
        op_types,
    ],
)
def test_on_ringcomm(two_ranks, check):
    two_ranks.run(check)
