# SPDX-License-Identifier: Apache-2.0
"""Invalid arguments are refused before any change, with an error that gives a remedy."""

from __future__ import annotations

import pickle
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from ringcomm import zero
from ringcomm.errors import ArgumentError, MismatchError, UnsupportedError
from ringcomm.optim import AdamW, AdamWOptions
from tests.support.covering import in_test_all
from tests.zero.models import SMALL_BUCKET_ELEMS, new_model

SMALL = zero.ZeroOptions(bucket_elems=SMALL_BUCKET_ELEMS)
STAGES = [0, 3, *in_test_all(1, 2)]


def test_a_stage_that_is_none():
    stages: list[Any] = [-1, 4, "2", 1.0, 2**70, None]
    for stage in stages:
        with pytest.raises(ArgumentError, match="stage: expected 0, 1, 2 or 3"):
            zero.shard(nn.Linear(2, 2), stage)


def test_modules_that_cannot_be_sharded():
    inner = zero.shard(nn.Linear(2, 2), 1, comm="alone")
    modules: list[tuple[Any, str]] = [
        (torch.ones(3), "expected a torch"),
        (nn.ReLU(), "at least one parameter"),
        (inner, "sharded already"),
        (nn.Sequential(inner), "sharded already"),
        (nn.Linear(2, 2).double(), r"weight.*float64"),
    ]
    for module, said in modules:
        with pytest.raises(ArgumentError, match=said):
            zero.shard(module, 1, comm="alone")


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_with_different_models_learn_which_parameter_differs(worlds, stage):
    def work(comm):
        width = 8 if comm.rank != 2 else 9
        module: Any = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, width))
        untouched = module[0].weight.detach().clone()
        with pytest.raises(MismatchError, match=r"Parameter 2 is '1\.weight'.*rank 0.*rank 2"):
            zero.shard(module, stage, comm=comm)
        assert torch.equal(module[0].weight, untouched)
        return True

    assert all(worlds(3).run(work))


def test_ranks_with_different_options_or_stages(worlds):
    def work(comm):
        with pytest.raises(MismatchError, match=r"Option stage is 1 on rank 0 and 2 on rank 1"):
            zero.shard(nn.Linear(4, 4), 1 + comm.rank, comm=comm)
        options = zero.ZeroOptions(bucket_elems=512 * (1 + comm.rank))
        with pytest.raises(MismatchError, match="bucket_elems"):
            zero.shard(nn.Linear(4, 4), 1, comm=comm, options=options)

    worlds(2).run(work)


BAD_ON_RANK_1: dict[str, Any] = {
    "stage": lambda module: (module, 4),
    "no module": lambda module: ("module", 1),
    "sharded": lambda module: (zero.shard(module, 1, comm="alone"), 1),
    "dtype": lambda module: (module.to(torch.float64), 1),
    "keep_fp32": lambda module: (module, 1, zero.Precision(torch.bfloat16, keep_fp32=("other",))),
    "per_unit": lambda module: (module, 1, zero.Precision(), {"other": zero.UnitOptions()}),
}


def test_what_is_bad_on_one_rank_is_refused_on_all(worlds):
    def shard(comm, module, stage, precision=None, per_unit=None):
        options = zero.ZeroOptions(precision=precision or zero.Precision(), per_unit=per_unit or {})
        return zero.shard(module, stage, comm=comm, options=options)

    def work(comm):
        for name, bad in BAD_ON_RANK_1.items():
            module: Any = nn.Sequential(nn.Linear(4, 4))
            mine = bad(module) if comm.rank == 1 else (module, 1)
            match = "shard" if comm.rank == 1 else "shard on rank 0 of 2: rank 1 of 2 failed"
            with pytest.raises(ArgumentError, match=match):
                shard(comm, *mine)
                pytest.fail(name)
            shard(comm, nn.Linear(4, 4), 1)

    worlds(2).run(work)


def test_parameters_moved_behind_the_engines_back():
    for stage in range(4):
        module: Any = zero.shard(nn.Sequential(nn.Linear(4, 4)), stage, comm="alone")
        optimizer = AdamW(module.parameters())
        optimizer.prepare()
        module[0].bias.data = torch.zeros(4)
        with pytest.raises(ArgumentError, match=r"bias.*memory was replaced"):
            module(torch.ones(2, 4)).sum().backward()
            optimizer.step()


def test_an_optimizer_on_other_parameters():
    module: Any = zero.shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 2, comm="alone")
    with pytest.raises(ArgumentError, match=r"2 are missing, the first is '1\.weight'"):
        AdamW(module[0].parameters()).prepare()
    extra = nn.Parameter(torch.ones(3))
    with pytest.raises(
        ArgumentError, match="parameter 4: is not a parameter of the sharded module"
    ):
        AdamW([*module.parameters(), extra]).prepare()
    other = zero.shard(nn.Linear(2, 2), 2, comm="alone")
    with pytest.raises(ArgumentError, match="one sharded module, got those of 2"):
        AdamW([*module.parameters(), *other.parameters()]).prepare()


def test_two_optimizers_on_one_module():
    module = zero.shard(nn.Linear(4, 4), 2, comm="alone")
    first = AdamW(module.parameters())
    first.prepare()
    with pytest.raises(ArgumentError, match="another optimizer"):
        AdamW(module.parameters()).prepare()
    del first
    AdamW(module.parameters()).prepare()


def test_an_optimizer_over_other_ranks(worlds):
    def work(comm):
        module = zero.shard(nn.Linear(4, 4), 2, comm=comm)
        others = comm.new_group([0, 1], name="others")
        with pytest.raises(ArgumentError, match="another communicator"):
            AdamW(module.parameters(), comm=others)

    worlds(2).run(work)


def test_options_that_shard_decides():
    module = zero.shard(nn.Linear(4, 4), 2, comm="alone")
    for options, error in (
        (AdamWOptions(bucket_elems=1024), ArgumentError),
        (AdamWOptions(reduce="sum"), ArgumentError),
        (AdamWOptions(algorithm="ring"), ArgumentError),
        (AdamWOptions(kernels="triton"), UnsupportedError),
    ):
        with pytest.raises(error):
            AdamW(module.parameters(), options=options).prepare()


def test_options_out_of_range():
    bad: list[tuple[Any, dict[str, Any]]] = [
        (zero.ZeroOptions, {"bucket_elems": 100}),
        (zero.ZeroOptions, {"reduce": "max"}),
        (zero.ZeroOptions, {"algorithm": "tree"}),
        (zero.ZeroOptions, {"in_flight": 0}),
        (zero.ZeroOptions, {"prefetch": -1}),
        (zero.ZeroOptions, {"overlap": "no"}),
        (zero.ZeroOptions, {"overlap": 1}),
        (zero.ZeroOptions, {"reshard_after_forward": "no"}),
        (zero.ZeroOptions, {"broadcast": None}),
        (zero.ZeroOptions, {"precision": "bf16"}),
        (zero.Precision, {"param": torch.int8}),
        (zero.Precision, {"param": torch.bfloat16, "reduce": torch.float16}),
        (zero.Precision, {"reduce": torch.bfloat16}),
    ]
    for make, options in bad:
        with pytest.raises(ArgumentError, match="expected"):
            make(**options)
            pytest.fail(str(options))


def test_units_that_are_no_rule():
    rules: list[Any] = [(), "blocks", (nn.Linear(2, 2),), nn.Linear, (nn.Conv2d,)]
    for rule in rules:
        with pytest.raises(ArgumentError, match="units: expected types of modules"):
            zero.shard(nn.Linear(2, 2), 3, comm="alone", options=zero.ZeroOptions(units=rule))


def test_what_is_not_sharded():
    reference = nn.Linear(2, 2)
    calls = (
        zero.no_sync,
        zero.remove_sharding,
        zero.full_state_dict,
        lambda m: zero.unsharded(m).__enter__(),
    )
    for call in calls:
        with pytest.raises(ArgumentError, match="was not sharded"):
            call(reference)


def test_copies_and_pickles():
    for stage in range(4):
        module = zero.shard(nn.Linear(4, 4), stage, comm="alone")
        for copies in (deepcopy, pickle.dumps):
            with pytest.raises(UnsupportedError, match="cannot be copied"):
                copies(module)


def test_state_dicts_and_steps_at_stage_3():
    module = zero.shard(new_model("mlp"), 3, comm="alone", options=SMALL)
    with pytest.raises(ArgumentError, match="only inside unsharded"):
        module.state_dict()
    with pytest.raises(ArgumentError, match="only inside unsharded"):
        module.load_state_dict({})
    with zero.unsharded(module, write_from=0):
        module.load_state_dict(module.state_dict())
    optimizer = AdamW(module.parameters())
    module(torch.ones(1, 13)).backward()
    with zero.unsharded(module), pytest.raises(ArgumentError, match="inside unsharded"):
        optimizer.step()
    with pytest.raises(ArgumentError, match="write_from: expected a rank, 0 to 0, got 1"):
        zero.unsharded(module, write_from=1).__enter__()
