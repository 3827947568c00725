# SPDX-License-Identifier: Apache-2.0
"""Rows in printed tables and in files."""

import json
from typing import Any

import pytest

from ringcomm.bench.report import (
    COLLECTIVE_CELL,
    COLLECTIVE_KEY,
    TIMES,
    Report,
    Row,
    RowTable,
    read,
    size_label,
    write_csv,
    write_json,
)
from tests.support import ROOT

KEY: dict[str, Any] = {"count": 512, "dtype": "float", "op": "sum", "root": -1, "ranks": 2}


def measured(system, placement="out", size_bytes=4096, **changes):
    facts: dict[str, Any] = {
        **KEY,
        "time_us": 12.5,
        "best_us": 11.0,
        "p95_us": 14.0,
        "algbw_gbps": 0.3277,
        "busbw_gbps": 0.1638,
        "wrong": 0,
        "rounds": 20,
        "batch": 200,
        **changes,
    }
    return Row("reduce_scatter", size_bytes, system=system, placement=placement, **facts)


@pytest.fixture
def report():
    rows = [
        measured("ringcomm"),
        measured("gloo", ratio=36.25, ratio_low=30.0, ratio_high=40.5, wrong=3),
        Row("reduce_scatter", 4096, system="mpi", placement="in", note="no, not here: x, y", **KEY),
        measured("ringcomm", size_bytes=1 << 20),
    ]
    return Report({"cpu": "one: of those, with commas", "command": "ringcomm bench -b 4K"}, rows)


@pytest.mark.parametrize(("write", "name"), [(write_json, "r.json"), (write_csv, "r.csv")])
def test_files_read_back_as_they_were(report, tmp_path, write, name):
    write(report, tmp_path / name)
    assert read(tmp_path / name) == report


def test_files_from_before_a_column_read_with_its_default(report, tmp_path):
    path = tmp_path / "r.csv"
    write_csv(report, path)
    assert path.read_text().count(",processes,1,0") == len(report.rows)
    path.write_text(
        path.read_text().replace(",processes,1,0", "").replace(",mode,buffer_sets,graph_calls", "")
    )
    assert read(path) == report


def test_the_results_of_the_project_can_be_read():
    paths = sorted((ROOT / "bench" / "results").glob("*.csv"))
    assert paths and all(read(path).rows for path in paths)


@pytest.mark.parametrize(("write", "name"), [(write_json, "r.json"), (write_csv, "r.csv")])
def test_another_schema_is_refused(report, tmp_path, write, name):
    path = tmp_path / name
    write(report, path)
    text = path.read_text().replace('"schema": 1', '"schema": 7').replace("schema: 1", "schema: 7")
    path.write_text(text)
    with pytest.raises(ValueError, match="schema 7, expected 1"):
        read(path)


def test_the_json_names_its_units(report, tmp_path):
    write_json(report, tmp_path / "r.json")
    row = json.loads((tmp_path / "r.json").read_text())["rows"][1]
    assert row["time_us"] == 12.5 and row["busbw_gbps"] == 0.1638 and row["ratio"] == 36.25


def test_wrong_elements_add_up(report):
    assert report.wrong == 3


def test_the_table_puts_placements_side_by_side():
    rows = [measured("ringcomm"), measured("ringcomm", "in", time_us=9.25), measured("gloo")]
    table = RowTable("# a title", COLLECTIVE_KEY, COLLECTIVE_CELL, ("out", "in"))
    lines = table.lines(rows)
    assert len(lines) == 2
    assert lines[0].split() == [
        *("4096", "512", "ringcomm"),
        *("12.50", "0.33", "0.16", "0", "14.00", "9.25", "0.33", "0.16", "0", "14.00"),
    ]
    assert lines[1].split()[-1] == "n/a"
    head = table.head().splitlines()
    assert head[0] == "# a title"
    assert "out of place" in head[1] and "in place" in head[1]
    assert all(word in head[2] for word in ("size", "count", "system", "algbw", "busbw", "#wrong"))


def test_a_table_of_one_placement_fits_100_columns():
    slowest = measured("ringcomm", "out", 2 << 30, time_us=1234567.89, ratio=1.0, ratio_p95=1.0)
    table = RowTable("", COLLECTIVE_KEY, COLLECTIVE_CELL, ("out",))
    lines = [*table.head().splitlines(), *table.lines([slowest])]
    assert max(map(len, lines)) <= 100


def test_rows_that_come_one_by_one_stand_below_the_head():
    titles = TIMES.head().splitlines()[1]
    for ratio in (36.25, 7.5):
        (line,) = TIMES.lines([measured("ringcomm", ratio=ratio)])
        assert line.index("ringcomm") == titles.index("system")
        assert line.index(f"{ratio:.3f}") + len(f"{ratio:.3f}") == titles.index("ratio") + 5


def test_a_table_of_times_says_what_is_wrong_and_why_there_is_no_time(report):
    lines = TIMES.lines(report.rows)
    assert len(lines) == len(report.rows)
    assert "equal" in lines[0] and "WRONG: 3" in lines[1]
    assert "n/a" in lines[2] and lines[2].endswith("no, not here: x, y")
    assert lines[1].split()[-8:-3] == ["0.013", "0.011", "36.250", "30.000", "40.500"]


def test_size_labels():
    labels = [size_label(size) for size in (512, 4096, 1536, 1 << 20, 256 << 20, 2 << 30)]
    assert labels == ["512 B", "4 KiB", "1.5 KiB", "1 MiB", "256 MiB", "2 GiB"]
