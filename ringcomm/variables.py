"""The environment variables of ringcomm, and the warning about names that it does not know."""

from __future__ import annotations

import os
import warnings
from difflib import get_close_matches

__all__ = ["KNOWN", "warn_of_unknown"]

PREFIX = "RINGCOMM_"
# docs/reference/environment.md says what each is for.
KNOWN = frozenset(
    PREFIX + name
    for name in (
        # For users.
        *("HEAP_BYTES", "HEAP_DIR", "CUDA_HEAP_BYTES", "NODE_ID", "MASTER_PORT"),
        *("SOCKET_IFNAME", "TRACE_DIR", "CACHE_DIR", "COMMIT"),
        # From the commands to the processes that they start.
        *("STORE_PORT", "STORE_FD", "BENCH_STORE"),
        # For the tests.
        *("TEST_CASES", "TEST_NODES", "FUZZ", "TSAN", "MODEL_CHECK", "CUDA_COMPILE"),
        *("PTX_CHECK", "EMULATED_KERNELS", "REAL_LAUNCHES"),
    )
)
_warned: set[str] = set()


def warn_of_unknown() -> None:
    """Warns once of each environment variable ``RINGCOMM_*`` that nothing reads.

    The warning names the known variable with the nearest name.
    """
    unknown = {name for name in os.environ if name.startswith(PREFIX)} - KNOWN - _warned
    _warned.update(unknown)
    for name in sorted(unknown):
        # The common prefix would make all names similar.
        endings = {known.removeprefix(PREFIX): known for known in sorted(KNOWN)}
        near = get_close_matches(name.removeprefix(PREFIX).upper(), endings, n=1)
        meant = f" Did you mean {endings[near[0]]}?" if near else ""
        warnings.warn(
            f"the environment variable {name} has no effect: ringcomm knows no variable of this "
            f"name.{meant} All of them are in docs/reference/environment.md",
            RuntimeWarning,
            stacklevel=3,
        )
