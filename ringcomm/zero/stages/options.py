# SPDX-License-Identifier: Apache-2.0
"""The options of sharded training, without the stage, which is an argument of ``shard()``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, TypeAlias

import torch
from torch import nn

from ringcomm.comm.communicator import Communicator
from ringcomm.errors import ArgumentError, UnsupportedError
from ringcomm.integers import integer
from ringcomm.json_reader import shown
from ringcomm.module_names import find_modules, named_modules, some, unwrapped_name
from ringcomm.offload.scratch import Disk
from ringcomm.optim.layout import checked_bucket_elems
from ringcomm.optim.options import AdamWOptions, Compression
from ringcomm.optim.placement import check_even

# ---- Mixed precision: the dtype of each part of training, presets, and modules that stay FP32 ----

#: Dtypes that trained parameters can have.
PARAM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Precision:
    """The dtypes of mixed-precision training; None leaves a dtype unchanged.

    Attributes:
        param: dtype of parameters and their gradients. The optimizer keeps FP32 masters, made from
            the values before the cast, unless ``master`` says otherwise.
        reduce: dtype of the reduced gradient. Sums are always computed in FP32. None keeps the sums
            in FP32; the 16-bit dtype of ``param`` rounds each sum once and halves the memory.
        buffer: dtype of floating-point buffers.
        output: dtype of the floating-point tensors that the module returns. Tensors alone or in
            tuples, lists and dicts are cast; tensors inside dataclasses and other objects stay as
            they are.
        cast_inputs: True casts the module's floating-point arguments to ``param``, also tensors in
            tuples, lists and dicts.
        keep_fp32: names of modules that stay FP32: their parameters and buffers, and those of the
            modules inside them. A ``*`` matches any characters within one part of a name
            (``"blocks.*.norm"``). Floating-point arguments of these modules are cast to FP32, and
            their results are cast to ``param``, unless the module has an attribute ``returns_fp32``
            that is true, as the routers of :class:`ringcomm.extras.moe.MoE` do.
        master: the optimizer's ``AdamWOptions.master``; None leaves it to the optimizer.
        rounding: the optimizer's ``AdamWOptions.rounding``; None leaves it to the optimizer.
        scaled: True if the loss must be scaled: a step with neither ``loss_scaler=`` nor a
            ``GradScaler`` raises.
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
                "precision: keep_fp32: expected also param=, the dtype of the other modules"
            )

    def _check_optimizer(self) -> None:
        chosen = AdamWOptions(**self.optimizer_defaults)
        if chosen.master == "remainder" and self.param is torch.float16:
            raise ArgumentError(
                'precision: master: "remainder" is the lower half of FP32 masters of bfloat16 '
                'parameters, got param=torch.float16; pass "fp32"'
            )

    @property
    def optimizer_defaults(self) -> dict[str, Any]:
        """The fields of ``AdamWOptions`` that this precision sets."""
        chosen = {"master": self.master, "rounding": self.rounding}
        return {name: value for name, value in chosen.items() if value is not None}

    def reduced_dtype(self, stored: torch.dtype) -> torch.dtype:
        """Returns the dtype of the reduced gradients of parameters that have dtype ``stored``."""
        return self.reduce if self.reduce is not None and stored is self.param else torch.float32

    @classmethod
    def preset(cls, name: str, *, keep_fp32: tuple[str, ...] = ()) -> Precision:
        """Returns the preset called ``name``; ``docs/precision.md`` lists the presets.

        Args:
            name: a key of :data:`PRESETS`: "fp32", "bf16-mixed", "bf16-remainder", "bf16-pure-sr"
                or "fp16-scaled".
            keep_fp32: see the attribute.

        Raises:
            ArgumentError: ``name`` is not a preset, or ``keep_fp32`` is not a tuple of names.
        """
        if name not in PRESETS:
            known = ", ".join(map(repr, PRESETS))
            raise ArgumentError(f"precision: preset: expected one of {known}, got {name!r}")
        return replace(PRESETS[name], keep_fp32=keep_fp32)

    def describe(self) -> dict[str, str]:
        """Returns the fields as strings, by name."""
        return {each.name: str(getattr(self, each.name)) for each in fields(self)}


#: The presets by name. Modules return FP32, so that the softmax of the loss, which sums over a
#: whole vocabulary, is computed from values that were not rounded a second time.
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
    """A module whose parameters have another dtype than the parameters around the module.

    Attributes:
        module: the module.
        dtype: dtype of the module's parameters; its floating-point arguments are cast to it.
        outside: dtype of the parameters around the module; the module's results are cast to it.
    """

    module: nn.Module
    dtype: torch.dtype
    outside: torch.dtype


@dataclass(frozen=True)
class ModuleDtypes:
    """The dtypes of the parameters and buffers of a module and the modules inside it.

    Attributes:
        precision: the precision options.
        chosen: the outermost modules whose dtype differs from the dtype of the parameters around
            them.
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
        """Finds the modules that ``precision.keep_fp32`` and ``units`` name, and their dtypes.

        Args:
            root: the root module.
            precision: the precision options.
            units: by unit name, the dtype of each unit that has a dtype of its own.

        Raises:
            ArgumentError: a pattern matches no module, or modules that share a parameter get
                different dtypes.
        """
        stay = _named(root, precision.keep_fp32)
        named = {**(units or {}), **dict.fromkeys(stay, torch.float32)}
        if not named or precision.param is None:
            return cls(precision)
        inside: dict[int, torch.dtype] = {}
        chosen: list[ChosenModule] = []
        # Outer modules come first, so that an inner module of the same dtype is not cast again.
        for name, module in named_modules(root):
            outside = inside.get(id(module), precision.param)
            if name in named and named[name] is not outside:
                chosen.append(ChosenModule(module, named[name], outside))
                inside.update((id(each), named[name]) for each in module.modules())
        kept = frozenset(id(each) for module in stay.values() for each in module.modules())
        return cls(precision, tuple(chosen), _dtypes_inside(root, inside), kept)

    def of_param(self, param: nn.Parameter) -> torch.dtype | None:
        """Returns the dtype that a parameter gets, or None if it keeps its dtype."""
        return self._params.get(id(param), self.precision.param)

    def of_buffers(self, owner: nn.Module) -> torch.dtype | None:
        """Returns the dtype that a module's own buffers get, or None if they keep their dtypes."""
        return torch.float32 if id(owner) in self._modules else self.precision.buffer


def _named(root: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """Returns the modules that stay FP32, by unwrapped name."""
    named: dict[str, nn.Module] = {}
    for pattern in patterns:
        found = find_modules(root, pattern)
        if not found:
            names = list(dict.fromkeys(name for name, _ in named_modules(root) if name))
            raise ArgumentError(
                f"shard: precision: keep_fp32: expected names of modules, but none matches "
                f"{pattern!r} (a * matches one part of a name); there are {some(names)}"
            )
        named.update((unwrapped_name(root, name), module) for name, module in found)
    return named


def _dtypes_inside(
    root: nn.Module, inside: Mapping[int, torch.dtype]
) -> dict[int, torch.dtype | None]:
    """Returns each parameter's dtype by ``id``; raises if two modules give it different dtypes."""
    owners: dict[int, tuple[str, torch.dtype | None]] = {}
    for prefix, module in named_modules(root, remove_duplicate=False):
        for key, param in module.named_parameters(recurse=False, remove_duplicate=False):
            name, dtype = f"{prefix}.{key}" if prefix else key, inside.get(id(module))
            first, other = owners.setdefault(id(param), (name, dtype))
            if other is not dtype:
                chosen, rest = (first, name) if dtype is None else (name, first)
                raise ArgumentError(
                    f"shard: precision: keep_fp32 or per_unit: parameter {chosen} is also {rest}, "
                    "whose module does not get the same dtype; name both modules, or neither"
                )
    return {key: dtype for key, (_, dtype) in owners.items() if dtype is not None}


# Measured step times of a GPT of 25 M FP32 parameters (2 ranks on 2 shared Zen 4 cores, buckets of
# 0.5, 1, 2, 4 and 16 Mi elements): at stage 2 they differ by at most 4 %; at stage 3 the other
# bucket sizes take 1.1 to 1.3 times as long as 2 Mi.
DEFAULT_BUCKET_ELEMS = 2 << 20
_CHOICES = {
    "algorithm": ("auto", "one_shot", "ring"),
    "reduce": ("avg", "sum"),
    "params": ("node", "world"),
    "state": ("node", "world"),
}
_SWITCHES = {
    "overlap": (True, False, None),
    "reshard_after_forward": (True, False),
    "broadcast": (True, False),
}

# Selects the units, which are unsharded as a whole: types of modules, or f(name, module) -> bool.
Units: TypeAlias = "Sequence[type[nn.Module]] | Callable[[str, nn.Module], bool]"


def _count(options: object, name: str, least: int, head: str = "") -> int:
    """Returns an option as an int; raises ArgumentError unless it is from ``least`` to 2^63 - 1."""
    value = getattr(options, name)
    number = integer(value)
    if number is None or number < least:
        raise ArgumentError(
            f"{head}{name}: expected an integer from {least} to 2^63 - 1, got {shown(value)}"
        )
    return number


@dataclass(frozen=True)
class UnitOptions:
    """Options of some units; None takes the option of the whole module.

    Attributes:
        param: dtype of the unit's parameters and their gradients, in place of ``Precision.param``,
            which is then required. The unit's floating-point arguments are cast to this dtype, and
            its results to the dtype around the unit.
        reshard_after_forward: stage 3: replaces ``ZeroOptions.reshard_after_forward``.
        prefetch: stage 3: replaces ``ZeroOptions.prefetch`` while the unit runs.
    """

    param: torch.dtype | None = None
    reshard_after_forward: bool | None = None
    prefetch: int | None = None

    def __post_init__(self) -> None:
        if self.param not in (None, *PARAM_DTYPES):
            raise ArgumentError(
                f"UnitOptions: param: expected float32, bfloat16, float16 or None, got "
                f"{self.param!r}"
            )
        if not any(self.reshard_after_forward is state for state in (True, False, None)):
            raise ArgumentError(
                f"UnitOptions: reshard_after_forward: expected True, False or None, got "
                f"{self.reshard_after_forward!r}"
            )
        if self.prefetch is not None:
            object.__setattr__(self, "prefetch", _count(self, "prefetch", 0, "UnitOptions: "))


@dataclass(frozen=True)
class ZeroOptions:
    """The options of sharded training, which must be equal on all ranks.

    Attributes:
        precision: dtypes of mixed precision.
        bucket_elems: maximum number of elements of a bucket that holds more than one parameter; a
            multiple of 512.
        units: stage 3: the modules that are each unsharded as a whole. None takes the elements of
            the outermost lists of modules; without such lists, the children of the module. Every
            stage lays out its buckets by units, so that all stages do the same arithmetic.
        overlap: stages 2 and 3: reduce gradients while backward runs, and unshard units before they
            are needed. None turns this on for GPUs, over several nodes, and on a CPU that has
            enough cores; see :meth:`resolved`.
        in_flight: stages 2 and 3: number of whole gradient buckets that a rank holds in addition to
            shards.
        prefetch: stage 3: number of units unsharded before they are needed; only with ``overlap``.
            On a device, further units of more than 1 MiB each are also unsharded ahead, up to 16
            MiB in total.
        reshard_after_forward: stage 3: parameters are resharded after forward, and unsharded again
            in backward. With False they stay unsharded, which is faster and takes more memory.
        reduce: "avg" averages the ranks' gradients, as DDP does; "sum" adds them.
        divisor: a whole number by which the step and the norms divide the reduced gradient. It is
            for parameters whose gradient on one rank already sums the gradients of several ranks,
            as for experts (:func:`ringcomm.extras.moe.shard`). ``get_gradient`` and ``on_reduced``
            give the undivided gradient.
        algorithm: algorithm of the collectives: "auto", "one_shot" or "ring".
        broadcast: True gives all ranks the parameters and buffers of rank 0, as DDP does.
        params: stage 3, over several nodes: "node" keeps a copy of the parameters on each node,
            sharded over the node's ranks, so that unsharding uses no network and is no collective.
            "world" shards them over all ranks: a rank keeps the least memory, but forward and
            backward unshard over the network, and all ranks must unshard the same units in the same
            order. On one node both choices mean that each rank reads its peers' shards.
        state: stages 1 to 3, over several nodes: "world" shards reduced gradients and the
            optimizer's state over all ranks, and the step sends updated parameters between nodes.
            "node" shards them over the ranks of each node, so that each node does the whole update:
            nodes exchange sums of gradients instead of parameters. Not with ``params="world"``.
        compression: over several nodes, the formats in which nodes exchange gradients and
            parameters.
        offload_params: stage 3: where a rank's chunks of the parameters are while they are sharded:
            None for memory, or a :class:`ringcomm.Disk`, for parameters on the CPU. The disk's
            ``buffer_bytes`` hold chunks that are being transferred (at least one chunk), and its
            ``resident_bytes`` hold chunks that stay in memory. With a disk, unsharding is a
            collective, as with ``params="world"``, and several nodes require ``params="world"``.
        per_unit: options of some units, by names of units, in which a ``*`` matches any characters
            within one part (``"blocks.*"``). If several names match a unit, the last one applies.
        ignored: names of parameters, or of modules for all parameters in them, that the user
            handles. Ignored parameters are neither moved nor cast, reduced, stepped or saved, and
            may differ between ranks. A ``*`` matches any characters within one part of a name.

    All stages, and all choices of ``params``, ``state`` and ``offload_params``, give the same bits.
    Each choice of ``compression`` gives bits of its own, and with quantized gradients
    ``state="node"`` also gives bits of its own.
    """

    precision: Precision = field(default_factory=Precision)
    bucket_elems: int = DEFAULT_BUCKET_ELEMS
    units: Units | None = None
    overlap: bool | None = None
    in_flight: int = 2
    prefetch: int = 1
    reshard_after_forward: bool = True
    reduce: str = "avg"
    divisor: int = 1
    algorithm: str = "auto"
    broadcast: bool = True
    params: str = "node"
    state: str = "world"
    compression: Compression = field(default_factory=Compression)
    offload_params: Disk | None = None
    per_unit: Mapping[str, UnitOptions] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ArgumentError(
                    f"{name}: expected one of {', '.join(choices)}, got {getattr(self, name)!r}"
                )
        for name, states in _SWITCHES.items():
            # Compared by identity: 1 equals True, and "no" is truthy.
            if not any(getattr(self, name) is state for state in states):
                raise ArgumentError(
                    f"{name}: expected one of {', '.join(map(str, states))}, got "
                    f"{getattr(self, name)!r}"
                )
        if not isinstance(self.compression, Compression):
            raise ArgumentError(f"compression: expected a Compression, got {self.compression!r}")
        if not isinstance(self.precision, Precision):
            raise ArgumentError(f"precision: expected a Precision, got {self.precision!r}")
        object.__setattr__(self, "bucket_elems", checked_bucket_elems(self.bucket_elems))
        for name, least in (("in_flight", 1), ("prefetch", 0), ("divisor", 1)):
            object.__setattr__(self, name, _count(self, name, least))
        if not (self.offload_params is None or isinstance(self.offload_params, Disk)):
            raise ArgumentError(
                f"offload_params: expected a ringcomm.Disk or None, got {self.offload_params!r}"
            )
        self._check_named()
        if self.params == "world" and self.state == "node":
            raise ArgumentError(
                'params: expected "node" with state="node", got "world": a rank must keep every '
                'parameter that it updates, and with params="world" it would keep only its share '
                "of all ranks' parameters"
            )
        chosen = AdamWOptions(**self.precision.optimizer_defaults)
        self.compression.check_parameters(self.state, chosen.master, chosen.rounding)
        if self.compression.quantizes_parameters and self.offload_params is not None:
            raise UnsupportedError(
                f"offload_params: expected None with compression: "
                f"parameters={self.compression.parameters!r}, got a Disk: "
                "ranks unshard only unquantized parameters from disks"
            )

    def _check_named(self) -> None:
        chosen, ignored = self.per_unit, self.ignored
        if not isinstance(chosen, Mapping) or not all(
            isinstance(name, str) and isinstance(each, UnitOptions) for name, each in chosen.items()
        ):
            raise ArgumentError(f"per_unit: expected UnitOptions by names of units, got {chosen!r}")
        if self.precision.param is None and any(each.param for each in chosen.values()):
            raise ArgumentError(
                "per_unit: param: expected also Precision(param=), the dtype of the other units"
            )
        if not isinstance(ignored, tuple) or not all(isinstance(each, str) for each in ignored):
            raise ArgumentError(
                f"ignored: expected a tuple of names of parameters or modules, got {ignored!r}"
            )

    def for_nodes(self, stage: int, comm: Communicator) -> ZeroOptions:
        """Returns these options with ``params``, ``state`` and ``compression`` set for a stage.

        An option that makes no difference, because there is one node or because every rank has all
        data, gets its default.

        Raises:
            ArgumentError: ``offload_params`` does not fit the stage or ``params``; or parameters
                are to be quantized at stage 0, which sends none.
            UnsupportedError: nodes with different numbers of ranks cannot each have a copy.
        """
        several = comm.num_nodes > 1
        self._check_offload(stage, several)
        params = self.params if several and stage == 3 else "node"
        state = self.state if several and stage > 0 else "world"
        if several and state == "node":
            check_even(comm, "shard", 'state="node"', 'ZeroOptions(state="world")')
        if several and self.compression.error_feedback:
            check_even(comm, "shard", "error_feedback=True", "error_feedback=False")
        if several and stage == 3 and params == "node":
            check_even(comm, "shard", 'params="node" at stage 3', 'ZeroOptions(params="world")')
        return replace(
            self, params=params, state=state, compression=self._compression(stage, several)
        )

    def _compression(self, stage: int, several: bool) -> Compression:
        if stage == 0 and self.compression.quantizes_parameters:
            raise ArgumentError(
                f"shard: compression: parameters={self.compression.parameters!r}: expected stage "
                "1, 2 or 3, got 0, where each rank updates all parameters and sends none of them"
            )
        return self.compression if several else replace(self.compression, parameters="param")

    def _check_offload(self, stage: int, several: bool) -> None:
        if self.offload_params is None:
            return
        if stage != 3:
            raise ArgumentError(
                f"shard: offload_params: expected stage 3, got {stage}, where each rank has all "
                "parameters in memory at all times. For the optimizer's state pass "
                "AdamWOptions(offload_state=ringcomm.Disk(...))"
            )
        if several and self.params == "node":
            raise ArgumentError(
                'shard: offload_params: expected also params="world" over several nodes, '
                "got \"node\", with which ranks read the node's copy in their peers' memory"
            )

    def resolved(self, ranks: int, threads: int, cores: int) -> ZeroOptions:
        """Returns these options with ``overlap`` decided for ranks that compute on a CPU.

        A thread that communicates needs a core. If the ranks compute on all cores, this thread
        competes with backward and evicts backward's data from the caches: with 2 ranks of one
        thread on 2 Zen 4 cores, a step of a GPT of 25 M FP32 parameters takes 1.05 times as long
        with overlap (stages 2 and 3, batches of 16 bytes per rank, 12 rounds).

        Args:
            ranks: number of ranks on this machine, all of which may use all of the cores.
            threads: number of threads that each rank computes with.
            cores: number of cores that this process may use.
        """
        if self.overlap is not None:
            return self
        return replace(self, overlap=ranks * (threads + 1) <= cores)

    def describe(self) -> dict[str, Any]:
        """Returns the options as JSON types, without ``units``, which the layout reflects."""
        described = asdict(replace(self, per_unit={}))
        del described["units"]
        # Folders and buffer sizes may differ between ranks.
        described["offload_params"] = "memory" if self.offload_params is None else "disk"
        per_unit = [[name, str(each)] for name, each in self.per_unit.items()]
        return {**described, "precision": self.precision.describe(), "per_unit": per_unit}
