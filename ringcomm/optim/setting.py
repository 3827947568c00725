"""What an optimizer was built with: ranks, device, rule, options, and scaler of losses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from ringcomm.comm.communicator import Communicator
from ringcomm.errors import where
from ringcomm.optim.gradients import Accumulator
from ringcomm.optim.loss_scaler import LossScaler
from ringcomm.optim.options import AdamWOptions
from ringcomm.optim.placement import sharers_of
from ringcomm.optim.rules import UpdateRule


@dataclass(frozen=True)
class Setting:
    """The settings that an optimizer was built with.

    Attributes:
        comm: the communicator, or None for a world of one.
        device: device of the parameters.
        rule: how the optimizer updates its parameters.
        options: ringcomm's own choices.
        loss_scaler: the scaler of the losses, or None.
        accumulator: with ``options.accumulate_dtype``, the sums that backwards add to.
        others: the mesh of other stages and parts of the model, or None.
    """

    comm: Communicator | None
    device: torch.device
    rule: UpdateRule
    options: AdamWOptions
    loss_scaler: LossScaler | None = None
    accumulator: Accumulator | None = None
    others: DeviceMesh | None = None

    @property
    def rank(self) -> int:
        return 0 if self.comm is None else self.comm.rank

    @property
    def sharers(self) -> Communicator | None:
        """The ranks that share the state: all, or those of this rank's node."""
        return sharers_of(self.comm, self.options.state)

    @property
    def shard_of(self) -> tuple[int, int]:
        """The number of the chunk of each bucket that this rank keeps state for, of how many."""
        sharers = self.sharers
        return (0, 1) if sharers is None else (sharers.shard_index, sharers.world_size)

    @property
    def launches(self) -> bool:
        """True if the kernels run on a device, for which the host would have to wait."""
        return self.comm is not None and self.comm.launches

    @property
    def world_size(self) -> int:
        return 1 if self.comm is None else self.comm.world_size

    def loss_scale(self) -> float:
        """Returns the scale of the gradients that come next."""
        return 1.0 if self.loss_scaler is None else float(self.loss_scaler.current)

    def unwatch(self, param: torch.Tensor) -> None:
        """Has no sum taken of a parameter's gradients any more."""
        if self.accumulator is not None:
            self.accumulator.unwatch(param)

    def where(self, operation: str) -> str:
        """Returns the head of a message about an operation."""
        return where(f"optimizer.{operation}", self.rank, self.world_size)
