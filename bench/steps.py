# SPDX-License-Identifier: Apache-2.0
"""Times the optimizer's step on the CPU, against torch, DeepSpeed and separate calls of its parts.

shard       one core's update of a shard: ringcomm, torch's fused AdamW, and DeepSpeed's CPUAdam if
            installed. In FP32, and with bfloat16 parameters and FP32 masters: torch casts the
            gradient, runs fused AdamW on the masters, and casts the result.
step        a whole data-parallel step of the ranks of one machine: ringcomm in one pass, in two
            passes and as separate kernels; and Gloo's all-reduce with torch's fused AdamW.

Gradients are where a training loop has them: in ringcomm's bucket, or in torch's ``p.grad``.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

import ringcomm

from . import run
from .launch import LaunchError, RankInfo, Wanted
from .options import option, subject
from .report import row_of
from .run import Bench, Run

Step = Callable[[], object]
SUBJECT = "ringcomm"
AdamWOptions = ringcomm.optim.AdamWOptions


class StepCase(NamedTuple):
    dtype: torch.dtype
    elems: int

    def leaf(self) -> torch.nn.Parameter:
        values = torch.randn(self.elems, generator=torch.Generator().manual_seed(1))
        param = torch.nn.Parameter(values.to(self.dtype))
        param.grad = values.mul(0.01).to(self.dtype)
        return param


def _ringcomm(
    case: StepCase, comm: ringcomm.Communicator | Literal["alone"], options: AdamWOptions
) -> Step:
    optimizer = ringcomm.optim.AdamW([case.leaf()], comm=comm, options=options)
    optimizer.step()  # creates the bucket; p.grad is a view of it afterwards
    return optimizer.step


def torch_fused(param: torch.nn.Parameter) -> Step:
    """Returns a step of torch's fused AdamW, on FP32 masters of a 16-bit parameter."""
    if param.dtype == torch.float32:
        return torch.optim.AdamW([param], fused=True).step
    master = torch.nn.Parameter(param.detach().float())
    master.grad = torch.empty_like(master)
    optimizer = torch.optim.AdamW([master], fused=True)

    def step() -> None:
        assert master.grad is not None and param.grad is not None
        master.grad.copy_(param.grad)
        optimizer.step()
        param.data.copy_(master.data)

    return step


def shard_systems(case: StepCase) -> dict[str, Step]:
    steps = {
        SUBJECT: _ringcomm(case, "alone", AdamWOptions(bucket_elems=case.elems)),
        "torch fused": torch_fused(case.leaf()),
    }
    if case.dtype == torch.float32:
        try:
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            steps["deepspeed cpu_adam"] = DeepSpeedCPUAdam([case.leaf()]).step
        except Exception as error:
            # DeepSpeed is not installed, or its extension does not build on this machine.
            print(f"# without DeepSpeed's CPUAdam: {type(error).__name__}", flush=True)
    return steps


def _separate(case: StepCase, comm: ringcomm.Communicator) -> Step:
    """Returns a step that calls ringcomm's reduce-scatter, update and all-gather separately."""
    chunk, source = case.elems // comm.world_size, case.leaf()
    assert source.grad is not None
    grads = ringcomm.empty(case.elems, dtype=case.dtype).copy_(source.grad)
    params = ringcomm.empty(case.elems, dtype=case.dtype).copy_(source.detach())
    own = torch.nn.Parameter(params.chunk(comm.world_size)[comm.rank])
    own.grad = torch.empty(chunk, dtype=case.dtype)
    options = AdamWOptions(bucket_elems=-(-chunk // 512) * 512)
    update = ringcomm.optim.AdamW([own], comm="alone", options=options)
    update.step()  # moves the shard into a bucket, from which parameters are gathered
    shard, grad = own.data, own.grad

    def step() -> None:
        comm.reduce_scatter_tensor(grad, grads, op=dist.ReduceOp.AVG)
        update.step()
        comm.all_gather_into_tensor(params, shard)

    return step


def _gloo(case: StepCase) -> Step:
    param = case.leaf()
    grad, update = param.grad, torch_fused(param)

    def step() -> None:
        assert grad is not None
        dist.all_reduce(grad)
        grad.div_(dist.get_world_size())
        update()

    return step


def step_systems(case: StepCase, comm: ringcomm.Communicator) -> dict[str, Step]:
    of = partial(AdamWOptions, bucket_elems=case.elems)
    return {
        SUBJECT: _ringcomm(case, comm, of()),
        "two passes": _ringcomm(case, comm, of(check_finite=True)),
        "ring": _ringcomm(case, comm, of(algorithm="ring")),
        "separate kernels": _separate(case, comm),
        "gloo + torch fused": _gloo(case),
    }


def measure(run: Run) -> None:
    asked = run.options
    comm = run.connect("gloo") if asked.what == "step" else None
    # A bucket has a multiple of 512 elements.
    elems = 512 * math.ceil((asked.millions or (64 if asked.what == "step" else 16)) * 2**11)
    names = asked.dtype or ("float32", "bfloat16")
    run.pacing.expect(len(names))
    for name in names:
        case = StepCase(getattr(torch, name), elems)
        systems = shard_systems(case) if comm is None else step_systems(case, comm)
        row = row_of(f"adamw_{asked.what}", f"{elems / 2**20:g} Mi", run.world, elems, case.dtype)
        run.compare(row, systems, SUBJECT)


def find_rank(asked: argparse.Namespace, wanted: Wanted) -> RankInfo | None:
    """Returns the rank for a shard's benchmark, which has only this process."""
    if asked.what == "shard" and asked.ranks not in (None, 1):
        raise LaunchError(f"--ranks {asked.ranks}: a shard has one rank")
    alone = RankInfo(0, 1, dist.HashStore())
    return alone if asked.what == "shard" else run.usual_rank(asked, wanted)


BENCH = Bench(
    "steps",
    __doc__,
    measure,
    (
        subject("shard", "step"),
        option("-m --millions", type=float, help="Mi parameters (default 16, step 64)"),
        option("-d --dtype", action="append", choices=("float32", "bfloat16")),
    ),
    find_rank=find_rank,
)
BENCH.run_as_main(__name__)
