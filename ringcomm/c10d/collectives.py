"""The collectives of the process group, in the argument forms of ``torch.distributed``.

Ranks and roots are ranks of the group. ``opts.asyncOp`` false, which is what
``torch.distributed`` passes for ``async_op=False``, runs the call on the caller's thread;
otherwise it runs in order on the communicator's worker thread.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import Work
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from ringcomm.c10d.arguments import in_memory, in_memory_all, options, single
from ringcomm.c10d.calls import Calls, op_of
from ringcomm.c10d.sparse import sparse_all_reduce

__all__ = ["Collectives"]


class Collectives(Calls):
    """Mixin of the process group: everything that all members of the group call together."""

    def allreduce(
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None
    ) -> Work:
        if not isinstance(opts, AllreduceOptions):
            opts = options(AllreduceOptions, opts, timeout, reduceOp=op)
        tensor = single(tensors, "allreduce")
        if tensor.is_sparse:
            return self._submit(
                opts,
                [tensor],
                "allreduce of a sparse tensor",
                lambda: sparse_all_reduce(self._communicator, tensor, op_of(opts)),
            )
        return self._run(opts, [tensor], self._communicator.all_reduce, tensor, op_of(opts))

    def broadcast(
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, root: Any = None
    ) -> Work:
        if not isinstance(opts, BroadcastOptions):
            opts = options(BroadcastOptions, opts, timeout, rootRank=root)
        tensor = single(tensors, "broadcast")
        return self._run(opts, [tensor], self._communicator.broadcast, tensor, opts.rootRank)

    def reduce(
        self,
        tensors: Any,
        opts: Any = None,
        op: Any = None,
        timeout: timedelta | None = None,
        *,
        root: Any = None,
    ) -> Work:
        if not isinstance(opts, ReduceOptions):
            opts = options(ReduceOptions, opts, timeout, rootRank=root, reduceOp=op)
        tensor = single(tensors, "reduce")
        return self._run(
            opts, [tensor], self._communicator.reduce, tensor, opts.rootRank, op_of(opts)
        )

    def allgather(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Work:
        if not isinstance(opts, AllgatherOptions):
            opts = options(AllgatherOptions, opts, timeout)
        given = single(input_tensors, "allgather")
        outputs = self._one_list(output_tensors, input_tensors, "allgather")
        return self._run(opts, outputs, self._communicator.all_gather, outputs, given)

    @staticmethod
    def _one_list(lists: Any, tensors: Any, operation: str) -> list[Tensor]:
        # The older form passes single tensors where the other passes lists of one.
        return in_memory_all(lists if isinstance(tensors, Tensor) else lists[0], operation)

    def all_gather_single(
        self, output: Tensor, input: Tensor, opts: Any = None, timeout: timedelta | None = None
    ) -> Work:
        if not isinstance(opts, AllgatherOptions):
            opts = options(AllgatherOptions, opts, timeout)
        gathered = in_memory(output, "all_gather_single")
        given = in_memory(input, "all_gather_single")
        return self._run(
            opts, [gathered], self._communicator.all_gather_into_tensor, gathered, given
        )

    def gather(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: Any = None,
    ) -> Work:
        if not isinstance(opts, GatherOptions):
            opts = options(GatherOptions, opts, timeout, rootRank=root)
        given = single(input_tensors, "gather")
        is_root = opts.rootRank == self._communicator.rank
        outputs = self._one_list(output_tensors, input_tensors, "gather") if is_root else []
        return self._run(
            opts,
            outputs,
            self._communicator.gather,
            given,
            outputs if is_root else None,
            opts.rootRank,
        )

    def scatter(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: Any = None,
    ) -> Work:
        if not isinstance(opts, ScatterOptions):
            opts = options(ScatterOptions, opts, timeout, rootRank=root)
        output = single(output_tensors, "scatter")
        is_root = opts.rootRank == self._communicator.rank
        given = self._one_list(input_tensors, output_tensors, "scatter") if is_root else None
        return self._run(opts, [output], self._communicator.scatter, output, given, opts.rootRank)

    def reduce_scatter(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        op: Any = None,
    ) -> Work:
        if not isinstance(opts, ReduceScatterOptions):
            opts = options(ReduceScatterOptions, opts, timeout, reduceOp=op)
        output = single(output_tensors, "reduce_scatter")
        given = self._one_list(input_tensors, output_tensors, "reduce_scatter")
        return self._run(
            opts, [output], self._communicator.reduce_scatter, output, given, op_of(opts)
        )

    def reduce_scatter_single(
        self,
        output: Tensor,
        input: Tensor,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        op: Any = None,
    ) -> Work:
        if not isinstance(opts, ReduceScatterOptions):
            opts = options(ReduceScatterOptions, opts, timeout, reduceOp=op)
        shard = in_memory(output, "reduce_scatter_single")
        given = in_memory(input, "reduce_scatter_single")
        return self._run(
            opts, [shard], self._communicator.reduce_scatter_tensor, shard, given, op_of(opts)
        )

    def alltoall(
        self,
        output_tensors: list[Tensor],
        input_tensors: list[Tensor],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Work:
        if not isinstance(opts, AllToAllOptions):
            opts = options(AllToAllOptions, opts, timeout)
        outputs = in_memory_all(output_tensors, "alltoall")
        given = in_memory_all(input_tensors, "alltoall")
        return self._run(opts, outputs, self._communicator.all_to_all, outputs, given)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Work:
        if not isinstance(opts, AllToAllOptions):
            opts = options(AllToAllOptions, opts, timeout)
        received = in_memory(output, "all_to_all_single")
        given = in_memory(input, "all_to_all_single")
        return self._run(
            opts,
            [received],
            self._communicator.all_to_all_single,
            received,
            given,
            output_split_sizes or None,
            input_split_sizes or None,
        )

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:
        if not isinstance(opts, BarrierOptions):
            opts = options(BarrierOptions, opts, timeout)
        return self._run(opts, [], self._communicator.barrier)

    # The names of these methods up to torch 2.12.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
