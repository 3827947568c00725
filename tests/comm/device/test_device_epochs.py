# SPDX-License-Identifier: Apache-2.0
"""Epochs wrap around after 2^32 items or LL calls without any effect."""

import functools
import threading
from collections.abc import Callable

import pytest

from tests.support.call_checks import CHECKS, Case, check_all_gather, check_all_reduce
from tests.support.call_checks import check_reduce_scatter as check_reduce_scatter_tensor
from tests.support.device_worlds import MANY, ll_flags, set_epochs, set_ll_epoch

WORLD = 3
WRAP = 1 << 32
# The buffers of LL are cleared once in this many calls (ll.h).
CLEARING = 1 << 24


def _between_calls(devices, comm, barrier: threading.Barrier, put: Callable[[], None]) -> None:
    """Lets all ranks call ``put``, which sets their next epochs, while no rank is in a call.

    A barrier's kernel may end on one rank while other ranks still read their words, and the first
    call after it may write into words of a rank that has not called ``put`` yet.
    """
    comm.barrier()
    devices.runtime.synchronize(0)
    barrier.wait()
    put()
    barrier.wait()


@pytest.mark.parametrize("name", CHECKS)
def test_items_wrap_around(devices, name):
    """From a few items before 2^31 and 2^32 to many items after."""
    barrier = threading.Barrier(WORLD)

    def body(comm):
        for begin in (WRAP // 2 - 5, WRAP - 5):
            _between_calls(devices, comm, barrier, functools.partial(set_epochs, comm, begin))
            for count, memory, algorithm in (
                (3, "plain", "one_shot"),
                (MANY // 4, "plain", "ring"),
                (3, "heap", "ring"),
                (MANY // 4, "heap", "one_shot"),
            ):
                CHECKS[name](comm, Case(count, memory=memory, algorithm=algorithm))

    with devices.new_world(WORLD) as world:
        devices.run(world, body)


def _ll(comm, count):
    for check in (check_all_reduce, check_reduce_scatter_tensor, check_all_gather):
        check(comm, Case(count, memory="unaligned", algorithm="ll"))


def _skip_to(devices, comm, epoch):
    """Sets a world's state as after small calls up to ``epoch``."""
    comm.barrier()
    devices.runtime.synchronize(0)
    set_ll_epoch(comm, epoch)


def test_ll_across_a_clearing(devices):
    def body(comm):
        for clearing in (CLEARING, 2 * CLEARING):
            _skip_to(devices, comm, clearing - 4)
            for count in (1, 250, 3, 250, 17):
                _ll(comm, count)

    with devices.new_world(WORLD) as world:
        devices.run(world, body)


def test_ll_calls_wrap_around(devices):
    """Makes only the calls around the last two of the clearings of 2^32 calls."""

    def body(comm):
        for clearing in (WRAP - CLEARING, WRAP):
            _skip_to(devices, comm, clearing - 3)
            for count in (250, 1, 100, 250):
                _ll(comm, count)

    with devices.new_world(WORLD) as world:
        devices.run(world, body)


@pytest.mark.parametrize("clearing", [CLEARING, WRAP])
def test_a_clearing_leaves_no_old_packet_in_either_set(devices, clearing):
    """With large messages only, old flags must not count as new ones 2^32 calls later."""

    def body(comm):
        for _ in range(2):
            check_all_reduce(comm, Case(250, algorithm="ll"))
        devices.runtime.synchronize(0)
        before = ll_flags(comm)
        _skip_to(devices, comm, clearing - 4)
        for _ in range(6):
            check_all_reduce(comm, Case(1, algorithm="ll"))
        devices.runtime.synchronize(0)
        return before, ll_flags(comm)

    with devices.new_world(WORLD) as world:
        for before, after in devices.run(world, body):
            assert before >= {1, 2}
            assert not before & after - {0}
