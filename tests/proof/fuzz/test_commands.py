# SPDX-License-Identifier: Apache-2.0
"""Junk in command lines and the environment: a usage error or a RingcommError, no traceback."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

import ringcomm
from ringcomm.bench import collectives
from ringcomm.cli import doctor, main
from ringcomm.comm.recorder import reader
from ringcomm.errors import ArgumentError, RingcommError
from ringcomm.memory.host_heap import parse_bytes
from ringcomm.rendezvous.launchers import LAUNCHERS, read_environment
from tests.proof.fuzz.mutations import SCALE

pytestmark = pytest.mark.compiles


class Started(BaseException):
    """Raised where a real run would begin: the options were accepted."""


VALUES = (
    "0", "1", "2", "3", "-1", "64", "1e9", "7.5B", "4K", "nan", "inf", "-inf", "1e400", "9" * 30,
    "1" * 5000, "0x10", "", " ", "x", "\x00", "\ud800", "\u0663", "²", "none", "full", "fp16",
    "bf16", "fp32", "disk", "a.b:c", "os:getcwd", "/", "/dev/zero", "/dev/full",
    "/nonexistent/x.png", "../x", "x" * 300, "1,2", ",,", "=", "--",
)  # fmt: skip
OPTIONS = {
    "estimate": (
        "memory", "step", "experts",
        "--params", "--module", "--world", "--nodes", "--stage", "--preset", "--reduce",
        "--optimizer", "--accumulate", "--clip", "--update", "--bucket-elems", "--json",
        "--layers", "--width", "--heads", "--context", "--vocab", "--untied", "--micro-batch",
        "--checkpointing", "--checkpoint-every", "--activations-on", "--budget-gb",
        "--offload-state", "--offload-params", "--buffer-mib", "--resident-gb", "--compression",
    ),
    "topo": ("--file", "--ranks", "--placement", "--json", "--save"),
    "trace": ("--pid", "--last", "--chrome"),
    "train": (
        "--data", "--ranks", "--steps", "--batch", "--accum", "--clip", "--learning-rate", "--seed",
        "--width", "--depth", "--heads", "--context", "--tied", "--checkpoint-activations",
        "--stage", "--dtype", "--loss-scale", "--device", "--save-every", "--resume", "--memory",
        "--offload-state", "--offload-params",
    ),
    "doctor": ("--no-self-test", "--json"),
    "report": ("--pid", "--output", "--title", "trace.json", "pipe"),
    "bench": ("-b", "-e", "-g", "--ranks", "--json", "all_reduce"),
}  # fmt: skip
# Words with which a command accepts its command line.
SOUND = {
    "estimate": ["memory", "--params", "1e6", "--world", "2"],
    "report": ["trace.json"],
    "trace": ["trace.json"],
}


def arguments(command: str, chance: Random) -> list[str]:
    words = list(SOUND.get(command, [])) if chance.random() < 0.7 else []
    for _ in range(chance.randint(0, 4)):
        # Opening a pipe for writing would wait for a reader, as with any program.
        taken = {"pipe"} if words and words[-1] == "--output" else set()
        words.append(chance.choice([each for each in OPTIONS[command] if each not in taken]))
        if chance.random() < 0.8:
            words.append(chance.choice(VALUES))
    return [command, *words]


@pytest.fixture
def nothing_starts(monkeypatch, tmp_path):
    """Runs the test in a folder with a trace, and a pipe that nobody writes into."""
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    with ringcomm.local_world(1) as world:
        world[0].barrier()
        recording = world[0].recording()
    Path("trace.json").write_text(reader.text_of(reader.Trace(recording, 0, 1.0, "")))

    def start(*_: object, **__: object) -> None:
        raise Started

    for name in ("Popen", "run", "call", "check_output"):
        monkeypatch.setattr(subprocess, name, start)
    monkeypatch.setattr("ringcomm.cli.train.launch_ranks", start)
    monkeypatch.setattr(doctor, "check_self_test", start)
    for _, *names in LAUNCHERS:
        for name in names:
            monkeypatch.delenv(name, raising=False)


def told(call, *args) -> str:
    """Returns how a command line ended; any unexpected exception fails the test."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = call(*args)
        except SystemExit as end:
            code = end.code
        except Started:
            return "started"
    assert "Traceback" not in said.getvalue()
    return f"ended {code}"


@pytest.mark.parametrize("words", [["--ranks", "9" * 30], ["--placement", "1" * 5000]])
def test_numbers_of_many_digits(words, nothing_starts):
    assert told(main, ["topo", *words]) == "ended 2"


@pytest.mark.parametrize("command", [["topo", "--file"], ["trace"]], ids=lambda words: words[0])
@pytest.mark.parametrize("file", ["/dev/zero", "pipe", "/", "/proc/self/mem", "\x00", "\ud800"])
def test_files_that_are_none(command, file, nothing_starts):
    # trace: a file that cannot be read is a wrong argument; a readable file without a trace is a
    # failure.
    code = 2 if command[0] == "topo" or file in ("/", "/proc/self/mem") else 1
    assert told(main, [*command, file]) == f"ended {code}"


def test_the_folder_has_a_trace(nothing_starts):
    assert told(main, ["trace", "trace.json"]) == "ended 0"


@pytest.mark.parametrize("command", OPTIONS)
def test_command_lines(command, nothing_starts):
    chance = Random(command)
    ended = {told(main, arguments(command, chance)) for _ in range(60 * SCALE)}
    assert "started" in ended or "ended 0" in ended, ended
    if command not in ("doctor", "bench"):  # bench hands all on
        assert "ended 2" in ended, ended


def test_words_of_all_kinds(nothing_starts):
    chance = Random(3)
    for _ in range(50 * SCALE):
        told(main, [chance.choice((*VALUES, *OPTIONS)) for _ in range(chance.randint(0, 3))])


def test_options_of_the_harness(nothing_starts):
    chance = Random(4)
    words = [
        option
        for action in collectives.BENCH.build_parser()._actions
        for option in action.option_strings
        if option not in ("-h", "--help")
    ]
    ended = set()
    for _ in range(120 * SCALE):
        line: list[str] = []
        for _ in range(chance.randint(0, 3)):
            line += [chance.choice(words), chance.choice(VALUES)]
        ended.add(told(lambda line: bool(collectives.parse(line).systems) and 0, line))
    assert ended == {"ended 0", "ended 2"}


def test_variables_of_launchers():
    chance = Random(5)
    read = 0
    for _ in range(600 * SCALE):
        variables = {
            name: chance.choice(VALUES)
            for _, *names in LAUNCHERS
            for name in (*names, "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_NNODES")
            if chance.random() < 0.4
        }
        try:
            launched = read_environment(variables)
        except ArgumentError:
            continue
        read += 1
        assert 0 <= launched.rank < launched.world_size
        # The launcher's master is looked up in this process's environment.
        if launched.local_world_size != launched.world_size and not launched.has_master:
            with pytest.raises(RingcommError):
                launched.store(0.1)
    assert read > 10


def test_sizes():
    for text in (
        *VALUES,
        "1k",
        "1KiB",
        "1g2",
        "k",
        "-1k",
        "1.5G",
        "²k",
        "\u0661k",
        "1" * 5000 + "k",
    ):
        try:
            size = parse_bytes(text, "RINGCOMM_HEAP_BYTES")
        except ArgumentError as error:
            assert "RINGCOMM_HEAP_BYTES" in str(error)
            assert len(str(error)) < 10_000
        else:
            assert 0 <= size < 10**20 << 40


HEAPS = """
import os, sys
from ringcomm import RingcommError, empty
for text in sys.argv[1:]:
    os.environ["RINGCOMM_HEAP_BYTES"] = text
    try:
        empty(4)
    except RingcommError as error:
        print(type(error).__name__)
"""


def test_heaps_of_sizes_that_there_are_not():
    sizes = ["0", "-1", "x", "9" * 18, "9" * 30, "²", "1" * 5000, "10E", "99999T"]
    run = [sys.executable, "-c", HEAPS, *sizes]
    done = subprocess.run(run, capture_output=True, text=True, check=False, timeout=100)
    assert done.stdout.split() == ["ArgumentError"] * len(sizes), done.stderr
