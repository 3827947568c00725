# SPDX-License-Identifier: Apache-2.0
"""Samples the resources that a process uses over time, and finds growth."""

from __future__ import annotations

import ctypes
import os
import statistics
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import ringcomm

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# torch and malloc sometimes take memory without a leak: the first samples are left out, and this
# much growth is allowed for the rest of the run, however long it is.
PRIVATE_SLACK_BYTES = 8 << 20
# Shares of the samples: the start, in which pools fill up, and the end, which is compared.
WARM_UP, TAIL = 0.25, 0.25


@dataclass(frozen=True)
class Sample:
    """The resources in use when no call is under way and all closable objects are closed.

    Attributes:
        private_bytes: resident memory that is not shared with other processes' heaps.
        shared_bytes: resident shared memory: the heap, and the peers' heaps that are mapped.
        mappings: lines of /proc/self/maps.
        heap_bytes: in use in the heap.
    """

    seconds: float
    private_bytes: int
    shared_bytes: int
    mappings: int
    descriptors: int
    threads: int
    heap_bytes: int


def sample(seconds: float) -> Sample:
    """Returns this process's resources, after malloc has returned its unused memory.

    glibc keeps freed memory in an arena per thread; how much depends on the sizes of calls.
    """
    ctypes.CDLL(None).malloc_trim(0)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    kilobytes = {name: int(status[name].split()[0]) for name in ("RssAnon", "RssShmem")}
    return Sample(
        seconds,
        kilobytes["RssAnon"] << 10,
        kilobytes["RssShmem"] << 10,
        len(Path("/proc/self/maps").read_text().splitlines()),
        len(os.listdir("/proc/self/fd")),
        threading.active_count(),
        ringcomm.heap_stats()["used_bytes"],
    )


def growth(samples: Sequence[Sample]) -> dict[str, float]:
    """Returns the median of the last quarter minus that of the second, for every quantity.

    Args:
        samples: at least eight, in order.
    """
    first = round(len(samples) * WARM_UP)
    early = samples[first : first + max(1, round(len(samples) * TAIL))]
    late = samples[-max(1, round(len(samples) * TAIL)) :]
    names = [name for name in asdict(samples[0]) if name != "seconds"]
    return {
        name: statistics.median(getattr(each, name) for each in late)
        - statistics.median(getattr(each, name) for each in early)
        for name in names
    }


def complaints(samples: Sequence[Sample], shared_slack_bytes: int) -> list[str]:
    """Returns the quantities that have grown by more than is allowed.

    Args:
        samples: of one process.
        shared_slack_bytes: pages of the heaps that were touched late for the first time.
    """
    allowed = {
        "private_bytes": PRIVATE_SLACK_BYTES,
        "shared_bytes": shared_slack_bytes,
        # malloc maps and unmaps its arenas.
        "mappings": 32,
        "descriptors": 0,
        "threads": 0,
        "heap_bytes": 0,
    }
    return [
        f"{name} grew by {grown:g}, allowed {allowed[name]}"
        for name, grown in growth(samples).items()
        if grown > allowed[name]
    ]
