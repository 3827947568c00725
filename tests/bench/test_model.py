# SPDX-License-Identifier: Apache-2.0
"""The roofline predicts the recorded rows that its constants were not fitted on."""

from collections import Counter
from dataclasses import fields, replace
from typing import Any

import pytest

from ringcomm.bench import model
from ringcomm.bench.report import Row

ROWS = model.recorded()
FIT, BETWEEN = map(model.limited_by_device, model.halves(ROWS))

STEP_OF_2, STEP_OF_8 = ("adamw_step", 2, "ringcomm"), ("adamw_step", 8, "ringcomm")


def worst(rows, constants=model.H100):
    return max(abs(replace(each, constants=constants).error) for each in rows)


def far(rows, constants=model.H100):
    """Returns (collective, ranks, system) of rows whose prediction is wrong by over a tenth."""
    found = [each for each in rows if abs(replace(each, constants=constants).error) > 0.1]
    return sorted((each.row.collective, each.row.ranks, each.row.system) for each in found)


def test_rows_between_are_within_a_tenth_except_one():
    assert len(BETWEEN) == 61
    assert far(BETWEEN) == [STEP_OF_2]
    assert worst(BETWEEN) < 0.14


@pytest.mark.parametrize("name", [field.name for field in fields(model.Constants)])
@pytest.mark.parametrize("factor", [0.2, 3.0])
def test_a_wrong_constant_is_seen(name, factor):
    wrong = replace(model.H100, **{name: factor * getattr(model.H100, name)})
    assert len(far(BETWEEN, wrong)) > 1


def test_there_are_eight_constants_and_the_fit_finds_them():
    assert len(fields(model.Constants)) == 8
    found = model.fitted(FIT, step=0.02)
    for field in fields(model.Constants):
        wanted = getattr(model.H100, field.name)
        assert getattr(found, field.name) == pytest.approx(wanted, rel=0.02), field.name


def test_the_form_predicts_the_other_half_too():
    """Only both steps of eight ranks are mispredicted, since no fitted row is such a step."""
    constants = model.Constants(2.967e6, 1.525, 148.0e3, 4.11, 2.94, 0.919, 0.750, 0.815)
    assert model.loss(BETWEEN, constants) < model.loss(BETWEEN, model.H100)
    assert len(FIT) == 56
    assert far(FIT, constants) == [STEP_OF_8, ("adamw_step", 8, "separate kernels")]
    assert worst(FIT, constants) < 0.33


def test_no_row_is_in_both_halves_and_none_is_lost():
    fit, between = model.halves(ROWS)
    assert len(fit) + len(between) == len(ROWS) == 173
    assert not {id(each) for each in fit} & {id(each) for each in between}
    assert between[0] is ROWS[0]
    systems = [each.row.system for each in ROWS]
    for system in set(systems):
        assert [each.row.system for each in fit].count(system) == systems.count(system) // 2
    assert Counter(each.kind for each in ROWS) == {
        model.DEVICE: 117,
        model.HOST: 21,
        model.UNSETTLED: 3,
        model.NOT_MODELLED: 32,
    }


def row(system="ringcomm", collective="reduce_scatter", ranks=2, size=64 << 20, **more):
    how: dict[str, Any] = {
        "op": "sum",
        "root": -1,
        "placement": "out",
        "time_us": 100.0,
        "best_us": 100.0,
    }
    how |= {"count": size // 8, "dtype": "float", **more}
    return Row(collective, size, ranks=ranks, system=system, **how)


def test_what_is_left_aside_is_left_aside_by_rules():
    """The rules use the row and its time with fewer bytes, but not the prediction."""
    assert model.kind_of(row(), 20.0) == model.DEVICE
    assert model.kind_of(row(), 76.0) == model.DEVICE
    assert model.kind_of(row(), 77.0) == model.HOST
    assert model.kind_of(row(best_us=91.0), 20.0) == model.DEVICE
    assert model.kind_of(row(best_us=90.0), 20.0) == model.UNSETTLED
    assert model.kind_of(row("triton:direct"), 20.0) == model.NOT_MODELLED


def test_the_host_is_the_least_time():
    predicted = model.Predicted(row(), model.DEVICE, host_us=1000.0)
    assert predicted.us == 1000.0
    assert predicted.error == 9.0


def test_more_in_flight_is_faster_until_the_memory_limits():
    speeds = [model.bytes_per_us(kib, 2) for kib in (8, 32, 64, 128, 512)]
    assert speeds == sorted(speeds)
    assert speeds[-2:] == [model.H100.memory] * 2
    assert [model.blocks(ranks) for ranks in (1, 2, 4, 8)] == [132, 128, 124, 112]


def test_the_bound_is_a_copy_of_the_bytes_that_must_move():
    """A step moves 24 bytes of state per element, and a gradient and a parameter of each rank."""
    step = row(collective="adamw_step", size=2 << 28, count=1 << 28, dtype="bfloat16")
    assert model.bound_us(step, 3.0e6) == pytest.approx(2863, abs=1)
    eight = replace(step, ranks=8, size_bytes=2 << 27, count=1 << 27)
    assert model.bound_us(eight, 3.0e6) == pytest.approx(2505, abs=1)
    assert model.bound_us(row(size=3 << 20), 1e6) == pytest.approx(9.437, abs=0.01)
    assert model.bound_us(row(collective="broadcast"), 1e6) is None


def test_the_table_names_every_row_and_counts():
    text = model.lines(ROWS)
    assert sum("reduce_scatter" in line for line in text) == 54
    assert any(line.split() == ["predicted", "device", "61", "60", "13.5%"] for line in text)
    assert text[-1] == "not modelled: 32 rows"
