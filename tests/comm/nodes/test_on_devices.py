# SPDX-License-Identifier: Apache-2.0
"""Calls on emulated devices over nodes are exact, and have the same bits as on the host.

Threads of one process play the ranks of several nodes. Gloo sends emulated devices' memory instead
of NCCL, in stream order (tests/support/device_transport.py).
"""

from __future__ import annotations

import functools
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import ringcomm
from ringcomm import (
    AbortedError,
    ArgumentError,
    CollectiveTimeout,
    CommOptions,
    Communicator,
    LocalWorld,
    MismatchError,
    PeerLost,
    ReduceOp,
    RendezvousError,
    RingcommError,
    UnsupportedError,
)
from ringcomm.comm.agreement import any_rank
from ringcomm.comm.nodes import calls, compressed_sums, device_core
from ringcomm.comm.nodes import transport as device_rails
from ringcomm.process import Deadline
from tests.comm.nodes.test_calls import drawn
from tests.support.call_checks import (
    CHECKS,
    EMULATED,
    Case,
    check_all_reduce,
    check_all_to_all,
)
from tests.support.covering import EVERY_CASE, covering, in_test_all
from tests.support.device_transport import emulated_nccl
from tests.support.device_worlds import OPTIONS, Devices, on_host, put, room, with_options
from tests.support.emulator.in_stream_order import InStreamOrder
from tests.support.emulator.library import COMPILER
from tests.support.exact import same
from tests.support.ranks import Ranks, join_nodes

# The node of each rank: two equal nodes, and unequal nodes with ranks in mixed order.
NODES = [(0, 0, 1, 1), (0, 1, 2, 0)]
NAMES = [name for name in CHECKS if name != "messages"]
OVER_NCCL = with_options(transport=emulated_nccl)
COUNT = 1200


@pytest.fixture(scope="module")
def devices() -> Iterator[Devices]:
    if COMPILER is None:
        pytest.skip("the emulator needs a C++ compiler")
    # The ranks of a node share a device. A transport's stream must never wait in a hardware queue
    # behind a stream of another rank that waits for this transport.
    made = Devices("emulated", devices=3, hardware_queues=1024)
    with pytest.MonkeyPatch.context() as patch:
        # Small limits, so that calls of some kilobytes use all paths.
        patch.setattr(calls, "ONE_HOP_BYTES", 64)
        patch.setattr(device_core, "SCRATCH_BYTES", 2048)
        yield made
    made.close()


def world_of(nodes: tuple[int, ...], options: CommOptions = OVER_NCCL) -> LocalWorld:
    """Builds ranks on the given nodes, listed by rank; the ranks of a node share its device."""
    store, made = torch.distributed.HashStore(), {}

    def build(rank: int) -> None:
        node = nodes[rank]
        made[rank] = Communicator.from_store(
            store,
            rank,
            len(nodes),
            options=options,
            device=f"cuda:{node}",
            node_id=f"node{node}",
        )

    in_threads(build, len(nodes))
    return LocalWorld([made[rank] for rank in range(len(nodes))])


def in_threads(body: Callable[[int], None], world_size: int) -> None:
    with ThreadPoolExecutor(world_size) as pool:
        for each in [pool.submit(body, rank) for rank in range(world_size)]:
            each.result()


@pytest.fixture(scope="module", params=NODES, ids=str)
def world(devices: Devices, request: Any) -> Iterator[LocalWorld]:
    with world_of(request.param) as made:
        yield made


@covering(strength=1, indirect=["world"], world=NODES, name=NAMES)
def test_every_collective(devices: Devices, world: LocalWorld, name: str) -> None:
    """None, one element, less than a vector, several segments."""
    memories = ("plain", "heap", "unaligned", "mixed", "plain")
    cases = [
        Case(count, memory=memory, in_place=turn % 2 == 0, root=turn % 4, async_op=turn % 3 == 1)
        for turn, (count, memory) in enumerate(zip((0, 1, 7, 601, 602), memories, strict=True))
    ]

    def body(comm: Communicator) -> None:
        for case in cases:
            CHECKS[name](comm, case)

    devices.run(world, body)


@pytest.mark.parametrize("world", [(0, 0, 1)], indirect=True)
def test_the_hosts_agree_on_flags(devices: Devices, world: LocalWorld) -> None:
    def body(comm: Communicator) -> list[bool]:
        assert comm.on_host().num_nodes == 2
        return any_rank(comm, [comm.rank == at for at in (1, 2, 3)])

    assert devices.run(world, body) == [[True, True, False]] * 3


@pytest.mark.parametrize("world", [(0, 0, 1)], indirect=True)
def test_every_dtype_and_op(devices: Devices, world: LocalWorld) -> None:
    """Each op gets every second dtype in turn; tests within one node cover all pairs."""

    def body(comm: Communicator) -> None:
        for turn, (dtype, ops) in enumerate(EMULATED.items()):
            for op in ops if EVERY_CASE or len(ops) < 2 else ops[turn % 2 :: 2]:
                check_all_reduce(comm, Case(67, dtype, op))
            check_all_to_all(comm, Case(67, dtype))

    devices.run(world, body)


@functools.cache
def of_the_host(
    sizes: tuple[int, ...], compression: str, dtype: torch.dtype, sums_alone: bool = False
) -> list[Any]:
    options = CommOptions(timeout=60, compression=compression)
    with ringcomm.local_world(sum(sizes), nodes=sizes, options=options) as made:
        return made.run(bits, dtype, lambda comm, tensor: tensor, sums_alone)


def bits(
    comm: Communicator, dtype: torch.dtype, to: Callable[..., Any], sums_alone: bool = False
) -> list[torch.Tensor]:
    """Returns sums that depend on the order of additions."""
    found = []
    each = COUNT // comm.world_size
    product = [ReduceOp.PRODUCT] if "PRODUCT" in EMULATED[dtype] else []
    ops = (ReduceOp.SUM, ReduceOp.AVG, ringcomm.premul_sum(0.3), *product)
    for op in ops[:1] if sums_alone else ops:
        tensor = to(comm, drawn(comm.rank, dtype)[: 15 if op is ReduceOp.AVG else COUNT])
        comm.all_reduce(tensor, op)
        part = to(comm, torch.empty(each, dtype=dtype))
        comm.reduce_scatter_tensor(part, to(comm, drawn(comm.rank, dtype)[:COUNT]), op)
        whole = to(comm, drawn(comm.rank, dtype)[:COUNT])
        comm.reduce(whole, 1, op)
        found += [on_host(tensor), on_host(part), on_host(whole)]
    return found


@pytest.mark.parametrize(
    ("world", "dtype"),
    [(NODES[0], torch.float32), ((0, 1, 2), torch.bfloat16)],
    indirect=["world"],
    ids=str,
)
def test_the_bits_are_the_hosts(devices: Devices, world: LocalWorld, dtype: torch.dtype) -> None:
    sizes = (2, 2) if len(world) == 4 else (1, 1, 1)
    on_devices = devices.run(world, bits, dtype, functools.partial(put, memory="plain"))
    for ours, hosts in zip(on_devices, of_the_host(sizes, "none", dtype), strict=True):
        assert all(same(x, y) for x, y in zip(ours, hosts, strict=True))


def test_sums_that_are_rounded_for_the_network(devices: Devices) -> None:
    dtype = torch.bfloat16
    with world_of((0, 0, 1), with_options(transport=emulated_nccl, compression="param")) as made:
        on_devices = devices.run(made, bits, dtype, functools.partial(put, memory="plain"))
    narrow, wide = (of_the_host((2, 1), compression, dtype) for compression in ("param", "none"))
    for ours, hosts in zip(on_devices, narrow, strict=True):
        assert all(same(x, y) for x, y in zip(ours, hosts, strict=True))
    assert not all(same(x, y) for x, y in zip(on_devices[0], wide[0], strict=True))


@pytest.mark.parametrize("compression", ["fp8", *in_test_all("int8", "int4")])
def test_quantized_values_are_the_hosts(
    devices: Devices, compression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compressed_sums, "QUANTIZED_ABOVE_BYTES", 64)
    monkeypatch.setattr(device_core, "SCRATCH_BYTES", 3000)
    dtype = torch.bfloat16
    # An op is applied before the quantization in every format, so one format tests all ops.
    sums_alone = compression != "int8"
    with world_of(
        (0, 0, 1), with_options(transport=emulated_nccl, compression=compression)
    ) as made:
        to = functools.partial(put, memory="plain")
        on_devices = devices.run(made, bits, dtype, to, sums_alone)
    for ours, hosts in zip(
        on_devices, of_the_host((2, 1), compression, dtype, sums_alone), strict=True
    ):
        assert all(same(x, y) for x, y in zip(ours, hosts, strict=True))
    uncompressed = of_the_host((2, 1), "none", dtype, sums_alone)
    assert not all(same(x, y) for x, y in zip(on_devices[0], uncompressed[0], strict=True))


def test_places_groups_and_order(devices: Devices, world: LocalWorld) -> None:
    def body(comm: Communicator) -> None:
        rank, size = comm.rank, comm.world_size
        nodes = comm.num_nodes
        assert comm.launches and rank in comm.rail and len(comm.rail) == nodes
        assert comm.node.ranks == tuple(
            r for r in range(size) if comm.node_of(r) == comm.node_of(rank)
        )
        assert f"of {size} on node {comm.node_of(rank)} of {nodes}" in repr(comm)
        comm.barrier(timeout=30)
        assert {each.rank for each in comm.recording().ranks} == set(comm.node.ranks)
        group = comm.new_group([0, size - 1])
        if group is not None:
            assert group.num_nodes == len({comm.node_of(0), comm.node_of(size - 1)})
            tensor = put(group, torch.ones(3), "plain")
            group.all_reduce(tensor)
            assert on_host(tensor).tolist() == [2.0] * 3
            group.close()
        part = comm.split(comm.node_of(rank))
        assert part is not None and part.num_nodes == 1
        part.close()
        # The calls of a communicator run in order, although their streams differ.
        tensor = put(comm, torch.ones(3001), "heap")
        works = [comm.all_reduce(tensor, async_op=turn % 2 == 0) for turn in range(4)]
        assert all(work.wait() for work in works if work is not None)
        assert on_host(tensor).tolist() == [float(size**4)] * 3001
        comm.engine.finish_host_side()

    devices.run(world, body)


# ---- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transport", "words"), [("auto", "without it"), ("nccl", "without it"), ("gloo", "of the CPU")]
)
def test_no_transport_for_devices(devices: Devices, transport: str, words: str) -> None:
    assert not torch.distributed.is_nccl_available()
    # Any rank may be the first to refuse; the others repeat its error.
    with pytest.raises((UnsupportedError, RendezvousError), match=words):
        world_of((0, 1), with_options(transport=transport))


def test_rails_are_one_shot(devices: Devices) -> None:
    with pytest.raises((UnsupportedError, RendezvousError), match="expected auto or one_shot"):
        world_of((0, 1), with_options(rails="levels"))


def test_auto_is_nccl_without_its_watchdog(
    devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    class NCCL:
        class Options:
            _timeout: Any = None

        def __new__(cls, store: Any, node: int, num_nodes: int, options: Options) -> Any:
            made.append((options._timeout, os.environ[device_rails.WATCHDOG_VARIABLE]))
            return emulated_nccl(store, node, num_nodes, options._timeout)

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", NCCL, raising=False)
    monkeypatch.setattr(device_rails, "is_nccl_available", lambda: True)
    monkeypatch.setenv(device_rails.WATCHDOG_VARIABLE, "3")
    with world_of((0, 1), OPTIONS) as world:
        devices.run(world, check_all_reduce, Case(67))
    assert made == [(device_rails.FOR_EVER, "0")] * 2
    assert os.environ[device_rails.WATCHDOG_VARIABLE] == "3"


def test_a_transport_that_is_none(devices: Devices) -> None:
    with pytest.raises((ArgumentError, RendezvousError), match="process group"):
        world_of((0, 1), with_options(transport=lambda *_: object()))


def test_options_that_differ(devices: Devices) -> None:
    store = torch.distributed.HashStore()
    errors: list[str] = []

    def build(rank: int) -> None:
        options = with_options(transport=emulated_nccl, compression=("none", "param")[rank])
        with pytest.raises(RingcommError) as caught:
            Communicator.from_store(
                store, rank, 2, options=options, device=f"cuda:{rank}", node_id=f"n{rank}"
            )
        errors.append(str(caught.value))

    in_threads(build, 2)
    assert any("compression=param" in text and "compression=none" in text for text in errors)


def test_what_is_refused(devices: Devices) -> None:
    def body(comm: Communicator) -> None:
        tensor = room(comm, 4, torch.float32, "plain")
        parameter = torch.nn.Parameter(tensor)
        parameter.grad = torch.ones(4)
        refused: list[Callable[[], Any]] = [
            lambda: comm.send(tensor, 1 - comm.rank),
            lambda: comm.recv(tensor, 1 - comm.rank),
            lambda: comm.isend(tensor, 1 - comm.rank),
            lambda: comm.irecv(tensor, 1 - comm.rank),
            lambda: comm.all_reduce(tensor, algorithm="ring"),
            lambda: comm.engine.kernel_target("tl"),
            lambda: ringcomm.batch_isend_irecv(
                [ringcomm.P2POp(ringcomm.isend, tensor, 1 - comm.rank)]
            ),
            lambda: ringcomm.optim.AdamW([parameter], comm=comm).step(),
            lambda: ringcomm.zero.shard(torch.nn.Linear(2, 2), comm=comm),
            lambda: ringcomm.extras.moe.dispatch(tensor.view(4, 1), tokens, None, 2, comm),
        ]
        tokens = torch.zeros(4, 1, dtype=torch.int64)
        for call in refused:
            with pytest.raises(UnsupportedError):
                call()
        with pytest.raises(ArgumentError, match="GPUs do not reduce"):
            comm.all_reduce(tensor.to(torch.uint32), ReduceOp.AVG)
        assert devices.emulated is not None
        with devices.emulated.capture(comm.rank), pytest.raises(UnsupportedError, match="graph"):
            comm.all_reduce(tensor)
        comm.barrier()  # none of these calls has disturbed the peers

    with world_of((0, 1)) as made:
        devices.run(made, body)


# ---- faults ------------------------------------------------------------------------------------


def errors_of(world: LocalWorld, body: Callable[[Communicator], None]) -> list[RingcommError]:
    """Returns the errors of all ranks' ``body``."""
    found: list[RingcommError] = []

    def failing(comm: Communicator) -> None:
        with pytest.raises(RingcommError) as caught:
            body(comm)
        found.append(caught.value)
        with pytest.raises(AbortedError, match="unusable"):
            comm.barrier()

    with world:
        world.run(failing)
    return found


def test_an_abort_is_heard_on_every_node(devices: Devices) -> None:
    def body(comm: Communicator) -> None:
        with devices.as_on_gpu(comm):
            tensor = put(comm, torch.ones(3001), "plain")
            if comm.rank == 3:
                comm.abort("on purpose")
            for _ in range(10):
                comm.all_reduce(tensor)
                on_host(tensor)

    for error in errors_of(world_of((0, 0, 1, 1)), body):
        assert isinstance(error, AbortedError)
        assert "on purpose" in str(error)
    with world_of((0, 0, 1, 1)) as another:
        devices.run(another, lambda comm: comm.barrier())


@pytest.mark.parametrize("name", ["all_reduce", "broadcast"])
def test_other_calls_are_told_apart(devices: Devices, name: str) -> None:
    """Also with different sizes: without a check Gloo would end the process for lack of room."""

    def body(comm: Communicator) -> None:
        with devices.as_on_gpu(comm):
            if comm.rank < 2 or name == "all_reduce":
                comm.all_reduce(put(comm, torch.ones(600 * (comm.rank // 2 + 1)), "plain"))
            else:
                comm.broadcast(put(comm, torch.ones(600), "plain"), 0)

    for error in errors_of(world_of((0, 0, 1, 1)), body):
        assert isinstance(error, MismatchError), error
        for word in ("all_reduce", name, "(node 0)", "(node 1)"):
            assert word in str(error)


def test_sizes_that_differ_are_told(devices: Devices) -> None:
    def body(comm: Communicator) -> None:
        with devices.as_on_gpu(comm):
            sends = [3 if (comm.rank, to) == (0, 2) else 2 for to in range(comm.world_size)]
            comm.all_to_all(
                [room(comm, 2, torch.float32, "plain") for _ in sends],
                [room(comm, count, torch.float32, "plain") for count in sends],
            )
            comm.barrier()

    for error in errors_of(world_of((0, 0, 1, 1)), body):
        assert isinstance(error, MismatchError), error
        for word in ("rank 0 (node 0)", "rank 2 (node 1)", "8 bytes", "12"):
            assert word in str(error)


def test_a_dropped_communicator_ends_after_what_was_enqueued(devices: Devices) -> None:
    before = set(threading.enumerate())
    made = [world_of((0, 1))]
    tensors = [torch.ones(3001), torch.ones(3001)]

    def body(comm: Communicator) -> None:
        with devices.as_on_gpu(comm):
            comm.all_reduce(tensors[comm.rank])

    made[0].run(body)
    made.clear()
    gc.collect()
    limit = Deadline(20)
    while left := set(threading.enumerate()) - before:
        assert not limit.is_over(), left
        time.sleep(0.01)
    assert all(tensor.eq(2).all() for tensor in tensors)


def test_a_device_that_does_not_go_on(devices: Devices) -> None:
    """One rank's stream is blocked, so its data never arrives; both hosts have made the call."""
    released = threading.Event()
    made = world_of((0, 1), with_options(transport=emulated_nccl, timeout=1.0))

    def body(comm: Communicator) -> None:
        runtime, device = devices.emulated, comm.node_of(comm.rank)
        assert runtime is not None
        # Keeps operations' tensors alive without waiting for a stream, which would block the host.
        with runtime.assuming(device), InStreamOrder(lambda: None):
            tensor, kept = torch.ones(3001), []
            if comm.rank == 1:
                stream = runtime.current_stream(device)
                runtime.run_on_stream(device, stream, lambda: kept.append(released.wait(60)))
            work = comm.all_reduce(tensor, async_op=True)
            assert work is not None
            try:
                work.wait(20)
                raise AssertionError(work.exception())
            finally:
                released.set()
                runtime.synchronize(device)

    errors = errors_of(made, body)
    for error in errors:
        assert "rank 1 (node 1)" in str(error)
    assert any(isinstance(error, CollectiveTimeout) for error in errors)


def _calls_until_one_fails(store: Any, rank: int, world_size: int) -> tuple[str, str]:
    devices = Devices("emulated", devices=1, physical=(rank,))
    comm = join_nodes(
        store, rank, world_size, [[0], [1, 2]], device="cuda:0", options=OVER_NCCL, timeout=60
    )
    with devices.as_on_gpu(comm):
        tensor = put(comm, torch.ones(3001), "plain")
        try:
            for turn in range(1000):
                if (rank, turn) == (2, 3):
                    os._exit(1)
                comm.all_reduce(tensor)
                on_host(tensor)
        except RingcommError as error:
            return type(error).__name__, str(error)
    raise AssertionError("no call failed")


def test_a_process_that_ends_is_named_on_every_node(devices: Devices) -> None:
    with Ranks(_calls_until_one_fails, 3) as ranks:
        outcomes = ranks.wait(60)
    for outcome in outcomes[:2]:
        assert outcome.ok, outcome.describe()
        kind, text = outcome.value
        assert kind == PeerLost.__name__, text
        assert "rank 2 (node 1)" in text
