"""Masters of 16-bit parameters that were written to between steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ringcomm.optim.buckets import Buckets
from ringcomm.optim.options import AdamWOptions

Tensor = torch.Tensor


class WrittenParams:
    """Has masters follow what was written to their parameters in place.

    A step stores what the masters round to: without this it would undo a ``load_state_dict()`` of
    the module, and say nothing. It notices what counts up a parameter's version, which writes
    through ``.data`` do not. With stochastic rounding nobody can tell which elements were written.
    """

    def __init__(self, params: Sequence[Tensor], buckets: Buckets, options: AdamWOptions) -> None:
        followed = [
            bucket
            for bucket in buckets
            if bucket.has_all_params
            and bucket.state.master is not None
            and options.rounding == "nearest"
        ]
        self._buckets = followed
        self._params = [
            params[segment.param] for bucket in followed for segment in bucket.layout.segments
        ]
        self._versions = self._read()

    def _read(self) -> list[int]:
        return [param._version for param in self._params]

    def accept(self) -> None:
        """The masters are right as they are."""
        self._versions = self._read()

    def take_over(self) -> None:
        """Where a parameter is not what its master rounds to, the master becomes the parameter."""
        versions = self._read()
        if versions != self._versions:
            for bucket in self._buckets:
                bucket.follow_params()
            self._versions = versions
