# SPDX-License-Identifier: Apache-2.0
"""Covering arrays contain each pair that a case can have, with fewer cases than the product."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.support.covering import Case, covering, covering_array, product_of

AXES = {"a": (0, 1, 2, 3), "b": ("x", "y", "z"), "c": (True, False), "d": (0, 1, 2)}


def pairs_of(cases: list[Case]) -> set[tuple[object, ...]]:
    return {
        (one, case[one], other, case[other])
        for case in cases
        for one, other in combinations(AXES, 2)
    }


def test_each_pair_is_in_a_case():
    cases = covering_array(AXES)
    assert pairs_of(cases) == pairs_of(product_of(AXES))
    assert 12 <= len(cases) <= 15 < len(product_of(AXES)) == 72


def test_each_value_is_in_a_case():
    cases = covering_array(AXES, strength=1)
    assert len(cases) == 4
    for name, values in AXES.items():
        assert {case[name] for case in cases} == set(values)


def test_no_case_is_refused_and_each_pair_of_those_that_are_not_is_there():
    """Some pairs are valid only with one value of a third axis, others with no value of it."""

    def valid(case):
        if case.get("a") == 3 and case.get("b") == "x":
            return False
        if case.get("a") == 2 and case.get("c") is True:
            return False
        return not (case.get("b") == "y" and case.get("c") is False and case.get("d") in (0, 1))

    cases = covering_array(AXES, valid)
    assert all(valid(case) for case in cases)
    assert pairs_of(cases) == pairs_of(product_of(AXES, valid))
    assert ("a", 2, "b", "y") in {pair[:4] for pair in pairs_of(cases)}


def test_arrays_are_the_same_each_time():
    assert covering_array(AXES) == covering_array(AXES)


def test_a_decorator_names_its_cases():
    mark = covering(stage=(1, 2), kind={"first": list, "second": dict}).mark
    names, cases = mark.args
    assert names == ("stage", "kind")
    assert {case.id for case in cases} == {
        f"{stage}-{kind}" for stage, kind in product((1, 2), ("first", "second"))
    }
    assert {case.values for case in cases} == set(product((1, 2), (list, dict)))


def test_values_of_one_name_are_refused():
    with pytest.raises(AssertionError, match="a: two values have one name"):
        covering(a=("1", 1))
