# SPDX-License-Identifier: Apache-2.0
"""Ranks on devices agree on a few flags on the host, and no host waits for its device."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from ringcomm import Communicator
from ringcomm.comm.agreement import any_rank
from ringcomm.errors import AbortedError, CollectiveTimeout, PeerLost
from tests.support.device_worlds import OPTIONS, Devices

FLAGS = [[True, False, False], [False, False, True]]


@pytest.fixture
def waits(devices: Devices, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Counts how often a host waits for its device."""
    found: Counter[str] = Counter()
    synchronize = devices.runtime.synchronize

    def counting(device: int) -> None:
        found["synchronize"] += 1
        synchronize(device)

    monkeypatch.setattr(devices.runtime, "synchronize", counting)
    yield found


def _agree(comm: Communicator, times: int = 1) -> list[bool]:
    for _ in range(times):
        found = any_rank(comm, FLAGS[comm.rank])
    return found


def test_a_flag_of_some_rank_is_everybodys(devices: Devices, waits: Counter[str]) -> None:
    with devices.new_world(2) as world:
        assert devices.run(world, _agree) == [[True, False, True]] * 2
        waits.clear()
        assert devices.run(world, _agree, 3) == [[True, False, True]] * 2
        assert not waits


def test_the_hosts_meet_once_and_part_with_the_devices(devices: Devices) -> None:
    with devices.new_world(2) as world:
        devices.run(world, _agree)
        hosts = [comm.on_host() for comm in world]
        devices.run(world, _agree)
        assert [comm.on_host() for comm in world] == hosts
        assert [host.ranks for host in hosts] == [(0, 1)] * 2
        assert not any(host.launches or host.aborted for host in hosts)
    assert all(host.engine.closed for host in hosts)


@pytest.mark.parametrize("met_before", [False, True])
def test_an_abort_on_the_device_ends_the_agreement(devices: Devices, met_before: bool) -> None:
    with devices.new_world(2, options=replace(OPTIONS, timeout=30)) as world:
        if met_before:
            devices.run(world, _agree)
        else:
            devices.run(world, lambda comm: comm.on_host() and None)

        def work(comm: Communicator) -> str:
            if comm.rank == 1:
                time.sleep(0.1)
                comm.abort("rank 1 has had enough")
                return ""
            with pytest.raises(AbortedError) as caught:
                _agree(comm)
            assert comm.aborted
            return str(caught.value)

        assert "rank 1 has had enough" in devices.run(world, work)[0]


def test_a_peer_that_does_not_come_is_named_at_the_deadline(devices: Devices) -> None:
    with devices.new_world(2, options=replace(OPTIONS, timeout=30)) as world:
        devices.run(world, _agree)

        def work(comm: Communicator) -> str:
            if comm.rank == 1:
                time.sleep(1.0)
                return ""
            comm.timeout = 0.3  # set after the host communicator was built
            with pytest.raises(CollectiveTimeout) as caught:
                _agree(comm)
            assert comm.aborted
            with pytest.raises(AbortedError):
                comm.barrier()
            return str(caught.value)

        assert "rank 1" in devices.run(world, work)[0]


def test_a_rank_that_has_left_is_not_waited_for(devices: Devices) -> None:
    with devices.new_world(2, options=replace(OPTIONS, timeout=30)) as world:
        devices.run(world, _agree)

        def work(comm: Communicator) -> Any:
            if comm.rank == 1:
                return None
            begin = time.monotonic()
            with pytest.raises(PeerLost, match="rank 1"):
                _agree(comm)
            assert comm.aborted
            return time.monotonic() - begin

        assert devices.run(world, work)[0] < 20


def test_a_rank_alone_asks_nobody(devices: Devices, waits: Counter[str]) -> None:
    with devices.new_world(1) as world:
        waits.clear()
        assert any_rank(world[0], [True, False]) == [True, False]
        assert not waits
