# SPDX-License-Identifier: Apache-2.0
"""The collectives of a communicator: reductions, gathers, broadcasts, scatters and exchanges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from ringcomm.comm.host.arguments import SUM, CallChecks, put_back, readable, size_bytes, writable
from ringcomm.comm.host.core import Core
from ringcomm.comm.host.engine import Call, CallEngine, Work
from ringcomm.comm.host.triton import TRITON

# NOTE [Fast path]
#
# In the common call the tensors are contiguous on the CPU, the op has no factor, and the queue is
# empty. The native module reads the tensors of such a call itself and makes it. For any other call
# it does nothing and returns NOT_FAST (a ``try_*`` method: False). Then the call takes the path
# with all checks, which also builds the errors. Each collective repeats the lines of the fast path,
# since calling a common method would take a tenth of the time of a small collective.
# ``torch.distributed`` has its own calls, ``*_for_torch``.
#
# An asynchronous call starts by a similar native method if the core launches it
# (``CallEngine.starts``).
#
# Calls advance the autograd versions of their outputs, so that the backward of a graph which has
# saved an output raises. Advancing takes 0.1 us, 4 % of an all_reduce of 4 KiB, so the methods here
# do not advance versions on the fast path. Calls through ``torch.distributed`` advance them, which
# takes 1 % of the call. Tensors that require grad, such as parameters, never take the fast path,
# not even under ``no_grad()``, so their versions always advance.

Tensor = torch.Tensor
_increment_version = torch._C._increment_version
_COPY_ENGINE = "copy_engine"


class Plan:
    """A collective that was checked and prepared once, to be made many times.

    Calling the plan makes the collective on the same tensors, with their current contents. Calls of
    the plan, but not the making of the plan, count in the order of calls that all ranks must keep.
    The plan keeps the tensors alive. If a tensor has new memory, shape or dtype, the call is
    checked again.

    Args:
        engine: runs the call.
        check: checks the tensors, and returns the call.
        again: makes the call without checks; returns NOT_FAST if it did nothing.
        compiled: as ``again``, by compiled Triton kernels; None if the engine has none.
    """

    __slots__ = ("_again", "_check", "_engine", "_name")

    def __init__(
        self,
        engine: CallEngine,
        check: Callable[[], Call],
        again: Callable[[], int],
        compiled: Callable[[], int] | None,
    ) -> None:
        self._engine = engine
        self._check = check
        call = check()
        self._name = call.name
        self._again = compiled if engine.kernels else engine.planned(call) or again

    def __repr__(self) -> str:
        return f"<ringcomm.Plan of {self._name}>"

    def __call__(self, async_op: bool = False) -> Work | None:
        """Runs the collective.

        Args:
            async_op: return a Work at once instead of waiting.

        Raises:
            ArgumentError: a tensor has changed and no longer fits the call; nothing was sent,
                and peers wait for this rank.
            RingcommError: a fault; see ``ringcomm.errors``.
        """
        engine, again = self._engine, self._again
        if again is not None and not (async_op or engine.queue.pending):
            status = again()
            if status == 0:
                return None
            if status > 0:
                raise engine.fault(self._name)
        return engine.start_call(self._check(), async_op)


def _compiled(engine: CallEngine, name: str, *arguments: object) -> Callable[[], int] | None:
    """Returns a function that launches a compiled Triton kernel, or None without such kernels."""
    return None if engine.compiled is None else partial(getattr(engine.compiled, name), *arguments)


class Collectives:
    """The collectives of a communicator: they check arguments and make calls of the core.

    Attributes:
        engine: runs the calls.
    """

    engine: CallEngine
    _rank: int
    _world_size: int

    # ---- reductions: all_reduce, reduce, reduce_scatter -----------------------------------------

    def all_reduce(
        self,
        tensor: Tensor,
        op: Any = SUM,
        async_op: bool = False,
        *,
        algorithm: str = "auto",
        kernels: str | None = None,
        compression: str | None = None,
    ) -> Work | None:
        """Combines ``tensor`` of all ranks element by element, in place.

        Args:
            tensor: any shape, same element count and dtype on all ranks.
            op: a ``ReduceOp`` or ``premul_sum(factor)``.
            async_op: return a Work at once instead of waiting.
            algorithm: "auto", "two_shot" or "ring".
            kernels: "native" or "triton", the same on all ranks; None for ``CommOptions.kernels``.
            compression: the form of the data between nodes, the same on all ranks; None for
                ``CommOptions.compression``.

        Raises:
            ArgumentError: bad argument; nothing was sent, and peers wait for this rank.
            RingcommError: a fault; see ``ringcomm.errors``.
        """
        engine = self.engine
        if not (async_op or kernels or compression or engine.queue.pending or engine.kernels):
            status = engine.fast.all_reduce_fast(tensor, op, algorithm)
            if status == 0:
                return None
            if status > 0:
                raise engine.fault("all_reduce")
        elif engine.starts is not None and not (kernels or compression or engine.kernels):
            event = engine.starts.start_all_reduce(tensor, op, algorithm)
            if event is not None:
                return engine.started("all_reduce", [tensor], event)
        elif (
            engine.compiled is not None
            and (kernels or engine.kernels) == TRITON
            and not compression
        ):
            if not async_op:
                if engine.compiled.all_reduce_fast(tensor, op, algorithm) == 0:
                    return None
            else:
                event = engine.compiled.start_all_reduce(tensor, op, algorithm)
                if event is not None:
                    return engine.started("all_reduce", [tensor], event)
        call = self._all_reduce_call(tensor, op, algorithm, kernels, compression)
        return self.engine.start_call(call, async_op)

    def plan_all_reduce(self, tensor: Tensor, op: Any = SUM, *, algorithm: str = "auto") -> Plan:
        """Prepares an :meth:`all_reduce`; calling the returned plan makes the all-reduce.

        Args:
            tensor: as :meth:`all_reduce` takes it.
            op: as :meth:`all_reduce` takes it.
            algorithm: as :meth:`all_reduce` takes it.

        Raises:
            ArgumentError: bad argument.
        """
        engine = self.engine
        return Plan(
            engine,
            lambda: self._all_reduce_call(tensor, op, algorithm),
            lambda: engine.fast.all_reduce_fast(tensor, op, algorithm),
            _compiled(engine, "all_reduce_fast", tensor, op, algorithm),
        )

    def _all_reduce_call(
        self,
        tensor: Tensor,
        op: Any,
        algorithm: str,
        kernels: str | None = None,
        compression: str | None = None,
    ) -> Call:
        checks = self.engine.checks("all_reduce")
        dtype = checks.output("tensor", tensor)
        reduction = checks.reduction(op, "tensor", tensor)
        algorithm_code = checks.algorithm(algorithm)
        use = self.engine.use_kernels(checks, kernels, algorithm, tensor.dtype, reduction)

        def run(core: Core) -> int:
            dense = readable(tensor)
            ptr = dense.data_ptr()
            status = use(core).all_reduce(
                ptr, ptr, dense.numel(), dtype, reduction.code, reduction.factor, algorithm_code
            )
            put_back(tensor, dense)
            return status

        return Call("all_reduce", self.engine.with_compression(checks, compression, run), [tensor])

    def reduce(
        self,
        tensor: Tensor,
        dst: int,
        op: Any = SUM,
        async_op: bool = False,
        *,
        compression: str | None = None,
    ) -> Work | None:
        """Combines ``tensor`` of all ranks into rank ``dst``'s ``tensor``; others keep their data.

        Args:
            tensor: as for :meth:`all_reduce`.
            dst: the rank that gets the result.
            op: as for :meth:`all_reduce`.
            async_op: as for :meth:`all_reduce`.
            compression: as for :meth:`all_reduce`.

        Raises:
            ArgumentError: bad argument; nothing was sent, and peers wait for this rank.
            RingcommError: a fault; see ``ringcomm.errors``.
        """
        checks = self.engine.checks("reduce")
        dtype = checks.output("tensor", tensor)
        reduction = checks.reduction(op, "tensor", tensor)
        root = checks.peer("dst", dst)

        def run(core: Core) -> int:
            dense = readable(tensor)
            ptr = dense.data_ptr()
            status = core.reduce(
                ptr, ptr, dense.numel(), dtype, reduction.code, reduction.factor, root
            )
            if self._rank == root:
                put_back(tensor, dense)
            return status

        written = [tensor] if self._rank == root else []
        call = Call(
            "reduce",
            self.engine.with_compression(checks, compression, run),
            [tensor],
            written=written,
        )
        return self.engine.start_call(call, async_op)

    def reduce_scatter_tensor(
        self,
        output: Tensor,
        input: Tensor,
        op: Any = SUM,
        async_op: bool = False,
        *,
        algorithm: str = "auto",
        kernels: str | None = None,
        compression: str | None = None,
    ) -> Work | None:
        """Combines ``input`` of all ranks; rank r gets the r-th of world_size equal chunks.

        Args:
            output: contiguous, N elements; may be exactly this rank's chunk of ``input``.
            input: contiguous, world_size * N elements, of the same dtype.
            op: a ``ReduceOp`` or ``premul_sum(factor)``.
            async_op: return a Work at once instead of waiting.
            algorithm: "auto", "one_shot" or "ring".
            kernels: "native" or "triton", the same on all ranks; None for ``CommOptions.kernels``.
            compression: the form of the data between nodes, the same on all ranks; None for
                ``CommOptions.compression``.

        Raises:
            ArgumentError: bad argument; nothing was sent, and peers wait for this rank.
            RingcommError: a fault; see ``ringcomm.errors``.
        """
        engine = self.engine
        if not (async_op or kernels or compression or engine.queue.pending or engine.kernels):
            status = engine.fast.reduce_scatter_fast(output, input, op, algorithm)
            if status == 0:
                return None
            if status > 0:
                raise engine.fault("reduce_scatter_tensor")
        elif engine.starts is not None and not (kernels or compression or engine.kernels):
            event = engine.starts.start_reduce_scatter(output, input, op, algorithm)
            if event is not None:
                return engine.started("reduce_scatter_tensor", [output], event)
        elif (
            engine.compiled is not None
            and (kernels or engine.kernels) == TRITON
            and not compression
        ):
            if not async_op:
                if engine.compiled.reduce_scatter_fast(output, input, op, algorithm) == 0:
                    return None
            else:
                event = engine.compiled.start_reduce_scatter(output, input, op, algorithm)
                if event is not None:
                    return engine.started("reduce_scatter_tensor", [output], event)
        call = self._reduce_scatter_call(output, input, op, algorithm, kernels, compression)
        return self.engine.start_call(call, async_op)

    def plan_reduce_scatter_tensor(
        self, output: Tensor, input: Tensor, op: Any = SUM, *, algorithm: str = "auto"
    ) -> Plan:
        """Prepares a :meth:`reduce_scatter_tensor`; a call of the returned plan makes this call.

        Args:
            output: as :meth:`reduce_scatter_tensor` takes it.
            input: as :meth:`reduce_scatter_tensor` takes it.
            op: as :meth:`reduce_scatter_tensor` takes it.
            algorithm: as :meth:`reduce_scatter_tensor` takes it.

        Raises:
            ArgumentError: bad argument.
        """
        engine = self.engine
        return Plan(
            engine,
            lambda: self._reduce_scatter_call(output, input, op, algorithm),
            lambda: engine.fast.reduce_scatter_fast(output, input, op, algorithm),
            _compiled(engine, "reduce_scatter_fast", output, input, op, algorithm),
        )

    def _reduce_scatter_call(
        self,
        output: Tensor,
        input: Tensor,
        op: Any,
        algorithm: str,
        kernels: str | None = None,
        compression: str | None = None,
    ) -> Call:
        checks = self.engine.checks("reduce_scatter_tensor")
        dtype = checks.output("output", output)
        checks.tensor("input", input)
        checks.same_dtype("input", input, "output", output)
        count_elems = output.numel()
        checks.same_count(
            "input", input, "world_size x those of output", count_elems * self._world_size
        )
        checks.contiguous("output", output)
        checks.contiguous("input", input)
        reduction = checks.reduction(op, "input", input)
        algorithm_code = checks.algorithm(algorithm)
        in_ptr, out_ptr = input.data_ptr(), output.data_ptr()
        if out_ptr != in_ptr + self._rank * size_bytes(output):
            checks.apart("output", output, "input", input, "in place, output is this rank's chunk")

        use = self.engine.use_kernels(checks, kernels, algorithm, input.dtype, reduction)

        def run(core: Core) -> int:
            dense, into = readable(input), writable(output)
            status = use(core).reduce_scatter(
                dense.data_ptr(),
                into.data_ptr(),
                count_elems,
                dtype,
                reduction.code,
                reduction.factor,
                algorithm_code,
            )
            put_back(output, into)
            return status

        run_compressed = self.engine.with_compression(checks, compression, run)
        return Call("reduce_scatter_tensor", run_compressed, [output], [input])

    def reduce_scatter(
        self,
        output: Tensor,
        input_list: list[Tensor],
        op: Any = SUM,
        async_op: bool = False,
        *,
        compression: str | None = None,
    ) -> Work | None:
        """Combines the lists of all ranks; rank r gets the reduced ``input_list[r]``.

        Args:
            output: any shape, as many elements as ``input_list[rank]``; may be this tensor itself.
            input_list: world_size tensors of one dtype; counts may differ between entries, but
                not between ranks.
            op: a ``ReduceOp`` or ``premul_sum(factor)``.
            async_op: return a Work at once instead of waiting.
            compression: as for :meth:`reduce_scatter_tensor`.

        Raises:
            ArgumentError: bad argument; nothing was sent, and peers wait for this rank.
            RingcommError: a fault; see ``ringcomm.errors``.
        """
        checks = self.engine.checks("reduce_scatter")
        dtype = checks.output("output", output)
        inputs = checks.tensors("input_list", input_list, self._world_size)
        reduction = checks.reduction(op, "output", output)
        for index, tensor in enumerate(inputs):
            name = f"input_list[{index}]"
            checks.same_dtype(name, tensor, "output", output)
            if index != self._rank or tensor.data_ptr() != output.data_ptr():
                checks.apart("output", output, name, tensor, "in place, pass input_list[rank]")
        checks.same_count("output", output, "those of input_list[rank]", inputs[self._rank].numel())

        def run(core: Core) -> int:
            dense_inputs = [readable(tensor) for tensor in inputs]
            dense = writable(output)
            status = core.reduce_scatter_list(
                [tensor.data_ptr() for tensor in dense_inputs],
                [tensor.numel() for tensor in dense_inputs],
                dense.data_ptr(),
                dtype,
                reduction.code,
                reduction.factor,
            )
            put_back(output, dense)
            return status

        call = Call(
            "reduce_scatter",
            self.engine.with_compression(checks, compression, run),
            [output],
            inputs,
        )
        return self.engine.start_call(call, async_op)

    # ---- gathers: all_gather, gather ------------------------------------------------------------

    def all_gather_into_tensor(
        self,
        output: Tensor,
        input: Tensor,
        async_op: bool = False,
        *,
        algorithm: str = "auto",
        kernels: str | None = None,
    ) -> Work | None:
        """Gives every rank the ``input`` of all ranks, concatenated in rank order.

        Args:
            output: contiguous, world_size * N elements.
            input: contiguous, N elements of the same dtype; may be exactly this rank's chunk
                of ``output``.
            async_op: return a Work at once instead of waiting.
            algorithm: "auto", "one_shot" or "ring".
            kernels: "native" or "triton", the same on all ranks; None for ``CommOptions.kernels``.

        Raises:
            ArgumentError: bad argument; nothing was sent, and peers wait for this rank.
            RingcommError: a fault; see ``ringcomm.errors``.
        """
        engine = self.engine
        if not (async_op or kernels or engine.queue.pending or engine.kernels):
            status = engine.fast.all_gather_fast(output, input, algorithm)
            if status == 0:
                return None
            if status > 0:
                raise engine.fault("all_gather_into_tensor")
        elif engine.starts is not None and not (kernels or engine.kernels):
            event = engine.starts.start_all_gather(output, input, algorithm)
            if event is not None:
                return engine.started("all_gather_into_tensor", [output], event)
        elif engine.compiled is not None and (kernels or engine.kernels) == TRITON:
            if not async_op:
                if engine.compiled.all_gather_fast(output, input, algorithm) == 0:
                    return None
            else:
                event = engine.compiled.start_all_gather(output, input, algorithm)
                if event is not None:
                    return engine.started("all_gather_into_tensor", [output], event)
        return self.engine.start_call(
            self._all_gather_call(output, input, algorithm, kernels), async_op
        )

    def plan_all_gather_into_tensor(
        self, output: Tensor, input: Tensor, *, algorithm: str = "auto"
    ) -> Plan:
        """Prepares an :meth:`all_gather_into_tensor`; a call of the returned plan makes this call.

        With ``algorithm="copy_engine"``, on GPUs of one node, the copy engines read the peers'
        ``input`` in place, without ``CommOptions.copy_engine_bytes``. Making the plan is then
        collective: all ranks make it, in the order of calls, outside of a graph's capture, and the
        host waits for the device. The plan keeps the memory of ``input`` alive; do not give the
        tensor other memory, since the plan would raise.

        Args:
            output: as :meth:`all_gather_into_tensor` takes it.
            input: as :meth:`all_gather_into_tensor` takes it; for the copy engines a tensor of
                :func:`ringcomm.empty` or :func:`ringcomm.zeros`, or a contiguous part of it.
            algorithm: as :meth:`all_gather_into_tensor` takes it.

        Raises:
            ArgumentError: bad argument; with copy engines also if the ``input`` of any rank is not
                in the heap: then all ranks raise.
            MismatchError: for the copy engines, the ranks' plans differ.
            UnsupportedError: for the copy engines, the current stream is capturing a graph.
            RingcommError: for the copy engines, a fault; see ``ringcomm.errors``.
        """
        engine = self.engine

        def check() -> Call:
            return self._all_gather_call(output, input, algorithm)

        return Plan(
            engine,
            engine.gathers_in_place(check) if algorithm == _COPY_ENGINE else check,
            lambda: engine.fast.all_gather_fast(output, input, algorithm),
            _compiled(engine, "all_gather_fast", output, input, algorithm),
        )

    def _all_gather_call(
        self, output: Tensor, input: Tensor, algorithm: str, kernels: str | None = None
    ) -> Call:
        checks = self.engine.checks("all_gather_into_tensor")
        dtype = checks.tensor("input", input)
        checks.output("output", output)
        checks.same_dtype("output", output, "input", input)
        checks.same_count(
            "output", output, "world_size x those of input", input.numel() * self._world_size
        )
        checks.contiguous("input", input)
        checks.contiguous("output", output)
        algorithm_code = checks.algorithm(algorithm)
        in_bytes = size_bytes(input)
        if input.data_ptr() != output.data_ptr() + self._rank * in_bytes:
            checks.apart("input", input, "output", output, "in place, input is this rank's chunk")

        use = self.engine.use_kernels(checks, kernels, algorithm, input.dtype)

        def run(core: Core) -> int:
            dense, into = readable(input), writable(output)
            status = use(core).all_gather(
                dense.data_ptr(), into.data_ptr(), in_bytes, dtype, algorithm_code
            )
            put_back(output, into)
            return status

        return Call("all_gather_into_tensor", run, [output], [input])

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
            ArgumentError: bad argument; nothing was sent, and peers wait for this rank.
            RingcommError: a fault; see ``ringcomm.errors``.
        """
        return self.engine.start_call(self._all_gather_list_call(tensor_list, tensor), async_op)

    def _all_gather_list_call(self, tensor_list: list[Tensor], tensor: Tensor) -> Call:
        checks = self.engine.checks("all_gather")
        dtype = checks.tensor("tensor", tensor)
        outputs = checks.tensors("tensor_list", tensor_list, self._world_size, write=True)
        self._check_gathered(checks, "tensor_list", outputs, tensor)
        own = outputs[self._rank]
        checks.same_count("tensor", tensor, "those of tensor_list[rank]", own.numel())

        def run(core: Core) -> int:
            dense = readable(tensor)
            dense_outputs = [writable(output) for output in outputs]
            status = core.all_gather_list(
                dense.data_ptr(),
                [output.data_ptr() for output in dense_outputs],
                [size_bytes(output) for output in dense_outputs],
                dtype,
            )
            for output, dense_output in zip(outputs, dense_outputs, strict=True):
                put_back(output, dense_output)
            return status

        return Call("all_gather", run, outputs, [tensor])

    def _check_gathered(
        self, checks: CallChecks, name: str, outputs: list[Tensor], tensor: Tensor
    ) -> None:
        for index, output in enumerate(outputs):
            checks.same_dtype(f"{name}[{index}]", output, "tensor", tensor)
            if index != self._rank or output.data_ptr() != tensor.data_ptr():
                checks.apart(
                    "tensor", tensor, f"{name}[{index}]", output, f"in place, pass {name}[rank]"
                )
        checks.all_apart(name, outputs)

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
            gather_list: on ``dst`` world_size tensors of ``tensor``'s size; elsewhere None.
            dst: the rank that receives.
            async_op: return a Work at once instead of waiting.

        Raises:
            ArgumentError: bad argument; nothing was sent, and peers wait for this rank.
            RingcommError: a fault; see ``ringcomm.errors``.
        """
        checks = self.engine.checks("gather")
        root = checks.peer("dst", dst)
        dtype = checks.tensor("tensor", tensor)
        outputs: list[Tensor] = []
        if self._rank == root:
            outputs = checks.tensors("gather_list", gather_list, self._world_size, write=True)
            self._check_gathered(checks, "gather_list", outputs, tensor)
            for index, output in enumerate(outputs):
                checks.same_count(
                    f"gather_list[{index}]", output, "those of tensor", tensor.numel()
                )
        elif gather_list:
            checks.fail(f"gather_list: expected None on ranks other than dst {root}")

        def run(core: Core) -> int:
            dense = readable(tensor)
            dense_outputs = [writable(output) for output in outputs]
            out_ptrs = [output.data_ptr() for output in dense_outputs]
            status = core.gather(dense.data_ptr(), size_bytes(dense), out_ptrs, dtype, root)
            for output, dense_output in zip(outputs, dense_outputs, strict=True):
                put_back(output, dense_output)
            return status

        return self.engine.start_call(Call("gather", run, outputs, [tensor]), async_op)

    # ---- broadcast, scatter, all_to_all, barrier ------------------------------------------------

    def broadcast(self, tensor: Tensor, src: int, async_op: bool = False) -> Work | None:
        """Gives every rank the ``tensor`` of rank ``src``, in place.

        Args:
            tensor: any shape, same element count and dtype on all ranks.
            src: the rank that has the data.
            async_op: return a Work at once instead of waiting.

        Raises:
            ArgumentError: bad argument; nothing was sent, and peers wait for this rank.
            RingcommError: a fault; see ``ringcomm.errors``.
        """
        engine = self.engine  # See NOTE [Fast path].
        if not (async_op or engine.queue.pending):
            status = engine.fast.broadcast_fast(tensor, src)
            if status == 0:
                if src != self._rank:
                    _increment_version((tensor,))
                return None
            if status > 0:
                raise engine.fault("broadcast")
        elif engine.starts is not None:
            event = engine.starts.start_broadcast(tensor, src)
            if event is not None:
                written = [] if src == self._rank else [tensor]
                return engine.started("broadcast", [tensor], event, written)
        checks = engine.checks("broadcast")
        root = checks.peer("src", src)
        is_root = self._rank == root
        dtype = checks.tensor("tensor", tensor) if is_root else checks.output("tensor", tensor)

        def run(core: Core) -> int:
            dense = readable(tensor) if is_root else writable(tensor)
            status = core.broadcast(dense.data_ptr(), size_bytes(dense), dtype, root)
            if not is_root:
                put_back(tensor, dense)
            return status

        call = Call("broadcast", run, [tensor], written=[] if is_root else [tensor])
        return engine.start_call(call, async_op)

    def scatter(
        self,
        tensor: Tensor,
        scatter_list: list[Tensor] | None = None,
        src: int = 0,
        async_op: bool = False,
    ) -> Work | None:
        """Gives rank r the ``scatter_list[r]`` of rank ``src``.

        Args:
            tensor: receives the data; any shape, same element count and dtype on all ranks. On
                ``src`` it may be ``scatter_list[src]`` itself.
            scatter_list: on ``src`` world_size tensors of ``tensor``'s size; elsewhere None.
            src: the rank that has the data.
            async_op: return a Work at once instead of waiting.

        Raises:
            ArgumentError: bad argument; nothing was sent, and peers wait for this rank.
            RingcommError: a fault; see ``ringcomm.errors``.
        """
        checks = self.engine.checks("scatter")
        root = checks.peer("src", src)
        dtype = checks.output("tensor", tensor)
        inputs: list[Tensor] = []
        if self._rank == root:
            inputs = checks.tensors("scatter_list", scatter_list, self._world_size)
            for index, each in enumerate(inputs):
                name = f"scatter_list[{index}]"
                checks.same_dtype(name, each, "tensor", tensor)
                checks.same_count(name, each, "those of tensor", tensor.numel())
                if index != root or each.data_ptr() != tensor.data_ptr():
                    checks.apart("tensor", tensor, name, each, "in place, pass scatter_list[src]")
        elif scatter_list:
            checks.fail(f"scatter_list: expected None on ranks other than src {root}")

        def run(core: Core) -> int:
            dense_inputs = [readable(each) for each in inputs]
            dense = writable(tensor)
            in_ptrs = [each.data_ptr() for each in dense_inputs]
            status = core.scatter(in_ptrs, dense.data_ptr(), size_bytes(dense), dtype, root)
            put_back(tensor, dense)
            return status

        return self.engine.start_call(Call("scatter", run, [tensor], inputs), async_op)

    def all_to_all(
        self,
        output_tensor_list: list[Tensor],
        input_tensor_list: list[Tensor],
        async_op: bool = False,
    ) -> Work | None:
        """Sends ``input_tensor_list[r]`` to rank r, and receives output entry r from rank r.

        Args:
            output_tensor_list: world_size tensors; entry r has as many elements as rank r sends to
                this rank.
            input_tensor_list: world_size tensors of the same dtype; counts may differ.
            async_op: return a Work at once instead of waiting.

        Raises:
            ArgumentError: bad argument; nothing was sent, and peers wait for this rank.
            RingcommError: a fault; see ``ringcomm.errors``.
        """
        checks = self.engine.checks("all_to_all")
        outputs = checks.tensors(
            "output_tensor_list", output_tensor_list, self._world_size, write=True
        )
        inputs = checks.tensors("input_tensor_list", input_tensor_list, self._world_size)
        for name, tensors in (("output_tensor_list", outputs), ("input_tensor_list", inputs)):
            for index, each in enumerate(tensors):
                checks.same_dtype(f"{name}[{index}]", each, "output_tensor_list[0]", outputs[0])
        checks.all_apart("output_tensor_list", outputs, "input_tensor_list", inputs)
        own_elems = inputs[self._rank].numel()
        checks.same_count(
            f"output_tensor_list[{self._rank}]",
            outputs[self._rank],
            "those of this rank's own input",
            own_elems,
        )
        dtype = checks.tensor("input_tensor_list[0]", inputs[0])
        return self.engine.start_call(
            self._exchange_call("all_to_all", outputs, inputs, dtype), async_op
        )

    def _exchange_call(
        self, name: str, outputs: list[Tensor], inputs: list[Tensor], dtype: int
    ) -> Call:
        def run(core: Core) -> int:
            dense_inputs = [readable(each) for each in inputs]
            dense_outputs = [writable(output) for output in outputs]
            status = core.all_to_all(
                [each.data_ptr() for each in dense_inputs],
                [size_bytes(each) for each in dense_inputs],
                [output.data_ptr() for output in dense_outputs],
                [size_bytes(output) for output in dense_outputs],
                dtype,
            )
            for output, dense in zip(outputs, dense_outputs, strict=True):
                put_back(output, dense)
            return status

        return Call(name, run, outputs, inputs)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Cuts ``input`` along dimension 0, sends split r to rank r, and joins received splits.

        Args:
            output: contiguous; dimension 0 is the sum of ``output_split_sizes``.
            input: contiguous, of the same dtype and row size.
            output_split_sizes: rows from each rank; None means equal splits.
            input_split_sizes: rows to each rank; None means equal splits.
            async_op: return a Work at once instead of waiting.

        Raises:
            ArgumentError: bad argument; nothing was sent, and peers wait for this rank.
            RingcommError: a fault; see ``ringcomm.errors``.
        """
        checks = self.engine.checks("all_to_all_single")
        dtype = checks.output("output", output)
        checks.tensor("input", input)
        checks.same_dtype("input", input, "output", output)
        checks.contiguous("output", output)
        checks.contiguous("input", input)
        checks.apart("output", output, "input", input, "all_to_all_single has no in-place form")
        out_bytes = self._piece_bytes(checks, "output", output, output_split_sizes)
        in_bytes = self._piece_bytes(checks, "input", input, input_split_sizes)
        own, arriving = in_bytes[self._rank], out_bytes[self._rank]
        if own != arriving:
            checks.fail(
                f"output piece {self._rank}: expected {own} bytes (this rank's own input piece), "
                f"got {arriving}"
            )

        def run(core: Core) -> int:
            dense, into = readable(input), writable(output)
            status = core.all_to_all(
                _addresses(dense, in_bytes),
                in_bytes,
                _addresses(into, out_bytes),
                out_bytes,
                dtype,
            )
            put_back(output, into)
            return status

        return self.engine.start_call(Call("all_to_all_single", run, [output], [input]), async_op)

    def _piece_bytes(
        self, checks: CallChecks, name: str, tensor: Tensor, splits: Sequence[int] | None
    ) -> list[int]:
        """Returns the sizes in bytes of the pieces into which dimension 0 is cut."""
        sizes = checks.splits(f"{name}_split_sizes", splits)
        rows = tensor.size(0) if tensor.dim() else 1
        world_size = self._world_size
        if not sizes:
            if rows % world_size:
                checks.fail(
                    f"{name}: expected dimension 0 divisible by world_size {world_size}, got "
                    f"shape {tuple(tensor.shape)}; pass {name}_split_sizes"
                )
            return [size_bytes(tensor) // world_size] * world_size
        if len(sizes) != world_size or sum(sizes) != rows or min(sizes) < 0:
            checks.fail(
                f"{name}_split_sizes: expected {world_size} numbers >= 0 with the sum {rows} "
                f"(dimension 0 of {name}), got {sizes}"
            )
        row_bytes = size_bytes(tensor) // max(rows, 1)
        return [size * row_bytes for size in sizes]

    def barrier(
        self, async_op: bool = False, *, timeout: timedelta | float | None = None
    ) -> Work | None:
        """Returns once all ranks have called this method.

        Args:
            async_op: return a Work at once instead of waiting.
            timeout: timeout of this call only; None: the communicator's timeout.

        Raises:
            RingcommError: a fault; see ``ringcomm.errors``.
        """
        engine = self.engine  # See NOTE [Fast path].
        if timeout is None and not (async_op or engine.queue.pending):
            status = engine.fast.barrier_fast()
            if status == 0:
                return None
            if status > 0:
                raise engine.fault("barrier")
        elif timeout is None and engine.starts is not None:
            event = engine.starts.start_barrier()
            if event is not None:
                return engine.started("barrier", [], event)
        call = Call("barrier", lambda core: core.barrier(), [])
        if timeout is None:
            return self.engine.start_call(call, async_op)
        self.engine.admit("barrier", ())
        work = self.engine.submit(lambda: self.engine.execute(call), "barrier", timeout)
        if async_op:
            return work
        work.wait()
        return None

    # ---- several collectives of one kind as one call: one Work, and no other call in between -----
    # All arguments are checked before the first collective moves any data.

    def all_reduce_coalesced(
        self, tensors: Sequence[Tensor], op: Any = SUM, async_op: bool = False
    ) -> Work | None:
        """Calls :meth:`all_reduce` for each tensor, in place; shapes and dtypes may differ.

        Raises:
            ArgumentError: bad argument; nothing was sent, and peers wait for this rank.
            RingcommError: a fault; see ``ringcomm.errors``.
        """
        checked = self.engine.checks("all_reduce_coalesced").tensors(
            "tensors", tensors, len(tensors)
        )
        return self._joined(
            "all_reduce_coalesced",
            [self._all_reduce_call(tensor, op, "auto") for tensor in checked],
            async_op,
        )

    def all_gather_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], async_op: bool = False
    ) -> Work | None:
        """Calls :meth:`all_gather_into_tensor` for each pair of output and input.

        Raises:
            ArgumentError: bad argument; nothing was sent, and peers wait for this rank.
            RingcommError: a fault; see ``ringcomm.errors``.
        """
        checks = self.engine.checks("all_gather_coalesced")
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
            output_lists: for each rank, the tensors that receive that rank's ``inputs``.
            inputs: any shapes and dtypes, in the same order on all ranks.
            async_op: return a Work at once instead of waiting.

        Raises:
            ArgumentError: bad argument; nothing was sent, and peers wait for this rank.
            RingcommError: a fault; see ``ringcomm.errors``.
        """
        checks = self.engine.checks("all_gather_coalesced")
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
        """Calls :meth:`reduce_scatter_tensor` for each pair of output and input.

        Raises:
            ArgumentError: bad argument; nothing was sent, and peers wait for this rank.
            RingcommError: a fault; see ``ringcomm.errors``.
        """
        checks = self.engine.checks("reduce_scatter_coalesced")
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
        runs = [call.run for call in calls]

        def run(core: Core) -> int:
            for each in runs:
                status = each(core)
                if status:
                    return status
            return 0

        outputs = [tensor for call in calls for tensor in call.outputs]
        inputs = [tensor for call in calls for tensor in call.inputs]
        return self.engine.start_call(Call(name, run, outputs, inputs), async_op)


def _addresses(tensor: Tensor, sizes_bytes: list[int]) -> list[int]:
    """Returns the addresses at which consecutive pieces of the tensor begin."""
    return [*accumulate(sizes_bytes[:-1], initial=tensor.data_ptr())]
