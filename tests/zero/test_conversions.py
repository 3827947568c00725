# SPDX-License-Identifier: Apache-2.0
"""NOTE [Conversions]: ``.to()`` and the like raise on a sharded module, or change nothing."""

from __future__ import annotations

import gc
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from ringcomm import zero
from ringcomm.errors import ArgumentError
from ringcomm.optim import AdamW
from tests.support.covering import in_test_all
from tests.zero.models import assert_same_bits

STAGES = [1, 3, *in_test_all(0, 2)]
CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "double": lambda m: m.double(),
    "to": lambda m: m.to(torch.float16),
    "meta": lambda m: m.to("meta"),
    "to_empty": lambda m: m.to_empty(device="cpu"),
    "share_memory": lambda m: m.share_memory(),
    "type": lambda m: m.type(torch.float16),
    "other tensor": lambda m: m.to(torch.zeros(1, dtype=torch.float64)),
    "in place": lambda m: m._apply(lambda t: t.mul_(2)),
}
# Conversions that leave all values equal, on the same device; torch may copy or return self.
NO_OPS: dict[str, Callable[[Any], Any]] = {
    "device with an index": lambda m: m.to("cpu:0"),
    "device=": lambda m: m.to(device=torch.device("cpu", 0)),
    "cpu": lambda m: m.cpu(),
    "float": lambda m: m.float(),
    "to dtype": lambda m: m.to(torch.float32),
    "device and dtype": lambda m: m.to("cpu:0", torch.float32, True),
    "other tensor": lambda m: m.to(torch.zeros(1)),
    # Module.type() converts integers as well, such as the counters of batch norms.
    "type": lambda m: [layer.type(torch.float32) for layer in layers_of(m)] and m,
    "type by name": lambda m: [layer.type("torch.FloatTensor") for layer in layers_of(m)] and m,
    "memory format": lambda m: m.to(memory_format=torch.contiguous_format),
    "copy": lambda m: m._apply(torch.clone),
}


def layers_of(module: nn.Module) -> list[nn.Module]:
    return [layer for layer in module.modules() if isinstance(layer, (nn.Linear, nn.Conv1d))]


BASE = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Conv1d(1, 2, 3), nn.Flatten())


def new() -> Any:
    return deepcopy(BASE)


def step(module: Any, optimizer: AdamW) -> None:
    x = module[1](module[0](torch.ones(3, 4))).unsqueeze(1)
    module[2](x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("stage", STAGES)
def test_conversions_are_refused_on_all_ranks_and_change_nothing(worlds, stage):
    """Converting the module or a part raises with a remedy, and changes no bit of the training."""

    def work(comm, converts):
        module: Any = zero.shard(new(), stage, comm=comm)
        optimizer = AdamW(module.parameters(), lr=1e-2)
        step(module, optimizer)
        for convert in CONVERSIONS.values() if converts else ():
            for part, name in ((module, r"0\.weight"), (module[2], "weight")):
                with pytest.raises(
                    ArgumentError, match=rf"{name} is torch\.float32 on cpu.*remove_sharding"
                ):
                    convert(part)
        step(module, optimizer)
        return zero.full_state_dict(module)

    reference = worlds(2).run(lambda comm: work(comm, False))
    assert_same_bits(worlds(2).run(lambda comm: work(comm, True))[1], reference[0])


def test_the_refusal_names_the_option(worlds):
    def work(comm):
        module: Any = zero.shard(new(), 3, comm=comm)
        with pytest.raises(ArgumentError, match=r"Precision\(param=torch\.bfloat16\)"):
            module.bfloat16()
        with pytest.raises(ArgumentError) as raised:
            module.double()
        assert "Precision" not in str(raised.value)

    worlds(1).run(work)


@pytest.mark.parametrize("stage", STAGES)
def test_a_conversion_to_what_it_is(worlds, stage):
    """A conversion to the present dtype changes only modules that were added after shard()."""

    def work(comm):
        module: Any = zero.shard(new(), stage, comm=comm)
        module[0].adapter = nn.Linear(4, 2, dtype=torch.float64)
        assert module.float() is module
        assert module[0].adapter.weight.dtype is torch.float32
        around = nn.Sequential(nn.Linear(2, 2), module)
        own = [param for name, param in module.named_parameters() if "adapter" not in name]
        addresses = [param.untyped_storage().data_ptr() for param in own]
        for convert in NO_OPS.values():
            for each in (module, module[2], around):
                assert convert(each) is each
        assert [param.untyped_storage().data_ptr() for param in own] == addresses
        optimizer = AdamW(own)
        step(module, optimizer)

    worlds(1).run(work)


def test_what_is_not_sharded_any_more_converts(worlds):
    """Conversions work after remove_sharding(), on a copied part, on a part of a freed module."""

    def work(comm):
        module: Any = zero.shard(new(), 1, comm=comm)
        assert deepcopy(module[0]).half().weight.dtype is torch.float16
        assert module[0].weight.dtype is torch.float32
        zero.remove_sharding(module)
        assert module.half()[0].weight.dtype is torch.float16
        part: Any = zero.shard(new(), 1, comm=comm)[0]
        gc.collect()
        assert part.half().weight.dtype is torch.float16

    worlds(1).run(work)
