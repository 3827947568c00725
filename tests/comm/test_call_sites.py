# SPDX-License-Identifier: Apache-2.0
"""The call site is never inside the library, however the library was imported."""

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ringcomm

LIBRARY = Path(ringcomm.__file__).parent


def run(folder: Path, text: str) -> list[str]:
    """Returns the output of a program that finds the modules of ``folder`` first."""
    program = folder / "program.py"
    program.write_text(text)
    paths = os.pathsep.join([str(folder), str(LIBRARY.parent)])
    done = subprocess.run(
        [sys.executable, str(program)],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return done.stdout.split("\n")[:-1]


def test_a_library_that_is_imported_through_a_link(tmp_path):
    (tmp_path / "ringcomm").symlink_to(LIBRARY)
    text = """
import ringcomm
with ringcomm.local_world(1) as world:
    world.run(lambda comm: comm.barrier())
    world.run(lambda comm: print(comm.recording().ranks[0].last.site))
print(ringcomm.__file__)
"""
    site, file = run(tmp_path, text)
    assert file == str(tmp_path / "ringcomm" / "__init__.py")
    assert site == f"{tmp_path / 'program.py'}:4"


def test_a_context_manager_of_the_library_was_entered_by_the_user():
    names: dict[str, Any] = {"contextmanager": contextmanager}
    text = (
        "@contextmanager\ndef entered(comm):\n    comm.barrier()\n    yield\n    comm.barrier()\n"
    )
    exec(compile(text, f"{LIBRARY}/managers.py", "exec"), names)

    def body(comm):
        with names["entered"](comm):
            pass
        return [each.site for each in comm.recording().ranks[0].collectives]

    line = body.__code__.co_firstlineno + 1
    with ringcomm.local_world(1) as world:
        assert world.run(body) == [[f"{__file__}:{line}"] * 2]


def test_so_many_are_kept_and_no_more(tmp_path):
    """Sites recorded before the limit stay known; later sites are unknown."""
    text = """
from ringcomm import _native
def called():
    return _native.call_site()
code = compile("called()", "file", "eval")
def site(name):
    return eval(code.replace(co_filename=name))
first = site("/first.py")
seen = {site(f"/{number}.py") for number in range(1 << 16)}
print(len(seen) <= 1 << 16, 0 in seen, site("/more.py") == 0, site("/first.py") == first != 0)
"""
    assert run(tmp_path, text) == ["True True True True"]
