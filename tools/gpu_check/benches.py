"""The measurements that the goals speak of, as runs of the harness."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WORLDS = (2, 4, 8)
_DEVICE = ("--device", "cuda", "--tensors", "heap")


@dataclass(frozen=True)
class Bench:
    """One run of ``module``. ``limit_s`` bounds it; what is optional may fail to end."""

    name: str
    arguments: tuple[str, ...]
    limit_s: float
    optional: bool = False
    module: str = "ringcomm.bench.collectives"


def sweep(world: int) -> Bench:
    """Every algorithm, Triton's kernels, torch and the plain copy, all sizes, in one launch."""
    systems = ("--peers", "ringcomm:direct,ringcomm:ring,triton:direct,torch,copy")
    sizes = ("-b", "1M", "-e", "256M", "-f", "4", "-n", "9", "-w", "2")
    how = ("--mode", "one-launch", "--ranks", str(world), "--placement", "usual")
    return Bench(f"one launch, {world} ranks", (*_DEVICE, *how, *systems, *sizes), 45.0)


def small() -> Bench:
    """Latency of small all-reduces, as a graph replays them."""
    systems = ("--peers", "ringcomm:direct,ringcomm:packet,torch")
    sizes = ("-b", "4K", "-e", "32K", "-f", "2", "-n", "15", "-w", "3")
    how = ("--mode", "one-launch", "--ranks", "2", "--placement", "in", "--graph")
    return Bench("small, in graphs", ("all_reduce", *_DEVICE, *how, *systems, *sizes), 30.0)


def processes(world: int) -> Bench:
    """Processes that share the GPU, with NCCL where its version lets them.

    Optional: NCCL's kernels may wait for a rank whose process has no time slice.
    """
    sizes = ("-b", "4K", "-e", "64M", "-f", "16", "-n", "5", "-w", "1", "--turn-us", "5000")
    how = ("--mode", "processes-on-one-gpu", "--ranks", str(world), "--placement", "usual")
    arguments = (*_DEVICE, *how, "--peers", "nccl", *sizes)
    return Bench(f"processes on one GPU, {world} ranks", arguments, 40.0, optional=True)


def shard() -> Bench:
    """The optimizer's update alone, against torch's and a copy."""
    return _steps("adamw_shard", "shard", "-m", "256")


def step(world: int) -> Bench:
    """The optimizer's whole step, in all its forms."""
    return _steps(f"adamw_step, {world} ranks", "step", "-m", "256", "-n", str(world))


def _steps(name: str, *arguments: str) -> Bench:
    return Bench(name, arguments, 25.0, module="ringcomm.bench.device_steps")


def training(world: int) -> Bench:
    """A training step at each ZeRO stage, against torch without communication."""
    model = ("--width", "768", "--depth", "12", "--heads", "12")
    batch = ("--sequences", "4", "--context", "512")
    arguments = ("--device", "cuda", "-n", str(world), *model, *batch, "-r", "7")
    return Bench(f"training, {world} ranks", arguments, 30.0, module="ringcomm.bench.training")


def optimizer_plan() -> list[Bench]:
    """Plans as :func:`plan` does, for the optimizer and what trains with it."""
    most, *others = sorted(WORLDS, reverse=True)
    rest = [step(world) for world in others if world != 2]
    return [shard(), step(2), step(most), training(1), training(2), *rest]


def plan(nccl_version: Sequence[int]) -> list[Bench]:
    """Plans the benches in the order of their weight: a slow machine goes without the last ones."""
    most, *others = sorted(WORLDS, reverse=True)
    runs = [sweep(2), small(), sweep(most), *(sweep(world) for world in others if world != 2)]
    # Without NCCL beside them, one run of processes shows what there is to show.
    shared = WORLDS if tuple(nccl_version) >= (2, 30) else WORLDS[:1]
    return runs + [processes(world) for world in shared]
