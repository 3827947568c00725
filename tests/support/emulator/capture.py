# SPDX-License-Identifier: Apache-2.0
"""Lets a graph of an emulated device capture torch's operations, as a capture on a GPU does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.support.emulator.handles import EmulatedGraph, EmulatedStream
from tests.support.emulator.in_stream_order import InStreamOrder, touches_data
from tests.support.torch_operators import make_operators

if TYPE_CHECKING:
    from tests.support.emulator.runtime import EmulatedRuntime

Tensor = torch.Tensor


class CapturedOperations(TorchDispatchMode):
    """Inside, operations are captured but not run; only a replay computes their results.

    Until a replay a result holds NaN or the number farthest from 0, so that code that reads it too
    early computes wrong values. As on a GPU, a captured operation uses the addresses that its
    tensors had, and memory allocated in the capture belongs to the graph until :meth:`forget`.

    Args:
        capture: captures a function; every replay calls the function.
        known: the only tensors whose values the host may read.
    """

    def __init__(
        self, capture: Callable[[Callable[[], None]], None], known: Iterable[Tensor] = ()
    ) -> None:
        super().__init__()
        make_operators()  # ranks of a process may capture at the same time
        self._capture = capture
        self._known = {each.data_ptr() for each in known}
        self._operations: list[Callable[[], None]] = []
        self._pool: list[Any] = []
        self._resized: list[torch.UntypedStorage] = []
        #: Exceptions of operations in replays; no other code reports them.
        self.errors: list[BaseException] = []

    _should_skip_dynamo = InStreamOrder._should_skip_dynamo

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with _disable_current_modes():
            if not touches_data(func):
                result = func(*args, **kwargs)
                if not any(each.alias_info for each in func._schema.returns):
                    self._pool.append(_at_address(result, keep=True))
                return result
            if func is torch.ops.aten._local_scalar_dense.default:
                if args[0].data_ptr() not in self._known:
                    raise AssertionError("the host reads a tensor of the device in a capture")
                return func(*args, **kwargs)
            there, named = tree_map_only(torch.Tensor, _at_address, (args, kwargs))
            if func._schema.is_mutable:
                self._keep(lambda: self._run(func, there, named, ()))
                return args[0] if func._schema.returns else None
            result = func(*args, **kwargs)
            outputs = [_at_address(t, keep=True) for t in tree_leaves(result) if torch.is_tensor(t)]
            for each in outputs:
                _spoil(each)
            self._keep(lambda: self._run(func, there, named, outputs))
            return result

    def __enter__(self) -> CapturedOperations:
        _captures().append(self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _captures().remove(self)

    def keep_memory(self, storage: torch.UntypedStorage) -> None:
        """Makes a storage keep memory that it would release, as the graph's pool on a GPU does."""
        self._resized.append(storage)
        _memory_of_graphs[storage._cdata] = storage

    def forget(self) -> None:
        """Releases all memory; the graph must not be replayed after this."""
        self._operations.clear()
        self._pool.clear()
        for each in self._resized:
            del _memory_of_graphs[each._cdata]
        self._resized.clear()

    def _keep(self, operation: Callable[[], None]) -> None:
        # The emulator never releases a function, so the function must not hold the tensors.
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


def _at_address(tensor: Tensor, keep: bool = False) -> Tensor:
    """Returns a new tensor at the address of ``tensor``; it owns the memory only with ``keep``."""
    if keep or tensor.layout is not torch.strided:
        return tensor.detach()
    memory = tensor.untyped_storage()
    size_bytes = memory.nbytes()
    there = torch._C._construct_storage_from_data_pointer(
        memory.data_ptr() if size_bytes else 0, memory.device, size_bytes
    )
    place = tensor.storage_offset(), tensor.size(), tensor.stride()
    return torch.empty(0, dtype=tensor.dtype).set_(there, *place)


# The captures in progress in a thread, innermost last, and the storages whose memory graphs use.
_of_thread = threading.local()
_memory_of_graphs: dict[int, torch.UntypedStorage] = {}
_resize = torch.UntypedStorage.resize_


def resized_in_graph(storage: torch.UntypedStorage, size_bytes: int) -> bool:
    """Resizes a storage without waiting, if a capture is in progress or a graph uses its memory.

    On a GPU, memory that a capture frees stays in the graph's pool. Here it stays in the storage,
    and the next resize of the storage uses it again.
    """
    if storage._cdata in _memory_of_graphs:
        return True
    captures = _captures()
    if captures and size_bytes == 0 and storage.nbytes():
        captures[-1].keep_memory(storage)
    elif captures:
        _resize(storage, size_bytes)
    return bool(captures)


def _captures() -> list[CapturedOperations]:
    found: list[CapturedOperations] = _of_thread.__dict__.setdefault("captures", [])
    return found


def _spoil(tensor: Tensor) -> None:
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype is not torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).min)


class TorchGraph:
    """A graph that can contain torch's operations."""

    def __init__(
        self, runtime: EmulatedRuntime, device: int, operations: CapturedOperations
    ) -> None:
        self._runtime, self._device, self._operations = runtime, device, operations
        self.graph: EmulatedGraph | None = None

    def replay(self) -> None:
        assert self._operations.errors == []
        assert self.graph is not None, "the capture has not ended"
        self._runtime.replay(self.graph, self._device)

    def __del__(self) -> None:
        self._operations.forget()


@contextmanager
def capture_on(
    runtime: EmulatedRuntime, stream: EmulatedStream, known: Iterable[Tensor]
) -> Iterator[TorchGraph]:
    """Inside, the stream captures, including torch's operations."""
    device = stream.device
    operations = CapturedOperations(partial(runtime.run_on_stream, device, stream.handle), known)
    captured = TorchGraph(runtime, device, operations)
    with runtime.capture(device, stream) as graph, operations:
        yield captured
    captured.graph = graph


@contextmanager
def graph_of(
    runtime: EmulatedRuntime, known: Iterable[Tensor], call: Callable[[], object]
) -> Iterator[Callable[[], None]]:
    """Captures a call with torch's operations; yields a function that replays it and waits."""
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
