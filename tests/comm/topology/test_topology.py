# SPDX-License-Identifier: Apache-2.0
"""Topologies: names, order, connections, and their JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ringcomm.comm.device.topology import (
    Gpu,
    NvLinks,
    Pair,
    Topology,
    from_json,
    load,
    normalized_bus_id,
    save,
    weaker,
)
from ringcomm.errors import ArgumentError
from tests.comm.topology.fake_nvml import NAMES, RECORDINGS, recorded


@pytest.mark.parametrize(
    ("text", "normalized"),
    [
        ("00000000:1B:00.0", "0000:1b:00.0"),
        ("0000:1b:00.0", "0000:1b:00.0"),
        ("0001:1b:00.1", "0001:1b:00.1"),
        ("1B:00.0", "0000:1b:00.0"),
        ("1b:00", "0000:1b:00.0"),
    ],
)
def test_bus_ids_have_one_spelling(text, normalized):
    assert normalized_bus_id(text) == normalized


@pytest.mark.parametrize("text", ["", "GPU-1b", "0000:1b", "0000:1b:00.0 x", "1g:00.0"])
def test_other_text_is_no_bus_id(text):
    with pytest.raises(ArgumentError, match="PCI bus id"):
        normalized_bus_id(text)


@pytest.mark.parametrize(
    "name",
    [
        "GPU-00000000-0000-0000-0000-000000000001",
        "00000000-0000-0000-0000-000000000001",
        "gpu-00000000-0000-0000-0000-000000000001",
        "0000:07:00.0",
        "00000000:07:00.0",
    ],
)
def test_a_gpu_is_found_by_every_name(name):
    topology = recorded("dgx_1v")
    assert topology.find(name) is topology.gpus[1]


def test_instances_lead_to_their_gpu():
    topology = recorded("mig")
    assert topology.find("MIG-00000000-0000-0000-0000-0000000000a2") is topology.gpus[0]
    assert topology.find("00000000-0000-0000-0000-0000000000a2") is topology.gpus[0]


@pytest.mark.parametrize("name", ["", "GPU-ff", "0000:ff:00.0", "1"])
def test_what_is_not_there_is_not_found(name):
    assert recorded("dgx_1v").find(name) is None


def test_the_order_of_reading_is_forgotten():
    known = recorded("dgx_1v")
    swapped = tuple(replace(p, first=p.second, second=p.first) for p in known.pairs[::-1])
    assert Topology(known.machine, known.gpus[::-1], swapped, known.driver) == known


def gpu(number: int, **more) -> Gpu:
    return Gpu(uuid=f"GPU-{number}", pci_bus_id=f"0000:{number:02x}:00.0", **more)


FIRST, SECOND, NO_LINKS = gpu(1), gpu(2), NvLinks()


def two(nvlinks=NO_LINKS, first=FIRST, second=SECOND, **pair):
    """Returns the connection between two GPUs."""
    ends = (first.pci_bus_id, second.pci_bus_id)
    topology = Topology(gpus=(first, second), pairs=(Pair(*ends, nvlinks, **pair),))
    return topology.connection(*topology.gpus)


SWITCHED = NvLinks(18, "4.0", 25.0)


def test_connections():
    assert two(level="PIX").kind == "pcie"
    assert two().kind == "unknown"
    assert two(NvLinks(2, "3.0", 25.0), level="SYS").kind == "nvlink"
    ends = {"first": gpu(1, switch=SWITCHED), "second": gpu(2, switch=NvLinks(17, "4.0", 20.0))}
    assert two(level="SYS", **ends).kind == "nvswitch"
    assert two(**ends).links == NvLinks(17, "4.0", 20.0)
    assert two(first=gpu(1, switch=SWITCHED), level="SYS").kind == "pcie"
    assert two(NvLinks(2), peer_access=False).kind == "refused"
    assert two(first=gpu(1, mig=True, switch=SWITCHED), second=gpu(2, switch=SWITCHED)).kind == (
        "refused"
    )


def test_connections_in_words():
    assert str(two(NvLinks(1, "2.0", 25.0))) == "1 NVLink (25 GB/s per direction)"
    assert str(two(NvLinks(4))) == "4 NVLinks"
    assert str(two(level="PHB")) == "PCIe through the PCIe host bridge (PHB)"
    assert str(two()) == "an unknown path"


def test_ends_agree_on_what_both_have():
    assert weaker(NvLinks(4, "3.0", 25.0), NvLinks(3, "4.0", None)) == NvLinks(3, None, None)
    assert NvLinks(4, "3.0", 25.0).gbps == 100.0
    assert NvLinks(0, "3.0", 25.0).gbps is None
    assert NvLinks(4).gbps is None


@pytest.mark.parametrize(
    ("gpus", "pairs"),
    [
        ((gpu(1), gpu(1)), ()),
        ((gpu(1), replace(gpu(2), uuid="gpu-1")), ()),
        ((gpu(1), gpu(2)), (Pair("0000:01:00.0", "0000:03:00.0"),)),
        ((gpu(1), gpu(2)), (Pair("0000:01:00.0", "0000:01:00.0"),)),
        (
            (gpu(1), gpu(2)),
            (Pair("0000:01:00.0", "0000:02:00.0"), Pair("0000:02:00.0", "0000:01:00.0")),
        ),
    ],
    ids=["one gpu twice", "one uuid twice", "stranger", "itself", "one pair twice"],
)
def test_contradictions_are_refused(gpus, pairs):
    with pytest.raises(ArgumentError, match="topology: "):
        Topology(gpus=gpus, pairs=pairs)


@pytest.mark.parametrize("name", NAMES)
def test_json_round_trip(name, tmp_path):
    topology = recorded(name)
    assert from_json(topology.to_json()) == topology
    save(topology, tmp_path / "t.json")
    assert load(tmp_path / "t.json") == topology
    assert (tmp_path / "t.json").read_text() == topology.to_json()


def test_the_recordings_are_complete():
    links = {"dgx_1v": 6, "hgx_a100_4": 12}
    for name, per_gpu in links.items():
        topology = recorded(name)
        for one in topology.gpus:
            pairs = [topology.pair(one, other) for other in topology.gpus if other != one]
            assert sum(pair.nvlinks.count for pair in pairs) == per_gpu
    for name in NAMES:
        topology = recorded(name)
        assert len(topology.pairs) == len(topology.gpus) * (len(topology.gpus) - 1) // 2
        assert json.loads((RECORDINGS / f"{name}.json").read_text())["source"]
        assert f"`{name}.json`" in (RECORDINGS / "README.md").read_text()


def damaged(change):
    value = json.loads(recorded("dgx_1v").to_json())
    change(value)
    return json.dumps(value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "cannot be parsed"),
        ("{", "cannot be parsed"),
        ("[" * 100_000, "cannot be parsed"),
        ("[]", "the whole: expected an object"),
        ("{}", "format: expected 'ringcomm topology 1'"),
        (damaged(lambda v: v.update(format="ringcomm topology 2")), "format: expected"),
        (damaged(lambda v: v.update(gpus={})), "gpus: expected a list"),
        (damaged(lambda v: v.update(gpus=[1])), r"gpus\[0\]: expected an object"),
        (damaged(lambda v: v.update(machine=None)), "machine: expected a string"),
        (damaged(lambda v: v.update(notes=[1])), r"notes\[0\]: expected a string"),
        (damaged(lambda v: v.update(gpu=[])), "gpu: expected only entries of a"),
        (damaged(lambda v: v["gpus"][2].pop("uuid")), r"gpus\[2\].uuid: expected a string"),
        (damaged(lambda v: v["gpus"][2].update(pci_bus_id="x")), "PCI bus id"),
        (damaged(lambda v: v["gpus"][2].update(numa_node=-1)), "numa_node: expected a number"),
        (damaged(lambda v: v["gpus"][2].update(numa_node=True)), "numa_node: expected a number"),
        (damaged(lambda v: v["gpus"][2].update(pcie=[4])), "pcie: expected a list of 2"),
        (damaged(lambda v: v["gpus"][2].update(mig="no")), "mig: expected true or false"),
        (damaged(lambda v: v["gpus"][2].update(name="x", pciebus="y")), "pciebus: expected only"),
        (damaged(lambda v: v["pairs"][0].update(level="NEAR")), r"pairs\[0\].level: expected one"),
        (damaged(lambda v: v["pairs"][0].update(second="0000:ff:00.0")), "expected pairs of"),
        (damaged(lambda v: v["pairs"].append(v["pairs"][0])), "one pair twice"),
        (
            damaged(lambda v: v["pairs"][0]["nvlinks"].update(count=1.5)),
            r"pairs\[0\].nvlinks.count: expected a number",
        ),
        (
            damaged(lambda v: v["pairs"][0]["nvlinks"].update(link_gbps=float("nan"))),
            "link_gbps: expected a number > 0",
        ),
        (damaged(lambda v: v["gpus"].append(v["gpus"][0])), "appears twice"),
    ],
)
def test_damaged_files_say_where(text, says):
    with pytest.raises(ArgumentError, match=says) as raised:
        from_json(text, "some.json")
    assert str(raised.value).startswith("some.json: ")
    assert "ringcomm topo --save" in str(raised.value)


def test_every_cut_of_a_file_is_an_error():
    text = recorded("pcie_pair").to_json().rstrip()
    for length in range(len(text)):
        with pytest.raises(ArgumentError):
            from_json(text[:length])


def test_unreadable_files(tmp_path):
    with pytest.raises(ArgumentError, match="cannot be read"):
        load(tmp_path / "none.json")
    with pytest.raises(ArgumentError, match="cannot be recorded"):
        save(recorded("one_gpu"), tmp_path / "none" / "t.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ArgumentError, match="cannot be read"):
        load(tmp_path / "binary")
