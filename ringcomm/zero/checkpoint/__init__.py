# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of sharded state: JSON and safetensors, crash-safe, for any number of ranks.

``docs/checkpoint.md`` has the guarantees. Read ``save_load.py`` first, then ``folder.py``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ringcomm.comm.agreement import Ranks
from ringcomm.zero.checkpoint.export import export_safetensors
from ringcomm.zero.checkpoint.folder import Checkpoints, OneRank, Reader
from ringcomm.zero.checkpoint.format import FlatShard

if TYPE_CHECKING:
    from ringcomm.zero.checkpoint.dcp import LoadPlanner, SavePlanner, StorageReader, StorageWriter

# torch.distributed.checkpoint takes as long to import as half of torch: import it only if used.
_HOME_OF = {
    "LoadPlanner": "dcp",
    "SavePlanner": "dcp",
    "StorageReader": "dcp",
    "StorageWriter": "dcp",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)


__all__ = [
    "Checkpoints",
    "FlatShard",
    "LoadPlanner",
    "OneRank",
    "Ranks",
    "Reader",
    "SavePlanner",
    "StorageReader",
    "StorageWriter",
    "export_safetensors",
]
