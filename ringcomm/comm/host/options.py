# SPDX-License-Identifier: Apache-2.0
"""Tunables of a communicator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ringcomm import _native
from ringcomm.errors import ArgumentError
from ringcomm.integers import integer, real
from ringcomm.json_reader import shown

# The default of torch.distributed, so that a program behaves the same with both.
DEFAULT_TIMEOUT = timedelta(minutes=30)
# The native deadline is a signed 32-bit count of milliseconds.
LONGEST_TIMEOUT_S = 2**31 // 1000 - 1
_WHOLE_NUMBERS = (
    *("segment_bytes", "slots", "channels", "ll_bytes", "copy_engine_bytes", "multicast_bytes"),
    *("records", "sum_group_size", "largest_object_bytes", "threads"),
)


COMPRESSIONS = ("none", "param", *_native.QUANT_FORMATS)


def check_compression(compression: Any, operation: str = "") -> None:
    """Raises ArgumentError if ``compression`` is not the name of a compression."""
    if compression not in COMPRESSIONS:
        head = f"{operation}: " if operation else ""
        raise ArgumentError(
            f"{head}compression: expected one of {', '.join(COMPRESSIONS)}, got {compression!r}"
        )


def seconds_of(timeout: timedelta | float, name: str = "timeout") -> float:
    """Converts a timeout to seconds, at most ``LONGEST_TIMEOUT_S``.

    Raises:
        ArgumentError: ``timeout`` is not a positive timedelta or number of seconds.
    """
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else real(timeout)
    if seconds is None or not seconds > 0:
        raise ArgumentError(f"{name}: expected a timedelta or seconds > 0, got {timeout!r}")
    return min(seconds, float(LONGEST_TIMEOUT_S))


def milliseconds_of(timeout: timedelta | float) -> int:
    """Converts a timeout to whole milliseconds, at least 1; raises like :func:`seconds_of`."""
    return max(1, round(seconds_of(timeout) * 1000))


@dataclass(frozen=True)
class CommOptions:
    """Tunables of a communicator; all ranks must pass equal values, except for ``timeout``,
    ``single_copy`` and ``threads``.

    Attributes:
        timeout: how long a call waits for its peers, as timedelta or seconds.
        segment_bytes: size of the segments into which a chunk (on a device: a channel's slice of a
            chunk) is cut for pipelining; a power of two of at least 64, or 0 for a size that suits
            the number of ranks.
        slots: staging slots per peer; a power of two, at least 2.
        channels: of a communicator on a device: blocks per collective, or 0 for a number that suits
            the device and the ranks that share it. On the host: the most threads of a rank that
            take part in a collective, up to 64, or 0 for the machine's cores divided by the ranks,
            up to 8. Each channel has staging slots of its own.
        threads: of a communicator on the host: the threads that large calls use, up to 64, or 0
            for ``RINGCOMM_THREADS``. If this variable is not set, calls use as many threads as
            torch (``torch.set_num_threads``), at most the rank's cores divided by the ranks on
            them. Results have the same bits with any number of threads. Collectives use at most
            ``channels`` threads, and one thread if the ranks have more threads than cores.
        ll_bytes: of a communicator on a device: the largest message that may use LL; a
            multiple of 64, or 0 for none.
        copy_engine_bytes: of a communicator on a device: the bytes that the copy engines stage at a
            time; a multiple of 64. With 0, ``algorithm="copy_engine"`` works only in plans, which
            need no staging.
        multicast_bytes: of a communicator on devices under one NVSwitch, each with one rank: the
            bytes of each rank's window for ``algorithm="multicast"``, whose calls use the window
            unless they work in place; a multiple of 64, or 0 to do without multicast. Unless it is
            0, building the communicator fails if multicast is not supported.
        records: how many collectives, and how many messages, the flight recorder keeps per rank;
            0 for none.
        single_copy: of a communicator of two ranks on the host: whether each rank copies chunks of
            at least 128 KiB directly out of the other process's plain tensors
            (process_vm_readv). None: where a measurement of this machine shows that it is faster
            than staging, which copies data twice, through the heap; the measurement takes 2 ms of
            each process. True: always; False: never. Data are staged unless both ranks allow the
            single copy and the kernel permits both. The results are the same.
        transport: moves messages between nodes: "gloo" or "nccl", or a function that returns
            a process group of ``torch.distributed`` for (store, rank, size, timeout); "auto" is
            Gloo for CPU tensors and NCCL for GPU tensors. It only moves data: on CPUs it sends and
            receives; on GPUs it exchanges and broadcasts bytes in stream order.
        compression: the form of partial sums between nodes. "none": in the accumulator's type, so
            that a result is rounded once. "param": 16-bit types rounded to the type, which halves
            the bytes and rounds twice. "int8" and "fp8" (a quarter of the bytes) and "int4" (an
            eighth) quantize sums of float32, bfloat16 and float16 in quantization blocks of 128
            numbers with one scale; docs/nodes.md bounds the errors. Other reductions, and those of
            8 KiB or less, are as with "none". A call's own ``compression`` overrides it.
        rails: how ranks of equal local rank exchange between nodes, on the host: "one_shot", each
            with all others; "levels", in two rounds with fewer messages; "ring", each with the
            next node; "auto" is one-shot below 32 nodes, else levels. Only one-shot sums as
            ``sum_group_size`` does.
        kernels: "native", or "triton" for the collectives that have Triton kernels
            (``all_reduce``, ``reduce_scatter_tensor``, ``all_gather_into_tensor``); a call's own
            ``kernels`` overrides it. On the host they run in Triton's interpreter.
        sum_group_size: of a communicator on the host: 0 reduces in rank order. L >= 1 reduces in
            groups of L consecutive ranks (the last group may be smaller), then the groups' results
            in order, all in the accumulator's type and with one rounding at the end: the same bits
            as on nodes of L ranks. If the groups' heaps are bound to different NUMA nodes, large
            sums use two levels where this is faster, with the same bits. Groups exclude
            ``algorithm="ring"`` for reductions, and ``kernels="triton"``.
        objects: "data", or "pickle" to let the object collectives send anything. Unpickling runs
            code that the sender chose, so "pickle" is for ranks that trust each other.
        largest_object_bytes: the largest object that the object collectives send or accept from a
            peer.
    """

    timeout: timedelta | float = DEFAULT_TIMEOUT
    segment_bytes: int = 0
    slots: int = 4
    channels: int = 0
    threads: int = 0
    ll_bytes: int = 32 << 10
    copy_engine_bytes: int = 0
    multicast_bytes: int = 0
    records: int = 256
    single_copy: bool | None = None
    transport: str | Callable[..., Any] = "auto"
    compression: str = "none"
    rails: str = "auto"
    kernels: str = "native"
    sum_group_size: int = 0
    objects: str = "data"
    largest_object_bytes: int = 4 << 30

    def __post_init__(self) -> None:
        seconds_of(self.timeout)
        for name in _WHOLE_NUMBERS:
            number = integer(getattr(self, name))
            if number is None:
                raise ArgumentError(
                    f"{name}: expected an integer from -2^63 to 2^63 - 1, got "
                    f"{shown(getattr(self, name))}"
                )
            object.__setattr__(self, name, number)
        if self.segment_bytes != 0 and (
            self.segment_bytes < 64 or self.segment_bytes & (self.segment_bytes - 1)
        ):
            raise ArgumentError(
                "segment_bytes: expected 0 or a power of two of at least 64, got "
                f"{self.segment_bytes}"
            )
        for name in ("ll_bytes", "copy_engine_bytes", "multicast_bytes"):
            if getattr(self, name) < 0 or getattr(self, name) % 64:
                raise ArgumentError(
                    f"{name}: expected 0 or a multiple of 64, got {getattr(self, name)}"
                )
        if self.single_copy is not None and type(self.single_copy) is not bool:
            raise ArgumentError(
                f"single_copy: expected None, True or False, got {self.single_copy!r}"
            )
        if self.kernels not in ("native", "triton"):
            raise ArgumentError(f"kernels: expected native or triton, got {self.kernels!r}")
        if not callable(self.transport) and self.transport not in ("auto", "gloo", "nccl"):
            raise ArgumentError(
                f"transport: expected auto, gloo, nccl or a function, got {self.transport!r}"
            )
        check_compression(self.compression)
        if self.rails not in ("auto", "one_shot", "levels", "ring"):
            raise ArgumentError(
                f"rails: expected auto, one_shot, levels or ring, got {self.rails!r}"
            )
        if self.compression in _native.QUANT_FORMATS and self.rails in ("levels", "ring"):
            raise ArgumentError(
                f'rails: expected auto or one_shot with compression="{self.compression}", got '
                f"{self.rails!r}: "
                "each round would quantize values that earlier rounds have rounded"
            )
        if self.sum_group_size < 0:
            raise ArgumentError(f"sum_group_size: expected 0 or more, got {self.sum_group_size}")
        if self.sum_group_size and self.kernels == "triton":
            raise ArgumentError(
                'sum_group_size: expected 0 with kernels="triton", whose kernels sum in rank '
                f"order, got {self.sum_group_size}"
            )
        if self.objects not in ("data", "pickle"):
            raise ArgumentError(f"objects: expected data or pickle, got {self.objects!r}")
        if self.largest_object_bytes < 1:
            raise ArgumentError(
                f"largest_object_bytes: expected 1 or more, got {self.largest_object_bytes}"
            )
        if self.channels < 0:
            raise ArgumentError(f"channels: expected 0 or more, got {self.channels}")
        if not 0 <= self.threads <= _native.MOST_CHANNELS:
            raise ArgumentError(
                f"threads: expected 0 to {_native.MOST_CHANNELS}, got {self.threads}"
            )
        if not 0 <= self.records <= _native.MAX_RECORDS:
            raise ArgumentError(f"records: expected 0 to {_native.MAX_RECORDS}, got {self.records}")
        if self.slots < 2 or self.slots & (self.slots - 1):
            raise ArgumentError(f"slots: expected a power of two >= 2, got {self.slots}")

    @property
    def transport_name(self) -> str:
        """The transport's name, which ranks compare."""
        if callable(self.transport):
            return str(getattr(self.transport, "__qualname__", type(self.transport).__qualname__))
        return self.transport

    @property
    def timeout_s(self) -> float:
        return seconds_of(self.timeout)
