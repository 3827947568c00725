# SPDX-License-Identifier: Apache-2.0
"""Usage errors, and the progress output of long commands."""

from __future__ import annotations

import io
import re

import pytest

from ringcomm.cli import main
from ringcomm.cli.progress import HEARTBEAT_S, Progress, time_left
from ringcomm.cli.usage import CommandParser, suggestion
from tests.support import ROOT


@pytest.mark.parametrize(
    ("words", "command", "message"),
    [
        (["bnch"], "ringcomm", "did you mean bench?"),
        (["--versoin"], "ringcomm", "unrecognized arguments: --versoin; did you mean --version?"),
        (["train", "--stepz", "3"], "ringcomm train", "did you mean --steps?"),
        (["doctor", "--x"], "ringcomm doctor", "unrecognized arguments: --x"),
        (["estimate", "memry"], "ringcomm estimate", "did you mean memory?"),
        (["convert"], "ringcomm convert", "required: source, target"),
        (["build-backend", "--forc"], "ringcomm build-backend", "did you mean --force?"),
        (["demo", "--dat", "x"], "ringcomm demo", "did you mean --data?"),
        (["trace", "--las", "3"], "ringcomm trace", "arguments: --las; did you mean --last?"),
    ],
)
def test_a_usage_error_is_short_and_names_the_word_that_was_meant(capsys, words, command, message):
    with pytest.raises(SystemExit) as ending:
        main(words)
    assert ending.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and all(line.count("ringcomm") == 1 for line in lines)
    assert lines[0].startswith(f"usage: {command} [options]")
    assert lines[1].strip() == f"{command} --help lists every option"
    assert lines[2].startswith(f"{command}: error: ") and lines[2].endswith(message)


@pytest.mark.parametrize(
    ("words", "command", "message"),
    [
        (["train", "--stage", "4"], "ringcomm train", "--stage must be in 0 .. 3, got 4"),
        (["topo", "--ranks", "0"], "ringcomm topo", "--ranks: expected at least 1, got 0"),
        (["topo", "--file", "absent"], "ringcomm topo", "cannot be read: No such file or director"),
        (
            ["trace", "absent"],
            "ringcomm trace",
            "absent: cannot be read: No such file or directory",
        ),
        (["trace", "--chrome", "absent/t.json"], "ringcomm trace", "its folder does not exist"),
        (["metrics", "absent"], "ringcomm metrics", "absent: cannot be read: No such file or dir"),
        (
            ["report", "absent"],
            "ringcomm report",
            "absent: cannot be read: No such file or directo",
        ),
        (["report", "-o", "absent/r.html"], "ringcomm report", "its folder does not exist"),
        (["convert", "absent", "new"], "ringcomm convert", "absent: no such folder"),
        (
            ["estimate", "memory", "--world", "2"],
            "ringcomm estimate memory",
            "or all of --layers, ",
        ),
    ],
)
def test_wrong_arguments_are_usage_errors(tmp_path, monkeypatch, capsys, words, command, message):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and len(lines) == 3 and lines[0].startswith(f"usage: {command} [options]")
    assert lines[2].startswith(f"{command}: error: ") and message in lines[2]
    assert "[Errno" not in err


def test_all_parsers_of_programs_refuse_abbreviations():
    files = [*(ROOT / "ringcomm").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]
    files += (ROOT / "bench").rglob("*.py")
    made = re.compile(r"ArgumentParser\(((?:[^()]|\([^()]*\))*)\)")
    found = [call for path in files for call in made.findall(path.read_text())]
    assert len(found) >= 6 and all("allow_abbrev=False" in call for call in found)


def test_words_that_resemble_nothing_have_no_suggestion():
    assert suggestion("--size", ["--iters", "--minbytes"]) == ""
    assert suggestion("--minbyte", ["--iters", "--minbytes"]) == "; did you mean --minbytes?"


def test_choices_are_suggested_once(capsys):
    parser = CommandParser(prog="probe")
    parser.add_argument("--type", choices=["float", "double"])
    with pytest.raises(SystemExit):
        parser.parse_args(["--type", "flot"])
    assert capsys.readouterr().err.count("float?") == 1


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_has_one_line_that_changes():
    stream = Terminal()
    progress = Progress(stream)
    progress.clear()
    assert stream.getvalue() == ""
    progress.show("x" * 200)
    progress.show("second")
    progress.clear()
    progress.clear()
    first, second, cleared = stream.getvalue().split("\r")[1:]
    assert first == "x" * 79 + "\x1b[K" and second == "second\x1b[K" and cleared == "\x1b[K"


def test_a_log_has_a_line_every_30_s():
    stream, now_s = io.StringIO(), [0.0]
    progress = Progress(stream, lambda: now_s[0])
    for now_s[0] in (0.0, 1.0, HEARTBEAT_S, HEARTBEAT_S + 1, 2 * HEARTBEAT_S):
        progress.show(f"at {now_s[0]:.0f}")
        progress.clear()
    assert stream.getvalue() == "at 30\nat 60\n"


def test_a_line_that_is_due_at_once_is_printed_to_a_log():
    stream = io.StringIO()
    progress = Progress(stream, lambda: 0.0)
    progress.show("later")
    progress.show("now", at_once=True)
    assert stream.getvalue() == "now\n"


def test_a_pipe_to_a_terminal_is_treated_as_a_terminal_of_the_given_width():
    stream = io.StringIO()
    progress = Progress(stream, columns=10)
    progress.show("x" * 20)
    assert stream.getvalue() == "\r" + "x" * 9 + "\x1b[K"


def test_the_time_left_is_in_proportion_to_the_work():
    assert time_left(10.0, 1, 5) == "about 40 s left"
    assert time_left(60.0, 1, 11) == "about 10 min left"
    assert time_left(10.0, 5, 4) == "about 0 s left"
    assert time_left(10.0, 0, 5) == time_left(0.0, 1, 5) == ""
