# SPDX-License-Identifier: Apache-2.0
"""Binds the heap to NUMA nodes on machines with several nodes, which are emulated."""

import ctypes
import errno
import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

import ringcomm
from ringcomm import CommOptions, Communicator, _native
from ringcomm.memory import host_heap
from ringcomm.memory.numa import NodeBinding, bytes_by_node, own_binding, read_topology
from tests.support import ROOT
from tests.support.compiler import NEEDS_COMPILER, OPTIMISED, compile_to
from tests.support.numa_machine import write_machine
from tests.support.ranks import run_ranks
from tests.support.system_calls import LIBC, NUMBERS, forbid

TIMEOUT_S = 20.0
# No kernel has a node of this number, so the kernel refuses it.
NO_NODE = 1023
ELSEWHERE = "4000-4003"  # CPUs that this process may not use
needs_numa = pytest.mark.skipif(
    not NUMBERS
    or not Path("/proc/self/numa_maps").exists()
    or _native.Heap(2 << 20, "", [], [0]).placement_error != 0,
    reason="the kernel binds no memory, or the numbers of its calls are not known here",
)


def own_cpus() -> str:
    return ",".join(map(str, sorted(os.sched_getaffinity(0))))


def test_a_machine_is_read(tmp_path):
    write_machine(tmp_path, {0: "0-3,16-19", 1: "4-7, 20".replace(" ", "")})
    machine = read_topology(tmp_path)
    assert machine.cpus == {0: {0, 1, 2, 3, 16, 17, 18, 19}, 1: {4, 5, 6, 7, 20}}
    assert machine.with_memory == {0, 1}
    assert machine.distances == {0: {0: 10, 1: 21}, 1: {0: 21, 1: 10}}
    assert machine.nodes_of({19}) == (0,)
    assert machine.nodes_of({20, 0}) == (0, 1)
    assert machine.nodes_of({8}) == ()


def test_holes_and_nodes_that_are_offline(tmp_path):
    write_machine(tmp_path, {0: "0-1", 2: "2-3", 3: "4-5"}, online="0,2-3")
    # A node's folder may outlive the node, without files.
    (tmp_path / "node1").mkdir()
    machine = read_topology(tmp_path)
    assert sorted(machine.cpus) == [0, 2, 3]
    assert machine.distances[2] == {0: 32, 2: 10, 3: 21}
    assert machine.nodes_of({2, 5}) == (2, 3)


def test_nodes_without_memory_or_without_cpus(tmp_path):
    """Node 1 has no memory, and node 3 has no CPUs."""
    write_machine(tmp_path, {0: "0-1", 1: "2-3", 2: "4-5", 3: ""}, has_memory="0,2-3")
    machine = read_topology(tmp_path)
    assert machine.with_cpus == (0, 1, 2)
    assert [machine.nearest_memory(node) for node in range(4)] == [0, 0, 2, 3]


def test_of_one_node_one_file_is_read(tmp_path):
    (tmp_path / "online").write_text("0\n")
    assert len(read_topology(tmp_path).cpus) == 1
    # A kernel without NUMA support.
    assert len(read_topology(tmp_path / "none").cpus) == 1
    assert own_binding(tmp_path) == NodeBinding((), "the machine has one node")


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("online", "0-", "online: expected a list such as 0-3,8, got '0-'"),
        ("node1/cpulist", "two", "node1/cpulist: expected a list such as 0-3,8, got 'two'"),
        ("node0/distance", "10", r"node0/distance: expected 2 distances, got \['10'\]"),
        ("has_memory", "", r"has_memory: none of the nodes \[0, 1\] has memory"),
        ("node1/cpulist", None, "No such file.*node1/cpulist"),
    ],
)
def test_a_folder_of_another_form_is_no_placement_and_says_why(tmp_path, file, text, said):
    path = write_machine(tmp_path, {0: "0-1", 1: "2-3"}) / file
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises((ValueError, OSError), match=said):
        read_topology(tmp_path)
    placement = own_binding(tmp_path)
    assert placement.nodes == ()
    assert re.match("the nodes cannot be read: .*" + said, placement.reason)


@pytest.mark.parametrize(
    ("affinity", "nodes", "reason"),
    [
        ({0}, (0,), ""),
        ({1, 0}, (0,), ""),
        ({4}, (2,), ""),
        ({3}, (0,), ""),  # node 1 has no memory; node 0 is nearest
        ({0, 5}, (0, 2), ""),
        ({0, 2, 4}, (), "the process may use the CPUs of all nodes"),
        ({77}, (), "the process's CPUs are on no node that is online"),
    ],
)
def test_the_nodes_are_those_of_the_affinity(tmp_path, monkeypatch, affinity, nodes, reason):
    write_machine(tmp_path, {0: "0-1", 1: "2-3", 2: "4-5", 3: ""}, has_memory="0,2-3")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: affinity)
    assert own_binding(tmp_path) == NodeBinding(nodes, reason)


def heap_line() -> str:
    start = f"{host_heap.process_heap().base_ptr:x} "
    lines = Path("/proc/self/numa_maps").read_text().splitlines()
    (line,) = [each for each in lines if each.startswith(start)]
    return line


def join_on(store, rank, world, folder, options=None) -> Communicator:
    """Joins with the heap bound as on the machine that ``folder`` describes."""
    placed = functools.partial(own_binding, Path(folder))
    mock.patch.object(host_heap, "own_binding", placed).start()
    options = options or CommOptions(timeout=TIMEOUT_S)
    return Communicator.from_store(store, rank, world, options=options)


def check_sum(comm: Communicator) -> None:
    tensor = ringcomm.zeros(1 << 20, dtype=torch.int32).fill_(comm.rank + 1)
    comm.all_reduce(tensor)
    assert torch.equal(tensor, torch.full_like(tensor, 3))


def _bound(store, rank, world, folder):
    with join_on(store, rank, world, folder) as comm:
        check_sum(comm)
        heap = host_heap.process_heap()
        assert (heap.nodes, heap.placement_error) == ([0], 0)
        assert re.match(r"[0-9a-f]+ prefer(=relative|=static| \(many\))?:0 ", heap_line())
        lying = bytes_by_node(heap.base_ptr)
        assert set(lying) == {0} and lying[0] >= 4 << 20
        # The policy belongs to the file, so it also applies to pages that a peer touches first.
        peers = [
            line
            for line in Path("/proc/self/numa_maps").read_text().splitlines()
            if "ringcomm-heap" in line and line != heap_line()
        ]
        assert len(peers) == 1 and " prefer" in peers[0]
        comm.barrier()


@needs_numa
def test_a_rank_of_one_node_binds_its_heap_there(tmp_path):
    write_machine(tmp_path, {0: own_cpus(), 1: ELSEWHERE})
    run_ranks(_bound, 2, str(tmp_path))


def _left(store, rank, world, folder):
    with join_on(store, rank, world, folder) as comm:
        check_sum(comm)
        heap = host_heap.process_heap()
        assert (heap.nodes, heap.placement_error) == ([], 0)
        assert " default " in heap_line()


@needs_numa
def test_a_rank_of_all_nodes_binds_nothing(tmp_path):
    """Also the negative control of the test above."""
    write_machine(tmp_path, {0: own_cpus(), 1: ""})
    run_ranks(_left, 2, str(tmp_path))


def _refused(store, rank, world, folder):
    with join_on(store, rank, world, folder) as comm:
        check_sum(comm)
        heap = host_heap.process_heap()
        assert (heap.nodes, heap.placement_error) == ([NO_NODE], errno.EINVAL)


@needs_numa
def test_a_node_that_the_kernel_refuses_leaves_first_touch(tmp_path):
    write_machine(tmp_path, {0: ELSEWHERE, NO_NODE: own_cpus()})
    run_ranks(_refused, 2, str(tmp_path))


def _filtered(store, rank, world, folder):
    forbid("mbind")
    with join_on(store, rank, world, folder) as comm:
        check_sum(comm)
        heap = host_heap.process_heap()
        assert (heap.nodes, heap.placement_error) == ([0], errno.EPERM)


@needs_numa
def test_a_filter_of_system_calls_leaves_first_touch(tmp_path):
    write_machine(tmp_path, {0: own_cpus(), 1: ELSEWHERE})
    run_ranks(_filtered, 2, str(tmp_path))


def _has_policy(store, rank, world, folder):
    assert not _native.has_memory_policy()
    mask = ctypes.c_ulong(1)
    assert LIBC.syscall(NUMBERS["set_mempolicy"], 3, ctypes.byref(mask), 64) == 0  # MPOL_INTERLEAVE
    assert _native.has_memory_policy()
    reason = "the process has a memory policy of its own (numactl)"
    assert own_binding(Path(folder)) == NodeBinding((), reason)


@needs_numa
def test_a_policy_of_the_users_stays(tmp_path):
    run_ranks(_has_policy, 1, str(write_machine(tmp_path, {0: own_cpus(), 1: ELSEWHERE})))


BINDING = """
from ringcomm import _native
for nodes in ([0], [1], [1, 3], [64, 2, 65], []):
    heap = _native.Heap(4 << 20, "", [], nodes)
    assert (heap.nodes, heap.placement_error) == (nodes, 0)
"""


@NEEDS_COMPILER
def test_the_whole_heap_is_bound_before_any_touch(tmp_path):
    """A preloaded library emulates a kernel with many nodes."""
    library = compile_to(
        tmp_path / "binding_calls.so",
        ROOT / "kernels/include",
        ROOT / "tests/memory/binding_calls.cpp",
        flags=OPTIMISED,
        extra=("-shared", "-fPIC"),
    )
    done = subprocess.run(
        [sys.executable, "-c", BINDING],
        cwd=ROOT,
        env={**os.environ, "LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        check=True,
    )
    # MPOL_PREFERRED for one node, MPOL_PREFERRED_MANY for several, and no call for none.
    called = [
        f"4194304 bytes, mode {mode}, nodes {nodes}, flags 0, touched before 0"
        for mode, nodes in ((1, "0"), (1, "1"), (5, "1 3"), (5, "2 64 65"))
    ]
    assert done.stdout.splitlines() == called


def test_the_number_of_a_node_is_checked():
    with pytest.raises(ValueError, match="at least 0"):
        _native.Heap(4 << 20, "", [], [-1])


def test_the_file_of_mappings_is_read(tmp_path):
    maps = tmp_path / "numa_maps"
    maps.write_text(
        "7f0000000000 default file=/usr/lib/N9=1 mapped=3 N0=3 kernelpagesize_kB=4\n"
        "7f1000000000 prefer:1 file=/memfd:ringcomm-heap\\040(deleted) dirty=7 N0=2 N1=5 "
        "kernelpagesize_kB=4\n"
        "7f2000000000 bind:0-1 file=/dev/hugepages/#3\\040(deleted) huge N1=2 "
        "kernelpagesize_kB=2048\n"
        "7f3000000000 default\n"
    )
    assert bytes_by_node(0x7F1000000000, maps) == {0: 2 << 12, 1: 5 << 12}
    assert bytes_by_node(0x7F2000000000, maps) == {1: 4 << 20}
    assert bytes_by_node(0x7F3000000000, maps) == bytes_by_node(0x7F4000000000, maps) == {}
    assert bytes_by_node(0x7F1000000000, tmp_path / "none") == {}


def _in_its_cores(store, rank, world):
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank % len(os.sched_getaffinity(0))]})
    own = os.sched_getaffinity(0)
    before = len(os.listdir("/proc/self/task"))
    options = CommOptions(timeout=TIMEOUT_S, threads=3, channels=3)
    with Communicator.from_store(store, rank, world, options=options) as comm:
        tensor = torch.ones(4 << 20, dtype=torch.int32)
        comm.all_reduce(tensor)
        assert tensor.unique().tolist() == [world]
        threads = [int(each) for each in os.listdir("/proc/self/task")]
        assert len(threads) >= before + 2
        assert all(os.sched_getaffinity(each) <= own for each in threads)


def test_workers_stay_on_the_cores_of_their_rank():
    run_ranks(_in_its_cores, 2)
