"""Tensor and sequence parallelism: the public names of ``ringcomm.extras.parallel``."""

from __future__ import annotations

from ringcomm.extras.parallel import (
    COLUMN,
    GATHER,
    KINDS,
    ROW,
    SEQUENCE,
    SPLIT,
    WHOLE,
    ColumnParallelLinear,
    RowParallelLinear,
    fuse_products,
    parallelize,
)

__all__ = [
    "COLUMN",
    "GATHER",
    "KINDS",
    "ROW",
    "SEQUENCE",
    "SPLIT",
    "WHOLE",
    "ColumnParallelLinear",
    "RowParallelLinear",
    "fuse_products",
    "parallelize",
]
