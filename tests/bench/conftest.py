# SPDX-License-Identifier: Apache-2.0
"""Benches give their process a number of threads; the tests that follow keep theirs."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

VARIABLE = "RINGCOMM_THREADS"


@pytest.fixture(autouse=True)
def _threads_stay() -> Iterator[None]:
    threads, asked = torch.get_num_threads(), os.environ.get(VARIABLE)
    yield
    torch.set_num_threads(threads)
    os.environ.pop(VARIABLE, None)
    if asked is not None:
        os.environ[VARIABLE] = asked
