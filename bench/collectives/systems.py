"""The systems that can be timed: each of the other modules here wraps one library."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..launch import RankInfo
from ..loops import SERIAL

if TYPE_CHECKING:
    from ..cases import Case, Prepared
    from ..timing import Device

# The module of each system and its class there, and the devices that it runs on.
_MODULES = {
    "ringcomm": ("ringcomm", "open_system", ("cpu", "cuda")),
    "triton": ("ringcomm", "open_system", ("cpu", "cuda")),
    SERIAL: ("ringcomm", "open_system", ("cuda",)),
    "gloo": ("torch_groups", "Gloo", ("cpu",)),
    "mpi": ("mpi", "Mpi", ("cpu",)),
    "impi": ("mpi", "Mpi", ("cpu",)),
    "bare": ("bare", "BareLoop", ("cpu",)),
    "nccl": ("torch_groups", "Nccl", ("cuda",)),
    "torch": ("torch_ops", "TorchOps", ("cuda",)),
    "copy": ("torch_ops", "Copies", ("cuda",)),
}
# A function and its arguments.
Call = tuple[Callable[..., object], list[Any]]
SYSTEMS = tuple(_MODULES)
ALGORITHMS = ("auto", "one_shot", "ring", "ll", "copy_engine")
# Forms of sums between nodes, which may stand in the place of an algorithm.
COMPRESSIONS = ("int8", "fp8", "int4")
_WITH_ALGORITHMS = {
    "ringcomm": (*ALGORITHMS, *COMPRESSIONS),
    "triton": ("auto", "one_shot", "ring"),
    SERIAL: ALGORITHMS,
}


class Unavailable(Exception):
    """The system has no such call: the cell of the table stays empty and says why."""


def find_call(calls: Mapping[str, Call], name: str, library: str) -> Call:
    """Returns the call of the collective ``name`` among those of ``library`` that are written.

    Raises:
        Unavailable: there is none.
    """
    if name not in calls:
        raise Unavailable(f"no {name} is written for {library}")
    return calls[name]


def is_system(spec: str) -> bool:
    """True if ``spec`` names a system: one of SYSTEMS, ``ringcomm:ALGORITHM`` or so."""
    algorithms = [f"{name}:{each}" for name in _WITH_ALGORITHMS for each in _WITH_ALGORITHMS[name]]
    return spec in (*SYSTEMS, *algorithms)


def runs_on(spec: str, device: str) -> bool:
    """True if the system has calls on "cpu" or "cuda" at all."""
    return device in _MODULES[spec.partition(":")[0]][2]


@dataclass(frozen=True, kw_only=True)
class PeerSetup(RankInfo):
    """The setting of a system: this process's rank, and options that concern one system only."""

    heap_tensors: bool
    api: str
    algorithm: str
    heap_bytes: int | None
    device: Device
    channels: int = 0
    kernels: str = "native"  # or Triton's, or the native ones with their older loops
    on_nodes: bool = False


class System:
    """A library under test, as one process holds it."""

    version: str

    def prepare(self, case: Case) -> Prepared:
        """Allocates the buffers of ``case``. Raises :class:`Unavailable`; communicates nothing."""
        raise NotImplementedError

    def close(self) -> None:
        """Leaves the library, if there is anything to leave; collective over the ranks."""


def open_system(spec: str, setup: PeerSetup) -> System:
    """Starts the library that ``spec`` names on this rank; collective over the ranks."""
    name, _, algorithm = spec.partition(":")
    # ringcomm, with other kernels than usual.
    kernels = name if name in ("triton", SERIAL) else "native"
    setup = replace(setup, algorithm=algorithm or setup.algorithm, kernels=kernels)
    module, opens, _ = _MODULES[name]
    system: System = getattr(importlib.import_module(f"{__package__}.{module}"), opens)(setup)
    return system
