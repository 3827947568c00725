# SPDX-License-Identifier: Apache-2.0
"""A lab's nodes are isolated, its links have a rate, and nothing of it is left behind."""

import datetime
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support import CAN_INSTALL, ROOT, fork_server, lab, must_not_skip
from tests.support.covering import in_test_all
from tests.support.fork_server import Namespaces
from tests.support.lab import Lab, LabError, NodePopen, burst_bytes
from tests.support.ranks import RanksFailed

SHAPE = (2, 2)
GBPS = 0.2
SENT_BYTES = 4 << 20
# Headers of Ethernet, IP and TCP with options take 66 bytes per 1448 bytes of data at most. The
# receiver acknowledges with packets of 66 bytes, at most one per packet of the sender.
MOST_HEADERS = 66 / 1448
# Both token buckets, one at each end of the link, are full at first; the rest passes at the rate.
LEAST_S = (SENT_BYTES - 2 * burst_bytes(GBPS)) * 8 / (GBPS * 1e9)
LIMIT = datetime.timedelta(seconds=60)

# A process that makes a lab with ranks, prints the ids of its processes, and waits.
MAKES = """
import time
from tests.support.lab import Lab
from tests.support.test_lab import stranded
with Lab(2) as lab:
    ranks = lab.ranks((1, 1))
    ranks.run("os.getpid")
    ranks.start(stranded)
    print(*lab.holders, *ranks.pids, flush=True)
    {end}
"""


@pytest.fixture(scope="module")
def two_nodes():
    lab.require()
    with Lab(2, gbps=GBPS) as made:
        yield made


def test_ci_does_not_pass_without_the_lab():
    if must_not_skip(os.environ, CAN_INSTALL):
        assert not lab.lacking(), lab.refusal()


@pytest.mark.parametrize("must_not", [False, True])
def test_where_tools_lack(monkeypatch, must_not):
    monkeypatch.setattr(lab, "lacking", lambda: ("tc",))
    monkeypatch.setattr(lab, "refusal", lambda: "not installed: tc")
    monkeypatch.setattr(lab, "must_not_skip", lambda *_: must_not)
    with pytest.raises((pytest.fail.Exception, pytest.skip.Exception), match="tc") as ended:
        lab.require()
    assert ended.type is (pytest.fail.Exception if must_not else pytest.skip.Exception)


@pytest.mark.parametrize("arguments", [{"nodes": 0}, {"nodes": 17}, {"gbps": 0}, {"gbps": 1000}])
def test_bounds(arguments):
    with pytest.raises(ValueError, match="got"):
        Lab(**arguments)


# ---- isolation ----------------------------------------------------------------------------------


def seen_by_a_rank():
    kinds = ("mnt", "uts", "ipc", "pid", "net")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    return {
        "numbers": [int(os.environ[name]) for name in names],
        "namespaces": [os.readlink(f"/proc/self/ns/{kind}") for kind in kinds],
        "pid": os.getpid(),
        "self": os.readlink("/proc/self"),
        "host": socket.gethostname(),
        "address": socket.gethostbyname(socket.gethostname()),
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text(),
        "interfaces": sorted(name for _, name in socket.if_nameindex()),
    }


def test_ranks_have_places_on_nodes_of_their_own(two_nodes):
    seen = two_nodes.run(seen_by_a_rank, ranks_per_node=SHAPE)
    assert [each["numbers"] for each in seen] == [
        [rank, 4, rank % 2, 2, rank // 2] for rank in range(4)
    ]
    assert [each["host"] for each in seen] == ["node0", "node0", "node1", "node1"]
    assert [each["address"] for each in seen] == [two_nodes.address(rank // 2) for rank in range(4)]
    for key in ("namespaces", "boot"):
        assert seen[0][key] == seen[1][key] and seen[2][key] == seen[3][key]
    assert set(seen[0]["namespaces"]).isdisjoint(seen[2]["namespaces"])
    assert os.readlink("/proc/self/ns/net") not in seen[0]["namespaces"]
    assert seen[0]["boot"] != seen[2]["boot"]
    assert all(each["interfaces"] == ["eth0", "lo"] for each in seen)
    assert all(each["self"] == str(each["pid"]) for each in seen)


def test_a_number_of_a_process_means_another_one_on_another_node(two_nodes):
    for node in (0, 1):
        mine = Path("/dev/shm/mine")
        shown = f"echo {node} > {mine}; exec 7< {mine}; cat {mine}; readlink /proc/1/ns/pid"
        done = two_nodes.command(node, ["sh", "-c", shown])
        assert done.stdout.splitlines() == [str(node), two_nodes.namespace(node, "pid")]
    assert two_nodes.namespace(0, "pid") != two_nodes.namespace(1, "pid")
    assert not mine.exists()  # not in the tests' own /dev/shm either


def test_a_process_is_not_seen_from_another_node(two_nodes):
    wait = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    command = [sys.executable, "-c", wait]
    with two_nodes.popen(0, command, {"MARK": "here"}, stdout=subprocess.PIPE) as process:
        try:
            pid = int(process.stdout.readline())
            looks = ["sh", "-c", f"readlink /proc/{pid}/fd/1; ls /proc | grep -c '^[0-9]'"]
            same, other = (two_nodes.command(node, looks).stdout.split() for node in (0, 1))
            assert same[0] == os.readlink(f"/proc/{process.pid}/fd/1")
            assert other[0] != same[0]
        finally:
            process.kill()
    assert process.returncode == -signal.SIGKILL


# ---- started commands ---------------------------------------------------------------------------


def fails_on(rank):
    print("said before", file=sys.stderr)
    if int(os.environ["RANK"]) == rank:
        raise ValueError("on purpose")
    return rank


def test_a_failure_shows_the_rank_and_its_output(two_nodes):
    with pytest.raises(RanksFailed, match=r"(?s)node 1, local rank 0.*on purpose.*said before"):
        two_nodes.run(fails_on, 2, ranks_per_node=SHAPE)
    assert two_nodes.run(fails_on, 7, ranks_per_node=SHAPE) == [7] * 4


def test_one_that_does_not_answer_is_given_up(two_nodes):
    with pytest.raises(RanksFailed, match="did not answer in time"):
        two_nodes.run("time.sleep", 600, ranks_per_node=(1, 0), timeout_s=0.1)


def test_commands_of_any_kind(two_nodes):
    done = two_nodes.command(1, ["sh", "-c", "hostname; echo $MASTER_ADDR >&2; exit 3"])
    assert (done.returncode, done.stdout, done.stderr) == (3, "node1\n", "10.77.0.1\n")
    done = two_nodes.command(1, ["env"], env={"MORE": "words"})
    assert "MORE=words" in done.stdout.splitlines()
    assert two_nodes.command(0, ["no-such-tool"]).returncode == 127
    python = [sys.executable, "-c", "import sys; print('torch' in sys.modules, sys.argv)", "x"]
    assert two_nodes.command(0, python).stdout == "True ['-c', 'x']\n"
    anew = two_nodes.command(0, [sys.executable, "-S", *python[1:]])
    assert anew.stdout == "False ['-c', 'x']\n"


def test_what_cannot_be_started_is_said(two_nodes):
    with pytest.raises(ValueError, match="cannot do what is asked"):
        two_nodes.popen(0, ["true"], preexec_fn=os.getpid)
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], stdout=-1)
    with pytest.raises(ProcessLookupError, match="no process in Namespaces"):
        NodePopen(Namespaces(lab.NODE_KINDS, int(ended.stdout)), ["true"])
    with pytest.raises(ValueError, match="2 nodes, got"):
        two_nodes.ranks((1, 1, 1))


def test_programs_of_a_program_are_in_its_node(two_nodes):
    inner = "import socket; print(socket.gethostname(), 'torch' in __import__('sys').modules)"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    assert two_nodes.command(1, [sys.executable, "-c", outer]).stdout == "node1 True\n"


# ---- the network --------------------------------------------------------------------------------


def transfer(size):
    """Rank 0 sends ``size`` to rank 1; returns the seconds until everything has arrived."""
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if os.environ["RANK"] == "0":
        with socket.create_server(address) as server:
            connection, _ = server.accept()
            with connection:
                connection.settimeout(60)
                start = time.monotonic()
                connection.sendall(bytes(size))
                connection.recv(1)
                return time.monotonic() - start
    deadline = time.monotonic() + 60
    while True:
        try:
            connection = socket.create_connection(address, timeout=60)
            break
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    with connection:
        left = size
        while left:
            left -= len(connection.recv(min(left, 1 << 16)))
        connection.sendall(b"!")
    return 0.0


def test_a_link_is_no_faster_than_its_rate_and_counts_what_it_sends(two_nodes):
    two_nodes.mark()
    took_s, _ = two_nodes.run(transfer, SENT_BYTES, ranks_per_node=(1, 1))
    sent, returned = two_nodes.wire_bytes()
    assert SENT_BYTES < sent < SENT_BYTES * (1 + MOST_HEADERS) + 65536
    assert returned < SENT_BYTES * MOST_HEADERS + 65536
    assert took_s >= LEAST_S


def test_without_a_limit_it_can_be_faster():
    """The negative control of the rate: without a limit at least one try takes less time."""
    lab.require()
    with Lab(2) as free:
        tries = (free.run(transfer, SENT_BYTES, ranks_per_node=(1, 1))[0] for _ in range(50))
        assert any(took_s < LEAST_S for took_s in tries)


def test_nothing_crosses_a_cut_link(two_nodes):
    two_nodes.cut(1)
    with pytest.raises(RanksFailed, match="did not answer in time"):
        two_nodes.run(transfer, 1, ranks_per_node=(1, 1), timeout_s=0.5)
    two_nodes.mend(1)
    assert len(two_nodes.run(transfer, 1, ranks_per_node=(1, 1))) == 2


def gloo_sum():
    """Sums over a Gloo group that is not the default group."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, rank == 0, LIMIT
    )
    group: Any = dist.ProcessGroupGloo(store, rank, world, LIMIT)
    tensor = torch.full((5,), rank + 1.0)
    group.allreduce([tensor]).wait()
    return tensor.tolist()


def test_gloo_connects_the_nodes(two_nodes):
    assert two_nodes.run(gloo_sum, ranks_per_node=SHAPE) == [[10.0] * 5] * 4


# ---- ends ---------------------------------------------------------------------------------------


def stranded():
    """Starts a child in a session of its own; both wait for a signal."""
    child = os.fork()
    if child == 0:
        os.setsid()
    signal.pause()


def test_a_killed_rank_and_a_killed_node(two_nodes):
    ranks = two_nodes.ranks((1, 2))
    ranks.start(stranded)
    two_nodes.kill(1, 1)
    ranks.start("os.getpid")
    assert len(ranks.outcomes()) == 3
    ranks.start(stranded)
    two_nodes.kill(1)
    outcomes = ranks.outcomes(2.0)  # rank 0 does not end
    assert [outcome.exitcode for outcome in outcomes] == [None, -9, -9]
    assert "ended without an answer" in outcomes[2].describe()
    left = two_nodes.command(1, ["sh", "-c", "ls /proc | grep -c '^[0-9]'"]).stdout
    assert int(left) <= 4  # the holder, the shell and its two commands
    assert len(two_nodes.run("os.getpid", ranks_per_node=(1, 2))) == 3


def namespaces_of_all():
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            found.add(os.readlink(process / "ns/net"))
        except OSError:  # it has ended
            continue
    return found


@pytest.mark.parametrize(
    ("end", "number"),
    [
        ("time.sleep(600)", signal.SIGKILL),
        ("raise RuntimeError('on purpose')", None),
        *in_test_all(("time.sleep(600)", signal.SIGTERM), ("time.sleep(600)", signal.SIGINT)),
    ],
    ids=str,
)
def test_nothing_is_left(end, number):
    lab.require()
    interfaces = socket.if_nameindex()
    command = [sys.executable, "-c", MAKES.format(end=end)]
    pipe = subprocess.PIPE
    with fork_server.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe) as process:
        line = process.stdout.readline()
        pids = [int(word) for word in line.split()]
        assert len(pids) == 3 + 2, process.communicate()[1].decode()
        networks = set()
        if number is not None:
            networks = {os.readlink(f"/proc/{pid}/ns/net") for pid in pids}
            assert len(networks) == 3 and networks <= namespaces_of_all()
            process.send_signal(number)
        process.communicate(timeout=60)
    deadline = time.monotonic() + 60
    while networks & namespaces_of_all() or any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, pids
        time.sleep(0.02)
    assert socket.if_nameindex() == interfaces


def test_a_lab_that_cannot_be_made_leaves_nothing(monkeypatch):
    lab.require()
    networks = set()

    def unknown_limit(self, interface):
        networks.add(self.namespace(0, "net"))
        return f"qdisc add dev {interface} root no_such_thing"

    monkeypatch.setattr(Lab, "_limit", unknown_limit)
    with pytest.raises(LabError, match="no_such_thing"):
        Lab(1, gbps=1)
    assert len(networks) == 1 and networks.isdisjoint(namespaces_of_all())
