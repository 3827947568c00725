# SPDX-License-Identifier: Apache-2.0
"""Starts Python programs in milliseconds, as forks of a process that has imported torch.

Importing torch takes seconds, and the tests start hundreds of programs that import it.
:class:`Popen` is a ``subprocess.Popen`` that lets a server start a program of this Python. The
server is a process without threads that has imported torch, and forks. The fork becomes a child of
the caller, takes over the arguments, folder, environment and files, and runs the program as
``python`` would. Programs that it starts with ``subprocess`` are forked in the same way, by a
server of its own.

A new interpreter starts if the program could notice a difference: with options of Python, other
values of variables that Python or torch reads when it starts, other paths of modules, or a
``preexec_fn`` that cannot be pickled. A :class:`Popen` in other namespaces is always a fork, which
may then execute an interpreter or any other command. Two differences remain: ``/proc`` shows the
server's command line and environment, and all forks hash strings with the same seed. Tests that
need these use ``subprocess`` itself.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import inspect
import io
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import pickle
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.forkserver import ForkServer
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn
from unittest import mock

from tests.support import ROOT

# Python and libraries read variables with these prefixes when they are loaded.
READ_AT_START = (
    *("GLIBC_", "GOMP_", "KMP_", "LD_", "MALLOC_", "PYTHON", "PYTORCH_"),
    *("TORCHDYNAMO_", "TORCHINDUCTOR_", "TORCH_COMPILE", "TORCH_CPP", "TORCH_DEVICE", "TORCH_LOGS"),
)
# Exceptions: a fork can follow the first two. torch's compiler sets the third to its default when
# it is imported, so it differs between processes that are otherwise equal.
NOT_READ_AT_START = ("PYTHONPATH", "PYTHONUNBUFFERED", "TORCHINDUCTOR_CACHE_DIR")
THREADS = "OMP_NUM_THREADS"  # set in every test; torch accepts a new value after it is loaded
MAX_FILES = 64
_LENGTH = struct.Struct("<I")
_PID = struct.Struct("<i")
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_CANNOT_EXECUTE = 127  # a shell's status if it cannot execute

_RealPopen = subprocess.Popen
_EXECUTE: Any = inspect.signature(_RealPopen._execute_child)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Namespaces:
    """The namespaces of a program: the namespaces of a process, or new ones.

    ``kinds`` are the kernel's flags CLONE_NEW*; ``of`` is the process, or 0 for new namespaces.
    """

    kinds: int
    of: int = 0

    def enter(self) -> None:
        """Enters them; only later children of this process enter a process namespace."""
        libc = ctypes.CDLL(None, use_errno=True)
        if self.of:
            process = os.pidfd_open(self.of)
            failed = libc.setns(process, self.kinds)
            os.close(process)
        else:
            failed = libc.unshare(self.kinds)
        if failed:
            error = ctypes.get_errno()
            raise OSError(error, f"{self}: {os.strerror(error)}")


@dataclass(frozen=True)
class Order:
    """A program to start; ``files`` are the descriptor numbers for the files sent with the order.

    If ``executes`` is set, the fork executes the command, instead of running a Python program.
    ``before`` is a pickled function that the child calls first.
    """

    command: tuple[str, ...]
    folder: str
    environment: Mapping[str, str]
    files: tuple[int, ...]
    new_session: bool
    namespaces: Namespaces | None = None
    executes: bool = False
    before: bytes | None = None

    @property
    def is_unbuffered(self) -> bool:
        return self.command[1] == "-u" or bool(self.environment.get("PYTHONUNBUFFERED"))

    @property
    def words(self) -> tuple[str, ...]:
        """The words after the interpreter and ``-u``, the only option that a fork can follow."""
        return self.command[2 if self.command[1] == "-u" else 1 :]

    def prepare(self) -> None:
        """Calls the caller's ``preexec_fn`` in the child."""
        if self.before is not None:
            pickle.loads(self.before)()


def _send(connection: socket.socket, message: object, files: Sequence[int] = ()) -> None:
    raw = pickle.dumps(message)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
    connection.sendmsg([_LENGTH.pack(len(raw))], rights)
    connection.sendall(raw)


def _receive(connection: socket.socket) -> tuple[Any, list[int]]:
    """Returns a message and the files sent with it; raises EOFError if the other end is closed."""
    head, files, _, _ = socket.recv_fds(connection, _LENGTH.size, MAX_FILES)
    if len(head) < _LENGTH.size:
        raise EOFError("the other end is closed")
    (left,) = _LENGTH.unpack(head)
    raw = bytearray()
    while len(raw) < left:
        part = connection.recv(left - len(raw))
        if not part:
            raise EOFError("the other end was closed inside a message")
        raw += part
    return pickle.loads(raw), files


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(READ_AT_START) and name not in NOT_READ_AT_START
    }


# ---- the caller ---------------------------------------------------------------------------------


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Inside, descendants that lose their parent become children of this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = ctypes.c_int()
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


class Server:
    """A connection to the server of this process, which ends with the process."""

    def __init__(self, connection: socket.socket, environment: Mapping[str, str]) -> None:
        self.owner = os.getpid()
        self._connection = connection
        self._read_at_start = _read_at_start(environment)
        self._lock = threading.Lock()

    @property
    def is_ours(self) -> bool:
        """True if this process can use the server; a fork cannot use an inherited server."""
        return self.owner == os.getpid() and self._connection.fileno() != -1

    def serves(self, order: Order) -> bool:
        """True if the program cannot distinguish a fork from an interpreter of its own."""
        what = order.words[0]
        words = order.environment.get("PYTHONPATH", "").split(os.pathsep)
        paths = {os.path.abspath(word) for word in words if word}
        is_in_root = Path(order.folder) == ROOT and what in ("-m", "-c")
        return (
            (what in ("-m", "-c") or not what.startswith("-"))
            and (paths == {str(ROOT)} or (not paths and is_in_root))
            and _read_at_start(order.environment) == self._read_at_start
        )

    def start(self, order: Order, files: Sequence[int]) -> int:
        """Starts a process, a child of this process; returns its id."""
        with self._lock, _adopting():
            try:
                _send(self._connection, order, files)
                answer, _ = _receive(self._connection)
            except BaseException:  # also a test's timeout: the next order would read this answer
                self.close()
                raise
        if isinstance(answer, OSError):
            raise answer
        return int(answer)

    def close(self) -> None:
        """Ends the server; the next call of :func:`server` starts another one."""
        self._connection.close()


# The modules that a server imports before it forks: for all tests, and for jobs on devices.
PRELOADED = "tests.support.preloaded"
PRELOADED_FOR_DEVICES = "tests.support.preloaded_for_devices"
_servers: dict[str, Server] = {}  # by the module that they have imported
_starting = threading.Lock()


def server(preloaded: str = PRELOADED) -> Server:
    """Returns this process's server that has imported the module; starts it if needed."""
    with _starting:
        known = _servers.get(preloaded)
        if known is None or not known.is_ours:
            ours, theirs = socket.socketpair()
            environment = {**os.environ, "PYTHONPATH": str(ROOT), THREADS: "1"}
            environment.pop("PYTHONUNBUFFERED", None)  # each fork follows its own environment
            with theirs:
                _RealPopen(
                    [sys.executable, "-m", __name__, str(theirs.fileno()), preloaded],
                    cwd=ROOT,
                    env=environment,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                ).returncode = 0  # never waited for: it ends when this process does
            known = _servers[preloaded] = Server(ours, environment)
            atexit.register(known.close)
        return known


class Popen(_RealPopen):
    """``subprocess.Popen`` that starts a fork if the program cannot notice the difference.

    A subclass that sets ``namespaces`` starts any command in them. The command is nevertheless a
    direct child of this process, with the usual id, status and signals.
    """

    namespaces: Namespaces | None = None
    preloaded = PRELOADED

    def _execute_child(self, *arguments: Any, **named: Any) -> None:
        how = _EXECUTE.bind(self, *arguments, **named).arguments
        if self.namespaces is not None and not _is_forkable(how):
            raise ValueError(f"{how['args']}: a fork in other namespaces cannot do what is asked")
        if not _is_forkable(how) or not self._fork(how):
            super()._execute_child(*arguments, **named)  # type: ignore[misc]

    def _fork(self, how: Mapping[str, Any]) -> bool:
        passed = [int(fd) for fd in how["pass_fds"]]
        environment = os.environ if how["env"] is None else how["env"]
        order = Order(
            tuple(map(os.fsdecode, how["args"])),
            os.path.abspath(os.fsdecode(how["cwd"] or "")),
            {os.fsdecode(name): os.fsdecode(value) for name, value in environment.items()},
            (0, 1, 2, *passed),
            how["start_new_session"],
            self.namespaces,
            before=_by_name(how["preexec_fn"]),
        )
        if not _is_python(order) or not server(self.preloaded).serves(order):
            if self.namespaces is None:
                return False
            order = replace(order, executes=True)
        theirs = [how[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        streams = [number if fd == -1 else fd for number, fd in enumerate(theirs)]
        self.pid = server(self.preloaded).start(order, [*streams, *passed])
        self._child_created = True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(how[name] for name in ends))  # type: ignore[attr-defined]
        return True


class PopenForDevices(Popen):
    """A process forked from a server that has not imported ZeRO or differentiable collectives."""

    preloaded = PRELOADED_FOR_DEVICES


def _is_forkable(how: Mapping[str, Any]) -> bool:
    """True if no argument needs ``subprocess`` itself."""
    unusual = ("executable", "gid", "gids", "uid")
    return (
        isinstance(how["args"], list | tuple)
        and not how["shell"]
        and how["close_fds"]
        and how["umask"] == -1
        and how.get("process_group", -1) in (-1, None)
        and all(how[name] is None for name in unusual)
        and (how["preexec_fn"] is None or _by_name(how["preexec_fn"]) is not None)
    )


def _by_name(function: object) -> bytes | None:
    """Returns a module's function, pickled; None for others, which a fork cannot unpickle."""
    if not inspect.isfunction(function) or function.__module__ == "__main__":
        return None
    try:
        return pickle.dumps(function)
    except (pickle.PicklingError, AttributeError):  # it is defined inside another function
        return None


def _is_python(order: Order) -> bool:
    """True if the command is a program of this Python interpreter."""
    return len(order.command) > 2 and order.command[0] == sys.executable


def run(
    command: Sequence[object],
    timeout_s: float | None = None,
    anew: bool = False,
    kind: type[Popen] = Popen,
    **how: Any,
) -> subprocess.CompletedProcess[str]:
    """``subprocess.run`` with a fork, or a new interpreter (``anew``); the output is text."""
    popen = _RealPopen if anew else kind
    words = [str(word) for word in command]
    pipe = subprocess.PIPE
    with popen(words, stdout=pipe, stderr=pipe, text=True, **how) as process:
        try:
            output, errors = process.communicate(timeout=timeout_s)
        finally:
            process.kill()
    return subprocess.CompletedProcess(words, process.returncode, output, errors)


# If two threads patched the function at the same time, one of the patches would stay for ever.
_patching = threading.Lock()
_spawn = multiprocessing.util.spawnv_passfds


def start_multiprocessing(server: ForkServer) -> None:
    """Starts a fork server of ``multiprocessing``, unless it runs, as a fork that has torch."""
    multiprocessing.resource_tracker.ensure_running()  # unpatched, to inherit blocked signals
    with _patching, mock.patch.object(multiprocessing.util, "spawnv_passfds", _start_forkserver):
        server.ensure_running()


def _start_forkserver(path: bytes, words: Sequence[str], files: Sequence[int]) -> int:
    if "multiprocessing.forkserver" not in words[-1]:
        # Meanwhile another thread starts a process that is not a fork server.
        pid: int = _spawn(path, words, files)
        return pid
    # With the patched Popen, each of its forks that starts a program would need its own server.
    usual = f"import subprocess; from {__name__} import _RealPopen; subprocess.Popen = _RealPopen"
    process = Popen([sys.executable, "-c", f"{usual}; {words[-1]}"], cwd=ROOT, pass_fds=files)
    process.returncode = 0  # multiprocessing waits for it
    return process.pid


# ---- the server ---------------------------------------------------------------------------------

_interrupt: Any = None  # a new interpreter's handler of SIGINT


def _fork_for_the_owner(namespaces: Namespaces | None) -> int:
    """Forks a child of the process inside :func:`_adopting`; returns 0 in the child.

    An intermediate process enters the namespaces and forks the child. The server itself does not
    enter them, so it keeps its own process namespace.

    Raises:
        OSError: the namespaces cannot be entered.
    """
    pids, begins = os.pipe(), os.pipe()
    between = os.fork()
    if between == 0:
        try:
            if namespaces is not None:
                namespaces.enter()
            pid = os.fork()
        except OSError as error:
            os.write(pids[1], _PID.pack(-(error.errno or 1)))
            os._exit(1)
        if pid:
            os.write(pids[1], _PID.pack(pid))
            os._exit(0)
        os.read(begins[0], 1)
    else:
        os.waitpid(between, 0)
        (pid,) = _PID.unpack(os.read(pids[0], _PID.size))
        os.write(begins[1], b"!")
    for fd in (*pids, *begins):
        os.close(fd)
    if pid < 0:
        raise OSError(-pid, f"no process in {namespaces}: {os.strerror(-pid)}")
    return int(pid)


def _serve(connection: socket.socket) -> Order:
    """Starts the ordered programs until the connection closes; returns only in the forks."""
    while True:
        try:
            order, files = _receive(connection)
        except (EOFError, OSError):
            os._exit(0)
        answer: int | OSError
        try:
            answer = _fork_for_the_owner(order.namespaces)
        except OSError as error:
            answer = error
        if answer == 0:
            connection.close()
            _set_descriptors(files, order.files)
            return order
        for fd in files:
            os.close(fd)
        _send(connection, answer)


def _set_descriptors(files: Sequence[int], numbers: Sequence[int]) -> None:
    """Gives open files the descriptor numbers that the program expects."""
    beyond = max([*files, *numbers]) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, beyond) for fd in files]
    for fd in files:
        os.close(fd)
    for fd, number in zip(moved, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)


def _own_server(environment: Mapping[str, str], files: Sequence[int]) -> Order | None:
    """Gives this process, which has no threads yet, a server; returns an order in its forks."""
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in files:
            os.dup2(nothing, number)
        return _serve(theirs)
    theirs.close()
    os.environ.clear()
    os.environ.update(environment)
    _servers.clear()
    _servers[PRELOADED] = Server(ours, environment)
    return None


def _become(order: Order) -> None:
    """Gives this fork the state that a new interpreter has before it runs the program."""
    if order.new_session:
        os.setsid()
    os.chdir(order.folder)
    signal.signal(signal.SIGINT, _interrupt)
    what, *words = order.words
    first = {"-m": order.folder, "-c": ""}.get(what, os.path.dirname(os.path.abspath(what)))
    paths = order.environment.get("PYTHONPATH", "").split(os.pathsep)
    # In the server, sys.path begins with its folder, then the single path of its PYTHONPATH.
    sys.path[:2] = [first, *(path for path in paths if path)]
    sys.argv[:] = ["-c", *words[1:]] if what == "-c" else words if what == "-m" else [what, *words]
    sys.orig_argv[:] = order.command
    sys.modules["__main__"] = ModuleType("__main__")
    order.prepare()


def _execute(order: Order) -> NoReturn:
    """Replaces this fork by the command."""
    if order.new_session:
        os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.chdir(order.folder)
        order.prepare()
        os.execvpe(order.command[0], order.command, order.environment)
    except OSError as error:
        os.write(2, f"{order.command[0]}: {error}\n".encode())
        os._exit(_CANNOT_EXECUTE)


def _run(order: Order) -> None:
    """The program."""
    import torch  # in the server only: other users of this module may not need torch

    if order.environment.get(THREADS, "1") != "1":
        torch.set_num_threads(int(order.environment[THREADS]))
    words = order.words
    if order.is_unbuffered:
        for name, number in (("stdout", 1), ("stderr", 2)):
            raw = io.FileIO(number, "w", closefd=False)
            setattr(sys, name, io.TextIOWrapper(raw, write_through=True))
    if words[0] == "-c":
        exec(compile(words[1], "<string>", "exec"), sys.modules["__main__"].__dict__)
    elif words[0] == "-m":
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")


def _status_of(order: Order) -> int:
    """Runs the program to its end, and reports its exceptions as Python would."""
    try:
        _run(order)
    except SystemExit as end:
        if isinstance(end.code, int):
            return end.code & 0xFF
        if end.code is not None:
            print(end.code, file=sys.stderr)
        return int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _end(status: int) -> NoReturn:
    """Ends this process as ``multiprocessing`` ends its forks.

    A regular end of the interpreter would write to all its memory pages, which are then no longer
    shared: that takes as long as starting an interpreter.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def main() -> None:
    global _interrupt
    _interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for programs of its group
    subprocess.Popen = Popen  # type: ignore[misc]  # before others take it by its name
    gc.disable()  # imported objects stay, and scanning them repeatedly takes a fifth of the time
    importlib.import_module(sys.argv[2])
    gc.enable()
    order: Order | None = _serve(socket.socket(fileno=int(sys.argv[1])))
    while order is not None:
        latest = order
        if latest.executes:
            _execute(latest)
        order = _own_server(latest.environment, latest.files)
    _become(latest)
    _end(_status_of(latest))


if __name__ == "__main__":
    from tests.support import fork_server

    fork_server.main()
