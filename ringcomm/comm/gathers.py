"""The collectives that bring the tensors of all ranks together: all_gather and gather."""

from __future__ import annotations

import torch

from ringcomm import _native
from ringcomm.comm.calls import Call
from ringcomm.comm.checks import Site, put_back, readable, size_bytes, writable
from ringcomm.comm.engine import Engine
from ringcomm.comm.work import Work

Tensor = torch.Tensor


class Gathers(Engine):
    """Gathering collectives of a communicator."""

    def all_gather_into_tensor(
        self,
        output: Tensor,
        input: Tensor,
        async_op: bool = False,
        *,
        algorithm: str = "auto",
        kernels: str | None = None,
    ) -> Work | None:
        """Gives every rank the ``input`` of all ranks, one after the other.

        Args:
            output: contiguous, world_size * N elements.
            input: contiguous, N elements of the same dtype; may be exactly this rank's chunk
                of ``output``.
            async_op: return a Work at once instead of waiting.
            algorithm: "auto", "direct" or "ring".
            kernels: "native" or "triton", the same on all ranks; None for ``CommOptions.kernels``.

        Raises:
            ArgumentError: bad argument; no peer was disturbed.
            RingcommError: a fault; see ``ringcomm.errors``.
        """
        if not (async_op or kernels or self._queue.pending or self._kernels):
            status = self._native.all_gather_plain(output, input, algorithm)
            if status == 0:
                return None
            if status > 0:
                raise self._fault("all_gather_into_tensor")
        return self._start(self._all_gather_call(output, input, algorithm, kernels), async_op)

    def all_gather_at_once(self, output: Tensor, input: Tensor) -> bool:
        """:meth:`all_gather_into_tensor` where no more is to be asked, as NOTE [At once] says."""
        if self._queue.pending or self._kernels:
            return False
        status = self._native.all_gather_plain(output, input, "auto")
        if status > 0:
            raise self._fault("all_gather_into_tensor")
        return status == 0

    def _all_gather_call(
        self, output: Tensor, input: Tensor, algorithm: str, kernels: str | None = None
    ) -> Call:
        site = self._site("all_gather_into_tensor")
        dtype = site.tensor("input", input)
        site.output("output", output)
        site.same_dtype("output", output, "input", input)
        site.same_count(
            "output", output, "world_size x those of input", input.numel() * self._world_size
        )
        site.contiguous("input", input)
        site.contiguous("output", output)
        algorithm_code = site.algorithm(algorithm)
        in_bytes = size_bytes(input)
        if input.data_ptr() != output.data_ptr() + self._rank * in_bytes:
            site.apart("input", input, "output", output, "in place, input is output's own chunk")

        use = self._use(site, kernels, algorithm, input.dtype)

        def run(native: _native.Comm) -> int:
            status: int = use(native).all_gather(
                input.data_ptr(), output.data_ptr(), in_bytes, dtype, algorithm_code
            )
            return status

        return Call("all_gather_into_tensor", run, [output])

    def all_gather(
        self, tensor_list: list[Tensor], tensor: Tensor, async_op: bool = False
    ) -> Work | None:
        """Fills ``tensor_list[r]`` with the ``tensor`` of rank r, on every rank.

        Args:
            tensor_list: world_size tensors; entry r has as many elements as rank r's ``tensor``,
                so counts may differ between entries.
            tensor: any shape; may be ``tensor_list[rank]`` itself.
            async_op: return a Work at once instead of waiting.

        Raises:
            ArgumentError: bad argument; no peer was disturbed.
            RingcommError: a fault; see ``ringcomm.errors``.
        """
        return self._start(self._all_gather_list_call(tensor_list, tensor), async_op)

    def _all_gather_list_call(self, tensor_list: list[Tensor], tensor: Tensor) -> Call:
        site = self._site("all_gather")
        dtype = site.tensor("tensor", tensor)
        outputs = site.tensors("tensor_list", tensor_list, self._world_size, write=True)
        self._check_gathered(site, "tensor_list", outputs, tensor)
        own = outputs[self._rank]
        site.same_count("tensor", tensor, "those of tensor_list[rank]", own.numel())

        def run(native: _native.Comm) -> int:
            dense = readable(tensor)
            dense_outputs = [writable(output) for output in outputs]
            status = native.all_gather_list(
                dense.data_ptr(),
                [output.data_ptr() for output in dense_outputs],
                [size_bytes(output) for output in dense_outputs],
                dtype,
            )
            for output, dense_output in zip(outputs, dense_outputs, strict=True):
                put_back(output, dense_output)
            return status

        return Call("all_gather", run, outputs)

    def _check_gathered(self, site: Site, name: str, outputs: list[Tensor], tensor: Tensor) -> None:
        for index, output in enumerate(outputs):
            site.same_dtype(f"{name}[{index}]", output, "tensor", tensor)
            if index != self._rank or output.data_ptr() != tensor.data_ptr():
                site.apart(
                    "tensor", tensor, f"{name}[{index}]", output, f"in place, it is {name}[rank]"
                )
        site.all_apart(name, outputs)

    def gather(
        self,
        tensor: Tensor,
        gather_list: list[Tensor] | None = None,
        dst: int = 0,
        async_op: bool = False,
    ) -> Work | None:
        """Fills ``gather_list[r]`` with the ``tensor`` of rank r, on rank ``dst`` only.

        Args:
            tensor: any shape, same element count and dtype on all ranks; on ``dst`` it may
                be ``gather_list[dst]`` itself.
            gather_list: on ``dst`` world_size tensors with as many elements; elsewhere None.
            dst: the rank that receives.
            async_op: return a Work at once instead of waiting.

        Raises:
            ArgumentError: bad argument; no peer was disturbed.
            RingcommError: a fault; see ``ringcomm.errors``.
        """
        site = self._site("gather")
        root = site.peer("dst", dst)
        dtype = site.tensor("tensor", tensor)
        outputs: list[Tensor] = []
        if self._rank == root:
            outputs = site.tensors("gather_list", gather_list, self._world_size, write=True)
            self._check_gathered(site, "gather_list", outputs, tensor)
            for index, output in enumerate(outputs):
                site.same_count(f"gather_list[{index}]", output, "those of tensor", tensor.numel())
        elif gather_list:
            site.fail(f"gather_list: expected None on ranks other than dst {root}")

        def run(native: _native.Comm) -> int:
            dense = readable(tensor)
            dense_outputs = [writable(output) for output in outputs]
            out_ptrs = [output.data_ptr() for output in dense_outputs]
            status = native.gather(dense.data_ptr(), size_bytes(dense), out_ptrs, dtype, root)
            for output, dense_output in zip(outputs, dense_outputs, strict=True):
                put_back(output, dense_output)
            return status

        return self._start(Call("gather", run, outputs), async_op)
