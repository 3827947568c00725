# SPDX-License-Identifier: Apache-2.0
"""Changes after ``shard()``, and frozen 8-bit weights, on several nodes and on devices."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from ringcomm import zero
from ringcomm.optim import AdamW
from tests.support.covering import in_test_all
from tests.support.device_worlds import on_host
from tests.zero import test_adapters, test_added_groups, test_eight_bits
from tests.zero.models import assert_same_bits
from tests.zero.test_devices import OPTIONS, resizing_in_stream_order

__all__ = ["resizing_in_stream_order"]

Tensor = torch.Tensor
CHOICES: list[tuple[int, dict[str, Any]]] = [
    (3, {"params": "world"}),
    *in_test_all((1, {}), (2, {"state": "node"}), (3, {})),
]


def _joins_late(comm: Any, stage: int, options: zero.ZeroOptions) -> dict[str, Tensor]:
    module: Any = zero.shard(
        deepcopy(test_added_groups.BASE).to(comm.device), stage, comm=comm, options=options
    )
    optimizer = test_added_groups.joins_late(module, test_added_groups.OPTIMIZERS["adamw"])
    master = optimizer.full_state_dict().get("master", {})
    return {**zero.full_state_dict(module), **{str(n): each for n, each in master.items()}}


def _adapters(comm: Any, stage: int, options: zero.ZeroOptions) -> dict[str, Tensor]:
    base = zero.shard(
        deepcopy(test_adapters.BASE).to(comm.device), stage, comm=comm, options=options
    )
    layers = test_adapters.put_in(base)
    adapters = zero.shard(test_adapters.adapters_of(layers), stage, comm=comm, options=options)
    test_adapters.steps(base, AdamW(adapters.parameters(), lr=0.1), 2)
    with zero.unsharded(base, write_from=0):
        test_adapters.take_out(base, layers)
    return zero.full_state_dict(base)


QUANTISED = nn.Sequential(*(test_eight_bits.Quantised(kind) for kind in test_eight_bits.DTYPES))


def _eight_bits(comm: Any, stage: int, options: zero.ZeroOptions) -> dict[str, Tensor]:
    model = zero.shard(deepcopy(QUANTISED).to(comm.device), stage, comm=comm, options=options)
    test_eight_bits.steps(model, AdamW(test_eight_bits.trainable(model), lr=0.1), 2)
    return test_eight_bits._as_bytes(zero.full_state_dict(model))


@pytest.mark.parametrize("work", [_joins_late, _adapters, _eight_bits])
def test_nodes_end_with_the_bits_of_one(worlds, two_by_two, work: Callable[..., Any]):
    """All ranks use the same batch, so that sums are exact in any order."""
    precision = zero.Precision(param=torch.bfloat16 if work is _joins_late else None)
    wanted = worlds(2).run(work, 2, zero.ZeroOptions(precision=precision))[0]
    for stage, chosen in CHOICES:
        options = zero.ZeroOptions(precision=precision, **chosen)
        for found in two_by_two.run(work, stage, options):
            assert_same_bits(found, wanted)


@pytest.mark.usefixtures("resizing_in_stream_order")
@pytest.mark.parametrize("work", [_joins_late, _adapters, _eight_bits])
def test_devices_end_with_the_bits_of_the_host(devices, worlds, work: Callable[..., Any]):
    def on_device(comm, stage, options):
        with torch.autograd.set_multithreading_enabled(False), torch.device(comm.device):
            state = work(comm, stage, options)
        return {name: on_host(tensor) for name, tensor in state.items()}

    wanted = worlds(2).run(work, 2, zero.ZeroOptions())[0]
    for stage in (3, *in_test_all(0, 1, 2)):
        with devices.new_world(2, options=OPTIONS) as world:
            options = zero.ZeroOptions(algorithm="one_shot")
            for found in devices.run(world, on_device, stage, options):
                assert_same_bits(found, wanted)
