# SPDX-License-Identifier: Apache-2.0
"""The part of this folder that runs without a GPU."""

import pytest

from tests.gpu import sanitizer_cases
from tests.gpu.conftest import HERE, NEEDS_A_GPU


@pytest.mark.parametrize("name", NEEDS_A_GPU)
def test_what_needs_a_gpu_is_there(name):
    """An entry whose test has another name by now would be one too many."""
    file, _, function = name.partition("::")
    text = (HERE / file).read_text()
    assert f"def {function}(" in text if function else "def test_" in text


def test_the_cases_for_the_sanitizer_come_out_right():
    sanitizer_cases.run()
