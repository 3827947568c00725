# SPDX-License-Identifier: Apache-2.0
"""Meshes of pipeline, data and tensor parallelism, for checks of a RankPool."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache


def mesh_of(dp: int, tp: int) -> DeviceMesh:
    """Returns a mesh of ``dp`` replicas of a model, each on ``tp`` consecutive ranks."""
    return _mesh({"dp": dp, "tp": tp})


def mesh_of_stages(pp: int, dp: int, tp: int) -> DeviceMesh:
    """Returns a mesh of ``pp`` pipeline stages, each on a mesh as of :func:`mesh_of`."""
    return _mesh({"pp": pp, "dp": dp, "tp": tp})


def _mesh(axes: dict[str, int]) -> DeviceMesh:
    # Its cache holds equal meshes of earlier checks, whose groups no longer exist.
    _clear_sharding_prop_cache()
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
