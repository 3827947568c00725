# SPDX-License-Identifier: Apache-2.0
"""Ranks in several processes, which use each other's memory by IPC, on one GPU and on several.

Each process makes its own runtime, and so uses no state of a parent.
"""

from __future__ import annotations

import threading

import pytest
import torch

import ringcomm
from ringcomm import Communicator
from tests.support.call_checks import CHECKS, Case
from tests.support.device_worlds import OPTIONS, Devices, on_host, put
from tests.support.ranks import run_ranks

LIMIT_S = 150.0


def _devices(kind, physical=0):
    """Devices of a process; if emulated, a single device, which is GPU number ``physical``."""
    return Devices(kind, devices=1, physical=(physical,)) if kind == "emulated" else Devices(kind)


def _connect(store, rank, world, name="world"):
    return Communicator.from_store(
        store, rank, world, name=name, device="cuda:0", options=OPTIONS, heap_bytes=64 << 20
    )


def _everything(comm):
    for turn, count in enumerate((1, 257, 9001)):
        memory = ("plain", "heap", "unaligned")[turn]
        algorithm = ("ll", "one_shot", "ring")[turn]
        root = turn % comm.world_size
        case = Case(count, memory=memory, algorithm=algorithm, in_place=turn == 1, root=root)
        for check in CHECKS.values():
            check(comm, case)


def _rank(store, rank, world, kind, shares_gpu):
    devices = _devices(kind, 0 if shares_gpu else rank)
    with _connect(store, rank, world) as comm:
        with devices.as_on_gpu(comm):
            _everything(comm)
            part = comm.new_group([0, world - 1])
            if part is not None:
                tensor = put(part, torch.full((5000,), rank + 1.0), "heap")
                part.all_reduce(tensor)
                assert torch.equal(on_host(tensor), torch.full((5000,), world + 1.0))
                del tensor
                part.close()
            comm.barrier()
        opened = len(devices.emulated.opened()) if devices.emulated else world - 1
        return comm.topology_choice.reason, opened


@pytest.mark.timeout(LIMIT_S + 10)
def test_processes_that_share_a_gpu(kind):
    world = 3
    for reason, opened in run_ranks(_rank, world, kind, True, timeout_s=LIMIT_S):
        assert f"all {world} ranks share" in reason
        # One mapping per peer; the group uses the same mappings.
        assert opened == world - 1


@pytest.mark.timeout(LIMIT_S + 10)
def test_processes_with_a_gpu_each():
    for reason, opened in run_ranks(_rank, 2, "emulated", False, timeout_s=LIMIT_S):
        assert "share" not in reason
        assert opened == 1


def _two_threads(store, process, processes, kind):
    """Runs two of four ranks: this process's single launch waits for the other process's launch."""
    devices, errors = _devices(kind), []

    def run(rank):
        # On a shared stream, one rank's send would be queued after the other rank's receive.
        stream = devices.runtime.make_stream(0)
        try:
            with (
                _connect(store, rank, 2 * processes) as comm,
                devices.runtime.on_stream(stream),
                devices.as_on_gpu(comm),
            ):
                _everything(comm)
                comm.barrier()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(2 * process + each,)) for each in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.timeout(LIMIT_S + 10)
def test_two_processes_of_two_ranks(kind):
    run_ranks(_two_threads, 2, kind, timeout_s=LIMIT_S)


def _mixed_memories(store, rank, world, kind):
    """Each rank chooses its tensors' memory; peers also map memory that is allocated later."""
    devices = _devices(kind)
    with _connect(store, rank, world) as comm, devices.as_on_gpu(comm):
        for turn in range(4):
            memory = "heap" if (rank + turn) % 2 else "plain"
            tensor = put(comm, torch.full((9001,), float(rank + turn)), memory)
            comm.all_reduce(tensor)
            assert torch.equal(on_host(tensor), torch.full((9001,), 2.0 * turn + 1))
        comm.barrier()


def test_heap_and_plain_tensors_mix(kind):
    run_ranks(_mixed_memories, 2, kind, timeout_s=60)


def _default_group(store, rank, world, kind):
    devices = _devices(kind)
    ringcomm.init_process_group(
        store=store, rank=rank, world_size=world, pg_options=OPTIONS, device_id=0
    )
    with devices.as_on_gpu():
        tensor = ringcomm.zeros(300, device="cuda:0") + rank
        ringcomm.all_reduce(tensor)
        assert torch.equal(on_host(tensor), torch.full((300,), 1.0))
        ringcomm.barrier()
    ringcomm.destroy_process_group()


def test_the_default_group_of_a_process(kind):
    run_ranks(_default_group, 2, kind, timeout_s=60)
