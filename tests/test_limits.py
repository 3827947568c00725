# SPDX-License-Identifier: Apache-2.0
"""The limits that a process has, read from cgroup files with the contents of real systems."""

import os
import re
import warnings

import pytest

from ringcomm import process as limits
from ringcomm import process as variables
from ringcomm.cli import main
from ringcomm.memory import host_heap

CGROUP2 = "31 24 0:27 {root} {at} rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
VERSION_1 = "36 31 0:31 {root} {at} rw,nosuid - cgroup cgroup rw,{controllers}\n"
GIB = 1 << 30


class Process:
    """A folder with the files of /proc/PID, and a folder with the files of /sys/fs/cgroup."""

    def __init__(self, folder):
        self.proc, self.groups = folder / "proc", folder / "cg roup"
        self.proc.mkdir()
        self.groups.mkdir()

    def with_mounts(self, membership, mounts):
        (self.proc / "cgroup").write_text(membership)
        (self.proc / "mountinfo").write_text("22 1 8:1 / / rw - ext4 /dev/sda1 rw\n" + mounts)
        return self.proc

    def write(self, group, **texts):
        folder = self.groups / group
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name.replace("__", ".")).write_text(f"{text}\n")

    @property
    def at(self):
        return str(self.groups).replace(" ", "\\040")


@pytest.fixture
def process(tmp_path):
    return Process(tmp_path)


@pytest.mark.parametrize("tight", ["", "slice", "slice/job"])
def test_the_least_limit_of_a_hierarchy_counts(process, tight):
    proc = process.with_mounts("0::/slice/job\n", CGROUP2.format(root="/", at=process.at))
    for group in ("slice", "slice/job"):
        process.write(group, memory__max="max", cpu__max="max 100000")
    assert limits.memory_limit_bytes(proc) is None
    assert limits.available_cores(proc) == len(os.sched_getaffinity(0))
    process.write("slice", memory__max=9 * GIB)
    process.write(tight, memory__max=GIB, cpu__max="100000 100000")
    assert limits.memory_limit_bytes(proc) == GIB
    assert limits.available_cores(proc) == 1


@pytest.mark.parametrize("tight", ["", "slurm", "slurm/job_7"])
def test_version_1_has_a_hierarchy_for_each_controller(process, tight):
    mounts = "".join(
        VERSION_1.format(root="/", at=f"{process.at}/{name}", controllers=name)
        for name in ("memory", "cpu,cpuacct")
    )
    membership = "9:memory:/slurm/job_7\n8:devices:/\n4:cpu,cpuacct:/slurm/job_7\n"
    proc = process.with_mounts(membership, mounts)
    process.write("memory/slurm/job_7", memory__limit_in_bytes=9223372036854771712)
    process.write("cpu,cpuacct/slurm/job_7", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    assert limits.memory_limit_bytes(proc) is None
    assert limits.available_cores(proc) == len(os.sched_getaffinity(0))
    process.write(f"memory/{tight}", memory__limit_in_bytes=GIB)
    process.write(f"cpu,cpuacct/{tight}", cpu__cfs_quota_us=50000, cpu__cfs_period_us=100000)
    assert limits.memory_limit_bytes(proc) == GIB
    assert limits.available_cores(proc) == 1


@pytest.mark.parametrize(
    ("membership", "root"),
    [
        ("0::/docker/abc/inner\n", "/docker/abc"),  # a container without its own cgroup namespace
        ("0::/inner\n", "/"),  # a container with a cgroup namespace
        ("0::/../elsewhere\n", "/"),  # a process that was moved there from outside
    ],
)
def test_a_container_sees_its_part_of_the_hierarchy(process, membership, root):
    proc = process.with_mounts(membership, CGROUP2.format(root=root, at=process.at))
    process.write("", memory__max=2 * GIB)
    process.write("inner", memory__max=3 * GIB)
    process.write("docker/abc", memory__max=GIB)  # another container's, of the same name
    assert limits.memory_limit_bytes(proc) == 2 * GIB


def test_a_system_without_control_groups_has_no_limit(process, tmp_path):
    assert limits.memory_limit_bytes(tmp_path / "none") is None
    assert limits.memory_limit_bytes(process.with_mounts("0::/a\n", "")) is None
    junk = process.with_mounts(
        "0::/a\n", "junk\n1 2 - x\n" + CGROUP2.format(root="/", at=process.at)
    )
    process.write("a", memory__max="12 apples")
    assert limits.memory_limit_bytes(junk) is None


def test_this_process_has_readable_control_groups():
    for controller in ("memory", "cpu"):
        assert all(folder.is_dir() for folder in limits.control_groups(controller))


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("RINGCOMM_HEAP_BYTE", "Did you mean RINGCOMM_HEAP_BYTES?"),
        ("RINGCOMM_TRACEDIR", "Did you mean RINGCOMM_TRACE_DIR?"),
        ("RINGCOMM_heap_bytes", "Did you mean RINGCOMM_HEAP_BYTES?"),
        ("RINGCOMM_Trace_Dir", "Did you mean RINGCOMM_TRACE_DIR?"),
        ("RINGCOMM_IFNAME", "Did you mean RINGCOMM_SOCKET_IFNAME?"),
        ("RINGCOMM_9", "Known are RINGCOMM_BACKEND, "),
    ],
)
def test_an_unknown_variable_is_warned_of_once(monkeypatch, name, advice):
    monkeypatch.setattr(variables, "_warned", set())
    monkeypatch.setenv(name, "1")
    for known in variables.KNOWN:
        monkeypatch.setenv(known, "1")
    with pytest.warns(RuntimeWarning, match=f"variable {name}, so it has no effect") as warned:
        variables.warn_of_unknown()
    assert len(warned) == 1
    assert advice in str(warned[0].message)
    assert ("Known are" in str(warned[0].message)) == ("Known are" in advice)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        variables.warn_of_unknown()


def test_variables_for_users_are_listed_if_no_name_is_similar(monkeypatch):
    monkeypatch.setattr(variables, "_warned", set())
    monkeypatch.setenv("RINGCOMM_9", "1")
    with pytest.warns(RuntimeWarning) as warned:
        variables.warn_of_unknown()
    listed = set(re.findall(r"RINGCOMM_[A-Z_]+", str(warned[0].message)))
    assert listed == variables.USERS < variables.KNOWN


@pytest.mark.parametrize(("local_rank", "count"), [(None, 1), ("0", 1), ("1", 0)])
def test_only_the_first_rank_of_a_node_warns(monkeypatch, local_rank, count):
    monkeypatch.setattr(variables, "_warned", set())
    monkeypatch.setenv("RINGCOMM_HEAP_BYTE", "1")
    if local_rank is None:
        monkeypatch.delenv("LOCAL_RANK", raising=False)
    else:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        variables.warn_of_unknown()
    assert len(warned) == count


def test_the_warning_points_at_the_line_that_called_ringcomm(monkeypatch):
    monkeypatch.setattr(variables, "_warned", set())
    monkeypatch.setenv("RINGCOMM_HEAP_BYTE", "1")
    with pytest.warns(RuntimeWarning, match="HEAP_BYTE,") as warned:
        host_heap._wanted_heap_bytes(None, 2)
    assert warned[0].filename == __file__


def test_a_command_prints_the_warning_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(variables, "_warned", set())
    monkeypatch.setenv("RINGCOMM_HEAP_BYTE", "1")
    assert main(["estimate", "memory", "--params", "1M", "--world", "2"]) == 0
    assert capsys.readouterr().err == (
        "ringcomm: warning: no environment variable RINGCOMM_HEAP_BYTE, so it has no effect. Did "
        "you mean RINGCOMM_HEAP_BYTES?\n"
    )
