# SPDX-License-Identifier: Apache-2.0
"""The doctor's findings about NUMA nodes, on emulated machines."""

import errno
import os
from types import SimpleNamespace

import pytest

from ringcomm.cli import doctor
from ringcomm.cli.doctor import NOTE, OK, check_heap_nodes, check_numa
from ringcomm.memory import host_heap, numa
from tests.support.numa_machine import write_machine


@pytest.fixture
def two_sockets(tmp_path):
    return write_machine(tmp_path, {0: "0-3", 1: "4-7"})


def run_on(monkeypatch, cpus):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cpus)


def hold(monkeypatch, nodes, error=0, touched=None):
    """Replaces this process's heap by one with these nodes."""
    heap = SimpleNamespace(nodes=nodes, placement_error=error, base_ptr=64)
    monkeypatch.setattr(host_heap, "process_heap", lambda: heap)
    monkeypatch.setattr(numa, "bytes_by_node", lambda ptr: {64: touched or {}}[ptr])


def test_one_node(tmp_path):
    (tmp_path / "online").write_text("0\n")
    (finding,) = check_numa(tmp_path)
    assert (finding.verdict, finding.value) == (OK, "1 node: all memory is equally near")


def test_a_process_of_one_node(two_sockets, monkeypatch):
    run_on(monkeypatch, {5})
    finding, sums = check_numa(two_sockets)
    assert sums.verdict == NOTE
    assert "CommOptions(sum_group_size=L)" in sums.advice
    assert (finding.verdict, finding.value) == (
        OK,
        "2 nodes, distance up to 21 (10: the own node); this process may use CPUs of node 1",
    )


def test_a_process_of_all_nodes_is_told_to_bind_ranks(two_sockets, monkeypatch):
    run_on(monkeypatch, {0, 5})
    finding, _ = check_numa(two_sockets)
    assert finding.verdict == NOTE
    assert finding.value.endswith("this process may use CPUs of nodes 0, 1")
    assert "numactl --cpunodebind" in finding.advice


def test_nodes_that_cannot_be_read(two_sockets):
    (two_sockets / "node1" / "cpulist").write_text("many")
    (finding,) = check_numa(two_sockets)
    assert finding.verdict == NOTE
    assert "node1/cpulist: expected a list such as 0-3,8, got 'many'" in finding.value


def test_the_heap_of_a_bound_process(two_sockets, monkeypatch):
    hold(monkeypatch, [1], touched={1: 6 << 20, 0: 8 << 10})
    finding = check_heap_nodes(two_sockets)
    assert (finding.verdict, finding.value) == (
        OK,
        "bound to node 1; touched so far: 8 KiB on node 0, 6144 KiB on node 1",
    )


def test_the_heap_of_a_process_of_all_nodes(two_sockets, monkeypatch):
    run_on(monkeypatch, {0, 5})
    hold(monkeypatch, [], touched={0: 8 << 10})
    finding = check_heap_nodes(two_sockets)
    assert (finding.verdict, finding.value) == (
        OK,
        "any, as the process may use the CPUs of all nodes; touched so far: 8 KiB on node 0",
    )


def test_the_heap_on_one_node_names_no_touched_nodes(tmp_path, monkeypatch):
    (tmp_path / "online").write_text("0\n")
    hold(monkeypatch, [], touched={0: 8 << 10})
    assert check_heap_nodes(tmp_path).value == f"any, as {numa.own_binding(tmp_path).reason}"


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS, errno.EINVAL])
def test_a_refusal_is_shown_and_what_to_do(two_sockets, monkeypatch, error):
    hold(monkeypatch, [0, 2], error)
    finding = check_heap_nodes(two_sockets)
    assert finding.verdict == NOTE
    assert finding.value == (
        f"any, as mbind to nodes 0, 2 is refused: {os.strerror(error)}; touched so far: unknown, "
        "as there is no /proc/self/numa_maps"
    )
    assert "--cap-add SYS_NICE" in finding.advice


def test_both_lines_are_in_the_report():
    found = [finding.name for finding in doctor.examine()]
    assert "numa" in found and "heap's nodes" in found
