"""What a training run is: plain values that the starting process hands to its ranks.

Free of torch, so that a wrong option is reported at once, by one process.
"""

from __future__ import annotations

from dataclasses import dataclass

from ringcomm.errors import ArgumentError

BACKENDS = ("ringcomm", "gloo")


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
class TrainConfig:
    """A data-parallel training run. ``batch`` counts the sequences of a step on all ranks."""

    model: ModelConfig
    batch: int
    steps: int
    learning_rate: float
    seed: int

    def __post_init__(self) -> None:
        require_positive("training", batch=self.batch, steps=self.steps)
        if not 0 < self.learning_rate < float("inf"):
            raise ArgumentError(
                f"training: the learning rate must be above 0: {self.learning_rate}"
            )
        if not 0 <= self.seed < 1 << 31:
            raise ArgumentError(f"training: the seed must be in 0 .. 2^31 - 1, got {self.seed}")

    def sequences_per_rank(self, world_size: int) -> int:
        """Sequences that one rank computes in a step; ArgumentError unless they divide evenly."""
        if self.batch % world_size:
            raise ArgumentError(
                f"training: a batch of {self.batch} sequences does not divide among {world_size} "
                "ranks; choose --batch as a multiple of the ranks"
            )
        return self.batch // world_size
