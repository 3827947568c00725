# SPDX-License-Identifier: Apache-2.0
"""How many threads a rank's calls use on the host: NOTE [Threads of a rank] in worker_pool.h."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from ringcomm import _native
from ringcomm.comm.host.options import CommOptions
from ringcomm.errors import ArgumentError
from ringcomm.process import available_cores

THREADS_VARIABLE = "RINGCOMM_THREADS"

# The most channels of a collective, unless the user names a number. Each has its own staging slots.
_MOST_CHANNELS = 8


class _Facts(Protocol):
    """The facts that determine a rank's number of threads; :class:`HeapHandle` has them."""

    @property
    def cpus(self) -> str: ...

    @property
    def cores(self) -> int: ...

    @property
    def torch_threads(self) -> int: ...

    @property
    def threads(self) -> int: ...


@dataclass(frozen=True)
class Threads:
    """How many threads a rank's calls use.

    Attributes:
        most: the largest number that a call uses.
        is_exact: True if the user has named the number, so that torch's number does not matter.
        channels: the number of parts of the largest collectives, equal on all ranks.
        is_crowded: True if the ranks on this rank's cores have more threads than cores.
    """

    most: int
    is_exact: bool
    channels: int
    is_crowded: bool


def named_threads(options: CommOptions) -> int:
    """Returns the number of threads that the user has named, or 0.

    Raises:
        ArgumentError: ``RINGCOMM_THREADS`` is not a positive number.
    """
    if options.threads:
        return options.threads
    text = os.environ.get(THREADS_VARIABLE, "").strip()
    if not text:
        return 0
    if not text.isdecimal() or not 0 < int(text[:6]) <= _native.MOST_CHANNELS:
        raise ArgumentError(
            f"{THREADS_VARIABLE}: expected 1 to {_native.MOST_CHANNELS} threads, got {text[:80]!r}"
        )
    return int(text)


def channels_of_region(options: CommOptions, world_size: int) -> int:
    """Returns the number of channels of a region, from facts that are equal on all ranks of a node.

    Raises:
        ArgumentError: the user has named more channels than a region can have.
    """
    if options.channels > _native.MOST_CHANNELS:
        raise ArgumentError(
            f"channels: expected 0 to {_native.MOST_CHANNELS} on the host, got {options.channels}"
        )
    if options.channels:
        return options.channels
    return max(1, min((os.cpu_count() or 1) // world_size, _MOST_CHANNELS))


def own_cpus() -> str:
    """Returns this process's affinity mask, in hexadecimal digits."""
    return f"{sum(1 << cpu for cpu in os.sched_getaffinity(0)):x}"


def share_threads(facts: Sequence[_Facts], rank: int, channels: int) -> Threads:
    """Divides a node's cores among its ranks; all ranks get equal results from equal facts.

    Args:
        facts: the facts of the node's ranks.
        rank: this rank.
        channels: the channels of the region.
    """

    def most_of(each: _Facts) -> int:
        # Ranks with different affinity masks count as sharing no cores.
        sharing = sum(other.cpus == each.cpus for other in facts)
        return each.threads or max(1, each.cores // sharing)

    used = [each.threads or min(most_of(each), each.torch_threads) for each in facts]
    own = facts[rank]
    beside = sum(most_of(each) for each in facts if each.cpus == own.cpus)
    return Threads(
        most_of(own), own.threads > 0, max(1, min(channels, max(used))), beside > own.cores
    )


def _torch_counts_threads() -> int:
    """Returns the address of at::get_num_threads in the loaded torch, or 0."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        function = ctypes.CDLL(str(library))["_ZN2at15get_num_threadsEv"]
    except (OSError, AttributeError):
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0


_COUNTER_PTR = _torch_counts_threads()
COUNTS_TORCHS_THREADS = _COUNTER_PTR != 0
_native.ask_torch_for_threads(_COUNTER_PTR)
_native.limit_threads(available_cores())
