"""The random generators of a rank, in a checkpoint and back."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch

from ringcomm.errors import CheckpointError

Tensor = torch.Tensor


def save_generators(device: torch.device) -> tuple[dict[str, Tensor], list[Any]]:
    """torch's generators (uint8 tensors, by name) and Python's (plain JSON)."""
    tensors = {"rng.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        tensors["rng.cuda"] = torch.cuda.get_rng_state(device)
    version, numbers, gauss = random.getstate()
    return tensors, [version, list(numbers), gauss]


def check_generators(tensors: Mapping[str, Tensor], python: Any) -> None:
    """Raises CheckpointError unless these are states that :func:`load_generators` takes.

    Those of a GPU are known only there, and not checked.
    """
    try:
        torch.Generator().set_state(tensors["rng.cpu"])
        random.Random().setstate(_python_state(python))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"random generators: cannot be restored: {error!r}") from error


def load_generators(tensors: Mapping[str, Tensor], python: Any, device: torch.device) -> None:
    """Undoes :func:`save_generators`, once checked."""
    random.setstate(_python_state(python))
    torch.set_rng_state(tensors["rng.cpu"])
    if device.type == "cuda" and "rng.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["rng.cuda"], device)


def _python_state(python: Any) -> tuple[Any, ...]:
    version, numbers, gauss = python
    return version, tuple(numbers), gauss
