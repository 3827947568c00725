"""A folder on a disk for the tests of scratch files."""

from pathlib import Path

import pytest

from ringcomm import DiskError
from ringcomm.memory.scratch import Scratch


def skip_unless_disk(folder: Path) -> Path:
    """Returns the folder; skips the test where scratch files are refused there."""
    try:
        Scratch(folder, "probe").close()
    except DiskError as error:
        pytest.skip(f"pytest's folder (--basetemp) is on no disk: {error}")
    return folder
