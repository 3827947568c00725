# SPDX-License-Identifier: Apache-2.0
"""A communicator over nodes that is deleted without close() ends like a closed one."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.distributed import HashStore

from ringcomm import CommOptions, Communicator, PeerLost
from ringcomm.memory.host_heap import process_heap

# The node of each rank.
NODES = (0, 0, 1)
TIMEOUT_S = 60.0


def in_threads(build: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=build, args=(rank,)) for rank in range(len(NODES))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def build(made: list[Communicator | None], store: HashStore, rank: int) -> None:
    comm = Communicator.from_store(
        store,
        rank,
        len(NODES),
        options=CommOptions(timeout=TIMEOUT_S),
        node_id=f"node{NODES[rank]}",
    )
    comm.all_reduce(torch.ones(100_000))
    # Each message has its own thread.
    if comm.rank == 0:
        comm.send(torch.ones(3), 2)
    elif comm.rank == 2:
        comm.recv(torch.ones(3), 0)
    comm.barrier()
    made[rank] = comm


def left_behind() -> tuple[int, list[str], int]:
    gc.collect()
    names = sorted(each.name for each in threading.enumerate())
    return len(os.listdir("/proc/self/fd")), names, process_heap().used_bytes


def build_and_drop() -> None:
    made: list[Communicator | None] = [None] * len(NODES)
    store = HashStore()
    in_threads(partial(build, made, store))
    assert all(comm is not None and comm.num_nodes == 2 for comm in made)


def test_nothing_is_left_of_it() -> None:
    build_and_drop()  # makes what a process keeps until it ends
    before = left_behind()
    for _ in range(2):
        build_and_drop()
    assert left_behind() == before


@pytest.mark.parametrize("dropped", [0, 2])
def test_its_peers_are_told(dropped: int) -> None:
    made: list[Communicator | None] = [None] * len(NODES)
    in_threads(partial(build, made, HashStore()))
    made[dropped] = None
    gc.collect()
    errors: dict[int, BaseException] = {}

    def call(rank: int) -> None:
        comm = made[rank]
        if comm is not None:
            try:
                comm.all_reduce(torch.ones(100_000))
            except BaseException as error:
                errors[rank] = error

    begin = time.monotonic()
    in_threads(call)
    assert time.monotonic() - begin < TIMEOUT_S / 2
    assert set(errors) == {0, 1, 2} - {dropped}
    for error in errors.values():
        assert isinstance(error, PeerLost), error
        assert f"rank {dropped} (node {NODES[dropped]})" in str(error)


def test_the_nodes_communicator_outlives_it() -> None:
    made: list[Communicator | None] = [None] * len(NODES)
    in_threads(partial(build, made, HashStore()))
    on_node = [made[rank].node for rank in (0, 1)]
    made.clear()
    gc.collect()
    tensors = [torch.ones(3), torch.ones(3)]
    threads = [
        threading.Thread(target=on_node[rank].all_reduce, args=(tensors[rank],)) for rank in (0, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(tensor.eq(2).all() for tensor in tensors)
