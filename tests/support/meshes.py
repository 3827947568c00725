"""Meshes of data and tensor parallelism, for checks of a RankPool."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache


def mesh_of(dp: int, tp: int) -> DeviceMesh:
    """The mesh of ``dp`` replicas of a model, each on ``tp`` ranks that follow each other."""
    # It remembers equal meshes, of an earlier check's groups that are gone.
    _clear_sharding_prop_cache()
    return init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
