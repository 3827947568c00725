# SPDX-License-Identifier: Apache-2.0
"""torch's trainers over two nodes get the same bits as on one node that sums in groups.

The nodes are processes that claim to be on different nodes.
"""

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ringcomm.comm.nodes.engine import NodesEngine
from tests.c10d import (
    test_checkpoint,
    test_collectives,
    test_ddp,
    test_fsdp,
    test_groups,
    test_parallelism,
    test_pipelines,
)
from tests.support.covering import in_test_all
from tests.support.rank_pool import default_group


def nodes_of(group) -> int:
    """Returns the number of nodes of a group, after checking it against the nodes of its ranks."""
    comm, everyone = group.communicator, default_group().communicator
    ranks = dist.get_process_group_ranks(group)
    assert comm.num_nodes == len({everyone.node_of(rank) for rank in ranks})
    # A group within a node has an engine without the costs of several nodes.
    assert isinstance(comm.engine, NodesEngine) == (comm.num_nodes > 1)
    return comm.num_nodes


def hybrid(ranks, rank):
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard"))
    nodes = [nodes_of(mesh.get_group(name)) for name in mesh.mesh_dim_names]
    if nodes_of(default_group()) == 2:
        assert nodes == ([2, 1] if ranks[0] == [0, 1] else [1, 2])
    return test_fsdp.train(test_fsdp.shard(mesh), rank)


def sharded_within(rank, world_size):
    return hybrid([[0, 1], [2, 3]], rank)


def sharded_between(rank, world_size):
    return hybrid([[0, 2], [1, 3]], rank)


@pytest.mark.parametrize(
    "check",
    [
        test_ddp.buckets,
        test_collectives.exchanges,
        test_groups.subgroups,
        *in_test_all(
            test_ddp.unused_parameters,
            test_ddp.half_precision_hooks,
            test_fsdp.one_axis,
            test_fsdp.mixed_precision,
            sharded_within,
            sharded_between,
            test_parallelism.redistribution,
            test_pipelines.schedules,
            test_checkpoint.save_and_load,
            test_checkpoint.save_in_the_background,
            test_checkpoint.from_a_full_state,
            test_collectives.rooted,
            test_collectives.gathers_and_scatters,
            test_collectives.asynchronous,
            test_collectives.messages,
            test_collectives.sparse,
            test_groups.groups_of_their_members_only,
        ),
    ],
)
def test_as_on_one_node(four_ranks, check):
    four_ranks.compare_nodes(check)


@pytest.mark.parametrize(
    "check",
    [
        test_groups.splits,
        test_groups.splits_by_torch,
        test_groups.aborted,
        test_groups.ended,
        test_groups.monitored_barriers,
    ],
)
def test_groups_over_nodes(four_ranks, check):
    four_ranks.compare_nodes(check)


def test_a_negative_control(four_ranks):
    """One node that sums in rank order gets other bits."""
    with pytest.raises(AssertionError, match="leaf"):
        four_ranks.compare_nodes(test_fsdp.one_axis, sum_group_size=0)
