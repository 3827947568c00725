# SPDX-License-Identifier: Apache-2.0
"""The schedules of rails: simulated with numbers, and run with threads as nodes."""

from typing import TypeAlias

import pytest
import torch

import ringcomm
from ringcomm import ArgumentError, CommOptions
from ringcomm.comm.nodes import calls, core
from tests.support.exact import equal, op_of, operand, reduced, same

NAMES = ("one_shot", "levels", "ring")
SIZES = (*range(2, 17), 23, 24, 31, 32, 40)
# A node's partial sum, or a sum of terms in this order.
Terms: TypeAlias = "int | tuple[Terms, ...]"


def terms_of(name: str, nodes: int) -> list[Terms]:
    """Simulates a reduction; returns by node the terms of its sum.

    Fails if a rank sends a part that it has sent before, or receives a part that no rank sends.
    """
    rounds = [core.reduction(name, nodes, node) for node in range(nodes)]
    held: list[dict[int, Terms]] = [dict.fromkeys(range(nodes), node) for node in range(nodes)]
    for number in range(len(rounds[0])):
        in_flight = {
            (node, each.peer): {target: held[node].pop(target) for target in each.targets}
            for node in range(nodes)
            for each in rounds[node][number].sends
        }
        for node in range(nodes):
            came: dict[int, dict[int, Terms]] = {}
            for each in rounds[node][number].receives:
                parts = in_flight.pop((each.peer, node))
                assert tuple(parts) == each.targets
                for target, part in parts.items():
                    came.setdefault(target, {node: held[node][target]})[each.peer] = part
            for target, terms in came.items():
                held[node][target] = tuple(terms[peer] for peer in sorted(terms))
        assert not in_flight
    assert all(list(sums_of) == [node] for node, sums_of in enumerate(held))
    return [sums_of[node] for node, sums_of in enumerate(held)]


def flat(terms: Terms) -> list[int]:
    return [terms] if isinstance(terms, int) else [node for each in terms for node in flat(each)]


@pytest.mark.parametrize("name", NAMES)
def test_each_sum_has_each_node_once(name):
    for nodes in SIZES:
        for terms in terms_of(name, nodes):
            assert sorted(flat(terms)) == list(range(nodes))


def test_order_of_the_sums():
    assert terms_of("one_shot", 6)[4] == (0, 1, 2, 3, 4, 5)
    assert terms_of("levels", 6)[4] == ((0, 1), (2, 3), (4, 5))
    assert terms_of("ring", 4)[1] == ((0, (2, 3)), 1)
    assert terms_of("levels", 7) == terms_of("one_shot", 7)  # a prime number has one level


def messages_of(rounds: tuple[core.Round, ...]) -> tuple[int, int]:
    sends = [each for turn in rounds for each in turn.sends]
    return len(sends), sum(len(each.targets) for each in sends)


@pytest.mark.parametrize("name", NAMES)
def test_counts_are_those_of_the_table(name):
    for nodes in SIZES:
        near, far = core.levels_of(nodes)
        assert near * far == nodes
        messages = near + far - 2 if name == "levels" else nodes - 1
        for node in range(nodes):
            for make in (core.reduction, core.gathering):
                rounds = make(name, nodes, node)
                assert messages_of(rounds) == (messages, nodes - 1)
                assert (
                    len(rounds)
                    == {
                        "one_shot": 1,
                        "levels": 1 + (near > 1),
                        "ring": nodes - 1,
                    }[name]
                )


@pytest.mark.parametrize("name", NAMES)
def test_a_gathering_sends_only_what_is_there(name):
    for nodes in SIZES:
        rounds = [core.gathering(name, nodes, node) for node in range(nodes)]
        held = [{node} for node in range(nodes)]
        for number in range(len(rounds[0])):
            before = [set(parts) for parts in held]
            for node in range(nodes):
                for each in rounds[node][number].receives:
                    assert set(each.targets) <= before[each.peer]
                    assert not set(each.targets) & held[node]
                    held[node] |= set(each.targets)
        assert all(parts == set(range(nodes)) for parts in held)


def test_auto():
    assert core.rail_schedule("auto", 31) == "one_shot"
    assert core.rail_schedule("auto", 32) == "levels"
    assert core.rail_schedule("ring", 4) == "ring"
    with pytest.raises(ArgumentError, match="rails"):
        CommOptions(rails="tree")


def world_of(shape: tuple[int, ...], **options):
    return ringcomm.local_world(sum(shape), nodes=shape, options=CommOptions(timeout=60, **options))


@pytest.mark.parametrize("shape", [(2, 1, 2, 1), (1,) * 6], ids=str)
@pytest.mark.parametrize("name", ["levels", "ring"])
def test_calls_are_exact(shape, name, monkeypatch):
    monkeypatch.setattr(calls, "ONE_HOP_BYTES", 64)
    monkeypatch.setattr(core, "SEGMENT_BYTES", 1024)

    def body(comm):
        rank, size = comm.rank, comm.world_size
        for dtype, op, count in (
            (torch.bfloat16, "SUM", 3001),
            (torch.int32, "MAX", 700),
            (torch.float32, "AVG", 7),
        ):
            operands = [operand(count * size, r, size, dtype, op) for r in range(size)]
            want = reduced(operands, op)
            tensor = operands[rank].clone()
            comm.all_reduce(tensor, op_of(op))
            assert equal(tensor, want)
            part = torch.empty(count, dtype=dtype)
            comm.reduce_scatter_tensor(part, operands[rank], op_of(op))
            assert equal(part, want[count * rank : count * (rank + 1)])
            comm.all_gather_into_tensor(tensor, part)
            assert equal(tensor, want)
        # Some ranks have no data: messages carry only the existing parts.
        outputs = [torch.empty(r % 3 * 500, dtype=torch.int16) for r in range(size)]
        comm.all_gather(outputs, torch.full((rank % 3 * 500,), rank, dtype=torch.int16))
        assert all(torch.equal(out, torch.full_like(out, r)) for r, out in enumerate(outputs))
        mine = torch.empty(rank % 3 * 700)
        comm.reduce_scatter(
            mine, [torch.full((r % 3 * 700,), float(rank + r)) for r in range(size)]
        )
        assert torch.equal(mine, torch.full_like(mine, float(sum(range(size)) + size * rank)))

    with world_of(shape, rails=name) as world:
        world.run(body)


def drawn(rank: int) -> torch.Tensor:
    return torch.randn(5003, generator=torch.Generator().manual_seed(rank)) * 8.0**rank


def test_the_sums_of_levels_are_those_of_groups_of_nodes():
    x = [drawn(rank) for rank in range(4)]
    want = {"one_shot": ((x[0] + x[1]) + x[2]) + x[3], "levels": (x[0] + x[1]) + (x[2] + x[3])}
    assert not same(want["one_shot"], want["levels"])

    def body(comm):
        tensor, small = drawn(comm.rank), drawn(comm.rank)[:9].clone()
        comm.all_reduce(tensor)
        comm.all_reduce(small)
        assert same(tensor[:9], small)  # small is summed in one hop
        return tensor

    for name, expected in want.items():
        with world_of((1,) * 4, rails=name) as world:
            assert all(same(each, expected) for each in world.run(body))
