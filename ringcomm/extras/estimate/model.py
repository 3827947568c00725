"""Sizes of a model and bytes of its activations.

Activations: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models"
(2022, arXiv:2205.05198), sections 4 and 5. s, b, h, a, v are context, micro-batch, width, heads and
vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from ringcomm.errors import ArgumentError
from ringcomm.memory import Disk
from ringcomm.optim.layout import ParamSpec
from ringcomm.zero.stages.options import Units
from ringcomm.zero.stages.units import find_units

CHECKPOINTING = ("none", "selective", "full")


def require_at_least(what: str, least: int, **values: int) -> None:
    """Raises ArgumentError for the first of ``values`` that is no integer from ``least`` up."""
    for name, value in values.items():
        if not isinstance(value, int) or value < least:
            raise ArgumentError(f"{what}: expected {name} of at least {least}, got {value!r}")


@dataclass(frozen=True)
class ModelElems:
    """Elements of a model's parameters, each parameter counted once.

    Attributes:
        trainable: elements with a gradient.
        frozen: other elements.
        largest: elements of the largest trainable parameter; 0 if unknown.
        units: elements of each unit that stage 3 gathers, frozen ones included; () if unknown.
        root: elements outside the units, which stage 3 keeps gathered while it computes.
    """

    trainable: int
    frozen: int = 0
    largest: int = 0
    units: tuple[int, ...] = ()
    root: int = 0

    def __post_init__(self) -> None:
        sizes = {name: value for name, value in vars(self).items() if name != "units"}
        require_at_least("model", 0, **sizes)

    @property
    def total(self) -> int:
        return self.trainable + self.frozen

    @property
    def has_units(self) -> bool:
        """True if the units of stage 3 are known."""
        return bool(self.units) or self.root > 0

    @classmethod
    def of_module(cls, module: nn.Module, units: Units | None = None) -> ModelElems:
        """Counts a module, which may be on the meta device. Buffers do not count.

        Args:
            module: has parameters of float32, bfloat16 or float16.
            units: as in :class:`ringcomm.zero.ZeroOptions`.

        Raises:
            ArgumentError: a parameter has another dtype or no shape yet, or ``units`` is invalid.
        """
        parts = [
            [_spec(*each) for each in unit.params.items()] for unit in find_units(module, units)
        ]
        specs = [spec for part in parts for spec in part]
        trainable = [spec.elems for spec in specs if spec.trainable]
        root, *sizes = [sum(spec.elems for spec in part) for part in parts]
        return cls(
            trainable=sum(trainable),
            frozen=sum(spec.elems for spec in specs if not spec.trainable),
            largest=max(trainable, default=0),
            units=tuple(size for size in sizes if size),
            root=root,
        )


def _spec(name: str, param: nn.Parameter) -> ParamSpec:
    if nn.parameter.is_lazy(param):
        raise ArgumentError(f"model: parameter {name} has no shape before the first forward")
    return ParamSpec.of(param, name=name)


class ActivationBytes(NamedTuple):
    """Bytes of a rank between forward and backward.

    Attributes:
        layers: tensors that the layers keep for the backward, or their checkpoints.
        recomputed: tensors that the backward computes again and holds at a time.
        ends: dropout mask of the embedding, inputs of last norm and output layer, FP32 logits.
        moved: bytes that the forward writes to a disk and the backward reads.
    """

    layers: int
    recomputed: int
    ends: int
    moved: int = 0

    def kept_on(self, disk: Disk, layer: int) -> ActivationBytes:
        """Returns the bytes within ``zero.activations_on(disk)``; ``layers`` includes the ends.

        Memory has buffers, resident tensors, and ``layer``, the bytes of one layer, or the ends.
        """
        kept = self.layers + self.ends
        at_work = max(self.ends, layer - self.recomputed)
        most = disk.buffer_bytes + disk.resident_bytes + at_work
        moved = max(0, kept - disk.resident_bytes)
        return ActivationBytes(min(kept, most), self.recomputed, 0, moved)


@dataclass(frozen=True)
class Transformer:
    """The sizes of a GPT-2: pre-norm decoder layers with biases, learned positions.

    Attributes:
        layers: layers of four width x width matrices and an MLP of 4 x width.
        width: channels of a token, a multiple of ``heads``.
        heads: attention heads.
        context: tokens of a sequence.
        vocab: entries of the vocabulary.
        tied: True if the output layer uses the matrix of the embedding.
    """

    layers: int
    width: int
    heads: int
    context: int
    vocab: int
    tied: bool = True

    def __post_init__(self) -> None:
        sizes = {name: value for name, value in vars(self).items() if name != "tied"}
        require_at_least("transformer", 1, **sizes)
        if self.width % self.heads:
            raise ArgumentError(
                f"transformer: expected a width that is a multiple of {self.heads} heads, got "
                f"{self.width}"
            )

    @property
    def model(self) -> ModelElems:
        """All parameters, trained; each layer is a unit."""
        layer = 12 * self.width**2 + 13 * self.width  # matrices; biases and two norms
        ends = ((1 if self.tied else 2) * self.vocab + self.context + 2) * self.width
        return ModelElems(
            trainable=self.layers * layer + ends,
            largest=self.width * max(4 * self.width, self.vocab, self.context),
            units=(layer,) * self.layers,
            root=ends,
        )

    def attention_core_bytes(self, micro_batch: int, elem_bytes: int = 2) -> int:
        """Returns softmax, mask and output of the attention's dropout: 5 a s^2 b in 16 bits."""
        return (2 * elem_bytes + 1) * self.heads * self.context**2 * micro_batch

    def layer_bytes(self, micro_batch: int, elem_bytes: int = 2) -> int:
        """Returns what a layer keeps for its backward: s b h (34 + 5 a s / h) in 16 bits."""
        plane = self.context * micro_batch * self.width
        core = self.attention_core_bytes(micro_batch, elem_bytes)
        return (16 * elem_bytes + 2) * plane + core

    def activations(
        self, micro_batch: int, checkpointing: str = "none", every: int = 1, elem_bytes: int = 2
    ) -> ActivationBytes:
        """Returns the activations of one rank.

        Args:
            micro_batch: sequences of a forward.
            checkpointing: "none"; "selective" keeps all but the attention's core; "full" keeps the
                input of every ``every``-th layer.
            every: layers between two checkpoints of "full".
            elem_bytes: bytes of an activation.

        Raises:
            ArgumentError: an argument is out of range.
        """
        if checkpointing not in CHECKPOINTING:
            known = ", ".join(CHECKPOINTING)
            raise ArgumentError(f"checkpointing: expected one of {known}, got {checkpointing!r}")
        sizes = {"micro_batch": micro_batch, "every": every, "elem_bytes": elem_bytes}
        require_at_least("activations", 1, **sizes)
        tokens = self.context * micro_batch
        plane = tokens * self.width
        core = self.attention_core_bytes(micro_batch, elem_bytes)
        layer = self.layer_bytes(micro_batch, elem_bytes)
        checkpoints = -(-self.layers // every) * elem_bytes * plane
        kept, again = {
            "none": (self.layers * layer, 0),
            "selective": (self.layers * (layer - core), core),
            "full": (checkpoints, min(every, self.layers) * layer),
        }[checkpointing]
        ends = (1 + 2 * elem_bytes) * plane + 4 * tokens * self.vocab
        return ActivationBytes(kept, again, ends)
