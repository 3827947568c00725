"""Times of exchanges between nodes: the rows are those that the cost model reads."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor

from ringcomm.comm.topology.fit import read_rows
from tests.support import ROOT, fork_server


def test_two_ranks_as_two_nodes_write_rows_that_the_model_reads(tmp_path):
    rows = tmp_path / "rows.csv"
    options = ["--gbit-s", "1", "--rounds", "1", "--bytes", "16384", "--wires", "int8"]
    options += ["-o", str(rows)]
    # A file is a store that needs no port.
    options += ["--init-method", f"file://{tmp_path / 'store'}"]
    command = [sys.executable, "-m", "ringcomm.bench.nodes", *options]
    place = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}

    told: list[str] = []

    def run(rank):
        node = {"RINGCOMM_NODE_ID": f"node{rank}"}
        env = {**os.environ, **place, **node, "RANK": str(rank), "PYTHONPATH": str(ROOT)}
        return fork_server.run(command, cwd=tmp_path, env=env)

    with ThreadPoolExecutor(2) as pool:
        for done in pool.map(run, range(2)):
            assert done.returncode == 0, done.stderr
            told.append(done.stdout)
    assert any("on the wire int8" in each and "FP32 takes" in each for each in told)
    found = [(row.collective, row.algorithm, row.nodes, row.wire) for row in read_rows(rows)]
    assert {row.bytes for row in read_rows(rows)} == {16384}
    assert sorted(found) == sorted(
        [
            ("exchange", "rail-direct", 2, ""),
            ("all_gather", "flat-ring", 2, ""),
            ("all_reduce", "flat-ring", 2, ""),
            ("reduce_scatter", "flat-ring", 2, ""),
            ("all_gather", "rail-direct", 2, ""),
            ("all_reduce", "rail-direct", 2, ""),
            ("reduce_scatter", "rail-direct", 2, ""),
            ("all_reduce", "rail-direct", 2, "int8"),
            ("reduce_scatter", "rail-direct", 2, "int8"),
        ]
    )
