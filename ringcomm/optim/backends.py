# SPDX-License-Identifier: Apache-2.0
"""The backends that update buckets, the table that they read, and the plans of steps."""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import methodcaller
from typing import TYPE_CHECKING, NamedTuple

import torch

from ringcomm import _native
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.device.launch import device_engine_of
from ringcomm.comm.host.arguments import ALGORITHMS, DTYPE_CODES, DTYPE_NAMES, OP_CODES, CallChecks
from ringcomm.comm.host.core import Core
from ringcomm.comm.host.engine import Call, Work
from ringcomm.comm.host.triton import require_triton
from ringcomm.errors import RingcommError, UnsupportedError
from ringcomm.optim.buckets import Bucket, empty_for_streams, gather_params, sharers_of
from ringcomm.optim.gradients import (
    NORM_WORDS,
    DeviceReducer,
    HostReducer,
    Into,
    Reducer,
    kind_code,
    step_core_of,
)
from ringcomm.optim.layout import ShardLayout
from ringcomm.optim.options import AdamWOptions

if TYPE_CHECKING:
    from ringcomm._tl.adamw_launch import ShardKind
    from ringcomm._tl.launch import KernelPlan


Tensor = torch.Tensor

# The columns of StepTable.control, which is AdamWControl in
# ``kernels/include/ringcomm/optimizer/adamw.h``.
INV_SCALE, CLIP, FOUND_INF, STEPS, SKIPPED = range(5)


class StepTable:
    """The numbers of one optimizer that change from step to step, as tensors the kernels read.

    Attributes:
        layout: layout of the parameters.
        control: float64 [5]: inverse loss scale, clip coefficient, found-inf, steps taken and
            skipped.
        hyper: float64 [groups, columns]: the hyper-parameters that kernels read, lr first. AdamW's
            columns are lr, beta1, beta2, eps, weight decay, flags.
        group: int64 [params]: param group of each parameter.
        active: float64 [params]: not 0 where the parameter takes the step.
        step: float64 [params]: steps taken.
        factors: uint8 [params, bytes]: factors that the kernels compute from the other tensors.
        told: float64 [params]: the maxima of ``active`` over all ranks. On the host float64 [params
            + 2], also with the maxima of the hyper-parameters' digest and of its negative; see NOTE
            [Hyper-parameters are compared at each step].

    NOTE [Hyper-parameters are compared at each step]
    Ranks with different hyper-parameters would step their shards differently, and no kernel would
    notice. So a digest and its negative are reduced together with ``active``: their maxima add up
    to 0 exactly if the ranks' digests are equal. The digest also covers the bound of a clipped
    norm. A rank that refuses the step sends infinity, so that the other ranks do not wait for it.
    On a GPU the ranks do not compare, since reading the maxima would wait for the device.
    """

    def __init__(
        self,
        layout: ShardLayout,
        hyper_shape: tuple[int, int],
        factors_bytes: int,
        device: torch.device,
        launches: bool,
    ) -> None:
        params = len(layout.params)
        self.layout = layout
        self.control = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0], dtype=torch.float64, device=device)
        self.hyper = torch.zeros(hyper_shape, dtype=torch.float64, device=device)
        self.group = layout.group_table(device)
        # A bytearray: struct writes two numbers into it far faster than a tensor operation would.
        self._memory = None if launches else bytearray(8 * (params + 2))
        if self._memory is None:
            self._here = torch.zeros(params, dtype=torch.float64, device=device)
        else:
            self._here = torch.frombuffer(self._memory, dtype=torch.float64)
        self.told = torch.zeros_like(self._here)
        self.active, self._digests = self.told[:params], self.told[params:]
        self.step = torch.zeros(params, dtype=torch.float64, device=device)
        self.factors = torch.zeros(params, factors_bytes, dtype=torch.uint8, device=device)
        self._rows: list[list[float]] = []
        self._given: list[float] = []

    def write_hyper(self, rows: list[list[float]], rates: Sequence[object]) -> None:
        """Writes rows of hyper-parameters; a tensor in ``rates`` replaces the lr of its row."""
        if rows != self._rows:
            self.hyper.copy_(torch.tensor(rows, dtype=torch.float64, device="cpu"))
            self._rows = rows
        for index, rate in enumerate(rates):
            if isinstance(rate, Tensor):
                self.hyper[index, 0].copy_(rate.detach().view(()))

    @property
    def compares(self) -> bool:
        """True if ranks compare digests of hyper-parameters; see the NOTE of the class."""
        return self._memory is not None

    def write_active(self, active: list[float], digest: float) -> None:
        """Writes which parameters have a gradient on this rank, and a hyper-parameter digest."""
        params = len(active)
        if active != self._given:
            self._given = active
            given = torch.tensor(active, dtype=torch.float64, device="cpu")
            self._here[:params].copy_(given)
        if self._memory is not None:
            struct.pack_into("=2d", self._memory, 8 * params, digest, -digest)
        # Copy at each step, since the ranks reduce ``told`` in place. On a device the copy is
        # usually within the device, so that a graph can capture the step.
        self.told.copy_(self._here)

    @property
    def hyper_differ(self) -> bool:
        """True if the ranks' digests differ, once ``told`` is reduced; always False on a GPU."""
        if self._memory is None:
            return False
        high, low = self._digests.tolist()
        return bool(high != -low)


class Backend(ABC):
    """Updates the buckets of one optimizer on one rank, with one kind of kernel.

    A fused backend reduces, updates and gathers in one call. Other backends make three calls, which
    give the same bits, and update a bucket's state piece by piece. Steps need separate calls if the
    state is offloaded, or if gathering quantizes the parameters.

    Args:
        alone: True in a world of one rank.
        reducer: reduces gradients.
        options: options of the optimizer.
        sharers: the ranks that share the state; None for this rank alone.
        fused: False if the machine has no fused calls for the update.
    """

    #: True if an update needs several buckets, so that the backend may delay it until :meth:`end`.
    #: The backend then itself loads parameters that are not in memory.
    defers = False

    def __init__(
        self,
        alone: bool,
        reducer: Reducer,
        options: AdamWOptions,
        sharers: Communicator | None,
        fused: bool = True,
    ) -> None:
        self.alone = alone
        self.reducer = reducer
        self.sharers = sharers
        self.fused = (
            fused and options.offload_state is None and not options.compression.quantizes_parameters
        )
        # float32 [elements of the largest chunk so far]: memory for one bucket's reduced gradients.
        self._own: Tensor | None = None

    @abstractmethod
    def forget(self) -> None:
        """Drops cached addresses; called after state tensors of a bucket were replaced."""

    @abstractmethod
    def begin(self, table: StepTable) -> None:
        """Advances the step numbers of active parameters, or counts a skipped step."""

    def end(self) -> None:
        """Called after a step has visited all buckets."""
        return

    def update_shard(self, bucket: Bucket, grad: Tensor) -> None:
        """Updates the chunk for which this rank keeps state; no other rank takes part.

        Args:
            bucket: bucket whose parameters are written.
            grad: [chunk elements], the reduced gradient.
        """
        if self.fused:
            self._update(bucket, grad)
            return
        for piece in bucket.pieces():
            here, _ = bucket.within(*piece.chunk)
            self._update(piece, grad[here])

    def update_gather(self, bucket: Bucket, grad: Tensor) -> None:
        """Calls :meth:`update_shard`, and gathers the chunks on all ranks; collective."""
        if self.fused and not self.alone:
            self._update_gather(bucket, grad)
            return
        self.update_shard(bucket, grad)
        if not self.alone:
            assert self.sharers is not None
            gather_params(bucket, self.sharers)

    def one_pass(self, bucket: Bucket, grads: Tensor) -> None:
        """Reduces a bucket's gradients, updates the chunk, and gathers the chunks; collective.

        Args:
            bucket: bucket whose parameters are written.
            grads: [bucket elements], in the heap.
        """
        if self.alone:  # the chunk is the bucket
            self.update_shard(bucket, grads)
        elif self.fused:
            self._one_pass(bucket, grads)
        else:
            self.update_gather(bucket, self.reduce_now(bucket, grads, self.reducer))

    def reduce_now(self, bucket: Bucket, grads: Tensor, reducer: Reducer) -> Tensor:
        """Reduces gradients into temporary memory: float32 [chunk elements]; collective.

        The next bucket uses the same memory.
        """
        own = self._memory_for(bucket)
        reducer.reduce(
            grads, Into(own, "l2", None, tag=bucket.tag(), error_feedback=bucket.error_feedback)
        )
        return own

    def _memory_for(self, bucket: Bucket) -> Tensor:
        elems = bucket.chunk.elems
        if self._own is None or self._own.numel() < elems:
            self._own = empty_for_streams(elems, torch.float32, bucket.device)
        return self._own[:elems]

    @abstractmethod
    def _update(self, bucket: Bucket, grad: Tensor) -> None:
        """Updates the chunk of a bucket or piece whose state is in memory."""

    def _update_gather(self, bucket: Bucket, grad: Tensor) -> None:
        """Runs :meth:`update_gather` among several ranks in one call; only in fused backends."""
        raise NotImplementedError

    def _one_pass(self, bucket: Bucket, grads: Tensor) -> None:
        """Runs :meth:`one_pass` among several ranks in one call; only in fused backends."""
        raise NotImplementedError


# ---- The plan of a step: the way in which a ZeRO stage reduces and updates its buckets ----------


class StagePlan(ABC):
    """Reduces and updates each bucket in the way of one ZeRO stage, with a backend.

    Attributes:
        backend: updates the buckets.
        reducer: reduces gradients; some plans also use it in a world of one.
    """

    def __init__(self, backend: Backend, reducer: Reducer) -> None:
        self.backend = backend
        self.reducer = reducer

    def ready(self) -> None:
        """Called before a step.

        Raises:
            ArgumentError: the step cannot be taken now; nothing was changed.
        """
        return

    def begin(self, table: StepTable) -> None:
        """Begins the updates of a step, whose numbers are in ``table``."""
        self.backend.begin(table)

    def end(self) -> None:
        """Called after a step has updated all buckets."""
        self.backend.end()

    @abstractmethod
    def reduce_norm(self, bucket: Bucket, kind: str, words: Tensor) -> None:
        """Reduces a bucket's gradients to shards, and sums this rank's chunk for the norm.

        Args:
            bucket: the bucket; :meth:`reduced` returns its reduced gradient afterwards.
            kind: "l2", "l1" or "inf".
            words: int64 [24], overwritten with the norm words (``gradients.NORM_WORDS``).
        """

    @abstractmethod
    def reduced(self, bucket: Bucket) -> Tensor:
        """Returns the reduced gradient of this rank's chunk; call it after :meth:`reduce_norm`.

        :meth:`update` reads this tensor, so callers may write to it. The bucket is divided into one
        chunk per rank that shares the state, even if each rank keeps the whole state.

        Returns:
            [chunk elements], float32 or a 16-bit dtype.
        """

    @abstractmethod
    def update(self, bucket: Bucket) -> None:
        """Updates a bucket on all ranks, after :meth:`reduce_norm` and :meth:`begin`."""

    def reduce_update(self, bucket: Bucket) -> None:
        """Reduces a bucket's gradients and updates it on all ranks, after :meth:`begin`."""
        words = torch.zeros(NORM_WORDS, dtype=torch.int64, device=bucket.device)
        self.reduce_norm(bucket, "l2", words)
        self.update(bucket)

    def reduce_update_from(self, bucket: Bucket, grads: Tensor) -> None:
        """Does :meth:`reduce_update` with the gradients ``grads`` [bucket elements]."""
        self.backend.one_pass(bucket, grads)


class OwnPlan(StagePlan):
    """The plan for ranks that have all parameters and all their own gradients, as at stage 1.

    Args:
        backend: updates the buckets.
        reducer: reduces gradients; None means the backend's reducer, which a world of one does not
            use.
        rounded: maps the parameters' dtype to the 16-bit dtype of their reduced gradients; None to
            keep reduced gradients in float32.
    """

    def __init__(
        self,
        backend: Backend,
        reducer: Reducer | None = None,
        rounded: Callable[[torch.dtype], torch.dtype] | None = None,
    ) -> None:
        super().__init__(backend, backend.reducer if reducer is None else reducer)
        self._rounded = rounded
        # Maps bucket numbers to reduced gradients that are not in ``Bucket.grad_shard``.
        self._apart: dict[int, Tensor] = {}

    def reduce_norm(self, bucket: Bucket, kind: str, words: Tensor) -> None:
        self._apart.pop(bucket.number, None)
        if self._rounded is not None:
            exact = torch.empty(bucket.chunk.elems, dtype=torch.float32, device=bucket.device)
            self.reducer.reduce(
                bucket.grads, Into(exact, kind, words, error_feedback=bucket.error_feedback)
            )
            self._apart[bucket.number] = exact.to(self._rounded(bucket.layout.dtype))
        elif self.backend.alone:
            self.reducer.norm(bucket.grads, kind, words)
        else:
            into = Into(
                bucket.ensure_grad_shard(), kind, words, error_feedback=bucket.error_feedback
            )
            self.reducer.reduce(bucket.grads, into)

    def reduced(self, bucket: Bucket) -> Tensor:
        if self._rounded is None and not self.backend.alone:
            return bucket.ensure_grad_shard()
        if bucket.number not in self._apart:
            # Copy: ``grads`` may be 16-bit, and values that callers write must not be rounded.
            own = bucket.grads[: bucket.chunk.elems]
            self._apart[bucket.number] = own.to(torch.float32, copy=True)
        return self._apart[bucket.number]

    def update(self, bucket: Bucket) -> None:
        grad = self._apart.pop(bucket.number, None)
        if grad is None and self.backend.alone:
            grad = bucket.grads[: bucket.chunk.elems]
        self.backend.update_gather(bucket, bucket.ensure_grad_shard() if grad is None else grad)

    def reduce_update(self, bucket: Bucket) -> None:
        if self._rounded is None:
            self.backend.one_pass(bucket, bucket.grads)
        else:
            super().reduce_update(bucket)


# ---- The native kernels and Triton's ------------------------------------------------------------


def shard_of(
    bucket: Bucket, factors_ptr: int, options: AdamWOptions, moments: Sequence[str]
) -> _native.AdamWShard:
    """Returns the native description of a bucket and this rank's shard of it.

    Args:
        bucket: the bucket.
        factors_ptr: address of :attr:`StepTable.factors`.
        options: options of the optimizer.
        moments: names of the state tensors that the kernels use as AdamW's three moments.
    """
    state = bucket.state
    tensors = (*(state.memory(name) for name in moments), None, None, None)
    params_ptr, master = bucket.params_ptr, state.master
    if bucket.layout.dtype is torch.float32 and master is not None:
        # FP32 parameters that are sent quantized have masters, which the kernel updates instead.
        before_bytes = bucket.chunk.begin * master.element_size() if bucket.chunk.elems else 0
        params_ptr, master = master.data_ptr() - before_bytes, None

    def ptr_of(tensor: Tensor | None) -> int:
        return 0 if tensor is None else tensor.data_ptr()

    return _native.AdamWShard(
        segments=bucket.segments.data_ptr(),
        segment_count=len(bucket.segments),
        factors=factors_ptr,
        bucket_elems=bucket.layout.elems,
        begin=bucket.chunk.begin,
        elems=bucket.chunk.elems,
        master=ptr_of(master),
        remainder=ptr_of(state.remainder),
        exp_avg=ptr_of(tensors[0]),
        exp_avg_sq=ptr_of(tensors[1]),
        max_exp_avg_sq=ptr_of(tensors[2]),
        params=params_ptr,
        param_dtype=DTYPE_CODES[bucket.layout.dtype],
        stochastic=options.rounding == "stochastic",
        seed=options.seed,
        bucket=bucket.number,
        quantized_state=state.quantized_state,
    )


class HostBackend(Backend):
    """Updates buckets by the native kernels on the CPU.

    In a world of one the caller's thread runs the kernels at once. Otherwise each update is a call
    of the communicator, in the order of its calls. For ``moments`` see :func:`shard_of`.
    """

    def __init__(
        self,
        comm: Communicator | None,
        options: AdamWOptions,
        table: StepTable,
        moments: Sequence[str],
    ) -> None:
        self._moments = moments
        self._step_bytes = table.layout.size_bytes
        reducer = HostReducer(comm, options, self._step_bytes)
        super().__init__(comm is None, reducer, options, sharers_of(comm, options.state))
        self._comm = comm
        self._step_core_of = step_core_of(comm, options)
        self._options = options
        self._factors_ptr = table.factors.data_ptr()
        self._op = OP_CODES[options.reduce.upper()]
        self._algorithm = ALGORITHMS[options.algorithm]
        self._shards: dict[tuple[int, int], _native.AdamWShard] = {}

    def forget(self) -> None:
        self._shards.clear()

    def begin(self, table: StepTable) -> None:
        _native.prepare_adamw(
            control=table.control.data_ptr(),
            hyper=table.hyper.data_ptr(),
            group=table.group.data_ptr(),
            active=table.active.data_ptr(),
            step=table.step.data_ptr(),
            factors=self._factors_ptr,
            params=table.step.numel(),
        )

    def _update(self, bucket: Bucket, grad: Tensor) -> None:
        _native.adamw_shard(self._shard(bucket), grad.data_ptr(), DTYPE_CODES[grad.dtype])

    def _update_gather(self, bucket: Bucket, grad: Tensor) -> None:
        shard = self._shard(bucket)
        self._call(
            "adamw_all_gather",
            grad,
            lambda core: self._step_core_of(core).adamw_all_gather(
                shard, grad.data_ptr(), DTYPE_CODES[grad.dtype], self._algorithm, self._step_bytes
            ),
        )

    def _one_pass(self, bucket: Bucket, grads: Tensor) -> None:
        shard = self._shard(bucket)
        self._call(
            "reduce_scatter_adamw_all_gather",
            grads,
            lambda core: self._step_core_of(
                core, bucket.error_feedback
            ).reduce_scatter_adamw_all_gather(
                shard,
                grads.data_ptr(),
                DTYPE_CODES[grads.dtype],
                self._op,
                self._algorithm,
                self._step_bytes,
                bucket.tag(),
            ),
        )

    def _call(self, name: str, grads: Tensor, run: Callable[[Core], int]) -> None:
        if self._comm is not None:
            self._comm.engine.start_call(Call(name, run, [], more_bytes=grads.nbytes))

    def _shard(self, bucket: Bucket) -> _native.AdamWShard:
        shard = self._shards.get(bucket.key)
        if shard is None:
            shard = shard_of(bucket, self._factors_ptr, self._options, self._moments)
            self._shards[bucket.key] = shard
        return shard


@dataclass(frozen=True)
class _Shard:
    """A shard's native description, and the device's copy of it."""

    native: _native.AdamWShard
    copy: Tensor


class _Repeated(NamedTuple):
    """A call that is repeated unchanged in each step.

    Attributes:
        call: the call.
        again: repeats the prepared call; see :meth:`CallEngine.planned`.
        grad: address and dtype of the gradient that the call reads.
    """

    call: Call
    again: Callable[[], int] | None
    grad: tuple[int, torch.dtype] | None = None


class DeviceBackend(Backend):
    """Updates buckets by the native kernels on a device.

    The kernels run in the communicator's order of calls, on the caller's current stream.

    Args:
        comm: communicator of the device; even a world of one needs a communicator.
        options: options of the optimizer.
        table: table of the optimizer.
        moments: see :func:`shard_of`.
        quantized_state: True if moments are quantized to 8 bits. Reduction, update and gathering
            are then separate calls: a kernel that does all three would need more registers than a
            GPU thread has, and would spill them to local memory.
    """

    def __init__(
        self,
        comm: Communicator,
        options: AdamWOptions,
        table: StepTable,
        moments: Sequence[str],
        quantized_state: bool = False,
    ) -> None:
        self._moments = moments
        alone, reducer = comm.world_size == 1, DeviceReducer(comm, options)
        sharers = sharers_of(comm, options.state)
        super().__init__(alone, reducer, options, sharers, fused=not quantized_state)
        self._engine = device_engine_of(comm.engine)
        self._memory = self._engine.device_core.heap.memory
        self._device = comm.device
        self._options = options
        self._factors_ptr = table.factors.data_ptr()
        self._op = OP_CODES[options.reduce.upper()]
        self._algorithm = ALGORITHMS[options.algorithm]
        self._shards: dict[tuple[int, int], _Shard] = {}
        # Keyed by call name, bucket number, and first element of the piece.
        self._updates: dict[tuple[str, int, int], _Repeated] = {}
        self._table = self._on_device(
            _native.adamw_table_bytes(
                control=table.control.data_ptr(),
                hyper=table.hyper.data_ptr(),
                group=table.group.data_ptr(),
                active=table.active.data_ptr(),
                step=table.step.data_ptr(),
                factors=self._factors_ptr,
                params=table.step.numel(),
            )
        )
        self._prepare: _Repeated | None = None

    def _on_device(self, data: bytes) -> Tensor:
        return torch.tensor(list(data), dtype=torch.uint8, device=self._device)

    def forget(self) -> None:
        self._shards.clear()
        self._updates.clear()

    def begin(self, table: StepTable) -> None:
        known, memory = self._prepare, self._memory
        if memory.reached_bytes < memory.committed_bytes:
            # Peers must have mapped this rank's buckets, which they read and write in place.
            self._engine.device_core.await_peers("step")
        if known is None:
            run = methodcaller("prepare_adamw", self._table.data_ptr())
            known = self._prepare = self._repeated(Call("adamw_prepare", run, []))
        if known.again is None or known.again() != 0:
            self._engine.start_call(known.call)

    def _repeated(self, call: Call, grad: tuple[int, torch.dtype] | None = None) -> _Repeated:
        return _Repeated(call, self._engine.planned(call), grad)

    def _update(self, bucket: Bucket, grad: Tensor) -> None:
        self._start_update("adamw_shard", bucket, grad)

    def _update_gather(self, bucket: Bucket, grad: Tensor) -> None:
        self._start_update("adamw_all_gather", bucket, grad, self._algorithm)

    def _start_update(self, name: str, bucket: Bucket, grad: Tensor, *more: int) -> None:
        key, of = (name, bucket.number, bucket.chunk.begin), (grad.data_ptr(), grad.dtype)
        known = self._updates.get(key)
        if known is None or known.grad != of:
            shard = self._shard(bucket)
            native = shard.native, shard.copy.data_ptr(), of[0], DTYPE_CODES[of[1]]
            call = Call(name, methodcaller(name, *native, *more), [], more_bytes=grad.nbytes)
            known = self._updates[key] = self._repeated(call, of)
        if known.again is None or known.again() != 0:
            self._engine.start_call(known.call)

    def _one_pass(self, bucket: Bucket, grads: Tensor) -> None:
        name, key = "reduce_scatter_adamw_all_gather", (bucket.number, bucket.chunk.begin)
        shard = self._shards.get(key) or self._shard(bucket)
        native = shard.native, shard.copy.data_ptr(), grads.data_ptr(), DTYPE_CODES[grads.dtype]
        arguments = (*native, self._op, self._algorithm, bucket.tag())
        engine = self._engine
        if engine.fast.reduce_scatter_adamw_all_gather_fast(*arguments) != 0:
            run = methodcaller(name, *arguments)
            engine.start_call(Call(name, run, [], more_bytes=grads.nbytes))

    def _shard(self, bucket: Bucket) -> _Shard:
        shard = self._shards.get(bucket.key)
        if shard is None:
            native = shard_of(bucket, self._factors_ptr, self._options, self._moments)
            copy = self._on_device(_native.adamw_shard_bytes(native))
            shard = self._shards[bucket.key] = _Shard(native, copy)
        return shard


# ---- Triton's kernels, which replace the native kernels that compute and communicate ------------
# On the host they run in Triton's interpreter, for tests. A native kernel still begins each step.


# The parameters of failed steps stay alive: a peer may write to them until it notices the failure.
_abandoned: list[Tensor] = []


class TritonCalls:
    """Runs Triton's collectives in the order of a communicator's calls.

    Raises:
        UnsupportedError: Triton cannot be imported, or cannot run here.
    """

    def __init__(self, comm: Communicator | None, algorithm: str) -> None:
        self._comm = comm
        self._algorithm = algorithm
        self.checks = CallChecks(
            "optimizer", comm.rank if comm else 0, comm.world_size if comm else 1
        )
        require_triton(self.checks)
        if comm is None:
            self._check_interpreted()
        else:
            self._use = comm.engine.use_triton(self.checks, algorithm, torch.float32)

    def _check_interpreted(self) -> None:
        from ringcomm._tl.hooks import IS_INTERPRETED

        if not IS_INTERPRETED:
            raise UnsupportedError(
                f'{self.checks}: on the host kernels="triton" runs in Triton\'s interpreter. Set '
                'TRITON_INTERPRET=1 before Triton is imported, or use kernels="native"'
            )

    def run(
        self,
        name: str,
        make: Callable[[int], KernelPlan],
        source: Tensor,
        descriptor: Tensor,
        stored: Tensor | None = None,
    ) -> None:
        """Runs the collective that ``make`` plans; peers write their results to ``stored``."""
        comm = self._comm
        if comm is None:
            return

        def run(core: Core) -> int:
            end = self._use(core)
            plan = make(end.chosen(ALGORITHMS[self._algorithm]))
            return end.run(plan, source.data_ptr(), descriptor.data_ptr())

        try:
            comm.engine.start_call(Call(name, run, [], more_bytes=source.nbytes))
        except RingcommError:
            if stored is not None:
                _abandoned.append(stored)
            raise


class TritonReducer(Reducer):
    """Reduces the gradients in the optimizer's buckets with Triton's kernels, during a step."""

    def __init__(self, triton: TritonCalls, comm: Communicator | None, op: str) -> None:
        self._triton = triton
        self._comm = comm
        self._op = op
        # Maps an output's address to a tensor that the kernels read: the addresses of the output
        # and of the norm words, then the norm words themselves.
        self._descriptors: dict[int, Tensor] = {}

    def forget(self) -> None:
        """Drops cached addresses."""
        self._descriptors.clear()

    def norm(self, grads: Tensor, kind: str, words: Tensor) -> None:
        from ringcomm._tl.adamw_launch import launch_grad_norm

        if self._comm is not None:
            # In a world of one on a device the reduction writes no output; it only sums norm words.
            self._run(grads, grads, kind, words)
            return
        words.zero_()  # the kernel's blocks add to the words
        dtype = DTYPE_NAMES[grads.dtype]
        launch_grad_norm(grads.data_ptr(), dtype, grads.numel(), kind_code(kind), words.data_ptr())

    def reduce(self, grads: Tensor, into: Into, async_op: bool = False) -> Work | None:
        if into.accumulate or async_op or into.tag:
            raise UnsupportedError(
                f'{self._triton.checks}: kernels="triton" reduces only in step(); use '
                'kernels="native"'
            )
        words = into.words
        if words is None:  # the kernels always write norm words
            words = torch.empty(NORM_WORDS, dtype=torch.int64, device=grads.device)
        self._run(grads, into.out, into.kind, words)
        return None

    def _run(self, grads: Tensor, out: Tensor, kind: str, words: Tensor) -> None:
        from ringcomm._tl.adamw_launch import plan_reduce_scatter_norm

        world_size = self._triton.checks.world_size
        descriptor = self._descriptor(out)
        found = descriptor[2:]
        found.zero_()  # the kernel's blocks add to it
        self._triton.run(
            "reduce_scatter_norm",
            lambda algorithm: plan_reduce_scatter_norm(
                grads.numel(),
                DTYPE_NAMES[grads.dtype],
                self._op,
                kind_code(kind),
                False,
                algorithm,
                world_size,
                stores=world_size > 1,
            ),
            grads,
            descriptor,
        )
        words.copy_(found)

    def _descriptor(self, out: Tensor) -> Tensor:
        if out.data_ptr() not in self._descriptors:
            descriptor = torch.zeros(2 + NORM_WORDS, dtype=torch.int64, device=out.device)
            addresses = [out.data_ptr(), descriptor[2:].data_ptr()]
            descriptor[:2].copy_(torch.tensor(addresses, dtype=torch.int64, device="cpu"))
            self._descriptors[out.data_ptr()] = descriptor
        return self._descriptors[out.data_ptr()]


class TritonBackend(Backend):
    """Updates buckets with Triton's kernels for AdamW.

    Without a communicator the caller's thread runs the kernels at once. Otherwise each update is a
    call of the communicator, in the order of its calls.

    Args:
        comm: the communicator, or None for a world of one on the host.
        options: options of the optimizer.
        table: table of the optimizer.
        native: the backend of the native kernels, which begins each step.
        moments: see :func:`shard_of`.

    Raises:
        UnsupportedError: Triton cannot be imported, or cannot run here.
    """

    def __init__(
        self,
        comm: Communicator | None,
        options: AdamWOptions,
        table: StepTable,
        native: Backend,
        moments: Sequence[str],
    ) -> None:
        triton = TritonCalls(comm, options.algorithm)
        self._triton = triton
        self._op = options.reduce.upper()
        self._norms = TritonReducer(triton, comm, self._op)
        alone, sharers = triton.checks.world_size == 1, sharers_of(comm, options.state)
        super().__init__(alone, self._norms, options, sharers)
        self._comm = comm
        self._options = options
        self._native = native
        self._moments = moments
        self._factors_ptr = table.factors.data_ptr()
        self._device = table.control.device if comm is None else comm.device
        # Maps a bucket's key to the description of its shard, which kernels read.
        self._shards: dict[tuple[int, int], Tensor] = {}

    def forget(self) -> None:
        self._native.forget()
        self._shards.clear()
        self._norms.forget()

    def begin(self, table: StepTable) -> None:
        self._native.begin(table)

    def _update(self, bucket: Bucket, grad: Tensor) -> None:
        from ringcomm._tl.adamw_launch import launch_adamw_shard

        kind, descriptor = self._kind(bucket, grad.dtype, "SUM"), self._shard(bucket)
        if self._comm is None:
            launch_adamw_shard(descriptor.data_ptr(), grad.data_ptr(), bucket.chunk.elems, kind)
        else:
            self._update_gather(bucket, grad)

    def _update_gather(self, bucket: Bucket, grad: Tensor) -> None:
        from ringcomm._tl.adamw_launch import plan_adamw_all_gather

        kind, descriptor = self._kind(bucket, grad.dtype, "SUM"), self._shard(bucket)
        self._triton.run(
            "adamw_all_gather",
            lambda algorithm: plan_adamw_all_gather(bucket.layout.elems, kind, algorithm),
            grad,
            descriptor,
            bucket.params,
        )

    def _one_pass(self, bucket: Bucket, grads: Tensor) -> None:
        from ringcomm._tl.adamw_launch import plan_one_pass

        op, elems = self._op, bucket.layout.elems
        kind = self._kind(bucket, grads.dtype, op)
        self._triton.run(
            "reduce_scatter_adamw_all_gather",
            lambda algorithm: plan_one_pass(elems, kind, op, algorithm),
            grads,
            self._shard(bucket),
            bucket.params,
        )

    def _kind(self, bucket: Bucket, grad: torch.dtype, op: str) -> ShardKind:
        from ringcomm._tl.adamw_launch import shard_kind

        state = bucket.state
        master = "none" if state.master is None else "fp32"
        return shard_kind(
            DTYPE_NAMES[grad],
            DTYPE_NAMES[bucket.layout.dtype],
            op,
            self._triton.checks.world_size,
            master=master if state.remainder is None else "remainder",
            keeps_max="max_exp_avg_sq" in state.moments,
            stochastic=self._options.rounding == "stochastic",
        )

    def _shard(self, bucket: Bucket) -> Tensor:
        if bucket.key not in self._shards:
            shard = shard_of(bucket, self._factors_ptr, self._options, self._moments)
            data = list(_native.adamw_shard_bytes(shard))
            descriptor = torch.tensor(data, dtype=torch.uint8, device=self._device)
            self._shards[bucket.key] = descriptor
        return self._shards[bucket.key]
