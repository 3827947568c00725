# SPDX-License-Identifier: Apache-2.0
"""A launch waits for earlier ones until the blocks of all running launches fit on the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import pytest

from ringcomm import UnsupportedError
from ringcomm.comm.device.sharing import Blocks, DeviceOrder
from ringcomm.cuda.runtime import DeviceRuntime
from tests.support import stub_driver

CAPACITY = 10
OWNERS = {name: object() for name in "abc"}
# Owner, blocks, stream.
Launch = tuple[str, int, int]


@dataclass
class Capturing:
    """Replaces a runtime: says which streams are capturing a graph."""

    streams: set[int] = field(default_factory=set)

    def is_capturing(self, device: int, stream: int) -> bool:
        return stream in self.streams


def order_on(runtime: Capturing, device: int) -> DeviceOrder:
    """Returns the launch order of a device whose events complete when the test says so."""
    stub_driver.driver().reset()
    stub_driver.driver().hold_events()
    return DeviceOrder(cast(DeviceRuntime, runtime), device, stub_driver.driver().native)


class Launches:
    """Launches under way, in the order of their start."""

    def __init__(self, *launches: Launch) -> None:
        self.runtime = Capturing()
        self.driver = stub_driver.driver()
        self.order = order_on(self.runtime, 0)
        for owner in OWNERS.values():
            self.order.join(owner, Blocks(1, 3), CAPACITY, "test")
        for owner, blocks, stream in launches:
            self.order.after(OWNERS[owner], blocks, stream)
        self.events = self.driver.records()

    def behind(self, launch: Launch) -> list[int]:
        """Returns the numbers of the launches for which a further launch waits."""
        owner, blocks, stream = launch
        self.driver.waits()
        self.order.before(OWNERS[owner], blocks, stream)
        waits = self.driver.waits()
        assert all(waiting == stream for waiting, _ in waits)
        return [self.events.index(event) for _, event in waits]


@pytest.mark.parametrize(
    ("under_way", "launch", "behind"),
    [
        pytest.param([], ("a", 10, 1), [], id="alone"),
        pytest.param([("b", 4, 2), ("c", 4, 3)], ("a", 2, 1), [], id="beside all"),
        pytest.param([("b", 4, 2), ("c", 4, 3)], ("a", 6, 1), [0], id="the oldest"),
        pytest.param([("b", 4, 2), ("c", 4, 3)], ("a", 7, 1), [0, 1], id="all of them"),
        pytest.param([("b", 2, 2)] * 9, ("a", 8, 1), [], id="a stream's launches take turns"),
        pytest.param([("b", 2, 2)] * 9, ("a", 9, 1), [8], id="behind the last of a stream"),
        pytest.param([("b", 8, 2), ("b", 2, 2)], ("a", 8, 1), [0], id="behind the largest"),
        pytest.param([("b", 8, 2), ("b", 2, 2)], ("a", 9, 1), [0, 1], id="behind both"),
        pytest.param([("b", 2, 2), ("b", 8, 2)], ("a", 8, 1), [1], id="behind the later, larger"),
        pytest.param(
            [("b", 2, 2), ("c", 6, 3), ("b", 2, 2)], ("a", 6, 1), [1], id="not where it frees none"
        ),
        pytest.param([("b", 8, 1), ("c", 4, 3)], ("a", 6, 1), [], id="its own stream has an order"),
        pytest.param([("a", 8, 2), ("b", 4, 3)], ("a", 6, 1), [], id="its own communicator, too"),
    ],
)
def test_a_launch_waits_for_what_frees_blocks(
    under_way: list[Launch], launch: Launch, behind: list[int]
) -> None:
    assert Launches(*under_way).behind(launch) == behind


def test_what_has_ended_occupies_nothing() -> None:
    launches = Launches(("b", 10, 2), ("c", 10, 3))
    launches.driver.let_pass(launches.events[0])
    assert launches.behind(("a", 10, 1)) == [1]
    launches.driver.let_pass(launches.events[1])
    assert launches.behind(("a", 10, 1)) == []


def test_blocks_are_kept_for_messages_from_the_first_on() -> None:
    launches = Launches(("b", 4, 2), ("c", 4, 3))
    assert launches.behind(("a", 2, 1)) == []
    launches.order.sends(OWNERS["b"], "op")
    assert launches.behind(("a", 2, 1)) == [0]
    launches.order.sends(OWNERS["b"], "op")  # one declaration for all messages of the communicator
    launches.order.join(OWNERS["b"], Blocks(1, 3), CAPACITY, "another rank of it")
    assert launches.behind(("a", 3, 1)) == [0]
    launches.order.sends(OWNERS["a"], "op")
    assert launches.behind(("a", 3, 1)) == [0, 1]
    launches.order.leave(OWNERS["b"])
    assert launches.behind(("a", 3, 1)) == [0, 1]  # its other rank may still have messages
    launches.order.leave(OWNERS["b"])
    launches.order.sends(OWNERS["b"], "op")  # has no effect, since all of its ranks have left
    assert launches.behind(("a", 3, 1)) == [0]


def test_messages_that_never_fit_are_refused() -> None:
    order = order_on(Capturing(), 4)
    order.join(OWNERS["a"], Blocks(8, 3), 10, "op")
    with pytest.raises(UnsupportedError, match=r"op: .* 3 blocks .* the 8 .* 4 runs 10"):
        order.sends(OWNERS["a"], "op")


def test_a_capture_neither_waits_nor_is_waited_for() -> None:
    launches = Launches(("b", 10, 2))
    launches.runtime.streams.add(1)
    assert launches.behind(("a", 10, 1)) == []
    launches.order.after(OWNERS["a"], 10, 1)
    assert launches.behind(("c", 10, 3)) == [0]


def test_one_communicator_alone_is_not_counted() -> None:
    launches = Launches()
    for name in "bc":
        launches.order.leave(OWNERS[name])
    launches.order.after(OWNERS["a"], 10, 1)
    assert launches.behind(("a", 10, 2)) == []
    assert launches.driver.counted() == {}


def test_a_launch_that_never_fits_is_refused() -> None:
    order = order_on(Capturing(), 3)
    with pytest.raises(UnsupportedError, match=r"op: needs 11 .* device 3 runs 10 of them"):
        order.join(OWNERS["a"], Blocks(11, 0), 10, "op")
