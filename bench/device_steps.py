# SPDX-License-Identifier: Apache-2.0
"""Times the optimizer's step on one GPU: ringcomm, torch, and a copy.

shard       the update of one rank alone: ringcomm; torch's fused AdamW; and a copy of the 28 bytes
            per parameter that the update must move. For bfloat16 parameters with FP32 masters
            torch casts the gradient, runs fused AdamW on the masters, and casts back.
step        a whole data-parallel step of W ranks in this process, with all gradients and
            parameters on the GPU: ringcomm in one pass, in two passes and as separate kernels;
            and torch's sum of the gradients, fused AdamW, and copies to the ranks.

"serial loops" is ringcomm with RINGCOMM_KERNELS=serial; its parameters must have the same bits.
Times are the device's: the device sleeps while the host queues the calls of a turn. The rows' notes
count turns for which this sleep was too short.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import ringcomm

from .devices import ONE_LAUNCH, CudaDevice
from .launch import LaunchError
from .loops import SERIAL, other_loops, with_other_loops
from .options import choice, option, subject
from .report import Row, row_of
from .run import Bench, Run
from .timing import Call, Device, Timing, rows_of

Tensor = torch.Tensor

SHARD, STEP = "adamw_shard", "adamw_step"
SUBJECT, COPY, TORCH = "ringcomm", "copy", "torch fused"
OLDER = "serial loops"
TWO_PASSES, SEPARATE = "two passes", "separate kernels"
_WHAT = {"shard": SHARD, "step": STEP}
_HEAP_SLACK_BYTES = 1 << 30
# About 30 ms, enough time for eight threads to queue the launches of a few steps.
_SLEEP_CYCLES = 50_000_000
_CALLS_PER_TURN = 3
# The share of the free memory to use; torch's cache, of unknown size, uses the remaining memory.
_MEMORY_SHARE = 0.8
_LEAST_ELEMS = 1 << 20

_cuda: Any = torch.cuda


@dataclass(frozen=True)
class KernelCase:
    """``elems`` parameters on each of ``world`` ranks; ``what`` is SHARD (one rank) or STEP."""

    what: str
    dtype: torch.dtype
    elems: int
    world: int = 1

    @property
    def bytes_per_parameter(self) -> int:
        """Bytes read and written per parameter: the gradient read, both moments and the FP32
        parameter or master read and written, a 16-bit parameter written.
        """
        return 3 * 8 + (4 if self.dtype is torch.float32 else 2 + 2)

    @property
    def heap_bytes(self) -> int:
        """Heap bytes for parameters and gradients of all ranks of all ringcomm systems."""
        copies = 2 if self.what == SHARD else 4 * self.world + 1
        return copies * 2 * self.dtype.itemsize * self.elems + _HEAP_SLACK_BYTES

    @property
    def memory_bytes(self) -> int:
        """The most bytes that all systems use together, including temporary memory of setups."""
        beside = 120 if self.what == SHARD else 100 + 6 * self.dtype.itemsize * self.world
        return self.heap_bytes + beside * self.elems


class Systems:
    """All systems of one case on one device, each after one step. Close this object after use."""

    def __init__(self, case: KernelCase, device: Device) -> None:
        self._case, self._device = case, device
        how: Any = {"device": device.name, "heap_bytes": case.heap_bytes}
        # In tests the process may already have a heap.
        make: Any = partial(ringcomm.local_world, **({} if device.name == "cpu" else how))
        self._world = make(case.world)
        self._alone = self._world if case.world == 1 else make(1)
        self.params: dict[str, list[Tensor]] = {}  # parameters of all ranks, by system
        self.calls: dict[str, Call] = {}  # one step of each system
        for name, build in self._builders().items():
            self.calls[name] = build(name)
            if device.name != "cpu":
                _cuda.empty_cache()  # free memory that torch cached for the setup's streams
        device.synchronize()
        both = zip(self.params[SUBJECT], self.params[OLDER], strict=True)
        # Compare the parameters of both kinds of loops after their first step.
        self.wrong_elems = sum(int((ours != older).sum()) for ours, older in both)

    def close(self) -> None:
        self.calls.clear()
        if self._alone is not self._world:
            self._alone.close()
        self._world.close()

    def _builders(self) -> dict[str, Callable[[str], Call]]:
        options = partial(ringcomm.optim.AdamWOptions, bucket_elems=self._case.elems)
        ours = {SUBJECT: partial(self._ranks, options()), OLDER: partial(self._older, options())}
        if self._case.what == SHARD:
            return {**ours, TORCH: self._torch, COPY: self._copy}
        two_passes = partial(self._ranks, options(check_finite=True))
        return {**ours, TWO_PASSES: two_passes, SEPARATE: self._separate, TORCH: self._torch}

    def _random(self, rank: int | None = None) -> Tensor:
        """Returns random values: the gradient of a rank, or the parameter of all ranks."""
        case, device = self._case, self._device.tensors
        seed, scale = (0, 1.0) if rank is None else (1 + rank, 0.01)
        generator = torch.Generator(device).manual_seed(seed)
        values = torch.empty(case.elems, dtype=case.dtype, device=device)
        return values.uniform_(-scale, scale, generator=generator)

    def _ranks(self, options: ringcomm.optim.AdamWOptions, name: str) -> Call:
        """Returns a call that runs the optimizer's step on every rank, in one thread per rank."""

        def build(comm: ringcomm.Communicator) -> ringcomm.optim.AdamW:
            param = torch.nn.Parameter(self._random())
            param.grad = self._random(comm.rank)
            optimizer = ringcomm.optim.AdamW([param], comm=comm, options=options)
            optimizer.step()  # creates the bucket; p.grad is a view of it afterwards
            return optimizer

        world = self._world
        optimizers = [build(world[0])] if len(world) == 1 else world.run(build)
        self.params[name] = [each.param_groups[0]["params"][0].data for each in optimizers]
        if len(world) == 1:
            step: Call = optimizers[0].step
            return step
        return lambda: world.run(lambda comm: optimizers[comm.rank].step())

    def _older(self, options: ringcomm.optim.AdamWOptions, name: str) -> Call:
        with other_loops(SERIAL):
            return with_other_loops(self._ranks(options, name), SERIAL)

    def _separate(self, name: str) -> Call:
        """Returns a call of separate reduce-scatter, updates and all-gather, from one thread."""
        case, world = self._case, self._world
        chunk = case.elems // case.world
        make_empty = partial(ringcomm.empty, dtype=case.dtype, device=self._device.name)
        in_heap = [make_empty(case.elems) for _ in range(2 * case.world)]
        grads, params = in_heap[::2], in_heap[1::2]
        for rank in range(case.world):
            grads[rank].copy_(self._random(rank))
            params[rank].copy_(self._random())
        chunks = [whole.chunk(case.world)[rank] for rank, whole in enumerate(params)]
        leaves = [torch.nn.Parameter(each) for each in chunks]
        options = ringcomm.optim.AdamWOptions(bucket_elems=chunk)
        make = partial(ringcomm.optim.AdamW, comm=self._alone[0], options=options)
        updates = [make([leaf]) for leaf in leaves]
        for leaf in leaves:
            leaf.grad = torch.zeros_like(leaf)

        def step() -> None:
            world.reduce_scatter_tensor(reduced, grads, op=dist.ReduceOp.AVG)
            for update in updates:
                update.step()
            world.all_gather_into_tensor(params, shards)

        reduced, shards = [leaf.grad for leaf in leaves], [leaf.data for leaf in leaves]
        step()
        # The buckets now hold parameters and gradients: gather from them, and reduce into them.
        reduced, shards = [leaf.grad for leaf in leaves], [leaf.data for leaf in leaves]
        world.all_gather_into_tensor(params, shards)
        self.params[name] = params
        return step

    def _torch(self, name: str) -> Call:
        """Returns a call of torch's step: sum, fused AdamW, copies, with casts only if needed."""
        ranks = self._case.world
        grads = [self._random(rank) for rank in range(ranks)]
        params = [self._random() for _ in range(ranks)]
        total = torch.empty_like(grads[0]) if ranks > 1 else grads[0]
        # With FP32 parameters, `master` is the first rank's parameter itself.
        master = torch.nn.Parameter(params[0].float())
        alike = master.dtype is total.dtype
        wide = master.grad = total if alike else torch.empty_like(master)
        optimizer = torch.optim.AdamW([master], fused=True)

        def step() -> None:
            if ranks > 1:
                torch.add(grads[0], grads[1], out=total)
                for grad in grads[2:]:
                    total.add_(grad)
                torch.div(total, ranks, out=wide)
            elif not alike:
                wide.copy_(total)
            optimizer.step()
            if not alike:
                params[0].copy_(master.data)
            for other in params[1:]:
                other.copy_(params[0])

        step()
        self.params[name] = params
        return step

    def _copy(self, name: str) -> Call:
        """Returns a copy that moves as many bytes as a shard's update: half read, half written."""
        half = self._case.bytes_per_parameter * self._case.elems // 2
        source = torch.empty(half, dtype=torch.uint8, device=self._device.tensors)
        source.random_(0, 8)
        target = torch.empty_like(source)
        self.params[name] = []
        return lambda: target.copy_(source)


def fitting(case: KernelCase, free_bytes: int) -> KernelCase:
    """Returns ``case`` with its parameters halved until it fits into the memory.

    Raises:
        RuntimeError: not even 2**20 parameters fit.
    """
    while case.memory_bytes > _MEMORY_SHARE * free_bytes:
        case = replace(case, elems=case.elems // 2)
        if case.elems < _LEAST_ELEMS:
            raise RuntimeError(f"{free_bytes} bytes of memory are too few for {case}")
    return case


def run_case(
    case: KernelCase, device: Device, time: Callable[[Mapping[str, Call]], Mapping[str, Timing]]
) -> list[Row]:
    """Times all systems of the case, in turn, with ``time``; returns a row per system."""
    systems = Systems(case, device)
    try:
        timings = time(systems.calls)
        wrong_elems = systems.wrong_elems
    finally:
        systems.close()
    note = f"{device.late} turns were queued too late" if device.late else ""
    rows = case_rows(case, timings, note)
    return [replace(row, wrong=wrong_elems) if row.system == OLDER else row for row in rows]


def case_rows(case: KernelCase, timings: Mapping[str, Timing], note: str = "") -> list[Row]:
    """Returns a row per system; ``algbw_gbps`` of a shard counts the bytes of its update."""
    op = "none" if case.what == SHARD else "avg"
    base = row_of(case.what, "in", case.world, case.elems, case.dtype, op=op, mode=ONE_LAUNCH)
    moved_bytes = case.bytes_per_parameter * case.elems if case.what == SHARD else 0
    speeds = {name: moved_bytes / each.median_us / 1e3 for name, each in timings.items()}
    return [
        replace(row, note=note, algbw_gbps=round(speeds[row.system], 4) or None)
        for row in rows_of(base, timings, SUBJECT)
    ]


def measure(run: Run) -> None:
    asked = run.options
    world = asked.ranks if asked.what == "step" else 1
    case = KernelCase(_WHAT[asked.what], getattr(torch, asked.dtype), asked.millions << 20, world)
    try:
        gpu = CudaDevice(0)
    except RuntimeError as error:
        raise LaunchError(str(error)) from error
    # facts() copies between two large tensors: free them before the free memory is measured.
    run.facts = {**gpu.facts(), "mode": ONE_LAUNCH}
    _cuda.empty_cache()
    run.pacing.expect(1)
    case = fitting(case, int(_cuda.mem_get_info(0)[0]))
    gpu.sleep_cycles = _SLEEP_CYCLES
    run.add(run_case(case, gpu, partial(run.time, batch=_CALLS_PER_TURN, device=gpu)))


BENCH = Bench(
    "device_steps",
    __doc__,
    measure,
    (
        subject(*_WHAT),
        option("-n --ranks", "ranks of a step", type=int, default=2, choices=(2, 4, 8)),
        option("-m --millions", "Mi parameters, fewer if memory is small", type=int, default=256),
        choice("-d --dtype", "dtype of parameters and gradients", "bfloat16", "float32"),
    ),
    ranks=0,
)
BENCH.run_as_main(__name__)
