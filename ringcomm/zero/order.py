"""The order in which the modules of a communicator, and the buckets of each, are reduced.

NOTE [Order of reductions]
Reductions are collective, so all ranks must make them in one order, whatever order their backwards
run in. A module's buckets are reduced in a fixed order. It is the reverse of the layout's order
until the first backward has ended, and from then on the order in which rank 0 filled its buckets. A
bucket that is full early waits for its turn. At the end of backward every bucket has had its turn,
even one without gradients, since another rank may have some.

NOTE [Several modules in one backward]
All buckets of one module have their turns before those of the next. Where one communicator reduces
for several modules, a backward begins with a small all-reduce in which the ranks agree on the
modules that some rank needs: autograd knows which parameters the backward will reach. The modules
that were sharded last come first. From the second backward over the same modules on, their order is
that in which their first gradients arrived on rank 0. Autograd does not know what a reentrant
checkpoint will run, so at the end the ranks agree once more, on modules whose gradients nobody
expected.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Protocol

import torch

from ringcomm.comm.arguments import ReduceOp
from ringcomm.comm.communicator import Communicator
from ringcomm.errors import ArgumentError, where
from ringcomm.zero.pipelines import in_pipeline


class BucketOrder:
    """The turns of the buckets of one module on one rank.

    Attributes:
        numbers: of the buckets, in order.
    """

    def __init__(self, buckets: int) -> None:
        self.numbers = list(range(buckets))[::-1]
        self._learned = False
        self._filled: list[int] = []
        self._position = 0

    def begin(self) -> None:
        """Begins a backward, with no bucket full."""
        self._position = 0
        self._filled = []

    def filled(self, number: int) -> None:
        """Notes that a bucket is full, perhaps before its turn."""
        self._filled.append(number)

    @property
    def turn(self) -> int | None:
        """The bucket whose turn it is, or None when all have had theirs."""
        return self.numbers[self._position] if self.left else None

    @property
    def left(self) -> int:
        """Number of buckets that have not had their turn."""
        return len(self.numbers) - self._position

    def advance(self) -> None:
        """Ends the turn of the current bucket."""
        self._position += 1

    def is_soon(self, number: int, turns: int) -> bool:
        """Returns whether a bucket has one of the next ``turns`` turns."""
        return number in self.numbers[self._position : self._position + turns]

    def learn(self, comm: Communicator) -> None:
        """Adopts rank 0's order of filling, at the end of the first backward; collective."""
        if self._learned:
            return
        self.numbers = _order_of_rank_0(comm, self._filled, self.numbers)
        self._learned = True


class ReducingModule(Protocol):
    """The interface of a sharded module's engine that :class:`ModuleOrder` uses.

    Attributes:
        number: number of the module among those that its communicator reduces for; equal on all
            ranks.
    """

    number: int

    def expects_gradients(self) -> bool:
        """Returns whether the running backward will add to some parameter's gradient."""

    def leave_over(self) -> None:
        """Called where a backward of some rank may leave gradients unreduced."""

    def begin_reducing(self) -> None:
        """Called once the ranks agree that this backward reduces the module; collective."""

    def reduce_filled(self) -> bool:
        """Reduces the full buckets whose turn it is; returns whether all buckets have gone."""

    def reduce_rest(self) -> None:
        """Reduces the buckets that this backward has not reduced yet; collective."""

    def end_reducing(self) -> None:
        """Called once all modules have reduced this backward's gradients; collective."""

    def abandon_reducing(self) -> None:
        """Called before the reductions of a backward that has raised are made up for."""

    def end_backward(self) -> None:
        """Called when the backward is over, or has raised."""


class _Backward:
    """The callback that autograd calls at the end of a backward, or drops when that raises."""

    def __init__(self, order: ModuleOrder) -> None:
        self._order = order

    def __call__(self) -> None:
        self._order.end_backward()


class ModuleOrder:
    """The turns of the modules that one communicator reduces for, on one rank.

    Modules may be garbage-collected at different times on different ranks. So the ranks agree on
    the list of numbers in :meth:`join`, and only that list decides whether a collective is made.
    """

    def __init__(self, comm: Communicator) -> None:
        # Weak, since the table of orders has the communicators as its weak keys.
        self._comm_ref = weakref.ref(comm)
        self._last_number = 0
        self._numbers: list[int] = []
        self._paused: list[int] = []
        # Modules whose last forward was called by a stage of a pipeline.
        self._pipelined: set[int] = set()
        self._modules: weakref.WeakValueDictionary[int, ReducingModule] = (
            weakref.WeakValueDictionary()
        )
        self._learned: dict[tuple[int, ...], list[int]] = {}
        # State of the running backward.
        self._backward: weakref.ref[_Backward] | None = None
        self._reduces = False
        self._expected: tuple[int, ...] = ()
        self._sequence: list[int] = []
        self._turns: list[int] = []
        self._arrived: list[int] = []
        self._taking_part: list[int] = []

    @property
    def _comm(self) -> Communicator:
        comm = self._comm_ref()
        assert comm is not None, "a module has its communicator for as long as it is sharded"
        return comm

    # ---- which modules there are ----------------------------------------------------------------

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
        """Removes a module that is sharded no longer; to be called on all ranks."""
        self._numbers.remove(number)
        self._modules.pop(number, None)
        self._pipelined.discard(number)
        self._learned.clear()

    def pause(self, number: int) -> None:
        """Stops a module's reductions until :meth:`resume`; to be called on all ranks."""
        self._paused.append(number)

    def resume(self, number: int) -> None:
        """Ends one :meth:`pause`."""
        self._paused.remove(number)

    def runs(self, number: int) -> None:
        """Called in the forward of a module whose backward is to come.

        See NOTE [Micro-batches of a schedule] in ``zero/pipelines.py``.
        """
        if in_pipeline():
            self._pipelined.add(number)
            self._module(number).leave_over()
        else:
            self._pipelined.discard(number)

    # ---- during backward ------------------------------------------------------------------------

    @property
    def in_backward(self) -> bool:
        """True while a backward runs that any of the modules takes part in."""
        return self._backward is not None and self._backward() is not None

    def take_part(self, module: ReducingModule) -> None:
        """Called by the first hook of a module that runs in a backward."""
        self.settle()
        self._taking_part.append(module.number)
        if not self.in_backward:
            backward = _Backward(self)
            self._backward = weakref.ref(backward)
            # Called at the end of the outermost backward, even if hooks of a nested one come later.
            torch.autograd.Variable._execution_engine.queue_callback(backward)
            self._begin()

    def _begin(self) -> None:
        """Determines which modules this backward reduces, and in what order; collective."""
        if in_pipeline():
            # All numbers, since some modules may be alive on some ranks alone.
            self._pipelined.update(self._numbers)
            for module in list(self._modules.values()):
                module.leave_over()
        reducing = [number for number in self._numbers if not self._waits(number)]
        mine = [
            number in self._modules and self._modules[number].expects_gradients()
            for number in reducing
        ]
        # A rank may run a backward alone if no gradient is to be reduced, such as
        # torch.autograd.grad(), or a backward under no_sync().
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
            self._reduces = False  # nothing is to be made up for
            raise

    def _begin_reducing(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._module(number).begin_reducing()

    def _waits(self, number: int) -> bool:
        """Returns whether a module's gradients are not to be reduced yet."""
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
        """Notes that a module has a gradient; returns whether this backward reduces it."""
        if not self.reduces(number):
            return False
        if number not in self._arrived:
            self._arrived.append(number)
        return True

    def reduces(self, number: int) -> bool:
        """Returns whether this backward reduces a module's gradients."""
        return self._reduces and not self._waits(number)

    def advance(self) -> None:
        """Reduces the full buckets whose turn it is, module by module."""
        while self._turns:
            module = self._modules.get(self._turns[0])
            if module is None or not module.reduce_filled():
                return
            self._turns.pop(0)

    # ---- at the end of backward -----------------------------------------------------------------

    def settle(self) -> None:
        """Ends a backward that raised before its end; collective if there was one.

        Peers whose backward did not raise have reduced all buckets, and so must this rank. It
        contributes zeros for the gradients that did not arrive.
        """
        if self._backward is None or self.in_backward:
            return
        comm = self._comm_ref()
        if self._reduces:
            for number in self._sequence:
                module = self._modules.get(number)
                if module is not None:
                    module.abandon_reducing()
        if comm is None or comm.aborted:
            self._forget_backward()
        else:
            self.end_backward()

    def end_backward(self) -> None:
        """Reduces all buckets that are left, and forgets the backward; collective."""
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
            self._learned[self._expected] = _order_of_rank_0(self._comm, came, usual)
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
            self._module(number).reduce_rest()
        # Ranks finish a module's turns at different times, so all modules end here, in one order.
        for number in all_of_them:
            self._module(number).end_reducing()

    def _forget_backward(self) -> None:
        numbers, self._taking_part = self._taking_part, []
        self._backward = None
        self._reduces = False
        self._expected, self._sequence, self._turns, self._arrived = (), [], [], []
        with ExitStack() as all_end:
            for number in numbers:
                module = self._modules.get(number)
                if module is not None:
                    all_end.callback(module.end_backward)


def any_of(comm: Communicator, numbers: Sequence[int], mine: Iterable[bool]) -> list[int]:
    """Returns the numbers for which ``mine`` is true on some rank; collective."""
    flags = torch.tensor(list(mine), dtype=torch.int32, device=comm.device)
    if len(flags):
        comm.all_reduce(flags, ReduceOp.MAX)
        comm.finish_host_side()
    return [number for number, flag in zip(numbers, flags.tolist(), strict=True) if flag]


def _order_of_rank_0(comm: Communicator, first: Sequence[int], usual: Sequence[int]) -> list[int]:
    """Returns rank 0's ``first`` numbers, then the rest in their usual order; collective."""
    rest = [number for number in usual if number not in first]
    order = torch.tensor([*first, *rest], dtype=torch.int64, device=comm.device)
    if len(order):
        comm.broadcast(order, 0)
        comm.finish_host_side()
    return [int(number) for number in order.tolist()]


_guard = threading.Lock()
_orders: weakref.WeakKeyDictionary[Communicator, ModuleOrder] = weakref.WeakKeyDictionary()


def module_order(comm: Communicator) -> ModuleOrder:
    """Returns the order of the modules that a communicator reduces for."""
    with _guard:
        return _orders.setdefault(comm, ModuleOrder(comm))
