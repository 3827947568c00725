# SPDX-License-Identifier: Apache-2.0
"""Functions that the integrations of other libraries' training loops share.

``docs/integrations/index.md`` lists which features work with which library, and why others do not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ringcomm.errors import ArgumentError
from ringcomm.optim.sharded import ShardedOptimizer
from ringcomm.zero import unsharded
from ringcomm.zero.checkpoint import Checkpoints
from ringcomm.zero.stages.engine import owner_of

__all__: list[str] = []


# ---- Imports of the integrated libraries, and access to modules that may be sharded -------------


def imported(names: tuple[str, ...], package: str, asks: str) -> Any:
    """Imports a library that has several names: the name already imported, else the first found.

    Args:
        names: names of its modules, the preferred name first.
        package: its name for pip.
        asks: the module of ringcomm that needs the library.

    Raises:
        ImportError: no module of these names is installed.
    """
    loaded = [name for name in names if name in sys.modules]
    there = loaded or [name for name in names if find_spec(name.partition(".")[0]) is not None]
    if not there:
        raise ImportError(
            f"{asks} needs the module {' or '.join(names)}, which is not installed: "
            f"pip install {package}"
        )
    return import_module(there[0])


def is_sharded(module: nn.Module) -> bool:
    """True if ``zero.shard()`` has sharded the module or a part of it."""
    return any(owner_of(param) is not None for param in module.parameters())


def must_be_sharded(optimizer: Any, where: str) -> ShardedOptimizer:
    """Returns the optimizer, if it is a ringcomm optimizer.

    Raises:
        ArgumentError: the optimizer is not a ringcomm optimizer.
    """
    if isinstance(optimizer, ShardedOptimizer):
        return optimizer
    raise ArgumentError(
        f"{where}: expected an optimizer of ringcomm.optim, got {type(optimizer).__name__}, which "
        "would step each rank alone: use ringcomm.optim.AdamW, or "
        "ringcomm.optim.Sharded(torch.optim.SGD, parameters, ...) for other elementwise optimizers"
    )


def all_must_unshard(module: nn.Module) -> bool:
    """True if unsharding is collective, so that a single rank cannot read parameters."""
    engines = {engine for param in module.parameters() if (engine := owner_of(param)) is not None}
    options = [engine.options for engine in engines]
    return any(each.params == "world" or each.offload_params is not None for each in options)


def state_on_first(module: nn.Module, is_first: bool) -> dict[str, Any]:
    """Returns ``module.state_dict()`` with copies of whole tensors on the first rank; else {}.

    All ranks must call this function. The other ranks do not unshard if the first rank can read
    their memory.
    """
    if not is_first and not all_must_unshard(module):
        return {}
    with reading(module):
        if not is_first:
            return {}
        state = module.state_dict()
        return {
            name: value.detach().clone() if isinstance(value, Tensor) else value
            for name, value in state.items()
        }


@contextmanager
def reading(module: nn.Module) -> Iterator[None]:
    """A context in which a module's parameters are whole."""
    if not is_sharded(module):
        yield
        return
    with unsharded([param for param in module.parameters() if owner_of(param) is not None]):
        yield


@contextmanager
def writing(module: nn.Module) -> Iterator[None]:
    """A context with whole parameters, for loading values; collective.

    All ranks must load equal values inside; at the end all take the first rank's values.
    """
    if not is_sharded(module):
        yield
        return
    params = [param for param in module.parameters() if owner_of(param) is not None]
    with unsharded(params, write_from=0):
        yield


def next_number(folder: Path) -> int:
    """Returns the number of the next checkpoint in a folder, the same on all ranks.

    Ranks get equal numbers: no checkpoint is completed until all ranks have called this function.
    """
    return (Checkpoints(folder).latest() or 0) + 1
