"""ringcomm: its Communicator, or its backend behind ``torch.distributed``."""

from __future__ import annotations

from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from typing import Any, cast

import torch
import torch.distributed as dist

import ringcomm

from ..cases import Case
from . import Place, Prepared, Unavailable
from .gloo import bind_group, destroy_groups, init_default_group
from .torch_calls import TorchInterface, allocate_plain, prepare

_TIMEOUT = timedelta(minutes=5)


class _Calls:
    """Buffers from ringcomm's heap or from ordinary memory, and calls on them."""

    def __init__(self, place: Place, interface: TorchInterface, extra: dict[str, Any]) -> None:
        self.version = f"ringcomm {version('ringcomm')} ({place.api})"
        self._interface, self._extra = interface, extra
        self._allocate = _allocate_in_heap if place.heap_tensors else allocate_plain

    def prepare(self, case: Case) -> Prepared:
        try:
            return prepare(self._interface, case, self._allocate, self._extra)
        except ringcomm.UnsupportedError as error:
            raise Unavailable(str(error)) from error

    def close(self) -> None:
        raise NotImplementedError


class ThroughCommunicator(_Calls):
    def __init__(self, place: Place) -> None:
        self._communicator = ringcomm.Communicator.from_store(
            dist.PrefixStore("ringcomm", place.store),
            place.rank,
            place.world,
            timeout=_TIMEOUT,
            heap_bytes=place.heap_bytes,
        )
        interface = cast(TorchInterface, self._communicator)
        super().__init__(place, interface, {"algorithm": place.algorithm})

    def close(self) -> None:
        self._communicator.close()


class ThroughTorch(_Calls):
    def __init__(self, place: Place) -> None:
        init_default_group(place)
        self._group = dist.new_group(backend="ringcomm", timeout=_TIMEOUT)
        super().__init__(place, bind_group(self._group), {})

    def close(self) -> None:
        destroy_groups()


def open_system(place: Place) -> _Calls:
    return ThroughTorch(place) if place.api == "dist" else ThroughCommunicator(place)


def _allocate_in_heap(count_elems: int, dtype: torch.dtype) -> torch.Tensor:
    return ringcomm.empty(count_elems, dtype=dtype)


def _installed_version() -> str:
    try:
        return version("ringcomm")
    except PackageNotFoundError:
        return "of the source tree"
