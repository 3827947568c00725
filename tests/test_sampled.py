"""The table of sampled tests names tests that there are, and keeps the cases that it says."""

from __future__ import annotations

import ast
from types import SimpleNamespace
from typing import Any

import pytest

from tests import sampled
from tests.support import ROOT


@pytest.mark.parametrize("file", sampled.KEPT)
def test_the_table_names_parametrized_tests(file):
    functions = {
        node.name: node
        for node in ast.walk(ast.parse((ROOT / "tests" / file).read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    for name, kept in sampled.KEPT[file].items():
        assert name in functions
        assert kept >= 1


def test_few_cases_of_a_product_have_every_value():
    every = [{"stage": s, "kind": k, "on": on} for s in range(4) for k in "ab" for on in (0, 1)]
    kept = [every[number] for number in sampled.chosen(every, 4)]
    for name in ("stage", "kind", "on"):
        assert {each[name] for each in kept} == {each[name] for each in every}
    # And those of twice as many have all pairs.
    more = [every[number] for number in sampled.chosen(every, 8)]
    assert len({(each["stage"], each["kind"]) for each in more}) == 8
    assert len({(each["kind"], each["on"]) for each in more}) == 4


def test_cases_of_one_parameter_are_kept_from_the_first_to_the_last():
    every = [{"number": number} for number in range(9)]
    assert sampled.chosen(every, 1) == {0}
    assert sampled.chosen(every, 3) == {0, 4, 8}
    for count in range(1, 10):
        for kept in range(1, count + 3):
            numbers = sampled.chosen(every[:count], kept)
            assert len(numbers) == min(kept, count)
            assert kept == 1 or {0, count - 1} <= numbers


def test_a_case_that_is_skipped_stands_for_no_other():
    def case(number: int, *marks: Any) -> Any:
        named = {mark.name: mark for mark in (each.mark for each in marks)}
        return SimpleNamespace(
            nodeid=f"tests/gpu/test_wires.py::test_the_bits_are_the_hosts[{number}]",
            originalname="test_the_bits_are_the_hosts",
            callspec=SimpleNamespace(params={"number": number}),
            get_closest_marker=named.get,
            iter_markers=lambda name: [mark for mark in named.values() if mark.name == name],
        )

    skipped = [case(n, pytest.mark.skipif(True, reason="not here")) for n in (0, 8)]
    others = [case(n, pytest.mark.skipif(False, reason="never")) for n in range(1, 8)]
    on_a_gpu = case(9, pytest.mark.gpu)
    dropped = sampled.left_out([skipped[0], *others, skipped[1], on_a_gpu], "tests/")
    assert len(others) - len(dropped) == sampled.KEPT["gpu/test_wires.py"][others[0].originalname]
    assert all(each in others for each in dropped)
