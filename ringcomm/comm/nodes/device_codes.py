"""Codes of the wires on a device, by kernels that the calls of a node's communicator enqueue.

They compile the lines that the host does, ``kernels/include/ringcomm/core/wire_codes.h``, and give
its bits. Runs of codes lie behind each other at multiples of ``ALIGN_BYTES``, so that lanes load
and store whole words of them; that is a few bytes more than on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ringcomm import _native
from ringcomm.comm.nodes.sums import Span
from ringcomm.cuda.runtime import DeviceRuntime

Tensor = torch.Tensor

ALIGN_BYTES = 16
_FLOAT32 = _native.DTYPES["float32"]
_TYPES = ("float32", "bfloat16", "float16")


def size_bytes(wire: str, elems: int) -> int:
    """Returns the bytes of a run of so many numbers, up to the next one."""
    coded_bytes = _native.wire_bytes(_native.WIRES[wire], elems)
    return -(-coded_bytes // ALIGN_BYTES) * ALIGN_BYTES


def preload(place: tuple[DeviceRuntime, int], wire: str) -> None:
    """Loads a coded wire's kernels, so that no call has to load them while a peer waits."""
    runtime, device = place
    for dtype in _TYPES if wire in _native.WIRES else ():
        for what in ("encode_wire", "sum_wires"):
            runtime.find_kernel(device, f"wires_{wire}", f"rc_{what}_{dtype}")


class DeviceCodes:
    """Makes codes on a rank's device, and adds up what they stand for.

    Args:
        enqueue: enqueues a call of the node's communicator, by its native name and arguments.
        room: returns so many bytes on the device.
    """

    def __init__(self, enqueue: Callable[..., None], room: Callable[[int], Tensor]) -> None:
        self._enqueue = enqueue
        self._room = room

    def encode(self, wire: str, runs: Sequence[Tensor]) -> Tensor:
        """Returns the codes of runs in float32, behind each other, of :func:`size_bytes` each."""
        sizes = [size_bytes(wire, run.numel()) for run in runs]
        coded = self._room(sum(sizes))
        for run, to in zip(runs, torch.split(coded, sizes), strict=True):
            if run.numel():
                given = (run.data_ptr(), _FLOAT32, to.data_ptr(), run.numel())
                self._enqueue("encode_wire", _native.WIRES[wire], *given)
        return coded

    def add_up(
        self, wire: str, coded: Tensor, count: int, out: Span, dtype: int, divide_by: int = 0
    ) -> None:
        """Adds up the numbers of ``count`` runs of codes, in order, with one rounding.

        Args:
            wire: "int8", "fp8" or "int4".
            coded: from :meth:`encode` of any ranks, as many numbers each as ``out`` has.
            count: how many runs there are.
            out: where the sums are stored.
            dtype: of ``out``, as the native module has it.
            divide_by: divides the sums, unless 0.
        """
        if out.elems:
            runs = (coded.data_ptr(), count, size_bytes(wire, out.elems))
            result = (out.ptr, dtype, out.elems, divide_by)
            self._enqueue("sum_wires", _native.WIRES[wire], *runs, *result)
