"""ringcomm with its Triton kernels in the place of the native ones."""

from __future__ import annotations

from dataclasses import replace

from . import PeerSetup, System, ringcomm


def open_system(place: PeerSetup) -> System:
    return ringcomm.open_system(replace(place, kernels="triton"))
