"""The layout of a region of the heap: its constants for as long as a communicator lives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ringcomm._native import ADAMW_BLOCK_ELEMS

__all__ = ["Geometry"]


@dataclass(frozen=True)
class Geometry:
    """A compile-time argument of every kernel; see ringcomm/protocol/layout.h.

    Attributes:
        world: ranks of the communicator.
        channels: blocks per collective.
        slots: staging slots per slot set, a power of two.
        segment_bytes: payload of a slot, a multiple of 64.
        staging_bytes: where the slots begin in a region.
        line_bytes: channels share a chunk in units of this.
        cut_bytes: what a piece of a slice carries; 0: a whole segment.
    """

    world: int
    channels: int
    slots: int
    segment_bytes: int
    staging_bytes: int
    line_bytes: int = 64
    cut_bytes: int = 0

    @property
    def piece_bytes(self) -> int:
        """The bytes that a piece of a slice carries."""
        return self.cut_bytes or self.segment_bytes

    @property
    def blocks_of_2(self) -> Geometry:
        """Channels and pieces in whole blocks of the optimizer, of elements of 2 bytes; see
        cut_by_blocks() of buckets.h. A property, since compiled kernels ask for it."""
        return self._cut_by_blocks(2)

    @property
    def blocks_of_4(self) -> Geometry:
        """The same of 4 bytes."""
        return self._cut_by_blocks(4)

    def _cut_by_blocks(self, elem_bytes: int) -> Geometry:
        block = ADAMW_BLOCK_ELEMS * elem_bytes
        return replace(self, line_bytes=block, cut_bytes=self.segment_bytes // block * block)

    @classmethod
    def of(cls, geometry: Mapping[str, int]) -> Geometry:
        """Makes one from the ``geometry`` of a native communicator."""
        return cls(**geometry)
