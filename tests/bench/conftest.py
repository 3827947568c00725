# SPDX-License-Identifier: Apache-2.0
"""Restores the number of threads after each test, because benches change their process's."""

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
