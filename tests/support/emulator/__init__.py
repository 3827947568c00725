"""GPUs in CPU memory: a ``DeviceRuntime`` for tests, over an emulated driver.

What it takes over from the real thing: streams run beside the host and each other, the legacy
default stream's order, events, graphs, room for only so many blocks at once, memory that other
processes map but the own process cannot, devices whose ordinals differ between processes.
What it does not: torch's operations run at once on the CPU, and the memory of plain tensors is
reused as soon as they die; ``EmulatedRuntime.in_stream_order`` makes up for both.
"""

from tests.support.emulator.library import DriverError
from tests.support.emulator.runtime import EmulatedRuntime

__all__ = ["DriverError", "EmulatedRuntime"]
