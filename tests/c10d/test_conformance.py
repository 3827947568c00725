# SPDX-License-Identifier: Apache-2.0
"""A quick selection of torch's own c10d tests; ``make c10d-conformance`` runs all of them."""

import json
import sys

from tests.support import ROOT, fork_server

# Tests of torch for calls that no other test of tests/c10d makes.
NAMES = [
    "test_all_gather_coalesced_complex",
    "test_all_reduce_complex_unsupported_ops",
    "test_barrier_timeout_full_group",
    "test_ddp_create_graph",
    "test_destroy_full_group",
    "test_get_future",
    "test_isend_torch_profiler",
    "test_scatter_object_list",
    "test_static_graph_api_cpu",
]
# Tests that depend on the ranks' nodes: groups within nodes, and messages.
NAMES_OVER_NODES = ["test_all_gather_object_subgroup", "test_batch_isend_irecv_gloo_tags"]


PROGRAM = """
import json, sys
from tests.c10d import conformance, test_conformance
first = conformance.PASSES[0]
outcomes = [
    conformance.run(
        conformance.System("ringcomm", nodes), first.conditions, first.world_size, names
    )
    for nodes, names in ((1, test_conformance.NAMES), (2, test_conformance.NAMES_OVER_NODES))
]
open(sys.argv[1], "w").write(json.dumps(outcomes))
"""


def test_the_quick_part(tmp_path):
    """In one process, so that torch's tests are imported once."""
    result = tmp_path / "outcomes.json"
    done = fork_server.run([sys.executable, "-c", PROGRAM, result], cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    on_one_node, over_nodes = json.loads(result.read_text())
    for names, found in ((NAMES, on_one_node), (NAMES_OVER_NODES, over_nodes)):
        assert {name: outcome for name, (outcome, _) in found.items()} == dict.fromkeys(
            names, "pass"
        )
