# SPDX-License-Identifier: Apache-2.0
"""Usage errors, and the progress output of long commands."""

from __future__ import annotations

import io

import pytest

from ringcomm.cli import main
from ringcomm.cli.progress import HEARTBEAT_S, Progress, time_left
from ringcomm.cli.usage import CommandParser, suggestion


@pytest.mark.parametrize(
    ("words", "command", "message"),
    [
        (["bnch"], "ringcomm", "did you mean bench?"),
        (["--versoin"], "ringcomm", "unrecognized arguments: --versoin; did you mean --version?"),
        (["train", "--stepz", "3"], "ringcomm train", "did you mean --steps?"),
        (["doctor", "--x"], "ringcomm doctor", "unrecognized arguments: --x"),
        (["estimate", "memry"], "ringcomm estimate", "did you mean memory?"),
        (["convert"], "ringcomm convert", "required: source, target"),
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
