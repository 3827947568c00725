# SPDX-License-Identifier: Apache-2.0
"""The tests of this folder that need no device."""

import pytest

from tests.gpu import sanitizer_cases
from tests.gpu.conftest import HERE, NEEDS_A_GPU


@pytest.mark.parametrize("name", NEEDS_A_GPU)
def test_what_needs_a_gpu_is_there(name):
    """Each entry of NEEDS_A_GPU names an existing test; an entry of a renamed test fails here."""
    file, _, function = name.partition("::")
    text = (HERE / file).read_text()
    assert f"def {function}(" in text if function else "def test_" in text


def test_the_cases_for_the_sanitizer_come_out_right():
    sanitizer_cases.run()
