"""The values of parameters that move into buckets: held as tensors, or read from elsewhere."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import nn

Tensor = torch.Tensor


class Values(Protocol):
    """The values of what a rank has of a parameter, read by parts.

    Attributes:
        dtype: that of the parameter as the module has it, before it moves into a bucket.
    """

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, begin: int, out: Tensor) -> None:
        """Fills ``out`` [n], of any floating-point dtype, with the elements from ``begin`` on."""


class HeldValues:
    """The values of a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self.dtype = tensor.dtype

    def read(self, begin: int, out: Tensor) -> None:
        out.copy_(self._tensor.reshape(-1)[begin : begin + out.numel()])


class WeightSource(ABC):
    """Values for a module that is being sharded, which every rank reads for itself.

    It is opened before anything changes, and reads while parameters move. What it cannot read is
    told in :meth:`settle`, since a rank that raised meanwhile would keep the others waiting.
    """

    @abstractmethod
    def open(self, root: nn.Module) -> None:
        """Finds the values of a module's parameters and persistent buffers.

        Raises:
            CheckpointError: there are none, or they do not fit.
        """

    @property
    @abstractmethod
    def digest(self) -> str:
        """Returns a description that is equal on ranks which read the same values."""

    @abstractmethod
    def values_of(self, param: Tensor) -> Values | None:
        """Returns the values of a parameter; None if there are none."""

    @abstractmethod
    def values_of_buffer(self, owner: nn.Module, key: str) -> Values | None:
        """Returns the values of a module's own buffer; None if there are none."""

    @abstractmethod
    def initialize(self, module: nn.Module) -> None:
        """Fills what a module has itself, of which something has no values here.

        Raises:
            ArgumentError: nobody has said how.
        """

    @abstractmethod
    def settle(self) -> None:
        """Ends the reading; raises what it has failed with."""

    @abstractmethod
    def close(self) -> None:
        """Ends the reading, whatever it has come to."""
