# SPDX-License-Identifier: Apache-2.0
"""The collectives of the process group, in the argument forms of ``torch.distributed``."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp, Work
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from ringcomm.c10d.calls import (
    Calls,
    in_memory,
    in_memory_all,
    op_of,
    options,
    single,
)
from ringcomm.comm.agreement import first_other, unequal
from ringcomm.comm.communicator import Communicator
from ringcomm.errors import ArgumentError, UnsupportedError

__all__ = ["CoalescedCollectives", "GroupCollectives", "sparse_all_reduce"]

# All-reduce of sparse COO tensors, as in Gloo: the ranks' non-zeros may have different indices.

_LONGEST_SHAPE = 64  # dimensions that fit into a header; torch itself stops at 64


def sparse_all_reduce(
    host: Communicator, communicator: Communicator, tensor: Tensor, op: Any
) -> None:
    """Sums a sparse tensor over all ranks, in place; the result is coalesced.

    It makes three all-gathers: of each rank's number of non-zeros, of all indices, and of all
    values. The sum runs in rank order, so all ranks get equal bits.

    Args:
        host: the group's host communicator, for the numbers of non-zeros.
        communicator: the communicator of the tensor's device; may be ``host``.
        tensor: sparse COO, of one shape and dtype on all ranks, with any number of non-zeros.
        op: only SUM.

    Raises:
        UnsupportedError: another op or layout.
        MismatchError: the ranks' tensors differ in shape or in sparse dimensions.
    """
    where = f"allreduce of a sparse tensor on rank {communicator.rank} of {communicator.world_size}"
    if tensor.layout is not torch.sparse_coo or op is not ReduceOp.SUM:
        raise UnsupportedError(
            f"{where}: expected layout torch.sparse_coo and op SUM, got {tensor.layout} and {op}; "
            "convert with tensor.to_sparse_coo(), or reduce tensor.to_dense()"
        )
    with torch.no_grad():
        mine = tensor.detach().coalesce()
        counts = _counts_of_non_zeros(host, mine, where)
        indices = _gathered(communicator, mine.indices().t(), counts)
        values = _gathered(communicator, mine.values(), counts)
        total = torch.sparse_coo_tensor(
            indices[0].t(),
            values[0],
            mine.shape,
            is_coalesced=True,
            check_invariants=False,
            device=mine.device,
        )
        for positions, addends in zip(indices[1:], values[1:], strict=True):
            total = total + torch.sparse_coo_tensor(
                positions.t(),
                addends,
                mine.shape,
                is_coalesced=True,
                check_invariants=False,
                device=mine.device,
            )
        tensor.copy_(total.coalesce())


def _counts_of_non_zeros(communicator: Communicator, mine: Tensor, where: str) -> list[int]:
    header = torch.zeros(_LONGEST_SHAPE + 3, dtype=torch.int64, device="cpu")
    shape = list(mine.shape)
    header[: len(shape) + 3] = torch.tensor(
        [mine.values().shape[0], mine.sparse_dim(), len(shape), *shape],
        dtype=torch.int64,
        device="cpu",
    )
    headers = header.new_empty(communicator.world_size, len(header))
    communicator.all_gather_into_tensor(headers, header)
    told = headers.tolist()
    rows = [(sparse, sizes[:dims]) for _, sparse, dims, *sizes in told]
    if other := first_other(rows):
        names = ("number of sparse dimensions", "shape")
        raise unequal(where, names, rows, other, "Give all ranks tensors of one shape")
    return [count for count, *_ in told]


def _gathered(communicator: Communicator, rows: Tensor, counts: list[int]) -> list[Tensor]:
    """Returns the rows of every rank, by rank; ranks may differ only in the number of rows."""
    outputs = [rows.new_empty(count, *rows.shape[1:]) for count in counts]
    communicator.all_gather(outputs, rows.contiguous())
    return outputs


# The collectives of the process group, in the argument forms of ``torch.distributed``.
#
# Ranks and roots are ranks of the group. If ``opts.asyncOp`` is false (``torch.distributed`` passes
# false for ``async_op=False``), the call runs on the caller's thread; otherwise it runs in order on
# the communicator's worker thread. Calls on a device return when they are enqueued, in the order of
# the caller's current stream; with ``asyncOp`` they run concurrently with that stream.

# NOTE [Plain calls]
# ``torch.distributed`` mostly makes synchronous calls of one CPU tensor with the group's own
# timeout. Python functions and torch's properties would take longer than the call itself at 4 KiB.
# So the native module reads the options and the tensors and makes the call. For any other call it
# does nothing and returns NOT_FAST. Then the method reads its arguments, finds the communicator,
# and tries a device's native call in the same way.


class GroupCollectives(Calls):
    """Mixin of the process group: the collectives of all members."""

    _rank: int

    def allreduce(
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None
    ) -> Work:
        # See NOTE [Plain calls]
        engine = self._host
        if not (engine.queue.pending or engine.kernels):
            status = engine.fast.all_reduce_for_torch(tensors, opts)
            if status >= 0:
                return self._made(status, engine, "all_reduce", tensors)
        if not isinstance(opts, AllreduceOptions):
            opts = options(AllreduceOptions, opts, timeout, reduceOp=op)
        tensor = single(tensors, "allreduce")
        outputs = [tensor]
        communicator = self._of(outputs, "allreduce")
        if communicator.launches:
            engine = communicator.engine
            if not (engine.queue.pending or engine.kernels):
                status = engine.fast.all_reduce_for_torch(outputs, opts)
                if status >= 0:
                    return self._made(status, engine, "all_reduce", outputs)
        if tensor.is_sparse:
            host = self._communicators.host
            return self._submit(
                opts,
                communicator,
                outputs,
                "all_reduce of sparse tensors",
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
        # The older form passes single tensors, the current form lists of one tensor.
        return in_memory_all(lists if isinstance(tensors, Tensor) else lists[0], operation)

    def all_gather_single(
        self, output: Tensor, input: Tensor, opts: Any = None, timeout: timedelta | None = None
    ) -> Work:
        # See NOTE [Plain calls]
        engine = self._host
        if not (engine.queue.pending or engine.kernels):
            status = engine.fast.all_gather_for_torch(output, input, opts)
            if status >= 0:
                return self._made(status, engine, "all_gather_into_tensor", [output])
        if not isinstance(opts, AllgatherOptions):
            opts = options(AllgatherOptions, opts, timeout)
        gathered = in_memory(output, "all_gather_single")
        given = in_memory(input, "all_gather_single")
        communicator = self._of((gathered, given), "all_gather_single")
        if communicator.launches:
            engine = communicator.engine
            if not (engine.queue.pending or engine.kernels):
                status = engine.fast.all_gather_for_torch(gathered, given, opts)
                if status >= 0:
                    return self._made(status, engine, "all_gather_into_tensor", [gathered])
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
        # See NOTE [Plain calls]
        engine = self._host
        if not (engine.queue.pending or engine.kernels):
            status = engine.fast.reduce_scatter_for_torch(output, input, opts)
            if status >= 0:
                return self._made(status, engine, "reduce_scatter_tensor", [output])
        if not isinstance(opts, ReduceScatterOptions):
            opts = options(ReduceScatterOptions, opts, timeout, reduceOp=op)
        shard = in_memory(output, "reduce_scatter_single")
        given = in_memory(input, "reduce_scatter_single")
        communicator = self._of((shard, given), "reduce_scatter_single")
        if communicator.launches:
            engine = communicator.engine
            if not (engine.queue.pending or engine.kernels):
                status = engine.fast.reduce_scatter_for_torch(shard, given, opts)
                if status >= 0:
                    return self._made(status, engine, "reduce_scatter_tensor", [shard])
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
            output_split_sizes,
            input_split_sizes,
        )

    # The names of these methods up to torch 2.12.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single


# The collectives over several tensors at once.


class CoalescedCollectives(GroupCollectives):
    """Mixin of the process group: the collectives that take several tensors."""

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Work:
        if not isinstance(opts, AllreduceCoalescedOptions):
            opts = options(AllreduceCoalescedOptions, opts, None)
        tensors = in_memory_all(tensors, "allreduce_coalesced")
        communicator = self._of(tensors, "allreduce_coalesced")
        return self._run(
            opts, communicator, tensors, communicator.all_reduce_coalesced, tensors, op_of(opts)
        )

    def allgather_coalesced(
        self, output_lists: list[list[Tensor]], input_list: list[Tensor], opts: Any = None
    ) -> Work:
        """Gathers every tensor of a list; ``output_lists[rank]`` receives that rank's list."""
        if not isinstance(opts, AllgatherOptions):
            opts = options(AllgatherOptions, opts, None)
        lists = [in_memory_all(tensors, "allgather_coalesced") for tensors in output_lists]
        given = in_memory_all(input_list, "allgather_coalesced")
        if any(len(tensors) != len(given) for tensors in lists):
            raise ArgumentError(
                f"allgather_coalesced: expected lists of {len(given)} outputs, one per input, "
                f"got {[len(tensors) for tensors in lists]}"
            )

        flat = [tensor for tensors in lists for tensor in tensors]
        communicator = self._of([*flat, *given], "allgather_coalesced")
        method = communicator.all_gather_lists_coalesced
        return self._run(opts, communicator, flat, method, lists, given)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        if not isinstance(opts, AllgatherOptions):
            opts = options(AllgatherOptions, opts, None)
        gathered = in_memory_all(outputs, "all_gather_single_coalesced")
        given = in_memory_all(inputs, "all_gather_single_coalesced")
        communicator = self._of([*gathered, *given], "all_gather_single_coalesced")
        return self._run(
            opts, communicator, gathered, communicator.all_gather_coalesced, gathered, given
        )

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        if not isinstance(opts, ReduceScatterOptions):
            opts = options(ReduceScatterOptions, opts, None)
        shards = in_memory_all(outputs, "reduce_scatter_single_coalesced")
        given = in_memory_all(inputs, "reduce_scatter_single_coalesced")
        communicator = self._of([*shards, *given], "reduce_scatter_single_coalesced")
        return self._run(
            opts,
            communicator,
            shards,
            communicator.reduce_scatter_coalesced,
            shards,
            given,
            op_of(opts),
        )

    # The names of these methods up to torch 2.12.
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
