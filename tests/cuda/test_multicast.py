# SPDX-License-Identifier: Apache-2.0
"""Multicast objects on the emulated driver, and how processes pass them to each other.

The emulated driver has the real driver's rules.
"""

import os
import socket

import pytest

from ringcomm.cuda.multicast import MulticastWindow, granularity_bytes, why_not
from ringcomm.cuda.virtual_memory import ChunkedRange
from ringcomm.errors import UnsupportedError
from ringcomm.rendezvous.handles import DescriptorInbox, send_descriptor
from tests.support.emulator import EmulatedRuntime
from tests.support.emulator.library import COMPILER, library

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


@pytest.fixture
def runtime():
    yield EmulatedRuntime(devices=3)
    assert library().emu_vmm_in_use() == 0


def _two(runtime):
    """Two windows of one object, not bound yet."""
    size_bytes = granularity_bytes(runtime, 0, 2)
    first = MulticastWindow.create(runtime, 0, size_bytes, 2)
    descriptor = first.export()
    second = MulticastWindow.join(runtime, 1, size_bytes, descriptor)
    os.close(descriptor)
    return first, second


def test_what_a_device_lacks():
    assert why_not(EmulatedRuntime(), 0) == ""
    assert "no NVSwitch" in why_not(EmulatedRuntime(multicast=False), 0)
    assert "capability is 8.9" in why_not(EmulatedRuntime(capability=(8, 9)), 0)
    old = EmulatedRuntime()
    old.driver_library = "libc.so.6"
    assert "the driver has no cuCtxGetDevice: it is older than CUDA 12.1" in why_not(old, 0)


def test_windows_have_addresses_of_their_own_and_go(runtime):
    windows = _two(runtime)
    for window in windows:
        window.bind()
    assert len({ptr for each in windows for ptr in (each.own_ptr, each.all_ptr)}) == 4
    runtime.write(0, windows[0].own_ptr, b"mine")
    assert runtime.read(1, windows[1].own_ptr, 4) == bytes(4)
    for window in (*windows, *windows):
        window.close()


def _two_with_heaps(runtime, unit_bytes):
    """Two bound windows of one object, which has room for three units of each rank's heap."""
    first = MulticastWindow.create(runtime, 0, unit_bytes, 2, 3 * unit_bytes)
    descriptor = first.export()
    second = MulticastWindow.join(runtime, 1, unit_bytes, descriptor, 3 * unit_bytes)
    os.close(descriptor)
    for window in (first, second):
        window.bind()
    return first, second


def test_chunks_of_heaps_are_bound_as_they_come(runtime):
    unit_bytes = granularity_bytes(runtime, 0, 2)
    windows = _two_with_heaps(runtime, unit_bytes)
    heap = ChunkedRange(runtime, 1, 8 * unit_bytes)
    for count, bound in ((1, 1), (2, 3)):
        heap.create(count * unit_bytes)
        for _ in range(2):  # a second call does not bind anything twice
            windows[1].bind_heap(heap.chunks)
            assert windows[1].bound_heap_bytes == bound * unit_bytes
    assert [each.heaps_ptr - each.all_ptr for each in windows] == [unit_bytes] * 2
    assert (windows[0].bound_heap_bytes, windows[1].heap_refusal) == (0, "")
    heap.create(unit_bytes)
    windows[1].bind_heap(heap.chunks)
    assert windows[1].bound_heap_bytes == 3 * unit_bytes
    assert windows[1].heap_refusal == f"the object has {3 * unit_bytes} bytes for each heap"
    for window in windows:
        window.close()
    windows[1].bind_heap(heap.chunks)  # has no effect after close()
    heap.close()


def test_a_heap_that_is_freed_first_stays_bound(runtime):
    unit_bytes = granularity_bytes(runtime, 0, 2)
    windows, heap = _two_with_heaps(runtime, unit_bytes), ChunkedRange(runtime, 0, 2 * unit_bytes)
    heap.create(unit_bytes)
    windows[0].bind_heap(heap.chunks)
    heap.close()
    for window in windows:
        window.close()


def test_nothing_is_bound_before_all_devices_are_added(runtime):
    """Binding fails on the emulated driver; a real driver would wait for the missing device."""
    window = MulticastWindow.create(runtime, 0, granularity_bytes(runtime, 0, 2), 2)
    with pytest.raises(UnsupportedError, match=r"cuMulticastBindMem: CUDA error 401: .*present"):
        window.bind()  # and closes it


def test_what_the_driver_refuses_leaves_nothing(runtime):
    first, second = _two(runtime)
    descriptor = first.export()
    with pytest.raises(UnsupportedError, match=r"cuMulticastAddDevice.*nvidia-fabricmanager"):
        MulticastWindow.join(runtime, 2, first.size_bytes, descriptor)  # a third of two
    os.close(descriptor)
    with pytest.raises(UnsupportedError, match="cuMulticastCreate: CUDA error 1: invalid argument"):
        MulticastWindow.create(runtime, 0, 4096, 2)  # 4096 is not a multiple of the granularity
    first.close()
    second.close()


def test_a_descriptor_reaches_the_inbox_of_that_name():
    inbox, (reader, writer) = DescriptorInbox(), os.pipe()
    send_descriptor(inbox.name, writer)
    received = inbox.receive(os.getpid(), 1.0)
    assert received is not None and received != writer and not os.get_inheritable(received)
    os.write(received, b"x")
    assert os.read(reader, 1) == b"x"
    inbox.close()
    with pytest.raises(OSError):
        send_descriptor(inbox.name, writer)
    for each in (reader, writer, received):
        os.close(each)


def test_what_others_send_to_an_inbox_is_dropped():
    inbox, before = DescriptorInbox(), len(os.listdir("/proc/self/fd"))
    send_descriptor(inbox.name, 0)
    assert inbox.receive(os.getpid() + 1, 1.0) is None  # sent by this process, not the expected one
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(b"no descriptor", inbox.name)
    assert inbox.receive(os.getpid(), 1.0) is None
    assert inbox.receive(os.getpid(), 0.01) is None  # nothing came
    assert len(os.listdir("/proc/self/fd")) == before
    inbox.close()
