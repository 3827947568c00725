"""The systems that can be timed: each module here wraps one library behind the same face."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from ..cases import Case

SYSTEMS = ("ringcomm", "gloo", "mpi", "bare")


class Unavailable(Exception):
    """The system has no such call: the cell of the table stays empty and says why."""


@dataclass(frozen=True)
class Place:
    """Where a system runs: this rank, and the options that concern one system only."""

    store: dist.Store
    rank: int
    world: int
    heap_tensors: bool
    api: str
    algorithm: str
    heap_bytes: int | None


@dataclass(frozen=True)
class Prepared:
    """Buffers of one case and the call on them; ``call`` returns when the result is there."""

    input: torch.Tensor
    output: torch.Tensor
    call: Callable[[], object]


class System(Protocol):
    """A library under test, as one rank holds it."""

    version: str

    def prepare(self, case: Case) -> Prepared:
        """Allocates the buffers of ``case``. Raises :class:`Unavailable`; communicates nothing."""

    def close(self) -> None:
        """Leaves the library; collective over the ranks."""


def open_system(name: str, place: Place) -> System:
    """Starts the library ``name`` on this rank; collective over the ranks."""
    module = importlib.import_module(f"{__name__}.{name}")
    return cast(System, module.open_system(place))
