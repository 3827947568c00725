# SPDX-License-Identifier: Apache-2.0
"""Hands kernels that Triton has compiled to the native module, which launches them at less cost."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from triton import __version__ as TRITON_VERSION
from triton import knobs

from ringcomm import _native

from .launch import KernelPlan, RankPointers, arguments_of

__all__ = ["RefusedError", "has_hooks", "native_kernel", "native_or_warn", "numbers_of"]

# Bytes of a parameter by its type: by Triton's name for a number's type, and by PTX's suffix.
_NUMBER_BYTES = {"i32": 4, "i64": 8}
_PTX_BYTES = {"32": 4, "64": 8}
# Triton 3.6 to 3.9 pass two pointers after the arguments, to global and to profile scratch memory
# (launchKernel in backends/nvidia/driver.c). Kernels that use such memory are left to Triton.
_SCRATCH_POINTERS = 2
# A launch with more shared memory needs one more attribute (_launch in Triton's driver.c).
_MOST_SHARED_BYTES = 228 << 10
# The metadata of a plain launch of a grid of blocks: each field with its value.
_PLAIN = {
    "num_ctas": 1,
    "launch_cooperative_grid": False,
    "launch_pdl": False,
    "global_scratch_size": 0,
    "profile_scratch_size": 0,
}

_loaded: list[Any] = []  # keeps kernels alive: a kernel that is collected unloads its module
_warned: set[str] = set()


class RefusedError(Exception):
    """The native module cannot launch the kernel, only Triton can; the text says why."""


def has_hooks() -> bool:
    """True while Triton calls a hook at each launch, for example of its profiler."""
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return any(hook is not None and getattr(hook, "calls", True) for hook in hooks)


def numbers_of(plan: KernelPlan, ranks: Sequence[RankPointers], timeout_ns: int) -> tuple[int, ...]:
    """Returns the numbers that a launch passes, in the order of the kernel's parameters."""
    return tuple(number for number, _ in _leaves(arguments_of(plan, ranks, timeout_ns)))


def _leaves(values: Any, inside: bool = False) -> Iterator[tuple[Any, bool]]:
    """Yields the elements of nested tuples, and whether each is inside a tuple."""
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _leaves(value, True)
        else:
            yield value, inside


def _parameter_bytes(ptx: str, name: str) -> list[int]:
    """Returns the sizes of a kernel's parameters in bytes, as its PTX declares them."""
    entry = re.search(rf"\.entry\s+{re.escape(name)}\s*\(([^)]*)\)", ptx)
    if entry is None:
        raise RefusedError(f"its PTX has no entry {name}")
    found = [re.match(r"\s*\.param\s+\.[bsu](32|64)\b", each) for each in entry[1].split(",")]
    if not all(found):
        raise RefusedError("its PTX declares parameters of unknown types")
    return [_PTX_BYTES[each[1]] for each in found if each is not None]


def _check_metadata(metadata: Any) -> None:
    for name, plain in _PLAIN.items():
        if getattr(metadata, name, plain) != plain:
            raise RefusedError(f"it has {name}={getattr(metadata, name)}")
    if metadata.shared > _MOST_SHARED_BYTES:
        raise RefusedError(f"it has {metadata.shared} bytes of shared memory")


def _parameters(made: Any) -> list[tuple[str, bool]]:
    """Returns the types of a kernel's numbers, and whether each is in a tuple: see endpoint.py."""
    if any(made.src.attrs.values()):
        raise RefusedError(f"it was compiled for properties of its numbers: {made.src.attrs}")
    types = list(_leaves(made.src.signature.values()))
    if any(inside and kind == "constexpr" for kind, inside in types):
        raise RefusedError("it was compiled for the value of a number in a tuple")
    numbers = [(kind, inside) for kind, inside in types if kind != "constexpr"]
    unknown = {kind for kind, _ in numbers if kind not in _NUMBER_BYTES}
    if unknown:
        raise RefusedError(f"it has parameters of the types {sorted(unknown)}")
    return numbers


def native_kernel(made: Any, numbers: Sequence[int]) -> _native.TritonKernel:
    """Returns the native launcher of a kernel that Triton has compiled and launched once.

    Args:
        made: a CompiledKernel.
        numbers: the numbers of that launch; see :func:`numbers_of`.

    Raises:
        RefusedError: the kernel's parameters are not the ones that this module expects of Triton,
            or its launch is more than a grid of blocks.
    """
    _check_metadata(made.metadata)
    parameters = _parameters(made)
    expected = [_NUMBER_BYTES[kind] for kind, _ in parameters] + [8] * _SCRATCH_POINTERS
    declared = _parameter_bytes(made.asm["ptx"], made.metadata.name)
    if declared != expected:
        raise RefusedError(
            f"expected parameters of {expected} bytes, got {declared} in the PTX of Triton "
            f"{TRITON_VERSION}"
        )
    kernel = _native.TritonKernel(
        function=made.function,
        threads=made.metadata.num_warps * made.metadata.target.warp_size,
        shared_bytes=made.metadata.shared,
        parameters=[(_NUMBER_BYTES[kind] == 8, inside) for kind, inside in parameters],
        scratch_pointers=_SCRATCH_POINTERS,
    )
    if not kernel.takes(list(numbers)):
        raise RefusedError("it was not compiled for the numbers of its launch")
    _loaded.append(made)
    return kernel


def native_or_warn(made: Any, numbers: Sequence[int]) -> _native.TritonKernel | None:
    """Returns :func:`native_kernel`'s result, or None with a warning, once for each kernel."""
    try:
        return native_kernel(made, numbers)
    except RefusedError as refusal:
        name = made.metadata.name
        if name not in _warned:
            _warned.add(name)
            warnings.warn(
                f"ringcomm leaves the launches of {name} to Triton {TRITON_VERSION}, which takes "
                f"the host 0.1 ms and more for each: {refusal}",
                RuntimeWarning,
                stacklevel=2,
            )
        return None
