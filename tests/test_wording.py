"""What many modules have to say is worded in one place: that a wait has timed out."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ROOT

TIMEOUTS = {"CollectiveTimeout", "TimeoutError"}
# Of a string whose values are written as {}.
TIMED_OUT = re.compile(r"\b(waited|within) \{\} m?s\b|\btimed out\b")
ERRORS = "ringcomm/errors.py"
# These wait for no peer.
NO_PEER = {"ringcomm/comm/recorder/reader.py": "a file system that hangs"}


def names_in(node: ast.AST) -> set[str]:
    """The names and attributes that an expression has anywhere."""
    walked = list(ast.walk(node))
    names = {each.id for each in walked if isinstance(each, ast.Name)}
    return names | {each.attr for each in walked if isinstance(each, ast.Attribute)}


def text_of(node: ast.AST) -> str:
    """A string of the source, with {} for each value in it; "" for anything else."""
    if isinstance(node, ast.JoinedStr):
        parts = node.values
        return "".join(str(p.value) if isinstance(p, ast.Constant) else "{}" for p in parts)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def own_timeouts(source: str) -> Iterator[int]:
    """The lines that make or word the error of a timed-out wait by themselves."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and TIMEOUTS & names_in(node.func):
            worded = any("waited_for" in names_in(each) for each in node.args)
            if not worded:
                yield node.lineno
        if isinstance(node, ast.expr) and TIMED_OUT.search(text_of(node)):
            yield node.lineno


def violations(root: Path) -> list[str]:
    files = [path for top in ("ringcomm", "bench") for path in sorted((root / top).rglob("*.py"))]
    return [
        f"{name}:{line} words a timed-out wait by itself; use timed_out() of ringcomm.errors"
        for path in files
        if (name := str(path.relative_to(root))) not in {ERRORS, *NO_PEER}
        for line in own_timeouts(path.read_text())
    ]


def test_timed_out_waits_have_the_words_of_one_function():
    assert violations(ROOT) == []


def test_there_is_something_to_check():
    for name in (ERRORS, *NO_PEER):
        assert list(own_timeouts((ROOT / name).read_text())), name


@pytest.mark.parametrize(
    "line",
    [
        'raise CollectiveTimeout(f"rank {peer} is late")',
        'raise errors.CollectiveTimeout("late")',
        'raise (PeerLost if ended else CollectiveTimeout)("late")',
        'raise TimeoutError(f"rank {peer} is late")',
        'error = RendezvousError(f"waited {limit_s:g} s for rank {peer}")',
        'error = RendezvousError(f"rank {peer} did not answer " f"within {limit_ms} ms")',
        'why = "the wait for rank 0 timed out"',
    ],
)
def test_words_of_its_own_are_reported(tmp_path, line):
    (tmp_path / "ringcomm").mkdir()
    (tmp_path / "ringcomm" / "late.py").write_text(f"pass\n{line}\n")
    assert [found.partition(" ")[0] for found in violations(tmp_path)] == ["ringcomm/late.py:2"]


@pytest.mark.parametrize(
    "line",
    [
        'raise timed_out("rank 0", 1.0, "rank 1", "Look", kind=CollectiveTimeout)',
        'raise TimeoutError(waited_for(1.0, "keys"))',
        "raise not_done(call, 1.0)",
        "is_late = isinstance(error, CollectiveTimeout)",
        'print(f"took {begin:.1f} s")',
    ],
)
def test_the_words_of_the_one_function_are_not_reported(line):
    assert list(own_timeouts(line)) == []
