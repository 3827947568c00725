"""Blocks of pinned host memory, which copies beside the computation bring to a device and back."""

from __future__ import annotations

import torch

from ringcomm.cuda.runtime import DeviceRuntime, Event, Stream


class Copy:
    """One copy between a block and memory of the device."""

    def __init__(self, runtime: DeviceRuntime, device: int, done: Event) -> None:
        self._runtime, self._device = runtime, device
        self.done = done

    def wait(self) -> None:
        """Makes the stream that is current here wait for the copy; the host goes on."""
        stream = self._runtime.current_stream(self._device)
        self._runtime.wait_event(self._device, stream, self.done)


class PinnedBlocks:
    """Blocks of pinned memory of one rank, for one device.

    A copy begins when the work that the caller's stream has by then is done, since that work uses
    the device's memory. Copies that share a block, or memory from the same address on, run in the
    order in which they were submitted. Copies to the device and from it have a stream each, since
    PCIe carries both ways at once.

    Args:
        runtime: of the device.
        device: its ordinal.
    """

    def __init__(self, runtime: DeviceRuntime, device: int) -> None:
        self._runtime, self._device = runtime, device
        self._to_device = runtime.make_stream(device)
        self._to_host = runtime.make_stream(device)
        self._blocks: list[torch.Tensor] = []
        # By block, and by address on the device, the last copy.
        self._last: dict[tuple[str, int], Copy] = {}

    @property
    def size_bytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block.nbytes for block in self._blocks)

    def buffer(self, size_bytes: int) -> torch.Tensor:
        """Returns memory of the device, of zeros: uint8 [bytes]."""
        place = self._runtime.torch_device(self._device)
        return torch.zeros(size_bytes, dtype=torch.uint8, device=place)

    def add_block(self, size_bytes: int) -> int:
        """Adds a block of zeros, and returns its number."""
        pins = self._runtime.torch_device(self._device).type != "cpu"  # an emulated device is one
        made = torch.zeros(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=pins)
        self._blocks.append(made)
        return len(self._blocks) - 1

    def read(self, block: int, memory: torch.Tensor) -> Copy:
        """Begins to copy a block to memory of the device: uint8 [bytes], as many as it has."""
        return self._copy(block, memory, memory, self._blocks[block], self._to_device)

    def write(self, block: int, memory: torch.Tensor) -> Copy:
        """Begins to copy memory of the device to a block."""
        return self._copy(block, memory, self._blocks[block], memory, self._to_host)

    def _copy(
        self,
        block: int,
        memory: torch.Tensor,
        target: torch.Tensor,
        source: torch.Tensor,
        stream: Stream,
    ) -> Copy:
        runtime, device = self._runtime, self._device
        keys = ("block", block), ("memory", memory.data_ptr())
        behind = [self._last[key].done for key in keys if key in self._last]
        behind.append(runtime.record_event(device, runtime.current_stream(device)))
        for event in behind:
            runtime.wait_event(device, stream.handle, event)
        with runtime.on_stream(stream):
            target.copy_(source, non_blocking=True)
        runtime.keep_for_stream(memory, stream)
        done = Copy(runtime, device, runtime.record_event(device, stream.handle))
        self._last.update(dict.fromkeys(keys, done))
        return done
