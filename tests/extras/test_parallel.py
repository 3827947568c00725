# SPDX-License-Identifier: Apache-2.0
"""parallelize(): a model sharded over ranks has one process's results, and trains the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from ringcomm import functional, zero
from ringcomm.errors import ArgumentError, MismatchError
from ringcomm.extras.parallel import (
    COLUMN,
    GATHER,
    ROW,
    SEQUENCE,
    SPLIT,
    WHOLE,
    ColumnParallelLinear,
    RowParallelLinear,
    parallelize,
)
from ringcomm.optim import AdamW
from tests.support.meshes import mesh_of
from tests.support.rank_pool import same

Tensor = torch.Tensor

PLAN = {
    "first": WHOLE,
    "embed": SPLIT,
    "blocks.*": SEQUENCE,
    "blocks.*.up": COLUMN,
    "blocks.*.down": ROW,
    "head": GATHER,
}


class Block(nn.Module):
    """A replicated weight, and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(x * self.scale)))


class Model(nn.Module):
    """Whole-number parameters, for which all sums of a forward and a backward are exact."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6, bias=False)
        self.embed = nn.Linear(6, 6)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(6, 5)
        self.blocks[1].down.bias.requires_grad_(False)
        draw = torch.Generator().manual_seed(4)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randint(-1, 2, tuple(param.shape), generator=draw))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(number: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(number)
    return torch.randint(-1, 2, (2, 4, 6), generator=draw).float()


def full(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach()


def results(model: nn.Module, x: Tensor) -> list[Any]:
    x = x.clone().requires_grad_()
    out = model(x)
    (out * (1 + torch.arange(out.numel()).view(out.shape) % 3)).sum().backward()
    grads = {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return [out.detach(), x.grad, grads]


def gives_what_one_process_gives(rank: int, world_size: int) -> None:
    model = Model()
    before = {name: id(module) for name, module in model.named_modules()}
    assert parallelize(model, PLAN, mesh_of(1, world_size)["tp"]) is model
    assert {name: id(module) for name, module in model.named_modules()} == before
    same(results(model, batch()), results(Model(), batch()))
    block: Any = model.blocks[0]
    up: Any = block.up
    down: Any = block.down
    assert (type(up), type(down)) == (ColumnParallelLinear, RowParallelLinear)
    assert up.bias.placements == up.weight.placements == (Shard(0),)
    assert down.weight.placements == (Shard(1),)
    assert down.bias.placements == block.scale.placements == (Replicate(),)
    assert not isinstance(model.first.weight, DTensor)
    assert not isinstance(model.embed.weight, DTensor)
    assert up.weight.to_local().shape == (8 // world_size, 6)
    assert not model.blocks[1].down.bias.requires_grad


@pytest.mark.parametrize("world_size", [2, 4])
def test_it_gives_what_one_process_gives(rank_pools, world_size):
    rank_pools(world_size).run(gives_what_one_process_gives)


def gives_it_over_gloo(rank: int, world_size: int) -> None:
    model = parallelize(Model(), PLAN, mesh_of(1, world_size)["tp"])
    same(results(model, batch()), results(Model(), batch()))


def test_a_mesh_of_another_backend(rank_pools):
    rank_pools(2).run(gives_it_over_gloo, "gloo")


def values_are_those_of_the_first_rank(rank: int, world_size: int) -> None:
    model = Model()
    with torch.no_grad():
        for block in model.blocks:
            for param in block.parameters():
                param.add_(rank)
    parallelize(model, PLAN, mesh_of(1, world_size)["tp"])
    want = dict(Model().named_parameters())
    for name, param in model.named_parameters():
        assert torch.equal(full(param), want[name])


def test_values_are_those_of_the_first_rank(rank_pools):
    rank_pools(2).run(values_are_those_of_the_first_rank)


# ---- training -------------------------------------------------------------------------------


def trains_at_every_stage(rank: int, world_size: int) -> None:
    """On 2 x 2 ranks all stages have the same bits, those of a model that is not sharded."""
    mesh = mesh_of(2, 2)
    ends = []
    for stage in (0, 1, 2, 3):
        model = parallelize(Model(), PLAN, mesh["tp"])
        zero.shard(model, stage, comm=mesh["dp"])
        ends.append(train(model, mesh.get_local_rank("dp")))
        same(ends[-1], ends[0])
    serial = Model()
    zero.shard(serial, 1, comm=mesh["dp"])
    # Whole numbers make the first step's gradients exact; norms cover the whole model.
    assert train(serial, mesh.get_local_rank("dp"))[0] == ends[0][0]


def train(model: nn.Module, data_rank: int) -> list[Any]:
    optimizer = AdamW(model.parameters(), lr=0.01)
    norms = []
    for step in range(2):
        model(batch(10 * data_rank + step)).square().sum().backward()
        norms.append(float(optimizer.clip_grad_norm_(0.5)))
        optimizer.step()
        optimizer.zero_grad()
    with zero.unsharded(model):
        return [*norms, {name: full(param) for name, param in model.named_parameters()}]


def test_zero_and_adamw_train_it(rank_pools):
    rank_pools(4).run(trains_at_every_stage)


def compiles_to_one_graph(rank: int, world_size: int) -> None:
    ends = []
    for compiled in (False, True):
        model = Model()
        model.blocks = model.blocks[:1]
        parallelize(model, PLAN, mesh_of(1, world_size)["tp"])
        call: Any = model
        if compiled:
            call = torch.compile(model, backend="aot_eager", fullgraph=True)
        out = call(batch())
        out.sum().backward()
        grads = {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        ends.append([out.detach(), grads])
    same(ends[0], ends[1])


def test_it_compiles_to_one_graph(rank_pools):
    rank_pools(2).run(compiles_to_one_graph)


# ---- attention ------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, heads: int = 4, key_heads: int = 2, width: int = 8) -> None:
        super().__init__()
        self.heads, self.key_heads = heads, key_heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width * key_heads // heads)
        self.value = nn.Linear(width, width * key_heads // heads)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        key = self.key(x).unflatten(-1, (self.key_heads, -1)).transpose(1, 2)
        value = self.value(x).unflatten(-1, (self.key_heads, -1)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, **sizes: int) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embed = nn.Embedding(5, 8)
        self.norm = nn.LayerNorm(8)
        self.attention = Attention(**sizes)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embed(tokens)
        return x + self.attention(self.norm(x))


ATTENTION_PLAN = {
    "embed": SPLIT,
    "norm": SEQUENCE,
    "attention.query": COLUMN,
    "attention.key": COLUMN,
    "attention.value": COLUMN,
    "attention.out": ROW,
}
# An element results from some hundred operations on numbers below 10; each operation rounds by at
# most 2^-53 of its result.
FLOAT64_ERROR = 100 * 10 * 2.0**-53


def heads_are_divided(rank: int, world_size: int) -> None:
    mesh = mesh_of(1, world_size)["tp"]
    model = Layer()
    parallelize(model, ATTENTION_PLAN, mesh, heads={"attention": ("heads", "key_heads")})
    assert (model.attention.heads, model.attention.key_heads) == (4 // world_size, 2 // world_size)
    serial = Layer()
    tokens = torch.arange(12).view(2, 6) % 5
    group = mesh.get_group().communicator  # type: ignore[attr-defined]
    found = functional.join_sequence(model(tokens), group)
    want = serial(tokens)
    torch.testing.assert_close(found, want, rtol=0, atol=FLOAT64_ERROR)
    for out in (found, want):
        (out * torch.arange(out.numel()).view(out.shape).remainder(7)).sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), serial.parameters(), strict=True):
        assert ours.grad is not None, name
        torch.testing.assert_close(full(ours.grad), theirs.grad, rtol=0, atol=100 * FLOAT64_ERROR)


def test_heads_are_divided(rank_pools):
    rank_pools(2).run(heads_are_divided)


# ---- errors ---------------------------------------------------------------------------------


def refusals(rank: int, world_size: int) -> None:
    mesh = mesh_of(1, world_size)["tp"]

    def refused(says: str, model: nn.Module, plan: dict[str, str], **options: Any) -> None:
        before = {name: type(module) for name, module in model.named_modules()}
        with pytest.raises(ArgumentError, match=rf"parallelize on rank {rank} of 2.*{says}"):
            parallelize(model, plan, mesh, **options)
        assert {name: type(module) for name, module in model.named_modules()} == before
        assert not any(isinstance(param, DTensor) for param in model.parameters())

    refused(
        r"plan\['blocks\.\*\.u'\]: expected the name of a module, got one that none has; there are "
        r"'first', 'embed', 'blocks', 'blocks\.0', 'blocks\.0\.up' and \d more",
        Model(),
        PLAN | {"blocks.*.u": COLUMN},
    )
    refused(r"plan\['first'\]: expected one of 'column'.*got 'rows'", Model(), {"first": "rows"})
    refused(
        r"every module with parameters, or one around it, got none for 'first', 'head'; one that",
        Model(),
        {name: kind for name, kind in PLAN.items() if name not in ("first", "head")},
    )
    refused("'blocks' and|'embed' is both", Model(), PLAN | {"em*": WHOLE})
    refused(r"'blocks\.0': expected an nn\.Linear as 'row', got Block", Model(), {"blocks.0": ROW})
    refused(
        r"'head': expected out_features that the 2 ranks of the mesh divide, got 5",
        Model(),
        PLAN | {"head": COLUMN},
    )
    refused(
        r"heads: 'attention': expected key_heads to be a number that the 2 ranks .*, got 1",
        Layer(key_heads=1),
        {"embed": SPLIT, "norm": SEQUENCE, "attention": SEQUENCE},
        heads={"attention": ["heads", "key_heads"]},
    )
    tied = Model()
    tied.head.weight = tied.first.weight
    refused(
        "'first' and 'head' share a parameter, of which the former is 'whole'.*"
        "before the head, such as a norm, be 'gather' and the head 'whole'",
        tied,
        PLAN,
    )
    for plan in (None, ["first"], {1: WHOLE}):
        refused("plan: expected a dict by names of modules, got", Model(), plan)  # type: ignore[arg-type]
    refused("heads: expected a dict", Model(), PLAN, heads=["attention"])
    sharded = zero.shard(Model(), 2, comm=mesh)
    refused(r"expected one that is not sharded yet, got one after zero\.shard", sharded, PLAN)
    for wrong in (None, mesh.get_group()):
        with pytest.raises(ArgumentError, match="mesh: expected a DeviceMesh of one dimension"):
            parallelize(Model(), PLAN, wrong)  # type: ignore[arg-type]
    again = parallelize(Model(), PLAN, mesh)
    with pytest.raises(ArgumentError, match=r"expected an nn\.Linear as 'column', got ColumnPara"):
        parallelize(again, PLAN, mesh)
    with pytest.raises(ArgumentError, match="tokens that world_size 2 divides"):
        again(torch.zeros(2, 3, 6))


def test_refusals(rank_pools):
    rank_pools(2).run(refusals)


def what_one_rank_alone_has(rank: int, world_size: int) -> None:
    """A mistake on one rank raises on all ranks, and the ranks can continue."""
    mesh = mesh_of(1, world_size)["tp"]

    def told(says: str, error: type[Exception], **of_last: Any) -> None:
        given = {"model": Model(), "plan": PLAN, "heads": {}}
        with pytest.raises(error, match=says):
            parallelize(**(given | (of_last if rank else {})), mesh=mesh)  # type: ignore[arg-type]

    wrong = r"plan\['nothing'\]: expected the name of a module"
    told(
        f"rank 1 of 2: {wrong}",
        ArgumentError,
        plan=PLAN | {"nothing": ROW},
    )
    told("rank 1 of", ArgumentError, plan=None)
    told(
        r"the ranks differ\. Module \d+ is \"'head' as 'gather', .* on rank 0 "
        "and \"'head' as 'sequence', .* on rank 1",
        MismatchError,
        plan=PLAN | {"head": SEQUENCE},
    )
    other = Model()
    other.head = nn.Linear(6, 7)
    told(r"'head'.*\[5, 6\].*\[7, 6\].* on rank 1", MismatchError, model=other)
    other = Model()
    other.head.more = nn.LayerNorm(6)
    told(r"Module \d+ is missing on rank 0 and .*'head.more'", MismatchError, model=other)
    other.first.heads = 4  # type: ignore[assignment]
    told("differ", MismatchError, model=other, heads={"first": "heads"})


def test_what_one_rank_alone_has(rank_pools):
    rank_pools(2).run(what_one_rank_alone_has)


def what_a_forward_finds(rank: int, world_size: int) -> None:
    """Plans that only a forward can recognise as wrong; their gradients would be wrong."""
    mesh = mesh_of(1, world_size)["tp"]
    rows = {name: kind for name, kind in PLAN.items() if not name.endswith("down")}
    with pytest.raises(
        ArgumentError, match=r"in_features=8.*expected 8 features .*, got 4\. Linear"
    ):
        parallelize(Model(), rows, mesh)(batch())
    columns = {name: kind for name, kind in PLAN.items() if not name.endswith("up")}
    with pytest.raises(ArgumentError, match=r"RowParallelLinear.*expected 4 features .*, got 8"):
        parallelize(Model(), columns, mesh)(batch())

    def with_norm(kind: str) -> Model:
        model = Model()
        model.blocks.append(nn.LayerNorm(6))
        kinds = dict.fromkeys(("blocks.0", "blocks.1"), SEQUENCE) | {"blocks.2": kind}
        plan = {name: each for name, each in PLAN.items() if name != "blocks.*"} | kinds
        parallelize(model, plan, mesh)
        return model

    with pytest.raises(
        ArgumentError, match=r"'blocks\.2': expected a module that is 'whole' to be"
    ):
        with_norm(WHOLE)(batch())
    model = with_norm(SEQUENCE)
    model(batch())
    # This is a rank's former number of tokens; a forward does not remember the last one.
    model(batch()[:, :2])


def test_what_a_forward_finds(rank_pools):
    rank_pools(2).run(what_a_forward_finds)


def a_copy_goes_its_own_way(rank: int, world_size: int) -> None:
    """A copy, for example of averaged weights, shares only the communicator."""
    model = parallelize(Model(), PLAN, mesh_of(1, world_size)["tp"])
    copied = copy.deepcopy(model)
    before = copied(batch())
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    same(copied(batch()), before)
    assert not torch.equal(model(batch()), before)


def test_a_copy_goes_its_own_way(rank_pools):
    rank_pools(2).run(a_copy_goes_its_own_way)
