"""Writes to parameters between steps, which the FP32 masters follow."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd.graph import increment_version

from ringcomm.optim.buckets import Buckets
from ringcomm.optim.dtensors import PLAIN_KINDS, is_distributed, local_of, plainly
from ringcomm.optim.options import AdamWOptions

Tensor = torch.Tensor


def count_change(params: Sequence[Tensor]) -> None:
    """Counts a change of values in the versions of parameters, as torch's in-place operations do.

    A kernel changes memory behind autograd's back. With the version advanced, the backward of a
    graph that has saved such a parameter raises instead of using the new values.
    """
    with plainly():
        increment_version(with_local(params))


def with_local(params: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns parameters, and behind them the local tensors of DTensors, which have versions."""
    if PLAIN_KINDS.issuperset(map(type, params)):
        return params
    others = [param for param in params if type(param) not in PLAIN_KINDS]
    return [*params, *(local_of(param) for param in others if is_distributed(param))]


class OutsideWrites:
    """The in-place writes to parameters between steps, which their masters follow.

    A step stores the rounded masters in the parameters, so it would otherwise silently undo a
    ``load_state_dict()`` of the module. Writes are detected by the parameters' versions, which
    writes through ``.data`` do not change. Masters do not follow under stochastic rounding, where
    the values do not tell which elements were written.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        buckets: Buckets,
        options: AdamWOptions,
        left_out: Sequence[Tensor] = (),
    ) -> None:
        followed = [
            bucket
            for bucket in buckets
            if bucket.has_all_params
            and bucket.state.master is not None
            and options.rounding == "nearest"
        ]
        self._buckets = followed
        placed = [params[each.param] for bucket in followed for each in bucket.layout.segments]
        # What no group has lies in the same buckets, and its masters with the others'.
        placed += left_out if followed else []
        # A local tensor that is written to changes no version of its DTensor.
        self._params = with_local(placed)
        self._versions = self._read()
        self._place = {id(param): at for at, param in enumerate(self._params)}

    def _read(self) -> list[int]:
        with plainly():
            return [param._version for param in self._params]

    def accept(self) -> None:
        """Accepts the masters as they are, whatever was written so far."""
        self._versions = self._read()

    def found(self, params: Sequence[Tensor]) -> bool:
        """Tells whether some of these were written to since masters have followed last."""
        known = [(param, self._place.get(id(param))) for param in with_local(params)]
        with plainly():
            return any(at is not None and each._version != self._versions[at] for each, at in known)

    def expect(self, written: Sequence[Tensor]) -> None:
        """Accepts one more version of parameters, whose masters are written with them."""
        if self._params:
            for at in map(self._place.get, map(id, with_local(written))):
                if at is not None:
                    self._versions[at] += 1

    def take_over(self) -> None:
        """Sets each master that does not round to its parameter to the parameter."""
        versions = self._read()
        if versions != self._versions:
            for bucket in self._buckets:
                bucket.follow_params()
            self._versions = versions
