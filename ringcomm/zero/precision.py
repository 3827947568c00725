"""Mixed precision: which dtype the parts of training have, presets, and modules that stay FP32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import nn

from ringcomm.errors import ArgumentError
from ringcomm.module_names import find_modules, named_modules, plain_name, some
from ringcomm.optim.options import AdamWOptions

#: Dtypes that trained parameters can have.
PARAM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Precision:
    """Dtypes of mixed precision; None keeps the dtypes as they are.

    Attributes:
        param: dtype of parameters and their gradients. The optimizer keeps FP32 masters of the
            values before the cast, unless ``master`` says otherwise.
        reduce: dtype of the reduced gradient. Sums are always taken in FP32. None keeps them in
            FP32, and ``param``'s 16-bit dtype rounds them once, in half the memory.
        buffer: dtype of floating-point buffers.
        output: dtype of floating-point tensors that the module returns, alone or in tuples, lists
            and dicts; tensors inside dataclasses and other objects stay as they are.
        cast_inputs: cast floating-point arguments of the module, alone or in such containers, to
            ``param``.
        keep_fp32: names of modules whose parameters and buffers stay FP32, and those of the
            modules inside them; a ``*`` stands for any characters of one part of a name
            (``"blocks.*.norm"``). Their floating-point arguments are cast to FP32, and what they
            return to ``param``, unless they have an attribute ``returns_fp32`` that is true, as
            routers of :class:`ringcomm.moe.MoE` have.
        master: the optimizer's ``AdamWOptions.master``; None leaves it to the optimizer.
        rounding: the optimizer's ``AdamWOptions.rounding``; None leaves it to the optimizer.
        scaled: the loss must be scaled: a step without ``loss_scaler=``, and without a
            ``GradScaler``, raises.
    """

    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    buffer: torch.dtype | None = None
    output: torch.dtype | None = None
    cast_inputs: bool = True
    keep_fp32: tuple[str, ...] = ()
    master: str | None = None
    rounding: str | None = None
    scaled: bool = False

    def __post_init__(self) -> None:
        for name in ("param", "reduce", "buffer", "output"):
            if getattr(self, name) not in (None, *PARAM_DTYPES):
                raise ArgumentError(
                    f"precision: {name}: expected float32, bfloat16, float16 or None, got "
                    f"{getattr(self, name)!r}"
                )
        if self.reduce not in (None, torch.float32, self.param):
            raise ArgumentError(
                f"precision: reduce: expected float32 or the parameters' {self.param}, got "
                f"{self.reduce}"
            )
        if type(self.scaled) is not bool:
            raise ArgumentError(f"precision: scaled: expected True or False, got {self.scaled!r}")
        self._check_kept()
        self._check_optimizer()

    def _check_kept(self) -> None:
        names = self.keep_fp32
        if not isinstance(names, tuple) or not all(isinstance(each, str) for each in names):
            raise ArgumentError(
                f"precision: keep_fp32: expected a tuple of names of modules, got {names!r}"
            )
        if names and self.param is None:
            raise ArgumentError(
                "precision: keep_fp32: expected param= with it, the dtype of the other modules"
            )

    def _check_optimizer(self) -> None:
        chosen = AdamWOptions(**self.optimizer_defaults)
        if chosen.master == "remainder" and self.param is torch.float16:
            raise ArgumentError(
                'precision: master: "remainder" is the lower half of bfloat16 parameters, got '
                'param=torch.float16; pass "fp32"'
            )

    @property
    def optimizer_defaults(self) -> dict[str, Any]:
        """The fields of ``AdamWOptions`` that are decided here."""
        chosen = {"master": self.master, "rounding": self.rounding}
        return {name: value for name, value in chosen.items() if value is not None}

    def reduced_dtype(self, stored: torch.dtype) -> torch.dtype:
        """Returns the dtype in which reduced gradients of parameters of a dtype are kept."""
        return self.reduce if self.reduce is not None and stored is self.param else torch.float32

    @classmethod
    def preset(cls, name: str, *, keep_fp32: tuple[str, ...] = ()) -> Precision:
        """Returns the choices that go by a name; ``docs/precision.md`` has the table.

        Args:
            name: a key of :data:`PRESETS`: "fp32", "bf16-mixed", "bf16-remainder", "bf16-pure-sr"
                or "fp16-scaled".
            keep_fp32: as the attribute.

        Raises:
            ArgumentError: there is no such preset, or ``keep_fp32`` is no tuple of names.
        """
        if name not in PRESETS:
            known = ", ".join(map(repr, PRESETS))
            raise ArgumentError(f"precision: preset: expected one of {known}, got {name!r}")
        return replace(PRESETS[name], keep_fp32=keep_fp32)

    def describe(self) -> dict[str, str]:
        """Returns the choices as plain JSON types."""
        return {each.name: str(getattr(self, each.name)) for each in fields(self)}


#: Choices by name. A module returns FP32, so that the softmax of a loss, which sums over a whole
#: vocabulary, is taken of values that are not rounded a second time.
PRESETS: dict[str, Precision] = {
    "fp32": Precision(param=torch.float32),
    "bf16-mixed": Precision(param=torch.bfloat16, output=torch.float32, master="fp32"),
    "bf16-remainder": Precision(
        param=torch.bfloat16, output=torch.float32, master="remainder", rounding="nearest"
    ),
    "bf16-pure-sr": Precision(
        param=torch.bfloat16,
        reduce=torch.bfloat16,
        output=torch.float32,
        master="none",
        rounding="stochastic",
    ),
    "fp16-scaled": Precision(param=torch.float16, output=torch.float32, master="fp32", scaled=True),
}


@dataclass(frozen=True)
class ChosenModule:
    """A module whose parameters have another dtype than those around it.

    Attributes:
        module: the module.
        dtype: of its parameters, to which its floating-point arguments are cast.
        outside: of the parameters around it, to which what it returns is cast.
    """

    module: nn.Module
    dtype: torch.dtype
    outside: torch.dtype


@dataclass(frozen=True)
class ModuleDtypes:
    """The dtypes that the parts of one module get.

    Attributes:
        precision: the choices.
        chosen: the outermost modules that get another dtype than those around them.
    """

    precision: Precision
    chosen: tuple[ChosenModule, ...] = ()
    _params: Mapping[int, torch.dtype | None] = field(default_factory=dict, repr=False)
    _modules: frozenset[int] = field(default=frozenset(), repr=False)

    @classmethod
    def of(
        cls,
        root: nn.Module,
        precision: Precision,
        units: Mapping[str, torch.dtype] | None = None,
    ) -> ModuleDtypes:
        """Reads ``precision.keep_fp32`` against a module.

        Args:
            root: the module.
            precision: the choices.
            units: dtypes of some units, by name.

        Raises:
            ArgumentError: a pattern names no module, or one parameter is of modules that get
                different dtypes.
        """
        stay = _named(root, precision.keep_fp32)
        named = {**(units or {}), **dict.fromkeys(stay, torch.float32)}
        if not named or precision.param is None:
            return cls(precision)
        inside: dict[int, torch.dtype] = {}
        chosen: list[ChosenModule] = []
        # Outer modules have their turn first, so that inner ones are not cast a second time.
        for name, module in named_modules(root):
            outside = inside.get(id(module), precision.param)
            if name in named and named[name] is not outside:
                chosen.append(ChosenModule(module, named[name], outside))
                inside.update((id(each), named[name]) for each in module.modules())
        kept = frozenset(id(each) for module in stay.values() for each in module.modules())
        return cls(precision, tuple(chosen), _dtypes_inside(root, inside), kept)

    def of_param(self, param: nn.Parameter) -> torch.dtype | None:
        """Returns the dtype that a parameter gets, or None if it stays as it is."""
        return self._params.get(id(param), self.precision.param)

    def of_buffers(self, owner: nn.Module) -> torch.dtype | None:
        """Returns the dtype that a module's own buffers get, or None if they stay as they are."""
        return torch.float32 if id(owner) in self._modules else self.precision.buffer


def _named(root: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """Returns by name the modules that stay FP32."""
    named: dict[str, nn.Module] = {}
    for pattern in patterns:
        found = find_modules(root, pattern)
        if not found:
            names = list(dict.fromkeys(name for name, _ in named_modules(root) if name))
            raise ArgumentError(
                f"shard: precision: keep_fp32: expected names of modules, but none matches "
                f"{pattern!r} (a * stands for one part of a name); there are {some(names)}"
            )
        named.update((plain_name(root, name), module) for name, module in found)
    return named


def _dtypes_inside(
    root: nn.Module, inside: Mapping[int, torch.dtype]
) -> dict[int, torch.dtype | None]:
    """Returns by ``id`` the dtypes of parameters; all modules that have one must agree on it."""
    owners: dict[int, tuple[str, torch.dtype | None]] = {}
    for prefix, module in named_modules(root, remove_duplicate=False):
        for key, param in module.named_parameters(recurse=False, remove_duplicate=False):
            name, dtype = f"{prefix}.{key}" if prefix else key, inside.get(id(module))
            first, other = owners.setdefault(id(param), (name, dtype))
            if other is not dtype:
                chosen, plain = (first, name) if dtype is None else (name, first)
                raise ArgumentError(
                    f"shard: precision: keep_fp32 or per_unit: parameter {chosen} is also {plain}, "
                    "whose module does not get the same dtype; name both modules, or neither"
                )
    return {key: dtype for key, (_, dtype) in owners.items() if dtype is not None}
