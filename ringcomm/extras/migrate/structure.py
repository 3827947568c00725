"""Parts of what a checkpoint's file holds; errors say what was expected, and what was found."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from ringcomm.errors import CheckpointError, printable
from ringcomm.extras.migrate.torch_file import Inert
from ringcomm.json_reader import shown

_ARTICLES = {dict: "a dict", list: "a list", object: "a value"}


def entry(value: Any, name: str, called: object, kind: type = object) -> Any:
    """Returns an entry of a dict.

    Args:
        value: expected to be a dict that has the entry.
        name: of the entry.
        called: name of the file or folder, for errors.
        kind: dict, list or object, which the entry is to be.

    Raises:
        CheckpointError: the value is no dict, lacks the entry, or has it of another kind.
    """
    if not isinstance(value, dict) or name not in value:
        _fail(called, f"expected a dict with {name!r}", value)
    return of_kind(value[name], kind, f"{called}: {name}")


def attribute(value: Any, name: str, called: object, kind: type) -> Any:
    """Returns an attribute of a pickled object.

    Raises:
        CheckpointError: the value is no object, lacks the attribute, or has it of another kind.
    """
    if not isinstance(value, Inert) or not isinstance(value.state, dict) or name not in value.state:
        _fail(called, f"expected an object with {name!r}", value)
    return of_kind(value.state[name], kind, f"{called}: {name}")


def of_kind(value: Any, kind: type, called: object) -> Any:
    """Returns a value of a kind: dict, list or object.

    Raises:
        CheckpointError: it is of another kind.
    """
    if not isinstance(value, kind):
        _fail(called, f"expected {_ARTICLES[kind]}", value)
    return value


def _fail(called: object, expected: str, value: Any) -> NoReturn:
    raise CheckpointError(f"{called}: {expected}, got {described(value)}")


def described(value: Any) -> str:
    """Words a value of unknown size, for a message."""
    if isinstance(value, Inert):
        return f"an object of {printable(value.name)}"
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, dict):
        return f"a dict with {printable(shown(list(value)))}"
    return f"{type(value).__name__} {printable(shown(value))}"
