# SPDX-License-Identifier: Apache-2.0
"""Runs each collective and an optimizer step once, at small sizes, under compute-sanitizer.

Two ranks share one launch. ``make gpu-check`` runs this program under memcheck, racecheck and
synccheck. The exit status is 1 when a result is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import ringcomm
from ringcomm.algorithms import spelled
from ringcomm.optim import AdamW, AdamWOptions
from tests.gpu import device
from tests.gpu.device import DEVICE, PLAIN
from tests.gpu.worlds import one_launch_world, ramp

# Elements: fewer than a vector, and whole vectors with a remainder.
COUNTS = (3, 2053)
RANKS = 2
# Under the sanitizer everything, waiting too, takes many times longer.
TIMEOUT_S = 60.0

Tensor = torch.Tensor


def buffers(count: int, in_heap: bool) -> Tensor:
    if in_heap:
        return ringcomm.zeros(count, device=DEVICE)
    return torch.zeros(count, device=PLAIN)


def given(count: int, in_heap: bool) -> list[Tensor]:
    tensors = [buffers(count, in_heap) for _ in range(RANKS)]
    for rank, tensor in enumerate(tensors):
        tensor.copy_(ramp(count, rank))
    return tensors


def check(name: str, tensors: list[Tensor], expected: list[Tensor]) -> None:
    for rank, (tensor, right) in enumerate(zip(tensors, expected, strict=True)):
        if not torch.equal(tensor, right):
            raise SystemExit(f"{name}: rank {rank} has a wrong result")


def reductions(world: Any, count: int, in_heap: bool) -> None:
    for algorithm in ("one_shot", "ring", "ll"):
        tensors = given(count, in_heap)
        total = tensors[0] + tensors[1]
        world.all_reduce(tensors, algorithm=spelled(algorithm, "all_reduce"))
        check(f"all_reduce, {algorithm}", tensors, [total, total])
    for algorithm in ("one_shot", "ring"):
        inputs = given(count * RANKS, in_heap)
        outputs = [buffers(count, in_heap) for _ in range(RANKS)]
        expected = list((inputs[0] + inputs[1]).chunk(RANKS))
        world.reduce_scatter_tensor(outputs, inputs, algorithm=algorithm)
        check(f"reduce_scatter, {algorithm}", outputs, expected)


def gathers(world: Any, count: int, in_heap: bool) -> None:
    for algorithm in ("one_shot", "ring"):
        inputs = given(count, in_heap)
        outputs = [buffers(count * RANKS, in_heap) for _ in range(RANKS)]
        world.all_gather_into_tensor(outputs, inputs, algorithm=algorithm)
        check(f"all_gather, {algorithm}", outputs, [torch.cat(inputs)] * RANKS)


def others(world: Any, count: int, in_heap: bool) -> None:
    """Calls that each rank makes by itself. The ranks meet on the host; one launch carries both."""
    inputs, wholes = given(count, in_heap), given(count * RANKS, in_heap)
    swapped = [torch.cat([whole.chunk(RANKS)[rank] for whole in wholes]) for rank in range(RANKS)]

    def body(comm: Any) -> tuple[Tensor, Tensor, Tensor]:
        rank = comm.rank
        shared = inputs[rank].clone()
        comm.broadcast(shared, 1)
        exchanged = buffers(count * RANKS, in_heap)
        comm.all_to_all_single(exchanged, wholes[rank])
        reduced = inputs[rank].clone()
        comm.reduce(reduced, 0)
        comm.barrier()
        return shared, exchanged, reduced

    results = world.run(body)
    total = inputs[0] + inputs[1]
    check("broadcast", [each[0] for each in results], [inputs[1]] * RANKS)
    check("all_to_all", [each[1] for each in results], swapped)
    check("reduce", [each[2] for each in results], [total, inputs[1]])


def messages(world: Any, count: int, in_heap: bool) -> None:
    inputs = given(count, in_heap)

    def body(comm: Any) -> Tensor:
        received = buffers(count, in_heap)
        if comm.rank == 0:
            comm.send(inputs[0], 1)
            comm.recv(received, 1)
        else:
            comm.recv(received, 0)
            comm.send(inputs[1], 0)
        return received

    check("send and recv", world.run(body), [inputs[1], inputs[0]])


def trained(comm: Any, grad: Tensor, algorithm: str, clip: bool) -> Tensor:
    """Returns a parameter of ones after two optimizer steps."""
    param = torch.nn.Parameter(torch.ones_like(grad))
    param.grad = grad.clone()
    optimizer = AdamW([param], lr=0.1, comm=comm, options=AdamWOptions(algorithm=algorithm))
    for _ in range(2):
        if clip:
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
    return param.detach()


def steps(world: Any, alone: Any, count: int) -> None:
    """Compares steps in one pass and in two with those of a rank that has the mean gradient."""
    grads = given(count, False)
    mean = (grads[0] + grads[1]) / RANKS
    for clip in (False, True):
        expected = trained(alone[0], mean, "one_shot", clip)
        for algorithm in ("one_shot", "ring"):
            found = world.run(
                lambda comm, *how: trained(comm, grads[comm.rank], *how), algorithm, clip
            )
            check(f"step, {algorithm}, clip: {clip}", found, [expected] * RANKS)


def run() -> None:
    parts: list[Callable[[Any, int, bool], None]] = [reductions, gathers, others, messages]
    with one_launch_world(RANKS, timeout=TIMEOUT_S) as world:
        for part in parts:
            for count in COUNTS:
                for in_heap in (False, True):
                    part(world, count, in_heap)
        with one_launch_world(1, timeout=TIMEOUT_S) as alone:
            for count in COUNTS:
                steps(world, alone, count)
        device.synchronize()


if __name__ == "__main__":
    with device.in_use(), device.ordered():
        run()
