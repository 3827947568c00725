"""The ways in which ranks share processors; every row of results is labelled with one."""

from __future__ import annotations

PROCESSES = "processes"
GPU_PER_RANK = "gpu-per-rank"
PROCESSES_ON_ONE_GPU = "processes-on-one-gpu"
ONE_LAUNCH = "one-launch"
AUTO = "auto"

DEVICE_MODES = (GPU_PER_RANK, PROCESSES_ON_ONE_GPU, ONE_LAUNCH)
# All ranks' tensors lie in one memory, so bytes moved compare with what one GPU can copy.
ONE_GPU_MODES = (PROCESSES_ON_ONE_GPU, ONE_LAUNCH)

MEANINGS = {
    PROCESSES: "a process per rank, on the CPU",
    GPU_PER_RANK: "a process and a GPU per rank",
    PROCESSES_ON_ONE_GPU: "a process per rank, all on one GPU, which runs them in time slices",
    ONE_LAUNCH: "all ranks in one process on one GPU, carried by one launch",
}


class ModeError(Exception):
    """The mode that was asked for cannot be had here; the text says what to do."""


def choose(asked: str, ranks: int, gpus: int, started_by: str | None) -> str:
    """The mode of a run of ``ranks`` ranks on CUDA where ``gpus`` GPUs are visible.

    "auto" takes a GPU per rank where there are enough; else one launch, or processes on one
    GPU where a launcher has started processes already.

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


def device_index(mode: str, rank: int) -> int:
    """The GPU of ``rank``, among the visible ones."""
    return rank if mode == GPU_PER_RANK else 0
