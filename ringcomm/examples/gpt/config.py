"""The configuration of a training run: plain values that the starting process hands to its ranks.

Free of torch, so that a wrong option is reported at once, by one process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ringcomm.errors import ArgumentError

ENGINES = ("zero", "ddp", "fsdp2")
BACKENDS = ("ringcomm", "gloo")
STAGES = (0, 1, 2, 3)
DTYPES = ("fp32", "bf16", "fp16")
DEVICES = ("cpu", "cuda")
# Of --resume.
FROM_LATEST, FROM_ANY = "latest", "auto"
DEFAULT_STAGE, LARGEST_STAGE = 2, 3
DEFAULT_LOSS_SCALE = 2.0**16
LARGEST_LOSS_SCALE = 2.0**32


def require_positive(what: str, **values: int) -> None:
    """Raise ArgumentError naming the first of ``values`` that is below 1."""
    for name, value in values.items():
        if value < 1:
            raise ArgumentError(f"{what}: {name} must be at least 1, got {value}")


@dataclass(frozen=True)
class ModelConfig:
    """Size of the GPT; ``context`` is in bytes (one token is one byte)."""

    width: int
    depth: int
    heads: int
    context: int
    tied: bool = False

    def __post_init__(self) -> None:
        require_positive(
            "model", width=self.width, depth=self.depth, heads=self.heads, context=self.context
        )
        if self.width % (2 * self.heads):
            raise ArgumentError(
                f"model: width must be a multiple of 2 x heads (= {2 * self.heads}), as rotary "
                f"positions turn pairs of a head's channels; got width {self.width}"
            )


@dataclass(frozen=True)
class EngineConfig:
    """The engine that shares the work of a step among the ranks.

    Attributes:
        name: "zero" (ringcomm.zero and ringcomm.optim.AdamW), "ddp" (DistributedDataParallel) or
            "fsdp2" (fully_shard), these two with torch's fused AdamW.
        stage: of "zero": 0 to 3, None is 2.
        backend: what moves the data; "gloo" under "ddp" and "fsdp2" alone.
        dtype: of parameters and gradients; 16 bits under "zero" alone.
        loss_scale: of "fp16", at the beginning; None is 65536.
        device: "cpu" or "cuda", where rank r has GPU r.
        checkpoint_activations: compute each layer again in backward instead of keeping what it
            computed in forward.
        params: of "zero" at stage 3, over nodes: as in ``ZeroOptions``; None is its default.
        state: of "zero", over nodes: the same.
        state_on: of "zero": a folder on a disk, where the optimizer's state lies; None is memory.
        state_resident_mib: how much of a rank's state stays in memory, in 2^20 bytes; None is 0.
        state_buffer_mib: a rank's buffers for what is on its way; None is 64.
        params_on: of "zero" at stage 3: a folder on a disk, where parameters lie while they are not
            gathered; None is memory.
        params_resident_mib: as of the state, for parameters.
        params_buffer_mib: the same.
    """

    name: str = "zero"
    stage: int | None = None
    backend: str = "ringcomm"
    dtype: str = "fp32"
    loss_scale: float | None = None
    device: str = "cpu"
    checkpoint_activations: bool = False
    params: str | None = None
    state: str | None = None
    state_on: str | None = None
    state_resident_mib: int | None = None
    state_buffer_mib: int | None = None
    params_on: str | None = None
    params_resident_mib: int | None = None
    params_buffer_mib: int | None = None

    def __post_init__(self) -> None:
        for what in ("state", "params"):
            self._check_on(what)
        if self.name != "zero":
            self._refuse_what_zero_alone_has()
        elif self.backend != "ringcomm":
            raise ArgumentError(
                f"--backend {self.backend}: --engine zero runs on ringcomm alone; take --engine "
                "ddp or fsdp2"
            )
        if self.device != "cpu" and self.backend != "ringcomm":
            raise ArgumentError(
                f"--device {self.device}: expected --backend ringcomm, got {self.backend}; drop one"
            )
        if self.loss_scale is None:
            return
        if self.dtype != "fp16":
            raise ArgumentError(
                f"--loss-scale: {self.dtype} gradients need no scale; take --dtype fp16, or drop it"
            )
        if not 1 <= self.loss_scale <= LARGEST_LOSS_SCALE:
            raise ArgumentError(
                f"--loss-scale: expected 1 to 2^32 = {LARGEST_LOSS_SCALE:.0f}, got "
                f"{self.loss_scale:g}"
            )

    def _check_on(self, what: str) -> None:
        folder = getattr(self, f"{what}_on")
        for option, least in ((f"{what}_resident_mib", 0), (f"{what}_buffer_mib", 1)):
            value, name = getattr(self, option), option.replace("_", "-")
            if value is None:
                continue
            if folder is None:
                raise ArgumentError(f"--{name}: expected --{what}-on PATH beside it")
            if value < least:
                raise ArgumentError(f"--{name} must be at least {least}, got {value}")
        if folder is None:
            return
        if self.device != "cpu":
            raise ArgumentError(
                f"--{what}-on: expected --device cpu, whose {what} can stream to a disk, got "
                f"{self.device}; drop one"
            )
        if what == "params" and self.name == "zero" and self.zero_stage != LARGEST_STAGE:
            raise ArgumentError(
                f"--params-on: expected --stage {LARGEST_STAGE}, got {self.zero_stage}, where each "
                "rank has all parameters in memory"
            )

    def _refuse_what_zero_alone_has(self) -> None:
        if self.stage is not None:
            raise ArgumentError(
                f"--stage {self.stage}: --engine {self.name} has no stages; drop --stage, or take "
                "--engine zero"
            )
        for option in ("params", "state"):
            if getattr(self, option) is not None:
                raise ArgumentError(
                    f"--shard-{option}: --engine {self.name} does not have the choice; drop it, or "
                    "take --engine zero"
                )
        for what in ("state", "params"):
            if getattr(self, f"{what}_on") is not None:
                raise ArgumentError(
                    f"--{what}-on: --engine {self.name} keeps its {what} in memory; drop it, or "
                    "take --engine zero"
                )
        if self.dtype != "fp32":
            raise ArgumentError(
                f"--dtype {self.dtype}: --engine {self.name} trains in fp32 here; take --engine "
                "zero"
            )

    @property
    def zero_stage(self) -> int:
        """The stage of "zero"."""
        return DEFAULT_STAGE if self.stage is None else self.stage

    def __str__(self) -> str:
        if self.name == "zero":
            return f"zero, stage {self.zero_stage}, {self.dtype}"
        return f"{self.name}, {self.dtype}"


@dataclass(frozen=True)
class TrainConfig:
    """A data-parallel training run.

    Attributes:
        model: its size.
        batch: sequences of a step, of all ranks and micro-batches together.
        steps: of the optimizer.
        learning_rate: the peak.
        seed: of weights and batches.
        accum: micro-batches of a step.
        clip: the largest norm of the gradient; None leaves it as it is.
    """

    model: ModelConfig
    batch: int
    steps: int
    learning_rate: float
    seed: int
    accum: int = 1
    clip: float | None = None

    def __post_init__(self) -> None:
        require_positive("training", batch=self.batch, steps=self.steps, accum=self.accum)
        if not 0 < self.learning_rate < float("inf"):
            raise ArgumentError(
                f"training: the learning rate must be above 0: {self.learning_rate}"
            )
        if not 0 <= self.seed < 1 << 31:
            raise ArgumentError(f"training: the seed must be in 0 .. 2^31 - 1, got {self.seed}")
        if self.clip is not None and not 0 < self.clip < float("inf"):
            raise ArgumentError(f"training: --clip must be a norm above 0, got {self.clip}")

    def micro_sequences(self, world_size: int) -> int:
        """Sequences of a micro-batch on one rank; ArgumentError unless they divide evenly."""
        if self.batch % (world_size * self.accum):
            pieces = f"{world_size} ranks"
            if self.accum > 1:
                pieces += f" x {self.accum} micro-batches"
            raise ArgumentError(
                f"training: a batch of {self.batch} sequences does not divide among {pieces}; "
                f"choose --batch as a multiple of {world_size * self.accum}"
            )
        return self.batch // (world_size * self.accum)

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> TrainConfig:
        """Restores what ``dataclasses.asdict`` made plain."""
        return cls(**{**values, "model": ModelConfig(**values["model"])})
