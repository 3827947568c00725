"""Reduction of gradients to FP32 shards, and their norms."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch

from ringcomm import _native
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.host.arguments import ALGORITHMS, DTYPE_CODES, OP_CODES
from ringcomm.comm.host.engine import Call, Use, itself
from ringcomm.comm.host.work import Work
from ringcomm.comm.nodes.wires import Residual
from ringcomm.errors import ArgumentError
from ringcomm.optim.options import Wire

Tensor = torch.Tensor

# The norm words of kernels/include/ringcomm/optimizer/grad_norm.h: a sum of 20 digits of 32 bits,
# the lowest worth 2^-352, and the number of blocks that hold an infinity or a NaN.
NORM_WORDS = _native.GRAD_NORM_WORDS
DIGITS = 20
BIAS = 352
NON_FINITE_WORD = 23
_KINDS = {2.0: "l2", 1.0: "l1", math.inf: "inf"}


def norm_kind(norm_type: float) -> str:
    """Returns the kernels' name of a norm.

    Raises:
        ArgumentError: it is not 1, 2 or inf.
    """
    try:
        kind = _KINDS.get(float(norm_type))
    except (TypeError, ValueError):
        kind = None
    if kind is None:
        raise ArgumentError(f"norm_type: expected 2.0, 1.0 or inf, got {norm_type!r}")
    return kind


def kind_code(kind: str) -> int:
    """Returns the native code of a norm."""
    return _native.GRAD_NORM_KINDS[kind]


def combine(words: Tensor, kind: str) -> Tensor:
    """Combines the norm words of several buckets.

    Args:
        words: int64 [buckets, 24].
        kind: "l2", "l1" or "inf".

    Returns:
        int64 [24].
    """
    if kind != "inf":
        return words.sum(dim=0)
    return words.amax(dim=0) if len(words) else words.new_zeros(NORM_WORDS)


def leave_to_replica(words: Tensor) -> None:
    """Leaves a bucket's sum to a rank that has the same gradients; what is not finite still tells.

    Args:
        words: int64 [24], of the bucket.
    """
    words[:NON_FINITE_WORD].zero_()


def found_non_finite(words: Tensor) -> Tensor:
    """Returns 1.0 if a gradient holds an infinity or a NaN, else 0.0; float64, a scalar."""
    return (words[NON_FINITE_WORD] != 0).to(torch.float64)


def norm_of(words: Tensor, kind: str, inv_scale: Tensor) -> Tensor:
    """Returns the norm from the words of all buckets and ranks, with no host synchronisation.

    The words are sums of whole numbers, which do not depend on the number of ranks. The arithmetic
    here is the same everywhere, so the norm has the same bits in every world.

    Args:
        words: int64 [24], from :func:`combine`.
        kind: "l2", "l1" or "inf".
        inv_scale: float64, a scalar: the factor of the gradient.

    Returns:
        float32, a scalar on the device of ``words``; NaN when the gradient is not finite.
    """
    return wide_norm_of(words, kind, inv_scale).to(torch.float32)


def wide_norm_of(words: Tensor, kind: str, inv_scale: Tensor) -> Tensor:
    """Returns what :func:`norm_of` rounds, float64."""
    if kind == "inf":
        # The low half of the word is the largest magnitude's bits.
        norm = words[0].to(torch.int32).view(torch.float32).to(torch.float64)
    else:
        exponents = torch.arange(DIGITS, dtype=torch.float64, device=words.device) * 32 - BIAS
        total = (words[:DIGITS].to(torch.float64) * torch.exp2(exponents)).sum()
        norm = total.sqrt() if kind == "l2" else total
    return torch.where(words[NON_FINITE_WORD] != 0, math.nan, norm * inv_scale)


def joint_norm(norms: Tensor, kind: str) -> Tensor:
    """Returns the norm of all together, float64, of float64 [parts], the norms of each."""
    if kind == "l2":
        return norms.square().sum().sqrt()
    return norms.sum() if kind == "l1" else norms.amax()


class ReduceOptions(Protocol):
    """The options of an optimizer, or of ZeRO, that a reducer reads."""

    @property
    def reduce(self) -> str: ...
    @property
    def algorithm(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def wire(self) -> Wire: ...


@dataclass(frozen=True)
class Into:
    """The target of a reduction of a bucket's gradients.

    Attributes:
        out: float32 [chunk elements].
        kind: "l2", "l1" or "inf".
        words: int64 [24], overwritten with the norm words of ``out``, or of this rank's part of it
            where each node has a copy of the state; None: they are not asked for.
        accumulate: add to ``out``.
        tag: number that tells this reduction from others of the same size, equal on all ranks; 0
            where there is none.
        residual: of the bucket, which its codes take up; None: what they lose is lost.
    """

    out: Tensor
    kind: str
    words: Tensor | None
    accumulate: bool = False
    tag: int = 0
    residual: Residual | None = None


def feeding_back(calls: Any, residual: Residual | None) -> Any:
    """Returns the calls of a step (``Communicator.calls_of_steps``) for a bucket's residual."""
    return calls if residual is None else calls.feeding_back(residual)


def make_residual(comm: Communicator | None, options: ReduceOptions, elems: int) -> Residual | None:
    """Makes the residual of a bucket of so many elements, if the options want one."""
    if comm is None or not options.wire.error_feedback:
        return None
    return comm.residual_of_bucket(elems, options.state)


class Reducer(ABC):
    """The reductions of one communicator; the subclass chooses the kernels."""

    @abstractmethod
    def norm(self, grads: Tensor, kind: str, words: Tensor) -> None:
        """Sums elements for the norm.

        Args:
            grads: [elements], this rank's part of the gradient.
            kind: "l2", "l1" or "inf".
            words: int64 [24], overwritten.
        """

    @abstractmethod
    def reduce(self, grads: Tensor, into: Into, async_op: bool = False) -> Work | None:
        """Reduces a bucket's gradients to this rank's chunk; collective.

        Args:
            grads: [bucket elements], of any of the parameters' dtypes.
            into: the target.
            async_op: return at once; ``grads`` and the tensors in ``into`` must live on.

        Returns:
            With ``async_op``, the work to wait for.
        """


class HostReducer(Reducer):
    """The native kernels on the CPU. A world of one without communicator only sums norms."""

    def __init__(
        self, comm: Communicator | None, options: ReduceOptions, step_bytes: int = 0
    ) -> None:
        if comm is not None:
            comm.check_sum_blocks("optimizer", options.algorithm, "native")
        self._comm = comm
        self._calls: Use = (
            itself if comm is None else comm.calls_of_steps(options.state, options.wire.gradients)
        )
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
            calls = feeding_back(self._calls(native), into.residual)
            status: int = calls.reduce_scatter_norm(*arguments, self._step_bytes, into.tag)
            return status

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
        return self._comm.start_call(Call("reduce_scatter_norm", run, outputs), async_op=async_op)


class DeviceReducer(HostReducer):
    """The native kernels on a device, whose blocks add to the norm words."""

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
        self._device_comm.start_call(call)

    def reduce(self, grads: Tensor, into: Into, async_op: bool = False) -> Work | None:
        # The blocks add to words, whether or not anyone asks for them.
        if into.words is None:
            words = torch.empty(NORM_WORDS, dtype=torch.int64, device=grads.device)
            into = replace(into, words=words)
        assert into.words is not None
        into.words.zero_()
        arguments = self._arguments(grads, into)

        def run(native: _native.DeviceComm) -> int:
            status: int = self._calls(native).reduce_scatter_norm(*arguments, into.tag)
            return status

        return self._start(cast(Any, run), into, async_op)


def make_reducer(comm: Communicator, options: ReduceOptions, step_bytes: int) -> Reducer:
    """Makes the native kernels' reducer for the tensors of a communicator.

    Args:
        comm: the communicator.
        options: options of the reductions.
        step_bytes: bytes of the gradients of all buckets.
    """
    if comm.launches:
        return DeviceReducer(comm, options)
    return HostReducer(comm, options, step_bytes)
