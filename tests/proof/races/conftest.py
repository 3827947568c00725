"""Objects that several race tests are linked with, compiled once for all of them."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.compiler import compile_to, skip_without_sanitizer


@pytest.fixture(scope="session")
def sanitized_objects(tmp_path_factory) -> list[Path]:
    """The loops over elements, and the waits, in neither of which a mutant is."""
    folder = tmp_path_factory.mktemp("sanitized")
    skip_without_sanitizer(folder)

    def compiled(name: str) -> Path:
        source = ROOT / f"kernels/host/{name}.cpp"
        return compile_to(folder / f"{name}.o", ROOT / "kernels/include", source, extra=("-c",))

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(compiled, ("isa_baseline", "waiter")))
