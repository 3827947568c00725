# SPDX-License-Identifier: Apache-2.0
"""A save that is killed at any moment leaves the earlier checkpoints and no partial new one."""

from __future__ import annotations

import itertools
import os
import random
import resource
import shutil
import signal
import time
import traceback
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed import FileStore

from ringcomm import Communicator
from ringcomm.comm.agreement import ModelRanks
from ringcomm.errors import CheckpointError, RingcommError
from ringcomm.zero.checkpoint import Checkpoints, FlatShard, Reader
from ringcomm.zero.checkpoint import format as tensor_file
from tests.support.faults import die
from tests.support.rank_pool import group_communicator
from tests.support.ranks import run_ranks
from tests.zero.checkpoint.states import assert_step, files_below, save_step
from tests.zero.checkpoint.system_calls import interposed

TIMEOUT_S = 150.0
WORLD_SIZE = 2
SAVED, FAILED = 0, 3  # exit codes of a forked rank


def check_and_go_on(root: Path, world_size: int = 1) -> int:
    """Asserts that the latest checkpoint is whole and that the next save removes leftovers."""
    checkpoints = Checkpoints(root, keep=1)
    latest = checkpoints.latest()
    assert latest in (1, 2)
    assert_step(checkpoints.reader(), latest, world_size)
    if latest == 2 and 1 in checkpoints.steps():
        assert_step(checkpoints.reader(1), 1, world_size)
    left = {each.name for each in checkpoints.incomplete()}
    named = {f"step-{step:08d}" for step in checkpoints.steps()}
    assert {each.name for each in root.iterdir()} == named | left
    assert all(name.startswith(".") for name in left)
    save_step(checkpoints, 3)
    assert_step(checkpoints.reader(), 3)
    assert [each.name for each in root.iterdir()] == ["step-00000003"]
    return latest


def _kill_at(number: int, half: bool):
    """Kills this process before call ``number``, or after that call wrote half of its bytes."""

    def before(reached, name, args):
        if reached == number:
            if half and name == "write":
                os.pwrite(args[0], args[1][: len(args[1]) // 2], os.lseek(args[0], 0, 1))
            die()

    return before


def _fork(work) -> int:
    """Forks a process that runs ``work`` and exits; a fresh one would spend seconds on imports."""
    child = os.fork()
    if child:
        return child
    try:
        ended = work() or SAVED
    except BaseException:
        traceback.print_exc()
        ended = 1
    os._exit(ended)


def _ending(child: int) -> int:
    """Returns the exit code of a process, or the negative signal number that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _calls_of_a_save(folder) -> list[str]:
    names: list[str] = []
    save_step(Checkpoints(folder, keep=1), 1)
    with interposed(lambda number, name, args: names.append(name)):
        save_step(Checkpoints(folder, keep=1), 2)
    return names


def _killed_everywhere(store, rank, world_size, folder):
    """Kills a saving process before each of its calls, and halfway through each write.

    Returns the latest step after each kill.
    """
    tensor_file.SLICE_BYTES = 64
    seen = []
    names = _calls_of_a_save(Path(folder) / "whole")
    for number, name in enumerate([*names, ""]):
        for half in (False, True) if name == "write" else (False,):
            root = Path(folder) / f"{number}-{half}"
            save_step(Checkpoints(root, keep=1), 1)

            def saves(root=root, number=number, half=half):
                with interposed(_kill_at(number, half)):
                    save_step(Checkpoints(root, keep=1), 2)

            assert _ending(_fork(saves)) == (-signal.SIGKILL if name else SAVED)
            seen.append(check_and_go_on(root))
            shutil.rmtree(root)
    return seen


def test_a_save_killed_at_any_call_leaves_whole_checkpoints(tmp_path):
    (seen,) = run_ranks(_killed_everywhere, 1, str(tmp_path), timeout_s=TIMEOUT_S)
    # Up to some call the old checkpoint is the latest; after that call the new one is.
    assert seen == sorted(seen)
    assert seen.count(1) > 15 and seen.count(2) > 5


def _saves_until(folder, rank, victim, number):
    """Runs one rank of a world in which rank ``victim`` is killed at a call of its second save."""
    store = FileStore(f"{folder}.store", WORLD_SIZE)
    with Communicator.from_store(store, rank, WORLD_SIZE, timeout=TIMEOUT_S) as comm:
        checkpoints = Checkpoints(folder, keep=1, ranks=ModelRanks(comm))
        save_step(checkpoints, 1, rank, WORLD_SIZE)
        before = _kill_at(number, half=True) if rank == victim else _nothing
        try:
            with interposed(before):
                save_step(checkpoints, 2, rank, WORLD_SIZE)
        except RingcommError:
            return FAILED
    return SAVED


def _nothing(number, name, args):
    pass


def _ranks_killed_everywhere(store, rank, world_size, folder):
    """Kills each rank at each of its calls in turn; returns per victim how the other rank ended."""
    told: list[list[tuple[int, int]]] = []
    for victim in range(WORLD_SIZE):
        told.append([])
        for number in itertools.count():
            root = Path(folder) / f"{victim}-{number}"
            children = [
                _fork(partial(_saves_until, root, each, victim, number))
                for each in range(WORLD_SIZE)
            ]
            endings = [_ending(child) for child in children]
            latest = check_and_go_on(root, WORLD_SIZE)
            shutil.rmtree(root)
            if endings == [SAVED] * WORLD_SIZE:
                break
            assert endings[victim] == -signal.SIGKILL
            other = endings[1 - victim]
            assert other in (SAVED, FAILED)
            # A rank reports success only if the new checkpoint is complete.
            assert latest == 2 or other == FAILED
            told[victim].append((latest, other))
    return told


def test_a_rank_that_dies_leaves_whole_checkpoints(tmp_path):
    """The survivor raises, unless only the removal of an old checkpoint was left to do."""
    ((first, other),) = run_ranks(_ranks_killed_everywhere, 1, str(tmp_path), timeout_s=TIMEOUT_S)
    assert len(other) > 3 and {*other} == {(1, FAILED)}
    assert {(1, FAILED), (2, SAVED)} <= {*first} <= {(1, FAILED), (2, FAILED), (2, SAVED)}
    assert first == sorted(first, key=lambda ending: ending[0])


def _saves_on(root, rank):
    store = FileStore(f"{root}.store", WORLD_SIZE)
    with Communicator.from_store(store, rank, WORLD_SIZE, timeout=TIMEOUT_S) as comm:
        checkpoints = Checkpoints(root, ranks=ModelRanks(comm))
        for step in itertools.count(1):
            save_step(checkpoints, step, rank, WORLD_SIZE)


def _worlds_killed_any_time(store, rank, world_size, folder):
    chance = random.Random(26)
    for run in range(6):
        root = Path(folder) / str(run)
        children = [_fork(partial(_saves_on, root, each)) for each in range(WORLD_SIZE)]
        while not Checkpoints(root).steps():
            time.sleep(0.001)
        time.sleep(chance.random() / 50)
        for child in children:
            os.kill(child, signal.SIGKILL)
        assert [_ending(child) for child in children] == [-signal.SIGKILL] * WORLD_SIZE
        checkpoints = Checkpoints(root)
        steps = checkpoints.steps()
        assert steps
        for step in steps:
            assert_step(checkpoints.reader(step), step, WORLD_SIZE)
        save_step(checkpoints, steps[-1] + 1)
        assert checkpoints.incomplete() == []


def test_a_world_killed_at_any_time_leaves_whole_checkpoints(tmp_path):
    run_ranks(_worlds_killed_any_time, 1, str(tmp_path), timeout_s=TIMEOUT_S)


def _disk_full(folder, rank, world_size):
    with group_communicator(rank, world_size) as comm:
        checkpoints = Checkpoints(folder, ranks=ModelRanks(comm))
        save_step(checkpoints, 1, rank, world_size)
        elems = 1 << 16
        mine = {"x": FlatShard(2 * elems, rank * elems, torch.ones(elems))}
        usual = resource.getrlimit(resource.RLIMIT_FSIZE)
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 17, usual[1]))
        with pytest.raises(CheckpointError, match=r"rank 1 of 2.*File too large") as raised:
            checkpoints.save(2, mine)
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
        assert raised.value.repeats == (rank == 0)
        assert checkpoints.steps() == [1]
        comm.barrier()
        checkpoints.save(3, mine)


def test_a_file_that_cannot_grow_is_told_to_all_ranks(two_ranks, tmp_path):
    two_ranks.run(partial(_disk_full, str(tmp_path)))
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.steps() == [1, 3] and checkpoints.incomplete() == []
    assert_step(checkpoints.reader(1), 1, WORLD_SIZE)
    out = torch.zeros(1 << 17)
    checkpoints.reader(3).read("x", 0, out)
    assert torch.equal(out, torch.ones(1 << 17))


class Disk:
    """The files that a power cut would leave: contents as last synced, and names in folders."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.folders: dict[str, set[str]] = {}
        self.renamed: list[tuple[str, str]] = []
        self.removed_before_sync = False
        self._root_synced = True

    def before(self, number, name, args):
        if name == "fsync":
            path = os.readlink(f"/proc/self/fd/{args[0]}")
            if os.path.isdir(path):
                self.folders[path] = set(os.listdir(path))
                self._root_synced |= bool(self.renamed) and path == str(
                    Path(self.renamed[-1][1]).parent
                )
            else:
                self.files[path] = Path(path).read_bytes()
        elif name == "rename":
            source, target = (str(each) for each in args)
            if Path(target).name.startswith(".removed-"):
                self.removed_before_sync |= not self._root_synced
            else:
                self._check_synced(Path(source))
                self.renamed.append((source, target))
                self._root_synced = False

    def _check_synced(self, folder: Path) -> None:
        assert self.folders[str(folder)] == set(os.listdir(folder))
        for name, content in files_below(folder).items():
            assert self.files[str(folder / name)] == content, name


def test_all_is_on_the_disk_before_it_has_a_name_and_before_old_ones_go(tmp_path):
    root = tmp_path / "a" / "b"
    disk = Disk()
    checkpoints = Checkpoints(root, keep=1)
    with interposed(disk.before):
        for step in (1, 2, 3):
            save_step(checkpoints, step)
    assert [Path(target).name for _, target in disk.renamed] == [
        f"step-{step:08d}" for step in (1, 2, 3)
    ]
    assert not disk.removed_before_sync
    # The last checkpoint's name is on the disk, and so are the names of the new folders.
    assert "step-00000003" in disk.folders[str(root)]
    assert "b" in disk.folders[str(root.parent)] and "a" in disk.folders[str(tmp_path)]


def test_a_reader_sees_nothing_of_a_save_that_goes_on(tmp_path):
    """Between any two calls of a save, a reader can load a whole checkpoint."""
    checkpoints = Checkpoints(tmp_path, keep=1)
    save_step(checkpoints, 1)
    seen = []

    def looks(number, name, args):
        latest = checkpoints.latest()
        assert latest is not None
        reader = Reader(checkpoints.folder(latest))
        out = torch.empty(77)
        reader.read("moment", 0, out)
        seen.append(latest)

    with interposed(looks):
        save_step(checkpoints, 2)
    assert seen == sorted(seen) and {*seen} == {1, 2}
