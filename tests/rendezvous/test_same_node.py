# SPDX-License-Identifier: Apache-2.0
"""The rendezvous of a launch's ranks on one machine, and other users' processes at its sockets."""

import multiprocessing
import os
import shutil
import signal
import socket
import stat
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from ringcomm.errors import RendezvousError
from ringcomm.process import Deadline
from ringcomm.rendezvous import same_node
from ringcomm.rendezvous.same_node import LaunchSockets

LONG_S = 30.0
NOBODY = 65534
# Processes become another user or are killed, so they are forks. They run closures of a test, which
# a fork has, but a new interpreter could not be given.
FORK = multiprocessing.get_context("fork")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture(autouse=True)
def folder(monkeypatch):
    """Uses a temporary folder with a short path to which every user may write, like /tmp."""
    shared = Path(tempfile.mkdtemp(dir="/tmp"))
    shared.chmod(0o1777)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(same_node, "gettempdir", lambda: str(shared))
    yield shared / f"ringcomm-{os.geteuid()}"
    shutil.rmtree(shared)


def sockets(job, number=0):
    # Named by the test, since a thread of an earlier test may still hold its sockets.
    test = os.environ["PYTEST_CURRENT_TEST"]
    return LaunchSockets.of(f"{job}-{os.getpid()}-{test}", number, "test on rank 0 of 2")


def serve(at, ranks) -> Any:
    return same_node.serve(at, ranks, LONG_S)


def ask(at):
    return same_node.ask_port(at, Deadline(LONG_S))


def serve_and_ask(at, ranks=2):
    """Returns the ports that the other ranks get, and the port that rank 0 serves."""
    store = serve(at, ranks)
    ports = [ask(at) for _ in range(1, ranks)]
    return ports, store.port


def until_gone(path):
    deadline = time.monotonic() + LONG_S
    while path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_ranks_find_each_other_in_a_folder_of_their_user(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ports, served = serve_and_ask(sockets("a"), 3)
    assert ports == [served] * 2
    status = folder.stat()
    assert (status.st_uid, stat.S_IMODE(status.st_mode)) == (os.geteuid(), 0o700)
    until_gone(folder / sockets("a").name)  # the socket is removed


def test_the_runtime_folder_comes_first(folder, tmp_path, monkeypatch):
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    assert sockets("a").folder == runtime / "ringcomm"
    assert serve_and_ask(sockets("a"))[0]
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "none"))
    assert sockets("a").folder == folder


def test_several_jobs_of_a_user_start_at_the_same_time():
    pairs = [sockets("a"), sockets("b"), sockets("a", 1)]
    assert len({each.name for each in pairs}) == 3
    stores = [serve(each, 2) for each in pairs]
    for each, store in zip(reversed(pairs), reversed(stores), strict=True):
        assert ask(each) == store.port


def _listens(at):
    kept = same_node._listen(at, 2)
    signal.pause()
    assert kept


def killed_rank_0(at):
    process = FORK.Process(target=_listens, args=(at,), daemon=True)
    process.start()
    path = at.folder / at.name
    deadline = time.monotonic() + LONG_S
    while not same_node._holder(str(path)):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return process, path


def test_the_socket_of_a_rank_that_was_killed_is_taken(folder):
    at = sockets("a")
    process, path = killed_rank_0(at)
    with pytest.raises(RendezvousError, match=f"process {process.pid} of user {os.geteuid()}"):
        same_node.serve(at, 2, 1.0)
    process.kill()
    process.join()
    assert path.exists()
    ports, served = serve_and_ask(at)
    assert ports == [served]
    until_gone(path)


def test_old_sockets_of_killed_ranks_are_removed(folder):
    old, young = sockets("old"), sockets("young")
    for at in (old, young):
        process, path = killed_rank_0(at)
        process.kill()
        process.join()
        if at is old:
            os.utime(path, (1, 1))
    serve_and_ask(sockets("next"))
    assert (folder / young.name).exists() and not (folder / old.name).exists()


def test_without_a_common_folder_ranks_find_each_other_and_warn(folder, monkeypatch, tmp_path):
    """As in containers with a common network but separate file systems."""
    mine = sockets("a")
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.setattr(same_node, "gettempdir", lambda: str(other))
    theirs = sockets("a")
    assert mine.folder != theirs.folder and mine.name == theirs.name
    store = serve(mine, 2)
    with pytest.warns(RuntimeWarning, match=f"rank 0 is not in {theirs.folder}"):
        assert ask(theirs) == store.port


def test_ranks_that_come_early_do_not_warn():
    at = sockets("a")
    ports = []

    def come():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ports.append(ask(at))

    threads = [threading.Thread(target=come) for _ in range(3)]
    for each in threads:
        each.start()
    time.sleep(0.05)
    store = serve(at, 4)
    for each in threads:
        each.join()
    assert ports == [store.port] * 3


@pytest.mark.parametrize("mode", [0o755, 0o770])
def test_a_folder_that_is_open_to_others_is_not_used(folder, mode):
    folder.mkdir()
    folder.chmod(mode)
    at = sockets("a")
    assert at.folder is None
    with pytest.warns(RuntimeWarning, match=r"\(mode 0700\), got drwx"):
        store = serve(at, 2)
    with pytest.warns(RuntimeWarning, match=r"\(mode 0700\), got drwx"):
        assert ask(at) == store.port


def test_a_link_in_place_of_the_folder_is_not_followed(folder, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    folder.symlink_to(elsewhere)
    assert sockets("a").folder is None


def _as_nobody(act, ready):
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    kept = act()
    ready.set()
    if kept is not None:
        signal.pause()


class Stranger:
    """A process of another user; runs a function and keeps its result alive."""

    def __init__(self, act):
        ready = FORK.Event()
        self.process = FORK.Process(target=_as_nobody, args=(act, ready), daemon=True)
        self.process.start()
        assert ready.wait(LONG_S)

    def __enter__(self):
        return self.process.pid

    def __exit__(self, *exception):
        self.process.kill()
        self.process.join()


def _takes(address):
    def act():
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(address)
        listener.listen()
        return listener

    return act


@as_root
def test_another_user_at_the_abstract_socket_is_in_nobodys_way(folder):
    at = sockets("a")
    with Stranger(_takes(at.abstract)):
        ports, served = serve_and_ask(at)
    assert ports == [served]


@as_root
def test_another_user_who_holds_both_places_is_named(folder):
    folder.mkdir()
    os.chown(folder, NOBODY, NOBODY)
    at = sockets("a")
    assert at.folder is None and f"of user {NOBODY}" in at.refused
    with Stranger(_takes(at.abstract)) as pid:
        whom = f"process {pid} of user {NOBODY}"
        with (
            pytest.warns(RuntimeWarning, match=f"of user {NOBODY}"),
            pytest.raises(RendezvousError, match=f"{whom} holds it.*MASTER_ADDR"),
        ):
            same_node.serve(at, 2, 1.0)
        with pytest.raises(RendezvousError, match=f"{whom} answered in its place"):
            same_node.ask_port(at, Deadline(0.2))


@as_root
def test_another_users_process_learns_no_port(folder):
    at = sockets("a")
    store = serve(at, 2)
    answers, abstract = FORK.SimpleQueue(), at.abstract

    def act():
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(abstract)
            try:
                stranger.sendall(b"?")
                answers.put(stranger.recv(2))
            except OSError as error:
                answers.put(b"" if isinstance(error, ConnectionError) else str(error))
        with pytest.raises(PermissionError), socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(str(at.folder / at.name))

    with Stranger(act):
        assert answers.get() == b""
    assert ask(at) == store.port
