"""What a rank has for itself in a checkpoint: random generators, and modules' extra state.

Tensors are taken out of extra state, and None stands where they were; the rest is plain data:

    {"layers.0": {"value": {"scale": 2, "history": None}, "tensors": [[[1], "cpu"]]}}

Tensor number n of it is called "extra.layers.0.n". Its path is counted, and not of keys, which may
be anything: here it was the second item of the dict.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ringcomm.errors import CheckpointError, UnsupportedError
from ringcomm.json_reader import DAMAGE, encode, in_words
from ringcomm.module_names import named_modules
from ringcomm.optim.dtensors import PLAIN_KINDS
from ringcomm.zero.checkpoint.tensor_file import dtype_name

Tensor = torch.Tensor
Path = tuple[int, ...]


def save_generators(device: torch.device) -> tuple[dict[str, Tensor], list[Any]]:
    """torch's generators (uint8 tensors, by name) and Python's (plain JSON)."""
    tensors = {"rng.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        tensors["rng.cuda"] = torch.cuda.get_rng_state(device)
    version, numbers, gauss = random.getstate()
    return tensors, [version, list(numbers), gauss]


def check_generators(tensors: Mapping[str, Tensor], python: Any, device: torch.device) -> None:
    """Raises CheckpointError unless these are states that :func:`load_generators` takes."""
    try:
        torch.Generator().set_state(tensors["rng.cpu"])
        if device.type == "cuda" and "rng.cuda" in tensors:
            torch.Generator(device).set_state(tensors["rng.cuda"])
        random.Random().setstate(_python_state(python))
    except DAMAGE as error:
        raise CheckpointError(
            f"random generators: cannot be restored: {in_words(error)}"
        ) from error


def load_generators(tensors: Mapping[str, Tensor], python: Any, device: torch.device) -> None:
    """Undoes :func:`save_generators`, once checked."""
    random.setstate(_python_state(python))
    torch.set_rng_state(tensors["rng.cpu"])
    if device.type == "cuda" and "rng.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["rng.cuda"], device)


def _python_state(python: Any) -> tuple[Any, ...]:
    version, numbers, gauss = python
    return version, tuple(numbers), gauss


@dataclass(frozen=True)
class ExtraState:
    """The extra state of all modules of one rank.

    Attributes:
        plain: by module, plain data.
        tensors: by name.
    """

    plain: dict[str, Any]
    tensors: dict[str, Tensor]


def modules_with_extra_state(root: nn.Module) -> dict[str, nn.Module]:
    """Returns by name the modules whose class says how to get extra state, as torch finds them."""
    return {
        name: module
        for name, module in named_modules(root)
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def save_extra_state(root: nn.Module, operation: str) -> ExtraState:
    """Copies of the extra state of all modules.

    Raises:
        UnsupportedError: it holds what is neither plain nor a tensor; names the module.
    """
    plain, tensors = {}, {}
    for name, module in modules_with_extra_state(root).items():
        called = f"{operation}: extra state of module {_shown(name, module)}"
        found: dict[Path, Tensor] = {}
        value = _take_out(module.get_extra_state(), (), found)
        encode(value, called)
        told = []
        for number, (path, tensor) in enumerate(found.items()):
            if tensor.layout is not torch.strided or tensor.device.type == "meta":
                raise UnsupportedError(
                    f"{called}: expected tensors that are dense and have values, got one of "
                    f"{tensor.layout} on {tensor.device}"
                )
            dtype_name(tensor.dtype, called)
            # It may be a parameter's, whose memory comes and goes.
            tensors[_tensor_name(name, number)] = tensor.detach().clone()
            told.append([list(path), "cpu" if tensor.device.type == "cpu" else "device"])
        plain[name] = {"value": value, "tensors": told}
    return ExtraState(plain, tensors)


def read_extra_state(
    root: nn.Module,
    saved: ExtraState,
    device: torch.device,
    fail: Callable[[str], CheckpointError],
) -> dict[str, Any]:
    """Returns by module what ``set_extra_state()`` shall get.

    Args:
        root: whose modules must be those that were saved.
        saved: as :func:`save_extra_state` returned it; further tensors do not matter.
        device: where tensors go that were not on the host.
        fail: makes the error.

    Raises:
        CheckpointError: other modules have extra state, or it is damaged.
    """
    if not isinstance(saved.plain, dict):
        raise fail("its extra state is damaged")
    mine, theirs = list(modules_with_extra_state(root)), list(saved.plain)
    if mine != theirs:
        raise fail(
            f"expected extra state of the modules {mine}, as the model has it, got that of {theirs}"
        )
    values = {}
    for name, each in saved.plain.items():
        try:
            found: dict[Path, Tensor] = {}
            for number, (path, place) in enumerate(each["tensors"]):
                tensor = saved.tensors[_tensor_name(name, number)]
                found[tuple(path)] = tensor.to("cpu" if place == "cpu" else device)
            values[name] = _put_in(each["value"], (), found)
            if found:
                raise ValueError(f"no place for the tensors at {sorted(found)}")
        except DAMAGE as error:
            raise fail(f"extra state of module {name!r}: is damaged: {in_words(error)}") from error
    return values


def set_extra_state(
    root: nn.Module, values: Mapping[str, Any], fail: Callable[[str], CheckpointError]
) -> None:
    """Gives each module its state.

    Raises:
        CheckpointError: a module does not take it; what came before it has been set.
    """
    for name, module in modules_with_extra_state(root).items():
        try:
            module.set_extra_state(values[name])
        # A user's method may raise anything.
        except Exception as error:
            raise fail(
                f"module {_shown(name, module)} does not take its extra state: {error!r}"
            ) from error


def _shown(name: str, module: nn.Module) -> str:
    return f"{name!r} ({type(module).__name__})"


def _tensor_name(module: str, number: int) -> str:
    return f"extra.{module}.{number}"


def _take_out(value: Any, path: Path, found: dict[Path, Tensor]) -> Any:
    """``value`` with None in place of tensors, which go to ``found``."""
    if type(value) in PLAIN_KINDS:
        found[path] = value
        return None
    return _rebuilt(value, lambda each, at: _take_out(each, (*path, at), found))


def _put_in(value: Any, path: Path, found: dict[Path, Tensor]) -> Any:
    """Undoes :func:`_take_out`, and empties ``found``."""
    if value is None and path in found:
        return found.pop(path)
    return _rebuilt(value, lambda each, at: _put_in(each, (*path, at), found))


def _rebuilt(value: Any, change: Callable[[Any, int], Any]) -> Any:
    """A container with its items changed, which are counted; anything else as it is."""
    kind = type(value)
    if kind is dict:
        return {key: change(each, at) for at, (key, each) in enumerate(value.items())}
    if kind in (list, tuple):
        return kind(change(each, at) for at, each in enumerate(value))
    return value
