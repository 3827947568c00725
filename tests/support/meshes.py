# SPDX-License-Identifier: Apache-2.0
"""Meshes of pipeline, data and tensor parallelism, for checks of a RankPool."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache


def mesh_of(dp: int, tp: int) -> DeviceMesh:
    """The mesh of ``dp`` replicas of a model, each on ``tp`` ranks that follow each other."""
    return _mesh({"dp": dp, "tp": tp})


def mesh_of_stages(pp: int, dp: int, tp: int) -> DeviceMesh:
    """The mesh of ``pp`` stages of a model, each on a mesh of :func:`mesh_of`."""
    return _mesh({"pp": pp, "dp": dp, "tp": tp})


def _mesh(axes: dict[str, int]) -> DeviceMesh:
    # It remembers equal meshes, of an earlier check's groups that are gone.
    _clear_sharding_prop_cache()
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
