"""A quick part of torch's own c10d tests; ``make c10d-conformance`` runs them all."""

import json
import sys
from pathlib import Path

import pytest

from tests.support import fork_server

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


@pytest.mark.parametrize(("nodes", "names"), [(1, NAMES), (2, NAMES_OVER_NODES)])
def test_the_quick_part(tmp_path, nodes, names):
    result = tmp_path / "outcomes.json"
    command = [sys.executable, "-m", "tests.c10d.conformance", "--backend", "ringcomm"]
    command += ["--nodes", str(nodes), "--json", str(result), *names]
    done = fork_server.run(command, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = json.loads(result.read_text())
    assert dict.fromkeys(names, "pass") == {n: outcome for n, (outcome, _) in outcomes.items()}
