# SPDX-License-Identifier: Apache-2.0
"""Launchers in a lab: a remote shell between its nodes, and Slurm on its nodes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from tests.support.lab import Lab

START_S = 60.0
MOST_BYTES = 1 << 17
# Variables that a lab sets for its ranks; these launchers must do without them.
NOT_PASSED = ("MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")
SLURM_TOOLS = ("slurmctld", "slurmd", "srun")

# Launchers run this program instead of ssh, and as the program of each rank. It asks the test's
# process to start a command in a node, with its own streams, and returns the command's status.
AGENT = """#!{python} -IS
import json, os, socket, sys

words = sys.argv[1:]
while words[0].startswith("-"):
    words.pop(0)
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asked:
    asked.connect({address!r})
    message = json.dumps([words, dict(os.environ), socket.gethostname()])
    socket.send_fds(asked, [message.encode()], [0, 1, 2])
    status = asked.recv(1)
sys.exit(status[0] if status else 255)
"""


class RemoteShell:
    """Starts commands in the nodes of a lab for launchers that run there.

    Attributes:
        path: a program. ``path HOST COMMAND`` acts like ``ssh HOST COMMAND``. ``path here WORDS``
            runs this Python with the words, in the caller's environment and node, as a fork that
            has torch.
    """

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.path = folder / "remote-shell"
        address = str(folder / "remote-shell.socket")
        self.path.write_text(AGENT.format(python=sys.executable, address=address))
        self.path.chmod(0o755)
        self._lab = lab
        self._guard = threading.Lock()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(address)
        self._listener.listen(64)
        threading.Thread(target=self._serve, daemon=True).start()

    def rank(self, *words: str) -> list[str]:
        """Returns the command of a rank: this Python with ``words``."""
        return [str(self.path), "here", *words]

    def close(self) -> None:
        """Stops accepting callers."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._start, args=(caller,), daemon=True).start()

    def _start(self, caller: socket.socket) -> None:
        with caller:
            raw, files, _, _ = socket.recv_fds(caller, MOST_BYTES, 3)
            words, environment, name = json.loads(raw)
            host, *command = words
            if host == "here":
                host, command = name, [sys.executable, "-u", *command]
            else:
                command, environment = ["sh", "-c", " ".join(command)], {}
            # As after a remote login: only the variables that the launcher passes.
            environment = {**dict.fromkeys(NOT_PASSED, ""), **environment}
            streams = dict(zip(("stdin", "stdout", "stderr"), files, strict=True))
            with self._guard:
                process = self._lab.popen(
                    int(host.removeprefix("node")), command, environment, **streams
                )
            for fd in files:
                os.close(fd)
            caller.send(bytes([process.wait() & 255]))


# No authentication and no limits: the nodes belong to the lab, and end with it.
SLURM = """
ClusterName=lab
SlurmctldHost=node0({address})
SlurmUser=root
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def start_slurm(lab: Lab, folder: Path) -> dict[str, str]:
    """Starts Slurm's daemons on the nodes of a lab; returns variables for its commands."""
    folder.mkdir()
    nodes = "\n".join(
        f"NodeName=node{node} NodeAddr={lab.address(node)} CPUs=4 State=UNKNOWN"
        for node in range(lab.nodes)
    )
    configuration = folder / "slurm.conf"
    configuration.write_text(SLURM.format(address=lab.address(0), folder=folder, nodes=nodes))
    told = {"SLURM_CONF": str(configuration)}
    lab.popen(0, ["slurmctld", "-D"], told, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for node in range(lab.nodes):
        (folder / f"spool-node{node}").mkdir()
        lab.popen(
            node,
            ["slurmd", "-D", "-N", f"node{node}"],
            told,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        seen = lab.command(0, ["sinfo", "-h", "-N", "-o", "%t"], env=told).stdout.split()
        if seen == ["idle"] * lab.nodes:
            return told
        time.sleep(0.3)
    logs = "\n".join(log.read_text()[-2000:] for log in folder.glob("*.log"))
    raise RuntimeError(f"Slurm does not start: {logs}")
