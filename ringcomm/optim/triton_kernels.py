"""Triton's kernels, which replace the native ones that compute and communicate.

On the host they run in Triton's interpreter, for tests. The native kernels still begin a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from ringcomm import _native
from ringcomm.comm.arguments import ALGORITHMS, DTYPE_NAMES, CallChecks
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.engine import Call
from ringcomm.comm.triton import TritonEnd, require_triton
from ringcomm.comm.work import Work
from ringcomm.errors import RingcommError, UnsupportedError
from ringcomm.optim.buckets import Bucket
from ringcomm.optim.kernels import Kernels, StepTable, shard_of
from ringcomm.optim.options import AdamWOptions
from ringcomm.optim.reduction import NORM_WORDS, Into, Reducer, kind_code

if TYPE_CHECKING:
    from ringcomm._tl.adamw_kind import ShardKind
    from ringcomm._tl.launch import KernelPlan

Tensor = torch.Tensor

# Parameters of steps that failed, kept alive since a peer that does not know yet may store there.
_abandoned: list[Tensor] = []


class TritonCalls:
    """The runner of Triton's collectives, in the order of a communicator's calls.

    Raises:
        UnsupportedError: Triton cannot be imported, or cannot run here.
    """

    def __init__(self, comm: Communicator | None, algorithm: str) -> None:
        self._comm = comm
        self._algorithm = algorithm
        self.checks = CallChecks(
            "optimizer", comm.rank if comm else 0, comm.world_size if comm else 1
        )
        require_triton(self.checks)
        if comm is None:
            self._check_interpreted()
        else:
            self._use = comm.use_kernels(self.checks, "triton", algorithm, torch.float32)

    def _check_interpreted(self) -> None:
        from ringcomm._tl.hooks import IS_INTERPRETED

        if not IS_INTERPRETED:
            raise UnsupportedError(
                f'{self.checks}: on the host kernels="triton" runs in Triton\'s interpreter. Set '
                'TRITON_INTERPRET=1 before Triton is imported, or use kernels="native"'
            )

    def plan(
        self,
        name: str,
        make: Callable[[int], KernelPlan],
        source: Tensor,
        record: Tensor,
        stored: Tensor | None = None,
    ) -> None:
        """Runs the collective that ``make`` plans; peers store to ``stored``."""
        comm = self._comm
        if comm is None:
            return

        def run(native: _native.Comm) -> int:
            end: TritonEnd = self._use(native)
            plan = make(end.chosen(ALGORITHMS[self._algorithm]))
            return end.run(plan, source.data_ptr(), record.data_ptr())

        try:
            comm.start_call(Call(name, run, []))
        except RingcommError:
            if stored is not None:
                _abandoned.append(stored)
            raise


class TritonReducer(Reducer):
    """Triton's reductions of the optimizer's own buckets, at each step."""

    def __init__(self, triton: TritonCalls, comm: Communicator | None, op: str) -> None:
        self._triton = triton
        self._comm = comm
        self._op = op
        # By address of the output: a record of that address and of norm words that stay in place.
        self._records: dict[int, Tensor] = {}

    def forget(self) -> None:
        """Drops kept addresses."""
        self._records.clear()

    def norm(self, grads: Tensor, kind: str, words: Tensor) -> None:
        from ringcomm._tl.adamw_launch import launch_grad_norm

        if self._comm is not None:
            # A world of one on a device: the reduction stores nothing, and only sums for the norm.
            self._run(grads, grads, kind, words)
            return
        words.zero_()  # blocks add to it
        dtype = DTYPE_NAMES[grads.dtype]
        launch_grad_norm(grads.data_ptr(), dtype, grads.numel(), kind_code(kind), words.data_ptr())

    def reduce(self, grads: Tensor, into: Into, async_op: bool = False) -> Work | None:
        if into.accumulate or async_op or into.tag:
            raise UnsupportedError(
                f'{self._triton.checks}: kernels="triton" reduces at the step alone; use '
                'kernels="native"'
            )
        words = into.words
        if words is None:  # the kernels sum for the norm, whether or not anyone asks for it
            words = torch.empty(NORM_WORDS, dtype=torch.int64, device=grads.device)
        self._run(grads, into.out, into.kind, words)
        return None

    def _run(self, grads: Tensor, out: Tensor, kind: str, words: Tensor) -> None:
        from ringcomm._tl.adamw_launch import plan_reduce_scatter_norm

        world_size = self._triton.checks.world_size
        record = self._record(out)
        found = record[2:]
        found.zero_()  # blocks add to it
        self._triton.plan(
            "reduce_scatter_norm",
            lambda algorithm: plan_reduce_scatter_norm(
                grads.numel(),
                DTYPE_NAMES[grads.dtype],
                self._op,
                kind_code(kind),
                False,
                algorithm,
                world_size,
                stores=world_size > 1,
            ),
            grads,
            record,
        )
        words.copy_(found)

    def _record(self, out: Tensor) -> Tensor:
        if out.data_ptr() not in self._records:
            record = torch.zeros(2 + NORM_WORDS, dtype=torch.int64, device=out.device)
            addresses = [out.data_ptr(), record[2:].data_ptr()]
            record[:2].copy_(torch.tensor(addresses, dtype=torch.int64, device="cpu"))
            self._records[out.data_ptr()] = record
        return self._records[out.data_ptr()]


class TritonKernels(Kernels):
    """Triton's kernels of one optimizer.

    Without a communicator they run on the caller's thread, and otherwise in its order of calls.

    Args:
        comm: the communicator, or None for a world of one on the host.
        options: options of the optimizer.
        table: table of the optimizer.
        native: the native kernels, which begin a step.
        moments: as of :func:`ringcomm.optim.kernels.shard_of`.
        kind_of: called with the names of the tensors of a state, returns the update's kind, as
            :class:`ShardKind` names it.

    Raises:
        UnsupportedError: Triton cannot be imported, or cannot run here.
    """

    def __init__(
        self,
        comm: Communicator | None,
        options: AdamWOptions,
        table: StepTable,
        native: Kernels,
        moments: Sequence[str],
        kind_of: Callable[[Sequence[str]], str],
    ) -> None:
        triton = TritonCalls(comm, options.algorithm)
        self._triton = triton
        self._op = options.reduce.upper()
        self._norms = TritonReducer(triton, comm, self._op)
        super().__init__(triton.checks.world_size == 1, self._norms)
        self._comm = comm
        self._options = options
        self._native = native
        self._moments = moments
        self._kind_of = kind_of
        self._factors_ptr = table.factors.data_ptr()
        self._place = table.control.device if comm is None else comm.device
        # By bucket number, the description of the bucket's shard that kernels read.
        self._shards: dict[tuple[int, int], Tensor] = {}

    def forget(self) -> None:
        self._native.forget()
        self._shards.clear()
        self._norms.forget()

    def begin(self, table: StepTable) -> None:
        self._native.begin(table)

    def update_shard(self, bucket: Bucket, grad: Tensor) -> None:
        from ringcomm._tl.adamw_launch import launch_adamw_shard

        kind, record = self._kind(bucket, grad.dtype, "SUM"), self._shard(bucket)
        if self._comm is None:
            launch_adamw_shard(record.data_ptr(), grad.data_ptr(), bucket.chunk.elems, kind)
        else:
            self.update_gather(bucket, grad)

    def update_gather(self, bucket: Bucket, grad: Tensor) -> None:
        from ringcomm._tl.adamw_launch import plan_adamw_all_gather

        kind, record = self._kind(bucket, grad.dtype, "SUM"), self._shard(bucket)
        self._triton.plan(
            "adamw_all_gather",
            lambda algorithm: plan_adamw_all_gather(bucket.layout.elems, kind, algorithm),
            grad,
            record,
            bucket.params,
        )

    def one_pass(self, bucket: Bucket, grads: Tensor) -> None:
        from ringcomm._tl.adamw_launch import plan_one_pass

        op, elems = self._op, bucket.layout.elems
        kind = self._kind(bucket, grads.dtype, op)
        self._triton.plan(
            "reduce_scatter_adamw_all_gather",
            lambda algorithm: plan_one_pass(elems, kind, op, algorithm),
            grads,
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
            self._triton.checks.world_size,
            master=master if state.remainder is None else "remainder",
            keeps_max="max_exp_avg_sq" in state.moments,
            stochastic=self._options.rounding == "stochastic",
            rule=self._kind_of(list(state.moments)),
        )

    def _shard(self, bucket: Bucket) -> Tensor:
        if bucket.key not in self._shards:
            shard = shard_of(bucket, self._factors_ptr, self._options, self._moments)
            data = list(_native.adamw_shard_bytes(shard))
            record = torch.tensor(data, dtype=torch.uint8, device=self._place)
            self._shards[bucket.key] = record
        return self._shards[bucket.key]
