# SPDX-License-Identifier: Apache-2.0
"""One rank of a soak run."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.distributed import FileStore

from ringcomm import CommOptions, Communicator
from tests.proof.soak.cases import random_case, run_case
from tests.proof.soak.usage import Sample, sample

TIMEOUT_S = 300.0
SAMPLES = 240


@dataclass(frozen=True)
class Soak:
    """A run of ``seconds``; ``planted`` is called after each call, for negative controls."""

    seconds: float
    seed: int
    heap_bytes: int = 256 << 20
    calls_per_communicator: int = 100
    planted: Callable[[], None] | None = None


@dataclass
class Done:
    """The work that one rank has done."""

    calls: int
    elements: int
    communicators: int
    samples: list[Sample]


def _agreed(steady: Communicator, mine: bool) -> bool:
    """Returns rank 0's value of ``mine``, since ranks must not decide by their own clocks."""
    flag = torch.tensor([int(mine)])
    steady.broadcast(flag, 0)
    return bool(flag.item())


def _random_options(rng: random.Random) -> CommOptions:
    """Draws segments and slots of all sizes, so that calls take one item, a few, or hundreds."""
    return CommOptions(
        segment_bytes=4096 << rng.randrange(7), slots=2 << rng.randrange(3), timeout=TIMEOUT_S
    )


def _one_communicator(
    store: FileStore, steady: Communicator, rng: random.Random, soak: Soak, done: Done
) -> None:
    """Builds a communicator and its halves, makes calls on all, and closes them."""
    rank, world = steady.rank, steady.world_size
    comm = Communicator.from_store(
        store, rank, world, name=f"soak-{done.communicators}", options=_random_options(rng)
    )
    half = comm.split(rank % 2, rank)
    assert half is not None
    for _ in range(soak.calls_per_communicator):
        on = half if rng.random() < 0.2 else comm
        done.elements += run_case(on, random_case(rng, on.world_size))
        done.calls += 1
        if soak.planted is not None:
            soak.planted()
    half.close()
    comm.close()
    done.communicators += 1


def soak_rank(store: FileStore, rank: int, world: int, soak: Soak) -> Done:
    """Makes calls of all kinds until the time is up; all ranks draw the same calls."""
    rng = random.Random(soak.seed)
    started = sampled_at = time.monotonic()
    done = Done(0, 0, 0, [])
    with Communicator.from_store(
        store, rank, world, name="steady", timeout=TIMEOUT_S, heap_bytes=soak.heap_bytes
    ) as steady:
        while _agreed(steady, time.monotonic() - started < soak.seconds):
            _one_communicator(store, steady, rng, soak, done)
            now = time.monotonic()
            if _agreed(steady, now - sampled_at >= soak.seconds / SAMPLES):
                sampled_at = now
                done.samples.append(_sample_alone(steady, now - started))
    return done


def _sample_alone(steady: Communicator, seconds: float) -> Sample:
    """Samples the resources that this rank uses besides the steady communicator."""
    steady.barrier()
    # All peers have closed theirs; building a communicator frees the memory of closed ones.
    alone = steady.new_group([steady.rank])
    assert alone is not None
    alone.close()
    return sample(seconds)
