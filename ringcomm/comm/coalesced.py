"""Several collectives of one kind as one call: one Work, and no other call in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ringcomm import _native
from ringcomm.comm.calls import Call
from ringcomm.comm.checks import Site
from ringcomm.comm.gathers import Gathers
from ringcomm.comm.reduce_ops import SUM
from ringcomm.comm.reductions import Reductions
from ringcomm.comm.work import Work

Tensor = torch.Tensor


class Coalesced(Reductions, Gathers):
    """Coalesced collectives of a communicator. All arguments are checked before the first moves."""

    def all_reduce_coalesced(
        self, tensors: Sequence[Tensor], op: Any = SUM, async_op: bool = False
    ) -> Work | None:
        """:meth:`all_reduce` of each tensor, in place; shapes and dtypes may differ.

        Raises:
            ArgumentError: bad argument; no peer was disturbed.
            RingcommError: a fault; see ``ringcomm.errors``.
        """
        checked = self._site("all_reduce_coalesced").tensors("tensors", tensors, len(tensors))
        return self._joined(
            "all_reduce_coalesced",
            [self._all_reduce_call(tensor, op, "auto") for tensor in checked],
            async_op,
        )

    def all_gather_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], async_op: bool = False
    ) -> Work | None:
        """:meth:`all_gather_into_tensor` of each pair.

        Raises:
            ArgumentError: bad argument; no peer was disturbed.
            RingcommError: a fault; see ``ringcomm.errors``.
        """
        site = self._site("all_gather_coalesced")
        calls = [
            self._all_gather_call(output, input, "auto")
            for output, input in self._pairs(site, outputs, inputs)
        ]
        return self._joined("all_gather_coalesced", calls, async_op)

    def all_gather_lists_coalesced(
        self,
        output_lists: Sequence[list[Tensor]],
        inputs: Sequence[Tensor],
        async_op: bool = False,
    ) -> Work | None:
        """:meth:`all_gather` of each input.

        Args:
            output_lists: for each rank, what its ``inputs`` are received into.
            inputs: any shapes and dtypes, in the same order on all ranks.
            async_op: return a Work at once instead of waiting.

        Raises:
            ArgumentError: bad argument; no peer was disturbed.
            RingcommError: a fault; see ``ringcomm.errors``.
        """
        site = self._site("all_gather_coalesced")
        checked = site.tensors("inputs", inputs, len(inputs))
        if len(output_lists) != self._world_size:
            site.fail(f"output_lists: expected {self._world_size}, got {len(output_lists)}")
        by_rank = [
            site.tensors(f"output_lists[{rank}]", outputs, len(checked), write=True)
            for rank, outputs in enumerate(output_lists)
        ]
        calls = [
            self._all_gather_list_call([outputs[index] for outputs in by_rank], tensor)
            for index, tensor in enumerate(checked)
        ]
        return self._joined("all_gather_coalesced", calls, async_op)

    def reduce_scatter_coalesced(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        op: Any = SUM,
        async_op: bool = False,
    ) -> Work | None:
        """:meth:`reduce_scatter_tensor` of each pair.

        Raises:
            ArgumentError: bad argument; no peer was disturbed.
            RingcommError: a fault; see ``ringcomm.errors``.
        """
        site = self._site("reduce_scatter_coalesced")
        calls = [
            self._reduce_scatter_call(output, input, op, "auto")
            for output, input in self._pairs(site, outputs, inputs)
        ]
        return self._joined("reduce_scatter_coalesced", calls, async_op)

    def _pairs(
        self, site: Site, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        checked = site.tensors("inputs", inputs, len(inputs))
        return list(
            zip(site.tensors("outputs", outputs, len(checked), write=True), checked, strict=True)
        )

    def _joined(self, name: str, calls: list[Call], async_op: bool) -> Work | None:
        runs: list[Callable[[_native.Comm], int]] = [call.run for call in calls]

        def run(native: _native.Comm) -> int:
            for each in runs:
                status = each(native)
                if status:
                    return status
            return 0

        return self._start(
            Call(name, run, [tensor for call in calls for tensor in call.outputs]), async_op
        )
