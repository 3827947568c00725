# SPDX-License-Identifier: Apache-2.0
"""Communication on a background thread, and the default that turns it on or off."""

import threading

import pytest
import torch
from torch import nn

from ringcomm import zero
from ringcomm.optim import AdamW
from ringcomm.zero.stages import sharding


@pytest.mark.parametrize(
    ("ranks", "threads", "cores", "overlaps"),
    [(2, 1, 2, False), (2, 1, 3, False), (2, 1, 4, True), (4, 4, 16, False), (4, 3, 16, True)],
)
def test_a_thread_more_for_each_rank_needs_a_core(ranks, threads, cores, overlaps):
    resolved = zero.ZeroOptions().resolved(ranks, threads, cores)
    assert resolved.overlap is overlaps
    for chosen in (True, False):
        options = zero.ZeroOptions(overlap=chosen)
        assert options.resolved(ranks, threads, cores) is options


@pytest.mark.parametrize("cores", [1, 64])
@pytest.mark.parametrize("stage", [2, 3])
def test_shard_looks_at_the_cores_that_this_process_may_use(monkeypatch, worlds, stage, cores):
    monkeypatch.setattr(sharding, "available_cores", lambda: cores)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)

    def body(comm):
        module = zero.shard(nn.Linear(8, 8), stage, comm=comm)
        overlap = vars(module)["_ringcomm_engine"].options.overlap
        zero.remove_sharding(module)
        return overlap

    assert worlds(2).run(body) == [cores == 64] * 2


@pytest.mark.parametrize("overlap", [True, False])
def test_without_it_nobody_unshards_behind_the_back(worlds, overlap):
    """Without overlap only the calling thread unshards, and the profile counts that as waiting."""

    def body(comm):
        options = zero.ZeroOptions(overlap=overlap, bucket_elems=512)
        layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
        module = zero.shard(layers, 3, comm=comm, options=options)
        optimizer = AdamW(module.parameters())
        with zero.profiled(module) as profile:
            for _ in range(3):
                module(torch.ones(2, 16)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        mine = threading.get_ident()
        moved = [span for span in profile.spans if span.kind == "communication"]
        elsewhere = sum(span.thread != mine for span in moved)
        zero.remove_sharding(module)
        return len(moved), elsewhere, profile.hidden_share()

    for moved, elsewhere, hidden in worlds(2).run(body):
        assert elsewhere == (moved if overlap else 0)
        assert overlap or hidden < 0.05


@pytest.mark.parametrize("stage", [2, 3])
def test_unsharding_alone_needs_no_thread(stage):
    """Without overlap, training starts no thread."""
    import ringcomm

    with ringcomm.local_world(1) as world:
        before = threading.active_count()
        module = zero.shard(
            nn.Linear(8, 8), stage, comm=world[0], options=zero.ZeroOptions(overlap=False)
        )
        module(torch.ones(2, 8)).sum().backward()
        assert threading.active_count() == before
        zero.remove_sharding(module)
