# SPDX-License-Identifier: Apache-2.0
"""The NVML reader, with an NVML that answers, answers only partly, or does not start."""

from __future__ import annotations

import platform
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ringcomm.comm.device.topology import NvLinks, read_machine
from tests.comm.topology.fake_nvml import (
    NAMES,
    FakeNvml,
    NVMLError_DriverNotLoaded,
    NVMLError_FunctionNotFound,
    NVMLError_NotSupported,
    NVMLError_Unknown,
    recorded,
)
from tests.support import ROOT, fork_server


@pytest.fixture(autouse=True)
def _large_host(monkeypatch):
    # The reader asks NVML for as many CPUs as the machine has; the recorded machines have more.
    monkeypatch.setattr("os.cpu_count", lambda: 256)


@pytest.fixture
def read(monkeypatch):
    """Reads the machine of a recording or a topology through a fake NVML."""

    def through(source, **options):
        topology = recorded(source) if isinstance(source, str) else source
        fake = FakeNvml(topology, **options)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        found = read_machine()
        assert fake.open == 0
        return found

    return through


@pytest.mark.parametrize("name", [name for name in NAMES if name != "no_nvml"])
def test_what_nvml_says_is_what_is_read(read, name):
    expected = replace(recorded(name), machine=platform.node())
    if name == "mig":
        # The reader skips the links of a GPU in MIG mode: a driver may report them as active.
        assert expected.gpus[0].switch.count == 12
    assert read(name) == expected


def test_no_gpu_is_no_error(read):
    assert read("no_nvml").absent == "NVML finds no GPU that it can name"


def test_without_the_python_module(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    found = read_machine()
    assert not found.gpus
    assert "pip install nvidia-ml-py" in found.absent


@pytest.mark.parametrize(
    "error", [NVMLError_DriverNotLoaded("Driver Not Loaded"), OSError("Driver Not Loaded")]
)
def test_nvml_that_does_not_start(monkeypatch, error):
    monkeypatch.setitem(
        sys.modules, "pynvml", FakeNvml(recorded("one_gpu"), errors={"nvmlInit": error})
    )
    found = read_machine()
    assert not found.gpus
    assert found.absent == "NVML does not start: Driver Not Loaded"


def test_nvml_that_does_not_count(read):
    found = read("one_gpu", errors={"nvmlDeviceGetCount": NVMLError_Unknown("Unknown Error")})
    assert "Unknown Error" in found.absent


def test_shutdown_may_fail(monkeypatch):
    fake = FakeNvml(recorded("one_gpu"), errors={"nvmlShutdown": NVMLError_Unknown("gone")})
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    assert len(read_machine().gpus) == 1


def at(answer, wanted):
    """Answers with `answer` if the arguments begin with `wanted`, else as usual."""

    def call(usual, *arguments):
        return answer if arguments[: len(wanted)] == wanted else usual(*arguments)

    return call


QUESTIONS = [name for name in dir(FakeNvml) if name.startswith("nvmlDeviceGet")]
NEEDED = {
    "nvmlDeviceGetCount",
    "nvmlDeviceGetHandleByIndex",
    "nvmlDeviceGetPciInfo",
    "nvmlDeviceGetUUID",
}


@pytest.mark.parametrize("name", ["dgx_1v", "dgx_h100", "mig"])
@pytest.mark.parametrize("question", sorted(set(QUESTIONS) - NEEDED))
def test_one_unanswered_question_leaves_one_blank(read, name, question):
    error = NVMLError_NotSupported("Not Supported")
    unsupported = read(name, errors={question: error})
    assert len(unsupported.gpus) == len(recorded(name).gpus)
    assert unsupported == read(name, lacking=[question])
    assert unsupported == read(name, errors={question: NVMLError_FunctionNotFound("no")})
    for one, other, connection in unsupported.connections():
        known = recorded(name).connection(one, other)
        assert connection.links.count <= known.links.count


@pytest.mark.parametrize("question", sorted(NEEDED - {"nvmlDeviceGetCount"}))
def test_gpus_without_a_name_are_left_out(read, question):
    found = read("pcie_pair", errors={question: NVMLError_Unknown("GPU is lost")})
    assert not found.gpus
    assert any("GPU is lost" in note for note in found.notes)
    assert any("GPU 1 of NVML has no name" in note for note in found.notes)


def test_a_lost_gpu_leaves_the_others(read):
    answers = {"nvmlDeviceGetPciInfo": at(SimpleNamespace(busId=""), (0,))}
    found = read("dgx_1v", answers=answers)
    assert found.gpus == recorded("dgx_1v").gpus[1:]
    assert (
        "2 NVLinks of 0000:0b:00.0 lead to 0000:06:00.0, which is no GPU seen here; not counted"
        in (found.notes)
    )


def test_a_repeated_gpu_is_left_out(read):
    answers = {"nvmlDeviceGetUUID": at("GPU-00000000-0000-0000-0000-000000000000", (1,))}
    found = read("pcie_pair", answers=answers)
    assert [gpu.pci_bus_id for gpu in found.gpus] == ["0000:41:00.0"]


def test_unusual_errors_are_noted(read):
    found = read("dgx_1v", errors={"nvmlDeviceGetMigMode": NVMLError_Unknown("Unknown Error")})
    assert found.notes == ("nvmlDeviceGetMigMode: Unknown Error",)


def test_usual_blanks_are_not(read):
    error = NVMLError_NotSupported("Not Supported")
    assert read("pcie_pair", errors={"nvmlDeviceGetNvLinkState": error}).notes == ()


def test_inactive_links_do_not_count(read):
    # Links 2 and 3 of GPU 0 lead to GPU 3.
    found = read("dgx_1v", answers={"nvmlDeviceGetNvLinkState": at(0, (0, 3))})
    assert found.pair(found.gpus[0], found.gpus[3]).nvlinks == NvLinks(1, "2.0", 25.0)
    assert found.notes == (
        "0000:06:00.0 has 1 NVLinks to 0000:0b:00.0, which has 2 back; 1 are counted",
    )


def test_links_that_cannot_reach_a_peer_do_not_count(read):
    answers = {"nvmlDeviceGetNvLinkCapability": at(0, (0,))}
    found = read("dgx_h100", answers=answers)
    assert [gpu.switch.count for gpu in found.gpus] == [0] + [18] * 7


def test_links_to_a_processor_are_no_links_between_gpus(read):
    npu = 1
    answers = {"nvmlDeviceGetNvLinkRemoteDeviceType": at(npu, (0,))}
    found = read("hgx_a100_4", answers=answers)
    assert found.pair(found.gpus[0], found.gpus[1]).nvlinks.count == 0


def test_links_to_a_device_without_an_address_are_noted(read):
    unknown = 0xFF
    answers = {
        "nvmlDeviceGetNvLinkRemoteDeviceType": at(unknown, (0,)),
        "nvmlDeviceGetNvLinkRemotePciInfo": at(SimpleNamespace(busId=""), (0,)),
    }
    found = read("dgx_h100", answers=answers)
    assert found.gpus[0].switch.count == 0
    assert "18 NVLinks of 0000:1b:00.0 lead to an unnamed device; not counted" in found.notes


def test_a_driver_without_device_types_still_finds_links_between_gpus(read):
    found = read("dgx_1v", lacking=["nvmlDeviceGetNvLinkRemoteDeviceType"])
    assert found.pairs == recorded("dgx_1v").pairs


@pytest.mark.parametrize(
    ("mb_per_s", "gbps"), [(19_200, 19.2), (25_781, 25.0), (0, 25.0)], ids=["slow", "line", "none"]
)
def test_the_slower_of_data_rate_and_line_rate_counts(read, mb_per_s, gbps):
    value = SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=mb_per_s))
    fields = {"nvmlDeviceGetFieldValues": at([value], ())}
    found = read("dgx_1v", answers=fields)
    assert {pair.nvlinks.link_gbps for pair in found.pairs if pair.nvlinks.count} == {gbps}


def test_a_newer_link_has_the_rate_that_the_driver_reports(read):
    newest = {"nvmlDeviceGetNvLinkVersion": at(99, ())}
    found = read("dgx_h100", answers=newest)
    assert found.gpus[0].switch == NvLinks(18, None, 25.781)


def test_a_link_of_which_nothing_is_known_still_counts(read):
    functions = ["nvmlDeviceGetNvLinkVersion", "nvmlDeviceGetFieldValues"]
    assert read("dgx_h100", lacking=functions).gpus[0].switch == NvLinks(18, None, None)


def test_a_driver_that_refuses_peer_access(read):
    known = recorded("pcie_pair")
    pairs = (replace(known.pairs[0], peer_access=False),)
    assert read(replace(known, pairs=pairs)).pairs == pairs


def test_an_affinity_to_several_nodes_is_none(read):
    several = {"nvmlDeviceGetMemoryAffinity": at([0b11], ())}
    assert read("one_gpu", answers=several).gpus[0].numa_node is None


def test_order_of_nvml_does_not_matter(read, monkeypatch):
    topology = recorded("dgx_1v")
    backwards = FakeNvml(topology)
    backwards._gpus = topology.gpus[::-1]
    backwards._links = backwards._links[::-1]
    monkeypatch.setitem(sys.modules, "pynvml", backwards)
    found = read_machine()
    assert found == read(topology)


def test_the_module_is_not_imported_before_it_is_asked():
    code = "import sys, ringcomm.comm.device.topology; print('pynvml' in sys.modules)"
    done = fork_server.run([sys.executable, "-c", code], cwd=ROOT)
    assert done.stdout == "False\n", done.stderr
