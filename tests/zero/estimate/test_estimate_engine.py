"""Estimates against what sharded training holds, byte by byte."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ringcomm
from ringcomm.optim import AdamW, AdamWOptions
from ringcomm.optim.options import Wire
from ringcomm.zero.buckets import ShardedBucket
from ringcomm.zero.estimate import STAGES, BytesPerElement, World, model_state, working_buffers
from ringcomm.zero.estimate_model import ModelElems
from ringcomm.zero.options import ZeroOptions
from ringcomm.zero.precision import Precision
from ringcomm.zero.sharding import engine_of, shard

WORLD_SIZE = 2


class Net(nn.Module):
    """Sizes need no padding: a unit's trained and frozen parts are multiples of width^2."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        wide = 2 * width
        self.first = nn.Linear(wide, width, bias=False)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(3))
        self.layers.append(
            nn.Sequential(nn.Linear(width, wide, False), nn.Linear(wide, width, False))
        )
        self.layers[1].weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps x [batch, 2 width] to [batch, width]."""
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def storage_bytes(bucket):
    """Returns the bytes that a rank has of a bucket's parameters now, gathered ones included."""
    if isinstance(bucket, ShardedBucket):
        return bucket.kept.nbytes, bucket.flat.untyped_storage().nbytes()
    return bucket.flat.nbytes, 0


def train(comm, stage, options, master, width=32):
    """Three steps; the parts of the model state, and the most that was gathered at a time."""
    torch.manual_seed(0)
    net = shard(Net(width), stage, comm=comm, options=options)
    engine = engine_of(net, "test")
    rounding = "stochastic" if master == "none" else "nearest"
    optimizer = AdamW(net.parameters(), options=AdamWOptions(master=master, rounding=rounding))
    buckets = [*engine.stored, *engine.parts.stored_frozen]
    gathered = []
    for layer in net.layers:
        layer.register_forward_pre_hook(
            lambda *_: gathered.append(sum(storage_bytes(bucket)[1] for bucket in buckets))
        )
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.ones(2, 2 * width)).float().square().mean().backward()
        optimizer.step()
    whole = [p for p in net.parameters() if not p.requires_grad and stage < 3]
    state = optimizer.state_dict()["state"]
    kept = [each.values() for each in (*state["buckets"], *state.get("residuals", ())) if each]
    return {
        "params": sum(storage_bytes(b)[0] for b in buckets) + sum(p.nbytes for p in whole),
        "grads": sum(
            each.shard.nbytes for each in (engine.reduction.buckets if engine.reduction else ())
        ),
        "state": sum(tensor.nbytes for tensors in kept for tensor in tensors),
        "gathered": max(gathered),
    }


@pytest.mark.parametrize(("stage", "overlap"), [*((stage, True) for stage in STAGES), (3, False)])
@pytest.mark.parametrize(
    ("precision", "master"),
    [
        (Precision(), "fp32"),
        (Precision(param=torch.bfloat16), "fp32"),
        (Precision(param=torch.bfloat16, reduce=torch.bfloat16), "fp32"),
        (Precision(param=torch.bfloat16), "remainder"),
        (Precision(param=torch.bfloat16), "none"),
    ],
)
def test_model_state_is_what_training_holds(stage, precision, master, overlap):
    options = ZeroOptions(precision=precision, bucket_elems=2048, overlap=overlap)
    dtype = precision.param or torch.float32
    each = BytesPerElement.of(dtype, precision.reduce or torch.float32, master)
    model = ModelElems.of_module(Net())
    told = model_state(model, stage, WORLD_SIZE, each)
    with ringcomm.local_world(WORLD_SIZE) as world:
        for held in world.run(train, stage, options, master):
            assert held["params"] == told.params
            assert held["state"] == told.state
            if stage >= 2:
                assert held["grads"] == told.grads
            assert (
                held["gathered"] == working_buffers(model, stage, WORLD_SIZE, each, options).units
            )


@pytest.mark.parametrize(
    ("stage", "shared"),
    [
        (1, {"state": "node"}),
        *((3, shared) for shared in ({}, {"state": "node"}, {"params": "world"})),
        *((0, {"wire": Wire("int4", error_feedback=True), "state": s}) for s in ("world", "node")),
        *((2, {"wire": Wire("int4", error_feedback=True), "state": s}) for s in ("world", "node")),
    ],
)
def test_over_nodes_it_is_what_their_ranks_share(stage, shared):
    """Chunks of four ranks are whole blocks of 512 elements with a width of 64."""
    options = ZeroOptions(Precision(param=torch.bfloat16), bucket_elems=2048, **shared)
    of_world = dict(shared)
    if "wire" in shared:
        of_world |= {"wire": "int4", "error_feedback": True}
    each, world_of = BytesPerElement.of(torch.bfloat16), World(4, 2, **of_world)
    model = ModelElems.of_module(Net(64))
    told = model_state(model, stage, world_of, each)
    with ringcomm.local_world(4, nodes=[2, 2]) as world:
        for held in world.run(train, stage, options, "fp32", 64):
            assert (held["params"], held["state"]) == (told.params, told.state)
            if stage >= 2:
                assert held["grads"] == told.grads
