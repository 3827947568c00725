# SPDX-License-Identifier: Apache-2.0
"""Compiles object files that several race tests link, once for all of these tests."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.compiler import (
    compile_to,
    shared_by_workers,
    skip_without_sanitizer,
)

# The loops over elements, and the waits: mutants change neither.
STEADY = ("isa_baseline", "waiter")


def compile_objects(folder: Path) -> None:
    def compiled(name: str) -> Path:
        source = ROOT / f"kernels/host/{name}.cpp"
        output = folder / f"{name}.o"
        return compile_to(output, ROOT / "kernels/include", source, extra=("-c",))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compiled, STEADY))


@pytest.fixture(scope="session")
def sanitized_objects(tmp_path_factory) -> list[Path]:
    skip_without_sanitizer(tmp_path_factory.mktemp("probe"))
    folder = shared_by_workers(tmp_path_factory, "sanitized", compile_objects)
    return [folder / f"{name}.o" for name in STEADY]
