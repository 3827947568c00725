# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for a GPU: a device whose tensors are on the CPU, and a world on that device."""

from typing import Any

import torch
from torch.distributed import ReduceOp

from ringcomm.bench.timing import Device

_FOLDS: dict[object, Any] = {ReduceOp.SUM: torch.sum, ReduceOp.MAX: torch.amax}


class StandInGpu(Device):
    """Replaces ``ringcomm.bench.devices.CudaDevice``; counts its uses."""

    name = "cuda:0"

    def __init__(self, cache_bytes=0):
        super().__init__()
        self.cache_bytes = cache_bytes
        self.refreshed = 0
        self.captured = []

    def refresh(self, tensor):
        self.refreshed += 1

    def capture(self, calls, count):
        self.captured.append(count)
        return super().capture(calls, count)

    def facts(self):
        return {"gpu": "a stand-in"}


class StandInWorld:
    """A stand-in for a local world on a GPU: its calls take the tensors of all ranks."""

    def __init__(self, n, device, algorithms):
        assert device == "cuda:0"
        self.n, self.algorithms, self.closed = n, algorithms, False

    def all_reduce(self, tensors, op, algorithm):
        self.algorithms.append(algorithm)
        total = _FOLDS[op](torch.stack(tensors), dim=0)
        for tensor in tensors:
            tensor.copy_(total)

    def reduce_scatter_tensor(self, outputs, inputs, op, algorithm):
        self.algorithms.append(algorithm)
        total = _FOLDS[op](torch.stack(inputs), dim=0).chunk(self.n)
        for output, chunk in zip(outputs, total, strict=True):
            output.copy_(chunk)

    def all_gather_into_tensor(self, outputs, inputs, algorithm):
        self.algorithms.append(algorithm)
        whole = torch.cat(inputs)
        for output in outputs:
            output.copy_(whole)

    def close(self):
        self.closed = True
