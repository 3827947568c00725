"""Whose turn it is to be reduced.

NOTE [Order of reductions]
Reductions are collective, so all ranks must make them in one order, whatever order their backwards
run in. Buckets are reduced in a fixed order: that of the layout, backwards, and after the first
backward the order in which rank 0 had its buckets full. A bucket that is full early waits for its
turn. At the end of backward all buckets have had theirs, those without gradients too, since another
rank may have some.
"""

from __future__ import annotations

import torch

from ringcomm.comm.communicator import Communicator


class Order:
    """The turns of the buckets of one rank.

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
        rest = [number for number in self.numbers if number not in self._filled]
        order = torch.tensor([*self._filled, *rest], dtype=torch.int64, device=comm.device)
        if len(order):
            comm.broadcast(order, 0)
        self.numbers = order.tolist()
        self._learned = True
