# SPDX-License-Identifier: Apache-2.0
"""The benchmark runs that measure the figures of the goals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

WORLDS = (2, 8, 4)  # the most important first
_GPU = "--device cuda --tensors heap"
_SYSTEMS = "ringcomm:one_shot,serial,triton:one_shot,torch,copy"
# Ranks, and the multiprocessors that they use together; 0: all multiprocessors of the GPU.
_GRID = ((2, (0, 64, 32)), (8, (0, 64, 32)), (4, (0,)))
# A model of 85 M parameters; batches of 2,048 tokens (limited by the host) and of 16,384 tokens.
_MODEL = "--width 768 --depth 12 --heads 12 --batches 4,512 16,1024"


@dataclass(frozen=True)
class BenchRun:
    """One run of a benchmark, of at most ``limit_s`` seconds; an optional run may fail."""

    name: str
    limit_s: float
    words: str
    optional: bool = False
    runner: str = "ringcomm.bench"

    @property
    def command(self) -> list[str]:
        return f"-m {self.runner} {self.words}".split()


def plan(nccl_version: Sequence[int]) -> list[BenchRun]:
    """Plans the benchmarks, the most important first: a slow machine skips the last ones."""
    # Time both kinds of loops, Triton's kernels, torch and the copy, at all sizes. CUDA graphs
    # hide the host's cost of single calls, which grows with the number of ranks.
    how = f"{_GPU} --mode one-launch --graph --placement usual --peers {_SYSTEMS}"
    how += " -b 4K -e 256M -f 4 -r 9 -w 2"
    in_graphs = [
        BenchRun(f"in graphs, {n} ranks", 45.0, f"collectives {how} --ranks {n}") for n in WORLDS
    ]
    # Time small sizes in finer steps, also with LL, the algorithm for small messages.
    how = f"{_GPU} --mode one-launch --graph --ranks 2 --placement in -b 4K -e 32K -f 2 -r 15 -w 3"
    peers = "--peers ringcomm:one_shot,ringcomm:ll,torch"
    small = BenchRun("small, in graphs", 30.0, f"collectives all_reduce {how} {peers}")
    # Processes that share the GPU: NCCL supports this from 2.30 on; with an older NCCL a single run
    # shows the refusal. NCCL's kernels may wait for a rank whose process has no time slice.
    how = f"{_GPU} --mode processes-on-one-gpu --placement usual --peers nccl -b 4K -e 64M -f 16"
    how += " -r 5 -w 1 --turn-us 5000"
    shared = [
        BenchRun(f"processes, {n} ranks", 40.0, f"collectives {how} --ranks {n}", optional=True)
        for n in (sorted(WORLDS) if tuple(nccl_version) >= (2, 30) else [2])
    ]
    return [*in_graphs[:2], small, *in_graphs[2:], *shared]


def multicast_plan(gpus: int) -> list[BenchRun]:
    """Plans multicast in place and through windows, for ``gpus`` GPUs; none for a single GPU.

    Tensors of the heap are at equal offsets of all ranks' heaps, so calls on these tensors work in
    place. Calls on other tensors use the windows. The runs fail on GPUs without multicast.
    """
    if gpus < 2:
        return []
    how = "collectives --device cuda --mode gpu-per-rank --placement usual"
    how += f" --subject ringcomm:multicast --peers ringcomm:one_shot,nccl --ranks {min(gpus, 8)}"
    how += " -b 64K -e 256M -f 4 -r 9 -w 2"
    return [
        BenchRun(f"multicast {name}", 45.0, f"{how} --tensors {tensors}", optional=True)
        for name, tensors in (("in place", "heap"), ("through windows", "plain"))
    ]


def grid_plan() -> list[BenchRun]:
    """Plans large reductions and copies by kind of kernels and number of multiprocessors."""
    how = f"{_GPU} --mode one-launch --graph --placement usual --subject ringcomm:one_shot"
    how += " --peers sliced:one_shot,serial:one_shot,copy -b 64M -e 256M -f 4 -r 5 -w 1"
    return [
        BenchRun(
            f"{blocks or 'all'} multiprocessors, {ranks} ranks",
            25.0,
            f"collectives reduce_scatter all_gather {how} --ranks {ranks}"
            f" --channels {blocks // ranks}",
        )
        for ranks, grid in _GRID
        for blocks in grid
    ]


def calls_plan() -> list[BenchRun]:
    """Plans runs that measure the host's cost of single driver calls and collectives."""
    return [
        BenchRun("driver", 25.0, "device_calls --what driver --calls 500"),
        BenchRun("calls", 30.0, "device_calls --what calls"),
    ]


def optimizer_plan() -> list[BenchRun]:
    """Plans the runs of the optimizer's update and step."""
    steps = [BenchRun(f"step, {n} ranks", 25.0, f"device_steps step -m 256 -n {n}") for n in WORLDS]
    shard = BenchRun("shard", 25.0, "device_steps shard -m 256")
    return [shard, *steps]


def training_plan() -> list[BenchRun]:
    """Plans training steps of one rank: one process per system, which also times torch alone."""
    how = f"training --device cuda -n 1 {_MODEL} -r 7"
    in_graphs = "--graph"
    systems = {
        "stage-3": in_graphs,
        "fsdp2-on-nccl": "",
        **dict.fromkeys(("stage-2", "stage-1", "stage-0"), in_graphs),
        "ddp-on-nccl": "",
    }
    return [
        BenchRun(f"training, {name}", 40.0, f"{how} --system {name} {graph}".strip())
        for name, graph in systems.items()
    ]


# Options for the smallest complete run of each benchmark, with checks and written results. If an
# option is given twice, the last value counts.
_SMALL = {
    "collectives": "-b 4K -e 16K -r 2 -w 1",
    "device_calls": "--calls 2 -r 1",
    "device_steps": "-m 1 -r 1",
    "training": "--width 32 --depth 2 --heads 2 --batches 1,16 -r 1",
}


def rehearsed(run: BenchRun) -> BenchRun:
    """Returns the run with small sizes, and time enough for an emulated device."""
    words = f"{run.words} {_SMALL[run.words.split()[0]]}"
    if words.startswith("collectives") and "--graph" in words:
        # Graphs of an emulated device do not capture operations of torch.
        words = words.replace(",torch", "").replace(",copy", "")
    return replace(run, limit_s=120.0, words=words, runner="tests.gpu.rehearsed")
