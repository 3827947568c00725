"""What an estimate needs to know of a model: how many elements it has, and in which pieces."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ringcomm.errors import ArgumentError
from ringcomm.optim.layout import ParamSpec
from ringcomm.zero.options import Units
from ringcomm.zero.units import find_units


def require_at_least(what: str, least: int, **values: int) -> None:
    """Raise ArgumentError naming the first of ``values`` that is no integer from ``least`` up."""
    for name, value in values.items():
        if not isinstance(value, int) or value < least:
            raise ArgumentError(f"{what}: expected {name} of at least {least}, got {value!r}")


@dataclass(frozen=True)
class ModelElems:
    """Elements of a model's parameters, each parameter counted once.

    Attributes:
        trainable: of the parameters that have a gradient.
        frozen: of the others.
        largest: of the largest trainable parameter, which takes a bucket of its own if it is larger
            than a bucket; 0 where it is not known.
        units: of each unit that stage 3 gathers as one, frozen parameters included; empty where
            they are not known.
        root: of the parameters in no unit, which stage 3 keeps gathered while it computes.
    """

    trainable: int
    frozen: int = 0
    largest: int = 0
    units: tuple[int, ...] = ()
    root: int = 0

    def __post_init__(self) -> None:
        require_at_least(
            "model",
            0,
            trainable=self.trainable,
            frozen=self.frozen,
            largest=self.largest,
            root=self.root,
        )

    @property
    def total(self) -> int:
        return self.trainable + self.frozen

    @property
    def has_units(self) -> bool:
        """True if it is known what stage 3 gathers."""
        return bool(self.units) or self.root > 0

    @classmethod
    def of_module(cls, module: nn.Module, units: Units | None = None) -> ModelElems:
        """Counts a module, which may be on the meta device.

        A parameter that has several names is counted once. Buffers are not counted.

        Args:
            module: with parameters of float32, bfloat16 or float16.
            units: as in :class:`ringcomm.zero.options.ZeroOptions`.

        Raises:
            ArgumentError: a parameter is of another dtype, or has no shape yet (lazy modules), or
                ``units`` is of no use.
        """
        counted = [[_spec(*each) for each in u.params.items()] for u in find_units(module, units)]
        specs = [spec for part in counted for spec in part]
        trainable = [spec.elems for spec in specs if spec.trainable]
        root, *parts = [sum(spec.elems for spec in part) for part in counted]
        return cls(
            trainable=sum(trainable),
            frozen=sum(spec.elems for spec in specs if not spec.trainable),
            largest=max(trainable, default=0),
            units=tuple(elems for elems in parts if elems),
            root=root,
        )


def _spec(name: str, param: nn.Parameter) -> ParamSpec:
    if nn.parameter.is_lazy(param):
        raise ArgumentError(
            f"model: parameter {name} has no shape before the first forward; give the sizes, or "
            "count the module after a forward"
        )
    return ParamSpec.of(param, name=name)


@dataclass(frozen=True)
class Transformer:
    """The shape of a GPT-2: pre-norm decoder layers with biases, learned positions.

    Radford et al., "Language Models are Unsupervised Multitask Learners" (2019).

    Attributes:
        layers: decoder layers; attention with four width x width matrices, an MLP of 4 x width.
        width: channels of a token.
        heads: of the attention; width must be a multiple.
        context: tokens of a sequence.
        vocab: entries of the vocabulary.
        tied: whether the embedding's matrix is the output layer's, too.
    """

    layers: int
    width: int
    heads: int
    context: int
    vocab: int
    tied: bool = True

    def __post_init__(self) -> None:
        require_at_least(
            "transformer",
            1,
            layers=self.layers,
            width=self.width,
            heads=self.heads,
            context=self.context,
            vocab=self.vocab,
        )
        if self.width % self.heads:
            raise ArgumentError(
                f"transformer: expected a width that is a multiple of {self.heads} heads, got "
                f"{self.width}"
            )

    @property
    def layer_elems(self) -> int:
        """Parameters of a layer: 12 width^2 of matrices, 13 width of biases and two norms."""
        return 12 * self.width**2 + 13 * self.width

    @property
    def ends_elems(self) -> int:
        """Parameters outside the layers: embedding, positions, last norm, output layer."""
        matrices = 1 if self.tied else 2
        return (matrices * self.vocab + self.context + 2) * self.width

    @property
    def approximate_elems(self) -> int:
        """12 layers width^2, as in Rajbhandari et al., "ZeRO-Infinity" (SC'21), equation 1."""
        return 12 * self.layers * self.width**2

    @property
    def model(self) -> ModelElems:
        """All parameters, trained; each layer a unit."""
        return ModelElems(
            trainable=self.layers * self.layer_elems + self.ends_elems,
            largest=self.width * max(4 * self.width, self.vocab, self.context),
            units=(self.layer_elems,) * self.layers,
            root=self.ends_elems,
        )
