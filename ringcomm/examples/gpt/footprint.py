"""What a rank of a run takes for itself: memory, and what state and parameters on a disk move."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from ringcomm.errors import UnsupportedError
from ringcomm.memory import Disk, heap_stats
from ringcomm.memory.scratch import ScratchFile
from ringcomm.zero import ZeroOptions
from ringcomm.zero.estimate import BytesPerElement, model_state, working_buffers
from ringcomm.zero.estimate_model import ModelElems

MB = 1e6
STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class MemoryMeter:
    """Reads what this process holds.

    On the CPU that is its anonymous memory (RssAnon in proc_pid_status(5): tensors, activations,
    Python itself) and what is in use of its heap. The resident set (VmRSS) would be no measure: of
    shared memory it counts all that the process has touched, so the peers' heaps, too. On a GPU it
    is what torch has allocated there and what is in use of the heap there.

    Attributes:
        device: whose memory.
        has_heap: whether anything lies in ringcomm's heap.
        trims: on the CPU: first hand what the allocator keeps for later back to the system, so that
            what is counted is in use; takes milliseconds.
    """

    device: torch.device
    has_heap: bool
    trims: bool = False

    def held_bytes(self) -> int:
        """Bytes that this rank holds now.

        Raises:
            UnsupportedError: the system does not say.
        """
        on_host = self.device.type == "cpu"
        heap_bytes = 0
        if self.has_heap:
            heap_bytes = heap_stats(None if on_host else self.device)["used_bytes"]
        if not on_host:
            return heap_bytes + torch.cuda.memory_allocated(self.device)
        if self.trims:
            ctypes.CDLL(None).malloc_trim(0)
        return heap_bytes + _anonymous_bytes()


def load_first_use() -> None:
    """Makes torch load what its first backward and optimizer load, which is no model's memory."""
    param = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([param], fused=True)
    param.sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def _anonymous_bytes() -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])
    raise UnsupportedError(f"memory: expected a line RssAnon in {STATUS}, which Linux 4.5 has")


@dataclass(frozen=True)
class ClosedForm:
    """The bytes that a rank takes for the model, as ``ringcomm estimate`` says.

    Attributes:
        state: parameters, gradients and the optimizer's state.
        buffers: gradients on their way, as far as they are there when memory is read, between
            backward and the optimizer's step: those that stage 0 gathers come later, and parameters
            that stage 3 has gathered are gone.
    """

    state: int
    buffers: int

    def __str__(self) -> str:
        return (
            f"{self.state / MB:,.1f} MB of model state, {self.buffers / MB:,.1f} MB of buffers for "
            "gradients"
        )

    @classmethod
    def of(
        cls,
        model: nn.Module,
        stage: int,
        world_size: int,
        dtype: torch.dtype,
        two_passes: bool,
        tier: Disk | None = None,
        params_tier: Disk | None = None,
    ) -> ClosedForm:
        """Makes that of a model that is not sharded yet.

        Args:
            model: with all its parameters.
            stage: of ringcomm.zero.
            world_size: ranks.
            dtype: of parameters and gradients.
            two_passes: whether steps are clipped or scaled.
            tier: where the optimizer's state lies, as in ``AdamWOptions``.
            params_tier: where parameters lie, as in ``ZeroOptions``.
        """
        elems, each = ModelElems.of_module(model), BytesPerElement.of(dtype)
        state = model_state(elems, stage, world_size, each, tier, params_tier)
        buffers = working_buffers(elems, stage, world_size, each, ZeroOptions(), two_passes, tier)
        travelling = buffers.buckets if stage >= 2 else 0
        return cls(state.total, travelling + buffers.grad_shard)


@dataclass(frozen=True)
class DiskUse:
    """The bytes that a rank's steps moved between memory and the disk.

    Attributes:
        file_bytes: of its files.
        steps: that were counted.
        read_bytes: of them together.
        written_bytes: the same.
        reading_s: seconds in which at least one read of a file was under way, of all files.
        writing_s: the same of writes.
    """

    file_bytes: int
    steps: int
    read_bytes: int
    written_bytes: int
    reading_s: float
    writing_s: float

    @property
    def rates(self) -> str:
        """Says for the progress bar how much a step reads and writes, and how fast."""
        if not self.steps:
            return "disk -"
        both = (self.read_bytes, self.reading_s), (self.written_bytes, self.writing_s)
        moved = "+".join(f"{size / self.steps / MB:,.1f}" for size, _ in both)
        speeds = "+".join(f"{size / MB / s if s else 0.0:,.0f}" for size, s in both)
        return f"disk {moved} MB/step, {speeds} MB/s"

    def __str__(self) -> str:
        """The same in words."""
        if not self.steps:
            return f"{self.file_bytes / MB:,.1f} MB; too few steps to say what one moves"
        words = []
        for what, size, s in (
            ("reads", self.read_bytes, self.reading_s),
            ("writes", self.written_bytes, self.writing_s),
        ):
            speed = f" at {size / MB / s:,.0f} MB/s" if s else ""
            words.append(f"{what} {size / self.steps / MB:,.1f} MB{speed}")
        return f"{self.file_bytes / MB:,.1f} MB; a step {' and '.join(words)}"


class DiskMeter:
    """Counts what steps move, from one look between backward and the optimizer's step to the next.

    By then what the step before has left to move is over. The first step moves less than others,
    and is left out, as is a step around which something else reads the state, as a save does.
    """

    def __init__(self) -> None:
        self._before: DiskUse | None = None
        self._is_left_out = False
        self.use = DiskUse(0, 0, 0, 0, 0.0, 0.0)

    def look(self, scratches: Sequence[ScratchFile]) -> None:
        """Counts the step since the last look."""
        now = DiskUse(
            sum(each.size_bytes for each in scratches),
            1,
            sum(each.bytes_read for each in scratches),
            sum(each.bytes_written for each in scratches),
            sum(each.reading_s for each in scratches),
            sum(each.writing_s for each in scratches),
        )
        before, seen = self._before, self.use
        self._before = now
        if before is None or self._is_left_out:
            self._is_left_out = False
            return
        self.use = DiskUse(
            now.file_bytes,
            seen.steps + 1,
            seen.read_bytes + now.read_bytes - before.read_bytes,
            seen.written_bytes + now.written_bytes - before.written_bytes,
            seen.reading_s + now.reading_s - before.reading_s,
            seen.writing_s + now.writing_s - before.writing_s,
        )

    def leave_out(self) -> None:
        """Does not count the step since the last look."""
        self._is_left_out = True


def gather_disk_use(own: DiskUse) -> list[DiskUse]:
    """Returns what every rank moved, by rank; collective, on the default group."""
    told = torch.tensor([*asdict(own).values()], dtype=torch.float64, device="cpu")
    gathered = [torch.empty_like(told) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, told)
    return [DiskUse(*map(int, each[:4]), *each[4:].tolist()) for each in gathered]
