# SPDX-License-Identifier: Apache-2.0
"""The address where ranks of several nodes meet, according to their launchers' variables."""

import socket
from itertools import product

import pytest
from torch.distributed import TCPStore

from ringcomm import ArgumentError, RendezvousError, UnsupportedError
from ringcomm.rendezvous import launchers as addresses
from ringcomm.rendezvous.launchers import (
    MasterAddress,
    hosts_of,
    port_of,
    read_environment,
    store_at,
    tasks_on,
)

# The variables that srun of Slurm 22.05, mpirun of Open MPI 4.1 and mpiexec of MPICH 5.0 set on 2
# nodes of 2 ranks, as far as ringcomm reads them.
SLURM = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "3",
    "SLURM_JOB_NODELIST": "node[0-3]",
    "SLURM_STEP_NODELIST": "node[2-3]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "2",
    "SLURM_NODEID": "1",
    "SLURMD_NODENAME": "node3",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_ess_base_jobid": "1562902529",
    "OMPI_MCA_orte_hnp_uri": "1562902528.0;tcp://10.77.0.1:41493",
    "OMPI_MCA_orte_local_daemon_uri": "1562902528.1;tcp://10.77.0.2:51103",
}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"}
RANK = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
SRUN_PMI2 = {**SLURM, "PMI_RANK": "2", "PMI_SIZE": "4"}


# ---- lists of hosts -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node[01-03,7],gpu5", "node01 node02 node03 node7 gpu5"),
        ("a", "a"),
        ("a,b-1.example.org", "a b-1.example.org"),
        ("n[9-11]", "n9 n10 n11"),
        ("n[09-11]", "n09 n10 n11"),
        ("n[098-101]-ib", "n098-ib n099-ib n100-ib n101-ib"),
        ("r[1-2]n[3,05]", "r1n3 r1n05 r2n3 r2n05"),
        ("n[3,1],n2", "n3 n1 n2"),
        ("n[00000000000000000007]", "n00000000000000000007"),
    ],
)
def test_hosts(text, hosts):
    assert hosts_of(text) == hosts.split()


def test_every_small_list_of_hosts():
    """All lists of up to two entries; an entry is a name, or up to two ranges between 0 and 11."""
    ranges = [(first, last) for first in (0, 8, 9) for last in (9, 11)]
    brackets = [[one] for one in ranges] + [[one, other] for one in ranges for other in ranges]
    entries = [("x", ["x"])]
    for width, bracket, tail in product((1, 2), brackets, ("", "t")):
        text = ",".join(f"{first:0{width}}-{last}" for first, last in bracket)
        numbers = [number for first, last in bracket for number in range(first, last + 1)]
        entries.append((f"n[{text}]{tail}", [f"n{number:0{width}}{tail}" for number in numbers]))
    for text, hosts in entries:
        assert hosts_of(text) == hosts
    for (one, ones), (other, others) in product(entries[::5], entries[::3]):
        assert hosts_of(f"{one},{other}") == ones + others


@pytest.mark.parametrize(
    "text",
    [
        *("", ",", "a,", ",a", "a b", "a[", "a]", "a[]", "a[1", "a1]", "a[1-]", "a[-1]", "a[1,]"),
        *("a[3-1]", "a[1-2-3]", "a[x]", "a[[1]]", "a[1],,b", "a[0-99999999]", "a[\u0661]"),
        *("a[0-9999][0-9999]", "a[0-40000],b[0-40000]", "a[" + "1" * 21 + "]"),
    ],
)
def test_what_is_no_list_of_hosts(text):
    with pytest.raises(ArgumentError, match=r"expected a list of hosts as Slurm writes it"):
        hosts_of(text)


def test_every_small_list_of_tasks():
    for counts in product(((1, 1), (2, 3), (3, 2)), repeat=3):
        texts = [f"{tasks}(x{nodes})" if nodes > 1 else f"{tasks}" for tasks, nodes in counts]
        wanted = [tasks for tasks, nodes in counts for _ in range(nodes)]
        text = ",".join(texts)
        assert [tasks_on(text, node) for node in range(len(wanted))] == wanted
        with pytest.raises(ArgumentError, match="tasks of node"):
            tasks_on(text, len(wanted))


@pytest.mark.parametrize("text", ["", "x", "2(x)", "2(3)", "(x2)", "-1", "2,", "2 (x2)"])
def test_what_is_no_list_of_tasks(text):
    with pytest.raises(ArgumentError, match="as Slurm writes them"):
        tasks_on(text, 1)


# ---- addresses ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("launcher", "variables", "host", "port", "source"),
    [
        ("Slurm", SLURM, "node2", 20375, "the first host of SLURM_STEP_NODELIST=node[2-3]"),
        ("Slurm", SRUN_PMI2, "node2", 20375, "the first host of SLURM_STEP_NODELIST=node[2-3]"),
        (
            "Open MPI",
            OPEN_MPI,
            "10.77.0.1",
            20000 + (31 * 23848 + 1) % 10000,
            "the host of mpirun by OMPI_MCA_orte_hnp_uri=1562902528.0;tcp://10.77.0.1:41493",
        ),
    ],
)
def test_derived(launcher, variables, host, port, source):
    launched = read_environment(variables)
    assert (launched.launcher, launched.rank, launched.world_size) == (launcher, 2, 4)
    assert (launched.local_world_size, launched.is_here) == (2, False)
    assert launched.address == MasterAddress(host, port, source, is_here=False)
    other = read_environment({**variables, "RINGCOMM_MASTER_PORT": "777"})
    assert other.address == MasterAddress(host, 777, source, is_here=False)


def test_on_the_first_host():
    for variables, name, value in (
        (SLURM, "SLURMD_NODENAME", "node2"),
        (OPEN_MPI, "OMPI_MCA_orte_local_daemon_uri", OPEN_MPI["OMPI_MCA_orte_hnp_uri"]),
    ):
        address = read_environment({**variables, name: value}).address
        assert address is not None and address.is_here


def test_without_a_step_the_list_is_the_jobs():
    variables = {name: value for name, value in SLURM.items() if "STEP_NODELIST" not in name}
    address = read_environment(variables).address
    assert address is not None and address.source.endswith("SLURM_JOB_NODELIST=node[0-3]")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (MPICH, r"only 2 of the ranks .* mpiexec -genv MASTER_ADDR HOST -genv MASTER_PORT 29500"),
        (RANK, r"only 2 of the ranks .* Set both on all ranks"),
        (
            # One of several addresses may belong to a bridge.
            {**OPEN_MPI, "OMPI_MCA_orte_hnp_uri": "7.0;tcp://172.17.0.1,10.77.0.1:41493"},
            r"only 2 of the ranks .* mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500",
        ),
        ({**OPEN_MPI, "OMPI_MCA_orte_hnp_uri": ""}, ".* mpirun -x MASTER_ADDR=HOST"),
        (
            {"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_NNODES": "2"},
            r"only 1 of the ranks .* Set both on all ranks",
        ),
    ],
)
def test_nothing_is_guessed(variables, message):
    with pytest.raises(UnsupportedError, match=rf"on rank 2 of 4: {message}"):
        read_environment(variables).store(1.0)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({**SLURM, "SLURM_STEP_NODELIST": "node[3-1]"}, "SLURM_STEP_NODELIST: expected a list"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2"}, "tasks of node 1"),
        ({**SLURM, "SLURM_JOB_ID": "x"}, "SLURM_JOB_ID: expected an integer"),
        ({**SLURM, "RINGCOMM_MASTER_PORT": "70000"}, "RINGCOMM_MASTER_PORT: expected a port"),
        ({**SLURM, "MASTER_ADDR": "node2"}, "MASTER_ADDR=node2 is set without the other"),
        ({**MPICH, "MASTER_PORT": "29500"}, "MASTER_PORT=29500 is set without the other"),
    ],
)
def test_what_cannot_be_read(variables, message):
    with pytest.raises(ArgumentError, match=message):
        read_environment(variables)


def test_ports_stay_in_their_range_and_differ_between_neighbours():
    ports = {port_of(job, step, {}) for job in range(1000, 1020) for step in range(31)}
    assert len(ports) == 20 * 31
    assert min(ports) >= 20000 and max(ports) < 30000
    assert 20000 <= port_of(10**19, 10**19, {}) < 30000


# ---- the store ----------------------------------------------------------------------------------


def _address(port: int, is_here: bool = True) -> MasterAddress:
    return MasterAddress("127.0.0.1", port, "a test says so", is_here)


def test_rank_0_on_another_host_says_whom_the_others_call():
    with pytest.raises(RendezvousError, match=r"on rank 0 of 4: .*127\.0\.0\.1:7 \(a test says so"):
        store_at(_address(7, is_here=False), "Slurm", 0, 4, 1.0)


def test_nobody_answers():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = _address(unused.getsockname()[1])
        with pytest.raises(RendezvousError) as raised:
            store_at(address, "Slurm", 1, 4, 1.0)
        for words in (f"answer at 127.0.0.1:{address.port} (a test says so", "MASTER_ADDR", "1 s"):
            assert words in str(raised.value)


def test_the_port_is_taken():
    raises = pytest.raises(RendezvousError, match=r"rank 0 cannot serve a store .*MASTER_PORT")
    with socket.create_server(("127.0.0.1", 0)) as taken, raises:
        store_at(_address(taken.getsockname()[1]), "Slurm", 0, 4, 1.0)


def test_a_store_serves_for_all_communicators_of_a_process(monkeypatch):
    monkeypatch.setattr(addresses, "_stores", {})
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = _address(free.getsockname()[1])
    store = store_at(address, "Slurm", 0, 1, 10.0)
    assert isinstance(store, TCPStore)
    assert store_at(address, "Slurm", 0, 1, 10.0) is store
