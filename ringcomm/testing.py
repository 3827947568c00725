# SPDX-License-Identifier: Apache-2.0
"""Tests of programs that use ringcomm: ``ranks(4)`` runs a test function on ranks in threads.

pytest calls the decorated function like any test. Importing this module loads neither torch nor
pytest, so pytest may also load it as a plug-in (``-p ringcomm.testing``).
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringcomm.comm.communicator import Communicator, Device
    from ringcomm.comm.host.options import CommOptions

__all__ = ["ranks"]

# The parameter of a test that gets the rank's communicator.
COMM = "comm"
# The report shows at most this many characters of another rank's error.
LONGEST_LINE = 300


def ranks(
    n: int,
    *,
    timeout: timedelta | float = 60.0,
    options: CommOptions | None = None,
    device: Device | Sequence[Device] = None,
    nodes: Sequence[int] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Returns a decorator that runs a test on all ranks of a world in this process.

    Each rank is a thread, as in :func:`ringcomm.local_world`. The test's parameter ``comm`` gets
    the communicator of the rank; all ranks get the same values of the other parameters, which
    pytest fills in from fixtures and ``parametrize``. A test without ``comm`` can use
    ``ringcomm.all_reduce`` and the other functions of the package.

    If a rank raises, waits of the other ranks for it end, and the test fails with the error and
    the traceback of this rank; a note names the rank and the errors of the other ranks.

    Args:
        n: the number of ranks.
        timeout: seconds that a call waits for its peers. The default is short, so that ranks that
            wait for each other fail the test soon.
        options: as in :func:`ringcomm.local_world`.
        device: as in :func:`ringcomm.local_world`.
        nodes: as in :func:`ringcomm.local_world`.

    Raises:
        TypeError: the decorated object is not a function, for example a class.
    """

    def decorate(test: Callable[..., Any]) -> Callable[..., None]:
        if not inspect.isfunction(test):
            raise TypeError(f"ringcomm.testing.ranks: expected a test function, got {test!r}")
        signature = inspect.signature(test)
        parameters = [each for name, each in signature.parameters.items() if name != COMM]
        takes_comm = COMM in signature.parameters

        @functools.wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            __tracebackhide__ = True  # pytest then omits this frame
            from ringcomm.comm.local_world import local_world
            from ringcomm.errors import RingcommError

            errors: dict[int, BaseException] = {}

            def body(comm: Communicator) -> None:
                own = {COMM: comm} if takes_comm else {}
                try:
                    test(*args, **kwargs, **own)
                except BaseException as error:
                    errors[comm.rank] = error
                    raise

            first: BaseException | None = None
            try:
                world = local_world(n, timeout=timeout, options=options, device=device, nodes=nodes)
            except RingcommError as error:
                raise error.with_traceback(None) from None  # a wrong argument of the decorator
            with world:
                try:
                    world.run(body)
                except BaseException as error:
                    first = error
            if first is not None:
                _tell(first, errors, n)
                raise first.with_traceback(_in_test(first))

        # pytest reads the fixtures' names here. All arguments are passed by name.
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return run

    return decorate


def _in_test(error: BaseException) -> TracebackType | None:
    """Returns the error's traceback without ringcomm's frames; all of it if there are no others.

    The first frames start the ranks. The last frames belong to the call that the test made. They
    stay if the error is not a ``RingcommError``, since ringcomm may then have caused the error.
    """
    from ringcomm.errors import RingcommError

    frames: list[TracebackType] = []
    each = error.__traceback__
    while each is not None:
        frames.append(each)
        each = each.tb_next
    outside = [index for index, frame in enumerate(frames) if not _is_own(frame)]
    if not outside:
        return error.__traceback__
    if not isinstance(error, RingcommError):
        return frames[outside[0]]
    kept: TracebackType | None = None
    for index in reversed(outside):
        frame = frames[index]
        kept = TracebackType(kept, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return kept


def _is_own(traceback: TracebackType) -> bool:
    name = traceback.tb_frame.f_globals.get("__name__", "")
    return isinstance(name, str) and name.startswith("ringcomm.")


def _tell(first: BaseException, errors: Mapping[int, BaseException], n: int) -> None:
    """Adds a note with the ranks and their errors; before Python 3.11 prints it to stderr."""
    raised = [rank for rank, error in errors.items() if error is first]
    lines = [f"raised on rank {raised[0]} of {n}"] if raised else []
    lines += [
        f"rank {rank} raised {_line(error)}"
        for rank, error in sorted(errors.items())
        if error is not first
    ]
    add_note = getattr(first, "add_note", None)
    if add_note is None:
        print(*lines, sep="\n", file=sys.stderr)
        return
    for line in lines:
        add_note(line)


def _line(error: BaseException) -> str:
    """Describes an error in one line, with the line of the test that raised it."""
    told = (str(error).splitlines() or [""])[0]
    if len(told) > LONGEST_LINE:
        told = f"{told[:LONGEST_LINE]} [...]"
    where, found = "", _in_test(error)
    if found is not None:
        where = f" at {os.path.basename(found.tb_frame.f_code.co_filename)}:{found.tb_lineno}"
    return f"{type(error).__name__}{where}: {told}"
