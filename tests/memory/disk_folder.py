# SPDX-License-Identifier: Apache-2.0
"""A folder on a disk, and memory, for the tests of scratch files."""

from pathlib import Path

import pytest
import torch

from ringcomm import DiskError
from ringcomm.offload.scratch import ScratchFile, aligned_buffer


def skip_unless_disk(folder: Path) -> Path:
    """Returns the folder, or skips the test if scratch files are refused in it."""
    try:
        ScratchFile(folder, "probe").close()
    except DiskError as error:
        pytest.skip(f"pytest's folder (--basetemp) is on no disk: {error}")
    return folder


def filled(size_bytes: int, seed: int) -> torch.Tensor:
    buffer = aligned_buffer(size_bytes)
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return buffer.random_(0, 256, generator=generator)
