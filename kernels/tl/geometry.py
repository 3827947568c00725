"""How a region of the heap is laid out: what is constant while a communicator lives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Geometry"]


@dataclass(frozen=True)
class Geometry:
    """A compile-time argument of every kernel; see kernels/include/ringcomm/layout.h.

    Attributes:
        world: ranks of the communicator.
        channels: blocks per collective.
        slots: staging slots per slot set, a power of two.
        segment_bytes: payload of a slot, a multiple of 64.
        staging_bytes: where the slots begin in a region.
    """

    world: int
    channels: int
    slots: int
    segment_bytes: int
    staging_bytes: int

    @classmethod
    def of(cls, geometry: Mapping[str, int]) -> Geometry:
        """From the ``geometry`` of a native communicator."""
        return cls(**geometry)
