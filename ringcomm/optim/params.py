"""What the layout needs to know of a parameter, without its memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from ringcomm.errors import ArgumentError, CheckpointError

Tensor = torch.Tensor

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def is_distributed(param: Tensor) -> bool:
    """Whether it is a DTensor, whose data lies elsewhere and differs between ranks."""
    return getattr(param, "device_mesh", None) is not None


def check_local(param: Tensor, called: str) -> None:
    """Checks that a parameter is this rank's own, and no part of a distributed one.

    Raises:
        ArgumentError: it is a DTensor.
    """
    if is_distributed(param):
        raise ArgumentError(
            f"{called}: expected a tensor that every rank has whole, got a "
            f"{type(param).__name__}, as fully_shard() and tensor parallelism make them; use "
            "torch.optim for it, or ringcomm.zero.shard() in place of fully_shard()"
        )


@dataclass(frozen=True)
class ParamSpec:
    """A parameter, as the layout sees it.

    Attributes:
        shape: of the parameter; may have zero elements.
        dtype: float32, bfloat16 or float16.
        group: index of its param group.
        name: for messages; "" when it has none.
        trainable: False keeps it out of the buckets.
        tied_to: index of the earlier entry that is the same tensor; such an entry has no place.
        stride: of its elements when they fill their memory in another order than that of the
            shape (channels_last); None means contiguous.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    group: int = 0
    name: str = ""
    trainable: bool = True
    tied_to: int | None = None
    stride: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_NAMES:
            raise ArgumentError(
                f"parameter {self.name or self.shape}: expected dtype {', '.join(DTYPES)}, got "
                f"{self.dtype}"
            )

    @classmethod
    def of(
        cls, tensor: Tensor, group: int = 0, name: str = "", tied_to: int | None = None
    ) -> ParamSpec:
        """The spec of a parameter of any strides.

        Raises:
            ArgumentError: its dtype is not one of the three.
        """
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        keeps = not tensor.is_contiguous() and _fills_its_memory(shape, stride)
        return cls(
            shape,
            tensor.dtype,
            group,
            name,
            tensor.requires_grad,
            tied_to,
            stride if keeps else None,
        )

    @property
    def elems(self) -> int:
        """How many elements it has."""
        return prod(self.shape)

    @property
    def placed(self) -> bool:
        """Whether it takes room in a bucket."""
        return self.trainable and self.tied_to is None and self.elems > 0

    def view(self, flat: Tensor) -> Tensor:
        """``flat`` [elems], contiguous, as a tensor of this parameter's shape and strides."""
        if self.stride is None:
            return flat.view(self.shape)
        return flat.as_strided(self.shape, self.stride)

    def describe(self) -> dict[str, Any]:
        """As plain JSON types."""
        return {
            "name": self.name,
            "shape": list(self.shape),
            "stride": None if self.stride is None else list(self.stride),
            "dtype": DTYPE_NAMES[self.dtype],
            "group": self.group,
            "trainable": self.trainable,
            "tied_to": self.tied_to,
        }

    @classmethod
    def from_description(cls, described: Mapping[str, Any]) -> ParamSpec:
        """Undoes :meth:`describe`.

        Raises:
            CheckpointError: something is missing or of the wrong kind.
        """
        try:
            stride = described["stride"]
            spec = cls(
                tuple(described["shape"]),
                DTYPES[described["dtype"]],
                described["group"],
                described["name"],
                described["trainable"],
                described["tied_to"],
                None if stride is None else tuple(stride),
            )
            if spec.describe() != dict(described) or any(size < 0 for size in spec.shape):
                raise ValueError("unexpected entries")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"layout: expected the description of a parameter, got {described!r} ({error!r})"
            ) from error
        return spec


def _fills_its_memory(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements are the memory from the first to the last, each once."""
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size != 1:
            if step != expected:
                return False
            expected *= size
    return True
