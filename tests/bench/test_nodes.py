"""Collectives over nodes that ranks of this machine stand for, and sums in codes."""

from ringcomm.bench.report import read
from tests.bench.programs import run_program

CODED = "ringcomm:int8"


def test_two_ranks_stand_for_two_nodes(tmp_path):
    names = ("all_gather", "all_reduce", "reduce_scatter")
    how = ("--nodes", "2", "--tensors", "heap", "--placement", "usual", "--peers", f"gloo,{CODED}")
    pace = ("-b", "16K", "-e", "16K", "-n", "2", "-w", "0", "--batch", "1")
    path = tmp_path / "r.json"
    done = run_program("ringcomm.bench", *names, *how, *pace, "--json", str(path))
    assert done.returncode == 0, done.stderr
    rows = read(path).rows
    assert {(row.nodes, row.ranks, row.size_bytes) for row in rows} == {(2, 2, 16384)}
    found = [(row.collective, row.system, row.wrong, row.time_us is None) for row in rows]
    assert found == [
        (name, system, None if system == CODED else 0, (name, system) == ("all_gather", CODED))
        for name in names
        for system in ("ringcomm", "gloo", CODED)
    ]


def test_nodes_have_as_many_ranks_as_each_other():
    done = run_program("ringcomm.bench", "--nodes", "2", "--ranks", "3", "--peers", "gloo")
    assert done.returncode == 2 and "as many ranks as each other" in done.stderr
