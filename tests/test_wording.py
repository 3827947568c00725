# SPDX-License-Identifier: Apache-2.0
"""Only one place words timed-out waits, and only one place words differences between ranks."""

import ast
import re
from collections.abc import Container, Iterator
from pathlib import Path

import pytest

from tests.support import ROOT

TIMEOUTS = {"CollectiveTimeout", "TimeoutError"}
# Searches a string in which {} replaces each formatted value.
TIMED_OUT = re.compile(r"\b(waited|within) \{\} m?s\b|\bin \{\} ms\b|\btimed out\b")
ERRORS = "ringcomm/errors.py"
# Timeouts of these are not waits for a peer.
NO_PEER = {"ringcomm/comm/recorder/reader.py": "a file system that hangs"}
# Strings in the words of another library, which programs search for.
QUOTED = {("ringcomm/c10d/process_group.py", " in {} ms"): "monitored_barrier has Gloo's words"}

DIFFERENCES = {ERRORS, "ringcomm/comm/agreement.py"}
# These raise MismatchError themselves, for these reasons.
NO_AGREEMENT = {
    "ringcomm/comm/device/copy_plan.py": "an engine makes it, on which agreement.py is built",
    "ringcomm/comm/device/rendezvous.py": "comes before there is a communicator",
    "ringcomm/comm/host/messages.py": "a message of another size than its receive",
    "ringcomm/comm/nodes/calls.py": "an all_to_all, where two ranks' sizes are each other's",
    "ringcomm/examples/train_gpt.py": "an example has the public names alone",
    "ringcomm/extras/moe/rows.py": "tells that another rank has refused its arguments",
    "ringcomm/functional/checkpoint.py": "a rank compares with what it had itself",
    "ringcomm/memory/device_heap.py": "comes before there is a communicator",
    "ringcomm/rendezvous/handles.py": "comes before there is a communicator",
    "ringcomm/zero/checkpoint/format.py": "ranks that save one tensor, of any size, or data",
}


def names_in(node: ast.AST) -> set[str]:
    """Returns all names and attributes inside an expression."""
    walked = list(ast.walk(node))
    names = {each.id for each in walked if isinstance(each, ast.Name)}
    return names | {each.attr for each in walked if isinstance(each, ast.Attribute)}


def text_of(node: ast.AST) -> str:
    """Returns a string constant with {} for each formatted value; "" for other expressions."""
    if isinstance(node, ast.JoinedStr):
        parts = node.values
        return "".join(str(p.value) if isinstance(p, ast.Constant) else "{}" for p in parts)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def own_timeouts(source: str, quoted: Container[str] = ()) -> Iterator[int]:
    """Yields the lines that make or word the error of a timed-out wait themselves.

    Args:
        source: of a module.
        quoted: strings that it has in another library's words.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and TIMEOUTS & names_in(node.func):
            worded = any("waited_for" in names_in(each) for each in node.args)
            if not worded:
                yield node.lineno
        if isinstance(node, ast.expr):
            text = text_of(node)
            if TIMED_OUT.search(text) and text not in quoted:
                yield node.lineno


def own_mismatches(source: str) -> Iterator[int]:
    """Yields the lines that make the error for differences between ranks themselves."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and "MismatchError" in names_in(node.func):
            yield node.lineno


def violations(root: Path) -> list[str]:
    found = []
    for path in (path for top in ("ringcomm", "bench") for path in (root / top).rglob("*.py")):
        name, source = str(path.relative_to(root)), path.read_text()
        if name not in {ERRORS, *NO_PEER}:
            advice = "words a timed-out wait by itself; use timed_out() of ringcomm.errors"
            quoted = {text for module, text in QUOTED if module == name}
            found += [f"{name}:{line} {advice}" for line in own_timeouts(source, quoted)]
        if name not in {*DIFFERENCES, *NO_AGREEMENT}:
            advice = "words how ranks differ by itself; use ringcomm.comm.agreement"
            found += [f"{name}:{line} {advice}" for line in own_mismatches(source)]
    return sorted(found)


def test_timeouts_and_differences_are_worded_in_one_place():
    assert violations(ROOT) == []


def test_there_is_something_to_check():
    for name in (ERRORS, *NO_PEER, *(module for module, _ in QUOTED)):
        assert list(own_timeouts((ROOT / name).read_text())), name
    for name in (*DIFFERENCES, *NO_AGREEMENT):
        assert list(own_mismatches((ROOT / name).read_text())), name


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
        'why = f"rank {peer} did not come in {limit_ms} ms"',
        'raise MismatchError(f"{rank} has {theirs}")',
        'raise errors.MismatchError(f"{rank} has {theirs}")',
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
        'raise unequal(head, ("step",), rows, other, advice)',
        "is_other = isinstance(error, MismatchError)",
    ],
)
def test_the_words_of_the_one_function_are_not_reported(line):
    assert [*own_timeouts(line), *own_mismatches(line)] == []
