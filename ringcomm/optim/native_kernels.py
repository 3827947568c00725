"""The native kernels of a step, on the host and on a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch

from ringcomm import _native
from ringcomm.comm.arguments import ALGORITHMS, DTYPE_CODES, OP_CODES
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.engine import Call
from ringcomm.optim.buckets import Bucket
from ringcomm.optim.kernels import Kernels, StepTable, shard_of
from ringcomm.optim.options import AdamWOptions
from ringcomm.optim.reduction import DeviceReducer, HostReducer

# The native kernels on the CPU.

Tensor = torch.Tensor


class HostKernels(Kernels):
    """Alone they run on the caller's thread; else in the communicator's order of calls."""

    def __init__(self, comm: Communicator | None, options: AdamWOptions, table: StepTable) -> None:
        self._step_bytes = table.layout.size_bytes
        super().__init__(comm is None, HostReducer(comm, options, self._step_bytes))
        self._comm = comm
        self._options = options
        self._factors_ptr = table.factors.data_ptr()
        self._op = OP_CODES[options.reduce.upper()]
        self._algorithm = ALGORITHMS[options.algorithm]
        self._shards: dict[int, _native.AdamWShard] = {}

    def forget(self) -> None:
        self._shards.clear()

    def begin(self, table: StepTable) -> None:
        _native.prepare_adamw(
            control=table.control.data_ptr(),
            hyper=table.hyper.data_ptr(),
            group=table.group.data_ptr(),
            active=table.active.data_ptr(),
            step=table.step.data_ptr(),
            factors=self._factors_ptr,
            params=table.step.numel(),
        )

    def update_shard(self, bucket: Bucket, grad: Tensor) -> None:
        _native.adamw_shard(self._shard(bucket), grad.data_ptr(), DTYPE_CODES[grad.dtype])

    def update_gather(self, bucket: Bucket, grad: Tensor) -> None:
        shard = self._shard(bucket)
        self._call(
            "adamw_all_gather",
            lambda native: native.adamw_all_gather(
                shard, grad.data_ptr(), DTYPE_CODES[grad.dtype], self._algorithm, self._step_bytes
            ),
        )

    def one_pass(self, bucket: Bucket, grads: Tensor) -> None:
        shard = self._shard(bucket)
        self._call(
            "reduce_scatter_adamw_all_gather",
            lambda native: native.reduce_scatter_adamw_all_gather(
                shard,
                grads.data_ptr(),
                DTYPE_CODES[grads.dtype],
                self._op,
                self._algorithm,
                self._step_bytes,
                bucket.tag(),
            ),
        )

    def _call(self, name: str, run: Callable[[_native.Comm], int]) -> None:
        if self._comm is not None:
            self._comm.start_call(Call(name, run, []))

    def _shard(self, bucket: Bucket) -> _native.AdamWShard:
        shard = self._shards.get(bucket.number)
        if shard is None:
            shard = self._shards[bucket.number] = shard_of(bucket, self._factors_ptr, self._options)
        return shard


# The native kernels on a device. Everything is queued on streams; the host waits for nothing.


@dataclass(frozen=True)
class _Shard:
    """A shard's description: for the host that launches, and the device's copy of it."""

    native: _native.AdamWShard
    copy: Tensor


class DeviceKernels(Kernels):
    """In the communicator's order of calls, on the caller's current stream.

    Args:
        comm: of the device; of one rank where there are no others.
        options: what to use.
        table: of the optimizer.
    """

    def __init__(self, comm: Communicator, options: AdamWOptions, table: StepTable) -> None:
        super().__init__(comm.world_size == 1, DeviceReducer(comm, options))
        self._comm = comm
        self._options = options
        self._factors_ptr = table.factors.data_ptr()
        self._op = OP_CODES[options.reduce.upper()]
        self._algorithm = ALGORITHMS[options.algorithm]
        self._shards: dict[int, _Shard] = {}
        self._table = self._on_device(
            _native.adamw_table_bytes(
                control=table.control.data_ptr(),
                hyper=table.hyper.data_ptr(),
                group=table.group.data_ptr(),
                active=table.active.data_ptr(),
                step=table.step.data_ptr(),
                factors=self._factors_ptr,
                params=table.step.numel(),
            )
        )

    def _on_device(self, data: bytes) -> Tensor:
        return torch.tensor(list(data), dtype=torch.uint8, device=self._comm.device)

    def forget(self) -> None:
        self._shards.clear()

    def begin(self, table: StepTable) -> None:
        self._call("adamw_prepare", lambda native: native.prepare_adamw(self._table.data_ptr()))

    def update_shard(self, bucket: Bucket, grad: Tensor) -> None:
        shard = self._shard(bucket)
        self._call(
            "adamw_shard",
            lambda native: native.adamw_shard(
                shard.native, shard.copy.data_ptr(), grad.data_ptr(), DTYPE_CODES[grad.dtype]
            ),
        )

    def update_gather(self, bucket: Bucket, grad: Tensor) -> None:
        shard = self._shard(bucket)
        self._call(
            "adamw_all_gather",
            lambda native: native.adamw_all_gather(
                shard.native,
                shard.copy.data_ptr(),
                grad.data_ptr(),
                DTYPE_CODES[grad.dtype],
                self._algorithm,
            ),
        )

    def one_pass(self, bucket: Bucket, grads: Tensor) -> None:
        shard = self._shard(bucket)
        self._call(
            "reduce_scatter_adamw_all_gather",
            lambda native: native.reduce_scatter_adamw_all_gather(
                shard.native,
                shard.copy.data_ptr(),
                grads.data_ptr(),
                DTYPE_CODES[grads.dtype],
                self._op,
                self._algorithm,
                bucket.tag(),
            ),
        )

    def _call(self, name: str, run: Callable[[_native.DeviceComm], int]) -> None:
        # The host's communicator and the device's are called alike.
        call = Call(name, cast(Any, run), [])
        self._comm.start_call(call)

    def _shard(self, bucket: Bucket) -> _Shard:
        shard = self._shards.get(bucket.number)
        if shard is None:
            native = shard_of(bucket, self._factors_ptr, self._options)
            copy = self._on_device(_native.adamw_shard_bytes(native))
            shard = self._shards[bucket.number] = _Shard(native, copy)
        return shard
