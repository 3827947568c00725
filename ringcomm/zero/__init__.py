# SPDX-License-Identifier: Apache-2.0
"""Sharded data-parallel training, ZeRO stages 0 to 3; see ``docs/zero.md``.

Read ``stages/sharding.py`` first, which has ``shard()``, then ``stages/engine.py``. Checkpoints are
in ``checkpoint/``, and ``checkpoint/save_load.py`` is the file to begin with.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ringcomm.optim.options import Compression
from ringcomm.zero.stages.access import (
    get_gradient,
    get_master,
    get_state,
    on_reduced,
    set_gradient,
    set_master,
    set_state,
)
from ringcomm.zero.stages.activations import Activations, activations_on
from ringcomm.zero.stages.batches import uneven
from ringcomm.zero.stages.graphed_step import GraphedStep
from ringcomm.zero.stages.options import Precision, UnitOptions, ZeroOptions
from ringcomm.zero.stages.order import StepProfile
from ringcomm.zero.stages.sharding import no_sync, profiled, remove_sharding, shard
from ringcomm.zero.stages.shards import (
    LocalShard,
    exchanged,
    full_state_dict,
    local_shards,
    unsharded,
    writing_shards,
)

if TYPE_CHECKING:
    from ringcomm.extras.migrate.convert import convert
    from ringcomm.extras.migrate.settings import from_deepspeed, from_fsdp2
    from ringcomm.module_names import IncompatibleKeys
    from ringcomm.zero.checkpoint.export import export_safetensors, save_pretrained
    from ringcomm.zero.checkpoint.pretrained import Pretrained, load_pretrained, pretrained
    from ringcomm.zero.checkpoint.save_load import Loaded, TrainState, load, save
    from ringcomm.zero.stages.batches import SyncBatchNorm, convert_sync_batchnorm, sync_buffers

# Imported at first use: safetensors takes time to import, and few programs need these names.
_HOME_OF = {
    "IncompatibleKeys": "ringcomm.module_names",
    "Loaded": "ringcomm.zero.checkpoint.save_load",
    "Pretrained": "ringcomm.zero.checkpoint.pretrained",
    "SyncBatchNorm": "ringcomm.zero.stages.batches",
    "TrainState": "ringcomm.zero.checkpoint.save_load",
    "convert": "ringcomm.extras.migrate.convert",
    "convert_sync_batchnorm": "ringcomm.zero.stages.batches",
    "export_safetensors": "ringcomm.zero.checkpoint.export",
    "from_deepspeed": "ringcomm.extras.migrate.settings",
    "from_fsdp2": "ringcomm.extras.migrate.settings",
    "load": "ringcomm.zero.checkpoint.save_load",
    "load_pretrained": "ringcomm.zero.checkpoint.pretrained",
    "pretrained": "ringcomm.zero.checkpoint.pretrained",
    "save": "ringcomm.zero.checkpoint.save_load",
    "save_pretrained": "ringcomm.zero.checkpoint.export",
    "sync_buffers": "ringcomm.zero.stages.batches",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


__all__ = [
    "Activations",
    "Compression",
    "GraphedStep",
    "IncompatibleKeys",
    "Loaded",
    "LocalShard",
    "Precision",
    "Pretrained",
    "StepProfile",
    "SyncBatchNorm",
    "TrainState",
    "UnitOptions",
    "ZeroOptions",
    "activations_on",
    "convert",
    "convert_sync_batchnorm",
    "exchanged",
    "export_safetensors",
    "from_deepspeed",
    "from_fsdp2",
    "full_state_dict",
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
    "remove_sharding",
    "save",
    "save_pretrained",
    "set_gradient",
    "set_master",
    "set_state",
    "shard",
    "sync_buffers",
    "uneven",
    "unsharded",
    "writing_shards",
]
