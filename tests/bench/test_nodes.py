"""Collectives over nodes: what is compared, and the rows of a run on nodes of this machine."""

from ringcomm.bench.nodes import EXCHANGE, GLOO, OURS
from ringcomm.bench.report import read
from tests.bench.programs import run_program


def test_two_ranks_stand_for_two_nodes(tmp_path):
    options = ("-r", "2", "--bytes", "16K", "--wires", "int8", "--json", str(tmp_path / "r.json"))
    done = run_program("ringcomm.bench", "nodes", "--gbit-s", "1", *options)
    assert done.returncode == 0, done.stderr
    rows = read(tmp_path / "r.json").rows
    assert {(row.nodes, row.ranks, row.size_bytes, row.rounds) for row in rows} == {
        (2, 2, 16384, 2)
    }
    assert {row.placement for row in rows} == {"1 x 1 Gbit/s"}
    coded = f"{OURS}, wire int8"
    assert [(row.collective, row.system) for row in rows] == [
        ("exchange", EXCHANGE),
        *(("all_gather", each) for each in (OURS, GLOO)),
        *(("all_reduce", each) for each in (OURS, GLOO, coded)),
        *(("reduce_scatter", each) for each in (OURS, GLOO, coded)),
    ]


def test_nodes_have_as_many_ranks_as_each_other():
    done = run_program("ringcomm.bench", "nodes", "--nodes", "2", "--ranks", "3")
    assert done.returncode == 2 and "as many ranks as each other" in done.stderr
