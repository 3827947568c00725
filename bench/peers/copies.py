"""A plain device-to-device copy of as many bytes as the collective must move: the ceiling."""

from __future__ import annotations

from functools import partial

import torch

from ..cases import Case
from ..modes import ONE_GPU_MODES
from ..traffic import COUNTED, needed_bytes
from . import PeerSetup, Prepared, Unavailable


class Copies:
    """One copy by the process of rank 0; the processes of other ranks do nothing meanwhile."""

    version = "one copy_ of torch, half of the needed bytes read and half written"

    def __init__(self, place: PeerSetup) -> None:
        self._place = place

    def prepare(self, case: Case) -> Prepared:
        name = case.collective.name
        if self._place.mode not in ONE_GPU_MODES:
            raise Unavailable("one copy stands for ranks that share a GPU")
        if name not in COUNTED:
            raise Unavailable(f"the bytes of {name} are not counted")
        if self._place.rank != 0:
            return Prepared((), _nothing)
        copied_bytes = needed_bytes(name, case.size_bytes, case.world) // 2
        source = torch.empty(copied_bytes, dtype=torch.uint8, device=self._place.device.tensors)
        source.random_(0, 256)
        target = torch.zeros_like(source)
        return Prepared((), partial(target.copy_, source))

    def close(self) -> None:
        """Nothing was opened."""


def _nothing() -> None:
    pass


def open_system(place: PeerSetup) -> Copies:
    return Copies(place)
