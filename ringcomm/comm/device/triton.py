# SPDX-License-Identifier: Apache-2.0
"""Launches of Triton's kernels on a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ringcomm import _native
from ringcomm.cuda.runtime import DeviceRuntime

if TYPE_CHECKING:
    from ringcomm._tl.geometry import Geometry
    from ringcomm._tl.launch import KernelPlan, RankPointers

__all__ = ["CompiledKernels", "TritonLaunch"]


# NOTE [Launches of Triton's kernels]
#
# Triton itself compiles and launches the first call of each kind. From then on the native module
# launches the compiled kernel, with the parameters in the order of Triton's own launch; a launch by
# Triton takes 150 to 440 us on an H100's host, whatever the size. Calls that take the fast path
# (``engine.compiled``) do not reach this module again.
#
# Triton compiles several kernels for one call: it distinguishes numbers that fit into 32 bits, that
# are 1, and that are multiples of 16. ringcomm's kernels avoid the last two distinctions (RUNTIME
# and tagged() in kernels/tl/endpoint.py). ``TritonKernel.takes`` compares each number with the type
# for which the kernel was compiled. The native module leaves three kinds of calls to Triton: calls
# that no compiled kernel takes, all calls while Triton has launch hooks, and kernels of unknown
# parameters.


class CompiledKernels:
    """The compiled Triton kernels of a rank's calls, which the native module launches.

    Args:
        native: the rank's native object, whose fast calls use these kernels.
        driver: driver of the device.
    """

    def __init__(self, native: _native.DeviceComm, driver: _native.Driver) -> None:
        self._native = native
        self._driver = driver
        self._known: dict[Any, list[_native.TritonKernel]] = {}

    @staticmethod
    def _kind(plan: KernelPlan, ranks: int) -> Any:
        # Key of a kernel: its compile-time properties, except the types of its numeric arguments.
        return plan.kernel.__name__, plan.call[1:], tuple(plan.constants.items()), ranks

    def launch(
        self, plan: KernelPlan, grid: tuple[int, int], stream: int, numbers: tuple[int, ...]
    ) -> bool:
        """Launches a kernel on a stream of the current device; False if Triton must launch it."""
        from ringcomm._tl.native_launch import has_hooks

        if has_hooks():
            return False
        for kernel in self._known.get(self._kind(plan, grid[1]), ()):
            if kernel.takes(numbers):
                kernel.launch(self._driver, grid, stream, numbers)
                return True
        return False

    def add(self, plan: KernelPlan, ranks: int, numbers: tuple[int, ...], made: Any) -> None:
        """Keeps the kernel that Triton has just launched."""
        from ringcomm._tl.native_launch import native_or_warn

        known = self._known.setdefault(self._kind(plan, ranks), [])
        if made is None or any(kernel.takes(numbers) for kernel in known):
            return
        kernel = native_or_warn(made, numbers)
        if kernel is None:
            return
        known.append(kernel)
        if ranks == 1:
            self._native.add_triton(plan.call, kernel)


@dataclass(frozen=True)
class TritonLaunch:
    """A rank's prepared call of a Triton kernel on a device."""

    device_ref: tuple[DeviceRuntime, int]
    plan: KernelPlan
    pointers: RankPointers
    timeout_ns: int
    geometry: Geometry
    compiled: CompiledKernels

    @property
    def prepared_kind(self) -> tuple[int, int]:
        """(key, blocks of one rank); calls that can share a launch have equal keys."""
        plan = self.plan
        key = plan.kernel.__name__, plan.sizes, plan.call, tuple(plan.constants.items())
        return hash(key), self.geometry.channels

    def launch_with(self, others: Sequence[TritonLaunch], stream: int) -> None:
        """Launches this call together with ``others``, calls of the same kind, on ``stream``."""
        from ringcomm._tl.launch import launch_kernel
        from ringcomm._tl.native_launch import numbers_of

        plan = self.plan
        ranks = [self.pointers, *(other.pointers for other in others)]
        numbers = numbers_of(plan, ranks, self.timeout_ns)
        grid = self.geometry.channels, len(ranks)
        if self.compiled.launch(plan, grid, stream, numbers):
            return

        def launch() -> None:
            made = launch_kernel(plan, ranks, self.timeout_ns, self.geometry)
            self.compiled.add(plan, len(ranks), numbers, made)

        runtime, device = self.device_ref
        runtime.call_on_stream(device, stream, launch)
