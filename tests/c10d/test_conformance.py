"""A quick part of torch's own c10d tests; ``make c10d-conformance`` runs them all."""

import json
import sys

from tests.support import ROOT, fork_server

# One or two of each kind; the others differ in op, dtype or group.
NAMES = [
    "test_DistributedDataParallelCPU",
    "test_all_gather_coalesced_complex",
    "test_all_gather_object_subgroup",
    "test_all_reduce_coalesced_full_group_max",
    "test_all_reduce_complex_unsupported_ops",
    "test_all_reduce_full_group_min",
    "test_all_reduce_sum_async",
    "test_barrier_timeout_full_group",
    "test_batch_isend_irecv_gloo_tags",
    "test_broadcast",
    "test_ddp_create_graph",
    "test_destroy_full_group",
    "test_gather_full_group",
    "test_get_future",
    "test_grads_same_across_ranks_with_no_sync",
    "test_isend_torch_profiler",
    "test_monitored_barrier_gloo",
    "test_reduce_full_group_product",
    "test_scatter_object_list",
    "test_send_recv_any_source",
    "test_sparse_all_reduce_sum",
    "test_static_graph_api_cpu",
]
# Those that depend on where ranks are: groups of some nodes, messages, faults.
NAMES_OVER_NODES = [
    "test_DistributedDataParallelCPU",
    "test_all_gather_object_subgroup",
    "test_all_reduce_full_group_min",
    "test_barrier_timeout_full_group",
    "test_batch_isend_irecv_gloo_tags",
    "test_send_recv_any_source",
]


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
    """In one process, which imports torch's tests once."""
    result = tmp_path / "outcomes.json"
    done = fork_server.run([sys.executable, "-c", PROGRAM, result], cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    on_one_node, over_nodes = json.loads(result.read_text())
    for names, found in ((NAMES, on_one_node), (NAMES_OVER_NODES, over_nodes)):
        assert {name: outcome for name, (outcome, _) in found.items()} == dict.fromkeys(
            names, "pass"
        )
