"""The arguments of FSDP2's ``fully_shard``, read as ringcomm's own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from ringcomm.errors import ArgumentError
from ringcomm.zero.migrating.keys import MAPPED, NO_EFFECT, UNSUPPORTED, Key, refuse_unsupported
from ringcomm.zero.options import ZeroOptions
from ringcomm.zero.precision import Precision

_OPERATION = "from_fsdp2"

#: By name, in the order of the page.
KEYS: dict[str, Key] = {
    key.name: key
    for key in (
        Key(
            "module",
            MAPPED,
            "`zero.shard(module, setup.stage, comm=setup.comm, options=setup.options)`, once, on "
            "the whole; `ZeroOptions.units` chooses the modules of nested calls",
        ),
        Key(
            "mesh",
            MAPPED,
            "`comm`; a mesh of two dimensions (HSDP) raises `UnsupportedError`: pass the group of "
            'all ranks as `comm`, and `ZeroOptions(state="node")` for a copy on each node',
        ),
        Key(
            "reshard_after_forward",
            MAPPED,
            "`ZeroOptions(keep_gathered=True)` for False; a number raises `UnsupportedError`: "
            '`ZeroOptions(params="node")` gathers within a node',
        ),
        Key("mp_policy.param_dtype", MAPPED, "`Precision.param`, with FP32 masters"),
        Key(
            "mp_policy.reduce_dtype",
            NO_EFFECT,
            "sums are FP32, and so are reduced gradients, as those of FSDP2's FP32 shards",
        ),
        Key("mp_policy.output_dtype", MAPPED, "`Precision.output`, of the whole module"),
        Key(
            "mp_policy.cast_forward_inputs", MAPPED, "`Precision.cast_inputs`, of the whole module"
        ),
        Key(
            "offload_policy",
            UNSUPPORTED,
            "memory of the host is not used; shard over more ranks, or take a preset of "
            "`Precision` that keeps less",
        ),
        Key(
            "shard_placement_fn",
            UNSUPPORTED,
            "a shard is a run of a bucket's elements, whatever the parameters' shapes; leave it "
            "away",
        ),
        Key(
            "ignored_params",
            UNSUPPORTED,
            "a sharded module has all of its parameters in buckets; keep others outside of "
            "the module",
        ),
        Key(
            "dp_mesh_dims",
            UNSUPPORTED,
            'parameters on a mesh are DTensors of `mesh["tp"]`, and `comm` is `mesh["dp"]`',
        ),
    )
}


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
        What ``zero.shard`` needs, and a note for each argument that was given.

    Raises:
        ArgumentError: an argument is of another type.
        UnsupportedError: names all arguments that ask for what ringcomm does not have.
    """
    policy = MixedPrecisionPolicy() if mp_policy is None else mp_policy
    kinds: dict[str, tuple[Any, type]] = {
        "mesh": (mesh, DeviceMesh),
        "reshard_after_forward": (reshard_after_forward, int),
        "mp_policy": (policy, MixedPrecisionPolicy),
        "offload_policy": (offload_policy, OffloadPolicy),
    }
    for name, (value, kind) in kinds.items():
        if value is not None and not isinstance(value, kind):
            raise ArgumentError(
                f"{_OPERATION}: {name}: expected {kind.__name__} or None, got {value!r}"
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
    return FSDP2Setup(
        stage=3,
        options=ZeroOptions(
            precision=precision, keep_gathered=reshard_after_forward is False, params="world"
        ),
        comm=mesh,
        notes={name: KEYS[name].note(v) for name, v in given.items() if v is not None},
    )
