# SPDX-License-Identifier: Apache-2.0
"""Helpers of several test directories: spawned ranks, exact inputs, fault injection."""

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

CAN_INSTALL = os.geteuid() == 0 and shutil.which("apt-get") is not None  # the condition of .ci/run


def must_not_skip(environment: Mapping[str, str], can_install: bool) -> bool:
    """True if a missing tool must fail the test: CI=true is set, and CI could install it."""
    return environment.get("CI") == "true" and can_install


def together(unit: Path, sources: Iterable[Path]) -> Path:
    """Writes one translation unit that includes all sources, to parse their headers only once."""
    unit.write_text("".join(f'#include "{source}"\n' for source in sources))
    return unit
