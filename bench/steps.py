"""The optimizer's step against torch's, DeepSpeed's and its own parts.

``python -m ringcomm.bench.steps`` runs it.

What is timed, each in one run and interleaved (see :mod:`.timing`):

shard       one core's update of a shard: ringcomm, torch's fused AdamW, DeepSpeed's CPUAdam where
            it is installed. FP32; and bfloat16 parameters with FP32 master copies, which torch does
            by casting the gradient, fused AdamW on the masters, and casting the result.
step        a whole step of data parallelism on the ranks of one machine: ringcomm in one pass, in
            two passes and as separate kernels; and Gloo's all-reduce with torch's fused AdamW.

Gradients lie where a training loop would have them: in ringcomm's bucket, in torch's ``p.grad``.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

import ringcomm

from . import provenance
from .board import Board
from .launch import placed, run_processes, started_by
from .timing import Clock, Entrant, Pace, Timing, host_elapsed_us, measure, ratios

Step = Callable[[], object]
SUBJECT = "ringcomm"


@dataclass(frozen=True)
class StepCase:
    """The subject of one table of results."""

    what: str  # "shard" or "step"
    dtype: torch.dtype
    elems: int

    def __str__(self) -> str:
        return f"{self.what} {str(self.dtype).removeprefix('torch.')} {self.elems / 2**20:g}Mi"


class HostClock:
    """Steps on the CPU are done when they return."""

    def elapsed_us(self, calls: object) -> float:
        return host_elapsed_us(calls)  # type: ignore[arg-type]

    def synchronize(self) -> None:
        pass


def _leaf(case: StepCase, seed: int) -> torch.nn.Parameter:
    values = torch.randn(case.elems, generator=torch.Generator().manual_seed(seed))
    param = torch.nn.Parameter(values.to(case.dtype))
    param.grad = values.mul(0.01).to(case.dtype)
    return param


def _ringcomm(
    case: StepCase,
    comm: ringcomm.Communicator | Literal["alone"],
    options: ringcomm.optim.AdamWOptions,
) -> Step:
    param = _leaf(case, 1)
    optimizer = ringcomm.optim.AdamW([param], comm=comm, options=options)
    optimizer.step()  # lays the bucket out; from here on p.grad is its view
    return optimizer.step


def _torch_fused(case: StepCase) -> Step:
    if case.dtype == torch.float32:
        return torch.optim.AdamW([_leaf(case, 1)], fused=True).step
    param = _leaf(case, 1)
    master = torch.nn.Parameter(param.detach().float())
    master.grad = torch.empty_like(master)
    optimizer = torch.optim.AdamW([master], fused=True)

    def step() -> None:
        assert master.grad is not None and param.grad is not None
        master.grad.copy_(param.grad)
        optimizer.step()
        param.data.copy_(master.data)

    return step


def _deepspeed(case: StepCase) -> Step | None:
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except Exception:
        # Not installed, or its extension does not build here: it is left out, and the table shows.
        return None
    step: Step = DeepSpeedCPUAdam([_leaf(case, 1)]).step
    return step


def _shard_entrants(case: StepCase, _: ringcomm.Communicator | None) -> dict[str, Step]:
    steps = {
        SUBJECT: _ringcomm(case, "alone", ringcomm.optim.AdamWOptions(bucket_elems=case.elems)),
        "torch fused": _torch_fused(case),
    }
    other = _deepspeed(case) if case.dtype == torch.float32 else None
    return steps if other is None else {**steps, "deepspeed cpu_adam": other}


def _separate(case: StepCase, comm: ringcomm.Communicator) -> Step:
    """Reduce-scatter, update and all-gather as three calls of this library."""
    world, rank = comm.world_size, comm.rank
    chunk = case.elems // world
    grads = ringcomm.empty(case.elems, dtype=case.dtype)
    params = ringcomm.empty(case.elems, dtype=case.dtype)
    source = _leaf(case, 1)
    assert source.grad is not None
    grads.copy_(source.grad)
    params.copy_(source.detach())
    own = torch.nn.Parameter(params[rank * chunk : (rank + 1) * chunk])
    reduced = torch.empty(chunk, dtype=case.dtype)
    own.grad = reduced
    options = ringcomm.optim.AdamWOptions(bucket_elems=-(-chunk // 512) * 512)
    update = ringcomm.optim.AdamW([own], comm="alone", options=options)
    update.step()  # its bucket takes the shard over: parameters are gathered from there
    shard, grad = own.data, own.grad

    def step() -> None:
        assert grad is not None
        comm.reduce_scatter_tensor(grad, grads, op=dist.ReduceOp.AVG)
        update.step()
        comm.all_gather_into_tensor(params, shard)

    return step


def _gloo(case: StepCase) -> Step:
    param, update = _leaf(case, 1), _torch_fused(case)
    grad, world = param.grad, dist.get_world_size()

    def step() -> None:
        assert grad is not None
        dist.all_reduce(grad)
        grad.div_(world)
        update()

    return step


def _step_entrants(case: StepCase, comm: ringcomm.Communicator | None) -> dict[str, Step]:
    assert comm is not None
    options = ringcomm.optim.AdamWOptions(bucket_elems=case.elems)
    two = ringcomm.optim.AdamWOptions(bucket_elems=case.elems, check_finite=True)
    ring = ringcomm.optim.AdamWOptions(bucket_elems=case.elems, algorithm="ring")
    return {
        SUBJECT: _ringcomm(case, comm, options),
        "two passes": _ringcomm(case, comm, two),
        "ring": _ringcomm(case, comm, ring),
        "separate kernels": _separate(case, comm),
        "gloo + torch fused": _gloo(case),
    }


_ENTRANTS = {"shard": _shard_entrants, "step": _step_entrants}


def _rows(case: StepCase, world: int, timings: Mapping[str, Timing]) -> list[dict[str, str]]:
    subject = timings[SUBJECT]
    rows = []
    for name, timing in timings.items():
        shares = sorted(ratios(timing, subject))
        rows.append(
            {
                "case": str(case),
                "ranks": str(world),
                "system": name,
                "median_ms": f"{timing.median_us / 1e3:.3f}",
                "best_ms": f"{timing.best_us / 1e3:.3f}",
                "ratio": f"{statistics.median(shares):.3f}",
                "ratio_low": f"{shares[0]:.3f}",
                "ratio_high": f"{shares[-1]:.3f}",
                "rounds": str(len(timing.times_us)),
            }
        )
    return rows


def _run_rank(cases: list[StepCase], pace: Pace, output: Path | None, arguments: list[str]) -> None:
    place = placed()
    rank, world, store = place.rank, place.world, place.store
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("gloo", store), rank=rank, world_size=world
    )
    comm = ringcomm.Communicator.from_store(dist.PrefixStore("ringcomm", store), rank, world)
    board = Board(store, rank, world)
    clock: Clock = HostClock()
    rows: list[dict[str, str]] = []
    for case in cases:
        steps = _ENTRANTS[case.what](case, comm)
        entrants = {name: Entrant([step]) for name, step in steps.items()}
        rows += _rows(case, world, measure(board, entrants, pace, clock))
        del steps, entrants
    board.barrier()
    if rank == 0:
        _write(rows, output, arguments)
    comm.close()
    dist.destroy_process_group()


def _write(rows: list[dict[str, str]], output: Path | None, arguments: list[str]) -> None:
    facts = provenance.collect(arguments, {SUBJECT: ringcomm.__version__}, {})
    facts["command"] = " ".join(["python -m ringcomm.bench.steps", *arguments])
    for row in rows:
        print("  ".join(f"{value:>12}" for value in row.values()))
    if output is None:
        return
    with output.open("w", newline="", encoding="utf-8") as file:
        file.writelines(f"# {key}: {value}\n" for key, value in facts.items())
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m ringcomm.bench.steps", description=__doc__)
    parser.add_argument("what", choices=("shard", "step"))
    parser.add_argument("-n", "--ranks", type=int, default=2, help="of a step (default 2)")
    parser.add_argument("-m", "--millions", type=float, help="Mi parameters (default 16, step 64)")
    parser.add_argument("-d", "--dtype", action="append", choices=("float32", "bfloat16"))
    parser.add_argument("-r", "--rounds", type=int, default=9)
    parser.add_argument("-o", "--output", type=Path, help="a CSV file")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    asked = _parse(arguments)
    world = asked.ranks if asked.what == "step" else 1
    elems = int((asked.millions or (64 if asked.what == "step" else 16)) * 2**20)
    dtypes = [getattr(torch, name) for name in asked.dtype or ("float32", "bfloat16")]
    if started_by(os.environ) == "harness":
        cases = [StepCase(asked.what, dtype, elems) for dtype in dtypes]
        pace = Pace(rounds=asked.rounds, warmup_rounds=2, batch=1, turn_us=0)
        kept = [word for word in arguments if word not in ("-o", "--output", str(asked.output))]
        _run_rank(cases, pace, asked.output, kept)
        return 0
    return run_processes("ringcomm.bench.steps", arguments, world)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
