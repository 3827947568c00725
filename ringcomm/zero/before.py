"""What a module was before ``shard()``, to be put back should that fail halfway."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ringcomm.zero.absent import make_present

Tensor = torch.Tensor


def _put_back(param: nn.Parameter, data: Tensor) -> None:
    make_present([param])
    param.data = data


class Before:
    """How to undo what was done so far; nothing in it needs another rank.

    NOTE [All or nothing]
    Ranks can be lost at any moment, so a rank must be able to put its module back alone. Its own
    values may be nowhere else: buckets have those of rank 0, rounded, and at stage 3 a part of
    them. So the memory that the parameters had stays until all ranks have moved all of theirs.
    What was on the meta device had none, and goes back there: such a module is not held twice.

    Attributes:
        meta: by ``id``, the parameters that were on the meta device.
    """

    def __init__(self, module: nn.Module) -> None:
        self.meta = {id(param) for param in module.parameters() if param.device.type == "meta"}
        self._undo = ExitStack()

    def call(self, undo: Callable[..., object], *args: Any) -> None:
        """``undo(*args)`` puts something back; what was done last is undone first."""
        self._undo.callback(undo, *args)

    def keep_data(self, param: nn.Parameter) -> None:
        """The parameter is about to get other memory."""
        if id(param) not in self.meta:
            self.call(_put_back, param, param.data)

    def keep_values(self, tensor: Tensor) -> None:
        """The tensor is about to be written to."""
        if id(tensor) not in self.meta:
            there = tensor.detach()
            self.call(there.copy_, there.clone())

    def keep_entry(self, table: dict[str, Any], key: str) -> None:
        """``table[key]`` is about to be replaced."""
        self.call(table.__setitem__, key, table[key])

    @contextmanager
    def put_back_on_failure(self) -> Iterator[None]:
        """If anything is raised inside, all that was done is undone."""
        with torch.no_grad(), self._undo:
            yield
            self._undo.pop_all()
