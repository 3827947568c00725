# SPDX-License-Identifier: Apache-2.0
"""GPUs in CPU memory: a ``DeviceRuntime`` for tests, on top of an emulated driver.

It models: streams that run concurrently with the host and each other, the order of the legacy
default stream, events, graphs, memory that only other processes can map, and devices whose ordinals
differ between processes; a limited number of concurrent blocks (occupancy) by the registers, shared
memory, threads and blocks of a multiprocessor, placed block by block; the queues in which streams
block each other (device.h: NOTE [Hardware queues]); calls that wait for all the work of the device:
allocations, pinned ones included, mappings and their ends, peer access, and the first use of a
kernel. Two differences: torch's operations run immediately on the CPU, and the memory of plain
tensors is reused as soon as they die; ``EmulatedRuntime.in_stream_order`` corrects both, and
``capture.graph_of`` lets graphs capture these operations. It does not model the split of a
multiprocessor's memory between L1 and shared memory, the queues of a graph's branches, preemption,
time slices of processes, or locks of the driver.
"""

from tests.support.emulator.library import DriverError
from tests.support.emulator.runtime import EmulatedRuntime

__all__ = ["DriverError", "EmulatedRuntime"]
