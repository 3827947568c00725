# SPDX-License-Identifier: Apache-2.0
"""Meshes whose inner axes stay within nodes."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringcomm
from ringcomm.errors import ArgumentError, MismatchError, RingcommError, UnsupportedError
from tests.support.ranks import run_ranks


def meshes(store: Any, rank: int, world_size: int) -> list[Any]:
    """Ranks 0 and 2 are on one node, 1 and 3 on another, as some launchers number ranks."""
    os.environ["RINGCOMM_NODE_ID"] = f"node{rank % 2}"
    dist.init_process_group("ringcomm", store=store, rank=rank, world_size=world_size)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            mesh = ringcomm.Mesh(tp=2, dp=-1)
        groups = [dist.get_process_group_ranks(mesh.get_group(name)) for name in ("dp", "tp")]
        found = [mesh.mesh_dim_names, mesh.mesh.tolist(), groups]
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            wide = ringcomm.Mesh(pp=1, tp=4)
        found += [wide.mesh.tolist(), [str(each.message)[:40] for each in told]]
        refused = []
        for axes in ({}, {"sp": 4}, {"dp": 3}, {"dp": 0}, {"dp": -1, "tp": -1}, {"dp": 2}):
            with pytest.raises(ArgumentError) as error:
                ringcomm.Mesh(**axes)  # type: ignore[arg-type]
            refused.append(str(error.value).partition(": ")[2])
        said = r'mesh is .*"tp": 1.* on rank 0 and .*"tp": 2.* on rank 1'
        with pytest.raises(MismatchError, match=said):
            ringcomm.Mesh(dp=4 if rank == 0 else 2, tp=1 if rank == 0 else 2)
        one = torch.ones(4)
        ringcomm.all_reduce(one, group=mesh["tp"])
        assert one.tolist() == [2.0] * 4
        with pytest.raises(ArgumentError, match="expected 'cpu', 'cuda' or None, got 'xpu'"):
            ringcomm.Mesh(dp=-1, device="xpu")
        with pytest.raises(UnsupportedError, match="torch finds no GPU in this process"):
            ringcomm.Mesh(dp=-1, device="cuda")
        with pytest.raises(ArgumentError, match=r"such as mesh\['tp'\], got a mesh of 2"):
            ringcomm.all_reduce(one, group=mesh)
        return [*found, refused]
    finally:
        dist.destroy_process_group()


def test_inner_axes_stay_within_nodes():
    for rank, found in enumerate(run_ranks(meshes, 4)):
        names, grid, groups, wide, told, refused = found
        assert names == ("dp", "tp")
        assert grid == [[0, 2], [1, 3]]
        assert groups == [[[0, 1], [2, 3]][rank // 2], [[0, 2], [1, 3]][rank % 2]]
        assert wide == [[0, 2, 1, 3]]
        assert told == (["Mesh: tp=4 does not divide the ranks of "] if rank == 0 else [])
        assert [each[:34] for each in refused] == [
            "expected sizes of axes among pp, d",
            "expected sizes of axes among pp, d",
            "expected sizes whose product is th",
            "dp: expected a size >= 1, or -1, g",
            "expected sizes whose product is th",
            "expected sizes whose product is th",
        ]
        assert refused[1].endswith("got sp") and refused[2].endswith("got dp=3")


def test_without_a_group():
    with pytest.raises(RingcommError, match="Mesh: expected a default group"):
        ringcomm.Mesh(dp=1)
