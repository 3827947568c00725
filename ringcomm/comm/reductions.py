"""The collectives that combine elements: all_reduce, reduce, reduce_scatter.

NOTE [At once]

The native module itself reads the tensors of the common call: plain CPU tensors and a plain op,
with nothing queued before it. Such a call is made at once. The answer NOT_PLAIN (of ``*_at_once``
False), of anything else, means that nothing was done, and the call goes the careful path, which
words every complaint. A call of a method costs a tenth of a small collective, so the collectives
have these lines themselves, and ``torch.distributed`` has ``*_at_once``.
"""

from __future__ import annotations

from typing import Any

import torch

from ringcomm import _native
from ringcomm.comm.calls import Call
from ringcomm.comm.checks import put_back, readable, size_bytes, writable
from ringcomm.comm.engine import Engine
from ringcomm.comm.reduce_ops import SUM
from ringcomm.comm.work import Work

Tensor = torch.Tensor


class Reductions(Engine):
    """Reducing collectives of a communicator."""

    def all_reduce(
        self,
        tensor: Tensor,
        op: Any = SUM,
        async_op: bool = False,
        *,
        algorithm: str = "auto",
        kernels: str | None = None,
    ) -> Work | None:
        """Combines ``tensor`` of all ranks element by element, in place.

        Args:
            tensor: any shape, same element count and dtype on all ranks.
            op: a ``ReduceOp`` or ``premul_sum(factor)``.
            async_op: return a Work at once instead of waiting.
            algorithm: "auto", "direct" or "ring".
            kernels: "native" or "triton", the same on all ranks; None for ``CommOptions.kernels``.

        Raises:
            ArgumentError: bad argument; no peer was disturbed.
            RingcommError: a fault; see ``ringcomm.errors``.
        """
        if not (async_op or kernels or self._queue.pending or self._kernels):
            status = self._native.all_reduce_plain(tensor, op, algorithm)
            if status == 0:
                return None
            if status > 0:
                raise self._fault("all_reduce")
        return self._start(self._all_reduce_call(tensor, op, algorithm, kernels), async_op)

    def all_reduce_at_once(self, tensor: Tensor, op: Any) -> bool:
        """:meth:`all_reduce` where no more is to be asked, as NOTE [At once] says."""
        if self._queue.pending or self._kernels:
            return False
        status = self._native.all_reduce_plain(tensor, op, "auto")
        if status > 0:
            raise self._fault("all_reduce")
        return status == 0

    def _all_reduce_call(
        self, tensor: Tensor, op: Any, algorithm: str, kernels: str | None = None
    ) -> Call:
        site = self._site("all_reduce")
        dtype = site.output("tensor", tensor)
        reduction = site.reduction(op, "tensor", tensor)
        algorithm_code = site.algorithm(algorithm)
        use = self._use(site, kernels, algorithm, tensor.dtype, reduction)

        def run(native: _native.Comm) -> int:
            dense = readable(tensor)
            ptr = dense.data_ptr()
            status: int = use(native).all_reduce(
                ptr, ptr, dense.numel(), dtype, reduction.code, reduction.factor, algorithm_code
            )
            put_back(tensor, dense)
            return status

        return Call("all_reduce", run, [tensor])

    def reduce(
        self, tensor: Tensor, dst: int, op: Any = SUM, async_op: bool = False
    ) -> Work | None:
        """Combines ``tensor`` of all ranks into that of rank ``dst``; others keep theirs.

        Raises:
            ArgumentError: bad argument; no peer was disturbed.
            RingcommError: a fault; see ``ringcomm.errors``.
        """
        site = self._site("reduce")
        dtype = site.output("tensor", tensor)
        reduction = site.reduction(op, "tensor", tensor)
        root = site.peer("dst", dst)

        def run(native: _native.Comm) -> int:
            dense = readable(tensor)
            ptr = dense.data_ptr()
            status = native.reduce(
                ptr, ptr, dense.numel(), dtype, reduction.code, reduction.factor, root
            )
            if self._rank == root:
                put_back(tensor, dense)
            return status

        return self._start(Call("reduce", run, [tensor]), async_op)

    def reduce_scatter_tensor(
        self,
        output: Tensor,
        input: Tensor,
        op: Any = SUM,
        async_op: bool = False,
        *,
        algorithm: str = "auto",
        kernels: str | None = None,
    ) -> Work | None:
        """Combines ``input`` of all ranks; rank r gets the r-th of world_size equal chunks.

        Args:
            output: contiguous, N elements; may be exactly this rank's chunk of ``input``.
            input: contiguous, world_size * N elements, of the same dtype.
            op: a ``ReduceOp`` or ``premul_sum(factor)``.
            async_op: return a Work at once instead of waiting.
            algorithm: "auto", "direct" or "ring".
            kernels: "native" or "triton", the same on all ranks; None for ``CommOptions.kernels``.

        Raises:
            ArgumentError: bad argument; no peer was disturbed.
            RingcommError: a fault; see ``ringcomm.errors``.
        """
        if not (async_op or kernels or self._queue.pending or self._kernels):
            status = self._native.reduce_scatter_plain(output, input, op, algorithm)
            if status == 0:
                return None
            if status > 0:
                raise self._fault("reduce_scatter_tensor")
        return self._start(
            self._reduce_scatter_call(output, input, op, algorithm, kernels), async_op
        )

    def reduce_scatter_at_once(self, output: Tensor, input: Tensor, op: Any) -> bool:
        """:meth:`reduce_scatter_tensor` where no more is to be asked, as NOTE [At once] says."""
        if self._queue.pending or self._kernels:
            return False
        status = self._native.reduce_scatter_plain(output, input, op, "auto")
        if status > 0:
            raise self._fault("reduce_scatter_tensor")
        return status == 0

    def _reduce_scatter_call(
        self,
        output: Tensor,
        input: Tensor,
        op: Any,
        algorithm: str,
        kernels: str | None = None,
    ) -> Call:
        site = self._site("reduce_scatter_tensor")
        dtype = site.output("output", output)
        site.tensor("input", input)
        site.same_dtype("input", input, "output", output)
        count_elems = output.numel()
        site.same_count(
            "input", input, "world_size x those of output", count_elems * self._world_size
        )
        site.contiguous("output", output)
        site.contiguous("input", input)
        reduction = site.reduction(op, "input", input)
        algorithm_code = site.algorithm(algorithm)
        in_ptr, out_ptr = input.data_ptr(), output.data_ptr()
        if out_ptr != in_ptr + self._rank * size_bytes(output):
            site.apart("output", output, "input", input, "in place, output is input's own chunk")

        use = self._use(site, kernels, algorithm, input.dtype, reduction)

        def run(native: _native.Comm) -> int:
            status: int = use(native).reduce_scatter(
                input.data_ptr(),
                output.data_ptr(),
                count_elems,
                dtype,
                reduction.code,
                reduction.factor,
                algorithm_code,
            )
            return status

        return Call("reduce_scatter_tensor", run, [output])

    def reduce_scatter(
        self, output: Tensor, input_list: list[Tensor], op: Any = SUM, async_op: bool = False
    ) -> Work | None:
        """Combines the lists of all ranks; rank r gets the reduced ``input_list[r]``.

        Args:
            output: any shape, as many elements as ``input_list[rank]``; may be that very tensor.
            input_list: world_size tensors of one dtype; counts may differ between entries, but
                not between ranks.
            op: a ``ReduceOp`` or ``premul_sum(factor)``.
            async_op: return a Work at once instead of waiting.

        Raises:
            ArgumentError: bad argument; no peer was disturbed.
            RingcommError: a fault; see ``ringcomm.errors``.
        """
        site = self._site("reduce_scatter")
        dtype = site.output("output", output)
        inputs = site.tensors("input_list", input_list, self._world_size)
        reduction = site.reduction(op, "output", output)
        for index, tensor in enumerate(inputs):
            name = f"input_list[{index}]"
            site.same_dtype(name, tensor, "output", output)
            if index != self._rank or tensor.data_ptr() != output.data_ptr():
                site.apart("output", output, name, tensor, "in place, it is input_list[rank]")
        site.same_count("output", output, "those of input_list[rank]", inputs[self._rank].numel())

        def run(native: _native.Comm) -> int:
            dense_inputs = [readable(tensor) for tensor in inputs]
            dense = writable(output)
            status = native.reduce_scatter_list(
                [tensor.data_ptr() for tensor in dense_inputs],
                [tensor.numel() for tensor in dense_inputs],
                dense.data_ptr(),
                dtype,
                reduction.code,
                reduction.factor,
            )
            put_back(output, dense)
            return status

        return self._start(Call("reduce_scatter", run, [output]), async_op)
