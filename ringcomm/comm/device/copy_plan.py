# SPDX-License-Identifier: Apache-2.0
"""Plans of all-gathers in which the GPU's copy engines read the peers' inputs in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ringcomm import _native
from ringcomm.comm.device.core import DeviceCore
from ringcomm.comm.host.arguments import DTYPE_CODES, DTYPE_NAMES, is_contiguous
from ringcomm.comm.host.core import Core
from ringcomm.comm.host.engine import AUTO, Call, CallEngine
from ringcomm.errors import ArgumentError, MismatchError, UnsupportedError, where

# NOTE [Copies without staging]
# The copy engines take addresses from the host, which enqueues a call before it can know the
# addresses of the peers' tensors. An ordinary call therefore copies each input into staging, whose
# addresses are known. Ranks with a plan have exchanged their inputs' addresses. Each of its calls
# is a kernel that waits for all ranks' inputs, a copy from each rank, and a kernel that waits until
# all have copied.
#
# The inputs are in the heaps, which peers have mapped at addresses that never change. A plan keeps
# the memory of its rank's input alive. If the input has other memory at a call, the call raises
# before it launches anything. No peer copies before this rank's first kernel has begun.
#
# The kernels compare the plan's number between ranks, as other calls compare the root. So a rank
# that calls another plan, or calls without a plan, gets MismatchError.

# Marks the messages of this file: b"ringplan" as a number.
_MARK = int.from_bytes(b"ringplan", "little")
_NOT_IN_HEAP = -1
_LARGEST_NUMBER = (1 << 31) - 1


class _Input(NamedTuple):
    """The message in which a rank describes its input to its peers."""

    mark: int
    size_bytes: int
    dtype: int
    offset: int  # in the rank's heap, in bytes, or _NOT_IN_HEAP
    plans: int  # number of plans that the rank has begun to make


class _InPlace:
    """Converts a call that was prepared for :class:`Core` to a call with the copies of a plan."""

    def __init__(self, name: str, inputs: Sequence[int], number: int, own: torch.Tensor) -> None:
        self._name = name
        self._inputs, self._number = inputs, number
        # Keep an alias, since the tensor itself may later get other memory.
        self._own = own.detach()

    def of(self, call: Call) -> Call:
        """Returns ``call`` converted to copies from the peers' inputs."""
        (tensor,) = call.inputs
        own = self._own
        if (tensor.data_ptr(), tensor.nbytes, tensor.dtype) != (
            own.data_ptr(),
            own.nbytes,
            own.dtype,
        ):
            raise ArgumentError(
                f"{self._name}: input: expected the memory for which the plan was made, of "
                f"{own.nbytes} bytes of {own.dtype} at {own.data_ptr():#x}, got {tensor.nbytes} "
                f"bytes of {tensor.dtype} at {tensor.data_ptr():#x}. The peers copy from there: "
                "copy into the tensor, or make a new plan on all ranks"
            )

        def run(core: Core) -> int:
            planned: Any = _PlannedCore(core, self._inputs, self._number)
            return call.run(planned)

        return Call(call.name, run, call.outputs, call.inputs)


class _PlannedCore:
    """A core whose only collective is an all-gather that copies from the peers' inputs."""

    def __init__(self, core: Core, inputs: Sequence[int], number: int) -> None:
        self._native: _native.DeviceComm = core  # type: ignore[assignment]
        self._inputs, self._number = inputs, number

    def all_gather(
        self, in_ptr: int, out_ptr: int, in_bytes: int, dtype: int, algorithm: int
    ) -> int:
        return self._native.all_gather_from(
            in_ptr, out_ptr, in_bytes, dtype, self._inputs, self._number
        )


class CopyPlans:
    """Makes a rank's plans, whose copies read the peers' inputs in place.

    Args:
        core: the rank's core.
    """

    def __init__(self, core: DeviceCore) -> None:
        self._core = core
        self._begun = 0

    def gather(self, engine: CallEngine, check: Callable[[], Call]) -> Callable[[], Call]:
        """Makes a plan with all ranks; returns a function that prepares a call of the plan.

        Args:
            engine: the rank's engine.
            check: checks the tensors and returns an ordinary call with one input.

        Raises:
            ArgumentError: on all ranks, if the input of some rank is not in that rank's heap.
            MismatchError: the ranks' plans differ.
            HeapError: a peer has not mapped this rank's heap within the communicator's timeout.
            UnsupportedError: the current stream is capturing a graph.
        """
        self._begun += 1
        call = check()
        name = where(f"plan_{call.name}", *engine.rank_of)
        engine.raise_if_unusable(call.name)
        if engine.is_capturing():
            raise UnsupportedError(
                f"{name}: the current stream is capturing a graph, and the ranks exchange "
                "addresses to make a plan of the copy engines. Make the plan before the capture, "
                "and call it there"
            )
        (own,) = call.inputs
        everyone = _exchange(engine, self._own_input(own))
        _check(engine, name, everyone)
        # A rank's count is lower if the rank failed to begin some plan.
        self._begun = number = max(each.plans for each in everyone) % _LARGEST_NUMBER
        reach = self._core.address_in_heap
        inputs = [
            own.data_ptr()
            if rank == self._core.rank
            else reach(rank, (each.offset, each.size_bytes), name)
            for rank, each in enumerate(everyone)
        ]
        in_place = _InPlace(name, inputs, number, own)
        return lambda: in_place.of(check())

    def _own_input(self, own: torch.Tensor) -> _Input:
        core, offset = self._core, 0
        if own.nbytes:
            core.await_peers("plan_all_gather_into_tensor")
            in_heap = is_contiguous(own) and core.heap.is_reached(own.data_ptr(), own.nbytes)
            offset = own.data_ptr() - core.heap.base_ptr if in_heap else _NOT_IN_HEAP
        return _Input(_MARK, own.nbytes, DTYPE_CODES[own.dtype], offset, self._begun)


def _exchange(engine: CallEngine, mine: _Input) -> list[_Input]:
    """Exchanges the ranks' messages, and returns them by rank."""
    message = torch.tensor(mine, dtype=torch.int64, device=engine.device)
    everyone = torch.empty((engine.world_size, len(mine)), dtype=torch.int64, device=engine.device)

    def run(core: Core) -> int:
        int64 = DTYPE_CODES[torch.int64]
        return core.all_gather(message.data_ptr(), everyone.data_ptr(), message.nbytes, int64, AUTO)

    engine.start_call(Call("plan_all_gather_into_tensor", run, [everyone], [message]))
    engine.finish_host_side()
    return [_Input(*row) for row in everyone.tolist()]


def _check(engine: CallEngine, name: str, everyone: Sequence[_Input]) -> None:
    """Raises on all ranks if they cannot make the plan."""
    for rank, each in enumerate(everyone):
        if each.mark != _MARK:
            # That rank makes another gather, and has taken these messages for its peers' data.
            text = (
                f"{name}: expected rank {rank} to make a plan of the copy engines, too, but it "
                "gathered other data. All ranks must make the same plans and calls in the same "
                "order"
            )
            engine.abort(text)
            raise MismatchError(
                f"{text}. The communicator is unusable now: close it and build a new one"
            )
    first = everyone[0]
    for rank, each in enumerate(everyone):
        if (each.size_bytes, each.dtype) != (first.size_bytes, first.dtype):
            raise MismatchError(
                f"{name}: the ranks differ. rank 0 gives {_in_words(first)}, rank {rank} "
                f"{_in_words(each)}. Give all ranks inputs of the same size and dtype"
            )
    outside = [rank for rank, each in enumerate(everyone) if each.offset == _NOT_IN_HEAP]
    if outside:
        named = f"rank{'s' if len(outside) > 1 else ''} {', '.join(map(str, outside))}"
        raise ArgumentError(
            f"{name}: input: expected memory of the heap, from which the peers' copy engines can "
            f"copy, got other memory on {named}. Make it there with ringcomm.empty or "
            "ringcomm.zeros (device=), and copy or compute into it"
        )


def _in_words(each: _Input) -> str:
    names = {code: DTYPE_NAMES[dtype] for dtype, code in DTYPE_CODES.items()}
    return f"{each.size_bytes} bytes of {names.get(each.dtype, 'an unknown dtype')}"
