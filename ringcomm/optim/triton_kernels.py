"""Triton's kernels, in place of the native ones that compute and communicate.

On the host they run in Triton's interpreter, for tests. The beginning of a step stays native.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ringcomm import _native
from ringcomm.comm.calls import Call
from ringcomm.comm.checks import Site
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.reduce_ops import ALGORITHMS, DTYPE_NAMES
from ringcomm.comm.triton_calls import TritonEnd, require_triton
from ringcomm.errors import RingcommError, UnsupportedError
from ringcomm.optim.buckets import Bucket
from ringcomm.optim.host_kernels import HostKernels
from ringcomm.optim.norms import kind_code
from ringcomm.optim.options import AdamWOptions
from ringcomm.optim.table import StepTable

if TYPE_CHECKING:
    from ringcomm._tl.adamw_kind import ShardKind
    from ringcomm._tl.launch import Plan

Tensor = torch.Tensor

# Parameters of steps that failed: a peer that has not heard of it may still store there.
_abandoned: list[Tensor] = []


class TritonKernels(HostKernels):
    """Alone they run on the caller's thread; else in the communicator's order of calls.

    Raises:
        UnsupportedError: Triton cannot be imported, or cannot run here.
    """

    def __init__(self, comm: Communicator | None, options: AdamWOptions, table: StepTable) -> None:
        super().__init__(comm, options, table)
        self._site = Site("optimizer", comm.rank if comm else 0, comm.world_size if comm else 1)
        require_triton(self._site)
        from ringcomm._tl.hooks import IS_INTERPRETED

        if not IS_INTERPRETED:
            raise UnsupportedError(
                f'{self._site}: on the host kernels="triton" runs in Triton\'s interpreter. Set '
                'TRITON_INTERPRET=1 before Triton is imported, or use kernels="native"'
            )
        if comm is not None and options.algorithm == "ring":
            self._check_ring(comm)
        # What kernels read beside their arguments; alive as long as its bucket is not replaced.
        self._records: dict[tuple[int, ...], Tensor] = {}

    def _check_ring(self, comm: Communicator) -> None:
        segment_bytes = comm._core.geometry["segment_bytes"]
        least = _native.ADAMW_BLOCK_ELEMS * 4
        if segment_bytes < least:
            raise UnsupportedError(
                f"{self._site}: the ring forms move whole blocks of {_native.ADAMW_BLOCK_ELEMS} "
                f"elements, so they expect segment_bytes >= {least}, got {segment_bytes}"
            )

    def forget(self) -> None:
        super().forget()
        self._records.clear()

    def reduce_norm(self, bucket: Bucket, kind: str, words: Tensor) -> None:
        from ringcomm._tl.adamw_launch import launch_grad_norm, plan_reduce_scatter_norm

        grads, code = bucket.grads, kind_code(kind)
        dtype = DTYPE_NAMES[grads.dtype]
        words.zero_()
        if self._comm is None:
            launch_grad_norm(grads.data_ptr(), dtype, grads.numel(), code, words.data_ptr())
            return
        world = self._comm.world_size
        out = bucket.ensure_grad_shard()
        record = self._record(out.data_ptr(), words.data_ptr())
        self._plan(
            "reduce_scatter_norm",
            lambda algorithm: plan_reduce_scatter_norm(
                grads.numel(), dtype, self._op_name, code, False, algorithm, world
            ),
            grads,
            record,
        )

    def update(self, bucket: Bucket) -> None:
        if self._comm is None:
            self._update_shard(bucket)
            return
        from ringcomm._tl.adamw_launch import plan_adamw_all_gather

        grad = bucket.ensure_grad_shard()
        kind = self._kind(bucket, grad.dtype, "SUM")
        self._plan(
            "adamw_all_gather",
            lambda algorithm: plan_adamw_all_gather(bucket.layout.elems, kind, algorithm),
            grad,
            self._shard_record(bucket),
            bucket.params,
        )

    def reduce_update(self, bucket: Bucket) -> None:
        if self._comm is None:
            self._update_shard(bucket)
            return
        from ringcomm._tl.adamw_launch import plan_one_pass

        op, elems = self._op_name, bucket.layout.elems
        kind = self._kind(bucket, bucket.grads.dtype, op)
        self._plan(
            "reduce_scatter_adamw_all_gather",
            lambda algorithm: plan_one_pass(elems, kind, op, algorithm),
            bucket.grads,
            self._shard_record(bucket),
            bucket.params,
        )

    @property
    def _op_name(self) -> str:
        return self._options.reduce.upper()

    def _update_shard(self, bucket: Bucket) -> None:
        from ringcomm._tl.adamw_launch import launch_adamw_shard

        grads = bucket.grads
        kind = self._kind(bucket, grads.dtype, "SUM")
        launch_adamw_shard(
            self._shard_record(bucket).data_ptr(), grads.data_ptr(), bucket.chunk.elems, kind
        )

    def _kind(self, bucket: Bucket, grad: torch.dtype, op: str) -> ShardKind:
        from ringcomm._tl.adamw_launch import shard_kind

        state = bucket.state
        master = "none" if state.master is None else "fp32"
        return shard_kind(
            DTYPE_NAMES[grad],
            DTYPE_NAMES[bucket.layout.dtype],
            op,
            self._site.world_size,
            master=master if state.remainder is None else "remainder",
            keeps_max=state.max_exp_avg_sq is not None,
            stochastic=self._options.rounding == "stochastic",
        )

    def _plan(
        self,
        name: str,
        make: Callable[[int], Plan],
        source: Tensor,
        record: Tensor,
        stored: Tensor | None = None,
    ) -> None:
        """Runs a collective in the communicator's order; peers store in ``stored``."""
        comm = self._comm
        if comm is None:
            return
        use = comm._use(self._site, "triton", self._options.algorithm, source.dtype)

        def run(native: _native.Comm) -> int:
            end: TritonEnd = use(native)
            plan = make(end.chosen(ALGORITHMS[self._options.algorithm]))
            return end.run(plan, source.data_ptr(), record.data_ptr())

        try:
            comm._start(Call(name, run, []), async_op=False)
        except RingcommError:
            if stored is not None:
                _abandoned.append(stored)
            raise

    def _shard_record(self, bucket: Bucket) -> Tensor:
        key = (bucket.number,)
        if key not in self._records:
            words = bytearray(_native.adamw_shard_bytes(self._shard(bucket)))
            self._records[key] = torch.frombuffer(words, dtype=torch.int64).clone()
        return self._records[key]

    def _record(self, *addresses: int) -> Tensor:
        if addresses not in self._records:
            self._records[addresses] = torch.tensor(addresses)
        return self._records[addresses]
