# SPDX-License-Identifier: Apache-2.0
"""Several nodes on one machine: network namespaces, joined by a bridge, with ranks in them.

A node has its own network, processes, System V and POSIX shared memory, host name, mounts and boot
id; nodes share files, as clusters do by a shared file system. Each node's interface ``eth0`` leads
to a port of a bridge in a further namespace, so the host's network is not changed. A token bucket
(``tbf``) at each end of the link limits its rate in each direction.

A node exists as long as its holder, the first process of its process namespace. By the kernel's
PR_SET_PDEATHSIG the holder dies with the process that made the lab, however that process ends. With
the holder die all processes of the node, and then its namespaces, which have no names on disk.

``fork_server`` starts the processes of a node (with torch imported) as children of the process that
made the lab. A pool of ranks stays up and runs one function after another; other commands, such as
launchers, run beside it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import pickle
import pkgutil
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ringcomm.launch import end_with, rank_variables
from tests.support import CAN_INSTALL, ROOT, must_not_skip
from tests.support.fork_server import Namespaces, Popen
from tests.support.ranks import Outcome, answer_of, gather, values_of

Check = Callable[..., Any] | str

INTERFACE = "eth0"
MAX_NODES = 16
SLOWEST_GBPS, FASTEST_GBPS = 0.001, 100.0
QUEUE_MS = 50  # longest wait of a packet for the link; then packets are dropped
FIRST_PORT = 29500
START_S, END_S = 60.0, 60.0
# After one rank has failed, the others most likely wait for its part of a call.
GRACE_S = 3.0
SHOWN_CHARACTERS = 4000
STACKS_S = 0.3  # enough time for a process to write the stacks of its threads

_NEW_MOUNTS, _NEW_HOST_NAME, _NEW_IPC = 0x00020000, 0x04000000, 0x08000000
_NEW_PROCESSES, _NEW_NETWORK = 0x20000000, 0x40000000
PROCESS_KINDS = _NEW_MOUNTS | _NEW_PROCESSES
NODE_KINDS = _NEW_MOUNTS | _NEW_HOST_NAME | _NEW_IPC | _NEW_PROCESSES | _NEW_NETWORK
_BIND, _RECURSIVE, _PRIVATE = 0x1000, 0x4000, 0x40000

TOOLS = ("ip", "tc", "unshare")
# Tries everything that a lab needs from the kernel, in namespaces that end with the command.
PROBE = """
ip link add bridge0 type bridge
ip link add port type veth peer name eth0
tc qdisc add dev port root tbf rate 1gbit burst 128kb latency 50ms
"""


class LabError(RuntimeError):
    """A lab could not be made, changed or closed."""


@cache
def lacking() -> tuple[str, ...]:
    """Returns the missing tools that a lab needs."""
    return tuple(tool for tool in TOOLS if shutil.which(tool) is None)


@cache
def refusal() -> str:
    """Returns why this machine cannot run a lab, or "" if it can."""
    if os.geteuid() != 0:
        return "a lab of several nodes needs root"
    if lacking():
        return f"not installed: {', '.join(lacking())} (apt-get install iproute2 util-linux)"
    kinds = ("--net", "--pid", "--ipc", "--uts", "--mount", "--fork")
    done = subprocess.run(
        ["unshare", *kinds, "sh", "-ec", PROBE], capture_output=True, text=True, timeout=START_S
    )
    return f"the kernel refuses: {done.stderr.strip()}" if done.returncode else ""


def require() -> None:
    """Skips a test if no lab can be made; fails it if CI could have installed the tools."""
    import pytest  # only here: ranks import this module, too

    if lacking() and must_not_skip(os.environ, CAN_INSTALL):
        pytest.fail(refusal())
    if refusal():
        pytest.skip(refusal())


def burst_bytes(gbps: float) -> int:
    """Returns how many bytes an idle link lets pass at once: those of a millisecond.

    It is at least two packets of the largest size, because the bucket would drop larger ones.
    """
    return max(2 * 65536, round(gbps * 1e9 / 8 / 1000))


class NodePopen(Popen):
    """``subprocess.Popen`` of any command in namespaces, such as those of a node."""

    def __init__(self, namespaces: Namespaces, command: Sequence[str], **how: Any) -> None:
        self.namespaces = namespaces
        super().__init__(command, **how)


class Lab:
    """Nodes that exist until the context ends.

    Args:
        nodes: how many, up to 16.
        gbps: the rate of each node's link in each direction, in 10^9 bits per second with all
            headers; None: unlimited.
        mtu: of the links, in bytes.

    Raises:
        LabError: the kernel or a tool refuses; the part that exists is taken down.
        ValueError: an argument is out of bounds.
    """

    def __init__(self, nodes: int = 2, gbps: float | None = None, mtu: int = 1500) -> None:
        if not 1 <= nodes <= MAX_NODES:
            raise ValueError(f"Lab: 1 to {MAX_NODES} nodes, got {nodes}")
        if gbps is not None and not SLOWEST_GBPS <= gbps <= FASTEST_GBPS:
            raise ValueError(f"Lab: {SLOWEST_GBPS} to {FASTEST_GBPS} Gbit/s, got {gbps}")
        self.nodes, self.gbps, self.mtu = nodes, gbps, mtu
        self._port = FIRST_PORT
        self._started: list[NodePopen] = []
        self._pools: dict[tuple[int, ...], LabRanks] = {}
        self._marks = [0] * nodes
        self._holders: list[NodePopen] = []
        try:
            self._hold()
            self._wire()
        except BaseException:
            self.close()
            raise
        self.mark()

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- nodes and the network ------------------------------------------------------------------

    @property
    def _switch(self) -> NodePopen:
        return self._holders[self.nodes]

    def address(self, node: int) -> str:
        """The IPv4 address of a node, which all others reach; its host name is ``node<k>``."""
        return f"10.77.0.{node + 1}"

    @property
    def holders(self) -> list[int]:
        """The ids of the processes that hold the nodes and, last, the bridge."""
        return [holder.pid for holder in self._holders]

    def namespace(self, node: int, kind: str) -> str:
        """The name of a node's namespace, as in /proc; ``kind`` is "net", "pid" and so on."""
        return os.readlink(f"/proc/{self._holders[node].pid}/ns/{kind}")

    def _hold(self) -> None:
        """Starts a process that holds each node, and one for the bridge."""
        names = [f"node{node}" for node in range(self.nodes)]
        hosts = "".join(f"{self.address(node)} {name}\n" for node, name in enumerate(names))
        for name in (*names, "switch"):
            words = ["-m", "tests.support.lab", "hold", name, str(uuid.uuid4()), hosts]
            self._holders.append(
                NodePopen(
                    Namespaces(NODE_KINDS),
                    [sys.executable, *words],
                    cwd=ROOT,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                )
            )
        deadline = time.monotonic() + START_S
        for name, holder in zip((*names, "switch"), self._holders, strict=True):
            output: Any = holder.stdout
            left = max(deadline - time.monotonic(), 0)
            line = output.readline() if select.select([output], [], [], left)[0] else b"no answer"
            if line != b"ready\n":
                holder.kill()
                raise LabError(f"{name}: {(line + output.read()).decode()}")

    def _wire(self) -> None:
        """Joins the nodes by a bridge, and limits the rates of the links."""
        links = ["link set lo up", "link add bridge0 type bridge mcast_snooping 0"]
        links += ["link set bridge0 addrgenmode none", "link set bridge0 up"]
        limits = []
        for node in range(self.nodes):
            port, pid = f"node{node}", self._holders[node].pid
            links += [
                f"link add {port} mtu {self.mtu} type veth"
                f" peer name {INTERFACE} mtu {self.mtu} netns {pid}",
                f"link set {port} addrgenmode none",  # no traffic other than the ranks'
                f"link set {port} master bridge0",
                f"link set {port} up",
            ]
            limits.append(self._limit(port))
        self._tool(self._switch, "ip", links)
        for node in range(self.nodes):
            self._tool(
                self._holders[node],
                "ip",
                [
                    "link set lo up",
                    f"link set {INTERFACE} addrgenmode none",
                    f"address add {self.address(node)}/24 dev {INTERFACE}",
                    f"link set {INTERFACE} up",
                ],
            )
            if self.gbps is not None:
                self._tool(self._holders[node], "tc", [self._limit(INTERFACE)])
        if self.gbps is not None:
            self._tool(self._switch, "tc", limits)

    def _limit(self, interface: str) -> str:
        rate = self.gbps or FASTEST_GBPS
        return (
            f"qdisc add dev {interface} root tbf rate {round(rate * 1e9)}bit"
            f" burst {burst_bytes(rate)} latency {QUEUE_MS}ms"
        )

    def _tool(self, holder: NodePopen, tool: str, lines: Sequence[str]) -> None:
        """Runs lines of ``ip`` or ``tc`` in the network of a node or of the bridge."""
        inside = Namespaces(_NEW_NETWORK, holder.pid)
        pipe = subprocess.PIPE
        with NodePopen(
            inside, [tool, "-batch", "-"], stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT
        ) as process:
            try:
                output, _ = process.communicate("\n".join(lines).encode(), timeout=START_S)
            finally:
                process.kill()
        if process.returncode:
            raise LabError(f"{tool} {'; '.join(lines)}: {output.decode()}")

    def _sent_bytes(self, node: int) -> int:
        text = Path(f"/proc/{self._holders[node].pid}/net/dev").read_text()
        (line,) = [each for each in text.splitlines() if each.strip().startswith(f"{INTERFACE}:")]
        return int(line.split(":")[1].split()[8])

    def mark(self) -> None:
        """Makes :meth:`wire_bytes` count from now on."""
        self._marks = [self._sent_bytes(node) for node in range(self.nodes)]

    def wire_bytes(self) -> list[int]:
        """Returns the bytes, with headers, that each node's interface has sent since the mark.

        A packet of several segments (offloaded segmentation) counts the headers of one segment.
        """
        return [self._sent_bytes(node) - self._marks[node] for node in range(self.nodes)]

    def cut(self, node: int) -> None:
        """Takes a node's link down, like a pulled cable: no packet from or to it arrives."""
        self._tool(self._switch, "ip", [f"link set node{node} down"])

    def mend(self, node: int) -> None:
        """Brings a node's link up again."""
        self._tool(self._switch, "ip", [f"link set node{node} up"])

    # ---- processes ------------------------------------------------------------------------------

    def environment(self, node: int) -> dict[str, str]:
        """The environment of a process of ``node``: this process's, and network settings."""
        network = {
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(self._port),
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "NCCL_SOCKET_IFNAME": INTERFACE,
            "HOSTNAME": f"node{node}",
        }
        return {**os.environ, **network}

    def popen(
        self,
        node: int,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        **how: Any,
    ) -> NodePopen:
        """Starts any command in a node; ``how`` are further arguments of ``subprocess.Popen``.

        Programs of this Python are forks that have torch, see ``fork_server``. ``env`` is added to
        :meth:`environment`. The process has an id inside its node; this process, its parent, knows
        it by the id ``popen().pid``.
        """
        if self._holders[node].poll() is not None:
            raise LabError(f"node {node} has ended")
        inside = Namespaces(NODE_KINDS, self._holders[node].pid)
        variables = {**self.environment(node), **(env or {})}
        process = NodePopen(inside, list(command), **{"cwd": ROOT, **how, "env": variables})
        self._started = [each for each in self._started if each.poll() is None]
        self._started.append(process)
        return process

    def command(
        self, node: int, command: Sequence[str], timeout_s: float = 60.0, **how: Any
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command in a node to its end, and returns its output as text."""
        pipe = subprocess.PIPE
        with self.popen(node, command, stdout=pipe, stderr=pipe, text=True, **how) as process:
            try:
                output, errors = process.communicate(timeout=timeout_s)
            finally:
                process.kill()
        return subprocess.CompletedProcess(list(command), process.returncode, output, errors)

    def ranks(self, ranks_per_node: Sequence[int]) -> LabRanks:
        """Returns the ranks of this shape, which stay up from one call to the next."""
        shape = tuple(ranks_per_node)
        if len(shape) != self.nodes or min(shape) < 0 or not sum(shape):
            raise ValueError(f"Lab.ranks: {self.nodes} nodes, got ranks_per_node={shape}")
        if shape not in self._pools:
            self._pools[shape] = LabRanks(self, shape)
        return self._pools[shape]

    def run(
        self, fn: Check, *args: Any, ranks_per_node: Sequence[int], timeout_s: float = 60.0
    ) -> list[Any]:
        """Calls ``fn(*args)`` on the ranks of this shape; see :meth:`LabRanks.run`."""
        return self.ranks(ranks_per_node).run(fn, *args, timeout_s=timeout_s)

    def next_port(self) -> int:
        """Returns a port of node 0 that no earlier call has used."""
        self._port += 1
        return self._port

    def kill(self, node: int, local_rank: int | None = None) -> None:
        """Kills a rank of a node (in every pool), or all processes of the node; waits for the end.

        The kernel closes the connections of killed processes, so that peers notice at once. To
        avoid this, :meth:`cut` the node first. The node itself stays, without processes.
        """
        if local_rank is not None:
            for pool in self._pools.values():
                pool.kill(node, local_rank)
            return
        done = self.command(node, ["sh", "-c", "kill -KILL -1"], END_S)
        if done.returncode:
            raise LabError(f"node {node}: {done.stderr}")
        for pool in self._pools.values():
            pool.wait_for_end(node)

    def close(self) -> None:
        """Ends every process of every node, and thereby the network."""
        for holder in self._holders:
            holder.kill()
        for pool in self._pools.values():
            pool.close()
        # A holder ends only after this process has waited for what it started in the node.
        for process in (*self._started, *self._holders):
            process.wait(END_S)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()


@dataclass(frozen=True)
class RankNumbers:
    """The numbers of a rank, as torchrun assigns them: node by node."""

    rank: int
    node: int
    local_rank: int
    shape: tuple[int, ...]

    @classmethod
    def all_of(cls, shape: tuple[int, ...]) -> list[RankNumbers]:
        pairs = [(node, local) for node, count in enumerate(shape) for local in range(count)]
        return [cls(rank, node, local, shape) for rank, (node, local) in enumerate(pairs)]

    def environment(self) -> dict[str, str]:
        size, local_size = sum(self.shape), self.shape[self.node]
        return {
            **rank_variables(self.rank, size, self.local_rank, local_size),
            "GROUP_RANK": str(self.node),
            "GROUP_WORLD_SIZE": str(len(self.shape)),
        }


class _Rank:
    """The process of one rank, the pipe to it, and a file for its output."""

    def __init__(self, lab: Lab, numbers: RankNumbers) -> None:
        self.numbers = numbers
        ours, theirs = socket.socketpair()
        self.pipe = Connection(ours.detach())
        self._output = os.memfd_create("output")
        with theirs:
            self.process = lab.popen(
                numbers.node,
                [sys.executable, "-u", "-m", "tests.support.lab", "rank", str(theirs.fileno())],
                numbers.environment(),
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
            )

    def start(self, message: object) -> None:
        os.ftruncate(self._output, 0)
        with contextlib.suppress(OSError):  # it has died; outcome() will report this
            self.pipe.send(message)

    def outcome(self) -> Outcome:
        """Returns the rank's answer, which must be there, or else how its process ended."""
        outcome = Outcome(self.numbers.rank)
        try:
            outcome.read(self.pipe)
        except (EOFError, OSError):
            outcome.exitcode = self.process.wait(END_S)
            outcome.error = RuntimeError("it ended without an answer")
        return self._with_output(outcome)

    def late(self) -> Outcome:
        """Returns a timeout, with the stacks of the process's threads."""
        with contextlib.suppress(OSError):
            self.process.send_signal(signal.SIGUSR1)
            time.sleep(STACKS_S)
        error = TimeoutError("did not answer in time")
        return self._with_output(Outcome(self.numbers.rank, error=error))

    def _with_output(self, outcome: Outcome) -> Outcome:
        if outcome.error is not None:
            called = f"node {self.numbers.node}, local rank {self.numbers.local_rank}"
            size = os.fstat(self._output).st_size
            start = max(size - SHOWN_CHARACTERS, 0)
            text = os.pread(self._output, SHOWN_CHARACTERS, start).decode(errors="replace")
            what = outcome.trace or f"{outcome.error!r}\n"
            outcome.trace = f"{called}: {what}{text.replace(chr(0), '')}"
        return outcome

    def close(self) -> None:
        self.process.kill()
        self.process.wait(END_S)
        self.pipe.close()
        os.close(self._output)


class LabRanks:
    """Ranks on the nodes of a lab, which run one function after another.

    If a rank raised, died or did not answer, or if a call's outcomes were not fetched, the
    processes are replaced before the next call. Each call has its own MASTER_PORT.
    """

    def __init__(self, lab: Lab, shape: tuple[int, ...]) -> None:
        self._lab, self.shape = lab, shape
        self._ranks: list[_Rank] = []
        self._is_called = False

    @property
    def pids(self) -> list[int]:
        """The process ids by rank, as this process sees them."""
        return [rank.process.pid for rank in self._ranks]

    def run(self, fn: Check, *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """Calls ``fn(*args)`` on every rank, with torchrun's variables in the environment.

        Args:
            fn: a function of a module, or its dotted name.
            args: the arguments; they are pickled.
            timeout_s: how long the slowest rank may take.

        Returns:
            The results by rank, which were pickled.

        Raises:
            RanksFailed: a rank raised, died or did not answer; shows the failed ranks' output.
        """
        self.start(fn, *args)
        return values_of(self.outcomes(timeout_s, GRACE_S))

    def start(self, fn: Check, *args: Any) -> None:
        """Begins a call; :meth:`outcomes` waits for its end."""
        if self._is_called or any(rank.process.poll() is not None for rank in self._ranks):
            self.close()
        if not self._ranks:
            self._ranks = [_Rank(self._lab, numbers) for numbers in RankNumbers.all_of(self.shape)]
        self._is_called = True
        port = self._lab.next_port()
        for rank in self._ranks:
            rank.start((fn, args, port))

    def outcomes(self, timeout_s: float = 60.0, grace_s: float | None = None) -> list[Outcome]:
        """Waits for a call; returns how it ended on each rank.

        Args:
            timeout_s: how long to wait for the slowest rank.
            grace_s: how long to wait for others once a rank has failed; None: until the timeout.
        """
        self._is_called = False
        outcomes = gather(
            [rank.pipe for rank in self._ranks],
            lambda rank: self._ranks[rank].outcome(),
            lambda rank: self._ranks[rank].late(),
            timeout_s,
            grace_s,
        )
        if not all(outcome.ok for outcome in outcomes):
            self.close()
        return outcomes

    def kill(self, node: int, local_rank: int) -> None:
        """Kills one rank, and waits for its end."""
        for rank in self._ranks:
            if (rank.numbers.node, rank.numbers.local_rank) == (node, local_rank):
                rank.process.kill()
                rank.process.wait(END_S)

    def wait_for_end(self, node: int) -> None:
        """Waits until the killed ranks of a node have ended."""
        for rank in self._ranks:
            if rank.numbers.node == node:
                rank.process.wait(END_S)

    def close(self) -> None:
        """Ends the processes."""
        for rank in self._ranks:
            rank.close()
        self._ranks = []


# ---- inside a node ------------------------------------------------------------------------------


def _mount(source: str, target: str, kind: str = "", flags: int = 0) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(source.encode(), target.encode(), kind.encode(), flags, None):
        raise OSError(ctypes.get_errno(), f"mount {source} at {target} failed")


def own_proc() -> None:
    """Mounts a /proc with only the processes of this process's namespace."""
    _mount("none", "/", flags=_RECURSIVE | _PRIVATE)
    _mount("proc", "/proc", "proc")


def _hold(name: str, boot_id: str, hosts: str) -> None:
    """Makes this process the holder of a node; it ends with the lab, and the node with it."""
    end_with(os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the tests, in the same terminal
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans leave no zombies
    socket.sethostname(name)
    own_proc()
    _mount("shm", "/dev/shm", "tmpfs")
    texts = {"/etc/hosts": f"127.0.0.1 localhost\n{hosts}"}
    texts["/proc/sys/kernel/random/boot_id"] = f"{boot_id}\n"
    for path, text in texts.items():
        own = Path("/dev/shm") / Path(path).name
        own.write_text(text)
        _mount(str(own), path, flags=_BIND)
        own.unlink()
    print("ready", flush=True)
    sys.stdin.read()  # returns when the lab's process has ended, even before end_with()


def _serve(pipe: Connection) -> None:
    """Runs the functions that a pool sends, until the pool is closed."""
    faulthandler.register(signal.SIGUSR1)
    while True:
        try:
            raw = pipe.recv_bytes()
        except EOFError:
            return
        pipe.send_bytes(answer_of(partial(_call, raw)))


def _call(raw: bytes) -> Any:
    fn, args, port = pickle.loads(raw)
    os.environ["MASTER_PORT"] = str(port)
    return (pkgutil.resolve_name(fn) if isinstance(fn, str) else fn)(*args)


def main() -> None:
    role, *words = sys.argv[1:]
    if role == "hold":
        _hold(*words)
    else:
        _serve(Connection(int(words[0])))


if __name__ == "__main__":
    from tests.support import lab

    lab.main()
