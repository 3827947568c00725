# SPDX-License-Identifier: Apache-2.0
"""Devices of tensors, their clocks, and the modes in which ranks share devices.

Every row of results contains its mode.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from .report import PROCESSES
from .timing import Call, Device

GPU_PER_RANK = "gpu-per-rank"
PROCESSES_ON_ONE_GPU = "processes-on-one-gpu"
ONE_LAUNCH = "one-launch"
AUTO = "auto"

DEVICE_MODES = (GPU_PER_RANK, PROCESSES_ON_ONE_GPU, ONE_LAUNCH)
# All ranks' tensors are in the memory of one GPU, so moved bytes can be compared with its copy
# bandwidth.
ONE_GPU_MODES = (PROCESSES_ON_ONE_GPU, ONE_LAUNCH)

MEANINGS = {
    PROCESSES: "a process per rank, on the CPU",
    GPU_PER_RANK: "a process and a GPU per rank",
    PROCESSES_ON_ONE_GPU: "a process per rank, all on one GPU, which runs them in time slices",
    ONE_LAUNCH: "all ranks in one process on one GPU, carried by one launch",
}


class ModeError(Exception):
    """The requested mode is not available on this machine; the message says what to do."""


def choose(asked: str, ranks: int, gpus: int, started_by: str | None) -> str:
    """Chooses the mode of a run of ``ranks`` ranks on CUDA with ``gpus`` visible GPUs.

    "auto" selects one GPU per rank if there are enough GPUs. Otherwise it selects one launch, or
    processes on one GPU if a launcher has already started processes.

    Raises:
        ModeError: no GPU, too few of them, or a launcher whose processes the mode cannot use.
    """
    if gpus == 0:
        raise ModeError("--device cuda: torch sees no usable CUDA device here; use --device cpu")
    if asked == AUTO:
        if ranks <= gpus:
            return GPU_PER_RANK
        return ONE_LAUNCH if started_by is None else PROCESSES_ON_ONE_GPU
    if asked == GPU_PER_RANK and ranks > gpus:
        raise ModeError(
            f"--mode {GPU_PER_RANK}: {ranks} ranks and {gpus} visible GPUs; start fewer ranks, or "
            f"take --mode {ONE_LAUNCH} or {PROCESSES_ON_ONE_GPU}"
        )
    if asked == ONE_LAUNCH and started_by is not None:
        raise ModeError(
            f"--mode {ONE_LAUNCH} has all ranks in one process, and {started_by} started several: "
            "run the harness alone with --ranks"
        )
    return asked


# torch does not annotate much of this module with types.
_cuda: Any = torch.cuda

# Larger than the caches of any GPU, and small enough for the memory of any GPU worth measuring.
_COPY_BYTES = 2 << 30
_COPY_ROUNDS = 20


class CudaDevice(Device):
    """A CUDA device; its work is queued on its own stream, which is the process's current stream.

    With ``sleep_cycles`` the device sleeps while the host queues the calls of a turn, so that it
    does not wait for the host. Raises ``RuntimeError`` if torch cannot use the device.
    """

    sleep_cycles = 0

    def __init__(self, index: int) -> None:
        if not _cuda.is_available():
            raise RuntimeError(f"torch {torch.__version__} sees no usable CUDA device")
        super().__init__(_cuda.synchronize)
        _cuda.set_device(index)
        self.name = self.tensors = f"cuda:{index}"
        # The legacy default stream waits for all others and cannot be captured, so use another
        # stream.
        self._stream = _cuda.Stream()
        _cuda.set_stream(self._stream)
        self._properties = _cuda.get_device_properties(index)
        self.cache_bytes = int(self._properties.L2_cache_size)

    def elapsed_us(self, calls: Iterable[Call]) -> float:
        begin, end = (_cuda.Event(enable_timing=True) for _ in range(2))
        if self.sleep_cycles:
            _cuda._sleep(self.sleep_cycles)
        begin.record()
        for call in calls:
            call()
        end.record()
        self.late += bool(self.sleep_cycles and begin.query())
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3

    def refresh(self, tensor: torch.Tensor) -> None:
        # Zeros are cheaper to move than other data, and sums in place must not overflow before the
        # next turn.
        if tensor.is_floating_point():
            tensor.uniform_(-1.0, 1.0)
        else:
            tensor.random_(0, 8)

    def capture(self, calls: Sequence[Call], count: int) -> Call:
        graph = _cuda.CUDAGraph()
        # Watchdog threads of the libraries may call CUDA during the capture.
        with _cuda.graph(graph, capture_error_mode="thread_local"):
            super().capture(calls, count)()
        replay: Call = graph.replay
        return replay

    def copy_gbps(self) -> float:
        """Measures the device's copy bandwidth, reads and writes, in 1e9 bytes per second."""
        source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=self.tensors)
        self.refresh(source)
        target = torch.empty_like(source)
        times_us = [self.elapsed_us([lambda: target.copy_(source)]) for _ in range(_COPY_ROUNDS)]
        return 2 * _COPY_BYTES / statistics.median(times_us) / 1e3

    def facts(self) -> dict[str, str]:
        major, minor = self._properties.major, self._properties.minor
        return {
            "gpu": str(self._properties.name),
            GPUS_FACT: str(torch.cuda.device_count()),
            "compute capability": f"{major}.{minor}",
            "multiprocessors": str(self._properties.multi_processor_count),
            "L2 cache": f"{self.cache_bytes / 2**20:.0f} MiB",
            "driver": _driver_version(),
            "CUDA": str(torch.version.cuda),
            "NCCL": ".".join(map(str, nccl_version())) or "none",
            "CuPy": _cupy_version(),
            COPY_FACT: f"{self.copy_gbps():.1f}",
        }


# Key of the number of visible GPUs among the facts.
GPUS_FACT = "GPUs"
# Key of the copy bandwidth among the facts; in 1e9 bytes per second, counting reads and writes.
COPY_FACT = "copy GB/s"


def nccl_version() -> tuple[int, ...]:
    """Returns the version of torch's NCCL, or an empty tuple without NCCL."""
    return tuple(_cuda.nccl.version()) if torch.distributed.is_nccl_available() else ()


def _driver_version() -> str:
    try:
        import pynvml
    except ImportError:
        return "unknown (no nvidia-ml-py)"
    pynvml.nvmlInit()
    try:
        return str(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()


def _cupy_version() -> str:
    for name in ("cupy-cuda13x", "cupy-cuda12x", "cupy"):
        with suppress(PackageNotFoundError):
            return version(name)
    return "none"
