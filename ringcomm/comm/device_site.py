"""What the arguments of a call on a device must be."""

from __future__ import annotations

import torch

from ringcomm.comm.checks import Site
from ringcomm.comm.reduce_ops import DEVICE_ALGORITHMS
from ringcomm.memory.device_runtime import DeviceRuntime

__all__ = ["DeviceSite"]


class DeviceSite(Site):
    """Argument checks of one call on a device."""

    __slots__ = ("_device", "_runtime")
    algorithms = DEVICE_ALGORITHMS

    def __init__(self, op: str, rank_of: tuple[int, int], place: tuple[DeviceRuntime, int]) -> None:
        super().__init__(op, *rank_of)
        self._runtime, self._device = place

    def place(self, name: str, tensor: torch.Tensor) -> None:
        if not self._runtime.is_device_tensor(tensor, self._device):
            self.fail(
                f"{name}: expected a tensor on device {self._device} "
                f"({self._runtime.torch_device(self._device)}), got one on {tensor.device}; this "
                "communicator works on that device alone. Copy the tensor there, or use a "
                "communicator of the tensor's device"
            )
