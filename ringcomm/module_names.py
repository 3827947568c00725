"""Names of modules, and the patterns by which users choose some of them."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

__all__ = ["find_modules", "matches", "some"]

# How many names a message has at most.
_NAMED = 5
# What torch.compile() and torch's activation checkpoints put between a module and its name.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


def find_modules(model: nn.Module, pattern: str) -> list[tuple[str, nn.Module]]:
    """Returns the modules that a pattern names, with their names as of ``named_modules()``.

    Args:
        model: the whole.
        pattern: a name, in which a ``*`` stands for any characters of one part. A wrapper has
            the name of the module in it, and stands for both.
    """
    found: dict[str, tuple[str, nn.Module]] = {}
    for name, module in model.named_modules():
        plain = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
        if matches(pattern, plain):
            found.setdefault(plain, (name, module))
    return list(found.values())


def matches(pattern: str, name: str) -> bool:
    """Tells whether a pattern names something of this name."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def some(names: Sequence[str]) -> str:
    """Returns names for a message: a few, and how many more there are."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(map(repr, names[:_NAMED])) + more
