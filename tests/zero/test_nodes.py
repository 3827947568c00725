"""Sharded training over several nodes, which here are processes that say that they are on some."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import Store

import ringcomm
from ringcomm import CommOptions, Communicator, zero
from ringcomm.comm.nodes.rails import HEADER_TAG
from ringcomm.errors import RingcommError, UnsupportedError
from ringcomm.optim import AdamW, AdamWOptions
from tests.support.ranks import Ranks, join_nodes, run_ranks
from tests.zero.job import BF16, Job
from tests.zero.models import MODELS, Run, assert_same_bits, new_model, options_of, train

Nodes = Sequence[Sequence[int]]
TWO_BY_TWO = ((0, 1), (2, 3))
ONE_EACH = ((0,), (1,), (2,))
RUNS = (
    Run("mlp", 0, steps=3, backwards=2, clip=0.3),
    Run("gpt", 0, steps=2, precision=BF16, adamw=AdamWOptions(master="remainder")),
    Run("partial", 0, steps=2, precision=replace(BF16, reduce=torch.bfloat16)),
)
# Stages 2 and 3 add in another order than 0 and 1 here, on one node, too.
ADDING = Run("mlp", 2, steps=2, backwards=2, quiet=False)


# ---- bits --------------------------------------------------------------------------------------


def train_on_nodes(
    store: Store, rank: int, world_size: int, nodes: Nodes, runs: Sequence[Run]
) -> list[Any]:
    with join_nodes(store, rank, world_size, nodes) as comm:
        assert comm.num_nodes == len(nodes)
        return [train(comm, new_model(run.model), run) for run in runs]


def train_on_one_node(
    world_size: int, sum_blocks: int, run: Run
) -> tuple[dict[str, torch.Tensor], list[float]]:
    base = new_model(run.model)
    with ringcomm.local_world(world_size, options=CommOptions(sum_blocks=sum_blocks)) as world:
        return world.run(train, base, run)[0]


def all_stages(run: Run) -> list[Run]:
    return [replace(run, stage=stage, options={"overlap": stage != 2}) for stage in range(4)]


def test_all_stages_end_with_the_bits_of_one_node():
    """Those of one node that sums in blocks of ranks, and not those of one that does not."""
    runs = [each for run in RUNS for each in all_stages(run)] + all_stages(ADDING)[2:]
    by_rank = run_ranks(train_on_nodes, 4, TWO_BY_TWO, runs, timeout_s=240)
    for number, run in enumerate((*RUNS, ADDING)):
        wanted, norms = train_on_one_node(4, 2, replace(run, stage=max(run.stage, 1)))
        for results in by_rank:
            for state, their_norms in results[4 * number : 4 * number + 4]:
                assert their_norms == norms
                assert_same_bits(state, wanted)
    other, _ = train_on_one_node(4, 0, ADDING)
    assert any(not torch.equal(other[name], wanted[name]) for name in wanted)


def test_nodes_of_one_rank_end_with_the_bits_of_one_node():
    by_rank = run_ranks(train_on_nodes, 3, ONE_EACH, all_stages(RUNS[0]), timeout_s=120)
    wanted, norms = train_on_one_node(3, 0, replace(RUNS[0], stage=1))
    for results in by_rank:
        for state, their_norms in results:
            assert their_norms == norms
            assert_same_bits(state, wanted)


# ---- what leaves a node ------------------------------------------------------------------------


@contextmanager
def counted(comm: Communicator) -> Iterator[Counter[str]]:
    """Counts what this rank sends on rails: bytes of data by call, and the messages."""
    core: Any = comm._core
    rails = core._rails
    sent: Counter[str] = Counter()
    send = rails.send

    def counting(rail: int, node: int, memory: torch.Tensor, tag: int) -> Any:
        sent["messages"] += 1
        if tag != HEADER_TAG:
            sent[core._called.name] += memory.numel()
        return send(rail, node, memory, tag)

    rails.send = counting
    try:
        yield sent
    finally:
        rails.send = send


def send_in_a_step(
    store: Store, rank: int, world_size: int, nodes: Nodes, wire: str
) -> tuple[int, list[Counter[str]]]:
    found = []
    with join_nodes(store, rank, world_size, nodes, options=CommOptions(wire=wire)) as comm:
        for stage in (1, 3):
            run = Run("gpt", stage, precision=BF16, options={"overlap": False})
            module: Any = zero.shard(new_model("gpt"), stage, comm=comm, options=options_of(run))
            optimizer = AdamW(module.parameters())
            generator = torch.Generator().manual_seed(rank)
            for _ in range(2):  # the first one also agrees on the order of the buckets
                batch = MODELS["gpt"][1](generator, 0)
                with counted(comm) as quiet, zero.no_sync(module):
                    module(*batch).backward()
                assert not quiet
                with counted(comm) as sent:
                    module(*batch).backward()
                    optimizer.step()
                optimizer.zero_grad()
            found.append(sent)
            engine = zero.sharding.engine_of(module, "test")
            elems = sum(bucket.layout.elems for bucket in engine.stored)
            zero.unshard(module)
        return elems, found


@pytest.mark.parametrize(("wire", "grad_bytes"), [("fp32", 4), ("param", 2)])
def test_a_step_sends_each_gradient_and_parameter_once(wire, grad_bytes):
    """P (g + p) (N - 1)/N bytes leave each of N nodes, P with the padding; P (g + p) both of two.

    Forwards and backwards before the last send nothing at all.
    """
    outcomes = run_ranks(send_in_a_step, 4, TWO_BY_TWO, wire, timeout_s=120)
    elems = outcomes[0][0]
    none: Counter[str] = Counter()
    stage1, stage3 = (sum((found[i] for _, found in outcomes), none) for i in range(2))
    assert stage1["reduce_scatter_adamw_all_gather"] == elems * (grad_bytes + 2)
    assert stage3["reduce_scatter_norm"] == elems * grad_bytes
    assert stage3["all_gather_on_rail"] == elems * 2
    # The rest is which parameters take the step, 8 bytes each.
    for sent in (stage1, stage3):
        data = {name: size for name, size in sent.items() if name != "messages"}
        assert set(data) <= {
            *("reduce_scatter_adamw_all_gather", "reduce_scatter_norm", "all_gather_on_rail"),
            "all_reduce",
        }
        assert data["all_reduce"] < 0.02 * sum(data.values())


# ---- checkpoints -------------------------------------------------------------------------------

JOB = {"precision": BF16, "adamw": AdamWOptions(master="remainder"), "scaled": True}


def save_and_go_on(
    store: Store, rank: int, world_size: int, nodes: Nodes, root: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Saves after two steps in all ways, loads what was saved, and takes two more steps."""
    import torch.distributed.checkpoint as dcp

    from ringcomm.zero.checkpoint import LoadPlanner, SavePlanner, StorageReader, StorageWriter

    with join_nodes(store, rank, world_size, nodes) as comm:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        job = Job(comm, new_model("gpt"), 3, **JOB)
        job.train("gpt", 2)
        job.save(root / "own")
        saved = job.state()
        entry = {"train": zero.TrainState(job.module, job.optimizer)}
        dcp.save(entry, storage_writer=StorageWriter(root / "dcp"), planner=SavePlanner())
        full, model = job.optimizer.full_state_dict(), zero.full_state_dict(job.module)
        job.train("gpt", 2)
        wanted = job.state()

        again = Job(comm, new_model("gpt"), 3, **JOB)
        assert again.load(root / "own").exact
        again.train("gpt", 2)
        assert_same_bits(again.state(), wanted)

        other = Job(comm, new_model("gpt"), 3, **JOB)
        entry = {"train": zero.TrainState(other.module, other.optimizer)}
        dcp.load(entry, storage_reader=StorageReader(root / "dcp"), planner=LoadPlanner())
        assert_same_bits(zero.full_state_dict(other.module), model)

        # With remainders torch's format brings parameters, too, which other nodes have copies of.
        third = Job(comm, new_model("gpt"), 3, **JOB)
        third.optimizer.load_torch_state_dict(full)
        assert_same_bits(zero.full_state_dict(third.module), model)
        dist.destroy_process_group()
        return saved, wanted


def load_on_nodes(
    store: Store, rank: int, world_size: int, nodes: Nodes, root: Path
) -> dict[str, Any]:
    with join_nodes(store, rank, world_size, nodes) as comm:
        job = Job(comm, new_model("gpt"), 3, **JOB)
        job.load(root)
        return job.state()


def test_a_checkpoint_loads_into_any_nodes_and_stage(tmp_path):
    saved, _ = run_ranks(save_and_go_on, 4, TWO_BY_TWO, tmp_path, timeout_s=240)[0]
    base = new_model("gpt")

    def load_and_save(comm: Communicator, stage: int, source: Path, target: Path) -> Any:
        job = Job(comm, base, stage, **JOB)
        job.load(source)
        job.save(target)
        return job.state()

    source = tmp_path / "own"
    for world_size, stage in ((2, 1), (3, 3)):
        target = tmp_path / f"world{world_size}"
        with ringcomm.local_world(world_size) as world:
            for state in world.run(load_and_save, stage, source, target):
                assert_same_bits(state, saved)
        source = target
    # The ranks of a node need not follow each other.
    for state in run_ranks(load_on_nodes, 4, ((0, 3), (1, 2)), source, timeout_s=120):
        assert_same_bits(state, saved)


# ---- faults ------------------------------------------------------------------------------------


def lose_one(store: Store, rank: int, world_size: int, nodes: Nodes) -> str:
    with join_nodes(store, rank, world_size, nodes) as comm:
        run = Run("mlp", 3, options={"overlap": True})
        module: Any = zero.shard(new_model("mlp"), 3, comm=comm, options=options_of(run))
        optimizer = AdamW(module.parameters())
        optimizer.prepare()
        module(torch.ones(2, 13)).backward()
        if rank == 3:
            kernels: Any = optimizer.sharded_step().kernels
            update = kernels.update_shard

            def leave(*arguments: Any) -> None:
                update(*arguments)
                os._exit(1)

            kernels.update_shard = leave
        try:
            optimizer.step()
        except RingcommError as error:
            with pytest.raises(RingcommError, match="failed halfway"):
                optimizer.step()
            return str(error)
        raise AssertionError("the step of a lost rank ended well")


def test_a_rank_that_is_lost_in_a_step_ends_it_on_all_nodes():
    with Ranks(lose_one, 4, TWO_BY_TWO) as ranks:
        for outcome in ranks.wait(60, [0, 1, 2]):
            assert outcome.ok, outcome.trace
            assert "rank 3" in outcome.value


# ---- refusals ----------------------------------------------------------------------------------


def refuse(store: Store, rank: int, world_size: int, nodes: Nodes) -> None:
    with join_nodes(store, rank, world_size, nodes) as comm:
        params = [torch.nn.Parameter(torch.ones(3))]
        for attempt in (
            lambda: zero.shard(new_model("mlp"), 1, comm=comm),
            lambda: AdamW(params, comm=comm).prepare(),
        ):
            with pytest.raises(UnsupportedError, match=r"equally many ranks, got 2, 1\. Start"):
                attempt()
        even = comm.new_group([0, 2])
        if even is None:
            return
        for options, text in (
            (zero.ZeroOptions(params="world"), 'params: expected "node"'),
            (zero.ZeroOptions(state="node"), 'state: expected "world"'),
            (zero.ZeroOptions(algorithm="ring"), 'algorithm: expected "auto" or "direct"'),
        ):
            with pytest.raises(UnsupportedError, match=text):
                zero.shard(new_model("mlp"), 3, comm=even, options=options)
        for adamw, text in (
            (AdamWOptions(kernels="triton"), 'kernels: expected "native" over several nodes'),
            (AdamWOptions(algorithm="ring"), 'algorithm: expected "auto" or "direct"'),
        ):
            with pytest.raises(UnsupportedError, match=text):
                AdamW(params, comm=even, options=adamw).prepare()
        even.close()


def test_what_there_is_not_over_nodes_is_refused():
    run_ranks(refuse, 3, ((0, 1), (2,)))
