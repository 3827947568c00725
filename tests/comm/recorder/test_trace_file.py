# SPDX-License-Identifier: Apache-2.0
"""The trace file of a fault: one for all ranks, for this user only, and never in the way."""

import os
import signal
import stat
import threading
from pathlib import Path

import pytest
import torch

import ringcomm
from ringcomm import AbortedError, MismatchError, RingcommError
from ringcomm.comm.recorder import reader
from ringcomm.comm.recorder.records import Recording
from tests.support.ranks import Ranks

T = torch.ones


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder to which faults of this test write their traces."""
    monkeypatch.setenv(reader.VARIABLE, str(tmp_path / "traces"))
    return tmp_path / "traces"


def mismatch(world=2):
    """Provokes a fault; returns each rank's error text."""
    told = []

    def body(comm):
        with pytest.raises(MismatchError) as raised:
            comm.all_reduce(T(8 + comm.rank))
        told.append(str(raised.value))

    each = ringcomm.local_world(world, timeout=30)
    each.run(body)
    each.close()
    return told


def test_a_fault_leaves_one_trace_that_all_ranks_name(folder):
    told = mismatch(3)
    (path,) = folder.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert all(text.endswith(f"What each rank did last: ringcomm trace {path}") for text in told)
    trace = reader.read(path)
    assert [each.rank for each in trace.recording.ranks] == [0, 1, 2]
    sizes = {each.last.size_bytes for each in trace.recording.ranks if each.last}
    assert len(sizes) >= 2 and sizes <= {32, 36, 40}
    assert "the ranks made different calls" in trace.error and trace.written_by in range(3)
    mismatch()
    assert len(list(folder.iterdir())) == 2


def test_off_leaves_none(folder, monkeypatch):
    monkeypatch.setenv(reader.VARIABLE, "off")
    assert all(text.endswith("build a new one") for text in mismatch())
    assert not folder.exists() and reader.directory() is None


def test_the_default_folder_is_this_users_alone(tmp_path, monkeypatch):
    monkeypatch.delenv(reader.VARIABLE)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = tmp_path / f"ringcomm-{os.geteuid()}"
    assert reader.directory() == folder and not folder.exists()
    mismatch()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    next(folder.iterdir()).unlink()
    folder.chmod(0o755)
    told = mismatch()
    assert all("No trace was written: RingcommError: traces: expected" in text for text in told)
    assert not list(folder.iterdir())
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RingcommError, match="mode 0700"):
        reader.directory()


def test_a_trace_that_cannot_be_written_does_not_mask_the_fault(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(reader.VARIABLE, str(tmp_path / "file"))
    for text in mismatch():
        assert "the ranks made different calls" in text
        assert "No trace was written: FileExistsError" in text or "NotADirectory" in text, text


def test_a_file_system_that_hangs_does_not_hold_up_the_fault(folder, monkeypatch):
    released = threading.Event()
    monkeypatch.setattr(reader, "LIMIT_S", 0.05)
    monkeypatch.setattr(reader, "directory", lambda: released.wait(60) and None)
    told = mismatch()
    released.set()
    assert all("Its trace was not written within 0.05 s" in text for text in told)


def test_the_oldest_traces_are_removed(folder):
    folder.mkdir(mode=0o700)
    names = [f"ringcomm-old-{index:016x}.json" for index in range(reader.KEPT_TRACES + 3)]
    for index, name in enumerate([*names, "mine.json"]):
        (folder / name).write_text("")
        os.utime(folder / name, (index, index))
    mismatch()
    left = {path.name for path in folder.iterdir()}
    assert left >= {"mine.json", *names[4:]} and not left & set(names[:4])
    assert len(left) == reader.KEPT_TRACES + 1


def recorded(world_id):
    return Recording("world", 1, world_id, 1, ())


def test_only_files_of_this_user_are_removed(folder, monkeypatch):
    for world_id in range(reader.KEPT_TRACES + 2):
        reader.leave(recorded(world_id), 0, "")
    monkeypatch.setattr(os, "geteuid", lambda: 1 << 30)
    reader.prune()
    assert len(list(folder.iterdir())) == reader.KEPT_TRACES + 2


def test_what_cannot_be_removed_is_no_reason_against_the_trace(folder, monkeypatch):
    """A file that disappears before it is read, and a file that may not be removed."""
    folder.mkdir()
    names = [f"ringcomm-old-{index:016x}.json" for index in range(reader.KEPT_TRACES + 2)]
    for index, name in enumerate(names):
        (folder / name).write_text("old")
        os.utime(folder / name, (index, index))
    lstat, unlink = Path.lstat, Path.unlink

    def looks(path):
        if path.name == names[-1]:
            raise FileNotFoundError(path)
        return lstat(path)

    def removes(path, missing_ok=False):
        if path.name == names[0]:
            raise PermissionError(path)
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "lstat", looks)
    monkeypatch.setattr(Path, "unlink", removes)
    assert all("What each rank did last: ringcomm trace" in text for text in mismatch())
    left = {each.name for each in folder.iterdir()}
    assert names[0] in left and names[1] not in left


def test_others_may_remove_traces_at_any_time(folder):
    stop = threading.Event()

    def remove():
        while not stop.is_set():
            for path in folder.glob("*-ffff*.json"):
                path.unlink(missing_ok=True)

    remover = threading.Thread(target=remove)
    remover.start()
    try:
        for number in range(200):
            told = reader.leave(recorded(0xFFFF << 48 | number), 0, "")
            assert "What each rank did last" in told
            reader.prune()
    finally:
        stop.set()
        remover.join()


@pytest.mark.parametrize("has_links", [True, False])
def test_a_trace_has_its_name_once_it_is_complete(folder, monkeypatch, has_links):
    link, seen = os.link, []

    def links(source, target):
        assert not Path(target).exists()
        seen.append(reader.read(Path(source)).error)
        if not has_links:
            raise PermissionError(1, "Operation not permitted")
        link(source, target)

    monkeypatch.setattr(os, "link", links)
    assert "What each rank did last" in reader.leave(recorded(1), 0, "the first")
    assert "What each rank did last" in reader.leave(recorded(1), 0, "the second")
    (path,) = folder.iterdir()
    assert seen == [reader.read(path).error] == ["the first"]


def test_what_a_killed_writer_left_is_removed_later(folder):
    folder.mkdir()
    old, fresh = (folder / f"ringcomm-world-1-{name}.part" for name in ("old", "fresh"))
    for path in (old, fresh):
        path.write_text("{")
    os.utime(old, (1, 1))
    reader.prune()
    assert list(folder.iterdir()) == [fresh]


def test_the_newest_is_looked_up_without_a_trace_of_it(folder, monkeypatch):
    """The lookup makes no folder, and ignores a file that is still being written."""
    with pytest.raises(RingcommError, match="got none"):
        reader.newest()
    assert not folder.exists()
    reader.leave(recorded(1), 0, "")
    (path,) = folder.iterdir()
    path.with_name("ringcomm-begun-0000000000000002.json").touch()
    assert reader.newest() == path
    monkeypatch.setenv(reader.VARIABLE, str(path))
    with pytest.raises(RingcommError, match="cannot look into"):
        reader.newest()


def test_a_second_interrupt_leaves_the_communicator_unusable(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(reader.FlightRecorder, "explained", interrupted)

    def body(comm):
        with pytest.raises(KeyboardInterrupt):
            comm.all_reduce(T(8 + comm.rank))
        with pytest.raises(AbortedError, match="unusable since an earlier fault"):
            comm.barrier()

    with ringcomm.local_world(2, timeout=30) as each:
        each.run(body)


def _interrupted(store, rank, world, folder):
    os.environ[reader.VARIABLE] = folder
    comm = ringcomm.Communicator.from_store(store, rank, world, timeout=60.0)
    comm.barrier()
    comm.timeout = 1.0
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    with pytest.raises(ringcomm.CollectiveTimeout):
        comm.all_reduce(T(8))


def test_a_survivor_leaves_the_trace_of_a_stopped_rank(tmp_path):
    with Ranks(_interrupted, 2, str(tmp_path)) as ranks:
        assert ranks.wait(ranks=[0])[0].ok
    trace = reader.read(next(Path(tmp_path).iterdir()))
    first, second = trace.recording.ranks
    assert (first.last.status, first.last.peer) == ("timeout", 1)
    assert (second.last.collective, second.last.state) == ("barrier", "done")
