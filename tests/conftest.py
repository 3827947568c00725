# SPDX-License-Identifier: Apache-2.0
"""Settings of every test, and the order in which the workers of pytest-xdist take the files."""

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

# A thread that wakes up takes the processor from none that runs. Else Gloo's, woken by a message,
# often interrupts the thread that holds the lock which it wants, and asks for it over and over for
# the milliseconds of its turn: a quarter of the CPU seconds of tests over nodes. All processes and
# threads that tests start inherit it.
with suppress(OSError):  # a sandbox may deny it, and it is about time only
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

# Worlds are larger than the machine: one compute thread per rank, in spawned ranks too.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# On a GPU, ranks that are threads have more streams than the driver has queues by default, and the
# message of one would hold back what that of another waits for (docs/cuda.md, "Traps").
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

# No test looks at how torch's compiler writes loops. In every process that calls it, it would try
# the instructions of this processor, with a C++ compiler and an interpreter for each kind.
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "0"

# Faults that tests provoke leave no traces; the tests of traces choose a folder of their own.
os.environ["RINGCOMM_TRACE_DIR"] = "off"

# No test asserts a time, and a failure in CI must be the same failure elsewhere.
settings.register_profile("ringcomm", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ringcomm")

# A test that compiles may get little of the machine for as long as the others run.
COMPILES_LIMIT_S = 900


def pytest_configure(config: pytest.Config) -> None:
    # Shells start jobs in the background with SIGINT ignored, and all processes would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config.pluginmanager.register(proofs.Gate(config), "proofs")


def _turn(item: pytest.Item) -> int:
    """Files are begun in this order: the longest first, so that none is left alone at the end."""
    if item.get_closest_marker("deadlines"):
        return 0
    is_long = item.get_closest_marker("compiles") or item.get_closest_marker("long")
    return 1 if is_long else 2


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Collects no garbage meanwhile: what collection makes stays until the end."""
    gc.disable()
    try:
        _import_from_another_one_on(session)
        return (yield)
    finally:
        gc.enable()


def _import_from_another_one_on(session: pytest.Session) -> None:
    """Each worker of ``make test`` imports the files from another one on, before it collects them.

    Where nothing is compiled yet, all would otherwise rewrite the assertions of the same file at
    the same time. So each does its share, and finds the byte code of the others. What an import
    raises shows when the file is collected.
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
    """Keeps what stands after collection out of every later garbage collection.

    The collected tests and torch's modules are some million objects. The tests call
    ``gc.collect()`` often, which would look at each of them: a third of the time in tests/zero.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """Builds the emulated driver before the workers begin: no test's deadline has to cover it."""
    from tests.support import emulated_driver

    if emulated_driver.COMPILER is not None:
        emulated_driver.library_path()


@pytest.fixture(scope="session")
def rank_pools() -> Iterator[Callable[[int], RankPool]]:
    """``rank_pools(n)`` is n processes, kept for the whole run, that run checks as ranks."""
    from tests.support.rank_pool import RankPool

    with ExitStack() as stack:

        @cache
        def pool(world_size: int) -> RankPool:
            made = RankPool(world_size)
            stack.callback(made.close)
            return made

        yield pool
