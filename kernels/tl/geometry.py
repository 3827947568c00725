# SPDX-License-Identifier: Apache-2.0
"""The layout of a communicator's region of the heap; it never changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ringcomm._native import ADAMW_TILE_ELEMS

__all__ = ["Geometry"]


@dataclass(frozen=True)
class Geometry:
    """The sizes of a region, a compile-time argument of every kernel; see protocol/layout.h.

    Attributes:
        world: ranks of the communicator.
        channels: blocks per collective.
        slots: staging slots per slot set, a power of two.
        segment_bytes: payload of a slot, a power of two of 64 or more.
        staging_bytes: offset of the slots in a region.
        line_bytes: unit in which channels divide a chunk.
    """

    world: int
    channels: int
    slots: int
    segment_bytes: int
    staging_bytes: int
    line_bytes: int = 64

    @property
    def tiles_of_2(self) -> Geometry:
        """Returns this geometry, but channels divide a chunk into whole optimizer tiles of 2-byte
        elements; see cut_by_tiles() of buckets.h. A property, since compiled kernels read it as
        NOTE [the oldest Triton] describes."""
        return replace(self, line_bytes=ADAMW_TILE_ELEMS * 2)

    @property
    def tiles_of_4(self) -> Geometry:
        """Returns the same as :attr:`tiles_of_2` for 4-byte elements."""
        return replace(self, line_bytes=ADAMW_TILE_ELEMS * 4)

    @classmethod
    def of(cls, geometry: Mapping[str, int]) -> Geometry:
        """Makes a Geometry from the ``geometry`` of a native communicator."""
        return cls(**geometry)
