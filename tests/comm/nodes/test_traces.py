# SPDX-License-Identifier: Apache-2.0
"""Each node writes a trace file at a fault; together they describe all nodes."""

import time
from pathlib import Path

import pytest
import torch

import ringcomm
from ringcomm.cli.trace import over_nodes
from ringcomm.comm.recorder import reader
from ringcomm.errors import RingcommError

NODES = ((0, 1), (2,))
TIMEOUT_S, PATIENCE_S = 1.0, 60.0


def traces_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("ringcomm-local.node?-*.json"))


def wait_for_the_last(comm: ringcomm.Communicator, folder: Path) -> str:
    """All ranks but the last make a call that times out; returns the error.

    The last rank is alone on its node, and makes no call before the traces exist.
    """
    tensor = torch.ones(100_000)
    comm.all_reduce(tensor)
    comm.timeout = TIMEOUT_S
    if comm.rank == comm.world_size - 1:
        deadline = time.monotonic() + PATIENCE_S
        while len(traces_in(folder)) < len(NODES) and time.monotonic() < deadline:
            time.sleep(0.01)
    try:
        comm.all_reduce(tensor)
    except RingcommError as error:
        return str(error)
    raise AssertionError("the call did not fail")


def test_every_node_leaves_its_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(reader.VARIABLE, str(tmp_path))
    with ringcomm.local_world(3, nodes=[2, 1], timeout=PATIENCE_S) as world:
        told = world.run(wait_for_the_last, tmp_path)
    paths = traces_in(tmp_path)
    assert len(paths) == len(list(tmp_path.iterdir())) == len(NODES)
    for rank, text in enumerate(told):
        node = int(rank == 2)
        assert f"What each rank of node {node} did last: ringcomm trace {paths[node]}" in text
    traces = [reader.read(path) for path in paths]
    for node, trace in enumerate(traces):
        assert trace.of_node is not None and trace.of_node.nodes == NODES
        assert trace.of_node.node == node and trace.written_by in NODES[node]
        assert tuple(each.rank for each in trace.recording.ranks) == NODES[node]
        assert "for rank 2 (node 1)" in trace.error
    assert len({trace.of_node.world_id for trace in traces if trace.of_node}) == 1
    lines = over_nodes(traces)
    for rank in NODES[0]:
        (line,) = [each for each in lines if each.startswith(f"  rank {rank} (node 0)")]
        assert "was in all_reduce(float32, SUM, 400000 bytes, two_shot), call " in line
        assert f"waited for rank 2 (node 1), at {__file__}:" in line
    assert "  rank 2 (node 1) was in no collective call; last: all_reduce" in "\n".join(lines)
    verdict = "ranks 0, 1 waited in the end for rank 2 (node 1), which waited for nobody"
    assert lines[-1] == verdict, lines
