"""Has a graph of an emulated device capture torch's operations, as a capture on a GPU does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from tests.support.emulator.in_stream_order import InStreamOrder, touches_data
from tests.support.emulator.runtime import EmulatedRuntime
from tests.support.torch_operators import make_operators

Tensor = torch.Tensor


class CapturedOperations(TorchDispatchMode):
    """Inside, operations are captured and not run; what they return is known at a replay only.

    Until then it holds NaN, or the number farthest from 0, so that nothing which depends on it
    comes out right. What they work on stays until :meth:`forget`, since graphs may be replayed.

    Args:
        capture: captures a function, which every replay calls in its place.
        known: tensors whose values the host may read. It may not read any other.
    """

    def __init__(
        self, capture: Callable[[Callable[[], None]], None], known: Iterable[Tensor] = ()
    ) -> None:
        super().__init__()
        make_operators()  # ranks of a process may capture at the same time
        self._capture = capture
        self._known = {each.data_ptr() for each in known}
        self._operations: list[Callable[[], None]] = []
        self._handed_out: list[Any] = []
        #: What operations have raised in replays, which is nowhere else to be seen.
        self.errors: list[BaseException] = []

    _should_skip_dynamo = InStreamOrder._should_skip_dynamo

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with _disable_current_modes():
            if not touches_data(func):
                # Memory from torch's allocator is the graph's own pool on a GPU, and stays.
                self._handed_out.append(func(*args, **kwargs))
                return self._handed_out[-1]
            if func is torch.ops.aten._local_scalar_dense.default:
                if args[0].data_ptr() not in self._known:
                    raise AssertionError("the host reads a tensor of the device in a capture")
                return func(*args, **kwargs)
            if func._schema.is_mutable:
                self._keep(lambda: self._run(func, args, kwargs, ()))
                return args[0]
            result = func(*args, **kwargs)
            outputs = [each for each in tree_leaves(result) if torch.is_tensor(each)]
            for each in outputs:
                _spoil(each)
            self._keep(lambda: self._run(func, args, kwargs, outputs))
            return result

    def forget(self) -> None:
        """Lets go of all tensors; the graph must not be replayed any more."""
        self._operations.clear()
        self._handed_out.clear()

    def _keep(self, operation: Callable[[], None]) -> None:
        # The emulator keeps what it is to call for good, so that it must not hold the tensors.
        index = len(self._operations)
        self._operations.append(operation)
        self._capture(lambda: self._operations[index]())

    @torch.no_grad()
    def _run(self, func: Any, args: Any, kwargs: Any, outputs: Iterable[Tensor]) -> None:
        try:
            found = [each for each in tree_leaves(func(*args, **kwargs)) if torch.is_tensor(each)]
            for output, each in zip(outputs, found, strict=False):
                output.copy_(each)
        except BaseException as error:
            self.errors.append(error)


def _spoil(tensor: Tensor) -> None:
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype is not torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).min)


@contextmanager
def graph_of(
    runtime: EmulatedRuntime, known: Iterable[Tensor], call: Callable[[], object]
) -> Iterator[Callable[[], None]]:
    """Records a call, torch's operations in it included; gives what replays it, and waits."""
    with runtime.capture() as graph:
        capture = partial(runtime.run_on_stream, 0, runtime.current_stream(0))
        with CapturedOperations(capture, known) as operations:
            call()

    def replay() -> None:
        runtime.replay(graph)
        runtime.synchronize(0)
        assert operations.errors == []

    yield replay
    operations.forget()
