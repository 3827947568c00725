"""The collectives of the process group, in the argument forms of ``torch.distributed``.

Ranks and roots are ranks of the group. ``opts.asyncOp`` false, which is what
``torch.distributed`` passes for ``async_op=False``, runs the call on the caller's thread;
otherwise it runs in order on the communicator's worker thread. Calls on a device return when they
are queued there, ordered on the caller's current stream; with ``asyncOp`` they run beside it.
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
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from ringcomm.c10d.arguments import in_memory, in_memory_all, options, single
from ringcomm.c10d.calls import Calls, is_plain_call, op_of
from ringcomm.c10d.sparse import sparse_all_reduce

__all__ = ["Collectives"]


class Collectives(Calls):
    """Mixin of the process group: everything that all members of the group call together."""

    _rank: int

    def allreduce(
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None
    ) -> Work:
        if (
            is_plain_call(opts, AllreduceOptions)
            and len(tensors) == 1
            and self._of(tensors, "allreduce").all_reduce_at_once(tensors[0], opts.reduceOp)
        ):
            return self._done(tensors)
        if not isinstance(opts, AllreduceOptions):
            opts = options(AllreduceOptions, opts, timeout, reduceOp=op)
        tensor = single(tensors, "allreduce")
        outputs = [tensor]
        communicator = self._of(outputs, "allreduce")
        if tensor.is_sparse:
            host = self._communicators.host
            return self._submit(
                opts,
                communicator,
                outputs,
                "allreduce of a sparse tensor",
                lambda: sparse_all_reduce(host, communicator, tensor, op_of(opts)),
            )
        return self._run(opts, communicator, outputs, communicator.all_reduce, tensor, op_of(opts))

    def broadcast(
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, root: Any = None
    ) -> Work:
        if not isinstance(opts, BroadcastOptions):
            opts = options(BroadcastOptions, opts, timeout, rootRank=root)
        tensor = single(tensors, "broadcast")
        outputs = [tensor]
        communicator = self._of(outputs, "broadcast")
        return self._run(opts, communicator, outputs, communicator.broadcast, tensor, opts.rootRank)

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
        outputs = [tensor]
        communicator = self._of(outputs, "reduce")
        return self._run(
            opts, communicator, outputs, communicator.reduce, tensor, opts.rootRank, op_of(opts)
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
        communicator = self._of([given, *outputs], "allgather")
        return self._run(opts, communicator, outputs, communicator.all_gather, outputs, given)

    @staticmethod
    def _one_list(lists: Any, tensors: Any, operation: str) -> list[Tensor]:
        # The older form passes single tensors where the other passes lists of one.
        return in_memory_all(lists if isinstance(tensors, Tensor) else lists[0], operation)

    def all_gather_single(
        self, output: Tensor, input: Tensor, opts: Any = None, timeout: timedelta | None = None
    ) -> Work:
        if is_plain_call(opts, AllgatherOptions):
            communicator = self._of((output, input), "all_gather_single")
            if communicator.all_gather_at_once(output, input):
                return self._done([output])
        if not isinstance(opts, AllgatherOptions):
            opts = options(AllgatherOptions, opts, timeout)
        gathered = in_memory(output, "all_gather_single")
        given = in_memory(input, "all_gather_single")
        communicator = self._of((gathered, given), "all_gather_single")
        return self._run(
            opts,
            communicator,
            [gathered],
            communicator.all_gather_into_tensor,
            gathered,
            given,
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
        is_root = opts.rootRank == self._rank
        outputs = self._one_list(output_tensors, input_tensors, "gather") if is_root else []
        communicator = self._of([given, *outputs], "gather")
        return self._run(
            opts,
            communicator,
            outputs,
            communicator.gather,
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
        is_root = opts.rootRank == self._rank
        given = self._one_list(input_tensors, output_tensors, "scatter") if is_root else None
        communicator = self._of([output, *(given or ())], "scatter")
        return self._run(
            opts, communicator, [output], communicator.scatter, output, given, opts.rootRank
        )

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
        communicator = self._of([output, *given], "reduce_scatter")
        return self._run(
            opts, communicator, [output], communicator.reduce_scatter, output, given, op_of(opts)
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
        if is_plain_call(opts, ReduceScatterOptions):
            communicator = self._of((output, input), "reduce_scatter_single")
            if communicator.reduce_scatter_at_once(output, input, opts.reduceOp):
                return self._done([output])
        if not isinstance(opts, ReduceScatterOptions):
            opts = options(ReduceScatterOptions, opts, timeout, reduceOp=op)
        shard = in_memory(output, "reduce_scatter_single")
        given = in_memory(input, "reduce_scatter_single")
        communicator = self._of((shard, given), "reduce_scatter_single")
        return self._run(
            opts,
            communicator,
            [shard],
            communicator.reduce_scatter_tensor,
            shard,
            given,
            op_of(opts),
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
        communicator = self._of([*outputs, *given], "alltoall")
        return self._run(opts, communicator, outputs, communicator.all_to_all, outputs, given)

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
        communicator = self._of((received, given), "all_to_all_single")
        return self._run(
            opts,
            communicator,
            [received],
            communicator.all_to_all_single,
            received,
            given,
            output_split_sizes or None,
            input_split_sizes or None,
        )

    # The names of these methods up to torch 2.12.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
