"""The growth of an optimizer whose step is laid out already, by a param group.

NOTE [Growth]
What the optimizer has stays where it is: parameters, gradients and state lie in the buckets that
they have, which are laid out as before. Parameters of a sharded module have a place in its buckets
since ``shard()``, where no segment was theirs so far; other parameters get buckets of their own.
Like torch's, they begin at step 0. Tables of all parameters are made anew, and take over the
numbers of the old ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringcomm.optim import kernels
from ringcomm.optim.buckets import Bucket, BucketDevice, Buckets, make_bucket
from ringcomm.optim.layout import ShardLayout
from ringcomm.optim.placement import Placement, move_parameters, specs_of
from ringcomm.optim.rules import plain
from ringcomm.optim.step import ShardedStep


class GrownStep(ShardedStep):
    """The step that takes the place of another one, with more groups; building it is collective.

    Args:
        before: the step before, which is as it was if this raises.
        groups: its groups, and more behind them.
    """

    _operation = "optimizer.add_param_group"

    def __init__(self, before: ShardedStep, groups: Sequence[dict[str, Any]]) -> None:
        before.written.take_over()
        self._before: ShardedStep = before
        self._count = len(before.layout.params)
        self._states = before.states()
        super().__init__(groups, before.setting)
        del self._before, self._states
        self.table.control.copy_(before.table.control)
        self.table.step[: self._count].copy_(before.table.step)
        if self.setting.device.type == "cpu":
            self._seen_skipped = int(self.table.control[kernels.SKIPPED])

    def _compared_groups(self) -> list[dict[str, Any]]:
        """Adds the new group's lr, so that one which is wrong on a rank is not found by a step."""
        *known, added = super()._compared_groups()
        # On a device the lr may be a tensor there, and reading it would wait.
        rate = {"lr": plain(self.groups[-1].get("lr"))} if self.table.compares else {}
        return [*known, {**rate, **added}]

    def _lay_out(self) -> ShardLayout:
        return self._before.layout.extended(specs_of(self.groups)[self._count :])

    def _take_over(self) -> None:
        setting, options, comm = self.setting, self.setting.options, self.setting.comm
        place, known = BucketDevice.of(comm), len(self._before.buckets)
        more = [
            make_bucket(number, bucket, bucket.chunk(*setting.shard_of), options, place)
            for number, bucket in enumerate(self.layout.buckets)
            if number >= known
        ]
        added = Buckets(self.layout, more)
        self.keep_state(added)
        move_parameters(self.params, added, comm, options.broadcast_parameters)
        self.write_masters(added, Bucket.refresh_master)
        self.buckets = Buckets(self.layout, [*self._before.buckets, *more])
        self.gradients = self._make_gradients()

    def _placed_buckets(self, placement: Placement) -> Buckets:
        buckets: list[Bucket] = list(self._before.buckets)
        for bucket, layout in zip(buckets, self.layout.buckets, strict=True):
            bucket.lay_out(layout)
        return Buckets(self.layout, buckets)
