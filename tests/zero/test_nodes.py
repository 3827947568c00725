# SPDX-License-Identifier: Apache-2.0
"""Sharded training over several nodes, which are simulated by threads or processes here."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import Store

import ringcomm
from ringcomm import CommOptions, Communicator, zero
from ringcomm.comm.nodes import compressed_sums
from ringcomm.comm.nodes.transport import HEADER_TAG, gloo
from ringcomm.errors import ArgumentError, MismatchError, RingcommError, UnsupportedError
from ringcomm.extras.estimate import ModelElems, Training
from ringcomm.optim import AdamW, AdamWOptions
from tests.support.covering import in_test_all
from tests.support.ranks import Ranks, join_nodes
from tests.zero.job import BF16, Job
from tests.zero.models import MODELS, Run, assert_same_bits, new_model, options_of, train

Nodes = Sequence[Sequence[int]]
Choice = tuple[int, dict[str, Any]]
BY_NODE: dict[str, Any] = {"state": "node"}
BY_WORLD: dict[str, Any] = {"params": "world"}
DEFAULTS: tuple[Choice, ...] = tuple((stage, {}) for stage in range(4))
CHOICES = (*DEFAULTS, (1, BY_NODE), (2, BY_NODE), (3, BY_NODE), (3, BY_WORLD))


pytestmark = pytest.mark.usefixtures("one_thread_for_each_rank")


# ---- sums over nodes ---------------------------------------------------------------------------


def test_compression_is_asked_of_the_communicator_or_of_zero(two_by_two, monkeypatch):
    monkeypatch.setattr(compressed_sums, "QUANTIZED_ABOVE_BYTES", 64)
    base, run = new_model("mlp"), Run("mlp", 2, steps=1, clip=0.3)
    asked = replace(run, options={"compression": zero.Compression(gradients="int8")})
    wanted, norms = two_by_two.run(train, base, asked)[0]
    with ringcomm.local_world(
        4, nodes=[2, 2], timeout=60, options=CommOptions(compression="int8")
    ) as world:
        for found, told in world.run(train, base, run):
            assert told == norms
            assert_same_bits(found, wanted)


def set_and_read(comm: Communicator, base: Any, choice: Choice) -> dict[str, torch.Tensor]:
    """Trains with gradients, masters and states that are set, whole or by shards."""
    stage, options = choice
    run = Run("mlp", stage, options=options, precision=BF16)
    module: Any = zero.shard(deepcopy(base), stage, comm=comm, options=options_of(run))
    optimizer = AdamW(module.parameters(), lr=0.1)
    optimizer.prepare()
    params = dict(module.named_parameters())
    module(*MODELS["mlp"][1](torch.Generator().manual_seed(comm.rank), 0)).backward()
    for number, param in enumerate(params.values()):
        local = number % 2 == 0
        found = zero.get_gradient(param, local=local)
        assert found is not None
        zero.set_gradient(param, found + 2, local=local)
        zero.set_master(param, zero.get_master(param, local=local) * 1.125, local=local)
    norm = optimizer.clip_grad_norm_(0.5)
    optimizer.step()
    for number, param in enumerate(params.values()):
        local = number % 2 == 0
        moment = zero.get_state(param, "exp_avg", local=local)
        assert moment is not None
        zero.set_state(param, "exp_avg", moment * 3, local=local)
    optimizer.zero_grad()
    module(*MODELS["mlp"][1](torch.Generator().manual_seed(comm.rank), 0)).backward()
    optimizer.step()
    with zero.writing_shards(module) as shards:
        for shard in shards.values():
            shard.values.mul_(1.5)
    masters = {f"master.{name}": zero.get_master(param) for name, param in params.items()}
    state = {**zero.full_state_dict(module), **masters, "norm": norm}
    zero.remove_sharding(module)
    return state


def test_what_is_set_arrives_on_all_nodes(two_by_two):
    base = new_model("mlp")
    with ringcomm.local_world(4, options=CommOptions(sum_group_size=2)) as world:
        wanted = world.run(set_and_read, base, (1, {}))[0]
    for choice in (DEFAULTS[3], (2, BY_NODE), (3, BY_WORLD)):
        for found in two_by_two.run(set_and_read, base, choice):
            assert_same_bits(found, wanted)


# ---- what leaves a node ------------------------------------------------------------------------


@dataclass(frozen=True)
class CountingGroup:
    """The Gloo group of a rail, which counts the data bytes that this node's rank sends."""

    group: Any
    sent: list[int] = field(default_factory=list)

    def send(self, memory: list[torch.Tensor], node: int, tag: int) -> Any:
        if tag != HEADER_TAG:
            self.sent.append(memory[0].nbytes)
        return self.group.send(memory, node, tag)

    def recv(self, memory: list[torch.Tensor], node: int, tag: int) -> Any:
        return self.group.recv(memory, node, tag)

    def name(self) -> str:
        return "gloo"


@dataclass
class Transport:
    """A transport whose groups count the bytes that leave each node."""

    groups: list[tuple[int, CountingGroup]] = field(default_factory=list)

    def __call__(self, store: Store, node: int, num_nodes: int, timeout: Any) -> CountingGroup:
        made = CountingGroup(gloo(store, node, num_nodes, timeout))
        self.groups.append((node, made))
        return made

    def read(self) -> Counter[int]:
        """Returns the bytes that have left each node since the last read."""
        found: Counter[int] = Counter()
        for node, group in self.groups:
            found[node] += sum(group.sent)
            group.sent.clear()
        return found


def sent_by_phase(
    comm: Communicator, transport: Transport, module: Any, optimizer: AdamW
) -> list[Counter[int]]:
    """Returns on rank 0 the bytes that leave each node under no_sync, in backward, in the step."""
    batch = MODELS["gpt"][1](torch.Generator().manual_seed(comm.rank), 0)
    phases: list[Counter[int]] = []

    def ended() -> None:
        comm.barrier()
        if comm.rank == 0:
            phases.append(transport.read())
        comm.barrier()

    for _ in range(2):  # the first backward also agrees on the order of the buckets
        phases.clear()
        ended()
        with zero.no_sync(module):
            module(*batch).backward()
        ended()
        module(*batch).backward()
        ended()
        optimizer.step()
        ended()
        optimizer.zero_grad()
    return phases[1:]


def send_in_a_step(comm: Communicator, transport: Transport, base: Any, choice: Choice) -> Any:
    """Returns the bytes that leave each node, by phase of a step, and the elements reduced."""
    stage, options = choice
    run = Run("gpt", stage, precision=BF16, options={"overlap": False, **options})
    module: Any = zero.shard(deepcopy(base), stage, comm=comm, options=options_of(run))
    optimizer = AdamW(module.parameters())
    phases = sent_by_phase(comm, transport, module, optimizer)
    engine = zero.stages.sharding.engine_of(module, "test")
    roots = zip(engine.trainable.unit_of, engine.stored, strict=True)
    elems = ModelElems(
        sum(bucket.layout.elems for bucket in engine.stored),
        root=sum(bucket.layout.elems for unit, bucket in roots if unit == 0),
    )
    flags = optimizer.sharded_step().table.told.nbytes
    zero.remove_sharding(module)
    return phases, elems, flags


@pytest.mark.parametrize("compression", ["none", "param", "int4", *in_test_all("int8")])
def test_what_leaves_a_node_in_a_step_is_the_closed_form(compression, monkeypatch):
    """Checks the bytes that leave a node, with padding: P (g + p) (N - 1)/N, or as in docs/zero.md.

    Under no_sync nothing leaves a node, unless parameters are sharded over the world.
    """
    monkeypatch.setattr(compressed_sums, "QUANTIZED_ABOVE_BYTES", 64)
    transport, base = Transport(), new_model("gpt")
    with ringcomm.local_world(
        4,
        nodes=[2, 2],
        options=CommOptions(transport=transport, compression=compression),
        timeout=60,
    ) as world:
        choices = (
            (DEFAULTS[0], *CHOICES[6:]) if compression == "none" else (DEFAULTS[3], CHOICES[4])
        )
        for choice in choices:
            stage, options = choice
            phases, elems, flags = world.run(send_in_a_step, transport, base, choice)[0]
            quiet, backward, step = phases
            zero_options = zero.ZeroOptions(
                BF16, compression=zero.Compression(compression), **options
            )
            wanted = Training(elems, 4, 2, zero_options).leaving_node_bytes(stage)
            for node in range(2):
                # Subtract the flags of parameters that step: both ranks send theirs to peers.
                assert backward[node] + step[node] - 2 * flags == wanted, choice
                if choice == (3, BY_WORLD):
                    assert quiet[node] == (2 * elems.trainable - elems.root) * 2 // 2
                    assert step[node] == 2 * flags
                else:
                    assert quiet[node] == 0
                if choice == (3, BY_NODE):
                    assert step[node] == 2 * flags


# ---- unsharding that all ranks take part in -----------------------------------------------------


def shard_by_world(comm: Communicator, base: Any, **options: Any) -> Any:
    chosen = zero.ZeroOptions(**{**BY_WORLD, "overlap": True, **options})
    return zero.shard(deepcopy(base), 3, comm=comm, options=chosen)


def write_in_the_open(comm: Communicator, base: Any) -> None:
    module = shard_by_world(comm, base)
    name, param = next(iter(module.named_parameters()))
    # No version counter changes; every shard of the parameter is compared, on any rank.
    with (
        pytest.raises(ArgumentError, match=f"parameter {name} was changed"),
        zero.unsharded(module),
    ):
        param.data.view(-1)[-1] += 1.0
    before = zero.full_state_dict(module)[name]
    assert torch.equal(before, dict(base.named_parameters())[name])
    with zero.unsharded(module, write_from=2):
        param.data.view(-1)[-1] += 1.0 + comm.rank
    after = zero.full_state_dict(module)[name]
    before.view(-1)[-1] += 3.0
    assert torch.equal(after, before)
    zero.remove_sharding(module)


def test_writes_outside_of_the_module_are_found_and_shared(two_by_two):
    two_by_two.run(write_in_the_open, new_model("mlp"))


def unshard_apart(comm: Communicator, base: Any) -> str:
    module = shard_by_world(comm, base)
    with pytest.raises(RingcommError) as raised:
        if comm.rank == 1:
            zero.full_state_dict(module)
        comm.barrier()
    return str(raised.value)


def unshard_another(comm: Communicator, base: Any) -> str:
    """Lets ranks of one node unshard units of equal size in different orders."""
    module = shard_by_world(comm, base, overlap=False)
    layers = [module.layers[0], module.layers[1]]
    with pytest.raises(MismatchError) as raised:
        for layer in layers if comm.rank % 2 else reversed(layers):
            assert layer.weight.sum()
    return str(raised.value)


@pytest.mark.parametrize(
    ("work", "model", "text"),
    [
        (unshard_apart, "mlp", "the ranks made different calls"),
        (unshard_another, "wandering", r"bucket \d of module.*bucket \d of module"),
    ],
)
def test_ranks_that_unshard_differently_are_told(work, model, text):
    with ringcomm.local_world(4, nodes=[2, 2], timeout=20) as world:
        for told in world.run(work, new_model(model)):
            assert re.search(text, told), told


def overlaps(comm: Communicator, base: Any, asked: bool | None) -> bool | None:
    module = shard_by_world(comm, base, overlap=asked)
    found: bool | None = zero.stages.sharding.engine_of(module, "test").options.overlap
    zero.remove_sharding(module)
    return found


def test_over_nodes_it_overlaps_unless_told(two_by_two, monkeypatch):
    """Overlap is on by default even with one core: waiting for another node uses no core."""
    monkeypatch.setattr(zero.stages.sharding, "available_cores", lambda: 1)
    for asked in (None, True, False):
        found = two_by_two.run(overlaps, new_model("mlp"), asked)
        assert list(map(bool, found)) == [asked is not False] * 4


# ---- checkpoints -------------------------------------------------------------------------------

JOB: dict[str, Any] = {"precision": BF16, "adamw": AdamWOptions(master="remainder"), "scaled": True}


def load_and_save(
    comm: Communicator, base: Any, choice: Choice, source: Path, target: Path
) -> dict[str, Any]:
    stage, options = choice
    job = Job(comm, base, stage, **JOB, zero_options=options)
    job.load(source)
    job.save(target)
    return job.state()


def go_on(comm: Communicator, base: Any, choice: Choice, root: Path) -> dict[str, Any]:
    stage, options = choice
    job = Job(comm, base, stage, **JOB, zero_options=options)
    assert job.load(root).exact
    job.train("mlp", 1)
    return job.state()


def begin(comm: Communicator, base: Any, root: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Saves after two steps, and takes a third step."""
    job = Job(comm, base, 3, **JOB)
    job.train("mlp", 2)
    job.save(root)
    saved, full = job.state(), job.optimizer.full_state_dict()
    job.train("mlp", 1)
    # In torch's format, remainders need the parameters as well, which other nodes have copies of.
    for options in ({}, BY_NODE, BY_WORLD):
        other = Job(comm, base, 3, **JOB, zero_options=options)
        other.optimizer.load_torch_state_dict(full)
        assert_same_bits(
            {name: saved[name] for name in dict(base.named_parameters())},
            {name: zero.full_state_dict(other.module)[name] for name, _ in base.named_parameters()},
        )
    return saved, job.state()


def test_a_checkpoint_loads_into_any_nodes_and_choice(two_by_two, tmp_path):
    base, source = new_model("mlp"), tmp_path / "begun"
    saved, wanted = two_by_two.run(begin, base, source)[0]
    for choice in CHOICES[6:]:
        for state in two_by_two.run(go_on, base, choice, source):
            assert_same_bits(state, wanted)
    hops: list[tuple[list[int], Choice]] = [
        ([2], (1, {})),
        ([2, 1], (3, BY_WORLD)),
    ]
    for number, (nodes, choice) in enumerate(hops):
        target = tmp_path / str(number)
        with ringcomm.local_world(sum(nodes), nodes=nodes, timeout=60) as world:
            for state in world.run(load_and_save, base, choice, source, target):
                assert_same_bits(state, saved)
        source = target


def save_by_torch(root: Path, rank: int, world_size: int) -> None:
    """Saves and loads by torch's checkpoints on nodes whose ranks are not consecutive."""
    import torch.distributed.checkpoint as dcp

    from ringcomm.zero.checkpoint import LoadPlanner, SavePlanner, StorageReader, StorageWriter

    store = dist.PrefixStore("nodes", dist.distributed_c10d._get_default_store())
    with mock.patch.dict(os.environ), join_nodes(store, rank, world_size, ((0, 3), (1, 2))) as comm:
        job = Job(comm, new_model("mlp"), 3, **JOB)
        job.train("mlp", 1)
        saved = job.state()
        entry = {"train": zero.TrainState(job.module, job.optimizer)}
        dcp.save(entry, storage_writer=StorageWriter(root), planner=SavePlanner())
        other = Job(comm, new_model("mlp"), 3, **JOB, zero_options=BY_WORLD)
        entry = {"train": zero.TrainState(other.module, other.optimizer)}
        dcp.load(entry, storage_reader=StorageReader(root), planner=LoadPlanner())
        assert_same_bits(other.state(), saved)


def test_torch_checkpoints_load_into_another_choice(rank_pools, tmp_path):
    rank_pools(4).run(partial(save_by_torch, tmp_path / "saved"), "gloo")


# ---- faults ------------------------------------------------------------------------------------


def lose_one(store: Store, rank: int, world_size: int, nodes: Nodes) -> str:
    with join_nodes(store, rank, world_size, nodes) as comm:
        run = Run("mlp", 3, options={"overlap": True})
        module: Any = zero.shard(new_model("mlp"), 3, comm=comm, options=options_of(run))
        optimizer = AdamW(module.parameters())
        optimizer.prepare()
        module(torch.ones(2, 13)).backward()
        if rank == 3:
            backend: Any = optimizer.sharded_step().backend
            update = backend.update_shard

            def leave(*arguments: Any) -> None:
                update(*arguments)
                os._exit(1)

            backend.update_shard = leave
        try:
            optimizer.step()
        except RingcommError as error:
            with pytest.raises(RingcommError, match="failed halfway"):
                optimizer.step()
            return str(error)
        raise AssertionError("the step of a lost rank ended well")


def test_a_rank_that_is_lost_in_a_step_ends_it_on_all_nodes():
    with Ranks(lose_one, 4, ((0, 1), (2, 3))) as ranks:
        for outcome in ranks.wait(60, [0, 1, 2]):
            assert outcome.ok, outcome.trace
            assert "rank 3" in outcome.value


# ---- refusals ----------------------------------------------------------------------------------


def refuse(comm: Communicator, base: Any) -> None:
    params = [torch.nn.Parameter(torch.ones(3))]
    by_node = AdamWOptions(state="node")
    equally = r"expected nodes with equally many ranks, got 2, 1\. Pass "
    for attempt, text in (
        (partial(zero.shard, base, 3, comm=comm), rf'params="node" at stage 3: {equally}'),
        (
            partial(zero.shard, base, 1, comm=comm, options=zero.ZeroOptions(**BY_NODE)),
            rf'state="node": {equally}ZeroOptions\(state=',
        ),
        (AdamW(params, comm=comm, options=by_node).prepare, rf'state="node": {equally}state='),
    ):
        with pytest.raises(UnsupportedError, match=text):
            attempt()
    for options, text in (
        (AdamWOptions(kernels="triton"), 'kernels: expected "native" over several nodes'),
        (AdamWOptions(algorithm="ring"), 'algorithm: expected "auto" or "one_shot"'),
    ):
        with pytest.raises(UnsupportedError, match=text):
            AdamW(params, comm=comm, options=options).prepare()
    with pytest.raises(UnsupportedError, match='algorithm: expected "auto" or "one_shot"'):
        zero.shard(base, 1, comm=comm, options=zero.ZeroOptions(algorithm="ring"))


def test_what_there_is_not_over_nodes_is_refused():
    base = new_model("mlp")
    with ringcomm.local_world(3, nodes=[2, 1], timeout=60) as world:
        world.run(lambda comm: refuse(comm, deepcopy(base)))


def test_parameters_by_world_with_state_by_node_are_refused():
    with pytest.raises(ArgumentError, match='params: expected "node" with state="node"'):
        zero.ZeroOptions(params="world", state="node")
