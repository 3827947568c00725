"""Training loops of other libraries on ``ringcomm.zero``; each module imports its library.

``docs/integrations/index.md`` says what works with which, and what does not, and why.
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


# ---- What integrations ask of a module that may be sharded, and do with it -----------------------

# ---- The libraries that integrations belong to, which ringcomm does not bring along -------------


def imported(names: tuple[str, ...], package: str, asks: str) -> Any:
    """Imports a library that goes by several names: that which the program has, or else the first.

    Args:
        names: of its modules, the preferred one first.
        package: what pip calls it.
        asks: the module of ringcomm that needs it.

    Raises:
        ImportError: there is none of them.
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
    """Tells whether ``zero.shard()`` has the module, or a part of it."""
    return any(owner_of(param) is not None for param in module.parameters())


def must_be_sharded(optimizer: Any, where: str) -> ShardedOptimizer:
    """Returns the optimizer, if it is one of ringcomm's.

    Raises:
        ArgumentError: it is another's.
    """
    if isinstance(optimizer, ShardedOptimizer):
        return optimizer
    raise ArgumentError(
        f"{where}: expected an optimizer of ringcomm.optim, got {type(optimizer).__name__}, which "
        "would step each rank alone: use ringcomm.optim.AdamW, or "
        "ringcomm.optim.Sharded(torch.optim.SGD, parameters, ...) for any elementwise one"
    )


def all_must_unshard(module: nn.Module) -> bool:
    """Tells whether unsharding takes all ranks, so that none can read parameters alone."""
    engines = {engine for param in module.parameters() if (engine := owner_of(param)) is not None}
    options = [engine.options for engine in engines]
    return any(each.params == "world" or each.offload_params is not None for each in options)


def state_on_first(module: nn.Module, is_first: bool) -> dict[str, Any]:
    """Returns whole copies of what ``module.state_dict()`` has, on the first rank only.

    All ranks call it. The others hold no copy, and do not unshard either where the first can read
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
    """Has a module's parameters whole inside, if they are sharded."""
    if not is_sharded(module):
        yield
        return
    with unsharded([param for param in module.parameters() if owner_of(param) is not None]):
        yield


@contextmanager
def writing(module: nn.Module) -> Iterator[None]:
    """Has a module's parameters whole inside, and takes over those of the first rank; collective.

    What ranks load inside is the same on all of them.
    """
    if not is_sharded(module):
        yield
        return
    params = [param for param in module.parameters() if owner_of(param) is not None]
    with unsharded(params, write_from=0):
        yield


def next_number(folder: Path) -> int:
    """Returns the number of the next checkpoint in a folder, the same on all ranks.

    None can become complete before all ranks have begun to save it, and so have asked here.
    """
    return (Checkpoints(folder).latest() or 0) + 1
