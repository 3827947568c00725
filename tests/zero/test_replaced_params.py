# SPDX-License-Identifier: Apache-2.0
"""NOTE [Replaced parameters]: a new tensor in a parameter's place in its module is noticed."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import ringcomm
from ringcomm import zero
from ringcomm.errors import ArgumentError, UnsupportedError
from ringcomm.optim import AdamW, AdamWOptions
from tests.support.covering import covering, in_test_all
from tests.zero.models import assert_same_bits

Tensor = torch.Tensor
STAGES = [1, 3, *in_test_all(0, 2)]
SMALL = zero.ZeroOptions(bucket_elems=512)
BF16 = zero.ZeroOptions(bucket_elems=512, precision=zero.Precision(param=torch.bfloat16))


def new() -> Any:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def step(module: nn.Module, optimizer: AdamW) -> None:
    module(torch.ones(2, 4)).float().square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def inside(module: nn.Module, stage: int) -> Any:
    """Returns the context in which a module may be loaded at this stage."""
    return zero.unsharded(module, write_from=0) if stage == 3 else nullcontext()


@pytest.mark.parametrize("options", [SMALL, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("stage", STAGES)
def test_assigned_values_are_taken_over(worlds, stage, options):
    """The same parameter objects keep training from the new values, as after a load in place."""
    base = new()
    state = {name: value + 1.0 for name, value in base.state_dict().items()}

    def work(comm, assign):
        module: Any = zero.shard(deepcopy(base), stage, comm=comm, options=options)
        before = list(module.parameters())
        optimizer = AdamW(module.parameters(), lr=1e-2)
        step(module, optimizer)
        with inside(module, stage):
            module.load_state_dict(deepcopy(state), assign=assign)
        assert all(a is b for a, b in zip(before, module.parameters(), strict=True))
        loaded = zero.full_state_dict(module)
        wanted = {name: value.to(loaded[name].dtype) for name, value in state.items()}
        assert_same_bits(loaded, wanted)
        step(module, optimizer)
        return zero.full_state_dict(module)

    wanted = worlds(2).run(work, False)[0]
    for found in worlds(2).run(work, True):
        assert_same_bits(found, wanted)


def test_a_part_that_is_loaded_by_assignment(worlds):
    def work(comm):
        module: Any = zero.shard(new(), 2, comm=comm)
        weight = module[2].weight
        module[2].load_state_dict({"weight": torch.ones(4, 4), "bias": torch.ones(4)}, assign=True)
        assert module[2].weight is weight
        assert torch.equal(weight, torch.ones(4, 4))

    worlds(1).run(work)


def _parameter(module: Any) -> None:
    module[2].weight = nn.Parameter(torch.ones(4, 4))


def _module(module: Any) -> None:
    module[2] = nn.Linear(4, 4)


def _tie(module: Any) -> None:
    module[2].weight = module[0].weight


def _untie(module: Any) -> None:
    module[2].bias = nn.Parameter(torch.ones(4))


def _parametrize(module: Any) -> None:
    parametrizations.weight_norm(module[2])


def _constant(module: Any) -> None:
    del module[2].weight
    module[2].weight = torch.ones(4, 4)


REPLACED: dict[str, Callable[[Any], None]] = {
    "parameter": _parameter,
    "module": _module,
    "tied": _tie,
    "untied": _untie,
    "parametrized": _parametrize,
    "constant": _constant,
}


@covering(strength=1, stage=STAGES, kind=[*REPLACED])
def test_what_nobody_would_train_is_refused_at_the_step(worlds, stage, kind):
    def work(comm):
        module = new()
        module[2].bias = module[0].bias
        zero.shard(module, stage, comm=comm, options=SMALL)
        optimizer = AdamW(module.parameters(), lr=1e-2)
        step(module, optimizer)
        REPLACED[kind](module)
        with pytest.raises(ArgumentError, match=r"parameter 2\.\w+: another tensor .* in place"):
            step(module, optimizer)

    worlds(1).run(work)


@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_that_add_up_in_fp32_do_not_hide_it(worlds, stage):
    def work(comm):
        module: Any = zero.shard(new(), stage, comm=comm, options=BF16)
        options = AdamWOptions(accumulate_dtype=torch.float32)
        optimizer = AdamW(module.parameters(), lr=1e-2, options=options)
        _parameter(module)
        module[2].weight.data = module[2].weight.data.bfloat16()
        with pytest.raises(ArgumentError, match=r"parameter 2\.weight: another tensor"):
            step(module, optimizer)

    worlds(1).run(work)


@pytest.mark.parametrize("stage", [1, 3])
def test_checkpoints_and_changes_refuse_it_on_all_ranks(worlds, stage, tmp_path):
    def work(comm):
        module: Any = zero.shard(new(), stage, comm=comm, options=SMALL)
        zero.save(tmp_path, 1, module)
        kept = module[2].weight
        if comm.rank == 1:
            _parameter(module)
        with pytest.raises(ArgumentError, match=r"parameter 2\.weight: another tensor"):
            zero.save(tmp_path, 2, module)
        with pytest.raises(ArgumentError, match=r"parameter 2\.weight: another tensor"):
            zero.load(tmp_path, module)
        with pytest.raises(ArgumentError, match=r"parameter 2\.weight: another tensor"):  # noqa: SIM117
            with zero.unsharded(module, write_from=0):
                pass
        module[2].weight = kept
        zero.load(tmp_path, module)

    worlds(2).run(work)


@pytest.mark.parametrize("stage", STAGES)
def test_what_moves_to_another_name_or_goes_is_no_replacement(worlds, stage):
    """Pruning moves a parameter to ``weight_orig``, and users may drop a head: both are allowed."""

    def work(comm):
        module: Any = zero.shard(new(), stage, comm=comm, options=SMALL)
        optimizer = AdamW(module.parameters(), lr=1e-2)
        step(module, optimizer)
        prune.l1_unstructured(module[0], "weight", amount=4)
        step(module, optimizer)
        module[2] = nn.Identity()
        step(module, optimizer)
        with zero.unsharded(module):
            return module[0].weight_orig.detach().clone(), module[0].weight_mask

    untouched = new()
    reference = AdamW(untouched.parameters(), lr=1e-2)
    step(untouched, reference)
    prune.l1_unstructured(untouched[0], "weight", amount=4)
    step(untouched, reference)
    untouched[2] = nn.Identity()
    step(untouched, reference)
    for weight, mask in worlds(1).run(work):
        assert torch.equal(mask, untouched[0].weight_mask)
        assert torch.equal(weight, untouched[0].weight_orig)


RESHAPES: dict[str, Callable[[Any], Any]] = {
    "more rows": lambda m: setattr(m[0].weight, "data", torch.ones(12, 4)),
    "fewer rows": lambda m: setattr(m[0].weight, "data", torch.ones(6, 4)),
    "one row": lambda m: setattr(m[0].weight, "data", torch.ones(1, 4)),
    "as before": lambda m: setattr(m[0].weight, "data", torch.ones(8, 4)),
}


@covering(strength=1, kind=[*RESHAPES], stage=STAGES)
def test_memory_of_another_shape(stage, kind, tmp_path):
    """New memory, as from resize_token_embeddings(), is refused by name, in training and saves."""

    def work(comm):
        module: Any = zero.shard(nn.Sequential(nn.Embedding(8, 4)), stage, comm=comm)
        optimizer = AdamW(module.parameters(), lr=1e-2)
        step_rows(module, optimizer)
        if stage == 3:
            module(torch.zeros(1, dtype=torch.int64))
        RESHAPES[kind](module)
        if stage < 3:
            with pytest.raises(ArgumentError, match=r"parameter 0\.weight: its memory was replac"):
                zero.save(tmp_path, 1, module)
        with pytest.raises(ArgumentError, match=r"0\.weight.*(expected|memory was replaced)"):
            step_rows(module, optimizer)

    # A new world: a backward that fails leaves reductions that the communicator must make up.
    with ringcomm.local_world(2, timeout=30) as world:
        world.run(work)


def step_rows(module: nn.Module, optimizer: AdamW) -> None:
    module(torch.zeros(2, dtype=torch.int64)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("stage", STAGES)
def test_a_buffer_in_the_place_of_a_parameter(worlds, stage):
    def work(comm):
        module: Any = zero.shard(new(), stage, comm=comm)
        optimizer = AdamW(module.parameters(), lr=1e-2)
        step(module, optimizer)
        del module[0].weight
        module[0].register_buffer("weight", torch.ones(4, 4))
        with pytest.raises(ArgumentError, match=r"parameter 0\.weight: another tensor has repl"):
            step(module, optimizer)

    worlds(2).run(work)


@pytest.mark.parametrize("stage", STAGES)
def test_safetensors_and_torch_save_what_a_state_has(worlds, stage, tmp_path):
    """Each saved value is a tensor by itself; writing to it still writes to the parameter."""

    def work(comm):
        file = tmp_path / f"{comm.rank}.safetensors"
        base = new()
        base[2].weight = base[0].weight
        module: Any = zero.shard(base, stage, comm=comm)
        optimizer = AdamW(module.parameters(), lr=1e-2)
        step(module, optimizer)
        saved = zero.full_state_dict(module)
        with zero.unsharded(module):
            safetensors.torch.save_model(module, str(file))
            state = module.state_dict()
            one = io.BytesIO()
            torch.save(module[2].bias.detach(), whole := io.BytesIO())
            torch.save(state["2.bias"], one)
            assert len(one.getvalue()) <= len(whole.getvalue())
            version = module[0].weight._version
            assert state["0.weight"]._version == version
        assert_same_bits({name: value.clone() for name, value in state.items()}, saved)
        other = new()
        other[2].weight = other[0].weight
        zero.shard(other, stage, comm=comm)
        with zero.unsharded(other, write_from=0):
            assert not any(safetensors.torch.load_model(other, str(file)))
        assert_same_bits(zero.full_state_dict(other), saved)
        step(module, optimizer)

    worlds(2).run(work)


def _data(module: Any) -> None:
    module[2].weight.data = torch.ones(4, 4)


def _set(module: Any) -> None:
    with torch.no_grad():
        module[2].weight.set_(torch.ones(4, 4))


def _vector(module: Any) -> None:
    count = sum(param.numel() for param in module[2].parameters())
    nn.utils.vector_to_parameters(torch.ones(count), module[2].parameters())


MOVES: dict[str, Callable[[Any], None]] = {"data": _data, "set_": _set, "vector": _vector}


@pytest.mark.parametrize(
    ("kind", "stage"),
    # At stage 3 vector_to_parameters() reads resharded parameters, which raises another error.
    [(kind, stage) for kind in MOVES for stage in STAGES if (kind, stage) != ("vector", 3)],
)
def test_memory_replaced_before_the_optimizer_is_built(kind, stage):
    """The optimizer would step the old memory: all ranks refuse, whichever rank replaced it."""

    def work(comm, everywhere):
        module: Any = zero.shard(new(), stage, comm=comm, options=SMALL)
        if everywhere or comm.rank == 1:
            MOVES[kind](module)
        optimizer = AdamW(module.parameters(), lr=1e-2)
        with pytest.raises(ArgumentError, match=r"parameter 2\.weight: its memory was replaced"):
            step(module, optimizer)

    # At stages 2 and 3 a backward refuses the new memory, but only on that rank.
    for everywhere in (True, False) if stage < 2 else (True,):
        with ringcomm.local_world(2, timeout=30) as world:
            world.run(work, everywhere)


@pytest.mark.parametrize("compile", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(4))])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_module_of_torchscript_in_the_place_of_a_module(worlds, stage, compile):
    def work(comm):
        module: Any = zero.shard(new(), stage, comm=comm)
        optimizer = AdamW(module.parameters(), lr=1e-2)
        step(module, optimizer)
        module[2] = torch.jit.script(nn.Linear(4, 4)) if stage == 3 else compile(module[2])
        with pytest.raises(UnsupportedError, match=r"parameter 2\.weight: a \w+ of TorchScript"):
            step(module, optimizer)

    worlds(1).run(work)


@pytest.mark.parametrize("stage", STAGES)
def test_a_module_of_torchscript_without_parameters(worlds, stage):
    def work(comm):
        module: Any = zero.shard(new(), stage, comm=comm)
        optimizer = AdamW(module.parameters(), lr=1e-2)
        module[1] = torch.jit.script(nn.Sequential(nn.Tanh()))
        step(module, optimizer)
        step(module, optimizer)

    worlds(1).run(work)
