# SPDX-License-Identifier: Apache-2.0
"""Every call accepts any object with ``__index__`` as an integer, and any sequence of integers."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import ringcomm
from ringcomm import ArgumentError, CommOptions, Communicator, Disk, optim, zero
from ringcomm import functional as F
from ringcomm.c10d.comm_argument import Mesh
from ringcomm.c10d.process_group import ProcessGroup
from ringcomm.extras import moe
from ringcomm.integers import integer, integers, real
from ringcomm.json_reader import shown
from ringcomm.zero.checkpoint.folder import Checkpoints
from tests.comm.conftest import worlds
from tests.support.rank_pool import default_group, same

__all__ = ["worlds"]

T = torch.ones


class Index:
    """An integer class that a user might write."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"Index({self.value})"

    def __index__(self) -> int:
        return self.value


# By kind, functions that make a number and a list of numbers.
Number = Callable[[int], Any]
List = Callable[[list[int]], Any]
KINDS: dict[str, tuple[Number, List]] = {
    "int": (int, list),
    "numpy": (np.int64, np.array),
    "small numpy": (np.int32, lambda values: [np.int32(value) for value in values]),
    "numpy of no dimension": (np.array, tuple),
    "tensor": (torch.tensor, torch.tensor),
    "class": (Index, lambda values: tuple(map(Index, values))),
}
INTS = KINDS["int"]

NAMES = re.compile(
    r"(group_)?(src|dst|peer|rank)|(global_|new_)?ranks?|tag|color|key|\w*splits?(_sizes)?"
    r"|world_size|n|nodes|device_ids|\w*_bytes|num_experts|max_rows|top_k|length|step|stage"
    r"|bucket_elems|seed|prefetch|in_flight|divisor|slots|channels|records|sum_group_size"
)


# ---- calls on ranks that are threads ------------------------------------------------------------


def passed_on(send: Callable[..., Any], recv: Callable[..., Any], comm: Communicator) -> Any:
    """Rank 0 sends to rank 1; returns each rank's tensor after this."""
    tensor = torch.full((2,), comm.rank + 1.0)
    work = send(tensor) if comm.rank == 0 else recv(tensor)
    if work is not None and not isinstance(work, int):
        work.wait()
    return tensor


def messages(comm: Communicator, number: Number) -> Any:
    kind = {"tag": number(3)}
    to, of = number(1), number(0)
    return [
        passed_on(lambda x: comm.send(x, to, **kind), lambda x: comm.recv(x, of, **kind), comm),
        passed_on(lambda x: comm.isend(x, to, **kind), lambda x: comm.irecv(x, of, **kind), comm),
        passed_on(
            lambda x: ringcomm.send(x, to, **kind),
            lambda x: ringcomm.recv(x, group_src=of, **kind),
            comm,
        ),
        passed_on(
            lambda x: ringcomm.isend(x, group_dst=to, **kind),
            lambda x: ringcomm.irecv(x, of, **kind),
            comm,
        ),
        batched(comm, number),
    ]


def batched(comm: Communicator, number: Number) -> torch.Tensor:
    got, peer = torch.zeros(1), number(1 - comm.rank)
    ops = [
        ringcomm.P2POp(ringcomm.isend, T(1), peer, tag=number(2)),
        ringcomm.P2POp(ringcomm.irecv, got, group_peer=peer, tag=number(2)),
    ]
    for work in ringcomm.batch_isend_irecv(ops):
        work.wait()
    return got


def exchanged(comm: Communicator, many: List) -> list[torch.Tensor]:
    mine = torch.arange(3.0) + comm.rank
    leaves = many([1, 2])
    arrives = many([1, 1] if comm.rank == 0 else [2, 2])
    outs = [torch.zeros(2 if comm.rank == 0 else 4) for _ in range(2)]
    comm.all_to_all_single(outs[0], mine, arrives, leaves)
    ringcomm.all_to_all_single(outs[1], mine, arrives, leaves)
    return [*outs, F.all_to_all(mine, arrives, leaves, comm)]


def groups(comm: Communicator, number: Number, many: List) -> Any:
    found = []
    for made in (
        comm.new_group(many([1, 0])),
        ringcomm.new_group(many([0, 1])),
        comm.split(number(7), number(1 - comm.rank)),
        comm.split(number(comm.rank)),
    ):
        assert isinstance(made, Communicator)
        found.append((made.rank, made.ranks))
        made.close()
    return [
        found,
        ringcomm.get_group_rank(comm, number(1)),
        ringcomm.get_global_rank(comm, number(1)),
        comm.node_of(number(1)),
    ]


def rooted(comm: Communicator, number: Number) -> Any:
    """Calls every collective that has a root."""
    results: list[Any] = []
    root, is_root = number(1), comm.rank == 1
    for broadcast in (
        comm.broadcast,
        ringcomm.broadcast,
        lambda x, root: ringcomm.broadcast(x, group_src=root),
        lambda x, root: x.copy_(F.broadcast(x, root, comm)),
        comm.reduce,
        ringcomm.reduce,
        lambda x, root: ringcomm.reduce(x, group_dst=root),
    ):
        tensor = torch.full((2,), comm.rank + 1.0)
        broadcast(tensor, root)
        results.append(tensor)
    for gather in (
        comm.gather,
        lambda x, into, root: ringcomm.gather(x, into, dst=root),
        lambda x, into, root: ringcomm.gather(x, into, group_dst=root),
    ):
        into = [torch.zeros(1) for _ in range(2)] if is_root else None
        gather(torch.full((1,), comm.rank + 1.0), into, root)
        results.append(into)
    for scatter in (
        comm.scatter,
        lambda x, of, root: ringcomm.scatter(x, of, src=root),
        lambda x, of, root: ringcomm.scatter(x, of, group_src=root),
    ):
        out = torch.zeros(1)
        scatter(out, [T(1), 2 * T(1)] if is_root else None, root)
        results.append(out)
    return results


def objects(comm: Communicator, number: Number) -> Any:
    results: list[Any] = []
    is_root = comm.rank == 1
    for name in ("", "group_"):
        dst, src = {f"{name}dst": number(1)}, {f"{name}src": number(1)}
        got = [None, None] if is_root else None
        ringcomm.gather_object(comm.rank, got, **dst)
        some = [comm.rank, "x"]
        ringcomm.broadcast_object_list(some, **src)
        out = [None]
        ringcomm.scatter_object_list(out, ["a", "b"] if is_root else None, **src)
        results += [got, some, out]
    return results


def positions_and_experts(comm: Communicator, number: Number) -> Any:
    idx = torch.tensor([[0], [1]])
    sent = moe.dispatch(T(2, 4), idx, None, number(2), comm, max_rows=number(4))
    layer = moe.MoE(
        torch.nn.Linear(4, 2),
        torch.nn.Linear(4, 4),
        comm,
        num_experts=number(2),
        options=moe.RoutingOptions(top_k=number(1)),
    )
    return F.context_positions(number(8), comm), sent[:2], layer.num_experts


def everything(kind: str, comm: Communicator) -> Any:
    number, many = KINDS[kind]
    return [
        messages(comm, number),
        exchanged(comm, many),
        groups(comm, number, many),
        rooted(comm, number),
        objects(comm, number),
        positions_and_experts(comm, number),
    ]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "int"])
def test_calls(worlds, kind):
    world = worlds(2)
    for got, want in zip(
        world.run(partial(everything, kind)), world.run(partial(everything, "int")), strict=True
    ):
        same(got, want)


# ---- calls of a single process ------------------------------------------------------------------


COUNTS: dict[str, Any] = {
    "segment_bytes": 128,
    "slots": 8,
    "channels": 2,
    "ll_bytes": 64,
    "copy_engine_bytes": 64,
    "multicast_bytes": 64,
    "records": 4,
    "sum_group_size": 1,
    "largest_object_bytes": 9,
}


@pytest.mark.parametrize("kind", KINDS)
def test_options_and_worlds(tmp_path, kind):
    number, many = KINDS[kind]
    options = CommOptions(timeout=number(5), **{n: number(v) for n, v in COUNTS.items()})
    assert options == CommOptions(timeout=options.timeout, **COUNTS)
    assert all(type(getattr(options, name)) is int for name in COUNTS)
    assert options.timeout_s == 5.0
    ringcomm.empty(1)  # makes the heap, larger than the local world below asks for
    with ringcomm.local_world(
        number(2), timeout=number(20), heap_bytes=number(4 << 20), nodes=many([1, 1])
    ) as world:
        assert world[0].world_size == 2 and world[0].num_nodes == 2
        with pytest.raises(ArgumentError, match="local_world: nodes: expected"):
            ringcomm.local_world(number(2), nodes=many([1, 2]))
    with Communicator.from_store(dist.HashStore(), number(0), number(1)) as comm:
        assert type(comm.rank) is int and comm.ranks == (0,)
        module = zero.shard(torch.nn.Linear(2, 2), number(1), comm=comm)
        files = zero.save_pretrained(module, tmp_path / "weights", max_file_bytes=number(16))
        assert len(files) == 2
        zero.remove_sharding(module)
    store = dist.HashStore()
    ringcomm.init_process_group(store=store, rank=number(0), world_size=number(1))
    assert ringcomm.get_rank() == 0
    ringcomm.destroy_process_group()
    disk = Disk(tmp_path, buffer_bytes=number(4096), resident_bytes=number(0), timeout_s=number(3))
    assert (disk.buffer_bytes, disk.resident_bytes, disk.timeout_s) == (4096, 0, 3.0)
    assert optim.AdamWOptions(bucket_elems=number(512), seed=number(3)) == optim.AdamWOptions(
        bucket_elems=512, seed=3
    )
    chosen: dict[str, Any] = {"bucket_elems": 512, "in_flight": 2, "prefetch": 1, "divisor": 3}
    batches = {"train_batch_size": 4, "optimizer": {"type": "AdamW"}}
    setup = zero.from_deepspeed(batches, world_size=number(2))
    assert (type(setup.micro_batch_size), setup.micro_batch_size) == (int, 2)
    zeros = zero.ZeroOptions(**{name: number(value) for name, value in chosen.items()})
    assert zeros == zero.ZeroOptions(**chosen)
    assert zero.UnitOptions(prefetch=number(2)) == zero.UnitOptions(prefetch=2)
    checkpoints = Checkpoints(tmp_path, keep=number(2))
    assert checkpoints.keep == 2 and checkpoints.folder(number(7)).name == "step-00000007"
    zero.activations_on(disk, least_bytes=number(8))
    assert ringcomm.empty(number(2), number(3)).shape == (2, 3)
    assert ringcomm.zeros(many([2, 3])).shape == (2, 3)


@pytest.mark.parametrize("value", [np.float32(2.0), np.float64(2.0), np.int8(2), torch.tensor(2)])
def test_seconds_and_factors(value):
    assert CommOptions(timeout=value).timeout_s == 2.0
    assert ringcomm.premul_sum(value).factor == 2.0


# ---- torch.distributed --------------------------------------------------------------------------


def of_torch(kind: str, rank: int, world_size: int) -> Any:
    number, many = KINDS[kind]
    group = default_group()
    results: list[Any] = []
    for receive in (
        lambda x: dist.recv(x, number(0), tag=number(3)),
        lambda x: dist.irecv(x, group_src=number(0), tag=number(3)).wait(),
    ):
        tensor = torch.full((2,), rank + 1.0)
        dist.send(tensor, number(1), tag=number(3)) if rank == 0 else receive(tensor)
        results.append(tensor)
    got = torch.zeros(1)
    ops = [
        dist.P2POp(dist.isend, T(1), number(1 - rank)),
        dist.P2POp(dist.irecv, got, number(1 - rank)),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    out = torch.zeros(2 if rank == 0 else 4)
    arrives = many([1, 1] if rank == 0 else [2, 2])
    dist.all_to_all_single(out, torch.arange(3.0) + rank, arrives, many([1, 2]))
    rooted = torch.full((2,), rank + 1.0)
    dist.broadcast(rooted, number(1))
    dist.reduce(rooted, number(0))
    if not isinstance(group, ProcessGroup):
        return [*results, got, out, rooted]
    # Gloo lacks these calls, or has other names for them.
    child = group.split_group(many([1, 0]))
    assert child is not None and child.rank() == 1 - rank
    child.shutdown()
    mesh = Mesh(dp=number(2), tp=number(1))
    assert mesh.shape == (2, 1)
    group.monitored_barrier(number(20) if kind == "int" else np.float32(20.0))
    return [*results, got, out, rooted]


@pytest.mark.filterwarnings("ignore:Please specify timeout arg as a timedelta")
@pytest.mark.parametrize("kind", KINDS)
def test_torch_distributed(rank_pools, kind):
    check = partial(of_torch, kind)
    pool = rank_pools(2)
    pool.compare(check) if kind in ("int", "numpy", "small numpy") else pool.run(check)


# ---- what is no integer -------------------------------------------------------------------------

NOT_INTEGERS = (1.0, "1", None, torch.tensor(1.0), torch.tensor([0, 1]), np.float32(1), [1])
TOO_LARGE = (2**63, 2**70, -(2**63) - 1, np.uint64(2**63), Index(2**70), 10**5000)


@pytest.mark.parametrize("value", [*NOT_INTEGERS, *TOO_LARGE], ids=shown)
def test_what_is_no_integer_is_refused(worlds, value):
    def body(comm):
        if value is not None:  # None means any sender
            with pytest.raises(ArgumentError, match="src: expected a rank from 0 to 1, got"):
                comm.recv(T(1), value)
        with pytest.raises(ArgumentError, match="tag: expected 0 <= tag"):
            comm.send(T(1), 1 - comm.rank, value)
            with pytest.raises(ArgumentError, match="color: expected an integer from"):
                comm.split(value)
            with pytest.raises(ArgumentError, match="src: expected one of the group's"):
                F.broadcast(T(1), value, comm)
            with pytest.raises(ArgumentError, match="global_rank: expected one of the group's"):
                ringcomm.get_group_rank(comm, value)
        with pytest.raises(ArgumentError, match="key: expected an integer from"):
            comm.split(0, value)
        with pytest.raises(ArgumentError, match="input_splits: expected a list of integers"):
            F.all_to_all(T(2), [1, 1], [value, 1], comm)
        with pytest.raises(ArgumentError, match="group_rank: expected 0 to 1"):
            ringcomm.get_global_rank(comm, value)
        with pytest.raises(ArgumentError, match="length: expected a positive"):
            F.context_positions(value, comm)
        with pytest.raises(ArgumentError, match="ranks"):
            comm.new_group([value])
        with pytest.raises(ArgumentError, match="records: expected an integer from"):
            CommOptions(records=value)
        if value is not None:  # None means the communicator's world size
            with pytest.raises(ArgumentError, match="world_size: expected a positive integer"):
                zero.from_deepspeed({}, world_size=value)

    worlds(2).run(body)


@pytest.mark.parametrize("values", [3, "01", np.array(3), torch.tensor(3), [0.0, 1.0], [[0], [1]]])
def test_what_is_no_list_of_integers_is_refused(worlds, values):
    def body(comm):
        with pytest.raises(
            ArgumentError, match=r"new_group on rank \d of 2: ranks: expected a list"
        ):
            comm.new_group(values)
        with pytest.raises(ArgumentError, match="output_split_sizes: expected a list of integers"):
            comm.all_to_all_single(T(2), T(2), values, [1, 1])
        with pytest.raises(ArgumentError, match="input_splits: expected a list of integers"):
            F.all_to_all(T(2), [1, 1], values, comm)

    worlds(2).run(body)


def test_a_number_out_of_range_is_not_called_no_integer(worlds):
    def body(comm):
        with pytest.raises(ArgumentError) as caught:
            comm.broadcast(T(1), np.int64(2))
        assert "expected a rank from 0 to 1" in str(caught.value)
        assert "integer" not in str(caught.value)

    worlds(2).run(body)


@pytest.mark.parametrize("kind", [bool, np.bool_, torch.tensor])
def test_conditions_are_integers(worlds, kind):
    """Bools serve as ranks, roots, tags, colors, keys and splits."""

    def condition(value: int) -> Any:
        return kind(bool(value))

    def body(comm):
        group = comm.split(condition(comm.rank == 1), condition(0))
        assert group is not None and group.ranks == (comm.rank,)
        group.close()
        tag = {"tag": condition(1)}
        message = passed_on(
            lambda x: comm.send(x, condition(1), **tag),
            lambda x: comm.recv(x, condition(0), **tag),
            comm,
        )
        splits = [condition(1), condition(1)]
        sent = F.all_to_all(T(2) * comm.rank, splits, splits, comm)
        group = comm.new_group([condition(0), condition(1)])
        assert group is not None and group.ranks == (0, 1)
        group.close()
        return message, sent, rooted(comm, condition), objects(comm, condition)

    def with_ints(comm):
        return (
            torch.ones(2) * (1 if comm.rank else comm.rank + 1.0),
            torch.tensor([0.0, 1.0]),
            rooted(comm, int),
            objects(comm, int),
        )

    for got, want in zip(worlds(2).run(body), worlds(2).run(with_ints), strict=True):
        same(got, want)


def test_an_error_of_index_itself_comes_through():
    class Broken:
        def __index__(self) -> int:
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        integer(Broken())
    assert integer(torch.tensor(1, device="meta")) is None
    assert integers(range(3)) == [0, 1, 2] and integers({2}) == [2]
    assert [integer(each) for each in TOO_LARGE] == [None] * len(TOO_LARGE)
    assert integers([1, 2**63]) is None and integer(2**63, most=2**64 - 1) == 2**63
    assert integer(-(2**63)) == -(2**63) and integer(2**63 - 1) == 2**63 - 1
    assert real(True) is None and real("1") is None and real(2) == 2.0


# ---- nothing is left out ------------------------------------------------------------------------

# Internal calls, results, attention's keys, calls that need a launcher or a device, and calls of a
# module that pass their number to a call that this file tests.
ELSEWHERE = {
    "Communicator.from_env",
    "barrier",
    "convert",
    "load",
    "save",
    "Communicator.all_gather_bucket",
    "Communicator.all_gather_quantized",
    "Communicator.lost",
    "ring_attention",
    "ulysses_attention",
    "Activations",
    "Loaded",
    "GraphedStep",
    "RankRecording",
    "Record",
    "Recording",
    "export_safetensors",
}


def test_every_public_parameter_is_tried():
    """This file must name each function that takes a rank, tag, color, split or count."""
    here = inspect.getsource(sys.modules[__name__])
    here = here[: here.index("# ---- what is no integer")]
    owners = ((ringcomm, ""), (Communicator, "Communicator."), (F, ""), (moe, ""), (zero, ""))
    missing = set()
    for owner, head in owners:
        for name in sorted({*dir(owner), *getattr(owner, "__all__", ())}):
            thing = getattr(owner, name, None)
            if name.startswith("_") or not callable(thing) or head + name in ELSEWHERE:
                continue
            try:
                parameters = inspect.signature(thing).parameters
            except (TypeError, ValueError):
                continue
            if any(NAMES.fullmatch(each) for each in parameters) and f"{name}(" not in here:
                missing.add(f"{owner.__name__}.{name}")
    assert not missing
