"""The arguments of FSDP2's ``fully_shard``, read as ringcomm's own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from ringcomm.errors import ArgumentError
from ringcomm.extras.migrate.keys import keys_of, refuse_unsupported
from ringcomm.module_names import matches
from ringcomm.zero.stages.options import Precision, UnitOptions, ZeroOptions

_OPERATION = "from_fsdp2"

KEYS = keys_of("FSDP2")


@dataclass(frozen=True)
class FSDP2Setup:
    """The settings that FSDP2's arguments stand for, for ``zero.shard``.

    Attributes:
        stage: 3.
        options: choices.
        comm: the mesh, or None for the default group.
        notes: by argument, what became of it.
    """

    stage: int
    options: ZeroOptions
    comm: DeviceMesh | None
    notes: Mapping[str, str]

    def with_nested(self, nested: Mapping[str, Mapping[str, Any]]) -> FSDP2Setup:
        """Returns the settings with those of nested calls, whose modules become units.

        Args:
            nested: by names of modules inside, in which a ``*`` stands for any characters of one
                part, ``reshard_after_forward`` and ``mp_policy`` of the calls on these. One without
                ``param_dtype`` stays FP32 among others with it.

        Raises:
            ArgumentError: another argument.
            UnsupportedError: as of :func:`from_fsdp2`.
        """
        return replace(self, options=_with_units(self.options, nested))


def from_fsdp2(
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Collection[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> FSDP2Setup:
    """Reads the arguments of ``torch.distributed.fsdp.fully_shard``, by their names there.

    Returns:
        The settings of ``zero.shard``, and a note for each argument that was given.

    Raises:
        ArgumentError: an argument is of another type.
        UnsupportedError: names all arguments that ask for what ringcomm does not have.
    """
    policy = MixedPrecisionPolicy() if mp_policy is None else mp_policy
    _check_kinds(
        mesh=(mesh, DeviceMesh),
        reshard_after_forward=(reshard_after_forward, int),
        mp_policy=(policy, MixedPrecisionPolicy),
        offload_policy=(offload_policy, OffloadPolicy),
    )
    asked = {
        "mesh": mesh is not None and mesh.ndim > 1,
        "reshard_after_forward": type(reshard_after_forward) is int,
        "offload_policy": isinstance(offload_policy, CPUOffloadPolicy),
        "shard_placement_fn": shard_placement_fn is not None,
        "ignored_params": bool(ignored_params),
        "dp_mesh_dims": dp_mesh_dims is not None,
    }
    refuse_unsupported(
        _OPERATION, [(name, KEYS[name].text) for name, asks in asked.items() if asks]
    )
    given: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": reshard_after_forward,
        "offload_policy": offload_policy,
        "ignored_params": ignored_params,
    }
    if mp_policy is not None:
        given |= {f"mp_policy.{name}": value for name, value in vars(mp_policy).items()}
    precision = Precision(
        param=policy.param_dtype,
        output=policy.output_dtype,
        cast_inputs=policy.cast_forward_inputs,
        master=None if policy.param_dtype is None else "fp32",
    )
    options = ZeroOptions(
        precision=precision, keep_gathered=reshard_after_forward is False, params="world"
    )
    return FSDP2Setup(
        stage=3,
        options=options,
        comm=mesh,
        notes={name: KEYS[name].note(v) for name, v in given.items() if v is not None},
    )


def _check_kinds(**arguments: tuple[Any, type]) -> None:
    """Raises ArgumentError for an argument that is neither None nor of its type."""
    for name, (value, kind) in arguments.items():
        if value is not None and not isinstance(value, kind):
            raise ArgumentError(
                f"{_OPERATION}: {name}: expected {kind.__name__} or None, got {value!r}"
            )


def _with_units(options: ZeroOptions, nested: Mapping[str, Mapping[str, Any]]) -> ZeroOptions:
    """Returns the options with a unit for each module of a nested call."""
    policies = {}
    for name, arguments in nested.items():
        unknown = sorted({*arguments} - {"reshard_after_forward", "mp_policy"})
        if unknown:
            raise ArgumentError(
                f"{_OPERATION}: nested: {name!r}: expected reshard_after_forward and mp_policy, "
                f"got {unknown[0]!r}; pass what holds for the whole module to from_fsdp2()"
            )
        policies[name] = arguments.get("mp_policy") or MixedPrecisionPolicy()
    precision = options.precision
    outside = precision.param
    if outside is None and any(each.param_dtype for each in policies.values()):
        outside = torch.float32
        precision = replace(precision, param=outside, master="fp32")
    asked = []
    for name, policy in policies.items():
        if policy.output_dtype not in (None, outside):
            text = f"a unit returns the dtype around it, {outside}; leave it away"
            asked.append((f"nested: {name}: mp_policy.output_dtype", text))
        if not policy.cast_forward_inputs:
            text = "arguments of a unit are cast to the dtype of its parameters; leave it away"
            asked.append((f"nested: {name}: mp_policy.cast_forward_inputs", text))
        if type(nested[name].get("reshard_after_forward")) is int:
            text = KEYS["reshard_after_forward"].text
            asked.append((f"nested: {name}: reshard_after_forward", text))
    refuse_unsupported(_OPERATION, asked)
    per_unit = {
        name: UnitOptions(
            param=None if outside is None else policy.param_dtype or torch.float32,
            keep_gathered=nested[name].get("reshard_after_forward") is False,
        )
        for name, policy in policies.items()
    }

    def is_unit(name: str, module: nn.Module) -> bool:
        return any(matches(pattern, name) for pattern in nested)

    return replace(options, precision=precision, units=is_unit, per_unit=per_unit)
