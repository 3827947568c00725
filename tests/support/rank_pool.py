# SPDX-License-Identifier: Apache-2.0
"""Processes that stay up and run one check after another as ranks of a fresh group.

Importing torch costs seconds per process, a new group costs milliseconds.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

import ringcomm
import ringcomm.c10d
from ringcomm import CommOptions
from ringcomm.launch import end_with, rank_variables
from tests.support.ranks import Outcome, answer_of, context, gather, values_of

Check = Callable[[int, int], Any]
Surround = Callable[[str], AbstractContextManager[object]]

GROUP_TIMEOUT = timedelta(seconds=60)
ANSWER_TIMEOUT_S = 120.0
# After one rank has failed, the others most likely wait in a collective.
GRACE_S = 3.0


@dataclass(frozen=True)
class Setting:
    """The default group in which a check runs.

    Attributes:
        backend: of ``init_process_group``.
        nodes: on how many equal nodes the ranks claim to be, in order; 1: they claim nothing.
        options: the group's ``pg_options``.
        way: which implementation serves groups of ringcomm, "python" or "native".
    """

    backend: str
    nodes: int = 1
    options: CommOptions | None = None
    way: str = "python"

    def environment(self, rank: int, world_size: int) -> dict[str, str]:
        """Returns the environment variables of a rank."""
        variables = {"RINGCOMM_BACKEND": self.way}
        if self.nodes > 1:
            variables["RINGCOMM_NODE_ID"] = f"node{rank * self.nodes // world_size}"
        return variables


def default_group() -> Any:
    """Returns this rank's default group, on which backends have methods of their own."""
    return dist.group.WORLD


def group_communicator(rank: int, world_size: int, **settings: Any) -> ringcomm.Communicator:
    """Builds a communicator of a check's ranks, for any backend of their group."""
    store = dist.PrefixStore("communicator", dist.distributed_c10d._get_default_store())
    return ringcomm.Communicator.from_store(store, rank, world_size, **settings)


def same(ours: Any, reference: Any) -> None:
    """Asserts that two results are equal in every bit, tensor by tensor."""
    our_leaves, our_spec = pytree.tree_flatten(ours)
    leaves, spec = pytree.tree_flatten(reference)
    assert our_spec == spec, f"{our_spec} != {spec}"
    for index, (one, other) in enumerate(zip(our_leaves, leaves, strict=True)):
        if isinstance(other, torch.Tensor):
            assert one.dtype == other.dtype, f"leaf {index}: {one.dtype} != {other.dtype}"
            assert torch.equal(one, other), f"leaf {index}: {one} != {other}"
        else:
            assert one == other, f"leaf {index}: {one!r} != {other!r}"


# Gloo ends its threads when a group is freed. If a callback holds the last reference to the group,
# a thread of Gloo frees the group, joins itself, and the process aborts. So each group is kept
# until the next group exists.
_latest: list[Any] = []


def in_group(setting: Setting, check: Check, rank: int, world_size: int, rendezvous: str) -> Any:
    """Runs ``check`` in a new default group of this rank, and returns its result."""
    store = dist.FileStore(rendezvous, world_size)
    with mock.patch.dict(os.environ, setting.environment(rank, world_size)):
        dist.init_process_group(
            setting.backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=GROUP_TIMEOUT,
            pg_options=setting.options,
        )
        _latest[:] = [default_group()]
        try:
            torch.manual_seed(0)
            return check(rank, world_size)
        finally:
            dist.destroy_process_group()


def in_groups(
    settings: Sequence[Setting],
    check: Check,
    surround: Surround,
    rank: int,
    world_size: int,
    rendezvous: str,
) -> None:
    """Runs ``check`` in a group of each setting in turn; the results must be equal."""
    results = []
    for number, setting in enumerate(settings):
        with surround(setting.backend):
            joined = f"{rendezvous}.{number}"
            results.append(in_group(setting, check, rank, world_size, joined))
    for other in results[1:]:
        same(results[0], other)


def launched(check: Check, rank: int, world_size: int) -> Any:
    """Runs ``check`` with the variables that torchrun sets, for the whole check.

    Without them Lightning would start ranks itself, by running the current program again.
    """
    variables = {
        "TORCHELASTIC_RUN_ID": "none",
        **rank_variables(rank, world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",  # no server listens there: the group exists already
    }
    with mock.patch.dict(os.environ, variables):
        return check(rank, world_size)


def rank_loop(pipe: Connection, rank: int, world_size: int, surround: Surround) -> None:
    """Runs in a rank's process: receives (settings, check, rendezvous), and sends the outcome."""
    torch.set_num_threads(1)
    ringcomm.c10d.register()
    while True:
        try:
            settings, check, rendezvous = pipe.recv()
        except EOFError:
            return
        where = (rank, world_size, rendezvous)
        pipe.send_bytes(answer_of(partial(in_groups, settings, check, surround, *where)))


def fork_ranks(
    modules: Sequence[str], pipes: Sequence[Connection], world_size: int, surround: Surround
) -> None:
    """Runs in a process that imports modules once, and forks all ranks.

    The process ends with the first rank that ends, and the ranks end with it.
    """
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    parent = os.getpid()
    for rank, pipe in enumerate(pipes):
        if os.fork():
            continue
        end_with(parent)
        for other in pipes:
            if other is not pipe:
                other.close()  # an open copy would hide the other rank's death
        rank_loop(pipe, rank, world_size, surround)
        os._exit(0)
    for pipe in pipes:
        pipe.close()
    os.wait()


class RankPool:
    """``world_size`` processes; if a check leaves them stuck, only this check fails.

    Args:
        world_size: how many.
        surround: a context that each process enters around a group, given the group's backend.
        imports: modules that take long to import, and that all checks need.
    """

    def __init__(
        self,
        world_size: int,
        surround: Surround = contextlib.nullcontext,
        imports: Sequence[str] = (),
    ) -> None:
        self.world_size = world_size
        self._surround = surround
        self._imports = imports
        self._folder = tempfile.TemporaryDirectory(prefix="ringcomm-c10d-")
        self._runs = 0
        self._ranks: list[tuple[Any, Connection]] = []

    def run(self, check: Check, backend: str = "ringcomm", way: str = "python") -> None:
        """Runs ``check(rank, world_size)`` on all ranks, in a default group of ``backend``."""
        self._run((Setting(backend, way=way),), check)

    def compare(self, check: Check, way: str = "python") -> None:
        """Runs ``check`` on ringcomm and on Gloo; the results must be equal in every bit."""
        self._run((Setting("ringcomm", way=way), Setting("gloo")), check)

    def compare_nodes(self, check: Check, sum_group_size: int = 2) -> None:
        """Runs ``check`` over two nodes and on one; the results must be equal in every bit.

        Args:
            check: as for :meth:`compare`.
            sum_group_size: how many ranks of the single node are summed first.
        """
        one = Setting("ringcomm", options=CommOptions(sum_group_size=sum_group_size))
        self._run((Setting("ringcomm", nodes=2), one), check)

    def _run(self, settings: tuple[Setting, ...], check: Check) -> None:
        if not all(process.is_alive() for process, _ in self._ranks):
            self._stop()
        if not self._ranks:
            self._start()
        self._runs += 1
        rendezvous = str(Path(self._folder.name) / str(self._runs))
        for _, pipe in self._ranks:
            pipe.send((settings, check, rendezvous))
        outcomes = gather(
            [pipe for _, pipe in self._ranks],
            self._outcome,
            lambda rank: Outcome(rank, error=TimeoutError("did not answer in time")),
            ANSWER_TIMEOUT_S,
            GRACE_S,
        )
        if not all(outcome.ok for outcome in outcomes):
            self._stop()
        values_of(outcomes)

    def _outcome(self, rank: int) -> Outcome:
        outcome = Outcome(rank)
        try:
            outcome.read(self._ranks[rank][1])
        except EOFError:
            outcome.error, outcome.trace = EOFError(), "the process died"
        return outcome

    def _start(self) -> None:
        how = context()
        if self._imports:
            ends = [how.Pipe() for _ in range(self.world_size)]
            pipes = [theirs for _, theirs in ends]
            args = (self._imports, pipes, self.world_size, self._surround)
            parent = how.Process(target=fork_ranks, args=args, daemon=True)
            parent.start()
            for ours, theirs in ends:
                theirs.close()
                self._ranks.append((parent, ours))
            return
        for rank in range(self.world_size):
            ours, theirs = how.Pipe()
            process = how.Process(
                target=rank_loop,
                args=(theirs, rank, self.world_size, self._surround),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def _stop(self) -> None:
        for process, pipe in self._ranks:
            pipe.close()
            process.kill()
        for process, _ in self._ranks:
            process.join()
        self._ranks = []

    def close(self) -> None:
        self._stop()
        with contextlib.suppress(OSError):
            self._folder.cleanup()
