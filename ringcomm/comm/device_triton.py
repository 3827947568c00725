"""Triton's kernels on a device: how a call of theirs is prepared, and launched in its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ringcomm import _native
from ringcomm.memory.device_runtime import DeviceRuntime

if TYPE_CHECKING:
    from ringcomm._tl.geometry import Geometry
    from ringcomm._tl.launch import Part, Plan

__all__ = ["Prepared", "TritonLaunch", "launch"]


@dataclass(frozen=True)
class TritonLaunch:
    """A rank's prepared call."""

    place: tuple[DeviceRuntime, int]
    plan: Plan
    part: Part
    timeout_ns: int
    geometry: Geometry

    @property
    def prepared_kind(self) -> tuple[int, int]:
        """Which calls can share a launch, and the blocks that one rank needs."""
        plan = self.plan
        constants = tuple(sorted((name, str(value)) for name, value in plan.constants.items()))
        key = plan.kernel.__name__, plan.sizes, plan.call, constants
        return hash(key), self.geometry.channels

    def launch_with(self, others: Sequence[TritonLaunch], stream: int) -> None:
        """One launch of this call and those of ``others``, of its kind, on ``stream``."""
        from ringcomm._tl.launch import launch as launch_kernel

        parts = [self.part, *(other.part for other in others)]
        runtime, device = self.place
        runtime.call_on_stream(
            device,
            stream,
            lambda: launch_kernel(self.plan, parts, self.timeout_ns, self.geometry),
        )


# Of one rank, ready to be launched.
Prepared = _native.DeviceComm | TritonLaunch


def launch(prepared: Sequence[Prepared], stream: int) -> None:
    """Launches calls of one kind, of ranks on one device, together on ``stream``."""
    triton = [each for each in prepared if isinstance(each, TritonLaunch)]
    if triton:
        triton[0].launch_with(triton[1:], stream)
    else:
        natives = [each for each in prepared if not isinstance(each, TritonLaunch)]
        _native.launch(natives, stream)
