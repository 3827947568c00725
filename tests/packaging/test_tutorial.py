# SPDX-License-Identifier: Apache-2.0
"""The tutorial: each program runs unchanged, and prints the page's output."""

import os
import re
import shlex
import socket
import sys
import time

import pytest

from ringcomm.cli import main
from tests.packaging.documents import DOCS, blocks_of, commands_of
from tests.support import ROOT, fork_server

PAGE = DOCS / "tutorial.md"
COMMANDS = [command for command in commands_of(PAGE) if command.block.language == "console"]
LIMIT_S = 120.0
NEAR = 0.03  # of a loss: another instruction set or torch changes it far less in 40 steps


@pytest.fixture
def folder(tmp_path):
    """A folder with the page's programs, named as in their first lines."""
    for block in blocks_of(PAGE, "python"):
        name = re.match(r"# (\w+\.py)\n", block.text)
        assert name, f"{block}: the first line names no file"
        (tmp_path / name[1]).write_text(block.text)
    return tmp_path


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def started(command, folder, port, log):
    """Starts a torchrun of the page, whose ranks print into files of a folder.

    In one pipe, a rank's line could begin within another rank's line.
    """
    assert command.words[0] == "torchrun"
    words = [port if word == "29500" else word for word in command.words[1:]]
    words = ["--redirects", "1", "--log-dir", str(log), *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **command.variables}
    return fork_server.Popen(
        [sys.executable, "-m", "torch.distributed.run", *words],
        cwd=folder,
        env=environment,
    )


def printed_in(*logs):
    """Returns the text that the ranks have printed."""
    return "".join(path.read_text() for log in logs for path in sorted(log.rglob("stdout.log")))


def pieces(line):
    """Returns the text of a line without its numbers, and the numbers."""
    number = r"\d[\d,]*(?:\.\d+)?"
    return " ".join(re.sub(number, "#", line).split()), re.findall(number, line)


def assert_told(printed, told):
    """Asserts that lines equal the page's in any order, with losses near the page's."""
    lines = sorted(line for line in printed.splitlines() if line)
    expected = sorted(line for line in told.splitlines() if line)
    assert len(lines) == len(expected), printed
    for line, other in zip(lines, expected, strict=True):
        assert pieces(line)[0] == pieces(other)[0]
        for number, shown in zip(pieces(line)[1], pieces(other)[1], strict=True):
            near = NEAR if "loss" in line and "." in shown else 0.0
            value, wanted = (float(text.replace(",", "")) for text in (number, shown))
            assert abs(value - wanted) <= near, f"{line!r}, the page has {other!r}"


def chosen(*words):
    """Returns the page's commands that have these words, in order."""
    found = [each for each in COMMANDS if all(word in each.words for word in words)]
    assert found
    return found


def run_all(commands, folder):
    """Runs commands at the same time; returns their joint output."""
    port = free_port()
    logs = [folder / f"{port}-{number}" for number in range(len(commands))]
    processes = [
        started(command, folder, port, log) for command, log in zip(commands, logs, strict=True)
    ]
    statuses = [process.wait(LIMIT_S) for process in processes]
    assert statuses == [0] * len(commands)
    return printed_in(*logs)


def test_two_ranks_say_hello(folder):
    (command,) = chosen("hello.py")
    assert_told(run_all([command], folder), command.output)


def test_a_gpt_trains_at_stage_3(folder):
    (command,) = chosen("--standalone", "train.py")
    assert_told(run_all([command], folder), command.output)


def test_it_trains_over_two_nodes(folder):
    commands = chosen("--nnodes", "train.py")
    assert [each.variables["RINGCOMM_NODE_ID"] for each in commands] == ["a", "b"]
    assert_told(run_all(commands, folder), commands[-1].output)


def test_a_run_goes_on_with_another_number_of_ranks(folder):
    for command in chosen("resume.py"):
        assert_told(run_all([command], folder), command.output)


def test_ranks_that_part_are_told_both_lines(folder):
    text = PAGE.read_text().split("## When ranks disagree")[1]
    (told,) = re.findall(r"^ringcomm\.errors\.MismatchError: (.*?) \[\.\.\.\]", text, re.M | re.S)
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "parted.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RINGCOMM_TRACE_DIR": str(folder)}
    done = fork_server.run([sys.executable, *words], LIMIT_S, cwd=folder, env=environment)
    assert done.returncode == 1
    said = done.stderr.replace(f"{folder}/", "")
    # Either rank may raise first, and names its own line first.
    clauses = re.findall(r"ank \d called .*? at parted.py:\d+", " ".join(told.split()))
    assert len(clauses) == 2
    assert [clause for clause in clauses if clause not in said] == [], done.stderr


def test_a_hang_is_shown_with_its_cause(folder, capsys):
    (hanging,) = chosen("hang.py")
    (tracing,) = chosen("trace")
    process = started(hanging, folder, free_port(), folder / "log")
    end = time.monotonic() + LIMIT_S
    try:
        while (said := printed_in(folder / "log")).count("\n") < 2 and time.monotonic() < end:
            time.sleep(0.05)
        assert [pieces(line)[0] for line in said.splitlines()] == ["rank # is process #"] * 2
        pids = {line.split()[1]: line.split()[-1] for line in said.splitlines()}
        # Before that, rank 0 may wait for a slow rank 1 in an earlier call.
        last = re.compile(r"is in all_reduce\(.*\), call 4 for .*, waits for rank 1\b")
        printed = ""
        while not last.search(printed) and time.monotonic() < end:
            assert main(["trace", "--pid", pids["0"]]) == 0
            printed = capsys.readouterr().out
    finally:
        process.terminate()  # torchrun ends its ranks
        process.wait(LIMIT_S)
    assert tracing.words == ("ringcomm", "trace", "--pid", "4711")
    assert timeless(printed.replace(f"{folder}/", "")) == timeless(tracing.output)
    program = (folder / "hang.py").read_text().splitlines()
    assert "all_reduce" in program[13 - 1]


def timeless(text):
    """Returns a report of ``ringcomm trace`` without times, process ids and column widths."""
    text = re.sub(r"-?\d[\d.,]* (?:ns|us|ms|s)\b", "TIME", text)
    text = re.sub(r"(?<=pid )\d+", "PID", text)
    return [" ".join(line.split()) for line in text.splitlines() if line]


def test_losses_that_are_not_near_are_seen():
    with pytest.raises(AssertionError, match="the page has"):
        assert_told("step 10  loss 2.10", "step 10  loss 2.16")
    with pytest.raises(AssertionError, match="the page has"):
        assert_told("rank 1 of 2", "rank 1 of 3")
    assert_told("b\nstep 10  loss 2.15", "step 10  loss 2.16\nb")


def test_estimates_print_what_the_pages_say(capsys):
    """Compares all pages line by line; three dots replace any lines."""
    count = 0
    for page in sorted(DOCS.rglob("*.md")):
        for command in commands_of(page):
            if command.words[:2] != ("ringcomm", "estimate") or not command.output:
                continue
            assert main(list(command.words[1:])) == 0, shlex.join(command.words)
            printed = capsys.readouterr().out
            for part in re.split(r"^\.\.\.$\n?", command.output, flags=re.MULTILINE):
                assert part.strip() in printed, f"{command}: {part}"
            count += 1
    assert count >= 5
