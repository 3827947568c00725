"""The cost model: max-plus against closed forms, bytes against their counts, crossings, fits."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, replace
from functools import partial

import pytest

from ringcomm.comm.topology import cost as cost_module
from ringcomm.comm.topology.cost import (
    ALGORITHMS,
    COLLECTIVES,
    Cluster,
    Coding,
    algorithms_of,
    best_cost,
    best_rail,
    collective_cost,
    direct_until,
)
from ringcomm.comm.topology.fit import (
    Fitted,
    Measured,
    fit,
    main,
    predicted_ms,
    read_rows,
    validate,
)
from ringcomm.comm.topology.network import Network, torus_network
from ringcomm.comm.topology.pipeline import (
    Flow,
    LinkStage,
    StageSequence,
    finish_us,
    least_us,
    ring_us,
)
from ringcomm.errors import ArgumentError

MIB = 1 << 20
NO_NODE = {"hop_us": 0.0, "node_gbps": 1e12, "node_alpha_us": 0.0, "memory_gbps": 1e12}


def switch(nodes, ranks=8, **others):
    return Cluster(Network("switch", nodes), ranks, **others)


# The evaluation of schedules.


@pytest.mark.parametrize("steps", [1, 2, 7, 30])
@pytest.mark.parametrize("segments", [1, 2, 5])
@pytest.mark.parametrize(("occupied_us", "latency_us"), [(1.0, 0.0), (1.0, 2.5), (1.0, 40.0)])
def test_a_ring_takes_what_its_closed_form_says(steps, segments, occupied_us, latency_us):
    flow = Flow((StageSequence((LinkStage("link", occupied_us, latency_us),), steps),), segments)
    assert finish_us([flow]) == pytest.approx(
        ring_us(steps, segments, occupied_us, latency_us), rel=1e-12
    )


def test_a_pipeline_is_as_slow_as_its_slowest_link():
    stages = tuple(LinkStage(f"link {n}", float(us)) for n, us in enumerate((3, 7, 2)))
    assert finish_us([Flow((StageSequence(stages),), 10)]) == 3 + 10 * 7 + 2
    # On one link they all wait for each other.
    shared = tuple(replace(stage, link="link") for stage in stages)
    assert finish_us([Flow((StageSequence(shared),), 10)]) == 10 * (3 + 7 + 2)


def test_flows_share_a_link():
    flow = Flow((StageSequence((LinkStage("nic", 2.0, 5.0),)),), 3)
    assert finish_us([flow] * 4) == 4 * 3 * 2.0 + 5.0


def test_any_schedule_is_between_its_bounds():
    random.seed(1)
    for _ in range(50):
        parts = tuple(
            StageSequence(
                tuple(
                    LinkStage(random.choice("abc"), random.random(), random.random())
                    for _ in range(3)
                ),
                random.randint(1, 3),
            )
            for _ in range(2)
        )
        flow = Flow(parts, random.randint(1, 6))
        every = [stage for part in parts for stage in part.stages * part.repeats]
        alone_us = sum(stage.occupied_us + stage.latency_us for stage in every)
        assert alone_us - 1e-9 <= least_us([flow]) <= finish_us([flow]) + 1e-9
        assert finish_us([flow]) <= flow.segments * alone_us + 1e-9


@pytest.mark.parametrize("latency_us", [0.0, 3.0, 30.0])
def test_long_schedules_are_continued_exactly_once_they_have_settled(latency_us):
    lap = (LinkStage("a", 1.0, latency_us), LinkStage("b", 2.0, latency_us))
    flows = [Flow((StageSequence((LinkStage("c", 4.0),)), StageSequence(lap, 500)), 3)]
    assert finish_us(flows, most_tasks=200) == pytest.approx(finish_us(flows), rel=1e-12)
    uneven = [Flow((StageSequence(lap, 500), StageSequence(lap, 250)), 3)]
    assert finish_us(uneven, most_tasks=500) == pytest.approx(finish_us(uneven), rel=1e-3)


@pytest.mark.parametrize("algorithm", ["flat-ring", "rail-ring"])
@pytest.mark.parametrize("segments", [1, 8, 32])
def test_long_rings_are_continued_exactly(monkeypatch, algorithm, segments):
    cluster, size = switch(192, 2), 256 * MIB
    cut = size / 2 if algorithm == "rail-ring" else size / 2 / 384
    arguments = (cluster, "all_reduce", size, algorithm, max(1, int(cut / segments)))
    continued = collective_cost(*arguments)
    monkeypatch.setattr(cost_module, "finish_us", partial(finish_us, most_tasks=1 << 30))
    assert continued.time_us == pytest.approx(collective_cost(*arguments).time_us, rel=0.005)


def test_no_prediction_beats_its_links():
    for nodes in (2, 64, 512, 4096):
        for algorithm in algorithms_of(Network("switch", 2)):
            cost = collective_cost(switch(nodes), "all_reduce", 1024 * MIB, algorithm)
            assert cost.time_us >= cost.node_sent_bytes / (8 * 50e3)


def test_a_long_torus_of_unequal_dimensions_is_continued_nearly_exactly(monkeypatch):
    cluster = Cluster(torus_network(128, 48), 1)
    arguments = (cluster, "all_reduce", 64 * MIB, "torus", 2 * MIB)
    continued = collective_cost(*arguments)
    monkeypatch.setattr(cost_module, "finish_us", partial(finish_us, most_tasks=1 << 30))
    assert continued.time_us == pytest.approx(collective_cost(*arguments).time_us, rel=0.02)


# Bytes.


@pytest.mark.parametrize("nodes", [2, 4, 6, 16])
@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_bytes_that_leave_a_node(nodes, ranks, collective):
    num_bytes = 3 * MIB
    world, rounds = nodes * ranks, 2 if collective == "all_reduce" else 1
    cluster = Cluster(Network("ring", nodes), ranks)
    for algorithm in ALGORITHMS:
        for segment_bytes in (None, MIB // 4):
            cost = collective_cost(cluster, collective, num_bytes, algorithm, segment_bytes)
            others = (world - 1) / world if algorithm == "flat-ring" else (nodes - 1) / nodes
            assert cost.node_sent_bytes == pytest.approx(rounds * num_bytes * others, rel=1e-12)


@pytest.mark.parametrize("nics", [1, 2, 4, 8])
def test_nics_change_the_time_and_not_the_bytes(nics):
    cluster = switch(4, nics_per_node=nics, nic_alpha_us=0.0, nic_message_us=0.0, **NO_NODE)
    for algorithm in algorithms_of(cluster.network):
        cost = collective_cost(cluster, "reduce_scatter", 64 * MIB, algorithm)
        others = 31 / 32 if algorithm == "flat-ring" else 3 / 4
        assert cost.node_sent_bytes == pytest.approx(64 * MIB * others)
        # What leaves a node passes its NICs at their rate.
        least_us = cost.node_sent_bytes / nics / 50e3
        assert cost.time_us == pytest.approx(least_us, rel=1e-6), algorithm


# Times with a closed form.


def test_direct_exchanges_take_messages_bytes_and_a_latency():
    cluster = switch(16, 1, hop_us=0.5, memory_gbps=1e12)
    cost = collective_cost(cluster, "all_gather", 16 * MIB, "rail-direct", 16 * MIB)
    assert cost.time_us == pytest.approx(15 * 1.0 + 15 * MIB / 50e3 + 14.0 + 0.5)
    assert (cost.peers, cost.segments) == (15, 1)


def test_rings_take_a_latency_a_hop():
    cluster = switch(16, 1, memory_gbps=1e12)
    cost = collective_cost(cluster, "all_gather", 16 * MIB, "rail-ring", 4 * MIB)
    occupied_us, latency_us = 1.0 + MIB / 4 / 50e3, 14.0 + 0.3
    assert cost.time_us == pytest.approx(ring_us(15, 4, occupied_us, latency_us))
    flat = collective_cost(cluster, "all_gather", 16 * MIB, "flat-ring", MIB // 4)
    assert flat.time_us == pytest.approx(cost.time_us), "without ranks to share a node"


def test_two_levels_take_two_latencies_and_fewer_messages():
    cluster = switch(16, 1, memory_gbps=1e12, hop_us=0.0)
    cost = collective_cost(cluster, "all_gather", 16 * MIB, "rail-levels", 16 * MIB)
    assert cost.time_us == pytest.approx(6 * 1.0 + 15 * MIB / 50e3 + 2 * 14.0)
    assert (cost.shape, cost.peers) == ((4, 4), 6)


@pytest.mark.parametrize(("nodes", "rounds"), [(2, 1), (16, 4), (17, 5), (31, 5)])
def test_pat_takes_a_message_for_each_bit(nodes, rounds):
    cluster = switch(nodes, 1, memory_gbps=1e12, hop_us=0.0)
    cost = collective_cost(cluster, "all_gather", nodes * MIB, "rail-pat", nodes * MIB)
    assert cost.time_us == pytest.approx(rounds * (1.0 + 14.0) + (nodes - 1) * MIB / 50e3)


def test_a_cubic_torus_keeps_all_links_busy():
    cluster = Cluster(torus_network(4, 4, 4), 1, memory_gbps=1e12)
    cost = collective_cost(cluster, "reduce_scatter", 64 * MIB, "torus", 64 * MIB)
    steps = 3 * (4 - 1)
    assert cost.time_us == pytest.approx(steps * 15.0 + 63 * MIB / 50e3, rel=1e-6)
    assert (cost.shape, cost.peers) == ((4, 4, 4), 6)


def test_one_node_more_or_less_bytes_and_rates_are_monotonic():
    for algorithm in ("flat-ring", "rail-ring", "rail-direct", "rail-pat"):
        for collective in COLLECTIVES:

            def time_us(cluster, num_bytes, a=algorithm, c=collective):
                return collective_cost(cluster, c, num_bytes, a).time_us

            small = switch(8, 4)
            base = time_us(small, 16 * MIB)
            assert base < time_us(small, 32 * MIB)
            assert base < time_us(small.with_nodes(16), 16 * MIB)
            assert base < time_us(replace(small, nic_alpha_us=50.0), 16 * MIB)
            assert base > time_us(replace(small, nic_gbps=100.0), 16 * MIB)
            assert base < time_us(replace(small, nics_per_node=1), 16 * MIB)


def test_an_all_gather_takes_no_longer_than_a_reduce_scatter():
    for algorithm in ALGORITHMS[:-1]:
        scatter, gather, both = (
            collective_cost(switch(16), each, 64 * MIB, algorithm).time_us for each in COLLECTIVES
        )
        assert gather <= scatter < both


# Choices and comparisons.


def test_direct_gives_way_to_levels_where_its_messages_cost_more_than_a_latency():
    # Messages of N - 1 against (a - 1) + (b - 1) and a latency: 31 - 10 > 14.3 > 15 - 6.
    cluster = switch(2, 1, memory_gbps=1e12)
    assert direct_until(cluster, "all_gather", MIB // 16, 256) == 16
    assert direct_until(cluster, "all_gather", MIB // 16, 8) == 8
    later = replace(cluster, nic_alpha_us=100.0)
    assert direct_until(later, "all_gather", MIB // 16, 1024) == 64
    # Larger buffers hide the messages behind their bytes.
    assert direct_until(cluster, "all_gather", 1024 * MIB, 1024, slack=0.05) == 1024


def test_the_rails_choose_the_simplest_that_is_fast_enough():
    def chosen(kind, nodes, num_bytes, **others):
        cluster = Cluster(Network(kind, nodes), 8, **others)
        return best_rail(cluster, "reduce_scatter", num_bytes).algorithm

    few, many = 4, 1024
    assert [chosen("switch", nodes, MIB) for nodes in (few, many)] == ["rail-direct", "rail-levels"]
    # Neighbours do not contend on a torus, and all others do.
    assert chosen("torus", 64, 1024 * MIB) == "rail-ring"
    # Free messages leave nothing to gain by levels.
    assert chosen("switch", many, MIB, nic_message_us=0.0) == "rail-direct"


def test_a_torus_equals_a_switch_in_bandwidth_and_loses_in_all_to_all():
    free = switch(64, 1, nic_alpha_us=0.0, nic_message_us=0.0, **NO_NODE)
    tori = [replace(free, network=torus_network(*each)) for each in ((8, 8), (4, 4, 4), (64,))]
    flat = best_cost(free, "all_reduce", 64 * MIB).time_us
    for torus in tori:
        assert collective_cost(torus, "all_reduce", 64 * MIB, "torus").time_us == pytest.approx(
            flat, rel=1e-6
        )
        direct = collective_cost(torus, "reduce_scatter", 64 * MIB, "rail-direct").time_us
        contention = torus.network.exchange_contention(64)
        assert contention > 2.5
        assert direct == pytest.approx(contention * flat / 2, rel=1e-6)


def test_codes_take_their_share_of_the_bytes_and_the_time_of_coding():
    cluster = switch(2, 1, nic_gbps=1.0, nic_alpha_us=10.0, nic_message_us=0.0, **NO_NODE)
    coding = Coding.of_wire("int8", 4.0)
    assert coding.share == 131 / 512
    whole_us = 4 * MIB / 4e3  # coded, or decoded and added: 4 MiB at 4 GB/s
    sent_us = 2 * MIB * 131 / 512 / 1e3 + 10
    scatter, reduced = (
        collective_cost(cluster, collective, 4 * MIB, "rail-direct", 4 * MIB, coding)
        for collective in ("reduce_scatter", "all_reduce")
    )
    assert scatter.time_us == pytest.approx(2 * whole_us + sent_us)
    # The half that it has summed is coded once more, and all is decoded.
    assert reduced.time_us == pytest.approx(3.5 * whole_us + 2 * sent_us)
    assert reduced.node_sent_bytes == 2 * scatter.node_sent_bytes == 4 * MIB * 131 / 512
    plain = collective_cost(cluster, "all_reduce", 4 * MIB, "rail-direct", 4 * MIB)
    assert plain.time_us == pytest.approx(2 * (2 * MIB / 1e3 + 10))
    # Coding pays where the link is slower than the codes, and not where it is faster.
    for nic_gbps, pays in ((0.1, True), (1.0, True), (10.0, False)):
        near = replace(cluster, nic_gbps=nic_gbps)
        times = [
            collective_cost(near, "all_reduce", 4 * MIB, "rail-direct", None, each).time_us
            for each in (coding, None)
        ]
        assert (times[0] < times[1]) is pays


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: Coding(1.5, 1.0), "expected a share in"),
        (lambda: Coding(0.25, 0.0), "expected gbps above 0"),
        (
            lambda: collective_cost(
                switch(4), "all_reduce", MIB, "rail-ring", coding=Coding(0.25, 1.0)
            ),
            "expected rail-direct on a coded wire, got rail-ring",
        ),
    ],
)
def test_no_such_coding(call, says):
    with pytest.raises(ArgumentError, match=says):
        call()


def test_published_bisections_of_pods():
    # TPU v4: 4096 chips, 16 x 16 x 16, 6 links of 50 GB/s; its documentation says 24 TB/s.
    tpu = Cluster(torus_network(16, 16, 16), 1, nic_gbps=300.0)
    assert tpu.bisection_gbps == 2 * 16 * 16 * 50
    # DGX A100 SuperPOD, 256 GPUs with 25 GB/s each; NVIDIA counts both directions: 6.4 TB/s.
    pod = Cluster(Network("fat-tree", 32), 8, nic_gbps=25.0)
    assert 2 * pod.bisection_gbps == 6400
    # 256 H100 in one NVLink network of taper 2: 57.6 TB/s.
    nvlink = Cluster(Network("fat-tree", 32, leaf_nodes=2, taper=2.0), 8, nic_gbps=450.0)
    assert nvlink.bisection_gbps == 28800


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("reduce", MIB, "rail-ring"), "collective: expected one of reduce_scatter"),
        (("all_reduce", MIB, "tree"), "algorithm: expected one of flat-ring"),
        (("all_reduce", MIB, "torus"), "algorithm torus: expected a torus or a ring, got a switch"),
        (("all_reduce", 0, "rail-ring"), "at least 1 byte, got 0"),
        (("all_reduce", MIB, "rail-ring", 0), "segment: expected at least 1 byte, got 0"),
    ],
)
def test_no_such_call(arguments, says):
    with pytest.raises(ArgumentError, match=says):
        collective_cost(switch(4), *arguments)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"ranks_per_node": 0}, "at least 1 rank, got 0"),
        ({"nics_per_node": 9}, "at most a NIC for each of 8 ranks, got 9"),
        ({"nics_per_node": 3}, "NICs that divide 8 ranks, got 3"),
        ({"nic_gbps": 0.0}, "nic_gbps above 0 and finite, got 0.0"),
        ({"hop_us": -1.0}, "hop_us of at least 0, got -1.0"),
    ],
)
def test_no_such_cluster(wrong, says):
    with pytest.raises(ArgumentError, match=says):
        Cluster(Network("switch", 4), **wrong)


# Fits.

TRUE = Fitted(alpha_us=150.0, payload=0.93, node_gbps=2.0)


def made_rows(fitted=TRUE, rates=(0.1, 1.0), sizes=(1024, 4 * MIB)):
    bare = [
        Measured(collective, algorithm, nodes, ranks, 1, rate, size, 1.0)
        for collective, algorithm in (("exchange", "rail-direct"), ("all_gather", "flat-ring"))
        for nodes, ranks in ((2, 1), (3, 2))
        for rate in rates
        for size in sizes
    ]
    return [replace(row, ms=predicted_ms(row, fitted)) for row in bare]


def test_a_fit_finds_the_parameters_that_made_the_rows():
    found = fit(made_rows())
    assert found.payload == pytest.approx(TRUE.payload, rel=0.02)
    assert found.alpha_us == pytest.approx(TRUE.alpha_us, rel=0.1)
    others = made_rows(rates=(0.3, 3.0))
    assert all(abs(each.ratio - 1) < 0.1 for each in validate(others, found))
    # Coded rows tell the rate of coding, once the others have told the rest.
    coded = [
        Measured("all_reduce", "rail-direct", 2, 2, 1, rate, 4 * MIB, 1.0, wire="int8")
        for rate in (1.0, 10.0)
    ]
    coder = replace(TRUE, coding_gbps=0.1)
    coded = [replace(row, ms=predicted_ms(row, coder)) for row in coded]
    assert fit([*made_rows(), *coded]).coding_gbps == pytest.approx(0.1, rel=0.1)
    # A machine that behaves otherwise is seen.
    slower = made_rows(Fitted(150.0, 0.7, 2.0), rates=(0.3,), sizes=(4 * MIB,))
    assert all(each.ratio < 0.9 for each in validate(slower, found))


def test_rows_are_read_from_csv_and_json(tmp_path, capsys):
    rows = made_rows(sizes=(4 * MIB,))
    plain = [asdict(row) for row in rows]
    (tmp_path / "rows.json").write_text(json.dumps(plain))
    text = "\n".join(",".join(map(str, row.values())) for row in plain)
    (tmp_path / "rows.csv").write_text("# cpu: any\n" + ",".join(plain[0]) + "\n" + text + "\n")
    assert read_rows(tmp_path / "rows.json") == read_rows(tmp_path / "rows.csv") == rows
    assert main([str(tmp_path / "rows.csv"), "--fit-at", "0.1"]) == 0
    assert "within 10 %: 4 of 4" in capsys.readouterr().out
    assert main([str(tmp_path / "rows.csv"), "--fit-at", "7"]) == 2
    assert "expected rows, got none" in capsys.readouterr().err
    plain[1]["collective"] = "reduce"
    (tmp_path / "rows.json").write_text(json.dumps(plain))
    with pytest.raises(ArgumentError, match="unknown collective 'reduce'"):
        read_rows(tmp_path / "rows.json")
    with pytest.raises(ArgumentError, match=r"missing\.csv"):
        read_rows(tmp_path / "missing.csv")
