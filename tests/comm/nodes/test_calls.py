# SPDX-License-Identifier: Apache-2.0
"""Calls over nodes are exact; threads of one process play the ranks of several nodes.

``make nodes-check`` runs all tests of calls in this way.
"""

from collections.abc import Callable, Iterator

import pytest
import torch

import ringcomm
from ringcomm import CommOptions, LocalWorld, MismatchError, ReduceOp, UnsupportedError
from ringcomm.comm.host.rendezvous import NodeLayout, divide
from ringcomm.comm.nodes import calls
from ringcomm.comm.nodes import core as sums
from ringcomm.errors import ArgumentError, RendezvousError, RingcommError
from tests.support.call_checks import CHECKS, REDUCTIONS, Case
from tests.support.covering import covering
from tests.support.exact import ops_for, same

SHAPES = [(2, 2), (1, 2), (2, 1, 2), (1, 1, 1)]
# None, one element, less than a vector, several segments.
COUNTS = (0, 1, 7, 701)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def world_of(shape: tuple[int, ...], **options) -> LocalWorld:
    return ringcomm.local_world(sum(shape), nodes=shape, options=CommOptions(timeout=60, **options))


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def world(request) -> Iterator[LocalWorld]:
    with pytest.MonkeyPatch.context() as patch:
        # Small limits, so that calls of some kilobytes use all paths.
        patch.setattr(calls, "ONE_HOP_BYTES", 64)
        patch.setattr(sums, "SEGMENT_BYTES", 1024)
        with world_of(request.param) as made:
            yield made


def test_node_layout(world):
    def body(comm):
        return comm.num_nodes, comm.node.world_size, comm.node.ranks, comm.rail

    seen = world.run(body)
    for rank, (nodes, size, node_ranks, rail) in enumerate(seen):
        assert rank in node_ranks and rank in rail
        assert size == len(node_ranks) and nodes == len(rail)
    in_order = list(dict.fromkeys(node_ranks for _, _, node_ranks, _ in seen))
    assert sorted(rank for node_ranks in in_order for rank in node_ranks) == list(range(len(seen)))


@covering(strength=1, indirect=["world"], world=SHAPES, name=[*CHECKS])
def test_every_call(world, name):
    """With parts of equal and of different sizes, and with each rank as root."""

    def body(comm):
        for number, count in enumerate(COUNTS):
            case = Case(
                count,
                torch.int64,
                in_place=number % 2 == 1,
                root=number % comm.world_size,
                async_op=number % 3 == 1,
            )
            CHECKS[name](comm, case)

    world.run(body)


@covering(
    strength=1,
    indirect=["world"],
    world=SHAPES,
    name=[*REDUCTIONS],
    dtype=[*FLOATS, torch.float64, torch.int32, torch.uint8, torch.bool],
)
def test_every_op(world, name, dtype):
    """The count differs between ops and worlds."""

    def body(comm):
        for number, op in enumerate(ops_for(dtype)):
            count = COUNTS[(number + comm.world_size) % 4]
            CHECKS[name](comm, Case(count, dtype, op, root=count % comm.world_size))

    world.run(body)


def test_messages_and_groups(world):
    def body(comm):
        rank, size = comm.rank, comm.world_size
        after, before = (rank + 1) % size, (rank - 1) % size
        for count in COUNTS:
            got = [torch.empty(count) for _ in range(2)]
            # The receives' tags are in another order than the sends'.
            works = [comm.irecv(got[tag], before, tag) for tag in (1, 0)]
            works += [
                comm.isend(torch.full((count,), rank + tag * 0.5), after, tag) for tag in (0, 1)
            ]
            assert all(work.wait() for work in works)
            assert all((tensor == before + tag * 0.5).all() for tag, tensor in enumerate(got))
        if comm.rank == 1:
            comm.send(torch.ones(3), 0)
        if comm.rank == 0:
            with pytest.raises(MismatchError, match="12 bytes"):
                comm.recv(torch.empty(2), 1)
        group = comm.new_group([0, size - 1])
        if group is not None:
            assert group.num_nodes == len({comm.node_of(0), comm.node_of(size - 1)})
            tensor = torch.ones(1)
            group.all_reduce(tensor)
            assert tensor.item() == 2
            group.close()

    world.run(body)


def drawn(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns operands whose sums depend on the order: those of ranks 0 and 2 cancel."""
    made = torch.Generator().manual_seed(rank % 2 and rank)
    tensor = torch.randn(5003, generator=made)
    return (tensor if rank % 2 else tensor * (1 - rank) * 2.0**13).to(dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_sums_are_those_of_one_node_that_sums_in_groups(dtype):
    def body(comm):
        found = []
        for op in (ReduceOp.SUM, ReduceOp.AVG, ringcomm.premul_sum(0.3)):
            tensor = drawn(comm.rank, dtype)
            comm.all_reduce(tensor, op)
            found.append(tensor)
            part = torch.empty(1250, dtype=dtype)
            comm.reduce_scatter_tensor(part, drawn(comm.rank, dtype)[:5000], op)
            found.append(part)
        return found

    with world_of((2, 2)) as over_nodes, ringcomm.local_world(4) as one_node:
        of_nodes, in_rank_order = over_nodes.run(body), one_node.run(body)
    options = CommOptions(timeout=60, sum_group_size=2)
    with ringcomm.local_world(4, options=options) as in_groups:
        of_groups = in_groups.run(body)
    for ours, groups in zip(of_nodes, of_groups, strict=True):
        assert all(same(x, y) for x, y in zip(ours, groups, strict=True))
    assert not all(same(x, y) for x, y in zip(of_nodes[0], in_rank_order[0], strict=True))


def test_partial_sums_rounded_for_the_network():
    """|x - exact| <= 2 u sum|x_i|, u = 2^-8: one rounding per node, and one of the result."""

    def body(comm):
        tensor = drawn(comm.rank, torch.bfloat16)
        comm.all_reduce(tensor)
        return tensor

    with world_of((2, 2), compression="param") as world:
        got = world.run(body)
    operands = torch.stack([drawn(rank, torch.bfloat16).double() for rank in range(4)])
    bound = 2 * 2.0**-8 * operands.abs().sum(0)
    assert all(same(each, got[0]) for each in got)
    assert bool(((got[0].double() - operands.sum(0)).abs() <= bound).all())


def test_other_calls_are_told_apart():
    def body(comm):
        if comm.rank < 2:
            comm.all_reduce(torch.ones(1000))
        else:
            comm.all_gather_into_tensor(torch.ones(1000), torch.ones(250))

    with world_of((2, 2)) as world:
        with pytest.raises(MismatchError) as raised:
            world.run(body)
        ends = [
            (each.rank, each.collectives[0].collective, each.collectives[0].state)
            for comm in (world[0], world[2])
            for each in comm.recording().ranks
        ]
    assert ends == [
        *((rank, "all_reduce", "failed") for rank in (0, 1)),
        *((rank, "all_gather", "failed") for rank in (2, 3)),
    ]
    for word in ("all_reduce", "all_gather", "node 0", "node 1"):
        assert word in str(raised.value)


def ends_of(shape: tuple[int, ...], call: Callable[[ringcomm.Communicator], object]) -> list[str]:
    """Makes one call on every rank; returns by rank the error's type and text, or ""."""

    def body(comm):
        try:
            call(comm)
        except RingcommError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    with world_of(shape) as world:
        return world.run(body)


@pytest.mark.parametrize("shape", [(2, 2), (1, 3)], ids=str)
def test_another_dtype_of_a_local_peer_is_told(shape):
    """The sizes in bytes are equal, so the data could be taken for the other type."""

    def mine(comm):
        return torch.ones(4, dtype=torch.int32 if comm.rank == 3 else torch.float32)

    def exchange(comm):
        comm.all_to_all_single(torch.empty_like(mine(comm)), mine(comm))

    def gather(comm):
        parts = [torch.empty_like(mine(comm)) for _ in range(4)]
        comm.gather(mine(comm), parts if comm.rank == 0 else None, 0)

    assert all("MismatchError" in end for end in ends_of(shape, exchange))
    assert "MismatchError" in ends_of(shape, gather)[0]


@pytest.mark.parametrize("expected", [0, 1, 3])
def test_sizes_that_differ_between_nodes_are_told(expected):
    def call(comm):
        outs = [2] * 4
        if comm.rank == 3:
            outs[0] = expected
        given, room = [torch.ones(2) for _ in range(4)], [torch.empty(size) for size in outs]
        comm.all_to_all(room, given)

    words = f"rank 3 (node 1) expects {4 * expected} bytes of rank 0 (node 0), which sends 8"
    assert all(words in end for end in ends_of((2, 2), call))


def test_a_receive_that_comes_long_before_its_send_holds_nothing_up():
    def body(comm):
        work = comm.irecv(torch.empty(3), 1) if comm.rank == 0 else None
        comm.barrier()
        if comm.rank == 1:
            comm.send(torch.ones(3), 0)
        return work is None or work.wait()

    with world_of((1, 1)) as world:
        assert world.run(body) == [True, True]


def test_records_have_the_ranks_of_the_communicator():
    def body(comm):
        comm.all_reduce(torch.ones(10_000))
        return repr(comm), comm.recording().ranks

    with world_of((2, 2)) as world:
        for rank, (text, recorded) in enumerate(world.run(body)):
            assert [each.rank for each in recorded] == [rank // 2 * 2, rank // 2 * 2 + 1]
            assert f"rank {rank} of 4 on node {rank // 2} of 2" in text
            calls = recorded[rank % 2].collectives
            assert (calls[0].collective, calls[0].size_bytes) == ("all_reduce", 40_000)
            assert {each.collective for each in calls[1:]} == {
                "reduce_scatter_partial",
                "all_gather",
            }
            assert all(each.end_ns <= calls[0].end_ns for each in calls)
            assert __file__[-20:] in calls[0].site


def test_what_is_refused():
    def body(comm):
        with pytest.raises(UnsupportedError, match="expected auto or two_shot"):
            comm.all_reduce(torch.ones(3), algorithm="ring")
        with pytest.raises(
            UnsupportedError, match=r"all_reduce.*within a node.*Communicator\.node"
        ):
            comm.all_reduce(torch.ones(3), kernels="triton")
        with pytest.raises(UnsupportedError, match=r"own ke.*within a node"):
            comm.engine.kernel_target("own kernels")
        comm.barrier()

    with world_of((1, 1)) as world:
        world.run(body)
    with pytest.raises(UnsupportedError, match=r"rendezvous.*within a node"):
        world_of((1, 1), kernels="triton")
    with pytest.raises(UnsupportedError, match="nccl"):
        world_of((1, 1), transport="nccl")
    for nodes in (2, "11", [1.0, 1], [2, 0], [1], [True, 1]):
        with pytest.raises(ArgumentError, match=r"nodes: expected a list.*with the sum 2, got"):
            ringcomm.local_world(2, nodes=nodes)  # type: ignore[arg-type]


def test_division_into_nodes():
    machines = ["a", "b", "a", "b", "c"]
    none: list[dict[int, str]] = [{} for _ in machines]
    layout = divide(2, machines, none, "here")
    assert layout.nodes == ((0, 2), (1, 3), (4,))
    assert (layout.node, layout.local_rank, layout.num_rails) == (0, 1, 2)
    assert (layout.rail(0), layout.rail(1)) == ((0, 1, 4), (2, 3, 4))
    assert layout.rails_of(4) == [0, 1]
    assert divide(0, ["a", "a"], [{}, {0: "why"}], "here").nodes == ((0,), (1,))
    # Rank 0 reaches 1 and 2, which do not reach each other.
    with pytest.raises(RendezvousError, match=r"ranks 1 and 2 cannot map.*why"):
        divide(0, ["a"] * 3, [{}, {2: "why"}, {}], "here")
    assert NodeLayout(((0,), (1, 2)), 0).even is False
