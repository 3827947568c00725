"""NCCL, through a process group of ``torch.distributed``."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from ..cases import Case
from ..devices import nccl_version
from ..modes import ONE_LAUNCH, PROCESSES_ON_ONE_GPU
from . import PeerSetup, Prepared, Unavailable
from .gloo import bind_group, destroy_groups, init_default_group
from .torch_calls import Allocator, prepare

# The first version in which ranks may share a GPU, and the variable that lets them.
_SHARING_VERSION = (2, 30)
_SHARING_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"


class Nccl:
    """A group of its own beside the default one; without one it says why in every cell."""

    def __init__(self, place: PeerSetup) -> None:
        self.version = f"NCCL {_dotted(nccl_version()) or 'none'} of torch {torch.__version__}"
        self._allocator = Allocator(place.device.tensors)
        self._refusal = why_not(place.mode, nccl_version())
        if self._refusal is not None:
            return
        if place.mode == PROCESSES_ON_ONE_GPU:
            os.environ[_SHARING_VARIABLE] = "1"
            self.version += f", {_SHARING_VARIABLE}=1"
        init_default_group(place)
        try:
            self._start(place)
        except RuntimeError as error:
            # NCCL refuses its ranks together, and the other systems can still be measured.
            self._refusal = f"NCCL would not start: {str(error).splitlines()[0]}"

    def _start(self, place: PeerSetup) -> None:
        group = dist.new_group(backend="nccl", timeout=timedelta(minutes=2))
        self._calls = bind_group(group)
        # The communicator is made by the first call.
        self._calls.all_reduce(torch.zeros(1, device=place.device.tensors))
        place.device.synchronize()

    def prepare(self, case: Case) -> Prepared:
        if self._refusal is not None:
            raise Unavailable(self._refusal)
        return prepare(self._calls, case, self._allocator.plain, {})

    def close(self) -> None:
        destroy_groups()


def why_not(mode: str, version: tuple[int, ...]) -> str | None:
    """Says why NCCL of this version cannot be timed in ``mode``; None where it can."""
    if not version:
        return "this torch has no NCCL"
    if mode == ONE_LAUNCH:
        return f"NCCL has no launch that carries several ranks: see --mode {PROCESSES_ON_ONE_GPU}"
    if mode == PROCESSES_ON_ONE_GPU and version < _SHARING_VERSION:
        return (
            f"NCCL {_dotted(version)} refuses several ranks on one GPU; "
            f"{_dotted(_SHARING_VERSION)} and later allow it"
        )
    return None


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def open_system(place: PeerSetup) -> Nccl:
    return Nccl(place)
