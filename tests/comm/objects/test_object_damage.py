# SPDX-License-Identifier: Apache-2.0
"""Messages of objects that no rank has packed, and ranks without room for valid messages."""

import inspect
import json
import sys
from typing import Any

import pytest
import torch

from ringcomm.comm import objects as object_codec
from ringcomm.comm.objects import DEEPEST, MAGIC, pack, unpack
from ringcomm.errors import CorruptedError, RingcommError

LONG = "x" * 10**6


def _unpack(text: str, blob: bytes = b"") -> Any:
    raw = MAGIC + len(text).to_bytes(8, "little") + text.encode() + blob
    return unpack(memoryview(bytearray(raw)), "op", 1)


DAMAGED: tuple[Any, ...] = (
    ["d", "ab"],
    ["d", ["a"]],
    ["d", ["a", 1, 2]],
    ["D", "eval", ["a", 1]],
    ["D"],
    ["s", ["l"]],
    [],
    [1],
    [["l"]],
    [LONG],
    {"a": 1},
    ["c", ["c", 1.0, 1.0], 1.0],
    ["f", "1.0"],
    ["i", LONG],
    ["i", 1.5],
    ["T", "torch.bool", [1], 0, 1],
    ["T", "torch.uint8", "1", 0, 1],
    ["T", "torch.uint8", {}, 0, 1],
    ["T", "torch.uint8", [True], 0, 1],
    ["T", "torch.uint8", [2**63], 0, 1],
    ["T", "torch.uint8", [0, 2**62, 2**62], 0, 0],
    ["T", "torch.uint8", [1] * 65, 0, 1],
    ["T", "torch.uint8", [-1], 0, 1],
    ["T", LONG, [1], 0, 1],
    ["T", ["torch.uint8"], [1], 0, 1],
    ["T", "torch.uint8", [1], 0],
    ["T", "torch.uint8", [1], 0, 2],
    ["G", "torch.uint8", [1], 0, 1],
    ["P", "torch.uint8", [1], 0, 1],
    ["A", "bool", [1], 0, 1],
    ["A", "object", [1], 0, 1],
    ["N", "uint8", [1], 0, 1],
    ["S", -(2**64)],
    ["S", "a"],
    ["y", LONG],
    ["v", LONG, None],
    ["v", "cuda", 2**70],
    ["v", "cuda", -1],
    ["v", "cpu"],
    ["a", 0, -1],
)


@pytest.mark.parametrize("data", DAMAGED, ids=lambda data: str(data)[:40])
def test_damage_is_named_in_few_words(data):
    with pytest.raises(CorruptedError, match=r"^op: the bytes of rank 1 are not") as raised:
        _unpack(json.dumps(data), b"\x07")
    assert len(str(raised.value)) < 700
    assert "C++" not in str(raised.value) and "Exception raised from" not in str(raised.value)


def test_sound_neighbours_of_the_damage_are_read():
    assert _unpack('["d", ["a", "b"]]') == {"a": "b"}
    assert _unpack('["T", "torch.bool", [1], 0, 1]', b"\x01").tolist() == [True]


def test_the_deepest_comes_back_and_the_next_is_refused():
    value: Any = "x"
    for _ in range(DEEPEST + 1):
        value = {"k": value}
    assert _unpack_of(value) == value
    with pytest.raises(CorruptedError, match="nested deeper than 100"):
        _unpack('["l", ' * (DEEPEST + 2) + "1" + "]" * (DEEPEST + 2))
    for text in ("[" * 10**6, '["c", ' * 5000, '["l", "]]]\\"]' + '", ["l"' * 10**4):
        with pytest.raises(CorruptedError):
            _unpack(text)


def _unpack_of(value: Any) -> Any:
    return unpack(memoryview(pack(value, "op")), "op", 1)


def _at_the_end_of_the_stack(call: Any) -> Any:
    """Returns the error of ``call`` with some stack frames left, but fewer than a hundred."""

    def down(levels: int) -> Any:
        return down(levels - 1) if levels else call()

    used = len(inspect.stack(0))
    with pytest.raises(RingcommError) as raised:
        down(sys.getrecursionlimit() - used - 90)
    return raised.value


def test_a_short_stack_is_not_the_senders_fault():
    value: list[Any] = []
    for _ in range(DEEPEST - 1):
        value = [value]
    raw = memoryview(pack(value, "op"))
    for call in (lambda: unpack(raw, "op", 1), lambda: pack(value, "op")):
        error = _at_the_end_of_the_stack(call)
        assert type(error) is RingcommError
        assert "recursion limit" in str(error)


def test_no_memory_is_an_error_of_ringcomm(monkeypatch):
    raw = memoryview(pack(torch.ones(3), "op"))

    def no_memory(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(object_codec, "value_of", no_memory)
    monkeypatch.setattr(object_codec, "leaf_of", no_memory)
    with pytest.raises(RingcommError, match=r"op: this rank has no memory to unpack .* of rank 1"):
        unpack(raw, "op", 1)
    with pytest.raises(RingcommError, match="op: this rank has no memory to pack"):
        pack(torch.ones(3), "op")


def test_the_place_is_not_built_for_what_is_data(monkeypatch):
    """Describing the places of a million integers took ten times as long as pickling them."""

    def shown(value: object) -> str:
        raise AssertionError(value)

    monkeypatch.setattr(object_codec, "shown", shown)
    value = {f"k{i}": [i, {"x": i}] for i in range(1000)}
    assert _unpack_of(value) == value


@pytest.mark.parametrize(
    "entries",
    [
        [[0, 8], [0, 8]],
        [[0, 4], [3, 5]],
        [[4, 4], [0, 4]],
        [[0, 8], [0, 0]],
        [[0, 9]],
        [[1, 7]],
    ],
)
@pytest.mark.parametrize("kind", ["b", "a", "T", "A"])
def test_entries_follow_each_other(kind, entries):
    """Otherwise a message of a megabyte could describe gigabytes."""

    def of(at: int, size: int) -> list[Any]:
        shaped = {"T": ["torch.uint8", [size]], "A": ["uint8", [size]]}.get(kind, [])
        return [kind, *shaped, at, size]

    sound = ["l", of(0, 4), of(4, 0), of(4, 4)]
    assert len(_unpack(json.dumps(sound), bytes(8))) == 3
    with pytest.raises(CorruptedError, match="an entry is past"):
        _unpack(json.dumps(["l", *(of(*each) for each in entries)]), bytes(8))
