# SPDX-License-Identifier: Apache-2.0
"""Collectives over peer-mapped memory, with the interface of ``torch.distributed``.

``import ringcomm`` alone loads neither torch nor the native module: every public name is
loaded at first use. torch imports this package during its own import (entry point group
``torch.backends``), so this file must not use torch. ``comm/`` has the communicators.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ringcomm.errors import (
    AbortedError,
    ArgumentError,
    CheckpointError,
    CollectiveTimeout,
    CorruptedError,
    DiskError,
    ForkError,
    HeapError,
    MismatchError,
    PeerLost,
    RendezvousError,
    RingcommError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from ringcomm import extras as extras
    from ringcomm import functional, optim, zero
    from ringcomm import testing as testing
    from ringcomm import tl as tl
    from ringcomm.c10d.comm_argument import Mesh
    from ringcomm.comm.communicator import Communicator
    from ringcomm.comm.functions import (
        GroupMember,
        P2POp,
        all_gather,
        all_gather_coalesced,
        all_gather_into_tensor,
        all_reduce,
        all_reduce_coalesced,
        all_to_all,
        all_to_all_single,
        barrier,
        batch_isend_irecv,
        broadcast,
        destroy_process_group,
        gather,
        get_global_rank,
        get_group_rank,
        get_process_group_ranks,
        get_rank,
        get_world_size,
        init_process_group,
        irecv,
        is_available,
        is_initialized,
        isend,
        new_group,
        recv,
        reduce,
        reduce_scatter,
        reduce_scatter_coalesced,
        reduce_scatter_tensor,
        scatter,
        send,
    )
    from ringcomm.comm.host.arguments import ReduceOp, premul_sum
    from ringcomm.comm.host.collectives import Plan
    from ringcomm.comm.host.engine import Work
    from ringcomm.comm.host.options import CommOptions
    from ringcomm.comm.local_world import LocalWorld, local_world
    from ringcomm.comm.objects import (
        all_gather_object,
        broadcast_object_list,
        gather_object,
        scatter_object_list,
    )
    from ringcomm.comm.recorder.records import RankRecording, Record, Recording
    from ringcomm.memory import Disk, empty, heap_stats, zeros

__version__ = "0.1.0"

_HOMES = {
    "ringcomm.c10d.comm_argument": ("Mesh",),
    "ringcomm.comm.communicator": ("Communicator",),
    "ringcomm.comm.functions": (
        "P2POp",
        "all_gather",
        "all_gather_coalesced",
        "all_gather_into_tensor",
        "all_reduce",
        "all_reduce_coalesced",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "batch_isend_irecv",
        "broadcast",
        "gather",
        "irecv",
        "isend",
        "recv",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_coalesced",
        "reduce_scatter_tensor",
        "scatter",
        "send",
        "GroupMember",
        "destroy_process_group",
        "get_global_rank",
        "get_group_rank",
        "get_process_group_ranks",
        "get_rank",
        "get_world_size",
        "init_process_group",
        "is_available",
        "is_initialized",
        "new_group",
    ),
    "ringcomm.comm.local_world": ("LocalWorld", "local_world"),
    "ringcomm.comm.objects": (
        "all_gather_object",
        "broadcast_object_list",
        "gather_object",
        "scatter_object_list",
    ),
    "ringcomm.comm.host.options": ("CommOptions",),
    "ringcomm.comm.host.arguments": ("ReduceOp", "premul_sum"),
    "ringcomm.comm.host.collectives": ("Plan",),
    "ringcomm.comm.host.engine": ("Work",),
    "ringcomm.comm.recorder.records": ("RankRecording", "Record", "Recording"),
    "ringcomm.memory": ("Disk", "empty", "heap_stats", "zeros"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_MODULES = ("extras", "functional", "optim", "testing", "tl", "zero")


def __getattr__(name: str) -> Any:
    if name == "_native":
        return _load_native()
    if name in _MODULES:
        return import_module(f"ringcomm.{name}")
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'ringcomm' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def _load_native() -> Any:
    """Imports the native module at its first use; from then on the import system returns it."""
    try:
        return import_module("ringcomm._native")
    except ImportError as error:
        from pathlib import Path

        from ringcomm.errors import native_missing

        raise native_missing(Path(__file__).resolve().parent, error) from error


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF, *_MODULES})


__all__ = [
    "AbortedError",
    "ArgumentError",
    "CheckpointError",
    "CollectiveTimeout",
    "CommOptions",
    "Communicator",
    "CorruptedError",
    "Disk",
    "DiskError",
    "ForkError",
    "GroupMember",
    "HeapError",
    "LocalWorld",
    "Mesh",
    "MismatchError",
    "P2POp",
    "PeerLost",
    "Plan",
    "RankRecording",
    "Record",
    "Recording",
    "ReduceOp",
    "RendezvousError",
    "RingcommError",
    "UnsupportedError",
    "Work",
    "__version__",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "destroy_process_group",
    "empty",
    "extras",
    "functional",
    "gather",
    "gather_object",
    "get_global_rank",
    "get_group_rank",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "heap_stats",
    "init_process_group",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "local_world",
    "new_group",
    "optim",
    "premul_sum",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_coalesced",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
    "zero",
    "zeros",
]
