"""Whose turn it is to be reduced: among the modules of a communicator, and among their buckets.

NOTE [Order of reductions]
Reductions are collective, so all ranks must make them in one order, whatever order their backwards
run in. A module's buckets are reduced in a fixed order: that of the layout, backwards, and after
the first backward the order in which rank 0 had its buckets full. A bucket that is full early waits
for its turn. At the end of backward all buckets have had theirs, those without gradients too, since
another rank may have some.

NOTE [Several modules in one backward]
All buckets of one module have their turns before those of the next. Where one communicator reduces
for several modules, a backward begins with a small all-reduce in which the ranks agree on the
modules that some rank needs: autograd knows which parameters the backward will reach. The modules
that were sharded last come first, and from the second such backward on the order is that in which
they brought rank 0 their first gradients. Autograd does not know what a reentrant checkpoint will
run, so the ranks agree once more at the end, on modules that brought gradients unexpectedly.
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
        """No bucket is full."""
        self._position = 0
        self._filled = []

    def filled(self, number: int) -> None:
        """A bucket is full, perhaps before its turn."""
        self._filled.append(number)

    @property
    def turn(self) -> int | None:
        """The bucket whose turn it is; None: all have had theirs."""
        return self.numbers[self._position] if self.left else None

    @property
    def left(self) -> int:
        """How many buckets have not had their turn."""
        return len(self.numbers) - self._position

    def advance(self) -> None:
        """The next bucket has its turn."""
        self._position += 1

    def is_soon(self, number: int, turns: int) -> bool:
        """Whether a bucket has one of the next turns."""
        return number in self.numbers[self._position : self._position + turns]

    def learn(self, comm: Communicator) -> None:
        """At the end of the first backward agrees on the order of rank 0; collective."""
        if self._learned:
            return
        self.numbers = _order_of_rank_0(comm, self._filled, self.numbers)
        self._learned = True


class ReducingModule(Protocol):
    """A sharded module as :class:`ModuleOrder` knows it: its engine.

    Attributes:
        number: of the module among those that its communicator reduces for; equal on all ranks.
    """

    number: int

    def expects_gradients(self) -> bool:
        """Whether the backward that runs now will bring a parameter its gradient."""

    def begin_reducing(self) -> None:
        """The ranks have agreed that this backward reduces the module's gradients; collective."""

    def reduce_filled(self) -> bool:
        """Reduces the buckets that are full and whose turn it is; whether all have gone."""

    def reduce_rest(self) -> None:
        """Reduces all that this backward has left; collective."""

    def end_reducing(self) -> None:
        """All modules have reduced what this backward brought; collective."""

    def end_backward(self) -> None:
        """The backward is over, or it has raised."""


class _Backward:
    """What autograd calls at the end of a backward, and drops when the backward raises."""

    def __init__(self, order: ModuleOrder) -> None:
        self._order = order

    def __call__(self) -> None:
        self._order.end_backward()


class ModuleOrder:
    """The turns of the modules that one communicator reduces for, on one rank.

    Modules may be collected at different times on different ranks. So the ranks agree on the list
    of numbers in :meth:`join`, and whatever decides whether a collective is made depends on that
    list alone.
    """

    def __init__(self, comm: Communicator) -> None:
        # Weakly, as orders are found by their communicators.
        self._comm_ref = weakref.ref(comm)
        self._last_number = 0
        self._numbers: list[int] = []
        self._paused: list[int] = []
        self._modules: weakref.WeakValueDictionary[int, ReducingModule] = (
            weakref.WeakValueDictionary()
        )
        self._learned: dict[tuple[int, ...], list[int]] = {}
        # Of the backward that runs.
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
        """The number of one more module, which :meth:`add` brings; collective."""
        self.settle()
        if self._numbers:
            alive = [number in self._modules for number in self._numbers]
            self._numbers = any_of(self._comm, self._numbers, alive)
        self._learned.clear()
        self._last_number += 1
        self._numbers.append(self._last_number)
        return self._last_number

    def add(self, module: ReducingModule) -> None:
        """The module whose number :meth:`join` has returned."""
        self._modules[module.number] = module

    def leave(self, number: int) -> None:
        """A module is sharded no longer; on all ranks."""
        self._numbers.remove(number)
        self._modules.pop(number, None)
        self._learned.clear()

    def pause(self, number: int) -> None:
        """A module's backwards reduce nothing until :meth:`resume`; on all ranks."""
        self._paused.append(number)

    def resume(self, number: int) -> None:
        """Ends one :meth:`pause`."""
        self._paused.remove(number)

    # ---- during backward ------------------------------------------------------------------------

    @property
    def in_backward(self) -> bool:
        """Whether a backward is running that any of the modules takes part in."""
        return self._backward is not None and self._backward() is not None

    def take_part(self, module: ReducingModule) -> None:
        """A hook of the module is its first in this backward."""
        self.settle()
        self._taking_part.append(module.number)
        if not self.in_backward:
            backward = _Backward(self)
            self._backward = weakref.ref(backward)
            # Of the outermost backward, if hooks of a nested one come later.
            torch.autograd.Variable._execution_engine.queue_callback(backward)
            self._begin()

    def _begin(self) -> None:
        """Finds out which modules this backward reduces, and in what order; collective."""
        reducing = [number for number in self._numbers if number not in self._paused]
        mine = [
            number in self._modules and self._modules[number].expects_gradients()
            for number in reducing
        ]
        # What a rank may do alone, if no gradient is to be reduced: torch.autograd.grad(), for one,
        # and backwards under no_sync().
        for_inputs = not torch.autograd._is_checkpoint_valid()  # type: ignore[no-untyped-call]
        alone = for_inputs or bool(self._paused)
        self._reduces = bool(reducing) and (any(mine) or not alone)
        if not self._reduces:
            return
        expected = reducing if len(self._numbers) == 1 else any_of(self._comm, reducing, mine)
        self._expected = tuple(expected)
        self._sequence = self._learned.get(self._expected, expected[::-1])
        self._turns = list(self._sequence)
        self._begin_reducing(self._sequence)

    def _begin_reducing(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._module(number).begin_reducing()

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
        """A module has a gradient; whether this backward reduces it."""
        if not self._reduces or number in self._paused:
            return False
        if number not in self._arrived:
            self._arrived.append(number)
        return True

    def advance(self) -> None:
        """A bucket is full: reduces whatever has its turn now."""
        while self._turns:
            module = self._modules.get(self._turns[0])
            if module is None or not module.reduce_filled():
                return
            self._turns.pop(0)

    # ---- at the end of backward -----------------------------------------------------------------

    def settle(self) -> None:
        """Ends a backward that raised, and so never came to its end; collective if there was one.

        Peers whose backward did not raise have reduced all buckets, and so must this rank. It has
        zeros for what did not come.
        """
        if self._backward is None or self.in_backward:
            return
        comm = self._comm_ref()
        if comm is None or comm.aborted:
            self._forget_backward()
        else:
            self.end_backward()

    def end_backward(self) -> None:
        """Reduces all that is left; collective."""
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
            if number not in self._expected and number not in self._paused
        ]
        unexpected = any_of(self._comm, others, [number in self._arrived for number in others])
        self._begin_reducing(unexpected[::-1])
        self._end_reducing(unexpected[::-1], unexpected[::-1])

    def _end_reducing(self, left: Iterable[int], all_of_them: Iterable[int]) -> None:
        for number in left:
            self._module(number).reduce_rest()
        # Some ranks may have had all of one module's turns long ago, and some only now.
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
    """Those numbers that some rank says yes to; collective."""
    flags = torch.tensor(list(mine), dtype=torch.int32, device=comm.device)
    if len(flags):
        comm.all_reduce(flags, ReduceOp.MAX)
        comm.finish_host_side()
    return [number for number, flag in zip(numbers, flags.tolist(), strict=True) if flag]


def _order_of_rank_0(comm: Communicator, first: Sequence[int], usual: Sequence[int]) -> list[int]:
    """What came first on rank 0, and then the rest in their usual order; collective."""
    rest = [number for number in usual if number not in first]
    order = torch.tensor([*first, *rest], dtype=torch.int64, device=comm.device)
    if len(order):
        comm.broadcast(order, 0)
        comm.finish_host_side()
    return [int(number) for number in order.tolist()]


_guard = threading.Lock()
_orders: weakref.WeakKeyDictionary[Communicator, ModuleOrder] = weakref.WeakKeyDictionary()


def module_order(comm: Communicator) -> ModuleOrder:
    """The order of the modules that a communicator reduces for."""
    with _guard:
        return _orders.setdefault(comm, ModuleOrder(comm))
