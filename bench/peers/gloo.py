"""Gloo, through a process group of ``torch.distributed``."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist

from ..cases import Case
from . import PeerSetup, Prepared
from .torch_calls import Allocator, TorchInterface, prepare

_GROUP_CALLS = (
    "all_reduce",
    "reduce_scatter_tensor",
    "all_gather_into_tensor",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all_single",
    "isend",
    "recv",
)
# torch 2.13 renamed these, and warns, at a cost of microseconds, at each call by the old name.
_RENAMED = {
    "reduce_scatter_tensor": "reduce_scatter_single",
    "all_gather_into_tensor": "all_gather_single",
}


def bind_group(group: dist.ProcessGroup | None) -> TorchInterface:
    """The functions of ``torch.distributed`` on ``group``, None meaning the default group."""
    calls: dict[str, Callable[..., Any]] = {}
    for name in _GROUP_CALLS:
        function = getattr(dist, _RENAMED.get(name, name), None) or getattr(dist, name)
        calls[name] = function if group is None else partial(function, group=group)
    return cast(TorchInterface, SimpleNamespace(**calls))


class Gloo:
    """The default process group of this rank."""

    def __init__(self, place: PeerSetup) -> None:
        self.version = f"Gloo of torch {torch.__version__}"
        init_default_group(place)
        self._allocator = Allocator(place.device.tensors)
        self._calls = bind_group(None)

    def prepare(self, case: Case) -> Prepared:
        return prepare(self._calls, case, self._allocator.plain, {})

    def close(self) -> None:
        destroy_groups()


def open_system(place: PeerSetup) -> Gloo:
    return Gloo(place)


def init_default_group(place: PeerSetup) -> None:
    """Makes Gloo the default group, once, whichever system needs it first."""
    if dist.is_initialized():
        return
    # Ranks share one machine: without this Gloo looks the host name up and may not find it.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("gloo", place.store),
        rank=place.rank,
        world_size=place.world,
        timeout=timedelta(minutes=5),
    )


def destroy_groups() -> None:
    """Ends all groups, those of other backends with them; later calls do nothing."""
    if dist.is_initialized():
        dist.destroy_process_group()
