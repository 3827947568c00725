"""Loss and memory in characters and as a picture."""

from __future__ import annotations

import pytest

from ringcomm.errors import ArgumentError
from ringcomm.examples.gpt.report import Outcome, RankMemory, as_text, curve, draw

MB = 10**6
OUTCOME = Outcome(
    first_step=1,
    losses=[5.5, 4.5, 3.5, 2.5],
    held_out_before=5.6,
    held_out_after=2.4,
    tokens_per_s=100.0,
    memory=[
        RankMemory(50 * MB, [60 * MB, 62 * MB, 60 * MB]),
        RankMemory(50 * MB, [58 * MB, 59 * MB, 57 * MB]),
    ],
    skipped_steps=0,
    loss_scale=None,
)


def test_curve_goes_from_the_largest_value_to_the_smallest():
    assert curve([3.0, 1.0, 2.0], 3, from_zero=False) == [
        "        3 |*",
        "          |  *",
        "        1 | *",
    ]


def test_curve_from_zero_and_of_equal_values():
    assert curve([4.0, 2.0], 3, from_zero=True) == [
        "        4 |*",
        "          | *",
        "        0 |",
    ]
    assert curve([0.5, 0.5], 2, from_zero=False) == ["      0.5 |", "      0.5 |**"]


def test_many_values_are_averaged_into_sixty_columns():
    first, last = curve([0.0, 2.0] * 300, 2, from_zero=False)
    # Ten values a column, half of them 0 and half 2.
    assert (first, last) == ("        1 |", "        1 |" + "*" * 60)


def test_values_that_are_not_finite_leave_gaps():
    lines = curve([2.0, float("nan"), 1.0, float("inf")], 2, from_zero=False)
    assert lines == ["        2 |*", "        1 |  *"]
    assert curve([float("nan")], 2, from_zero=True) == ["(no value is finite)"]


def test_text_shows_losses_and_the_memory_that_training_adds():
    lines = as_text(OUTCOME).splitlines()
    assert lines[0] == "loss (nats per byte)"
    assert lines[1] == "      5.5 |*"
    assert lines[8] == "      2.5 |   *"
    assert lines[9] == "     step  0  3"
    assert lines[11] == "       12 |***"
    assert lines[14] == "        0 |"
    assert lines[15] == "     step  1 3"


@pytest.mark.parametrize(
    ("ending", "begins"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")]
)
def test_picture_has_the_format_of_its_ending(tmp_path, ending, begins):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"x.{ending}"
    draw(OUTCOME, "a title", str(path))
    assert path.read_bytes().startswith(begins)


@pytest.mark.parametrize("name", ["x.poem", "missing/x.png"])
def test_picture_that_cannot_be_written_is_refused(tmp_path, name):
    pytest.importorskip("matplotlib")
    with pytest.raises(ArgumentError, match=r"--plot .* cannot be written"):
        draw(OUTCOME, "a title", str(tmp_path / name))
