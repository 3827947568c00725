# SPDX-License-Identifier: Apache-2.0
"""The cache of compiled kernels on disk: processes share it and check each entry that they read."""

import fcntl
import multiprocessing
import os
import resource
import signal
import warnings
from pathlib import Path

import pytest

from ringcomm.cuda import build as kernel_cache
from ringcomm.cuda.build import KernelCache, default_folder
from tests.support.fake_compiler import FakeCompiler, builder_for, make_tree

NAME = "move.sm_90a.0123"
CODE = b"machine code" * 100
# Tests start processes that limit the size of files or start at the same time. These run functions
# of this file, and a fork already has its imports.
FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def nothing_said_yet(monkeypatch):
    monkeypatch.setattr(kernel_cache, "_warned", set())


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


class Maker:
    """Creates a cache entry, and counts the calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> bytes:
        self.calls += 1
        return CODE


def get(folder: Path | None) -> int:
    """Gets an entry from the cache; returns how often it was compiled for that, 0 or 1."""
    make = Maker()
    assert KernelCache(folder).get(NAME, make) == CODE
    return make.calls


def test_an_entry_is_made_once(folder):
    assert [get(folder), get(folder)] == [1, 0]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in folder.iterdir())
    assert {path.name for path in folder.iterdir()} == {NAME, f"{NAME}.lock"}


@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: b"",
        lambda entry: entry[:20],
        lambda entry: entry[:-1],
        lambda entry: entry + b"\0",
        lambda entry: entry[:-1] + bytes([entry[-1] ^ 1]),
        lambda entry: b"R" + entry[1:],
        lambda entry: CODE,
    ],
    ids=["empty", "head only", "truncated", "longer", "a bit", "another version", "bare"],
)
def test_a_damaged_entry_is_made_anew(folder, damage):
    get(folder)
    (folder / NAME).write_bytes(damage((folder / NAME).read_bytes()))
    assert [get(folder), get(folder)] == [1, 0]


def test_an_entry_under_another_name_is_made_anew(folder):
    KernelCache(folder).get("move.sm_80.4567", lambda: b"for another GPU")
    os.replace(folder / "move.sm_80.4567", folder / NAME)
    assert [get(folder), get(folder)] == [1, 0]


def test_an_entry_that_is_no_file_is_made_anew(folder):
    folder.mkdir(mode=0o700)
    os.mkfifo(folder / NAME, 0o600)
    assert [get(folder), get(folder)] == [1, 0]


def test_an_entry_that_is_a_link_is_made_anew(folder):
    get(folder)
    os.rename(folder / NAME, folder / "elsewhere")
    (folder / NAME).symlink_to("elsewhere")
    assert [get(folder), get(folder)] == [1, 0]


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_may_write_to_is_not_used(folder, mode):
    get(folder)
    folder.chmod(mode)
    with pytest.warns(RuntimeWarning, match=r"others may write to it \(mode 7.*RINGCOMM_CACHE_DIR"):
        assert get(folder) == 1
    folder.chmod(0o755)
    assert get(folder) == 0


def test_an_entry_that_others_may_write_to_is_made_anew(folder):
    get(folder)
    (folder / NAME).chmod(0o666)
    assert [get(folder), get(folder)] == [1, 0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_not_used(folder):
    get(folder)
    os.chown(folder, 12345, -1)
    with pytest.warns(RuntimeWarning, match="belongs to user 12345, and this process runs as 0"):
        assert get(folder) == 1


@pytest.mark.parametrize(
    ("owner", "reason"),
    [(1001, ""), (0, ""), (1000, "it belongs to user 1000, and this process runs as 1001")],
)
def test_whose_folders_are_trusted(monkeypatch, owner, reason):
    """Folders of this user and of root are trusted: an image may contain compiled kernels."""
    monkeypatch.setattr(os, "geteuid", lambda: 1001)
    status = os.stat_result((0o40700, 0, 0, 0, owner, 0, 0, 0, 0, 0))
    assert kernel_cache._why_not_trusted(status) == reason


def test_a_place_where_no_folder_can_be_does_no_harm(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(RuntimeWarning, match="is not used: .*Not a directory") as said:
        assert [get(tmp_path / "file" / "cache") for _ in range(3)] == [1, 1, 1]
    assert len(said) == 1


def test_no_home_does_no_harm():
    with pytest.warns(RuntimeWarning, match="no home directory"):
        assert get(None) == 1
    assert KernelCache(None).why_unusable() == "this user has no home directory"


def test_a_folder_that_cannot_be_written_to_is_still_read(folder):
    get(folder)
    # As in a read-only image, no lock file can be created.
    (folder / f"{NAME}.lock").unlink()
    (folder / f"{NAME}.lock").mkdir()
    assert get(folder) == 0
    (folder / NAME).write_bytes(b"damaged")
    with pytest.warns(RuntimeWarning, match="cannot write to the cache"):
        assert get(folder) == 1


def get_with_little_room(folder: Path, answers) -> None:
    # The kernel lets no file grow beyond this limit, as if the disk were full.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        answers.send((get(folder), [str(warning.message) for warning in said]))


def test_a_full_disk_does_no_harm(folder):
    mine, theirs = FORK.Pipe()
    process = FORK.Process(target=get_with_little_room, args=(folder, theirs))
    process.start()
    calls, said = mine.recv()
    process.join()
    assert calls == 1
    assert len(said) == 1
    assert "cannot write to the cache" in said[0]
    assert {path.name for path in folder.iterdir()} == {f"{NAME}.lock"}
    assert get(folder) == 1


def load_in_a_process(root: Path, log: Path, folder: Path, start, answers) -> None:
    compiler = FakeCompiler(log, takes_s=0.5)
    start.wait()
    answers.put(builder_for(root, compiler, folder).load("move", (9, 0)))


def test_processes_that_begin_at_once_compile_once(tmp_path, folder):
    root, log = make_tree(tmp_path / "tree"), tmp_path / "log"
    start, answers = FORK.Barrier(4), FORK.Queue()
    processes = [
        FORK.Process(target=load_in_a_process, args=(root, log, folder, start, answers))
        for _ in range(4)
    ]
    for process in processes:
        process.start()
    codes = {answers.get() for _ in processes}
    for process in processes:
        process.join()
    assert len(codes) == 1
    assert len(FakeCompiler(log).compilations()) == 1


def test_a_process_that_stopped_in_its_compilation_is_not_waited_for_forever(folder):
    folder.mkdir(mode=0o700)
    with open(folder / f"{NAME}.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        make = Maker()
        assert KernelCache(folder, lock_timeout_s=0.2).get(NAME, make) == CODE
    assert make.calls == 1
    assert get(folder) == 0


def test_what_another_process_made_meanwhile_is_taken(folder):
    """The other process wrote the entry between this process's first look and its lock."""
    get(folder)
    os.rename(folder / NAME, folder / "kept")

    class Late(KernelCache):
        def _lock(self, descriptor, name):
            os.rename(folder / "kept", folder / NAME)
            return super()._lock(descriptor, name)

    make = Maker()
    assert Late(folder).get(NAME, make) == CODE
    assert make.calls == 0


def test_an_error_frees_the_lock(folder):
    def fail() -> bytes:
        raise OSError("of the compiler")

    for _ in range(2):
        with pytest.raises(OSError, match="of the compiler"):
            KernelCache(folder, lock_timeout_s=60).get(NAME, fail)
    assert get(folder) == 1


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"RINGCOMM_CACHE_DIR": "/a/b", "XDG_CACHE_HOME": "/x"}, "/a/b"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/ringcomm"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/me/.cache/ringcomm"),
        ({"RINGCOMM_CACHE_DIR": ""}, "/home/me/.cache/ringcomm"),
    ],
)
def test_the_folder_is_chosen_by_the_environment(monkeypatch, variables, expected):
    monkeypatch.setenv("HOME", "/home/me")
    for name in ("RINGCOMM_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert default_folder() == Path(expected)
