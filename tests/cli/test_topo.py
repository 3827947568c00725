# SPDX-License-Identifier: Apache-2.0
"""``ringcomm topo``: its output, the files that it records, and the input that it refuses."""

from __future__ import annotations

import json
import sys

import pytest

from ringcomm.cli import main
from ringcomm.comm.device.topology import from_json, load
from tests.cli.processes import run
from tests.comm.topology.fake_nvml import RECORDINGS, FakeNvml, recorded


@pytest.fixture(autouse=True)
def _no_visible_devices(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)


@pytest.fixture
def topo(capsys):
    """Runs the command to its end; returns exit code, output and errors."""

    def call(*arguments):
        code = main(["topo", *map(str, arguments)])
        output = capsys.readouterr()
        return code, output.out, output.err

    return call


@pytest.fixture
def machine(monkeypatch):
    """Replaces this machine by a recorded one."""

    def become(name):
        monkeypatch.setattr("os.cpu_count", lambda: 256)
        monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(recorded(name)))

    return become


def recording(name):
    return RECORDINGS / f"{name}.json"


def test_matrix_rings_and_algorithm(topo):
    code, out, err = topo("--file", recording("dgx_1v"))
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "dgx-1v: 8 GPUs, driver 470.57.02"
    rows = [line.split("  ") for line in lines if line.startswith("GPU")]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows[:8]]
    assert cells[0] == ["GPU0", "X", "NV1 25", "NV1 25", "NV2 50", "NV2 50", "SYS", "SYS", "SYS"]
    assert cells[5] == ["GPU5", "SYS", "NV2 50", "SYS", "SYS", "NV1 25", "X", "NV2 50", "NV1 25"]
    assert "SYS    PCIe through the interconnect between NUMA nodes" in lines
    assert sum(line.startswith("ring ") for line in lines) == 1
    assert "rings      50 GB/s per direction, by the links' data rate" in lines
    assert lines[-1].startswith("algorithm  ring: not all pairs")


def test_switch_and_refusal_in_the_matrix(topo):
    _, out, _ = topo("--file", recording("dgx_h100"))
    assert "GPU0  X          NVS18 450" in out
    assert "NVS# B  # NVLinks to NVSwitches, B GB/s per direction" in out
    _, out, _ = topo("--file", recording("mig"))
    assert "GPU0  X     PXB!" in out
    assert "MIG: MIG-00000000-0000-0000-0000-0000000000a1, MIG-" in out


def test_one_rank_per_gpu_unless_told(topo):
    _, out, _ = topo("--file", recording("pcie_pair"))
    assert "ranks      0:GPU0 1:GPU1\n" in out
    _, out, _ = topo("--file", recording("pcie_pair"), "--ranks", 4)
    assert "ranks      0:GPU0 1:GPU1 2:GPU0 3:GPU1\n" in out
    assert "ring 0     0 -> 2 -> 1 -> 3 -> 0\n" in out
    _, out, _ = topo("--file", recording("pcie_pair"), "--placement", "1, 0000:C1:00.0,0")
    assert "ranks      0:GPU1 1:GPU1 2:GPU0\n" in out


def test_json_is_the_whole_answer(topo):
    code, out, _ = topo("--file", recording("hgx_a100_4"), "--ranks", 3, "--json")
    answer = json.loads(out)
    assert code == 0
    assert from_json(json.dumps(answer["topology"])) == recorded("hgx_a100_4")
    assert answer["placements"] == ["0000:03:00.0", "0000:44:00.0", "0000:84:00.0"]
    assert answer["choice"]["algorithm"] == "one_shot"
    assert answer["choice"]["rings"] == [[0, 2, 1], [0, 1, 2]]
    assert answer["rings_gbps"] == 200.0


def test_this_machine_is_recorded(topo, machine, tmp_path):
    machine("dgx_1v")
    code, out, _ = topo("--save", tmp_path / "t.json")
    assert code == 0
    assert load(tmp_path / "t.json").gpus == recorded("dgx_1v").gpus
    _, again, _ = topo("--file", tmp_path / "t.json")
    assert again == out


def test_ranks_go_to_visible_gpus(topo, machine, monkeypatch):
    machine("dgx_1v")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-00000000-0000-0000-0000-000000000002")
    _, out, _ = topo()
    assert "ranks      0:GPU5 1:GPU2\n" in out
    # A recorded machine has its own devices.
    _, out, _ = topo("--file", recording("pcie_pair"))
    assert "ranks      0:GPU0 1:GPU1\n" in out


def test_no_visible_gpu_is_told(topo, machine, monkeypatch):
    machine("dgx_1v")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, out, err = topo()
    assert (code, out) == (2, "")
    assert "CUDA_VISIBLE_DEVICES='' leaves none of the 8 GPUs" in err


@pytest.mark.parametrize(
    ("value", "gpus"),
    [
        ("2,0", [2, 0]),
        ("0,9,1", [0]),
        ("-1", []),
        ("1,1", []),
        ("0,x,1", [0]),
        ("", []),
        ("GPU-00000000-0000-0000-0000-000000000003,1", [3, 1]),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(value, gpus):
    topology = recorded("dgx_1v")
    expected = [topology.gpus[index].pci_bus_id for index in gpus]
    assert topology.visible_devices({"CUDA_VISIBLE_DEVICES": value}) == expected


def test_visible_instances():
    topology = recorded("mig")
    first, second = topology.gpus[0].mig_instances
    assert topology.visible_devices({}) == [first, second, "0000:0f:00.0"]
    assert topology.visible_devices({"CUDA_VISIBLE_DEVICES": second}) == [second]
    assert topology.visible_devices({"CUDA_VISIBLE_DEVICES": "0"}) == [first]


@pytest.mark.parametrize(("order", "noted"), [("", True), ("PCI_BUS_ID", False)])
def test_numbers_of_unlike_gpus_are_noted(topo, monkeypatch, order, noted):
    unlike = FakeNvml(recorded("pcie_pair"), answers={"nvmlDeviceGetName": lambda _, gpu: str(gpu)})
    monkeypatch.setattr("os.cpu_count", lambda: 256)
    monkeypatch.setitem(sys.modules, "pynvml", unlike)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", order)
    _, out, _ = topo()
    assert ("note: CUDA numbers GPUs of different models by speed" in out) is noted


def test_without_nvml_the_plan_is_for_cpus(topo, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    code, out, err = topo("--ranks", 3, "--save", tmp_path / "t.json")
    assert (code, err) == (0, "")
    assert out.startswith("no NVIDIA GPU found: nvidia-ml-py is not installed")
    assert (
        "ranks      3 on CPUs\nring 0     0 -> 1 -> 2 -> 0\nalgorithm  one_shot: ranks on CPUs"
        in out
    )
    assert topo("--file", tmp_path / "t.json", "--ranks", 3)[1] == out


def test_a_recorded_machine_without_gpus(topo):
    code, out, _ = topo("--file", recording("no_nvml"), "--ranks", 1)
    assert code == 0
    assert "NVML Shared Library Not Found" in out
    assert "ranks      1 on CPUs\n" in out


@pytest.mark.parametrize("content", ["", "{", '{"format": "ringcomm topology 1", "gpus": 3}'])
def test_damaged_files_are_told(topo, tmp_path, content):
    (tmp_path / "t.json").write_text(content)
    code, out, err = topo("--file", tmp_path / "t.json")
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith(f"ringcomm topo: error: {tmp_path}/t.json: ")
    assert len(err.splitlines()) == 3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--file", "/nowhere.json"], "cannot be read"),
        (["--file", recording("dgx_1v"), "--ranks", "0"], "--ranks: expected at least 1, got 0"),
        (
            ["--file", recording("dgx_1v"), "--placement", "0,8"],
            "no GPU '8': there are GPUs 0 to 7",
        ),
        (
            ["--file", recording("dgx_1v"), "--placement", "0,,1"],
            "no GPU '': there are GPUs 0 to 7",
        ),
        (["--file", recording("no_nvml"), "--placement", "0"], "NVML Shared Library Not Found"),
        (["--file", recording("dgx_1v"), "--save", "/nowhere/t.json"], "cannot be recorded"),
    ],
)
def test_what_makes_no_sense_is_refused(topo, arguments, says):
    code, out, err = topo(*arguments)
    assert (code, out) == (2, "")
    assert says in err


def test_ranks_and_placement_exclude_each_other(topo):
    with pytest.raises(SystemExit) as ended:
        topo("--ranks", 2, "--placement", "0,1")
    assert ended.value.code == 2


def test_the_command_as_a_process():
    done = run("-m", "ringcomm", "topo", "--file", recording("one_gpu"))
    assert (done.returncode, done.stderr) == (0, "")
    assert "one rank has no peer" in done.stdout
    assert "topo" in run("-m", "ringcomm", "--help").stdout
