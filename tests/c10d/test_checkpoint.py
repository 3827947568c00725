# SPDX-License-Identifier: Apache-2.0
"""torch.distributed.checkpoint saves and loads sharded state through ringcomm."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def sharded_model(seed):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(10, 17), nn.ReLU(), nn.Linear(17, 3))
    return fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def stepped(seed):
    net = sharded_model(seed)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    net(torch.ones(2, 10)).sum().backward()
    optimizer.step()
    return net, optimizer


def shared_folder(rank: int) -> Path:
    name: list[str | None] = [tempfile.mkdtemp(prefix="ringcomm-dcp-") if rank == 0 else None]
    dist.broadcast_object_list(name, src=0)
    assert name[0]
    return Path(name[0])


def save_and_load(rank, world_size):
    folder = shared_folder(rank)
    net, optimizer = stepped(1)
    model_state, optimizer_state = get_state_dict(net, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    other, other_optimizer = stepped(2)
    model_state, optimizer_state = get_state_dict(other, other_optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        other,
        other_optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    for one, two in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.full_tensor(), two.full_tensor())
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)
    whole = get_model_state_dict(other, options=StateDictOptions(full_state_dict=True))
    return dict(whole), [s["exp_avg"].full_tensor() for s in other_optimizer.state.values()]


def save_in_the_background(rank, world_size):
    folder = shared_folder(rank)
    net = sharded_model(1)
    future = dcp.async_save({"model": get_model_state_dict(net)}, checkpoint_id=folder)
    future.result()
    dist.barrier()
    other = sharded_model(2)
    loaded: dict[str, Any] = dict(get_model_state_dict(other))
    dcp.load({"model": loaded}, checkpoint_id=folder)
    for one, two in zip(net.parameters(), loaded.values(), strict=True):
        assert torch.equal(one.full_tensor(), two.full_tensor())
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)
    return [value.full_tensor() for value in loaded.values()]


def from_a_full_state(rank, world_size):
    """Broadcasts from rank 0, as when only rank 0 has loaded a checkpoint."""
    net = sharded_model(rank)
    full: dict[str, Any] = {"0.weight": torch.arange(170.0).view(17, 10)} if rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    dcp.state_dict.set_model_state_dict(net, full, options=options)
    return next(net.parameters()).full_tensor()


@pytest.mark.parametrize("check", [save_and_load, save_in_the_background, from_a_full_state])
def test_as_on_gloo(two_ranks, check):
    two_ranks.compare(check)
