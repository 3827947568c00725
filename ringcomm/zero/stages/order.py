# SPDX-License-Identifier: Apache-2.0
"""The order in which a backward reduces the modules of one communicator.

NOTE [Several modules in one backward]
All buckets of one module have their turns before the buckets of the next module. Where one
communicator reduces for several modules, a backward begins with a small all-reduce on the hosts, in
which the ranks agree on the modules that get a gradient on any rank: autograd can predict them.
No host waits for its device in this all-reduce. Modules that were sharded last
come first. From the second backward over the same modules on, the order is the order in which the
modules' first gradients arrived on rank 0. Autograd cannot predict what a reentrant checkpoint will
run, so at the end the ranks also agree on further modules that got gradients unexpectedly.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

import torch

from ringcomm.comm.agreement import any_rank
from ringcomm.comm.communicator import Communicator
from ringcomm.errors import ArgumentError, where

# ---- Whether a stage of one of torch's pipeline schedules runs a module --------------------------
# NOTE [Micro-batches of a schedule] A schedule of ``torch.distributed.pipelining`` runs a backward
# for each micro-batch, and at its end divides ``p.grad`` by the number of micro-batches. At stages
# 2 and 3 a gradient must therefore stay in ``p.grad`` until the schedule's end, as under
# ``no_sync``; a reduction in each backward would also communicate once per micro-batch. A schedule
# marks the last micro-batch only for modules of DDP and FSDP. But the pipeline stage calls the
# module, so its frame is on the stack: during the forward on every device, and during the backward
# if autograd runs on the caller's thread, as on a CPU. The frame of the backward is found even if
# the forward was compiled; a compiled forward runs no hooks.
#
# NOTE [Split backwards] Some schedules first compute the gradients of a stage's inputs, for which
# the neighbouring stage waits, and later the gradients of the stage's parameters. They call
# ``torch.autograd.grad()`` on nodes inside the graph, which no module hook notices. Both backwards
# begin with a look-up of the parameters' nodes in the graph. At stage 3, resharded parameters
# notice this look-up; they are then unsharded until the step.
#
# NOTE [Sums to come] A schedule that mixes whole and split backwards of a stage, as DualPipeV does,
# adds gradients of split backwards to ``p.grad`` itself, in an order that differs between ranks. If
# ``p.grad`` is a replicated DTensor and the new gradient is a Partial DTensor (a sum to come), each
# such addition would be an all-reduce, and the all-reduces of two parameters could be mistaken for
# each other. So during a schedule gradients of DTensors keep the placements that autograd gives
# them, and are aligned when the step or its reduction takes them: once, and in one order. If
# autograd runs on another thread (on GPUs), the schedule is not detected; this has not been tried.

_STAGE = "torch.distributed.pipelining.stage"
_BACKWARD = "torch.distributed.pipelining._backward"


def in_pipeline() -> bool:
    """True if this thread is in a call of a pipeline stage."""
    # Every access to p.grad calls this function, so the quick check of imports comes first.
    return _STAGE in sys.modules and _in_call_of(_STAGE)


def in_split_backward() -> bool:
    """True if this thread is in a backward of a pipeline stage, or prepares one."""
    return _in_call_of(_BACKWARD)


def _in_call_of(module: str) -> bool:
    if module not in sys.modules:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != module:
        frame = frame.f_back
    return frame is not None


# ---- The step profile: spans in which an engine computes, communicates or waits ------------------


@dataclass(frozen=True)
class TimedSpan:
    """A time interval from ``begin_us`` to ``end_us`` on the process's clock, in microseconds.

    Attributes:
        name: name of the work.
        kind: "communication", "wait" (the caller waits for communication) or "compute".
        thread: identifier of the thread that did the work.
        size_bytes: number of bytes moved; 0 if the work moves none.
    """

    name: str
    kind: str
    begin_us: float
    end_us: float
    thread: int
    size_bytes: int = 0


_UNRECORDED = nullcontext()


class StepProfile:
    """The recorded spans of an engine; recording costs nothing unless ``on`` is True."""

    def __init__(self) -> None:
        self.on = False
        self.spans: list[TimedSpan] = []

    def __repr__(self) -> str:
        state = "on" if self.on else "off"
        return f"<ringcomm.zero.StepProfile {state}, {len(self.spans)} spans>"

    def span(
        self, name: str, size_bytes: int = 0, kind: str = "communication"
    ) -> AbstractContextManager[None]:
        """Records the body of the ``with`` as a span."""
        return self._record(name, size_bytes, kind) if self.on else _UNRECORDED

    def waiting(self, name: str) -> AbstractContextManager[None]:
        """Records the body of the ``with`` as waiting for communication."""
        return self._record(f"wait for {name}", 0, "wait") if self.on else _UNRECORDED

    @contextmanager
    def _record(self, name: str, size_bytes: int, kind: str) -> Iterator[None]:
        begin_us = time.perf_counter_ns() / 1000
        try:
            yield
        finally:
            end_us = time.perf_counter_ns() / 1000
            thread = threading.get_ident()
            self.spans.append(TimedSpan(name, kind, begin_us, end_us, thread, size_bytes))

    def hidden_share(self) -> float:
        """Returns the fraction of the communication time in which no caller waited.

        NaN if there was no communication. Communication on the caller's own thread also counts as
        waiting.
        """
        moved = sum(s.end_us - s.begin_us for s in self.spans if s.kind == "communication")
        waited = sum(s.end_us - s.begin_us for s in self.spans if s.kind == "wait")
        return 1.0 - min(waited, moved) / moved if moved else float("nan")

    def write(self, path: str | Path, rank: int) -> None:
        """Writes the spans in the Trace Event Format, which Chrome and Perfetto display.

        Args:
            path: path of the JSON file.
            rank: this rank, displayed as the number of the process.
        """
        events = [
            {
                "name": span.name,
                "cat": span.kind,
                "ph": "X",
                "ts": span.begin_us,
                "dur": span.end_us - span.begin_us,
                "pid": rank,
                "tid": span.thread,
                "args": {"bytes": span.size_bytes},
            }
            for span in self.spans
        ]
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


class ModuleReduction(Protocol):
    """The part of a module's gradient reduction that :class:`ModuleOrder` uses.

    Attributes:
        has_left_over: True if a backward on some rank may have left gradients unreduced.
    """

    has_left_over: bool

    def advance(self) -> bool:
        """Reduces the full buckets whose turn it is; returns whether all turns are over."""

    def reduce_rest(self) -> None:
        """Reduces the buckets that this backward has not reduced yet; collective."""

    def end_backward(self) -> None:
        """Called once all modules have reduced this backward's gradients; collective."""

    def abandon(self) -> None:
        """Called after a backward raised, before this rank makes the missing reductions."""


class ReducingModule(Protocol):
    """The part of a sharded module's engine that :class:`ModuleOrder` uses.

    Attributes:
        number: the module's number among the modules that its communicator reduces; equal on all
            ranks.
    """

    number: int

    @property
    def reduction(self) -> ModuleReduction | None:
        """The reductions of the module's gradients, or None."""

    def expects_gradients(self) -> bool:
        """True if the running backward will add to some parameter's gradient."""

    def begin_reducing(self) -> None:
        """Called once the ranks agree that this backward reduces the module; collective."""

    def end_backward(self) -> None:
        """Called when the backward has ended or raised."""


class _Backward:
    """A callback at the end of a backward; autograd drops the callback if the backward raises."""

    def __init__(self, order: ModuleOrder) -> None:
        self._order = order

    def __call__(self) -> None:
        self._order.end_backward()


class ModuleOrder:
    """The modules that one communicator reduces, and the order of their turns, on one rank.

    Modules may be garbage-collected at different times on different ranks. So the ranks agree on
    the list of numbers in :meth:`join`, and only this list decides whether a collective is made.
    """

    def __init__(self, comm: Communicator) -> None:
        # Weak, since the communicators are the weak keys of the table of orders.
        self._comm_ref = weakref.ref(comm)
        self._last_number = 0
        self._numbers: list[int] = []
        self._paused: list[int] = []
        # Modules whose last forward was called by a pipeline stage.
        self._pipelined: set[int] = set()
        self._modules: weakref.WeakValueDictionary[int, ReducingModule] = (
            weakref.WeakValueDictionary()
        )
        self._learned: dict[tuple[int, ...], list[int]] = {}
        # The state of the running backward; hooks read ``backward`` first.
        #: A weak reference. It is dead once the backward has ended; _forget_backward() clears it.
        self.backward: weakref.ref[_Backward] | None = None
        self._reduces = False
        self._expected: tuple[int, ...] = ()
        self._sequence: list[int] = []
        self._turns: list[int] = []
        self._arrived: list[int] = []
        self._taking_part: list[int] = []

    @property
    def _comm(self) -> Communicator:
        comm = self._comm_ref()
        assert comm is not None, "a sharded module keeps its communicator alive"
        return comm

    # ---- which modules there are ----------------------------------------------------------------

    @property
    def has_several(self) -> bool:
        """True if there are several modules, so that ranks must agree on the modules to reduce."""
        return len(self._numbers) > 1

    def join(self) -> int:
        """Returns the number of a new module, to be registered by :meth:`add`; collective."""
        self.settle()
        if self._numbers:
            alive = [number in self._modules for number in self._numbers]
            self._numbers = any_of(self._comm, self._numbers, alive)
        self._learned.clear()
        self._last_number += 1
        self._numbers.append(self._last_number)
        return self._last_number

    def add(self, module: ReducingModule) -> None:
        """Registers the module whose number :meth:`join` has returned."""
        self._modules[module.number] = module

    def leave(self, number: int) -> None:
        """Removes a module that is no longer sharded; must be called on all ranks."""
        self._numbers.remove(number)
        self._modules.pop(number, None)
        self._pipelined.discard(number)
        self._learned.clear()

    def pause(self, number: int) -> None:
        """Pauses a module's reductions until :meth:`resume`; must be called on all ranks."""
        self._paused.append(number)

    def resume(self, number: int) -> None:
        """Undoes one call of :meth:`pause`."""
        self._paused.remove(number)

    def runs(self, number: int) -> None:
        """Called in the forward of a module if a backward will follow.

        See NOTE [Micro-batches of a schedule] in ``zero/stages/order.py``.
        """
        if in_pipeline():
            self._pipelined.add(number)
            _reduction_of(self._module(number)).has_left_over = True
        else:
            self._pipelined.discard(number)

    # ---- during backward ------------------------------------------------------------------------

    @property
    def in_backward(self) -> bool:
        """True while a backward through at least one of the modules runs."""
        return self.backward is not None and self.backward() is not None

    def take_part(self, module: ReducingModule) -> None:
        """Called by a module's first hook in a backward."""
        self.settle()
        self._taking_part.append(module.number)
        if not self.in_backward:
            backward = _Backward(self)
            self.backward = weakref.ref(backward)
            # Called when the outermost backward ends, even if hooks of nested backwards run later.
            torch.autograd.Variable._execution_engine.queue_callback(backward)
            self._begin()

    def _begin(self) -> None:
        """Determines the modules that this backward reduces, and their order; collective."""
        if in_pipeline():
            # Mark all numbers, since some modules may be garbage-collected on some ranks only.
            self._pipelined.update(self._numbers)
            for module in list(self._modules.values()):
                _reduction_of(module).has_left_over = True
        reducing = [number for number in self._numbers if not self._waits(number)]
        mine = [
            number in self._modules and self._modules[number].expects_gradients()
            for number in reducing
        ]
        # A rank may run a backward alone if it reduces no gradients: torch.autograd.grad(), or a
        # backward under no_sync().
        for_inputs = not torch.autograd._is_checkpoint_valid()  # type: ignore[no-untyped-call]
        alone = for_inputs or bool(self._paused)
        self._reduces = bool(reducing) and (any(mine) or not alone)
        if not self._reduces:
            return
        expected = reducing if len(self._numbers) == 1 else any_of(self._comm, reducing, mine)
        self._expected = tuple(expected)
        self._sequence = self._learned.get(self._expected, expected[::-1])
        self._turns = list(self._sequence)
        try:
            self._begin_reducing(self._sequence)
        except BaseException:
            self._reduces = False  # makes settle() reduce nothing
            raise

    def _begin_reducing(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._module(number).begin_reducing()

    def _waits(self, number: int) -> bool:
        """True if a module's gradients must not be reduced yet."""
        return number in self._paused or number in self._pipelined

    def _module(self, number: int) -> ReducingModule:
        module = self._modules.get(number)
        if module is None:
            comm = self._comm
            raise ArgumentError(
                f"{where('zero', comm.rank, comm.world_size)}: other ranks run a backward through "
                f"sharded module {number} of this communicator, which this rank has dropped; keep "
                "it on all ranks for as long as one of them trains it"
            )
        return module

    def arrived(self, number: int) -> bool:
        """Notes that a module has a gradient; returns whether this backward reduces the module."""
        if not self.reduces(number):
            return False
        if number not in self._arrived:
            self._arrived.append(number)
        return True

    def reduces(self, number: int) -> bool:
        """True if this backward reduces a module's gradients."""
        return self._reduces and not self._waits(number)

    def advance(self) -> None:
        """Reduces the full buckets whose turn it is, module by module."""
        while self._turns:
            module = self._modules.get(self._turns[0])
            if module is None or module.reduction is None or not module.reduction.advance():
                return
            self._turns.pop(0)

    # ---- at the end of backward -----------------------------------------------------------------

    def settle(self) -> None:
        """Ends a backward that raised; collective if there was one.

        Peers whose backward did not raise have reduced all buckets, so this rank must do so as
        well. It contributes zeros for the gradients that did not arrive.
        """
        if self.backward is None or self.in_backward:
            return
        comm = self._comm_ref()
        if self._reduces:
            for number in self._sequence:
                module = self._modules.get(number)
                if module is not None:
                    _reduction_of(module).abandon()
        if comm is None or comm.aborted:
            self._forget_backward()
        else:
            self.end_backward()

    def end_backward(self) -> None:
        """Reduces all remaining buckets, and clears the backward's state; collective."""
        try:
            if self._reduces:
                self._reduce_rest()
        finally:
            self._forget_backward()

    def _reduce_rest(self) -> None:
        self._end_reducing(self._turns, self._sequence)
        if len(self._numbers) == 1:
            return
        if self._expected and self._expected not in self._learned:
            usual = self._expected[::-1]
            came = [number for number in self._arrived if number in usual]
            self._learned[self._expected] = order_of_rank_0(self._comm, came, usual)
        others = [
            number
            for number in self._numbers
            if number not in self._expected and not self._waits(number)
        ]
        unexpected = any_of(self._comm, others, [number in self._arrived for number in others])
        self._begin_reducing(unexpected[::-1])
        self._end_reducing(unexpected[::-1], unexpected[::-1])

    def _end_reducing(self, left: Iterable[int], all_of_them: Iterable[int]) -> None:
        for number in left:
            _reduction_of(self._module(number)).reduce_rest()
        # Ranks finish a module's turns at different times, so all modules end the backward here.
        for number in all_of_them:
            _reduction_of(self._module(number)).end_backward()

    def _forget_backward(self) -> None:
        numbers, self._taking_part = self._taking_part, []
        self.backward = None
        self._reduces = False
        self._expected, self._sequence, self._turns, self._arrived = (), [], [], []
        with ExitStack() as all_end:
            for number in numbers:
                module = self._modules.get(number)
                if module is not None:
                    all_end.callback(module.end_backward)


def _reduction_of(module: ReducingModule) -> ModuleReduction:
    assert module.reduction is not None
    return module.reduction


def any_of(comm: Communicator, numbers: Sequence[int], mine: Iterable[bool]) -> list[int]:
    """Returns the numbers whose flag in ``mine`` is true on some rank; collective."""
    if not numbers:
        return []
    flags = any_rank(comm, list(mine))
    return [number for number, flag in zip(numbers, flags, strict=True) if flag]


def order_of_rank_0(comm: Communicator, first: Sequence[int], usual: Sequence[int]) -> list[int]:
    """Returns rank 0's ``first``, then the other numbers in ``usual`` order; collective."""
    rest = [number for number in usual if number not in first]
    order = torch.tensor([*first, *rest], dtype=torch.int64, device=comm.device)
    if len(order):
        comm.broadcast(order, 0)
        comm.engine.finish_host_side()
    return [int(number) for number in order.tolist()]


_guard = threading.Lock()
_orders: weakref.WeakKeyDictionary[Communicator, ModuleOrder] = weakref.WeakKeyDictionary()


def module_order(comm: Communicator) -> ModuleOrder:
    """Returns the order of the modules that a communicator reduces."""
    with _guard:
        return _orders.setdefault(comm, ModuleOrder(comm))
