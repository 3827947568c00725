"""Several collectives of one kind as one call: one Work, and no other call in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ringcomm import _native
from ringcomm.comm.arguments import SUM, CallChecks
from ringcomm.comm.collectives import Collectives
from ringcomm.comm.engine import Call
from ringcomm.comm.work import Work

Tensor = torch.Tensor


class CoalescedCalls(Collectives):
    """The collectives, and several of one kind as one call.

    All arguments are checked before the first of them moves anything.
    """

    def all_reduce_coalesced(
        self, tensors: Sequence[Tensor], op: Any = SUM, async_op: bool = False
    ) -> Work | None:
        """Calls :meth:`all_reduce` for each tensor, in place; shapes and dtypes may differ.

        Raises:
            ArgumentError: bad argument; nothing was sent, and peers wait for this rank.
            RingcommError: a fault; see ``ringcomm.errors``.
        """
        checked = self.checks("all_reduce_coalesced").tensors("tensors", tensors, len(tensors))
        return self._joined(
            "all_reduce_coalesced",
            [self._all_reduce_call(tensor, op, "auto") for tensor in checked],
            async_op,
        )

    def all_gather_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], async_op: bool = False
    ) -> Work | None:
        """Calls :meth:`all_gather_into_tensor` for each pair.

        Raises:
            ArgumentError: bad argument; nothing was sent, and peers wait for this rank.
            RingcommError: a fault; see ``ringcomm.errors``.
        """
        checks = self.checks("all_gather_coalesced")
        calls = [
            self._all_gather_call(output, input, "auto")
            for output, input in self._pairs(checks, outputs, inputs)
        ]
        return self._joined("all_gather_coalesced", calls, async_op)

    def all_gather_lists_coalesced(
        self,
        output_lists: Sequence[list[Tensor]],
        inputs: Sequence[Tensor],
        async_op: bool = False,
    ) -> Work | None:
        """Calls :meth:`all_gather` for each input.

        Args:
            output_lists: for each rank, the tensors that receive its ``inputs``.
            inputs: any shapes and dtypes, in the same order on all ranks.
            async_op: return a Work at once instead of waiting.

        Raises:
            ArgumentError: bad argument; nothing was sent, and peers wait for this rank.
            RingcommError: a fault; see ``ringcomm.errors``.
        """
        checks = self.checks("all_gather_coalesced")
        checked = checks.tensors("inputs", inputs, len(inputs))
        if len(output_lists) != self._world_size:
            checks.fail(f"output_lists: expected {self._world_size}, got {len(output_lists)}")
        by_rank = [
            checks.tensors(f"output_lists[{rank}]", outputs, len(checked), write=True)
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
        """Calls :meth:`reduce_scatter_tensor` for each pair.

        Raises:
            ArgumentError: bad argument; nothing was sent, and peers wait for this rank.
            RingcommError: a fault; see ``ringcomm.errors``.
        """
        checks = self.checks("reduce_scatter_coalesced")
        calls = [
            self._reduce_scatter_call(output, input, op, "auto")
            for output, input in self._pairs(checks, outputs, inputs)
        ]
        return self._joined("reduce_scatter_coalesced", calls, async_op)

    def _pairs(
        self, checks: CallChecks, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        checked = checks.tensors("inputs", inputs, len(inputs))
        return list(
            zip(checks.tensors("outputs", outputs, len(checked), write=True), checked, strict=True)
        )

    def _joined(self, name: str, calls: list[Call], async_op: bool) -> Work | None:
        runs: list[Callable[[_native.Comm], int]] = [call.run for call in calls]

        def run(native: _native.Comm) -> int:
            for each in runs:
                status = each(native)
                if status:
                    return status
            return 0

        outputs = [tensor for call in calls for tensor in call.outputs]
        inputs = [tensor for call in calls for tensor in call.inputs]
        return self.start_call(Call(name, run, outputs, inputs), async_op)
