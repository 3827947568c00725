"""The systems that :mod:`.device_steps` times: the optimizer's step, ours and torch's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import ringcomm

from .devices import Device
from .timing import Call

Tensor = torch.Tensor

SHARD, STEP = "adamw_shard", "adamw_step"
SUBJECT, COPY, TORCH = "ringcomm", "copy", "torch fused"
TWO_PASSES, SEPARATE = "two passes", "separate kernels"

_HEAP_SLACK_BYTES = 1 << 30
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
        """Gradient in, 16-bit parameter out; moments and FP32 parameter or master in and out."""
        return 3 * 8 + (4 if self.dtype is torch.float32 else 2 + 2)

    @property
    def heap_bytes(self) -> int:
        """Parameters and gradients of all ranks of all our systems."""
        copies = 1 if self.what == SHARD else 3 * self.world + 1
        return copies * 2 * self.dtype.itemsize * self.elems + _HEAP_SLACK_BYTES

    @property
    def memory_bytes(self) -> int:
        """All that the systems hold at once, at the most, and what building one of them takes."""
        plain = 100 if self.what == SHARD else 80 + 6 * self.dtype.itemsize * self.world
        return self.heap_bytes + plain * self.elems


class Systems:
    """All systems of one case, built on one device; each has made one step. Close it."""

    def __init__(self, case: KernelCase, device: Device) -> None:
        self._case, self._device = case, device
        self._world = self._local_world(case.world)
        self._alone = self._world if case.world == 1 else self._local_world(1)
        # By system: the parameters of all ranks.
        self.params: dict[str, list[Tensor]] = {}
        self.calls: dict[str, Call] = {}
        for name, build in self._builders().items():
            self.calls[name] = build(name)
            if device.name != "cpu":
                _cuda.empty_cache()  # what building left over, on streams of its own

    def _local_world(self, ranks: int) -> Any:
        name = self._device.name
        if name == "cpu":  # of tests: the process's heap may be there already
            return ringcomm.local_world(ranks)
        return ringcomm.local_world(ranks, device=name, heap_bytes=self._case.heap_bytes)

    def close(self) -> None:
        self.calls.clear()
        if self._alone is not self._world:
            self._alone.close()
        self._world.close()

    def _builders(self) -> dict[str, Callable[[str], Call]]:
        elems = self._case.elems
        usual = ringcomm.optim.AdamWOptions(bucket_elems=elems)
        if self._case.what == SHARD:
            return {
                SUBJECT: lambda name: self._ranks(name, usual),
                TORCH: self._torch,
                COPY: self._copy,
            }
        two = ringcomm.optim.AdamWOptions(bucket_elems=elems, check_finite=True)
        return {
            SUBJECT: lambda name: self._ranks(name, usual),
            TWO_PASSES: lambda name: self._ranks(name, two),
            SEPARATE: self._separate,
            TORCH: self._torch,
        }

    def _random(self, seed: int, scale: float) -> Tensor:
        case, place = self._case, self._device.tensors
        generator = torch.Generator(place).manual_seed(seed)
        values = torch.empty(case.elems, dtype=case.dtype, device=place)
        return values.uniform_(-scale, scale, generator=generator)

    def _parameter(self) -> Tensor:
        return self._random(0, 1.0)

    def _gradient(self, rank: int) -> Tensor:
        return self._random(1 + rank, 0.01)

    def _ranks(self, name: str, options: ringcomm.optim.AdamWOptions) -> Call:
        """A step of the optimizer on every rank; those of several are threads for it."""

        def build(comm: ringcomm.Communicator) -> ringcomm.optim.AdamW:
            param = torch.nn.Parameter(self._parameter())
            param.grad = self._gradient(comm.rank)
            optimizer = ringcomm.optim.AdamW([param], comm=comm, options=options)
            optimizer.step()  # lays the bucket out; from here on p.grad is its view
            return optimizer

        world = self._world
        optimizers = [build(world[0])] if len(world) == 1 else world.run(build)
        self.params[name] = [each.param_groups[0]["params"][0].data for each in optimizers]
        if len(world) == 1:
            step: Call = optimizers[0].step
            return step
        return lambda: world.run(lambda comm: optimizers[comm.rank].step())

    def _separate(self, name: str) -> Call:
        """Reduce-scatter, update and all-gather as calls of this library, from one thread."""
        case, world = self._case, self._world
        chunk = case.elems // case.world
        options = ringcomm.optim.AdamWOptions(bucket_elems=chunk)
        grads = [self._in_heap(self._gradient(rank)) for rank in range(case.world)]
        params = [self._in_heap(self._parameter()) for _ in range(case.world)]
        leaves = [
            torch.nn.Parameter(whole[rank * chunk : (rank + 1) * chunk])
            for rank, whole in enumerate(params)
        ]
        updates = [
            ringcomm.optim.AdamW([leaf], comm=self._alone[0], options=options) for leaf in leaves
        ]
        for leaf in leaves:
            leaf.grad = torch.zeros_like(leaf)

        def step() -> None:
            world.reduce_scatter_tensor(reduced, grads, op=dist.ReduceOp.AVG)
            for update in updates:
                update.step()
            world.all_gather_into_tensor(params, shards)

        reduced, shards = [leaf.grad for leaf in leaves], [leaf.data for leaf in leaves]
        step()
        # The buckets took parameters and gradients over: gather from there, and reduce to there.
        reduced, shards = [leaf.grad for leaf in leaves], [leaf.data for leaf in leaves]
        world.all_gather_into_tensor(params, shards)
        self.params[name] = params
        return step

    def _in_heap(self, values: Tensor) -> Tensor:
        made = ringcomm.empty(values.numel(), dtype=values.dtype, device=self._device.name)
        return made.copy_(values)

    def _torch(self, name: str) -> Call:
        """Sum, fused AdamW, copies; in the gradients' dtype as far as can be, to move less."""
        ranks = self._case.world
        grads = [self._gradient(rank) for rank in range(ranks)]
        params = [self._parameter() for _ in range(ranks)]
        total = torch.empty_like(grads[0]) if ranks > 1 else grads[0]
        # Of FP32 parameters, the first one itself.
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
        """Copies as many bytes as the update of a shard must move, half of them in and half out."""
        half = self._case.bytes_per_parameter * self._case.elems // 2
        source = torch.empty(half, dtype=torch.uint8, device=self._device.tensors)
        source.random_(0, 8)
        target = torch.empty_like(source)
        self.params[name] = []
        return lambda: target.copy_(source)
