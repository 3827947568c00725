"""The collectives that hand data out or over: broadcast, scatter, all_to_all, barrier."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import accumulate

import torch

from ringcomm import _native
from ringcomm.comm.calls import Call
from ringcomm.comm.checks import Site, put_back, readable, size_bytes, writable
from ringcomm.comm.engine import Engine
from ringcomm.comm.work import Work

Tensor = torch.Tensor


class Exchanges(Engine):
    """Collectives of a communicator that move data without combining it."""

    def broadcast(self, tensor: Tensor, src: int, async_op: bool = False) -> Work | None:
        """Gives every rank the ``tensor`` of rank ``src``, in place.

        Args:
            tensor: any shape, same element count and dtype on all ranks.
            src: the rank that has the data.
            async_op: return a Work at once instead of waiting.

        Raises:
            ArgumentError: bad argument; no peer was disturbed.
            RingcommError: a fault; see ``ringcomm.errors``.
        """
        site = self._site("broadcast")
        root = site.peer("src", src)
        is_root = self._rank == root
        dtype = site.tensor("tensor", tensor) if is_root else site.output("tensor", tensor)

        def run(native: _native.Comm) -> int:
            dense = readable(tensor) if is_root else writable(tensor)
            status = native.broadcast(dense.data_ptr(), size_bytes(dense), dtype, root)
            if not is_root:
                put_back(tensor, dense)
            return status

        return self._start(Call("broadcast", run, [tensor]), async_op)

    def scatter(
        self,
        tensor: Tensor,
        scatter_list: list[Tensor] | None = None,
        src: int = 0,
        async_op: bool = False,
    ) -> Work | None:
        """Gives rank r the ``scatter_list[r]`` of rank ``src``.

        Args:
            tensor: receives; any shape, same element count and dtype on all ranks. On
                ``src`` it may be ``scatter_list[src]`` itself.
            scatter_list: on ``src`` world_size tensors with as many elements; elsewhere None.
            src: the rank that has the data.
            async_op: return a Work at once instead of waiting.

        Raises:
            ArgumentError: bad argument; no peer was disturbed.
            RingcommError: a fault; see ``ringcomm.errors``.
        """
        site = self._site("scatter")
        root = site.peer("src", src)
        dtype = site.output("tensor", tensor)
        inputs: list[Tensor] = []
        if self._rank == root:
            inputs = site.tensors("scatter_list", scatter_list, self._world_size)
            for index, each in enumerate(inputs):
                name = f"scatter_list[{index}]"
                site.same_dtype(name, each, "tensor", tensor)
                site.same_count(name, each, "those of tensor", tensor.numel())
                if index != root or each.data_ptr() != tensor.data_ptr():
                    site.apart("tensor", tensor, name, each, "in place, it is scatter_list[src]")
        elif scatter_list:
            site.fail(f"scatter_list: expected None on ranks other than src {root}")

        def run(native: _native.Comm) -> int:
            dense_inputs = [readable(each) for each in inputs]
            dense = writable(tensor)
            in_ptrs = [each.data_ptr() for each in dense_inputs]
            status = native.scatter(in_ptrs, dense.data_ptr(), size_bytes(dense), dtype, root)
            put_back(tensor, dense)
            return status

        return self._start(Call("scatter", run, [tensor]), async_op)

    def all_to_all(
        self,
        output_tensor_list: list[Tensor],
        input_tensor_list: list[Tensor],
        async_op: bool = False,
    ) -> Work | None:
        """Sends ``input_tensor_list[r]`` to rank r, which finds it at this rank's place.

        Args:
            output_tensor_list: world_size tensors; entry r has as many elements as what rank r
                sends here.
            input_tensor_list: world_size tensors of the same dtype; counts may differ.
            async_op: return a Work at once instead of waiting.

        Raises:
            ArgumentError: bad argument; no peer was disturbed.
            RingcommError: a fault; see ``ringcomm.errors``.
        """
        site = self._site("all_to_all")
        outputs = site.tensors(
            "output_tensor_list", output_tensor_list, self._world_size, write=True
        )
        inputs = site.tensors("input_tensor_list", input_tensor_list, self._world_size)
        for name, tensors in (("output_tensor_list", outputs), ("input_tensor_list", inputs)):
            for index, each in enumerate(tensors):
                site.same_dtype(f"{name}[{index}]", each, "output_tensor_list[0]", outputs[0])
        site.all_apart("output_tensor_list", outputs, "input_tensor_list", inputs)
        own_elems = inputs[self._rank].numel()
        site.same_count(
            f"output_tensor_list[{self._rank}]",
            outputs[self._rank],
            "those of this rank's own input",
            own_elems,
        )
        dtype = site.tensor("input_tensor_list[0]", inputs[0])
        return self._start(self._exchange_call("all_to_all", outputs, inputs, dtype), async_op)

    def _exchange_call(
        self, name: str, outputs: list[Tensor], inputs: list[Tensor], dtype: int
    ) -> Call:
        def run(native: _native.Comm) -> int:
            dense_inputs = [readable(each) for each in inputs]
            dense_outputs = [writable(output) for output in outputs]
            status = native.all_to_all(
                [each.data_ptr() for each in dense_inputs],
                [size_bytes(each) for each in dense_inputs],
                [output.data_ptr() for output in dense_outputs],
                [size_bytes(output) for output in dense_outputs],
                dtype,
            )
            for output, dense in zip(outputs, dense_outputs, strict=True):
                put_back(output, dense)
            return status

        return Call(name, run, outputs)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Cuts ``input`` along dimension 0, sends piece r to rank r, and joins what arrives.

        Args:
            output: contiguous; dimension 0 is the sum of ``output_split_sizes``.
            input: contiguous, of the same dtype and row size.
            output_split_sizes: rows from each rank; None means equal pieces.
            input_split_sizes: rows to each rank; None means equal pieces.
            async_op: return a Work at once instead of waiting.

        Raises:
            ArgumentError: bad argument; no peer was disturbed.
            RingcommError: a fault; see ``ringcomm.errors``.
        """
        site = self._site("all_to_all_single")
        dtype = site.output("output", output)
        site.tensor("input", input)
        site.same_dtype("input", input, "output", output)
        site.contiguous("output", output)
        site.contiguous("input", input)
        site.apart("output", output, "input", input, "all_to_all_single has no in-place form")
        out_bytes = self._piece_bytes(site, "output", output, output_split_sizes)
        in_bytes = self._piece_bytes(site, "input", input, input_split_sizes)
        own, arriving = in_bytes[self._rank], out_bytes[self._rank]
        if own != arriving:
            site.fail(
                f"output piece {self._rank}: expected {own} bytes (this rank's own input piece), "
                f"got {arriving}"
            )

        def run(native: _native.Comm) -> int:
            return native.all_to_all(
                _addresses(input, in_bytes),
                in_bytes,
                _addresses(output, out_bytes),
                out_bytes,
                dtype,
            )

        return self._start(Call("all_to_all_single", run, [output]), async_op)

    def _piece_bytes(
        self, site: Site, name: str, tensor: Tensor, splits: Sequence[int] | None
    ) -> list[int]:
        """Sizes of the pieces that dimension 0 is cut into."""
        rows = tensor.size(0) if tensor.dim() else 1
        world_size = self._world_size
        if not splits:
            if rows % world_size:
                site.fail(
                    f"{name}: expected dimension 0 divisible by world_size {world_size}, got "
                    f"shape {tuple(tensor.shape)}; pass {name}_split_sizes"
                )
            return [size_bytes(tensor) // world_size] * world_size
        sizes = list(splits)
        if len(sizes) != world_size or sum(sizes) != rows or min(sizes) < 0:
            site.fail(
                f"{name}_split_sizes: expected {world_size} numbers >= 0 with the sum {rows} "
                f"(dimension 0 of {name}), got {sizes}"
            )
        row_bytes = size_bytes(tensor) // max(rows, 1)
        return [size * row_bytes for size in sizes]

    def barrier(
        self, async_op: bool = False, *, timeout: timedelta | float | None = None
    ) -> Work | None:
        """Returns once all ranks have called it.

        Args:
            async_op: return a Work at once instead of waiting.
            timeout: for this call alone; None keeps the communicator's.

        Raises:
            RingcommError: a fault; see ``ringcomm.errors``.
        """
        # See NOTE [At once] in reductions.py.
        if timeout is None and not (async_op or self._queue.pending):
            if self._native.barrier_plain():
                raise self._fault("barrier")
            return None
        call = Call("barrier", lambda native: native.barrier(), [])
        if timeout is None:
            return self._start(call, async_op)
        work = self.submit(lambda: self._execute(call), "barrier", timeout)
        if async_op:
            return work
        work.wait()
        return None


def _addresses(tensor: Tensor, sizes_bytes: list[int]) -> list[int]:
    """Where consecutive pieces of the tensor begin."""
    return [*accumulate(sizes_bytes[:-1], initial=tensor.data_ptr())]
