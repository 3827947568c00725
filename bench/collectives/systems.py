# SPDX-License-Identifier: Apache-2.0
"""The systems that can be timed: each other module of this package wraps one library."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..launch import RankInfo
from ..loops import SERIAL, SLICED

if TYPE_CHECKING:
    from ..cases import Case, Prepared
    from ..timing import Device

# Each system's module, its class in the module, and the devices on which it runs.
_MODULES = {
    "ringcomm": ("ringcomm", "open_system", ("cpu", "cuda")),
    "triton": ("ringcomm", "open_system", ("cpu", "cuda")),
    SERIAL: ("ringcomm", "open_system", ("cuda",)),
    SLICED: ("ringcomm", "open_system", ("cuda",)),
    "gloo": ("torch_groups", "Gloo", ("cpu",)),
    "mpi": ("mpi", "Mpi", ("cpu",)),
    "impi": ("mpi", "Mpi", ("cpu",)),
    "oneccl": ("oneccl", "OneCcl", ("cpu",)),
    "bare": ("bare", "BareLoop", ("cpu",)),
    "nccl": ("torch_groups", "Nccl", ("cuda",)),
    "torch": ("torch_ops", "TorchOps", ("cuda",)),
    "copy": ("torch_ops", "Copies", ("cuda",)),
}
# A call: a function and its arguments.
Call = tuple[Callable[..., object], list[Any]]
SYSTEMS = tuple(_MODULES)
ALGORITHMS = ("auto", "one_shot", "ring", "ll", "copy_engine", "multicast")
# Formats of sums between nodes; a system's name may have one in place of an algorithm.
COMPRESSIONS = ("int8", "fp8", "int4")
_WITH_ALGORITHMS = {
    "ringcomm": (*ALGORITHMS, *COMPRESSIONS),
    "triton": ("auto", "one_shot", "ring"),
    SERIAL: ALGORITHMS,
    SLICED: ALGORITHMS,
}


class Unavailable(Exception):
    """The system does not have this call: the table's cell is empty, and its note says why."""


def find_call(calls: Mapping[str, Call], name: str, library: str) -> Call:
    """Returns the call of the collective ``name`` from the implemented calls of ``library``.

    Raises:
        Unavailable: ``library`` has no such call.
    """
    if name not in calls:
        raise Unavailable(f"{name} is not implemented for {library}")
    return calls[name]


def is_system(spec: str) -> bool:
    """True if ``spec`` names a system: one of SYSTEMS, or a form such as ``ringcomm:ALGORITHM``."""
    algorithms = [f"{name}:{each}" for name in _WITH_ALGORITHMS for each in _WITH_ALGORITHMS[name]]
    return spec in (*SYSTEMS, *algorithms)


def runs_on(spec: str, device: str) -> bool:
    """True if the system has any calls on "cpu" or "cuda"."""
    return device in _MODULES[spec.partition(":")[0]][2]


@dataclass(frozen=True, kw_only=True)
class PeerSetup(RankInfo):
    """The environment of a system: this process's rank, and options of single systems."""

    heap_tensors: bool
    api: str
    algorithm: str
    heap_bytes: int | None
    device: Device
    channels: int = 0
    kernels: str = "native"  # or "triton", or other native kernels: "serial", "sliced"
    on_nodes: bool = False


class System:
    """A library under test in one process."""

    version: str

    def prepare(self, case: Case) -> Prepared:
        """Allocates the buffers of ``case`` without communication. Raises :class:`Unavailable`."""
        raise NotImplementedError

    def close(self) -> None:
        """Closes the library; collective over the ranks."""


def open_system(spec: str, setup: PeerSetup) -> System:
    """Starts the library that ``spec`` names on this rank; collective over the ranks."""
    name, _, algorithm = spec.partition(":")
    # The spec may name kernels of ringcomm other than the default kernels.
    kernels = name if name in ("triton", SERIAL, SLICED) else "native"
    setup = replace(setup, algorithm=algorithm or setup.algorithm, kernels=kernels)
    module, opens, _ = _MODULES[name]
    system: System = getattr(importlib.import_module(f"{__package__}.{module}"), opens)(setup)
    return system
