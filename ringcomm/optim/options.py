# SPDX-License-Identifier: Apache-2.0
"""The options of the sharded optimizers, apart from torch's own arguments."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ringcomm import _native
from ringcomm.comm.host.options import check_compression
from ringcomm.errors import ArgumentError, UnsupportedError
from ringcomm.integers import integer
from ringcomm.offload.scratch import Disk
from ringcomm.optim.layout import DEFAULT_BUCKET_ELEMS, checked_bucket_elems

_CHOICES = {
    "algorithm": ("auto", "one_shot", "ring"),
    "kernels": ("native", "triton"),
    "reduce": ("avg", "sum"),
    "master": ("fp32", "remainder", "none"),
    "rounding": ("nearest", "stochastic"),
    "unused": ("skip", "zero"),
    "state": ("world", "node"),
    "update": ("in_step", "in_backward"),
}
PARAMETER_COMPRESSIONS = ("param", *_native.QUANT_FORMATS)


@dataclass(frozen=True)
class Compression:
    """The formats in which training sends data between nodes, where links are slow.

    Attributes:
        gradients: format of sums of gradients: "none" (not rounded), "param" (rounded to the
            gradients' dtype), or a quantized format: "int8", "fp8" or "int4", called qgZ by ZeRO++
            (Wang et al., 2023). None means the communicator's ``CommOptions.compression``.
        parameters: format of updated parameters: "param" (their dtype), or a quantized format:
            "int8", "fp8" or "int4". If quantized, all ranks compute with quantized and dequantized
            FP32 masters; the state then has masters even of FP32 parameters. ZeRO++: qwZ.
        error_feedback: keep the quantization errors of gradients, and add them to the next
            gradients that this rank quantizes. The errors are optimizer state: 4 bytes per element,
            divided over the ranks of a node. See NOTE [Error feedback] in
            ``comm/nodes/compressed_sums.py``.
    """

    gradients: str | None = None
    parameters: str = "param"
    error_feedback: bool = False

    def __post_init__(self) -> None:
        if self.gradients is not None:
            check_compression(self.gradients, "gradients")
        if not any(self.error_feedback is state for state in (True, False)):
            raise ArgumentError(
                f"error_feedback: expected True or False, got {self.error_feedback!r}"
            )
        if self.error_feedback and self.gradients not in _native.QUANT_FORMATS:
            raise ArgumentError(
                f"error_feedback: expected quantized gradients, one of "
                f"{', '.join(_native.QUANT_FORMATS)}, got {self.gradients!r}, which makes no "
                "quantization errors to keep"
            )
        if self.parameters not in PARAMETER_COMPRESSIONS:
            known = ", ".join(PARAMETER_COMPRESSIONS)
            raise ArgumentError(
                f"parameters: compression: expected one of {known}, got {self.parameters!r}"
            )

    @property
    def quantizes_parameters(self) -> bool:
        """True if nodes exchange parameters in quantized form."""
        return self.parameters != "param"

    def check_parameters(self, state: str, master: str, rounding: str) -> None:
        """Checks that the optimizer's options allow quantized parameters, if these are quantized.

        Args:
            state: as in :class:`AdamWOptions`.
            master: as in :class:`AdamWOptions`.
            rounding: as in :class:`AdamWOptions`.

        Raises:
            ArgumentError: no parameters are sent between nodes, or there are no FP32 masters to
                quantize.
        """
        if not self.quantizes_parameters:
            return
        asked = f"compression: parameters={self.parameters!r}"
        if state == "node":
            raise ArgumentError(
                f'{asked}: expected state="world", got "node": nodes then exchange sums of '
                "gradients (Compression(gradients=)) and no parameters"
            )
        if master != "fp32" or rounding != "nearest":
            raise ArgumentError(
                f'{asked}: expected master="fp32" and rounding="nearest", since FP32 masters are '
                f"quantized to the nearest value; got {master!r} and {rounding!r}"
            )


@dataclass(frozen=True)
class AdamWOptions:
    """Options of a sharded optimizer; they must be equal on all ranks.

    Attributes:
        algorithm: algorithm of the collectives: "auto", "one_shot" or "ring".
        kernels: "native" or, for AdamW and Adam, "triton".
        bucket_elems: maximum number of elements of a bucket that holds more than one parameter; a
            multiple of 512.
        reduce: "avg" averages the ranks' gradients, as DDP does, and "sum" adds them.
        master: master weights of 16-bit parameters: "fp32" keeps an FP32 copy. "remainder" keeps
            the low 16 bits of a master, whose high bits are the bfloat16 parameter: FP32 precision
            in half the memory, but ties round away from zero. "none" keeps no masters, and needs
            stochastic rounding.
        rounding: rounding of 16-bit parameters: "nearest" or "stochastic".
        seed: seed of stochastic rounding; with it the bits do not depend on the number of ranks.
        accumulate_dtype: None sums gradients in ``p.grad``, in its dtype, as in torch.
            ``torch.float32`` adds each backward's gradients to FP32 sums, and drops ``p.grad``.
        unused: treatment of a parameter without gradient on any rank: "skip" leaves it as it is, as
            torch does (with several ranks this takes one small all-reduce), and "zero" steps it
            with a gradient of zero.
        check_finite: skip a step whose gradient is not finite, even without loss scaling; the step
            then takes two passes.
        broadcast_parameters: True to copy rank 0's parameters to all ranks at preparation, as DDP.
        state: on several nodes, "world" shards the state over all ranks, and sends updated
            parameters between nodes. "node" shards it over the ranks of each node, so that each
            node has a copy, which takes more memory; nodes then exchange sums of gradients instead.
            On one node the two are equal.
        compression: the formats of the data that nodes exchange.
        offload_state: where the state is kept: None for the memory of the parameters' device; a
            :class:`ringcomm.Disk`, for parameters on the CPU; or "cpu" for pinned memory of the
            host, for parameters on a device. Each step streams offloaded state through the device's
            memory in pieces, with the same bits.
        update: "in_step" updates parameters in ``step()``. "in_backward" updates them while
            backward runs, for modules that ``ringcomm.zero`` has sharded at stage 2 or 3: each
            bucket is updated, and its gradients dropped, as soon as they are reduced. ``step()``
            only ends the step. The bits are the same, but clipping, loss scaling and
            ``check_finite`` are unsupported, since they need all gradients first.
    """

    algorithm: str = "auto"
    kernels: str = "native"
    bucket_elems: int = DEFAULT_BUCKET_ELEMS
    reduce: str = "avg"
    master: str = "fp32"
    rounding: str = "nearest"
    seed: int = 0
    accumulate_dtype: torch.dtype | None = None
    unused: str = "skip"
    check_finite: bool = False
    broadcast_parameters: bool = True
    state: str = "world"
    compression: Compression = field(default_factory=Compression)
    offload_state: Disk | str | None = None
    update: str = "in_step"

    def __post_init__(self) -> None:
        if isinstance(self.state, Disk):
            raise ArgumentError(
                "state: expected world or node, got a Disk; pass that as offload_state="
            )
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ArgumentError(
                    f"{name}: expected one of {', '.join(choices)}, got {getattr(self, name)!r}"
                )
        object.__setattr__(self, "bucket_elems", checked_bucket_elems(self.bucket_elems))
        seed = integer(self.seed, most=2**64 - 1)
        if seed is None or not 0 <= seed < 2**64:
            raise ArgumentError(f"seed: expected an integer of 64 bits, >= 0, got {self.seed!r}")
        object.__setattr__(self, "seed", seed)
        if self.accumulate_dtype not in (None, torch.float32):
            raise ArgumentError(
                f"accumulate_dtype: expected None or torch.float32, got {self.accumulate_dtype!r}"
            )
        if not (
            self.offload_state is None
            or self.offload_state == "cpu"
            or isinstance(self.offload_state, Disk)
        ):
            raise ArgumentError(
                f'offload_state: expected a ringcomm.Disk, "cpu" or None, '
                f"got {self.offload_state!r}"
            )
        if not isinstance(self.compression, Compression):
            raise ArgumentError(f"compression: expected a Compression, got {self.compression!r}")
        if self.update == "in_backward" and self.check_finite:
            raise ArgumentError(
                'check_finite: expected False with update="in_backward", got True: parameters '
                "change before all gradients are known"
            )
        self._check_master()
        self.compression.check_parameters(self.state, self.master, self.rounding)
        if self.compression.quantizes_parameters and self.offload_state is not None:
            raise UnsupportedError(
                f"offload_state: expected None with compression: "
                f"parameters={self.compression.parameters!r}, got "
                f"{self.offload_state!r}: the module keeps the masters, in memory"
            )

    def _check_master(self) -> None:
        stochastic = self.rounding == "stochastic"
        if self.master == "none" and not stochastic:
            raise ArgumentError(
                'master: "none" loses every step below half an ulp of a parameter if rounding '
                'is to nearest; pass rounding="stochastic" too, or keep a master'
            )
        if self.master == "remainder" and stochastic:
            raise ArgumentError(
                'master: "remainder" fixes how parameters are rounded; pass rounding="nearest", or '
                'master="fp32" or "none" with stochastic rounding'
            )

    def describe(self) -> dict[str, Any]:
        """Returns the options as JSON types."""
        described = asdict(self)
        described["accumulate_dtype"] = str(self.accumulate_dtype)
        # Leave out the disk's folder and buffer sizes, which may be different on each rank.
        described["offload_state"] = (
            "disk" if isinstance(self.offload_state, Disk) else self.offload_state or "memory"
        )
        return described
