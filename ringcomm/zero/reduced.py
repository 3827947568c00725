"""One bucket of gradients on its way to a shard, and the buffers that buckets are filled in."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ringcomm.memory.heap import empty
from ringcomm.optim.gradients import check_gradient
from ringcomm.zero.absent import plainly
from ringcomm.zero.stored import Stored

Tensor = torch.Tensor


@dataclass(eq=False)
class Reduced:
    """One bucket's gradients, from the parameters to this rank's shard.

    Attributes:
        stored: the bucket.
        shard: [chunk elements], float32 or 16 bits; the sum since :meth:`Reduction.drop`.
        words: int64 [24], the norm of what was reduced last.
        holds: whether anything was reduced into the shard.
        active: by parameter: whether a gradient was reduced since :meth:`Reduction.drop`.
        missing: indices of parameters whose gradient this backward has not brought yet.
        taken: those whose gradient is in ``buffer``.
        buffer: [elements], in the heap, while the bucket is filled.
        gone: whether this backward has reduced it.
        summed: whether ``words`` were computed.
        version: of ``shard`` when it was reduced last.
    """

    stored: Stored
    shard: Tensor
    words: Tensor
    holds: bool = False
    active: list[bool] = field(init=False)
    missing: set[int] = field(default_factory=set)
    taken: set[int] = field(default_factory=set)
    buffer: Tensor | None = None
    gone: bool = False
    summed: bool = False
    version: int = -1

    def __post_init__(self) -> None:
        self.active = [False] * len(self.stored.params)

    def take(self, index: int) -> None:
        """Moves a parameter's gradient, if it has one, into the buffer."""
        placed, buffer = self.stored.params[index], self.buffer
        grad = placed.param.grad
        if grad is None or buffer is None:
            return
        check_gradient(grad, placed.param, f"parameter {placed.name}")
        view = placed.view(buffer)
        if index in self.taken:
            view.add_(grad.detach())
        else:
            view.copy_(grad.detach())
            self.taken.add(index)
        placed.param.grad = None

    def fill_up(self, buffer: Tensor) -> None:
        """Makes ``buffer`` the bucket's, with all gradients that there are and zeros elsewhere."""
        self.buffer = buffer
        with plainly():
            for index, placed in enumerate(self.stored.params):
                self.take(index)
                if index not in self.taken:
                    placed.view(buffer).zero_()

    @property
    def has_more(self) -> bool:
        """Whether there are gradients that were not reduced."""
        with plainly():
            return bool(self.taken) or any(p.param.grad is not None for p in self.stored.params)

    def drop(self) -> None:
        """Forgets gradients that were not reduced."""
        self.taken.clear()
        with plainly():
            for placed in self.stored.params:
                placed.param.grad = None


class Buffers:
    """Memory of the heap for buckets that are filled or reduced, used again and again.

    Args:
        most_elems: of a bucket.
        count: how many there should be.
        device: of the heap.
    """

    def __init__(self, most_elems: int, count: int, device: torch.device) -> None:
        self._most_elems = most_elems
        self._count = count
        self._device = device
        self._made = 0
        self._free: dict[torch.dtype, list[Tensor]] = {}

    def get(self, stored: Stored, must: bool) -> Tensor | None:
        """[bucket elements] for a bucket, zero in the padding; None if there are enough.

        Args:
            stored: the bucket.
            must: make one all the same.
        """
        dtype, elems = stored.layout.dtype, stored.layout.elems
        free = self._free.setdefault(dtype, [])
        if not free and self._made >= self._count and not must:
            return None
        if free:
            whole = free.pop()
        else:
            self._made += 1
            whole = empty(self._most_elems, dtype=dtype, device=self._device)
        # The padding is reduced, too, and nobody else writes it.
        end = 0
        for placed in stored.params:
            if end < placed.begin:
                whole[end : placed.begin].zero_()
            end = placed.end
        whole[end:elems].zero_()
        return whole[:elems]

    def give(self, buffer: Tensor) -> None:
        """Takes a buffer back."""
        self._free[buffer.dtype].append(buffer.as_strided((self._most_elems,), (1,), 0))
