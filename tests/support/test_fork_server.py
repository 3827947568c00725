# SPDX-License-Identifier: Apache-2.0
"""A program in a fork sees the same environment as in an interpreter of its own."""

import json
import multiprocessing.forkserver
import multiprocessing.util
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from tests.support import ROOT, fork_server

# Prints what a program can see of the way it was started.
SHOWS = """
import json, os, signal, sys
seen = {
    "arguments": sys.argv, "original": sys.orig_argv, "folder": os.getcwd(), "path": sys.path,
    "name": __name__, "parent": os.getppid(), "session": os.getsid(0) == os.getpid(),
    "variables": sorted(os.environ.items()), "input": sys.stdin.read(),
    "files": sorted(map(int, os.listdir("/proc/self/fd"))),
    "threads": len(os.listdir("/proc/self/task")), "frames": sys._getframe().f_code.co_filename,
    "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "pipe": signal.getsignal(signal.SIGPIPE) == signal.SIG_IGN,
}
print(json.dumps(seen))
print("also here", file=sys.stderr)
sys.exit(int(sys.argv[-1]))
"""
ENDS = {
    "by itself": "print(1)",
    "status": "import sys; sys.exit(7)",
    "words": "import sys; sys.exit('no')",
    "signal": "import os; os.kill(os.getpid(), 9)",
    "atexit": "import atexit; atexit.register(print, 'at the end'); print('before')",
    "thread": "import threading, time; t = threading.Timer(0.1, print, ['late']); t.start()",
    "unflushed": "import sys; sys.stdout.write('no line')",
}
ASKS = f"""
import os, subprocess, sys
from tests.support.fork_server import Popen
assert subprocess.Popen is Popen
show = "import os, sys; print(os.getppid(), 'torch' in sys.modules); sys.exit(3)"
print(os.getpid(), flush=True)
sys.exit(subprocess.run([sys.executable, "-c", show], cwd={str(ROOT)!r}).returncode)
"""
HAS_TORCH = "import sys; print('torch' in sys.modules)"


def environment(**variables):
    return {**os.environ, "PYTHONPATH": str(ROOT), **variables}


def both(command, **how):
    """Runs a command in a fork and in an interpreter of its own."""
    return [fork_server.run(command, anew=anew, **how) for anew in (False, True)]


@pytest.mark.parametrize("kind", ["-c", "-m", "-u", "script"])
@pytest.mark.parametrize("new_session", [False, True])
def test_it_begins_like_an_interpreter(tmp_path, kind, new_session):
    program = tmp_path / "shows_how.py"
    program.write_text(SHOWS)
    words = {"-c": ["-c", SHOWS], "-m": ["-m", "shows_how"], "-u": ["-u", str(program)]}
    command = [sys.executable, *words.get(kind, [str(program)]), "some", "words", "5"]
    seen = []
    (tmp_path / "input").write_text("given")
    for anew in (False, True):
        with (tmp_path / "input").open() as given, (tmp_path / "passed").open("w") as passed:
            done = fork_server.run(
                command,
                anew=anew,
                cwd=tmp_path,
                env=environment(SAID="yes"),
                stdin=given,
                pass_fds=[passed.fileno()],
                start_new_session=new_session,
            )
        assert (done.returncode, done.stderr) == (5, "also here\n")
        seen.append(json.loads(done.stdout))
    # The fork has one more file, the connection to its own server.
    assert set(seen[1].pop("files")) <= set(seen[0].pop("files"))
    assert seen[0] == seen[1]
    assert seen[0]["parent"] == os.getpid() and seen[0]["input"] == "given"


@pytest.mark.parametrize("program", ENDS.values(), ids=ENDS)
def test_it_ends_like_an_interpreter(program):
    command = [sys.executable, "-c", program]
    fork, interpreter = both(command, env=environment())
    assert vars(fork) == vars(interpreter)


def say_so() -> None:
    os.write(1, b"said\n")


def test_a_function_is_called_in_the_fork_before_its_program():
    command = [sys.executable, "-c", HAS_TORCH]
    for each, has in zip(
        both(command, env=environment(), preexec_fn=say_so), (True, False), strict=True
    ):
        assert each.stdout == f"said\n{has}\n"


def test_output_is_unbuffered_where_a_variable_says_so():
    command = [sys.executable, "-c", "import os; print(5); os._exit(0)"]
    for value, output in (("1", "5\n"), ("", "")):
        for each in both(command, env=environment(PYTHONUNBUFFERED=value)):
            assert each.stdout == output
    show = [sys.executable, "-c", HAS_TORCH]
    done = fork_server.run(show, env=environment(PYTHONUNBUFFERED="1"))
    assert done.stdout == "True\n"


def test_an_error_is_shown():
    command = [sys.executable, "-c", "raise ValueError('on purpose')"]
    for each in both(command, env=environment()):
        assert each.returncode == 1 and each.stderr.endswith("ValueError: on purpose\n")


def test_its_programs_are_its_children_and_forks_too():
    done = fork_server.run([sys.executable, "-c", ASKS], env=environment())
    assert done.returncode == 3, done.stderr
    own, parent, has_torch = done.stdout.split()
    assert (parent, has_torch) == (own, "True")


def test_a_killed_fork_is_seen_and_takes_its_server_along():
    wait = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    command = [sys.executable, "-c", wait]
    with fork_server.Popen(command, env=environment(), stdout=subprocess.PIPE) as process:
        assert int(process.stdout.readline()) == process.pid
        process.send_signal(signal.SIGKILL)
        # This would wait for the fork's server if the server had kept the output open.
        assert process.communicate()[0] == b""
    assert process.returncode == -signal.SIGKILL


def test_a_server_that_was_lost_is_replaced():
    command = [sys.executable, "-c", HAS_TORCH]
    lost = fork_server.server()
    lost.close()
    assert fork_server.run(command, env=environment()).stdout == "True\n"
    assert fork_server.server() is not lost


def test_forks_have_torch_and_interpreters_have_not():
    command = [sys.executable, "-c", HAS_TORCH]
    assert [each.stdout for each in both(command, env=environment())] == ["True\n", "False\n"]


@pytest.mark.parametrize(
    ("command", "how"),
    [
        (["-B", "-c", HAS_TORCH], {}),
        (["-c", HAS_TORCH], {"env": {"PYTHONPATH": "/elsewhere"}}),
        (["-c", HAS_TORCH], {"env": {"PYTHONHASHSEED": "5"}}),
        (["-c", HAS_TORCH], {"env": {"LD_BIND_NOW": "1"}}),
        (["-c", HAS_TORCH], {"preexec_fn": os.getpid}),
        (["-c", HAS_TORCH], {"preexec_fn": lambda: None}),
    ],
)
def test_who_could_tell_gets_an_interpreter(command, how):
    chosen = {**how, "env": environment(**how.get("env", {}))}
    done = fork_server.run([sys.executable, *command], **chosen)
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_threads_that_start_multiprocessing_at_once_leave_it_as_it_was():
    """Patching must be exclusive: a second thread would restore the first thread's patch."""
    usual = multiprocessing.util.spawnv_passfds
    inside = threading.Barrier(2)

    def starts():
        # If the lock does not keep the second thread out, the first one meets it here.
        try:
            inside.wait(0.2)
        except threading.BrokenBarrierError:
            inside.reset()
        time.sleep(0.05 * (threading.current_thread().name == "second"))

    server = SimpleNamespace(ensure_running=starts)
    threads = [
        threading.Thread(target=fork_server.start_multiprocessing, args=(server,), name=name)
        for name in ("first", "second")
    ]
    for thread in threads:
        thread.start()
        time.sleep(0.02)
    for thread in threads:
        thread.join()
    assert multiprocessing.util.spawnv_passfds is usual


def _says(pipe):
    pipe.send("spawned")


def test_a_process_that_is_spawned_meanwhile_is_spawned(monkeypatch):
    monkeypatch.setattr(multiprocessing.util, "spawnv_passfds", fork_server._start_forkserver)
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_says, args=(theirs,))
    process.start()
    assert mine.poll(60) and mine.recv() == "spawned"
    process.join()
