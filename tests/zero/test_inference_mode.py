# SPDX-License-Identifier: Apache-2.0
"""After operations under ``torch.inference_mode()``, a module trains as after ``no_grad()``.

A tensor made in inference mode refuses writes outside of it, so no such tensor may stay in a
module, its optimizer or its communicator.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch

from ringcomm import zero
from ringcomm.errors import ArgumentError
from ringcomm.optim import AdamW, LossScaler, Muon, Sharded, muon_groups
from tests.support.covering import covering, in_test_all
from tests.zero.models import SMALL_BUCKET_ELEMS, assert_same_bits, new_model

STAGES = [1, 3, *in_test_all(0, 2)]
SMALL = zero.ZeroOptions(bucket_elems=SMALL_BUCKET_ELEMS)


def rows(comm, turn):
    return torch.linspace(-1, 1 + comm.rank + turn, 26).view(2, 13)


def unsharded(comm, module, optimizer, folder):
    with zero.unsharded(module):
        views = [param.detach()[:1] for param in module.parameters()]
    assert not any(view.isnan().any() for view in views)


def written(comm, module, optimizer, folder):
    with zero.unsharded(module, write_from=0):
        next(module.parameters()).mul_(2.0)


def written_shards(comm, module, optimizer, folder):
    with zero.writing_shards(module) as shards:
        for shard in shards.values():
            shard.values.mul_(0.5)


def exchanged(comm, module, optimizer, folder):
    others = {name: s.values.clone() * 2 for name, s in zero.local_shards(module).items()}
    with zero.exchanged(module, others):
        module(rows(comm, 7))


def set_master(comm, module, optimizer, folder):
    optimizer.prepare()
    param = next(module.parameters())
    zero.set_master(param, zero.get_master(param) + 1)


def saved(comm, module, optimizer, folder):
    zero.save(folder / "saved", 1, module, optimizer)
    zero.load(folder / "saved", module, optimizer)


def pretrained(comm, module, optimizer, folder):
    zero.save_pretrained(module, folder / "weights")
    zero.load_pretrained(module, folder / "weights")


def optimizer_state(comm, module, optimizer, folder):
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.full_state_dict()


def stepped(comm, module, optimizer, folder):
    with torch.inference_mode(False), torch.enable_grad():
        module(rows(comm, 9)).backward()
    optimizer.clip_grad_norm_(1.0)
    zero.get_gradient(next(module.parameters()))
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


OPERATIONS: dict[str, Callable[..., object]] = {
    "evaluation": lambda comm, module, *_: module(rows(comm, 5)),
    "full_state_dict": lambda comm, module, *_: zero.full_state_dict(module),
    "unsharded": unsharded,
    "written": written,
    "writing_shards": written_shards,
    "exchanged": exchanged,
    "set_master": set_master,
    "save": saved,
    "pretrained": pretrained,
    "optimizer_state": optimizer_state,
    "step": stepped,
}
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "AdamW": lambda module: AdamW(module.parameters(), lr=1e-2),
    "Muon": lambda module: Muon(muon_groups(module), lr=1e-2),
    "Adagrad": lambda module: Sharded(torch.optim.Adagrad, module.parameters(), lr=1e-2),
}


def trained(comm, base, stage, mode, operation, made, folder):
    module: Any = zero.shard(deepcopy(base), stage, comm=comm, options=SMALL)
    optimizer = OPTIMIZERS[made](module)
    for turn in range(2):
        with mode():
            OPERATIONS[operation](comm, module, optimizer, folder / mode.__name__ / str(turn))
        module(rows(comm, turn)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return zero.full_state_dict(module)


@covering(strength=1, operation=[*OPERATIONS], stage=range(4))
def test_a_module_trains_as_after_no_grad(worlds, tmp_path, stage, operation):
    base = new_model("mlp")
    kinds = OPTIMIZERS if operation == "step" else ["AdamW"]
    for made in kinds:
        found, wanted = (
            worlds(2).run(trained, base, stage, mode, operation, made, tmp_path / made)[0]
            for mode in (torch.inference_mode, torch.no_grad)
        )
        assert_same_bits(found, wanted)


@pytest.mark.parametrize("stage", STAGES)
def test_sharding_and_removing_it_leave_normal_tensors(worlds, stage):
    def work(comm):
        module: Any = deepcopy(base)
        with torch.inference_mode():
            zero.shard(module, stage, comm=comm, options=SMALL)
            scaler = LossScaler()
            optimizer = AdamW(module.parameters(), lr=1e-2, loss_scaler=scaler)
            optimizer.prepare()
        for turn in range(2):
            scaler.scale(module(rows(comm, turn))).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.inference_mode():
            zero.remove_sharding(module)
        return [name for name, param in module.named_parameters() if param.is_inference()]

    base = new_model("mlp")
    assert worlds(2).run(work) == [[], []]


def test_parameters_that_were_made_in_inference_mode_are_refused(worlds):
    with torch.inference_mode():
        module = torch.nn.Linear(2, 2)
    with pytest.raises(ArgumentError, match=r"parameter weight was made under .*inference_mode"):
        zero.shard(module, 3, comm="alone")
    with pytest.raises(ArgumentError, match=r"parameter 0: was made under .*inference_mode"):
        AdamW(module.parameters())
