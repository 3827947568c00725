# SPDX-License-Identifier: Apache-2.0
"""Reading, writing, rebuilding and releasing parameters outside of the training loop."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

import ringcomm
from ringcomm import zero
from ringcomm.errors import ArgumentError, MismatchError, RingcommError
from ringcomm.optim import AdamW
from ringcomm.optim.dtensors import without_torch_function
from ringcomm.zero.stages.resharded import Resharded
from tests.support.covering import covering, in_test_all
from tests.support.heap_use import settled_heap_bytes
from tests.zero.job import BF16
from tests.zero.models import SMALL_BUCKET_ELEMS, assert_same_bits, new_model, text

Tensor = torch.Tensor
STAGES = [1, 3, *in_test_all(0, 2)]
SMALL = zero.ZeroOptions(bucket_elems=SMALL_BUCKET_ELEMS)


def test_one_rank_evaluates_and_reads_alone(worlds):
    """One rank can run a forward and read parameters alone: unsharding needs no other rank."""
    base = new_model("gpt")

    def work(comm):
        module: Any = zero.shard(deepcopy(base), 3, comm=comm, options=SMALL)
        if comm.rank == 1:
            with torch.no_grad():
                loss = module(*text(comm, 0)).item()
            with zero.unsharded(module):
                assert torch.equal(module.embed.weight, base.embed.weight)
                assert not any(isinstance(param, Resharded) for param in module.parameters())
            assert all(isinstance(param, Resharded) for param in module.parameters())
            assert module.blocks[0].mlp.expand.weight.numel() == 32 * 128
            comm.barrier()
            return loss
        comm.barrier()
        return None

    with torch.no_grad():
        wanted = base(*text(worlds(2)[1], 0)).item()
    assert worlds(2).run(work) == [None, wanted]


def test_a_change_without_write_from_is_refused_at_stage_3(worlds):
    def work(comm):
        module: Any = zero.shard(deepcopy(base), 3, comm=comm, options=SMALL)
        with pytest.raises(ArgumentError, match=r"embed\.weight.*changed in place.*write_from"):  # noqa: SIM117
            with zero.unsharded(module), torch.no_grad():
                module.head.weight.zero_()  # tied to embed.weight
        hidden = next(module.blocks[1].mlp.expand.parameters())
        # Write as code below Python would: torch refuses to write to the placeholder.
        with (
            without_torch_function(),
            torch.no_grad(),
            pytest.raises(RuntimeError, match="invalid"),
        ):
            hidden.zero_()
        module(*text(comm, 0))

    base = new_model("gpt")
    worlds(1).run(work)


@pytest.mark.parametrize("stage", STAGES)
def test_a_model_on_the_meta_device_is_built_in_shards(worlds, stage):
    from ringcomm.examples.train_gpt import GPT, ModelConfig, rotary_angles

    def fill(module):
        if isinstance(module, GPT):
            module.cos, module.sin = rotary_angles(16, 16)
        for param in module._parameters.values():
            if param is not None:
                nn.init.constant_(param, 0.01 * param.shape[0])

    def work(comm):
        with torch.device("meta"):
            module = GPT(ModelConfig(32, 3, 2, 16, True))
        zero.shard(module, stage, comm=comm, options=SMALL, init=fill)
        assert module.head.weight is module.embed.weight
        optimizer = AdamW(module.parameters(), lr=1e-3)
        module(*text(comm, 0)).backward()
        optimizer.step()
        return zero.full_state_dict(module)

    first, second = worlds(2).run(work)
    assert_same_bits(first, second)
    assert set(first["blocks.0.mlp.expand.weight"].unique().tolist()) != {1.28}
    assert (first["blocks.0.mlp.expand.weight"] - 1.28).abs().max() < 2e-3 + 1.28e-5


def test_a_meta_module_without_a_way_to_fill_it(worlds):
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

    def work(comm):
        with torch.device("meta"):
            module = nn.Sequential(nn.Linear(3, 3), Own())
        with pytest.raises(ArgumentError, match=r"module '1'.*reset_parameters.*init="):
            zero.shard(module, 3, comm=comm)

    worlds(1).run(work)


@pytest.mark.parametrize("stage", STAGES)
def test_modules_are_whole_again_when_their_sharding_is_removed(worlds, stage):
    base = new_model("gpt")

    def work(comm):
        module: Any = zero.shard(deepcopy(base), stage, comm=comm, options=SMALL)
        optimizer = AdamW(module.parameters(), lr=1e-2)
        module(*text(comm, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        trained = zero.full_state_dict(module)
        zero.remove_sharding(module)
        del optimizer
        assert_same_bits(dict(module.state_dict()), trained)
        hooks = ("_forward_hooks", "_forward_pre_hooks")
        assert not any(getattr(each, name) for each in module.modules() for name in hooks)
        assert all(type(each._parameters) is dict for each in module.modules())
        sgd = torch.optim.SGD(module.parameters(), lr=0.1)
        module(*text(comm, 1)).backward()
        sgd.step()
        again = zero.shard(module, 3, comm=comm, options=SMALL)
        again(*text(comm, 1)).backward()
        copied = deepcopy(zero.remove_sharding(again))
        assert_same_bits(dict(copied.state_dict()), dict(again.state_dict()))

    worlds(2).run(work)


@covering(strength=1, stage=STAGES, freezes=[False, True])
def test_a_dropped_module_gives_everything_back(worlds, stage, freezes):
    """A module dropped after a step frees all heap memory, also with units that are part frozen."""

    def work(comm):
        comm.barrier()
        module: Any = zero.shard(deepcopy(base), stage, comm=comm, options=SMALL)
        optimizer = AdamW(module.parameters(), lr=1e-2)
        module(*text(comm, 0)).backward()
        optimizer.step()
        seen = weakref.ref(module)
        del module, optimizer
        return seen

    base = new_model("gpt")
    for param in list(base.parameters())[1::2] if freezes else ():
        param.requires_grad_(False)
    worlds(2).run(work)
    used = settled_heap_bytes()
    seen = worlds(2).run(work)
    gc.collect()
    assert [each() for each in seen] == [None, None]
    assert ringcomm.heap_stats()["used_bytes"] == used


def _fill(module: Any) -> None:
    module[2].weight.data.fill_(7.0)


def _fill_by_numpy(module: Any) -> None:
    module[2].weight.detach().numpy()[:] = 7.0


def _initialise(module: Any) -> None:
    module.apply(lambda each: hasattr(each, "weight") and each.weight.data.zero_())


@covering(write=[_fill, _fill_by_numpy, _initialise], inside=[False, True], strength=1)
def test_writes_below_autograd_are_found_and_undone(worlds, write, inside):
    """Writes through ``.data`` and NumPy bypass version counters and chunks; they are undone."""

    def work(comm):
        torch.manual_seed(2)
        module: Any = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        module.requires_grad_(True)
        zero.shard(module, 3, comm=comm, options=zero.ZeroOptions(bucket_elems=512))
        before, output = zero.full_state_dict(module), module(torch.ones(1, 8)).detach()
        with pytest.raises(ArgumentError, match=r"parameter [02].weight was changed in place"):
            with zero.unsharded(module) if inside else nullcontext():
                write(module)
            module(torch.ones(1, 8))
        assert torch.equal(module(torch.ones(1, 8)), output)
        after = zero.full_state_dict(module)
        assert_same_bits(after, before)
        comm.barrier()

    worlds(2).run(work)


def unlooked(module: Any) -> dict[str, Tensor]:
    """Returns the parameters without attribute access, which would unshard them."""
    return dict(module.named_parameters())


@pytest.mark.parametrize("stage", STAGES)
def test_what_one_rank_raises_inside_is_raised_on_all(worlds, stage):
    def work(comm):
        module: Any = zero.shard(nn.Linear(8, 8), stage, comm=comm, options=SMALL)
        optimizer = AdamW(module.parameters())
        before = zero.full_state_dict(module)
        failed = pytest.raises(ZeroDivisionError if comm.rank == 1 else RingcommError, match="zero")
        with failed, zero.unsharded(module, write_from=0):
            if stage == 3 and comm.rank == 0:
                module.weight.data.zero_()
            assert 1 / (comm.rank - 1) != 0
        bad = ((7 if comm.rank else 0, "expected a rank"), (comm.rank, "write_from"))
        for mine, message in bad:
            context = zero.unsharded(module, write_from=mine)
            with pytest.raises((ArgumentError, MismatchError), match=message), context:
                pass
        assert_same_bits(zero.full_state_dict(module), before)
        module(torch.ones(2, 8)).sum().backward()
        optimizer.step()

    worlds(2).run(work)


@covering(
    part=["all", "module", "parameters", "parameter", "frozen"], stage=STAGES, write_from=[None, 1]
)
def test_a_part_is_unsharded_and_written_alone(worlds, stage, part, write_from):
    """Masters of other parameters keep the bits that rounding drops, unless all is unsharded."""
    names = {
        "all": ["blocks.1.mlp.expand.weight", "embed.weight"],
        "module": [n for n, _ in new_model("gpt").named_parameters() if n.startswith("blocks.1.")],
        "parameters": ["blocks.1.mlp.expand.weight", "embed.weight"],
        "parameter": ["blocks.1.mlp.expand.weight"],
        "frozen": ["blocks.1.mlp.contract.weight"],
    }[part]
    base: Any = new_model("gpt")
    base.get_parameter("blocks.1.mlp.contract.weight").requires_grad_(False)
    bf16 = zero.ZeroOptions(precision=BF16)

    def work(comm):
        module: Any = zero.shard(deepcopy(base), stage, comm=comm, options=bf16)
        optimizer = AdamW(module.parameters(), lr=1e-2)
        module(*text(comm, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        params = unlooked(module)
        wanted = zero.full_state_dict(module)
        masters = {n: zero.get_master(p) for n, p in params.items() if p.requires_grad}
        given = [params[name] for name in names]
        whole = {"all": module, "module": module.get_submodule("blocks.1"), "parameter": given[0]}
        target: Any = whole.get(part, given)
        if write_from is None and comm.rank == 1:
            comm.barrier()
            return
        with zero.unsharded(target, write_from=write_from), torch.no_grad():
            for name in names:
                assert torch.equal(params[name], wanted[name])
            if stage == 3 and part != "all":
                others = [n for n in params if not n.startswith("blocks.1") and n not in names]
                outside = [n for n in others if n.startswith("blocks")]
                assert outside and all(isinstance(params[n], Resharded) for n in outside)
            if write_from == comm.rank:
                for name in names:
                    params[name].mul_(3)
        if write_from is None:
            comm.barrier()
            return
        for name in names:
            wanted[name].mul_(3)
        for name in masters if part == "all" else masters.keys() & names:
            masters[name] = wanted[name].float()
        wanted["head.weight"] = wanted["embed.weight"]  # tied
        assert_same_bits(zero.full_state_dict(module), wanted)
        for name, master in masters.items():
            assert torch.equal(zero.get_master(params[name]), master), name

    worlds(2).run(work)


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_no_part_of_a_module_is_not_unsharded(worlds, stage):
    def work(comm):
        one: Any = zero.shard(new(), stage, comm=comm, options=SMALL)
        other = zero.shard(new(), stage, comm=comm, options=SMALL)
        first, second = list(one.parameters()), list(other.parameters())
        for bad, message in (
            ([], "got none"),
            ([torch.ones(3)], "got a tensor of shape"),
            ([*first, 5], "got 5, which is not a parameter"),
            (nn.Linear(2, 2), "expected the module that shard"),
        ):
            with pytest.raises(ArgumentError, match=message):
                zero.unsharded(bad).__enter__()
        with zero.unsharded([*first, *second]):
            assert bool(first[0].isfinite().all() and second[0].isfinite().all())
        context = zero.unsharded(first[comm.rank], write_from=0)
        with pytest.raises(MismatchError, match="Option parameters is"), context:
            pass
        if stage == 3:
            changed = pytest.raises(ArgumentError, match=r"parameter 0\.bias was changed in place")
            with changed, zero.unsharded(first[0], write_from=0), torch.no_grad():
                first[1].zero_()
        zero.remove_sharding(other)
        with pytest.raises(ArgumentError, match="which is not a parameter of a sharded module"):
            zero.unsharded(second).__enter__()

    def new() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    worlds(2).run(work)
