"""``ringcomm estimate --nodes``: collectives over a network, beside a model or alone."""

from __future__ import annotations

import json

import pytest

from ringcomm.cli import main
from ringcomm.comm.topology.cost import Cluster, Coding, best_cost, collective_cost
from ringcomm.comm.topology.network import Network, torus_network

NODES = ("--nodes", 4, "--nic-gbps", 50)
MIB = 1 << 20
BUCKET = 4 << 20


@pytest.fixture
def estimate(capsys):
    """Runs the command to its end; exit code, output and errors."""

    def call(*arguments):
        code = main(["estimate", *map(str, arguments)])
        output = capsys.readouterr()
        return code, output.out, output.err

    return call


def test_a_number_of_bytes_alone(estimate):
    code, out, err = estimate(*NODES, "--gpus-per-node", 2, "--bytes", MIB)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "network: 4 nodes of 2 ranks, switch; NICs of a node: 2 of 50 GB/s"
    assert "bisection 200 GB/s one way" in lines[1]
    assert lines[2] == "predicted by docs/scaling.md's model, not measured"
    rows = {line.split()[0]: line.split() for line in lines if line.lstrip().startswith("rail-")}
    cluster = Cluster(Network("switch", 4), 2)
    direct = collective_cost(cluster, "all_reduce", MIB, "rail-direct")
    assert rows["rail-direct"][3] == f"{direct.time_us / 1e3:.3g}"
    assert rows["rail-direct"][4:] == ["1.57", "3", "-"]
    assert rows["rail-levels"][-1] == "2x2"
    assert f"all_reduce {best_cost(cluster, 'all_reduce', MIB).algorithm}" in lines[-1]
    assert "memory of a rank" not in out


def test_as_json(estimate):
    machine = ("--torus", "4x2", "--nodes", 8, "--nic-gbps", 25, "--gpus-per-node", 4)
    options = ("--nics-per-node", 2, "--nic-alpha-us", 3, "--segment-bytes", MIB, "--json")
    _, out, _ = estimate(*machine, *options, "--bytes", 8 * MIB)
    told = json.loads(out)["network"]
    cluster = Cluster(torus_network(4, 2), 4, 2, 25.0, 3.0)
    assert told["predicted"] is True
    assert told["cluster"]["network"]["dims"] == told["sizes"] == [4, 2]
    assert (told["most_links"], told["bisection_gbps"]) == (3, cluster.bisection_gbps)
    scatter = told["calls"][0]
    assert (scatter["collective"], scatter["bytes"]) == ("reduce_scatter", 8 * MIB)
    times = {cost["algorithm"]: cost["time_us"] for cost in scatter["costs"]}
    expected = collective_cost(cluster, "reduce_scatter", 8 * MIB, "torus", MIB)
    assert times["torus"] == expected.time_us
    assert scatter["fastest"] == min(times, key=lambda name: times[name])
    assert told["stages"] == []


def test_a_model_moves_bucket_after_bucket(estimate):
    model = ("--params", 5 * BUCKET // 2, "--bucket-elems", BUCKET, "--gpus-per-node", 1)
    code, out, _ = estimate(*NODES, *model, "--json")
    told = json.loads(out)
    assert (code, told["world"]) == (0, 4)
    cluster = Cluster(Network("switch", 4), 1)

    def time_s(collective, elems, elem_bytes):
        return best_cost(cluster, collective, elems * elem_bytes).time_us / 1e6

    # Two buckets and half a one; node sums travel in FP32, parameters in 16 bits.
    scattered, sums, params = (
        2 * time_s(collective, BUCKET, size) + time_s(collective, BUCKET // 2, size)
        for collective, size in (("reduce_scatter", 4), ("all_gather", 4), ("all_gather", 2))
    )
    rows = told["network"]["stages"]
    assert [row["stage"] for row in rows] == [0, 1, 2, 3]
    assert [row["reduce_scatter_s"] for row in rows] == [pytest.approx(scattered)] * 4
    gathered = [row["all_gather_s"] for row in rows]
    assert gathered == [pytest.approx(each) for each in (sums, params, params, params)]
    assert all(row["exposed_s"] is None for row in rows)
    calls = told["network"]["calls"]
    assert [call["bytes"] for call in calls] == [4 * BUCKET, 2 * BUCKET, 4 * BUCKET]
    assert "exposed" not in out.replace("exposed_s", "")


@pytest.mark.parametrize(
    ("shared", "sums", "crossings", "reads"),
    [((), 0, 1, 2), (("--shard-params", "world"), 0, 2, 0), (("--shard-state", "node"), 1, 0, 2)],
)
def test_stage_3_gathers_where_its_choices_say(estimate, shared, sums, crossings, reads):
    machine = ("--gpus-per-node", 2, "--node-gbps", 100, "--node-alpha-us", 8)
    model = ("--params", BUCKET, "--bucket-elems", BUCKET, "--stage", 3)
    _, out, _ = estimate(*NODES, *machine, *model, *shared, "--json")
    cluster = Cluster(Network("switch", 4), 2, node_gbps=100.0, node_alpha_us=8.0)
    over_nodes_us = [best_cost(cluster, "all_gather", BUCKET * size).time_us for size in (4, 2)]
    # A rank reads the half that its only mate has, at 100 GB/s.
    within_us = 8 + BUCKET * 2 / 2 / 100e3
    expected_us = sums * over_nodes_us[0] + crossings * over_nodes_us[1] + reads * within_us
    (row,) = json.loads(out)["network"]["stages"]
    assert row["all_gather_s"] == pytest.approx(expected_us / 1e6)


@pytest.mark.parametrize(
    ("stage", "shared", "calls"), [(0, (), 1), (1, (), 1), (3, ("--shard-params", "world"), 2)]
)
def test_what_returns_takes_the_time_of_its_wire(estimate, stage, shared, calls):
    """Parameters in codes from stage 1 on; sums as they are at stage 0."""
    machine = ("--gpus-per-node", 1, "--coding-gbps", 2)
    model = ("--params", BUCKET, "--bucket-elems", BUCKET, "--stage", stage)
    wires = ("--wire", "int4", *(("--wire-parameters", "fp8") if stage else ()))
    _, out, _ = estimate(*NODES, *machine, *model, *shared, *wires, "--json")
    (row,) = json.loads(out)["network"]["stages"]
    cluster = Cluster(Network("switch", 4), 1)
    coding = Coding.of_wire("fp8", 2.0)
    each = best_cost(cluster, "all_gather", BUCKET * 4)
    if stage:
        each = collective_cost(cluster, "all_gather", BUCKET * 4, "rail-direct", coding=coding)
    assert row["all_gather_s"] == pytest.approx(calls * each.time_us / 1e6)


@pytest.mark.parametrize(
    ("wire", "shared", "coded", "params"),
    [("int8", (), 0, 1), ("int4", ("--shard-state", "node"), 1, 0)],
)
def test_sums_travel_in_the_form_of_the_wire(estimate, wire, shared, coded, params):
    machine = ("--gpus-per-node", 1, "--coding-gbps", 2)
    model = ("--params", BUCKET, "--bucket-elems", BUCKET, "--stage", 2)
    _, out, _ = estimate(*NODES, *machine, *model, *shared, "--wire", wire, "--json")
    cluster, coding = Cluster(Network("switch", 4), 1), Coding.of_wire(wire, 2.0)
    scattered, gathered = (
        collective_cost(cluster, collective, BUCKET * 4, "rail-direct", coding=coding).time_us
        for collective in ("reduce_scatter", "all_gather")
    )
    updated = best_cost(cluster, "all_gather", BUCKET * 2).time_us
    told = json.loads(out)["network"]
    (row,) = told["stages"]
    assert row["reduce_scatter_s"] == pytest.approx(scattered / 1e6)
    assert row["all_gather_s"] == pytest.approx((coded * gathered + params * updated) / 1e6)
    calls = {call["collective"]: call["coded"] for call in told["calls"]}
    assert calls["all_gather"] is None
    assert calls["reduce_scatter"]["time_us"] == scattered
    _, out, _ = estimate(*NODES, *machine, *model, *shared, "--wire", wire)
    (line,) = (line for line in out.splitlines() if f"rail-direct, {wire}" in line)
    assert line.split()[2:4] == [f"{scattered / 1e3:.3g}", "-"]
    code, _, err = estimate(*NODES, *machine, *model)
    assert (code, err.count("expected a --wire or --wire-parameters")) == (2, 1)


def test_rounded_sums_travel_in_16_bits(estimate):
    model = ("--params", BUCKET, "--bucket-elems", BUCKET, "--stage", 2, "--gpus-per-node", 1)
    _, out, _ = estimate(*NODES, *model, "--wire", "param", "--json")
    (row,) = json.loads(out)["network"]["stages"]
    expected = best_cost(Cluster(Network("switch", 4), 1), "reduce_scatter", BUCKET * 2)
    assert row["reduce_scatter_s"] == pytest.approx(expected.time_us / 1e6)


def test_what_computing_cannot_hide(estimate):
    machine = ("--context", 1024, "--bandwidth-gbps", 50, "--peak-tflops", 400)
    _, out, _ = estimate(*NODES, "--params", "1B", *machine, "--stage", 1, "--json")
    told = json.loads(out)
    (row,) = told["network"]["stages"]
    compute_s = told["stages"][0]["time"]["compute_s"]
    assert row["exposed_s"] == pytest.approx(row["communication_s"] - compute_s)
    _, out, _ = estimate(*NODES, "--params", "1B", *machine, "--stage", 1)
    assert "communication of a step over the network, bucket after bucket" in out
    assert f"{1e3 * row['exposed_s']:.3g}" in out.split("exposed ms")[1]
    assert max(map(len, out.splitlines())) <= 100


def test_wide_numbers_fit_100_columns(estimate):
    options = ("--nodes", 16384, "--nic-gbps", 0.01, "--network", "ring", "--bytes", 10**12)
    code, out, _ = estimate(*options)
    assert code == 0 and max(map(len, out.splitlines())) <= 100


CODED = ("--wire", "int4", "--error-feedback")


@pytest.mark.parametrize(
    ("shared", "params", "state", "leaves"),
    [
        # 16 elements on 4 nodes of 8: 2 bytes a parameter, 12 of state, 4 a gradient on the wire.
        ((), 2 * 2, 12, (4 + 2) * 16 * 3 // 4),
        (("--shard-params", "world"), 2, 12, (4 + 2 * 2) * 16 * 3 // 4),
        (("--shard-state", "node"), 2 * 2, 2 * 12, (4 + 4) * 16 * 3 // 4),
        # In codes they take 8 bytes and a scale's 3; of 2 elements a rank codes partial sums, and
        # with copies of the state of 1 the sum.
        (CODED, 2 * 2, 12 + 2 * 4, (11 + 2 * 16) * 3 // 4),
        ((*CODED, "--shard-state", "node"), 2 * 2, 2 * 12 + 3 * 4, 2 * 11 * 3 // 4),
        # 16 codes of a byte, and a scale of 3; with masters of FP32 parameters, too.
        (("--wire-parameters", "int8"), 2 * 2, 12, (4 * 16 + 16 + 3) * 3 // 4),
        (
            ("--wire-parameters", "fp8", "--dtype", "fp32", "--shard-params", "world"),
            4,
            12,
            (4 * 16 + 2 * 16 + 3) * 3 // 4,
        ),
    ],
)
def test_memory_is_that_of_what_nodes_share(estimate, shared, params, state, leaves):
    code, out, _ = estimate(*NODES, "--params", 16, *shared, "--stage", 3, "--json")
    assert code == 0
    told = json.loads(out)["stages"][0]
    held = told["model_state_bytes"]
    assert (held["params"], held["state"], told["leaving_node_bytes"]) == (params, state, leaves)
    assert "4 nodes: parameters (stage 3) sharded over" in estimate(*NODES, "--params", 16)[1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ("--params", "1M", "--world", 4, "--shard-state", "node"),
            "--shard-state: expected --nodes with it",
        ),
        (
            ("--params", "1M", "--world", 4, "--error-feedback"),
            "--error-feedback: expected --nodes with it",
        ),
        (
            (*NODES, "--params", "1M", "--error-feedback"),
            "error_feedback: expected gradients in codes with it",
        ),
        (
            ("--params", "1M", "--world", 4, "--wire-parameters", "int8"),
            "--wire-parameters: expected --nodes with it",
        ),
        (
            (*NODES, "--params", "1M", "--wire-parameters", "int8", "--master", "none"),
            'expected master="fp32"',
        ),
        (
            (*NODES, "--params", "1M", "--wire-parameters", "int8", "--state-on", "disk"),
            "--wire-parameters: expected state and parameters in memory",
        ),
        (
            (*NODES, "--params", "1M", "--shard-state", "node", "--shard-params", "world"),
            'params: expected "node" with state="node"',
        ),
        (("--nodes", 4, "--bytes", 1), "--nodes 4: expected --nic-gbps with it"),
        (("--bytes", 1), "--bytes: expected --nodes with it"),
        (("--params", "1M", "--world", 4, "--taper", 2), "--taper: expected --nodes with it"),
        (("--params", "1M"), "expected --world, or --nodes with --gpus-per-node"),
        ((*NODES, "--params", "1M", "--world", 8), "--world 8: expected 4 nodes x 8 GPUs = 32"),
        (NODES, "no model: give --params COUNT"),
        ((*NODES, "--bytes", 0), "--bytes: expected at least 1, got 0"),
        ((*NODES, "--bytes", 1, "--segment-bytes", 0), "--segment-bytes: expected at least 1"),
        (("--nodes", 1, "--nic-gbps", 1, "--bytes", 1), "at least 2 nodes, got 1"),
        ((*NODES, "--bytes", 1, "--torus", "3x2"), "a torus of 4 nodes, got 3 x 2"),
        ((*NODES, "--bytes", 1, "--torus", "4", "--network", "ring"), "of a torus only, got ring"),
        ((*NODES, "--bytes", 1, "--nics-per-node", 3), "NICs that divide 8 ranks, got 3"),
        (("--nodes", 4, "--nic-gbps", 0, "--bytes", 1), "nic_gbps above 0 and finite, got 0.0"),
    ],
)
def test_what_is_refused(estimate, arguments, says):
    code, out, err = estimate(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("ringcomm estimate: ") and says in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("text", ["8x", "x", "8xb", "0x4", "-2x2", ""])
def test_dimensions_that_are_none(estimate, capsys, text):
    with pytest.raises(SystemExit):
        estimate(*NODES, "--bytes", 1, f"--torus={text}")
    assert "expected dimensions such as 8x8x4" in capsys.readouterr().err


def test_the_picture(estimate, tmp_path, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    path = tmp_path / "scaling.svg"
    code, _, err = estimate(*NODES, "--gpus-per-node", 2, "--bytes", MIB, "--plot", path)
    assert (code, err) == (0, "")
    drawn = path.read_text()
    for words in ("predicted", "rail-direct", "3D torus", "nodes", "all-to-all"):
        assert words in drawn
    assert "GB/s" in drawn
