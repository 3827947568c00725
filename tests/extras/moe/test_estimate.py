"""Estimates of a layer of experts against what a run sends, and as the command words them."""

from __future__ import annotations

import itertools
import json
from math import comb
from typing import Any

import pytest
import torch

import ringcomm
from ringcomm import ArgumentError, CommOptions, moe
from ringcomm.cli import main
from ringcomm.extras.moe.estimate import (
    ExpertLayer,
    ExpertPlacement,
    between_nodes,
    gradients_between_nodes,
    of_experts,
    read_from_mates,
    rows_memory,
)
from ringcomm.zero.estimate import BytesPerElement, World

Tensor = torch.Tensor
EXPERTS, HIDDEN = 8, 256


def layer(k: int, wire: str | None) -> ExpertLayer:
    return ExpertLayer(EXPERTS, k, HIDDEN, comb(EXPERTS, k), 1000, 4, wire)


@pytest.mark.parametrize(("k", "wire"), [(2, None), (3, "fp8"), (1, "int8")])
@pytest.mark.parametrize("nodes", [(2, 2), (1, 1, 1, 1)], ids=str)
def test_it_counts_what_crosses(k, wire, nodes, monkeypatch):
    """Tokens of all sets of experts are what equal chances are on average, to the byte."""
    sent: dict[int, int] = dict.fromkeys(range(4), 0)
    found = ringcomm.Communicator.all_to_all_single

    def counting(self: Any, output: Tensor, input: Tensor, *rest: Any) -> Any:
        leaving = rest[1]
        row_bytes = input[:1].nbytes
        for to, rows in enumerate(leaving):
            if self.places.node_of(to) != self.places.node:
                sent[self.rank] += rows * row_bytes
        return found(self, output, input, *rest)

    monkeypatch.setattr(ringcomm.Communicator, "all_to_all_single", counting)
    idx = torch.tensor(list(itertools.combinations(range(EXPERTS), k)))
    expected = between_nodes(layer(k, wire), ExpertPlacement(4, World(4, nodes[0])))

    def body(comm):
        x = torch.zeros(len(idx), HIDDEN, requires_grad=True)
        weights = torch.ones(idx.shape, requires_grad=True)
        told = []
        before = 0
        rows, _, handle = moe.dispatch(x, idx, weights, EXPERTS, comm, wire=wire)
        told.append(sent[comm.rank] - before)
        before = sent[comm.rank]
        out = moe.combine(rows, handle)
        told.append(sent[comm.rank] - before)
        before = sent[comm.rank]
        out.sum().backward()
        told.append(sent[comm.rank] - before)
        return told

    with ringcomm.local_world(4, nodes=nodes, options=CommOptions(timeout=60)) as made:
        every = made.run(body)
    mean = torch.tensor(every, dtype=torch.float64).mean(0)
    back = expected.combine_backward + expected.dispatch_backward
    wanted = torch.tensor([expected.dispatch, expected.combine, back], dtype=torch.float64)
    torch.testing.assert_close(mean, wanted, rtol=1e-12, atol=0)
    assert expected.total == pytest.approx(float(wanted.sum()))


def test_a_group_within_a_node_sends_gradients_alone():
    """Of experts on both nodes each node has a copy, whose gradients cross and no tokens."""
    world, each = World(8, 4), BytesPerElement()
    within, over = ExpertPlacement(4, world), ExpertPlacement(8, world)
    one = layer(2, None)
    assert between_nodes(one, within).total == 0
    # 2 experts here, of 1000 elements: half of their gradients as FP32, and of their parameters.
    assert gradients_between_nodes(one, within, each) == 2 * 1000 * (4 + 2) / 2
    assert gradients_between_nodes(one, over, each) == 0
    half = ExpertPlacement(2, world)
    assert gradients_between_nodes(one, half, each) == 4 * 1000 * (4 + 2) / 2 / 2
    assert of_experts(one, within, 2, each).total == 2 * 1000 * 2 + (4 + 12) * 1000
    assert of_experts(one, over, 2, each).total == (2 + 4 + 12) * 1000
    rows = comb(EXPERTS, 2) * 2 * HIDDEN * 4
    assert rows_memory(one) == 3 * rows
    assert read_from_mates(one, within) == 4 * rows
    assert read_from_mates(one, over) == 2 * rows + 2 * rows / 2


def test_what_is_refused():
    world = World(8, 4)
    for message, call in {
        "groups that divide a node's 4": lambda: ExpertPlacement(3, world),
        "top-k of at most the 8": lambda: ExpertLayer(8, 9, 4, 1, 1),
        "None, int8 or fp8": lambda: layer(1, "int4"),
        "at least 1": lambda: ExpertLayer(8, 2, 0, 1, 1),
        "multiple of the 16": lambda: between_nodes(
            layer(1, None), ExpertPlacement(16, World(16, 4))
        ),
    }.items():
        with pytest.raises(ArgumentError, match=message):
            call()


def test_the_command(capsys):
    sizes = ["--experts", "64", "--top-k", "8", "--hidden", "1024", "--tokens", "4096"]
    cluster = ["--nodes", "4", "--gpus-per-node", "8"]
    assert main(["estimate", *sizes, *cluster, "--expert-parallel", "16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("a layer of 64 experts of 8.389 M parameters, top 8; 4096 tokens")
    assert [line.split()[0] for line in lines[5::3]] == ["over", "in", "over"]
    assert max(map(len, lines)) <= 100
    assert main(["estimate", *sizes, *cluster, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["experts"]
    within, over = told["placements"]
    assert within["between_nodes_bytes"]["none"]["total"] == 0
    one = ExpertLayer(64, 8, 1024, 4096, 8 << 20, 2, "fp8")
    moved = between_nodes(one, ExpertPlacement(32, World(32, 8)))
    assert over["between_nodes_bytes"]["fp8"]["dispatch"] == moved.dispatch
    for wrong in (
        [*sizes, "--params", "1B"],
        sizes,
        ["--experts", "8", "--world", "2"],
        [*sizes, "--world", "2", "--wire", "int4"],
    ):
        assert main(["estimate", *wrong]) == 2
        assert "--experts: expected" in capsys.readouterr().err
