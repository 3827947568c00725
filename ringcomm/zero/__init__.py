"""Sharded data-parallel training: ZeRO stages 0 to 3 over one engine; see ``docs/zero.md``."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ringcomm.zero.access import (
    get_gradient,
    get_master,
    get_state,
    on_reduced,
    set_gradient,
    set_master,
    set_state,
)
from ringcomm.zero.options import ZeroOptions
from ringcomm.zero.precision import Precision
from ringcomm.zero.profile import StepProfile
from ringcomm.zero.sharding import full_state_dict, gathered, no_sync, profiled, shard, unshard
from ringcomm.zero.shards import LocalShard, exchanged, local_shards, writing_shards

if TYPE_CHECKING:
    from ringcomm.zero.checkpoint.export import export_safetensors
    from ringcomm.zero.checkpoint.pretrained import Pretrained, load_pretrained, pretrained
    from ringcomm.zero.checkpoint.save_load import Loaded, TrainState, load, save
    from ringcomm.zero.checkpoint.save_pretrained import save_pretrained
    from ringcomm.zero.checkpoint.weight_names import IncompatibleKeys
    from ringcomm.zero.migrating.deepspeed import from_deepspeed
    from ringcomm.zero.migrating.fsdp2 import from_fsdp2

# Imported at first use: safetensors takes time to import, and few programs need these.
_HOME_OF = {
    "IncompatibleKeys": "checkpoint.weight_names",
    "Loaded": "checkpoint.save_load",
    "Pretrained": "checkpoint.pretrained",
    "TrainState": "checkpoint.save_load",
    "export_safetensors": "checkpoint.export",
    "from_deepspeed": "migrating.deepspeed",
    "from_fsdp2": "migrating.fsdp2",
    "load": "checkpoint.save_load",
    "load_pretrained": "checkpoint.pretrained",
    "pretrained": "checkpoint.pretrained",
    "save": "checkpoint.save_load",
    "save_pretrained": "checkpoint.save_pretrained",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


__all__ = [
    "IncompatibleKeys",
    "Loaded",
    "LocalShard",
    "Precision",
    "Pretrained",
    "StepProfile",
    "TrainState",
    "ZeroOptions",
    "exchanged",
    "export_safetensors",
    "from_deepspeed",
    "from_fsdp2",
    "full_state_dict",
    "gathered",
    "get_gradient",
    "get_master",
    "get_state",
    "load",
    "load_pretrained",
    "local_shards",
    "no_sync",
    "on_reduced",
    "pretrained",
    "profiled",
    "save",
    "save_pretrained",
    "set_gradient",
    "set_master",
    "set_state",
    "shard",
    "unshard",
    "writing_shards",
]
