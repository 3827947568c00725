# SPDX-License-Identifier: Apache-2.0
"""All commands together: warnings and other output that they must not print."""

import warnings

import pytest

from ringcomm.launch import hide_missing_numpy
from tests.cli.processes import run

BROKEN = "Failed to initialize NumPy: module compiled against ABI version 0x1000009"


@pytest.fixture
def no_numpy(tmp_path):
    """A folder that Python searches first, in which NumPy cannot be imported."""
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError(\"No module named 'numpy'\")\n")
    return tmp_path


def test_a_command_says_nothing_of_a_missing_numpy(no_numpy):
    words = ["estimate", "memory", "--params", "1M", "--world", "2"]
    done = run("-m", "ringcomm", *words, path=no_numpy)
    assert done.returncode == 0
    assert done.stderr == ""


def test_other_warnings_are_shown():
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        hide_missing_numpy()
        warnings.warn(
            "Failed to initialize NumPy: No module named 'numpy' (Triggered", stacklevel=1
        )
        warnings.warn(BROKEN, stacklevel=1)
        warnings.warn("anything else", stacklevel=1)
    assert [str(each.message) for each in shown] == [BROKEN, "anything else"]
