"""The interface of an optimizer to its step: its update rule, and the state that it keeps."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ringcomm.comm.communicator import Communicator
from ringcomm.optim.buckets import Buckets
from ringcomm.optim.kernels import Kernels, StepTable
from ringcomm.optim.layout import BucketLayout, ShardLayout
from ringcomm.optim.options import AdamWOptions

Tensor = torch.Tensor
Group = Mapping[str, Any]


@dataclass(frozen=True)
class ParamState:
    """The state that a parameter has, apart from its tensors' elements.

    Those of :attr:`tensors` lie in the buckets, and the rest in :meth:`UpdateRule.kept_whole`.

    Attributes:
        numbers: by name, such as "step".
        tensors: names of the tensors that have the parameter's shape.
    """

    numbers: Mapping[str, float] = field(default_factory=dict)
    tensors: tuple[str, ...] = ()


def plain(value: Any) -> Any:
    """Returns a hyper-parameter as JSON knows it."""
    if isinstance(value, Tensor):
        return value.tolist()
    return [plain(each) for each in value] if isinstance(value, (tuple, list)) else value


def digest_of(hyper: Sequence[Mapping[str, Any]]) -> float:
    """Returns a whole number below 2^52, equal in all processes for equal plain JSON types."""
    found = hashlib.sha256(json.dumps(list(map(dict, hyper))).encode()).digest()
    return float(int.from_bytes(found[:8], "big") & (1 << 52) - 1)


class UpdateRule(ABC):
    """The update rule of one optimizer: its hyper-parameters, its state, and its kernels.

    Attributes:
        name: name of the optimizer, which ranks compare.
        hyper_columns: numbers in a row of :attr:`StepTable.hyper`.
        factors_bytes: bytes in a row of :attr:`StepTable.factors`.
        keeps_more: True if what state a parameter has does not follow from its step number.
        goes_by_parts: True if the kernels go through the parts of a bucket's state by themselves.
        eight_bits: True if the tensors of the state are moments of 8 bits (``block_moments``).
        elementwise: True if what becomes of an element depends on that element alone, so that a
            bucket can be updated before the others have their gradients.
    """

    name: str
    hyper_columns = 0
    factors_bytes = 0
    keeps_more = False
    eight_bits = False
    goes_by_parts = False
    elementwise = True

    @property
    def saved_as(self) -> str:
        """The name that a saved state is told by."""
        return self.name

    @property
    def numbers(self) -> frozenset[str]:
        """Names of the numbers that are kept of a parameter."""
        return frozenset({"step"})

    @abstractmethod
    def check_hyper(self, group: Group, index: int, place: torch.device) -> None:
        """Checks a group's hyper-parameters; a tensor lr on a GPU is not read.

        Raises:
            ArgumentError: one cannot be used.
            UnsupportedError: the optimizer cannot be sharded with these.
        """

    @abstractmethod
    def replaced(self, group: Group) -> dict[str, Any]:
        """Returns the entries of a new group that are kept in another form than they were given."""

    @abstractmethod
    def compared(self, group: Group) -> dict[str, Any]:
        """Returns the hyper-parameters that ranks compare, lr excepted, as plain JSON types."""

    @abstractmethod
    def digest(self, groups: Sequence[Group]) -> float:
        """Returns a whole number below 2^52, equal in all processes for equal hyper-parameters."""

    def row(self, group: Group) -> list[float]:
        """Returns the row of a checked group in :attr:`StepTable.hyper`, which begins with lr."""
        return []

    @abstractmethod
    def names(self, groups: Sequence[Group]) -> tuple[str, ...]:
        """Returns the names of the tensors that steps of checked groups keep: FP32, flat."""

    def names_of(self, group: Group, groups: Sequence[Group]) -> tuple[str, ...]:
        """Returns the names among :meth:`names` that parameters of one of the groups need."""
        return self.names(groups)

    def names_in(
        self, bucket: BucketLayout, layout: ShardLayout, groups: Sequence[Group]
    ) -> tuple[str, ...]:
        """Returns the names among :meth:`names` that a bucket of a layout needs."""
        return self.names(groups)

    @abstractmethod
    def misfit(self, names: Sequence[str], groups: Sequence[Group]) -> str:
        """Says which tensors were expected of a saved state; "" if ``names`` fit.

        Args:
            names: names of the tensors that were saved, without masters.
            groups: the groups that would go on from there.
        """

    @abstractmethod
    def kernels(
        self, comm: Communicator | None, options: AdamWOptions, table: StepTable
    ) -> Kernels:
        """Makes the kernels of a step.

        Args:
            comm: the communicator, or None for a world of one on the host.
            options: options of the optimizer.
            table: the table that :meth:`Kernels.begin` will be called with.

        Raises:
            UnsupportedError: there are no such kernels here.
        """

    def bind(
        self,
        layout: ShardLayout,
        groups: Sequence[Group],
        buckets: Buckets,
        chunks: int,
        states: Sequence[ParamState | None] = (),
    ) -> None:
        """Called when the buckets are there, and again whenever the groups have grown.

        Args:
            layout: layout of the parameters.
            groups: param groups of the optimizer.
            buckets: of the parameters.
            chunks: number of chunks of each bucket; 1 if every rank keeps the whole state.
            states: of the first parameters, the states that they have already, whose tensors'
                elements are in the buckets.
        """
        return

    @abstractmethod
    def states(
        self, layout: ShardLayout, groups: Sequence[Group], steps: Sequence[float]
    ) -> list[ParamState | None]:
        """Returns by parameter the state that it has; None for none, as before its first step.

        Args:
            layout: layout of the parameters.
            groups: param groups of the optimizer.
            steps: by parameter, the steps that it has taken.
        """

    def kept_whole(self, index: int) -> Mapping[str, Tensor]:
        """Returns by name the tensors of a parameter's state that lie in no bucket.

        All ranks have them whole and equal, float32, contiguous and of shapes of the rule's own.
        Whoever loads a state writes into them.

        Args:
            index: of the parameter in the layout that the rule is bound to.
        """
        return {}

    def take_states(self, states: Sequence[ParamState | None]) -> None:
        """Goes on from states that were saved, whose tensors' elements are in the buckets."""
        return

    @abstractmethod
    def to_torch(self, name: str, number: float) -> Any:
        """Returns a number of a parameter's state as torch's class keeps it."""

    @abstractmethod
    def from_torch(self, entry: Mapping[str, Any], group: Group) -> ParamState | None:
        """Reads which state a parameter has from its entry in torch's format.

        Raises:
            ValueError: the entry is not of this optimizer; says what was expected.
        """
