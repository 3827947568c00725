"""Training loops as users write them: what ends a clip, a sum, a step."""

from __future__ import annotations

import copy

import pytest
import torch

import ringcomm
from ringcomm.errors import ArgumentError, CheckpointError, RingcommError
from ringcomm.optim import AdamW, AdamWOptions

LR = 1e-2


def model_of(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Linear(8, 8)


def batch(turn: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(turn))


def same(mine: torch.nn.Module, torchs: torch.nn.Module) -> None:
    for a, b in zip(mine.parameters(), torchs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_a_skipped_step_and_the_models_zero_grad_end_a_clip():
    """The usual "skip steps that are not finite": a clip that is not stepped must not linger."""
    mine, torchs = model_of(), model_of()
    optimizer = AdamW(mine.parameters(), lr=LR)
    reference = torch.optim.AdamW(torchs.parameters(), lr=LR)
    for turn in range(5):
        factor = float("inf") if turn == 1 else 1.0
        for model in (mine, torchs):
            model.zero_grad()
            (model(batch(turn)).square().sum() * factor).backward()
        norm = optimizer.clip_grad_norm_(1.0)
        wanted = torch.nn.utils.clip_grad_norm_(torchs.parameters(), 1.0)
        assert torch.isfinite(norm) == torch.isfinite(wanted) == torch.tensor(turn != 1)
        if turn != 1:
            torch.testing.assert_close(norm, wanted)
            optimizer.step()
            reference.step()
    same(mine, torchs)


def test_gradients_that_change_after_a_clip_forget_it():
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = AdamW([param], lr=0.1, weight_decay=0.0)
    param.grad = torch.ones(4)
    optimizer.clip_grad_norm_(1e9)
    param.grad = -torch.ones(4)
    optimizer.step()
    assert torch.all(param > 1)
    before = param.detach().clone()
    param.grad = torch.ones(4)
    optimizer.clip_grad_norm_(1e9)
    param.grad = None
    optimizer.step()
    assert torch.equal(param, before)


def test_a_step_ends_a_sum_in_fp32():
    mine, torchs = model_of(), model_of()
    options = AdamWOptions(accumulate_dtype=torch.float32)
    optimizer = AdamW(mine.parameters(), lr=LR, options=options)
    reference = torch.optim.AdamW(torchs.parameters(), lr=LR)
    for turn in range(4):
        for model in (mine, torchs):
            model.zero_grad()
            for part in range(2):
                model(batch(10 * turn + part)).square().sum().backward()
        optimizer.step()
        reference.step()
    same(mine, torchs)


def test_lr_goes_from_a_tensor_to_nothing():
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = AdamW([param], lr=torch.tensor(0.1))
    param.grad = torch.ones(4)
    optimizer.step()
    before = param.detach().clone()
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert torch.equal(param, before)


def test_no_rank_loads_unless_all_can():
    def body(comm):
        param = torch.nn.Parameter(torch.ones(600))
        optimizer = AdamW([param], comm=comm)
        saved = []
        for _ in range(2):
            param.grad = torch.ones(600)
            optimizer.step()
            saved.append(copy.deepcopy(optimizer.state_dict()))
        broken = copy.deepcopy(saved[0])
        if comm.rank == 1:
            del broken["state"]["step"]
        with pytest.raises(CheckpointError, match=r"rank 1 cannot load|cannot be read"):
            optimizer.load_state_dict(broken)
        with pytest.raises(CheckpointError, match="different steps"):
            optimizer.load_state_dict(saved[comm.rank])
        broken = copy.deepcopy(saved[0])
        broken["state"]["step"].fill_(-1.0)
        with pytest.raises(CheckpointError, match="step numbers from 0 on"):
            optimizer.load_state_dict(broken)
        assert optimizer.steps_taken == 2
        optimizer.load_state_dict(saved[0])
        assert optimizer.steps_taken == 1

    with ringcomm.local_world(2, timeout=20) as world:
        world.run(body)


def test_half_a_step_is_not_saved():
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = AdamW([param])
    param.grad = torch.ones(4)
    optimizer.step()
    optimizer.sharded_step().torn = True
    with pytest.raises(RingcommError, match="failed halfway"):
        optimizer.state_dict()


def test_torchs_checkpoint_changes_nothing():
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = model_of()
    optimizer = AdamW(model.parameters())
    model(batch(0)).sum().backward()
    optimizer.step()
    before = [each.detach().clone() for each in model.parameters()]
    # Torch looks for the parameter that our state's first entry would be, were it torch's.
    with pytest.raises(KeyError) as raised:
        get_optimizer_state_dict(model, optimizer)
    assert raised.value.args == (next(iter(optimizer.state_dict()["state"])),) == ("step",)
    assert optimizer.steps_taken == 1
    assert all(map(torch.equal, model.parameters(), before))
    # The negative control: with one of torch's it raises nothing.
    plain = torch.optim.AdamW(model.parameters())
    plain.step()
    assert get_optimizer_state_dict(model, plain)["state"].keys() == {"weight", "bias"}


def test_options_are_options():
    with pytest.raises(ArgumentError, match="options: expected AdamWOptions, got 3"):
        AdamW([torch.nn.Parameter(torch.ones(2))], options=3)  # type: ignore[arg-type]
