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
from ringcomm.optim.kernels import Kernels, shard_of
from ringcomm.optim.norms import NORM_WORDS, kind_code
from ringcomm.optim.options import AdamWOptions
from ringcomm.optim.table import StepTable

if TYPE_CHECKING:
    from ringcomm._tl.adamw_kind import ShardKind
    from ringcomm._tl.launch import Plan

Tensor = torch.Tensor

# Parameters of steps that failed: a peer that has not heard of it may still store there.
_abandoned: list[Tensor] = []


class TritonKernels(Kernels):
    """Without a communicator they run on the caller's thread; else in its order of calls.

    Args:
        comm: None for a world of one on the host.
        options: what to use.
        table: of the optimizer.
        native: what begins a step.

    Raises:
        UnsupportedError: Triton cannot be imported, or cannot run here.
    """

    def __init__(
        self,
        comm: Communicator | None,
        options: AdamWOptions,
        table: StepTable,
        native: Kernels,
    ) -> None:
        self._comm = comm
        self._options = options
        self._native = native
        self._factors_ptr = table.factors.data_ptr()
        self._op = options.reduce.upper()
        self._place = table.control.device if comm is None else comm.device
        self._site = Site("optimizer", comm.rank if comm else 0, comm.world_size if comm else 1)
        require_triton(self._site)
        if comm is None:
            self._check_interpreted()
        else:
            self._use = comm._use(self._site, "triton", options.algorithm, torch.float32)
        # By bucket, what kernels read beside their arguments: its shard; and where a
        # reduce-scatter puts its results, with words that keep their address from step to step.
        self._shards: dict[int, Tensor] = {}
        self._norms: dict[int, Tensor] = {}

    def _check_interpreted(self) -> None:
        from ringcomm._tl.hooks import IS_INTERPRETED

        if not IS_INTERPRETED:
            raise UnsupportedError(
                f'{self._site}: on the host kernels="triton" runs in Triton\'s interpreter. Set '
                'TRITON_INTERPRET=1 before Triton is imported, or use kernels="native"'
            )

    def forget(self) -> None:
        self._native.forget()
        self._shards.clear()
        self._norms.clear()

    def begin(self, table: StepTable) -> None:
        self._native.begin(table)

    @property
    def _is_alone(self) -> bool:
        return self._site.world_size == 1

    def reduce_norm(self, bucket: Bucket, kind: str, words: Tensor) -> None:
        from ringcomm._tl.adamw_launch import launch_grad_norm, plan_reduce_scatter_norm

        grads, code = bucket.grads, kind_code(kind)
        dtype = DTYPE_NAMES[grads.dtype]
        if self._comm is None:
            words.zero_()
            launch_grad_norm(grads.data_ptr(), dtype, grads.numel(), code, words.data_ptr())
            return
        record = self._norm(bucket)
        found = record[2:]
        found.zero_()  # blocks add to it
        self._plan(
            "reduce_scatter_norm",
            lambda algorithm: plan_reduce_scatter_norm(
                grads.numel(),
                dtype,
                self._op,
                code,
                False,
                algorithm,
                self._site.world_size,
                stores=not self._is_alone,
            ),
            grads,
            record,
        )
        words.copy_(found)

    def update(self, bucket: Bucket) -> None:
        grad = bucket.grads if self._is_alone else bucket.ensure_grad_shard()
        kind, record = self._kind(bucket, grad.dtype, "SUM"), self._shard(bucket)
        from ringcomm._tl.adamw_launch import launch_adamw_shard, plan_adamw_all_gather

        if self._comm is None:
            launch_adamw_shard(record.data_ptr(), grad.data_ptr(), bucket.chunk.elems, kind)
            return
        self._plan(
            "adamw_all_gather",
            lambda algorithm: plan_adamw_all_gather(bucket.layout.elems, kind, algorithm),
            grad,
            record,
            bucket.params,
        )

    def reduce_update(self, bucket: Bucket) -> None:
        if self._is_alone:
            self.update(bucket)
            return
        from ringcomm._tl.adamw_launch import plan_one_pass

        op, elems = self._op, bucket.layout.elems
        kind = self._kind(bucket, bucket.grads.dtype, op)
        self._plan(
            "reduce_scatter_adamw_all_gather",
            lambda algorithm: plan_one_pass(elems, kind, op, algorithm),
            bucket.grads,
            self._shard(bucket),
            bucket.params,
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

        def run(native: _native.Comm) -> int:
            end: TritonEnd = self._use(native)
            plan = make(end.chosen(ALGORITHMS[self._options.algorithm]))
            return end.run(plan, source.data_ptr(), record.data_ptr())

        try:
            comm._start(Call(name, run, []), async_op=False)
        except RingcommError:
            if stored is not None:
                _abandoned.append(stored)
            raise

    def _shard(self, bucket: Bucket) -> Tensor:
        if bucket.number not in self._shards:
            shard = shard_of(bucket, self._factors_ptr, self._options)
            data = list(_native.adamw_shard_bytes(shard))
            record = torch.tensor(data, dtype=torch.uint8, device=self._place)
            self._shards[bucket.number] = record
        return self._shards[bucket.number]

    def _norm(self, bucket: Bucket) -> Tensor:
        if bucket.number not in self._norms:
            out = bucket.grads if self._is_alone else bucket.ensure_grad_shard()
            record = torch.zeros(2 + NORM_WORDS, dtype=torch.int64, device=self._place)
            record[:2].copy_(torch.tensor([out.data_ptr(), record[2:].data_ptr()]))
            self._norms[bucket.number] = record
        return self._norms[bucket.number]
