# SPDX-License-Identifier: Apache-2.0
"""A rank is killed at each step of each kind of rendezvous: the others raise PeerLost at once.

A step is an operation of the store that changes or reads something. So the test covers new stages
of a rendezvous without a change.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import Store

from ringcomm import Communicator
from ringcomm.errors import PeerLost, RendezvousError, RingcommError
from tests.support.covering import thinned
from tests.support.ranks import Outcome, Ranks

pytestmark = pytest.mark.deadlines

WORLD, KILLED = 3, 2
GROUP = [1, 2]
# No rank waits this long, except in a first rendezvous for a rank whose process is unknown.
LONG_S, SHORT_S = 60.0, 3.0
ENDS_S = 120.0
AT_ONCE = 3
# In kinds whose waits another kind covers, the rank is killed at every STRIDE-th step only, but at
# every step in `make test-all`.
STRIDE = 5


class StepStore(Store):
    """A store that counts the steps of a rank, and kills its process at one of them.

    Checks whether a key exists are not steps: their number depends on which rank comes first.
    """

    def __init__(self, inner: Store, killed_at: int | None = None) -> None:
        super().__init__()
        self.underlying_store = inner
        self.steps = 0
        self.killed_at = killed_at

    def _step(self) -> None:
        if self.steps == self.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.steps += 1

    def set(self, key: str, value: Any) -> None:
        self._step()
        self.underlying_store.set(key, value)

    def get(self, key: str) -> bytes:
        self._step()
        return self.underlying_store.get(key)

    def add(self, key: str, amount: int) -> int:
        self._step()
        return self.underlying_store.add(key, amount)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self._step()
        return self.underlying_store.compare_set(key, expected, desired)

    def check(self, keys: list[str]) -> bool:
        return self.underlying_store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=LONG_S)) -> None:
        self.underlying_store.wait(keys, timeout)

    def delete_key(self, key: str) -> bool:
        return self.underlying_store.delete_key(key)

    def num_keys(self) -> int:
        return self.underlying_store.num_keys()

    def has_extended_api(self) -> bool:
        return False


def _world(store: Store, rank: int) -> Communicator:
    return Communicator.from_store(store, rank, WORLD, timeout=LONG_S)


def _of_communicator(build: Callable[[Communicator], Any], store: StepStore, rank: int) -> Any:
    """Returns the world's communicator, and a function that builds a part of it."""
    comm = _world(store, rank)
    comm.barrier()
    return comm, partial(build, comm)


def new_group(store: StepStore, rank: int) -> Any:
    return _of_communicator(lambda comm: comm.new_group(GROUP), store, rank)


def split(store: StepStore, rank: int) -> Any:
    return _of_communicator(lambda comm: comm.split(int(comm.rank in GROUP)), store, rank)


def group_of_group(store: StepStore, rank: int) -> Any:
    def build(comm: Communicator) -> Communicator | None:
        return comm.new_group([0, 1])

    comm = _world(store, rank)
    inner = comm.new_group(GROUP)
    comm.barrier()
    return (comm, inner), partial(build, inner) if inner is not None else list


def over_nodes(store: StepStore, rank: int) -> Any:
    """Rank 1, the killed rank's local peer, is not a member, but informs the other node."""
    os.environ["RINGCOMM_NODE_ID"] = f"node{min(rank, 1)}"
    return _of_communicator(lambda comm: comm.new_group([0, 2]), store, rank)


def nodes_of_members(store: StepStore, rank: int) -> Any:
    os.environ["RINGCOMM_NODE_ID"] = f"node{min(rank, 1)}"
    return _of_communicator(lambda comm: comm.new_group([0, 1, 2], name="again"), store, rank)


def alone_on_its_node(store: StepStore, rank: int) -> Any:
    """The killed rank has no local peer to report its end, but the others know its process."""
    os.environ["RINGCOMM_NODE_ID"] = f"node{max(rank, 1)}"
    return _of_communicator(lambda comm: comm.new_group(GROUP), store, rank)


def of_torch(store: StepStore, rank: int) -> Any:
    dist.init_process_group("ringcomm", store=store, rank=rank, world_size=WORLD)
    dist.barrier()
    build = partial(dist.new_group, GROUP, use_local_synchronization=True)
    return None, build if rank in GROUP else list


def split_of_torch(store: StepStore, rank: int) -> Any:
    dist.init_process_group("ringcomm", store=store, rank=rank, world_size=WORLD)
    dist.barrier()
    return None, partial(dist.group.WORLD.split_group, GROUP)


def first(store: StepStore, rank: int) -> Any:
    return None, partial(Communicator.from_store, store, rank, WORLD, timeout=SHORT_S)


def first_over_nodes(store: StepStore, rank: int) -> Any:
    os.environ["RINGCOMM_NODE_ID"] = f"node{max(rank, 1)}"
    return first(store, rank)


KINDS = {
    each.__name__: each
    for each in (
        *(new_group, split, group_of_group, over_nodes, nodes_of_members, alone_on_its_node),
        *(of_torch, split_of_torch, first, first_over_nodes),
    )
}
MEMBERS = {"over_nodes": (0, 2), "nodes_of_members": (0, 1, 2)}
SAMPLED = (
    *("split", "group_of_group", "nodes_of_members", "alone_on_its_node"),
    *("of_torch", "split_of_torch", "first_over_nodes"),
)
MEMBERS |= dict.fromkeys(("first", "first_over_nodes"), (0, 1, 2))


def _rank(inner: Store, rank: int, world: int, kind: str, killed_at: int | None) -> Any:
    store = StepStore(inner)
    world_comm, build = KINDS[kind](store, rank)
    store.steps = 0
    if rank == KILLED:
        store.killed_at = killed_at
    built, error = None, None
    try:
        built = build()
        if isinstance(built, Communicator):
            built.barrier()
        elif rank in GROUP and dist.is_initialized():
            dist.barrier(built)
    except RingcommError as raised:
        error = raised
    steps = store.steps
    # A finished rank stays until all others have finished. Its end would be taken for the loss, or
    # be a further step of a local peer, which reports it to the other nodes.
    finishing = [each for each in range(WORLD) if each != KILLED or killed_at is None]
    if rank in finishing:
        inner.set(f"over{rank}", "")
        inner.wait([f"over{each}" for each in finishing])
    del world_comm
    return steps, type(error), str(error), built is not None


def _outcomes(kind: str, killed_at: int | None) -> list[Outcome]:
    with Ranks(_rank, WORLD, kind, killed_at) as ranks:
        return ranks.wait(ENDS_S)


def _broken(kind: str, step: int) -> list[str]:
    """Returns what went wrong on the survivors of a kill at a step."""
    outcomes = _outcomes(kind, step)
    found = [each.value for each in outcomes]
    survivors = [rank for rank in MEMBERS.get(kind, GROUP) if rank != KILLED]
    failed = [each.describe() for each in outcomes if each.rank != KILLED and not each.ok]
    if failed:
        return [f"step {step}, {each}" for each in failed]
    # A process that joins for the first time is unknown until it has posted its handle.
    known = not kind.startswith("first") or step > 1
    texts = []
    for rank in survivors:
        _, error, text, built = found[rank]
        # A communicator that was built names ranks by its own numbers.
        named = built or f"rank {KILLED}" in text
        if error is not (PeerLost if known else RendezvousError) or not named:
            texts.append(f"step {step}, rank {rank}: {error.__name__}: {text}")
    return texts


@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_every_step(kind: str) -> None:
    whole = _outcomes(kind, None)
    assert all(each.ok for each in whole), "\n".join(each.describe() for each in whole)
    assert [each.value[1] for each in whole] == [type(None)] * WORLD, whole
    steps = whole[KILLED].value[0]
    assert steps >= 7  # one arrival, and two stages that each post once and read from all members
    with ThreadPoolExecutor(AT_ONCE) as pool:
        broken = pool.map(
            partial(_broken, kind), thinned(range(steps), STRIDE if kind in SAMPLED else 1)
        )
    assert [text for texts in broken for text in texts] == []
