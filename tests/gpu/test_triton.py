# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels on one GPU: several ranks in one launch, and mixed with CUDA kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ringcomm.algorithms import spelled
from tests.gpu.device import REAL, capture, synchronize
from tests.gpu.worlds import one_launch_world, ramp, to_device
from tests.support.covering import covering

pytest.importorskip("triton")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _world(ranks: int, kernels: str) -> Any:
    # Triton's interpreter cannot run a launch of several ranks, so on an emulated device the CUDA
    # kernels replace Triton's, with the same tensors.
    return one_launch_world(ranks, kernels=kernels if REAL else "native")


# An emulated device tests each world size and each algorithm once.
FORMS = [(2, "one_shot"), (4, "ring"), *([(2, "ring"), (4, "one_shot")] if REAL else [])]


@pytest.mark.parametrize(("ranks", "algorithm"), FORMS)
def test_all_ranks_in_one_launch(ranks, algorithm):
    with _world(ranks, "triton") as world:
        for turn, count in enumerate((1, 257, 70_001 if REAL else 7001, 1 << (20 if REAL else 14))):
            dtype, in_heap = DTYPES[turn % 3], turn % 2 == 0
            tensors = [to_device(ramp(count, r, dtype), in_heap) for r in range(ranks)]
            want = sum(ramp(count, r) for r in range(ranks)).to(dtype)
            world.all_reduce(tensors, algorithm=spelled(algorithm, "all_reduce"))
            wholes = [to_device(ramp(count * ranks, r, dtype), in_heap) for r in range(ranks)]
            outputs = [to_device(ramp(count, r, dtype), in_heap) for r in range(ranks)]
            world.reduce_scatter_tensor(outputs, wholes, algorithm=algorithm)
            total = sum(ramp(count * ranks, r) for r in range(ranks)).to(dtype).chunk(ranks)
            gathered = [to_device(ramp(count * ranks, r, dtype), in_heap) for r in range(ranks)]
            world.all_gather_into_tensor(gathered, outputs, algorithm=algorithm)
            synchronize()
            for r in range(ranks):
                assert torch.equal(tensors[r], want), (count, dtype, r)
                assert torch.equal(outputs[r], total[r]), (count, dtype, r)
                assert torch.equal(gathered[r], torch.cat(outputs)), (count, dtype, r)


@covering(strength=2 if REAL else 1, dtype=DTYPES, op=["SUM", "AVG"])
def test_direct_sums_have_the_bits_of_the_cuda_kernels(dtype, op):
    torch.manual_seed(0)
    count = 50_000 if REAL else 5_000
    made = [torch.randn(count) * 10.0 ** torch.randint(-3, 4, (count,)) for _ in range(3)]
    results = []
    for kernels in ("native", "triton"):
        with _world(3, kernels) as world:
            tensors = [to_device(each.to(dtype), False) for each in made]
            world.all_reduce(tensors, getattr(torch.distributed.ReduceOp, op), algorithm="two_shot")
            synchronize()
            results.append(tensors[0].cpu())
    assert torch.equal(*results)


def test_a_graph_replays_triton_kernels():
    with _world(2, "triton") as world:
        tensors = [to_device(ramp(5000, r), True) for r in range(2)]
        kept = [each.clone() for each in tensors]
        world.all_reduce(tensors)  # compiles and loads the kernel before the capture
        synchronize()
        with capture() as replay:
            world.all_reduce(tensors)
        for _ in range(100 if REAL else 10):
            for tensor, given in zip(tensors, kept, strict=True):
                tensor.copy_(given)
            replay()
        synchronize()
        for tensor in tensors:
            assert torch.equal(tensor, kept[0] + kept[1])
