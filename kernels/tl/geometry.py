"""The layout of a region of the heap: its constants for as long as a communicator lives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ringcomm._native import ADAMW_TILE_ELEMS

__all__ = ["Geometry"]


@dataclass(frozen=True)
class Geometry:
    """A compile-time argument of every kernel; see ringcomm/protocol/layout.h.

    Attributes:
        world: ranks of the communicator.
        channels: blocks per collective.
        slots: staging slots per slot set, a power of two.
        segment_bytes: payload of a slot, a power of two of 64 or more.
        staging_bytes: where the slots begin in a region.
        line_bytes: channels share a chunk in units of this.
    """

    world: int
    channels: int
    slots: int
    segment_bytes: int
    staging_bytes: int
    line_bytes: int = 64

    @property
    def tiles_of_2(self) -> Geometry:
        """Channels share whole tiles of the optimizer, of elements of 2 bytes; see
        cut_by_tiles() of buckets.h. A property, since compiled kernels ask for it, and name it
        before they pass it on: NOTE [the oldest Triton]."""
        return replace(self, line_bytes=ADAMW_TILE_ELEMS * 2)

    @property
    def tiles_of_4(self) -> Geometry:
        """The same of 4 bytes."""
        return replace(self, line_bytes=ADAMW_TILE_ELEMS * 4)

    @classmethod
    def of(cls, geometry: Mapping[str, int]) -> Geometry:
        """Makes one from the ``geometry`` of a native communicator."""
        return cls(**geometry)
