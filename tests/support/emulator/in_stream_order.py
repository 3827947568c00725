# SPDX-License-Identifier: Apache-2.0
"""Runs torch's operations on emulated devices in the order that they have on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.torch_operators import make_operators

_ON_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_ALLOCATES = ("aten::empty", "aten::new_empty")


def touches_data(function: Any) -> bool:
    """False for operations that only make views or allocate memory."""
    schema = function._schema
    views = [
        each.alias_info is not None and not each.alias_info.is_write for each in schema.returns
    ]
    return not (views and all(views)) and not schema.name.startswith(_ALLOCATES)


class InStreamOrder(TorchDispatchMode):
    """Inside, an operation waits for the thread's current streams, and then runs immediately.

    Tensors that operations return are kept alive until the block ends: unlike a GPU's caching
    allocator, malloc would reuse their memory before the kernels that use them. Tensors in memory
    that itself waits for streams (according to ``waits``) are not kept.
    """

    def __init__(
        self, wait: Callable[[], None], waits: Callable[[torch.Tensor], bool] = lambda tensor: False
    ) -> None:
        super().__init__()
        make_operators()  # each rank of a process has such a mode
        self._wait = wait
        self._waits = waits
        self._kept: list[torch.Tensor] = []
        self._depth = 0  # nesting of ringcomm's operations

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Prevents torch from importing its compiler in each process, which takes seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "ringcomm":
            # An operation of ringcomm does not wait here, but torch's operations inside it do.
            with self._nested():
                return func.redispatch(_ON_CPU, *args, **(kwargs or {}))
        if touches_data(func):
            self._wait()
        result = func(*args, **(kwargs or {}))
        self._kept += [
            each
            for each in torch.utils._pytree.tree_leaves(result)
            if torch.is_tensor(each) and not self._waits(each)
        ]
        return result

    @contextmanager
    def _nested(self) -> Iterator[None]:
        self._depth += 1
        try:
            with self:
                yield
        finally:
            self._depth -= 1

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self._depth == 0:
            self.finish()

    def finish(self) -> None:
        """Waits for the thread's current streams, and releases the operations' results.

        Stage 3 looks for views of parameters that it has unsharded; kept results would count.
        """
        self._wait()
        self._kept.clear()
