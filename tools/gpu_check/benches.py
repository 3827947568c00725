"""The measurements that the goals speak of, as runs of the benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

WORLDS = (2, 8, 4)  # in the order of their weight
_GPU = "--device cuda --tensors heap"
_SYSTEMS = "ringcomm:one_shot,ringcomm:ring,triton:one_shot,torch,copy"
_MODEL = "--width 768 --depth 12 --heads 12 --sequences 4 --context 512"


@dataclass(frozen=True)
class BenchRun:
    """One run of a bench. ``limit_s`` bounds it; an optional one may fail."""

    name: str
    limit_s: float
    words: str
    optional: bool = False
    runner: str = "ringcomm.bench"

    @property
    def command(self) -> list[str]:
        return f"-m {self.runner} {self.words}".split()


def plan(nccl_version: Sequence[int]) -> list[BenchRun]:
    """Plans the benches in the order of their weight: a slow machine goes without the last ones."""
    # Every algorithm, Triton's kernels, torch and the copy, all sizes.
    how = f"{_GPU} --mode one-launch --placement usual --peers {_SYSTEMS} -b 1M -e 256M -f 4"
    first, *others = (
        BenchRun(f"one launch, {n} ranks", 45.0, f"collectives {how} -r 9 -w 2 --ranks {n}")
        for n in WORLDS
    )
    # Latency, as a graph replays the calls.
    how = f"{_GPU} --mode one-launch --ranks 2 --placement in -b 4K -e 32K -f 2 -r 15 -w 3"
    peers = "--peers ringcomm:one_shot,ringcomm:ll,torch"
    small = BenchRun("small, in graphs", 30.0, f"collectives all_reduce {how} --graph {peers}")
    # Processes that share the GPU, with NCCL where its version lets them; else one run shows what
    # there is to show. NCCL's kernels may wait for a rank whose process has no time slice.
    how = f"{_GPU} --mode processes-on-one-gpu --placement usual --peers nccl -b 4K -e 64M -f 16"
    how += " -r 5 -w 1 --turn-us 5000"
    shared = [
        BenchRun(f"processes, {n} ranks", 40.0, f"collectives {how} --ranks {n}", optional=True)
        for n in (sorted(WORLDS) if tuple(nccl_version) >= (2, 30) else [2])
    ]
    return [first, small, *others, *shared]


def optimizer_plan() -> list[BenchRun]:
    """Plans as :func:`plan` does, for the optimizer and what trains with it."""
    steps = [BenchRun(f"step, {n} ranks", 25.0, f"device_steps step -m 256 -n {n}") for n in WORLDS]
    training = [
        BenchRun(f"training, {n} ranks", 30.0, f"training --device cuda -n {n} {_MODEL} -r 7")
        for n in (1, 2)
    ]
    shard = BenchRun("shard", 25.0, "device_steps shard -m 256")
    return [shard, *steps[:2], *training, *steps[2:]]


# The smallest runs of every bench that show that it ends, checks its results and writes them. If an
# option is given twice, the last value counts.
_SMALL = {
    "collectives": "-b 4K -e 16K -r 2 -w 1",
    "device_steps": "-m 1 -r 1",
    "training": "--width 32 --depth 2 --heads 2 --sequences 1 --context 16 -r 1",
}


def rehearsed(run: BenchRun) -> BenchRun:
    """Returns the run at small sizes, on an emulated device, which needs more time than a GPU."""
    words = f"{run.words} {_SMALL[run.words.split()[0]]}"
    if "--graph" in words:  # an emulated device records none of torch's operations
        words = words.replace(",torch", "")
    return replace(run, limit_s=120.0, words=words, runner="tests.gpu.rehearsed")
