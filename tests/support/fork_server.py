# SPDX-License-Identifier: Apache-2.0
"""Python programs that start in milliseconds: forks of a process that has imported torch.

Importing torch takes seconds, and the tests start hundreds of programs that do. :class:`Popen` is
that of ``subprocess``; but a program of this Python it has made by a server, which is a process
that has imported torch, has no threads, and forks. The fork becomes a child of whoever asked, takes
the arguments, folder, environment and files, and runs the program as ``python`` would. What that
starts itself with ``subprocess`` is forked in the same way, by a server of its own.

A real interpreter starts where a program could tell the difference: with options of Python, with
another environment that Python or torch reads when it starts, with other paths to find modules in,
or after a function that has no name to be found by. A :class:`Popen` in other namespaces is always
a fork, which may become an interpreter or any other command. What remains: ``/proc`` shows the
command line and environment of the server, and all forks hash strings alike. Tests for which that
matters use ``subprocess`` itself.
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

# Variables that are read when Python or a library is loaded begin with one of these.
READ_AT_START = (
    *("GLIBC_", "GOMP_", "KMP_", "LD_", "MALLOC_", "PYTHON", "PYTORCH_"),
    *("TORCHDYNAMO_", "TORCHINDUCTOR_", "TORCH_COMPILE", "TORCH_CPP", "TORCH_DEVICE", "TORCH_LOGS"),
)
# But not these: a fork can follow the first two, and torch's compiler, when it is imported, sets
# the third to its default, so that processes would differ by it that do not differ.
NOT_READ_AT_START = ("PYTHONPATH", "PYTHONUNBUFFERED", "TORCHINDUCTOR_CACHE_DIR")
THREADS = "OMP_NUM_THREADS"  # set for every test; torch can still be told when it is loaded
MAX_FILES = 64
_LENGTH = struct.Struct("<I")
_PID = struct.Struct("<i")
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_CANNOT_EXECUTE = 127  # as a shell says it

_RealPopen = subprocess.Popen
_EXECUTE: Any = inspect.signature(_RealPopen._execute_child)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Namespaces:
    """The namespaces that a program starts in: those of a process, or new ones.

    ``kinds`` are the kernel's flags CLONE_NEW*, ``of`` is the process, or 0 for new ones.
    """

    kinds: int
    of: int = 0

    def enter(self) -> None:
        """Enters them; of a process namespace only the children of this process are members."""
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
    """A program to start; ``files`` are the numbers that the files sent beside it shall have.

    ``executes`` says that it is not run in the fork, which becomes the command instead; ``before``
    is a pickled function that is called in the child first.
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
        """The words after Python and the one option that a fork can follow."""
        return self.command[2 if self.command[1] == "-u" else 1 :]

    def prepare(self) -> None:
        """Calls in the child what whoever asked wants to be called there."""
        if self.before is not None:
            pickle.loads(self.before)()


def _send(connection: socket.socket, message: object, files: Sequence[int] = ()) -> None:
    raw = pickle.dumps(message)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
    connection.sendmsg([_LENGTH.pack(len(raw))], rights)
    connection.sendall(raw)


def _receive(connection: socket.socket) -> tuple[Any, list[int]]:
    """A message and the files beside it; raises EOFError where the other end is closed."""
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


# ---- whoever asks -------------------------------------------------------------------------------


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Inside, a descendant that loses its parent becomes a child of this process."""
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
    """The server of this process, which ends with it."""

    def __init__(self, connection: socket.socket, environment: Mapping[str, str]) -> None:
        self.owner = os.getpid()
        self._connection = connection
        self._read_at_start = _read_at_start(environment)
        self._lock = threading.Lock()

    @property
    def is_ours(self) -> bool:
        """Tells whether this process can ask it; a fork cannot ask the one that it inherits."""
        return self.owner == os.getpid() and self._connection.fileno() != -1

    def serves(self, order: Order) -> bool:
        """Tells whether the program could not tell a fork from an interpreter of its own."""
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
        """The id of a new process, a child of this one."""
        with self._lock, _adopting():
            try:
                _send(self._connection, order, files)
                answer, _ = _receive(self._connection)
            except BaseException:  # a timeout of a test's, too: the answer would be the next one's
                self.close()
                raise
        if isinstance(answer, OSError):
            raise answer
        return int(answer)

    def close(self) -> None:
        """Ends it; who asks for a server then gets another."""
        self._connection.close()


# Modules that a server imports before it forks: for all tests, and for jobs on devices.
PRELOADED = "tests.support.preloaded"
PRELOADED_FOR_DEVICES = "tests.support.preloaded_for_devices"
_servers: dict[str, Server] = {}  # by what they have imported
_starting = threading.Lock()


def server(preloaded: str = PRELOADED) -> Server:
    """Returns a server of this process that has imported a module, and starts it if need be."""
    with _starting:
        known = _servers.get(preloaded)
        if known is None or not known.is_ours:
            ours, theirs = socket.socketpair()
            environment = {**os.environ, "PYTHONPATH": str(ROOT), THREADS: "1"}
            environment.pop("PYTHONUNBUFFERED", None)  # each fork does what its own says
            with theirs:
                _RealPopen(
                    [sys.executable, "-m", __name__, str(theirs.fileno()), preloaded],
                    cwd=ROOT,
                    env=environment,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                ).returncode = 0  # nobody waits for it: it ends when this process does
            known = _servers[preloaded] = Server(ours, environment)
            atexit.register(known.close)
        return known


class Popen(_RealPopen):
    """``subprocess.Popen``, of a fork wherever a program could not tell.

    A subclass that sets ``namespaces`` starts any command there. It is a direct child of this
    process even so, with an id, a status and signals as ever.
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
    """Tells whether nothing is asked for that only ``subprocess`` can do."""
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
    """A function of a module, pickled; None for everything else, which a fork cannot find."""
    if not inspect.isfunction(function) or function.__module__ == "__main__":
        return None
    try:
        return pickle.dumps(function)
    except (pickle.PicklingError, AttributeError):  # it is inside another one
        return None


def _is_python(order: Order) -> bool:
    """Tells whether it is a program of this interpreter."""
    return len(order.command) > 2 and order.command[0] == sys.executable


def run(
    command: Sequence[object],
    timeout_s: float | None = None,
    anew: bool = False,
    kind: type[Popen] = Popen,
    **how: Any,
) -> subprocess.CompletedProcess[str]:
    """``subprocess.run`` of a fork, or of an interpreter ``anew``; the output comes as text."""
    popen = _RealPopen if anew else kind
    words = [str(word) for word in command]
    pipe = subprocess.PIPE
    with popen(words, stdout=pipe, stderr=pipe, text=True, **how) as process:
        try:
            output, errors = process.communicate(timeout=timeout_s)
        finally:
            process.kill()
    return subprocess.CompletedProcess(words, process.returncode, output, errors)


# Two threads that patched the function at once would put each other's back, for ever.
_patching = threading.Lock()
_spawn = multiprocessing.util.spawnv_passfds


def start_multiprocessing(server: ForkServer) -> None:
    """Starts a fork server of ``multiprocessing``, unless it runs, as a fork that has torch."""
    multiprocessing.resource_tracker.ensure_running()  # by itself: with signals blocked
    with _patching, mock.patch.object(multiprocessing.util, "spawnv_passfds", _start_forkserver):
        server.ensure_running()


def _start_forkserver(path: bytes, words: Sequence[str], files: Sequence[int]) -> int:
    if "multiprocessing.forkserver" not in words[-1]:
        # Another thread starts a process otherwise meanwhile.
        pid: int = _spawn(path, words, files)
        return pid
    # Each of its forks that starts a program would need a server of its own for it.
    usual = f"import subprocess; from {__name__} import _RealPopen; subprocess.Popen = _RealPopen"
    process = Popen([sys.executable, "-c", f"{usual}; {words[-1]}"], cwd=ROOT, pass_fds=files)
    process.returncode = 0  # multiprocessing waits for it
    return process.pid


# ---- the server ---------------------------------------------------------------------------------

_interrupt: Any = None  # what an interpreter makes of the signal


def _fork_for_the_owner(namespaces: Namespaces | None) -> int:
    """A fork whose parent is, from its first step on, what :func:`_adopting` made; 0 inside it.

    The process between enters the namespaces: its own process namespace, and so the one that its
    child's parent is looked for in, stays what it was.

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
    """Starts what is ordered until nobody can order any more; returns in each fork only."""
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
    """Gives open files the numbers that a program finds them by."""
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
    """Makes this process, a fork, what a new interpreter would be before it runs the program."""
    if order.new_session:
        os.setsid()
    os.chdir(order.folder)
    signal.signal(signal.SIGINT, _interrupt)
    what, *words = order.words
    first = {"-m": order.folder, "-c": ""}.get(what, os.path.dirname(os.path.abspath(what)))
    paths = order.environment.get("PYTHONPATH", "").split(os.pathsep)
    # The server itself has its folder there first, and then the one path of its PYTHONPATH.
    sys.path[:2] = [first, *(path for path in paths if path)]
    sys.argv[:] = ["-c", *words[1:]] if what == "-c" else words if what == "-m" else [what, *words]
    sys.orig_argv[:] = order.command
    sys.modules["__main__"] = ModuleType("__main__")
    order.prepare()


def _execute(order: Order) -> NoReturn:
    """Makes this process, a fork, the command itself."""
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
    import torch  # by the server only: who asks for a program may have no use for it

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
    """Runs the program to its end, and says what it raised as Python would."""
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
    """Ends this process as ``multiprocessing`` ends those that it forks.

    To take the interpreter apart would take as long as to start one, since nothing of it would be
    shared any more.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def main() -> None:
    global _interrupt
    _interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for programs, of its group
    subprocess.Popen = Popen  # type: ignore[misc]  # before others take it by its name
    gc.disable()  # what is imported stays: to look at it time and again takes a fifth of the time
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
