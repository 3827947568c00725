# SPDX-License-Identifier: Apache-2.0
"""The repr of public objects, and the types that a checker infers for returned values."""

import inspect

import torch
from torch import nn
from typing_extensions import assert_type

import ringcomm
from ringcomm import Communicator, c10d, functional, optim, zero
from ringcomm.extras import fsdp2, moe, parallel
from ringcomm.zero import checkpoint

MODULES = (ringcomm, c10d, fsdp2, functional, moe, optim, parallel, zero, checkpoint)
# These need no repr: namespaces of values, a protocol, and torch's planners with other methods.
NOTHING_TO_SHOW = {"GroupMember", "ReduceOp", "Ranks", "LoadPlanner", "SavePlanner"}


def test_every_public_class_shows_its_objects():
    found = {
        name
        for module in MODULES
        for name in module.__all__
        if inspect.isclass(getattr(module, name))
        and getattr(module, name).__repr__ is object.__repr__
    }
    assert found == NOTHING_TO_SHOW


def test_what_is_shown(tmp_path):
    world = ringcomm.local_world(2)
    assert repr(world) == "<ringcomm.LocalWorld of 2 ranks>"
    assert repr(world[0]) == "<ringcomm.Communicator local rank 0 of 2>"
    net = zero.shard(nn.Linear(2, 2), stage=0, comm=ringcomm.local_world(1)[0])
    state = repr(zero.TrainState(net))
    assert (
        state
        == "<ringcomm.zero.TrainState of stage 0 on <ringcomm.Communicator local rank 0 of 1>>"
    )
    world[0].abort("enough")
    assert repr(world) == "<ringcomm.LocalWorld of 2 ranks (unusable)>"
    world.close()
    assert repr(world) == "<ringcomm.LocalWorld of 2 ranks (closed)>"
    with ringcomm.local_world(2, nodes=[1, 1]) as nodes:
        assert repr(nodes) == "<ringcomm.LocalWorld of 2 ranks on 2 nodes>"
    with ringcomm.local_world(1) as one:
        assert repr(one) == "<ringcomm.LocalWorld of 1 rank>"
    op = ringcomm.P2POp(ringcomm.irecv, torch.ones(2, 3), 1)
    assert repr(op) == "<ringcomm.P2POp irecv from rank 1, torch.float32 (2, 3), tag 0>"
    op = ringcomm.P2POp(ringcomm.isend, torch.ones(2), group_peer=3, tag=7)
    assert repr(op) == "<ringcomm.P2POp isend to rank 3 of the group, torch.float32 (2,), tag 7>"
    scaler = optim.LossScaler()
    assert repr(scaler) == f"<ringcomm.optim.LossScaler on cpu, {scaler.options}>"
    assert repr(optim.GradScaler("cpu")) == "<ringcomm.optim.GradScaler on cpu, enabled>"
    assert repr(zero.StepProfile()) == "<ringcomm.zero.StepProfile off, 0 spans>"
    assert repr(zero.pretrained(tmp_path)) == f"<ringcomm.zero.Pretrained of {tmp_path}>"
    kept = checkpoint.Checkpoints(tmp_path)
    assert repr(kept) == f"<ringcomm.zero.Checkpoints in {tmp_path} of rank 0 of 1, keep 2>"
    reader = checkpoint.StorageReader(tmp_path)
    assert repr(reader) == f"<ringcomm.zero.checkpoint.StorageReader of {tmp_path}>"
    writer = checkpoint.StorageWriter(tmp_path)
    assert repr(writer) == f"<ringcomm.zero.checkpoint.StorageWriter to {tmp_path}>"


def test_run_has_the_type_of_the_functions_result():
    """mypy checks the asserted types; the test checks the values, too."""

    def scaled(comm: Communicator, factor: int, *, by: float = 1.0) -> float:
        return comm.rank * factor * by

    def nothing(comm: Communicator) -> None:
        comm.barrier()

    with ringcomm.local_world(2) as world:
        ranks = assert_type(world.run(lambda comm: comm.rank), list[int])
        products = assert_type(world.run(scaled, 3), list[float])
        more = assert_type(world.run(scaled, 3, by=0.5), list[float])
        nones = assert_type(world.run(nothing), list[None])
        sums = assert_type(world.run(lambda comm: torch.ones(comm.world_size)), list[torch.Tensor])
    assert (ranks, products, more, nones) == ([0, 1], [0.0, 3.0], [0.0, 1.5], [None, None])
    assert [each.tolist() for each in sums] == [[1.0, 1.0]] * 2
