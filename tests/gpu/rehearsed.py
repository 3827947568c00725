# SPDX-License-Identifier: Apache-2.0
"""Runs a bench program on an emulated device: ``python -m tests.gpu.rehearsed BENCH ...``.

``make gpu-check REHEARSE=1`` runs all its timings in this way. Stand-ins replace everything else
that the programs use of a GPU. The results are labelled as figures of the emulator.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

import ringcomm
from ringcomm import cuda
from ringcomm.bench import (
    device_calls,
    device_steps,
    devices,
    launch,
    run,
    training,
    training_systems,
)
from ringcomm.bench.devices import COPY_FACT, CudaDevice, choose
from ringcomm.bench.timing import Call, Device
from ringcomm.cuda import units
from tests.gpu import device
from tests.gpu.device import DEVICE, PLAIN
from tests.gpu.worlds import OrderedWorld
from tests.support import stub_driver
from tests.support.emulator.capture import resized_in_graph

FACTS = {
    "gpu": "none: rehearsed on an emulated device",
    "compute capability": "9.0",
    "driver": "none",
    "NCCL": "none",
    COPY_FACT: "1.0",  # not measured, but the goals divide by it
}


class EmulatedGpu(Device):
    """Replaces :class:`.devices.CudaDevice` and the clocks that the bench programs take from it."""

    name, tensors = DEVICE, PLAIN

    def __init__(self, index: object = 0) -> None:
        super().__init__(device.synchronize)

    refresh = CudaDevice.refresh

    def capture(self, calls: Sequence[Call], count: int) -> Call:
        with device.capture() as replay:
            super().capture(calls, count)()
        return replay

    def facts(self) -> dict[str, str]:
        return dict(FACTS)


class EmulatedTrainer(EmulatedGpu):
    """For the training bench, which also captures torch's operations."""

    def capture(self, calls: Sequence[Call], count: int) -> Call:
        runtime = cuda.current()
        with runtime.capture_on(runtime.make_stream(0)) as graph:
            Device.capture(self, calls, count)()
        return graph.replay


class EmulatedCuda:
    """Replaces ``torch.cuda`` where the optimizer's bench programs call it directly."""

    def empty_cache(self) -> None:
        """There is no cache."""

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return cuda.current().memory_info(index)


@contextmanager
def stand_ins() -> Iterator[None]:
    """Inside, the bench harness uses this process's emulated device as its GPU."""
    usual_world = ringcomm.local_world

    def run_ranks(words: Sequence[str], wanted: launch.Wanted) -> int:
        return launch.run_ranks([__spec__.name, *words[1:]], wanted)

    def local_world(*args: Any, **how: Any) -> OrderedWorld:
        if "options" in how:  # Triton's interpreter cannot run a launch of several ranks
            how["options"] = replace(how["options"], kernels="native")
        return OrderedWorld(usual_world(*args, **how))

    usual_step = ringcomm.zero.GraphedStep

    def graphed_step(step: Any, optimizer: Any, **how: Any) -> Any:
        made = usual_step(step, optimizer, **how)
        # Here all tensors look like host tensors; a step reads the learning rates there.
        runtime: Any = cuda.current()
        runtime.host_tensors.extend(group["lr"] for group in optimizer.param_groups)
        return made

    resize = torch.UntypedStorage.resize_

    def resized_in_order(storage: torch.UntypedStorage, size_bytes: int) -> Any:
        # Unlike a GPU's allocator, malloc may reuse memory that the device still uses.
        if resized_in_graph(storage, size_bytes):
            return storage
        device.synchronize()
        return resize(storage, size_bytes)

    emulated = EmulatedCuda()
    stand_ins: list[tuple[Any, str, object]] = [
        (devices, "CudaDevice", EmulatedGpu),
        # The host's compiler makes only one kind of loops, which replaces both kinds.
        (units, "chosen_loops", lambda: units.BATCHED),
        (devices, "choose", lambda mode, ranks, gpus, by: choose(mode, ranks, 1, by)),
        (device_steps, "CudaDevice", EmulatedGpu),
        (device_steps, "_cuda", emulated),
        (device_calls, "CudaDevice", EmulatedGpu),
        (device_calls, "libraries", lambda: (stub_driver.driver().path,) * 2),
        (training, "CudaDevice", EmulatedTrainer),
        (training_systems, "NCCL_BACKEND", "gloo"),
        (ringcomm.zero, "GraphedStep", graphed_step),
        (torch.UntypedStorage, "resize_", resized_in_order),
        (run, "run_ranks", run_ranks),
        (ringcomm, "local_world", local_world),
    ]
    with ExitStack() as stack:
        for owner, name, stand_in in stand_ins:
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        yield


def main(arguments: Sequence[str]) -> int:
    """Runs the bench named by the first argument; returns its exit status."""
    bench = importlib.import_module(f"ringcomm.bench.{arguments[0]}").BENCH
    with ExitStack() as stack:
        if launch.started_by(os.environ) is None:
            stack.enter_context(device.in_use())
        else:
            device.take()
        # FSDP2's tensors lack the storage that ordering by streams needs, and need no ordering.
        if "fsdp2-on-nccl" not in arguments:
            stack.enter_context(device.ordered())
        stack.enter_context(stand_ins())
        return run.main(bench, arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
