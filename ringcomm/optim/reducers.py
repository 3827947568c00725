"""Reduces gradients to FP32 shards and sums their norms, before any parameter changes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

from ringcomm import _native
from ringcomm.comm.calls import Call
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.reduce_ops import ALGORITHMS, DTYPE_CODES, OP_CODES
from ringcomm.comm.work import Work
from ringcomm.optim.norms import kind_code

Tensor = torch.Tensor


class ReduceOptions(Protocol):
    """What a reducer reads of an optimizer's options, or of ZeRO's."""

    @property
    def reduce(self) -> str: ...
    @property
    def algorithm(self) -> str: ...


@dataclass(frozen=True)
class Into:
    """Where a bucket's gradients are reduced to, and how.

    Attributes:
        out: float32 [chunk elements].
        kind: "l2", "l1" or "inf".
        words: int64 [24], overwritten with the norm of ``out``; None, on a CPU: no norm.
        accumulate: add to ``out``.
        tag: equal on all ranks: what tells this reduction from others of the same size; 0: nothing.
    """

    out: Tensor
    kind: str
    words: Tensor | None
    accumulate: bool = False
    tag: int = 0


class Reducer(ABC):
    """Of one communicator; whose kernels, the subclass says."""

    @abstractmethod
    def norm(self, grads: Tensor, kind: str, words: Tensor) -> None:
        """Sums elements for the norm.

        Args:
            grads: [elements], what this rank has of the gradient.
            kind: "l2", "l1" or "inf".
            words: int64 [24], overwritten.
        """

    @abstractmethod
    def reduce(self, grads: Tensor, into: Into, async_op: bool = False) -> Work | None:
        """Reduces a bucket's gradients to this rank's chunk; collective.

        Args:
            grads: [bucket elements], of any of the parameters' dtypes.
            into: where to, and how.
            async_op: run behind the caller's back; ``grads`` and what ``into`` has must live on.

        Returns:
            With ``async_op`` what to wait for.
        """


class HostReducer(Reducer):
    """The native kernels on the CPU. Alone, nothing is to be reduced: only norms."""

    def __init__(
        self, comm: Communicator | None, options: ReduceOptions, step_bytes: int = 0
    ) -> None:
        self._comm = comm
        self._step_bytes = step_bytes
        self._op = OP_CODES[options.reduce.upper()]
        self._algorithm = ALGORITHMS[options.algorithm]

    def norm(self, grads: Tensor, kind: str, words: Tensor) -> None:
        _native.grad_norm(
            grads.data_ptr(),
            DTYPE_CODES[grads.dtype],
            grads.numel(),
            kind_code(kind),
            words.data_ptr(),
        )

    def reduce(self, grads: Tensor, into: Into, async_op: bool = False) -> Work | None:
        arguments = self._arguments(grads, into)

        def run(native: _native.Comm) -> int:
            return native.reduce_scatter_norm(*arguments, self._step_bytes, into.tag)

        return self._start(run, into, async_op)

    def _arguments(
        self, grads: Tensor, into: Into
    ) -> tuple[int, int, int, int, int, bool, int, int, int]:
        return (
            grads.data_ptr(),
            grads.numel(),
            DTYPE_CODES[grads.dtype],
            self._op,
            into.out.data_ptr(),
            into.accumulate,
            kind_code(into.kind),
            0 if into.words is None else into.words.data_ptr(),
            self._algorithm,
        )

    def _start(self, run: Callable[[_native.Comm], int], into: Into, async_op: bool) -> Work | None:
        if self._comm is None:
            raise AssertionError("alone there is nothing to reduce")
        outputs = [into.out] if into.words is None else [into.out, into.words]
        return self._comm._start(Call("reduce_scatter_norm", run, outputs), async_op=async_op)


class DeviceReducer(HostReducer):
    """The native kernels on a device, whose blocks add to the words."""

    def __init__(self, comm: Communicator, options: ReduceOptions) -> None:
        super().__init__(comm, options)
        self._device_comm = comm

    def norm(self, grads: Tensor, kind: str, words: Tensor) -> None:
        words.zero_()

        def run(native: _native.DeviceComm) -> int:
            return native.grad_norm(
                grads.data_ptr(),
                DTYPE_CODES[grads.dtype],
                grads.numel(),
                kind_code(kind),
                words.data_ptr(),
            )

        # The host's communicator and the device's are called alike.
        call = Call("grad_norm", cast(Any, run), [])
        self._device_comm._start(call, async_op=False)

    def reduce(self, grads: Tensor, into: Into, async_op: bool = False) -> Work | None:
        assert into.words is not None
        into.words.zero_()
        arguments = self._arguments(grads, into)

        def run(native: _native.DeviceComm) -> int:
            return native.reduce_scatter_norm(*arguments, into.tag)

        return self._start(cast(Any, run), into, async_op)


def make_reducer(comm: Communicator, options: ReduceOptions, step_bytes: int) -> Reducer:
    """The native kernels' reducer for the tensors of a communicator.

    Args:
        comm: which.
        options: what to use.
        step_bytes: of the gradients of all buckets.
    """
    if comm.launches:
        return DeviceReducer(comm, options)
    return HostReducer(comm, options, step_bytes)
