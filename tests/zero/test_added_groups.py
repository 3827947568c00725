# SPDX-License-Identifier: Apache-2.0
"""NOTE [Growth]: param groups added later, and optimizers of a part of a sharded module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from ringcomm import zero
from ringcomm.errors import ArgumentError, MismatchError
from ringcomm.optim import AdamW, AdamWOptions, Muon, Sharded
from ringcomm.optim.state import reshard
from tests.support.covering import covering, in_test_all
from tests.zero.models import assert_same_bits

STAGES = [0, 3, *in_test_all(1, 2)]
BASE = nn.Sequential(*(nn.Linear(20, 20) for _ in range(4)))
SMALL = 512


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "adamw": lambda params, **chosen: AdamW(params, lr=0.1, **chosen),
    "momentum": lambda params, **chosen: Sharded(
        torch.optim.SGD, params, lr=0.1, momentum=0.9, **chosen
    ),
    "rmsprop": lambda params, **chosen: Sharded(torch.optim.RMSprop, params, lr=0.1, **chosen),
    "muon": lambda groups, **chosen: Muon(groups, lr=0.1, **chosen),
}
PRECISIONS = {
    "float32": zero.Precision(),
    "masters": zero.Precision(param=torch.bfloat16),
    "remainder": zero.Precision.preset("bf16-remainder"),
}


def turn(module: Any, optimizer: Any, number: int) -> None:
    """Takes a step on the same batch on all ranks, so that the mean gradient equals each rank's."""
    x = torch.linspace(-1, 1, 40).view(2, 20) + number
    module(x.to(module[3].weight.dtype)).float().square().mean().backward()
    optimizer.clip_grad_norm_(0.5)
    optimizer.step()
    optimizer.zero_grad()


def late(module: Any) -> list[nn.Parameter]:
    """Returns the parameters that are frozen at first: a whole unit, and a part of another one."""
    return [*module[0].parameters(), module[1].weight]


def early(module: Any) -> list[nn.Parameter]:
    chosen = set(map(id, late(module)))
    return [param for param in module.parameters() if id(param) not in chosen]


def freeze(module: Any, frozen: bool) -> None:
    for param in late(module):
        param.requires_grad_(not frozen)


def groups_of(params: list[nn.Parameter], **chosen: Any) -> list[dict[str, Any]]:
    """Returns a group of matrices for Muon and a group of the rest; others treat both the same."""
    kinds = (("muon", 2), ("adamw", 1))
    split = [(name, [p for p in params if p.dim() == dims]) for name, dims in kinds]
    return [{"params": some, "algorithm": name, **chosen} for name, some in split]


def joins_late(module: Any, make: Callable[..., Any]) -> Any:
    """Trains a part for two steps, then adds the late parameters as groups and trains all."""
    freeze(module, True)
    optimizer = make(groups_of(early(module)))
    for number in range(2):
        turn(module, optimizer, number)
    for group in groups_of(late(module), lr=0.2):
        optimizer.add_param_group(group)
    freeze(module, False)
    for number in range(2, 5):
        turn(module, optimizer, number)
    return optimizer


def there_from_the_start(module: Any, make: Callable[..., Any]) -> Any:
    """Trains the same with all groups from the start; the late groups get no gradients at first."""
    freeze(module, True)
    optimizer = make([*groups_of(early(module)), *groups_of(late(module), lr=0.2)])
    for number in range(5):
        if number == 2:
            freeze(module, False)
        turn(module, optimizer, number)
    return optimizer


def exists(case: Mapping[str, Any]) -> bool:
    """True if the case exists: only AdamW can keep remainders."""
    return case.get("precision") != "remainder" or case.get("kind") in (None, "adamw")


@covering(strength=1, valid=exists, stage=range(4), kind=[*OPTIMIZERS], precision=[*PRECISIONS])
def test_a_part_joins_later_with_the_bits_of_one_that_was_there(worlds, stage, kind, precision):
    """Parameters, state and step numbers are equal on two ranks; steps count as in torch."""
    options = zero.ZeroOptions(bucket_elems=SMALL, precision=PRECISIONS[precision])

    def work(comm, way):
        module: Any = zero.shard(deepcopy(BASE), stage, comm=comm, options=options)
        optimizer = way(module, OPTIMIZERS[kind])
        state = optimizer.full_state_dict()
        flat = {f"master {index}": each for index, each in state.get("master", {}).items()}
        for index, entry in state["state"].items():
            flat.update({f"{index} {k}": torch.as_tensor(v) for k, v in entry.items()})
        return {**zero.full_state_dict(module), **flat}

    wanted = worlds(2).run(lambda comm: work(comm, there_from_the_start))[0]
    for found in worlds(2).run(lambda comm: work(comm, joins_late)):
        assert_same_bits(found, wanted)
    assert any(name.endswith("step") for name in wanted) or kind == "momentum"


@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_has_the_groups(worlds, stage, tmp_path):
    """Checkpoints of a part and of a grown optimizer load into optimizers of the same groups."""

    def made(comm, grows):
        module: Any = zero.shard(deepcopy(BASE), stage, comm=comm)
        freeze(module, True)
        optimizer = AdamW(early(module), lr=0.1)
        turn(module, optimizer, 0)
        if grows:
            freeze(module, False)
            optimizer.add_param_group({"params": late(module), "lr": 0.2})
            turn(module, optimizer, 1)
        return module, optimizer

    def work(comm, grows):
        folder = tmp_path / str(grows)
        module, optimizer = made(comm, grows)
        zero.save(folder, 1, module, optimizer)
        shard = deepcopy(optimizer.state_dict())
        turn(module, optimizer, 2)
        other, loaded = made(comm, grows)
        zero.load(folder, other, loaded)
        turn(other, loaded, 2)
        assert_same_bits(zero.full_state_dict(other), zero.full_state_dict(module))
        loaded.load_state_dict(shard)
        assert loaded.param_groups[-1]["lr"] == (0.2 if grows else 0.1)
        return shard

    for grows in (False, True):
        shards = worlds(2).run(work, grows)
        if stage:
            assert len(reshard(shards, 3)) == 3


@covering(strength=1, world_size=[1, 2], master=["fp32", "remainder"])
def test_an_optimizer_of_unsharded_parameters_grows(worlds, world_size, master):
    """Added parameters get new buckets, which take rank 0's values."""

    def work(comm, at):
        net: Any = deepcopy(BASE).bfloat16()
        options = AdamWOptions(master=master)
        optimizer = AdamW(early(net), lr=0.1, comm=comm, options=options)
        if at:
            optimizer.prepare()
            freeze(net, True)
        for number in range(5):
            if number == 2:
                freeze(net, False)
            if number == at:
                with torch.no_grad():
                    net[0].bias.add_(comm.rank)
                optimizer.add_param_group({"params": late(net), "lr": 0.2})
                optimizer.prepare()
                freeze(net, number < 2)
            turn(net, optimizer, number)
        return dict(net.state_dict())

    wanted = worlds(world_size).run(work, 0)[0]
    for found in worlds(world_size).run(work, 2):
        assert_same_bits(found, wanted)


def test_sums_of_gradients_grow():
    net: Any = deepcopy(BASE)
    options = AdamWOptions(accumulate_dtype=torch.float32)
    optimizer = AdamW(early(net), lr=0.1, options=options)
    freeze(net, True)
    turn(net, optimizer, 0)
    freeze(net, False)
    optimizer.add_param_group({"params": late(net)})
    before = net[0].weight.clone()
    turn(net, optimizer, 1)
    assert net[0].weight.grad is None and not torch.equal(net[0].weight, before)


@covering(strength=1, stage=STAGES, kind=["adamw", "momentum"])
def test_groups_that_cannot_be_added_change_nothing(worlds, stage, kind):
    """If one rank's group is invalid, no rank adds it."""

    def work(comm):
        module: Any = zero.shard(deepcopy(BASE), stage, comm=comm)
        freeze(module, True)
        optimizer = OPTIMIZERS[kind](early(module))
        turn(module, optimizer, 0)
        freeze(module, False)
        given = late(module) if comm.rank else [nn.Parameter(torch.ones(3))]
        with pytest.raises(
            ArgumentError, match=r"is not a parameter of the sharded|failed, so no rank"
        ):
            optimizer.add_param_group({"params": given})
        for other in ("lr", "weight_decay"):
            said = rf"^optimizer.add_param_group on rank . of 2: .*{other}"
            with pytest.raises(MismatchError, match=said):
                optimizer.add_param_group({"params": late(module), other: 0.1 + comm.rank})
        if kind == "momentum":  # torch's class checks the value only in its constructor
            with pytest.raises(MismatchError, match='"lr": -1'):
                optimizer.add_param_group({"params": late(module), "lr": -1 if comm.rank else 0.1})
        assert len(optimizer.param_groups) == 1
        optimizer.add_param_group({"params": late(module)})
        turn(module, optimizer, 1)

    worlds(2).run(work)


@pytest.mark.parametrize("stage", STAGES)
def test_what_was_unfrozen_at_once_is_added_by_several_groups(worlds, stage):
    """A step before all are added is refused and changes nothing: some would stay untrained."""

    def work(comm, at_once):
        module: Any = zero.shard(deepcopy(BASE), stage, comm=comm)
        freeze(module, True)
        optimizer = AdamW(early(module), lr=0.1)
        turn(module, optimizer, 0)
        freeze(module, False)
        first, *rest = late(module)
        if at_once:
            optimizer.add_param_group({"params": [first, *rest]})
        else:
            before = zero.full_state_dict(module)
            said = r"is in none of the optimizer's groups.* add_param_group\(\)"
            with pytest.raises(ArgumentError, match=rf"0\.weight: {said}"):
                turn(module, optimizer, 1)
            optimizer.add_param_group({"params": [first]})
            with pytest.raises(ArgumentError, match=said):
                turn(module, optimizer, 1)
            assert_same_bits(zero.full_state_dict(module), before)
            module.zero_grad()
            optimizer.add_param_group({"params": rest})
        turn(module, optimizer, 1)
        return zero.full_state_dict(module)

    ranks = worlds(2)
    assert_same_bits(ranks.run(work, False)[1], ranks.run(work, True)[0])


@covering(strength=1, stage=STAGES, kind=[torch.optim.SGD, AdamW])
def test_what_was_frozen_at_shard_is_in_no_bucket(worlds, stage, kind):
    """A parameter frozen at shard() has no bucket: a step that would skip it is refused."""

    def work(comm):
        module: Any = deepcopy(BASE)
        freeze(module, True)
        zero.shard(module, stage, comm=comm)
        optimizer = AdamW(early(module), lr=0.1)
        turn(module, optimizer, 0)
        module[0].requires_grad_()
        other = kind(module[0].parameters(), lr=0.1)
        module(torch.ones(2, 20)).sum().backward()
        for each in (optimizer, other):
            with pytest.raises(ArgumentError, match=r"0\.weight was frozen when shard\(\).*again"):
                each.step()

    worlds(1).run(work)


@pytest.mark.parametrize("stage", STAGES)
def test_hooks_and_gradients_of_a_part(worlds, stage):
    """Hooks and gradients name the right parameter, whatever others share its bucket."""

    def work(comm):
        module: Any = zero.shard(deepcopy(BASE), stage, comm=comm)
        freeze(module, True)
        optimizer = AdamW(early(module), lr=0.1)
        optimizer.prepare()
        seen = set()
        handle = zero.on_reduced(module, lambda name, piece, begin: seen.add(name))
        turn(module, optimizer, 0)
        handle.remove()
        params = dict(module.named_parameters())
        zero.set_gradient(params["1.bias"], torch.ones(20))
        assert bool((zero.get_gradient(params["1.bias"]) == 1).all())
        with pytest.raises(ArgumentError, match=r"1\.weight.*in none of its optimizer's groups"):
            zero.get_gradient(params["1.weight"])
        return seen

    names = {name for name, p in BASE.named_parameters() if name not in ("0.weight", "0.bias")}
    assert set.union(*worlds(2).run(work)) == names - {"1.weight"}
