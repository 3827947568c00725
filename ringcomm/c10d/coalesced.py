"""The collectives over several tensors at once."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed import Work
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    ReduceScatterOptions,
)

from ringcomm.c10d.arguments import in_memory_all, options
from ringcomm.c10d.calls import op_of
from ringcomm.c10d.collectives import Collectives
from ringcomm.errors import ArgumentError

__all__ = ["CoalescedCollectives"]


class CoalescedCollectives(Collectives):
    """Mixin of the process group: one call, many tensors."""

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

        def each() -> None:
            for index, tensor in enumerate(given):
                communicator.all_gather([outputs[index] for outputs in lists], tensor)

        return self._submit(opts, communicator, flat, "allgather_coalesced", each)

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
