"""The progress bar."""

from __future__ import annotations

import io

from ringcomm.output import ProgressBar


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_pipe_gets_about_ten_plain_lines():
    stream = io.StringIO()
    with ProgressBar("work", 1000, stream) as bar:
        for done in range(1, 1001):
            bar.show(done, "note")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[-1] == f"work |{'#' * 24}| 1000/1000  note"
    assert "\r" not in stream.getvalue()


def test_terminal_line_is_redrawn_and_wiped():
    stream = Terminal()
    with ProgressBar("work", 2, stream) as bar:
        bar.show(1)
        bar.show(2, "done")
    text = stream.getvalue()
    assert "\n" not in text
    assert "2/2  done" in text
    assert text.endswith("\r\x1b[K")


def test_nothing_is_drawn_before_the_first_step():
    stream = Terminal()
    with ProgressBar("work", 2, stream):
        pass
    assert stream.getvalue() == ""


def test_note_that_is_a_function_is_asked_for_when_a_line_is_drawn():
    stream, asked = io.StringIO(), []

    def note():
        asked.append(1)
        return f"note {len(asked)}"

    with ProgressBar("work", 1000, stream) as bar:
        for done in range(1, 1001):
            bar.show(done, note)
    assert len(asked) == 10
    assert stream.getvalue().splitlines()[-1].endswith("1000/1000  note 10")
