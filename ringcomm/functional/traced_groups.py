"""Finds a communicator again by the string that stands for it in a traced graph.

NOTE [Group keys]
A graph must hold plain values, equal in every process that may share a compile cache. A
communicator's key is made of its name, rank and world size; of several with the same three that
live at once, each later one gets a number. The number is free again once its communicator is
gone, closed or aborted, so a graph goes on with the communicator that was built in its place.

NOTE [The default group in a graph]
dynamo does not guard what it reads from a ``threading.local``: a graph traced in one thread would
serve the threads of a LocalWorld with the communicator of another. So ``group=None`` stays the
empty key, which means the default group of whichever thread runs the operator. What the graph
was traced with, its world size, is compared then.

NOTE [Groups of the backend in a graph]
DTensor's collectives have the name that torch gave a process group. What replaces them in a graph
keeps it, behind a mark that no key of a communicator has: so a graph that torch has cached finds
the group of that name in a process that has never made the graph.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group, _world

from ringcomm.comm.communicator import Communicator
from ringcomm.comm.engine import live
from ringcomm.comm.groups import communicator_of, default_communicator, group_of_mesh
from ringcomm.errors import ArgumentError, RingcommError, where

DEFAULT = ""
_OF_TORCH = "torch.distributed "

F = TypeVar("F", bound=Callable[..., Any])
# Key, rank and world size. A plain tuple: dynamo takes it as a constant in every version of torch.
Place = tuple[str, int, int]

_holders: WeakValueDictionary[str, Communicator] = WeakValueDictionary()
_keys: WeakKeyDictionary[Communicator, str] = WeakKeyDictionary()
_guard = threading.Lock()


def evaluated_while_tracing(fn: F) -> F:
    """dynamo calls the function with constants, and takes the result as one.

    What ``torch.compiler.assume_constant_result`` does, which would load all of dynamo for it.
    """
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


def not_traced(reason: str) -> Callable[[F], F]:
    """dynamo breaks the graph at a call of the function, and gives the reason where it must not.

    What ``torch.compiler.disable`` does, which would load all of dynamo for it.
    """

    def mark(fn: F) -> F:
        fn._torchdynamo_disable = True  # type: ignore[attr-defined]
        fn._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
        return fn

    return mark


def place_of(group: Any, operation: str) -> Place:
    """Returns what a graph has to know of ``group``; traceable.

    Raises:
        ArgumentError: this rank is not in the group, or it is not a group of ringcomm.
        RingcommError: there is no default group.
    """
    if not torch.compiler.is_compiling():
        return _place(communicator_of(group, operation))
    if group is None:
        return _default_place(operation)
    if isinstance(group, DeviceMesh):
        group = group_of_mesh(group, operation)
    if isinstance(group, ProcessGroup):
        # To dynamo it is opaque, but for its name, which it guards.
        return _place_of_group(group.group_name, operation)
    # Only id() makes dynamo guard which communicator it is, and in torch 2.11 the functions it
    # evaluates while tracing take only constants.
    return _place_at(id(communicator_of(group, operation)), operation)


def _place(communicator: Communicator) -> Place:
    return key_of(communicator), communicator.rank, communicator.world_size


@evaluated_while_tracing
def _default_place(operation: str) -> Place:
    communicator = default_communicator(operation)
    return DEFAULT, communicator.rank, communicator.world_size


@evaluated_while_tracing
def _place_at(identity: int, operation: str) -> Place:
    communicator = _live_at(identity)
    if communicator is None:
        raise RingcommError(
            f"{operation}: expected a communicator of this process as the group, got one that was "
            "forked from another process; build a new one"
        )
    return _place(communicator)


@evaluated_while_tracing
def _place_of_group(name: str, operation: str) -> Place:
    return _place(communicator_of(_resolve_process_group(GroupName(name)), operation))


def _live_at(identity: int) -> Communicator | None:
    while True:
        try:
            found = (each for each in live if id(each) == identity)
            return cast("Communicator | None", next(found, None))
        except RuntimeError:  # another thread built a communicator meanwhile
            continue


def key_of(communicator: Communicator) -> str:
    """The key of a communicator, which it is found by from now on; see NOTE [Group keys]."""
    key = _keys.get(communicator)
    if key is not None and _holders.get(key) is communicator:
        return key
    stem = f"{communicator.name}:{communicator.rank}/{communicator.world_size}"
    with _guard:
        key = next(each for each in _numbered(stem) if _is_free(each, communicator))
        _holders[key] = communicator
        _keys[communicator] = key
    return key


def _numbered(stem: str) -> Iterator[str]:
    yield stem
    yield from (f"{stem}#{number}" for number in count(1))


def _is_free(key: str, communicator: Communicator) -> bool:
    holder = _holders.get(key)
    return holder is None or holder is communicator or holder.aborted


def key_of_group(name: str) -> str:
    """The key of a process group of the backend; see NOTE [Groups of the backend in a graph]."""
    return _OF_TORCH + name


def communicator_named(name: str) -> Communicator | None:
    """The host's communicator of the process group of this name, if it is of the backend."""
    behind = getattr(_resolve_process_group(GroupName(name)), "communicator", None)
    return behind if isinstance(behind, Communicator) else None


def groups_of_the_backend() -> tuple[str, ...]:
    """The names of this process's groups that are of the backend."""
    names = sorted(_world.pg_names.values())
    return tuple(name for name in names if communicator_named(name) is not None)


def find(key: str, world_size: int, operation: str) -> Communicator:
    """The communicator that a key stands for in this thread.

    Raises:
        RingcommError: it is gone, or there is no default group.
        ArgumentError: the default group has another world size than when the graph was traced.
    """
    if key.startswith(_OF_TORCH):
        name = key.removeprefix(_OF_TORCH)
        member = communicator_named(name)
        if member is None:
            raise RingcommError(
                f"{operation}: expected the process group {name!r} to be of the backend "
                '"ringcomm", as when this function was compiled; compile it anew'
            )
        return member
    if key != DEFAULT:
        found = _holders.get(key)
        if found is None:
            raise RingcommError(
                f"{operation}: the communicator {key!r} is gone, or this process has not called "
                "ringcomm.functional with it yet; keep it alive for as long as its graphs run"
            )
        return found
    communicator = default_communicator(operation)
    if communicator.world_size != world_size:
        raise ArgumentError(
            f"{where(operation, communicator.rank, communicator.world_size)}: expected the default "
            f"group to have {world_size} ranks as when this function was compiled, got "
            f"{communicator.world_size}; call torch.compiler.reset(), or pass group="
        )
    return communicator
