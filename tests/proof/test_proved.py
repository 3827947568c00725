"""What was proved counts for the same sources and tools alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.proof import proved
from tests.support import ROOT


@pytest.fixture
def tree(tmp_path):
    for name in ("kernels/host/comm.h", "tests/proof/races/test_races.py", "CMakeLists.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path


@pytest.mark.parametrize("name", ["kernels/host/comm.h", "tests/proof/races/test_races.py"])
def test_a_changed_source_is_to_be_proved_again(tree, name):
    record = tree / "proved.txt"
    assert not proved.is_proved(record, tree)
    record.write_text(proved.digest(tree))
    assert proved.is_proved(record, tree)
    (tree / name).write_text("changed")
    assert not proved.is_proved(record, tree)


def test_a_new_source_and_another_tool_are_to_be_proved(tree, monkeypatch):
    before = proved.digest(tree)
    monkeypatch.setattr(proved, "_said", lambda command: f"another {command[0]}")
    assert proved.digest(tree) != before
    monkeypatch.undo()
    assert proved.digest(tree) == before
    (tree / "kernels" / "new.h").write_text("")
    assert proved.digest(tree) != before


class Item:
    """A collected test, as far as marks go."""

    def __init__(self, name: str) -> None:
        self.path = ROOT / "tests" / name
        self.marks: list[Any] = []

    def add_marker(self, mark: Any) -> None:
        self.marks.append(mark)


@pytest.mark.parametrize(
    ("source", "has_passed", "skipped"),
    [("TESTPATHS", True, True), ("TESTPATHS", False, False), ("ARGS", True, False)],
)
def test_only_what_has_passed_is_skipped_and_nothing_that_is_asked_for(
    monkeypatch, source, has_passed, skipped
):
    monkeypatch.delenv("RINGCOMM_PROVE", raising=False)
    monkeypatch.setattr(proved, "is_proved", lambda: has_passed)
    races, other = Item("proof/races/test_races.py"), Item("proof/faults/test_schedules.py")
    config: Any = SimpleNamespace(args_source=pytest.Config.ArgsSource[source])
    items: Any = [races, other]
    proved.skip_what_is_proved(config, items)
    assert bool(races.marks) is skipped and not other.marks
