# SPDX-License-Identifier: Apache-2.0
"""``torch.set_default_device()`` is for the user's tensors; ringcomm's tensors ignore it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._device import _device_constructors

import ringcomm
from ringcomm import zero
from ringcomm.optim import AdamW, AdamWOptions, GradScaler, LossScaler
from tests.zero.models import SMALL_BUCKET_ELEMS, assert_same_bits, new_model

PACKAGE = Path(ringcomm.__file__).parent
# Separate programs, in which no other code sets a default device.
PROGRAMS = {"cli", "examples"}
MAKERS = {maker.__name__ for maker in _device_constructors()}


def makers_without_device(source: str) -> Iterator[int]:
    """Yields lines that make a tensor on the default device."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "torch"
            and node.func.attr in MAKERS
            and not {"device", None} & {keyword.arg for keyword in node.keywords}
        ):
            yield node.lineno


def test_every_tensor_is_made_on_a_named_device():
    found = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] not in PROGRAMS
        for line in makers_without_device(path.read_text())
    ]
    assert found == [], f"pass device= in {', '.join(found)}"


def test_makers_without_device_are_found():
    source = "torch.zeros(3)\ntorch.zeros(3, device='cpu')\ntorch.frombuffer(b)\nx.new_empty(3)\n"
    assert list(makers_without_device(source + "torch.tensor([1.0], dtype=d)")) == [1, 5]


def _train(comm: Any, base: Any, stage: int, folder: Path, default: str | None) -> Any:
    module: Any = deepcopy(base)
    options = zero.ZeroOptions(bucket_elems=SMALL_BUCKET_ELEMS)
    generator = torch.Generator().manual_seed(comm.rank)
    batches = [torch.randn(4, 13, generator=generator) for _ in range(3)]
    with torch.device(default) if default is not None else nullcontext():
        zero.shard(module, stage, comm=comm, options=options)
        scaler = LossScaler()
        optimizer = AdamW(module.parameters(), lr=1e-2, loss_scaler=scaler)
        for turn, batch in enumerate(batches):
            scaler.scale(module(batch)).backward()
            optimizer.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
            if turn == 0:
                zero.save(folder, 1, module, optimizer)
                optimizer.load_state_dict(optimizer.state_dict())
                optimizer.load_torch_state_dict(optimizer.full_state_dict())
        last = zero.full_state_dict(module)
        zero.load(folder, module, optimizer, step=1)
        with zero.unsharded(module, write_from=0):
            pass
        full = optimizer.full_state_dict()
        assert all(each["step"].device.type == "cpu" for each in full["state"].values())
        first = zero.full_state_dict(module)
        if comm.rank == 0:
            zero.export_safetensors(folder / "step-00000001", folder / "weights.safetensors")
        zero.remove_sharding(module)
    return first, last


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_sharded_training_under_another_default_device(tmp_path, stage):
    base = new_model("mlp")
    with ringcomm.local_world(2) as world:
        wanted = world.run(_train, base, stage, tmp_path / "plain", None)
        found = world.run(_train, base, stage, tmp_path / "meta", "meta")
    for mine, theirs in zip(wanted, found, strict=True):
        assert_same_bits(theirs[0], mine[0])
        assert_same_bits(theirs[1], mine[1])


@pytest.mark.parametrize("accumulate", [None, torch.float32])
def test_the_optimizer_alone_under_another_default_device(accumulate):
    base = new_model("mlp")

    def work(comm, default):
        module, x = deepcopy(base), torch.ones(2, 13)
        options = AdamWOptions(accumulate_dtype=accumulate)
        with torch.device(default) if default is not None else nullcontext():
            optimizer = AdamW(module.parameters(), lr=1e-2, comm=comm, options=options)
            scaler = GradScaler("cpu", comm=comm, init_scale=4.0)
            for _ in range(2):
                scaler.scale(module(x)).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            # A list of all ranks' shards loads in any world; one rank has the whole list.
            shards = [optimizer.state_dict()]
            if comm.world_size == 1:
                optimizer.load_state_dict(shards)
        return module.state_dict()

    for ranks in (1, 2):
        with ringcomm.local_world(ranks) as world:
            assert_same_bits(world.run(work, "meta")[0], world.run(work, None)[0])
