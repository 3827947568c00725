"""Bad input is refused before anything moves, and says what to do."""

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
from tests.zero.models import SMALL_BUCKET_ELEMS, new_model

SMALL = zero.ZeroOptions(bucket_elems=SMALL_BUCKET_ELEMS)
STAGES = [0, 1, 2, 3]


def alone(worlds, work) -> Any:
    return worlds(1).run(work)[0]


@pytest.mark.parametrize("stage", [-1, 4, "2", 1.0, 2**70, None])
def test_a_stage_that_is_none(stage):
    with pytest.raises(ArgumentError, match="stage: expected 0, 1, 2 or 3"):
        zero.shard(nn.Linear(2, 2), stage)


def test_what_is_no_module():
    with pytest.raises(ArgumentError, match="expected a torch"):
        zero.shard(torch.ones(3), 2)  # type: ignore[type-var]


def test_a_module_with_no_parameter(worlds):
    def work(comm):
        with pytest.raises(ArgumentError, match="at least one parameter"):
            zero.shard(nn.ReLU(), 2, comm=comm)

    alone(worlds, work)


def test_a_module_that_is_sharded_already(worlds):
    def work(comm):
        inner = zero.shard(nn.Linear(2, 2), 1, comm=comm)
        with pytest.raises(ArgumentError, match="sharded already"):
            zero.shard(inner, 1, comm=comm)
        with pytest.raises(ArgumentError, match="sharded already"):
            zero.shard(nn.Sequential(inner), 1, comm=comm)

    alone(worlds, work)


def test_dtypes_that_no_optimizer_takes(worlds):
    def work(comm):
        with pytest.raises(ArgumentError, match=r"weight.*float64"):
            zero.shard(nn.Linear(2, 2).double(), 1, comm=comm)

    alone(worlds, work)


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


@pytest.mark.parametrize("bad", BAD_ON_RANK_1)
def test_what_is_bad_on_one_rank_is_refused_on_all(worlds, bad):
    def shard(comm, module, stage, precision=None, per_unit=None):
        options = zero.ZeroOptions(precision=precision or zero.Precision(), per_unit=per_unit or {})
        return zero.shard(module, stage, comm=comm, options=options)

    def work(comm):
        module: Any = nn.Sequential(nn.Linear(4, 4))
        mine = BAD_ON_RANK_1[bad](module) if comm.rank == 1 else (module, 1)
        match = "shard" if comm.rank == 1 else "shard on rank 0 of 2: rank 1 of 2 failed"
        with pytest.raises(ArgumentError, match=match):
            shard(comm, *mine)
        shard(comm, nn.Linear(4, 4), 1)

    worlds(2).run(work)


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_moved_behind_the_engines_back(worlds, stage):
    def work(comm):
        module: Any = zero.shard(nn.Sequential(nn.Linear(4, 4)), stage, comm=comm)
        optimizer = AdamW(module.parameters())
        optimizer.prepare()
        module[0].bias.data = torch.zeros(4)
        with pytest.raises(ArgumentError, match=r"bias.*memory was replaced"):
            module(torch.ones(2, 4)).sum().backward()
            optimizer.step()

    alone(worlds, work)


def test_an_optimizer_on_other_parameters(worlds):
    def work(comm):
        module: Any = zero.shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 2, comm=comm)
        with pytest.raises(ArgumentError, match=r"2 are missing, the first is '1\.weight'"):
            AdamW(module[0].parameters()).prepare()
        extra = nn.Parameter(torch.ones(3))
        with pytest.raises(ArgumentError, match="parameter 4: is no parameter of the module"):
            AdamW([*module.parameters(), extra]).prepare()
        other = zero.shard(nn.Linear(2, 2), 2, comm=comm)
        with pytest.raises(ArgumentError, match="one sharded module, got those of 2"):
            AdamW([*module.parameters(), *other.parameters()]).prepare()

    alone(worlds, work)


def test_two_optimizers_on_one_module(worlds):
    def work(comm):
        module = zero.shard(nn.Linear(4, 4), 2, comm=comm)
        first = AdamW(module.parameters())
        first.prepare()
        with pytest.raises(ArgumentError, match="another optimizer"):
            AdamW(module.parameters()).prepare()
        del first
        AdamW(module.parameters()).prepare()

    alone(worlds, work)


def test_an_optimizer_over_other_ranks(worlds):
    def work(comm):
        module = zero.shard(nn.Linear(4, 4), 2, comm=comm)
        others = comm.new_group([0, 1], name="others")
        with pytest.raises(ArgumentError, match="another communicator"):
            AdamW(module.parameters(), comm=others)

    worlds(2).run(work)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (AdamWOptions(bucket_elems=1024), ArgumentError),
        (AdamWOptions(reduce="sum"), ArgumentError),
        (AdamWOptions(algorithm="ring"), ArgumentError),
        (AdamWOptions(kernels="triton"), UnsupportedError),
    ],
)
def test_options_that_shard_decides(worlds, options, error):
    def work(comm):
        module = zero.shard(nn.Linear(4, 4), 2, comm=comm)
        with pytest.raises(error):
            AdamW(module.parameters(), options=options).prepare()

    alone(worlds, work)


@pytest.mark.parametrize(
    "make",
    [
        lambda: zero.ZeroOptions(bucket_elems=100),
        lambda: zero.ZeroOptions(reduce="max"),
        lambda: zero.ZeroOptions(algorithm="tree"),
        lambda: zero.ZeroOptions(in_flight=0),
        lambda: zero.ZeroOptions(prefetch=-1),
        lambda: zero.ZeroOptions(overlap="no"),  # type: ignore[arg-type]
        lambda: zero.ZeroOptions(overlap=1),  # type: ignore[arg-type]
        lambda: zero.ZeroOptions(keep_gathered="no"),  # type: ignore[arg-type]
        lambda: zero.ZeroOptions(broadcast=None),  # type: ignore[arg-type]
        lambda: zero.ZeroOptions(precision="bf16"),  # type: ignore[arg-type]
        lambda: zero.Precision(param=torch.int8),
        lambda: zero.Precision(param=torch.bfloat16, reduce=torch.float16),
        lambda: zero.Precision(reduce=torch.bfloat16),
    ],
)
def test_options_out_of_range(make):
    with pytest.raises(ArgumentError, match="expected"):
        make()


def test_units_that_are_no_rule(worlds):
    def work(comm):
        rules: list[Any] = [(), "blocks", (nn.Linear(2, 2),), nn.Linear, (nn.Conv2d,)]
        for rule in rules:
            with pytest.raises(ArgumentError, match="units: expected types of modules"):
                zero.shard(nn.Linear(2, 2), 3, comm=comm, options=zero.ZeroOptions(units=rule))

    alone(worlds, work)


def test_what_is_not_sharded():
    plain = nn.Linear(2, 2)
    calls = (
        zero.no_sync,
        zero.unshard,
        zero.full_state_dict,
        lambda m: zero.gathered(m).__enter__(),
    )
    for call in calls:
        with pytest.raises(ArgumentError, match="was not sharded"):
            call(plain)


@pytest.mark.parametrize("stage", STAGES)
def test_copies_and_pickles(worlds, stage):
    def work(comm):
        module = zero.shard(nn.Linear(4, 4), stage, comm=comm)
        with pytest.raises(UnsupportedError, match="cannot be copied"):
            deepcopy(module)
        with pytest.raises(UnsupportedError, match="cannot be copied"):
            pickle.dumps(module)

    alone(worlds, work)


def test_state_dicts_at_stage_3(worlds):
    def work(comm):
        module = zero.shard(new_model("gpt"), 3, comm=comm, options=SMALL)
        with pytest.raises(ArgumentError, match="only inside gathered"):
            module.state_dict()
        with pytest.raises(ArgumentError, match="only inside gathered"):
            module.load_state_dict({})
        with zero.gathered(module, write_from=0):
            module.load_state_dict(module.state_dict())

    alone(worlds, work)


def test_a_step_inside_gathered(worlds):
    def work(comm):
        module = zero.shard(nn.Linear(4, 4), 3, comm=comm)
        optimizer = AdamW(module.parameters())
        module(torch.ones(1, 4)).sum().backward()
        with zero.gathered(module), pytest.raises(ArgumentError, match="inside gathered"):
            optimizer.step()

    alone(worlds, work)


def test_a_rank_that_is_none(worlds):
    def work(comm):
        module = zero.shard(nn.Linear(4, 4), 3, comm=comm)
        with pytest.raises(ArgumentError, match="write_from: expected a rank, 0 to 0, got 1"):
            zero.gathered(module, write_from=1).__enter__()

    alone(worlds, work)
