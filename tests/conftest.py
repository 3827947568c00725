# SPDX-License-Identifier: Apache-2.0
"""Settings of all tests, and the order in which the workers of pytest-xdist run the test files."""

from __future__ import annotations

import gc
import importlib
import os
import signal
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, suppress
from functools import cache
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests import proofs

if TYPE_CHECKING:
    from tests.support.rank_pool import RankPool

# With SCHED_BATCH, a thread that wakes up does not preempt a running thread. Otherwise Gloo's
# thread, woken by a message, often preempts the thread that holds the lock which it needs, and then
# polls the lock for a time slice of milliseconds. This polling was a quarter of the CPU time of
# tests over nodes. All processes and threads that tests start inherit the policy.
with suppress(OSError):  # a sandbox may refuse it; the tests are then only slower
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

# Tests have more ranks than the machine has cores: each rank gets one compute thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# On a GPU, ranks that are threads have more streams than the driver has queues by default; one
# rank's message could then block the work that another rank waits for (docs/cuda.md, "Traps").
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

# No test depends on how torch's compiler vectorizes loops. By default each process that uses this
# compiler compiles and runs a test program for each instruction set of the processor.
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "0"

# Faults that tests provoke write no traces. The tests of traces set a folder of their own.
os.environ["RINGCOMM_TRACE_DIR"] = "off"

# Hypothesis: no time limit per example, and the same examples on every machine, also in CI.
settings.register_profile("ringcomm", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ringcomm")

# A compiling test may be slow while other tests use the cores.
COMPILES_LIMIT_S = 900


def pytest_configure(config: pytest.Config) -> None:
    # Shells start background jobs with SIGINT ignored, which the tests' processes would inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config.pluginmanager.register(proofs.Gate(config), "proofs")


def _turn(item: pytest.Item) -> int:
    """Returns the sort key: long files first, so that no long file runs alone at the end."""
    if item.get_closest_marker("deadlines"):
        return 0
    is_long = item.get_closest_marker("compiles") or item.get_closest_marker("long")
    return 1 if is_long else 2


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Turns garbage collection off during pytest's collection: its objects stay to the end."""
    gc.disable()
    try:
        _import_from_another_one_on(session)
        return (yield)
    finally:
        gc.enable()


def _import_from_another_one_on(session: pytest.Session) -> None:
    """Makes each worker of ``make test`` import the test files in an order of its own.

    If no byte code exists yet, all workers would otherwise rewrite the assertions of the same file
    at once. Here each worker starts at another file, and later finds the byte code that the others
    wrote. An error in an import is ignored here, since collecting the file reports it.
    """
    config = session.config
    worker = getattr(config, "workerinput", None)
    if worker is None or config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    root = config.rootpath
    gate = config.pluginmanager.get_plugin("proofs")
    names = [
        ".".join(path.relative_to(root).with_suffix("").parts)
        for path in sorted(root.glob("tests/**/test_*.py"))
        if not gate.leaves_out(path)
    ]
    first = len(names) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
    for name in names[first:] + names[:first]:
        with suppress(Exception, pytest.skip.Exception):
            importlib.import_module(name)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("compiles") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(COMPILES_LIMIT_S))
    if hasattr(config, "workerinput"):
        items.sort(key=_turn)


def pytest_collection_finish() -> None:
    """Excludes all objects that exist after collection from every later garbage collection.

    The collected tests and torch's modules are about a million objects. Tests often call
    ``gc.collect()``, which would scan all of them: a third of the time of tests/zero.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """Builds the emulated driver before the workers start, outside of any test's timeout."""
    from tests.support import emulated_driver

    if emulated_driver.COMPILER is not None:
        emulated_driver.library_path()


@pytest.fixture(scope="session")
def rank_pools() -> Iterator[Callable[[int], RankPool]]:
    """Gives ``rank_pools(n)``: n processes that run checks as ranks, kept for the whole run."""
    from tests.support.rank_pool import RankPool

    with ExitStack() as stack:

        @cache
        def pool(world_size: int) -> RankPool:
            made = RankPool(world_size)
            stack.callback(made.close)
            return made

        yield pool
