# SPDX-License-Identifier: Apache-2.0
"""GPUs in CPU memory: a ``DeviceRuntime`` for tests, over an emulated driver.

What it takes over from the real thing: streams run beside the host and each other, the legacy
default stream's order, events, graphs, memory that other processes map but the own process cannot,
devices whose ordinals differ between processes; only so many blocks at once (occupancy), by the
registers, shared memory, threads and blocks of a multiprocessor, placed one by one; the queues,
in which streams hold each other back (device.h: NOTE [Hardware queues]); calls that wait for all
the work of the device: allocations, pinned ones too, mappings and their ends, peer access, and the
first use of a kernel.
What it does not: torch's operations run at once on the CPU, and the memory of plain tensors is
reused as soon as they die; ``EmulatedRuntime.in_stream_order`` makes up for both, and
``capture.graph_of`` has graphs capture them. The division of
a multiprocessor's memory between L1 and shared memory, the queues that a graph's branches go
through, preemption, time slices of processes, and locks of the driver are not modelled.
"""

from tests.support.emulator.library import DriverError
from tests.support.emulator.runtime import EmulatedRuntime

__all__ = ["DriverError", "EmulatedRuntime"]
