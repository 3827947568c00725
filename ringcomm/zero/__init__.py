"""Sharded data-parallel training: ZeRO stages 0 to 3 over one engine; see ``docs/zero.md``."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ringcomm.optim.options import Wire
from ringcomm.zero.access import (
    get_gradient,
    get_master,
    get_state,
    on_reduced,
    set_gradient,
    set_master,
    set_state,
)
from ringcomm.zero.activations import Activations, activations_on
from ringcomm.zero.options import UnitOptions, ZeroOptions
from ringcomm.zero.precision import Precision
from ringcomm.zero.profile import StepProfile
from ringcomm.zero.sharding import no_sync, profiled, shard, unshard
from ringcomm.zero.shards import LocalShard, exchanged, local_shards, writing_shards
from ringcomm.zero.uneven import uneven
from ringcomm.zero.whole import full_state_dict, gathered

if TYPE_CHECKING:
    from ringcomm.extras.migrate.convert import convert
    from ringcomm.extras.migrate.deepspeed import from_deepspeed
    from ringcomm.extras.migrate.fsdp2 import from_fsdp2
    from ringcomm.module_names import IncompatibleKeys
    from ringcomm.zero.batch_norm import SyncBatchNorm, convert_sync_batchnorm, sync_buffers
    from ringcomm.zero.checkpoint.export import export_safetensors, save_pretrained
    from ringcomm.zero.checkpoint.pretrained import Pretrained, load_pretrained, pretrained
    from ringcomm.zero.checkpoint.save_load import Loaded, load, save
    from ringcomm.zero.checkpoint.train_state import TrainState

# Imported at first use: safetensors takes time to import, and few programs need these.
_HOME_OF = {
    "IncompatibleKeys": "ringcomm.module_names",
    "Loaded": "ringcomm.zero.checkpoint.save_load",
    "Pretrained": "ringcomm.zero.checkpoint.pretrained",
    "SyncBatchNorm": "ringcomm.zero.batch_norm",
    "TrainState": "ringcomm.zero.checkpoint.train_state",
    "convert": "ringcomm.extras.migrate.convert",
    "convert_sync_batchnorm": "ringcomm.zero.batch_norm",
    "export_safetensors": "ringcomm.zero.checkpoint.export",
    "from_deepspeed": "ringcomm.extras.migrate.deepspeed",
    "from_fsdp2": "ringcomm.extras.migrate.fsdp2",
    "load": "ringcomm.zero.checkpoint.save_load",
    "load_pretrained": "ringcomm.zero.checkpoint.pretrained",
    "pretrained": "ringcomm.zero.checkpoint.pretrained",
    "save": "ringcomm.zero.checkpoint.save_load",
    "save_pretrained": "ringcomm.zero.checkpoint.export",
    "sync_buffers": "ringcomm.zero.batch_norm",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


__all__ = [
    "Activations",
    "IncompatibleKeys",
    "Loaded",
    "LocalShard",
    "Precision",
    "Pretrained",
    "StepProfile",
    "SyncBatchNorm",
    "TrainState",
    "UnitOptions",
    "Wire",
    "ZeroOptions",
    "activations_on",
    "convert",
    "convert_sync_batchnorm",
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
    "sync_buffers",
    "uneven",
    "unshard",
    "writing_shards",
]
