# SPDX-License-Identifier: Apache-2.0
"""A transport for emulated devices: Gloo in place of NCCL, in stream order like NCCL."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import Store

from ringcomm import cuda
from ringcomm.comm.nodes.transport import break_up, gloo
from ringcomm.cuda.runtime import Event
from tests.support.emulator import EmulatedRuntime

# Long, because :meth:`StreamOrderedGloo.abort` ends what waits, as abort does with NCCL.
PATIENCE = timedelta(minutes=1)


class _Enqueued:
    """A Work like NCCL's: its wait() makes the current stream wait, and the host continues."""

    def __init__(self, runtime: EmulatedRuntime, device: int, done: Event) -> None:
        self._device_ref, self._done = (runtime, device), done

    def wait(self) -> bool:
        runtime, device = self._device_ref
        runtime.wait_event(device, runtime.current_stream(device), self._done)
        return True


class StreamOrderedGloo:
    """A process group that runs its operations on a stream of its own, as NCCL does.

    The memory of emulated devices is host memory, so Gloo can send it. As with NCCL, the first
    operation connects. A failed operation stalls until an abort, which leaves arbitrary bytes in
    the output and raises nothing.
    """

    def __init__(self, store: Store, node: int, num_nodes: int) -> None:
        runtime = cuda.current()
        assert isinstance(runtime, EmulatedRuntime)
        self._runtime, self._device = runtime, runtime.current_device()
        self._stream = runtime.make_stream(self._device)
        self._member = (store, node, num_nodes)
        self._group: Any = None
        self._aborted = threading.Event()

    def name(self) -> str:
        return "emulated"

    def alltoall_base(self, output: Any, input: Any, out: list[int], given: list[int]) -> _Enqueued:
        return self._enqueue(lambda group: group.alltoall_base(output, input, out, given))

    def broadcast(self, tensors: Any, options: Any) -> _Enqueued:
        return self._enqueue(lambda group: group.broadcast(tensors, options))

    def abort(self) -> None:
        self._aborted.set()
        if self._group is not None:
            _, node, num_nodes = self._member
            break_up(self._group, [peer for peer in range(num_nodes) if peer != node])

    def _enqueue(self, begin: Callable[[Any], Any]) -> _Enqueued:
        if self._aborted.is_set():
            raise RuntimeError("the group was aborted")
        if self._group is None:
            self._group = gloo(*self._member, PATIENCE)
        runtime, device, stream = self._runtime, self._device, self._stream.handle
        before = runtime.record_event(device, runtime.current_stream(device))
        runtime.wait_event(device, stream, before)
        runtime.run_on_stream(device, stream, lambda: self._carry(begin))
        return _Enqueued(runtime, device, runtime.record_event(device, stream))

    def _carry(self, begin: Callable[[Any], Any]) -> None:
        if self._aborted.is_set():
            return
        try:
            begin(self._group).wait(PATIENCE)
        except RuntimeError:
            self._aborted.wait(PATIENCE.total_seconds())


def emulated_nccl(store: Store, node: int, num_nodes: int, timeout: timedelta) -> Any:
    """Makes the transport for ``CommOptions(transport=)``."""
    return StreamOrderedGloo(store, node, num_nodes)
