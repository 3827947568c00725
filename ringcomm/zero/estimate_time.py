"""The traffic of a step, its time, and the share of it that is computing.

Volumes: Rajbhandari et al., "ZeRO" (SC'20), section 7. Times: Rajbhandari et al.,
"ZeRO-Infinity" (SC'21), section 4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ringcomm import _native
from ringcomm.errors import ArgumentError
from ringcomm.zero.estimate import BytesPerElement, World, check_stage
from ringcomm.zero.estimate_model import ModelElems, require_at_least

GIGA = 1e9
TERA = 1e12
# 2 operations per parameter and token forward, 4 backward, 2 for a second forward.
FLOPS_KEPT = 2 * 3
FLOPS_RECOMPUTED = 2 * 4


@dataclass(frozen=True)
class Moved:
    """One collective over ``elems`` elements of ``elem_bytes`` bytes."""

    elems: int
    elem_bytes: int

    def sent_elems(self, world_size: int) -> int:
        """The most that a rank sends: all but its chunk, (world - 1) / world of the elements."""
        return self.elems - self.elems // world_size


@dataclass(frozen=True)
class Traffic:
    """The reduce-scatters and all-gathers of a step on one rank; an all-reduce is one of each."""

    collectives: tuple[Moved, ...]

    @property
    def volume_elems(self) -> int:
        """Without the factor (world - 1) / world, as the paper counts it."""
        return sum(each.elems for each in self.collectives)

    @property
    def volume_bytes(self) -> int:
        """The same in bytes."""
        return sum(each.elems * each.elem_bytes for each in self.collectives)

    def sent_elems(self, world_size: int) -> int:
        """Elements that a rank sends in a step."""
        return sum(each.sent_elems(world_size) for each in self.collectives)

    def sent_bytes(self, world_size: int) -> int:
        """Bytes that a rank sends in a step."""
        return sum(each.sent_elems(world_size) * each.elem_bytes for each in self.collectives)


def traffic(model: ModelElems, stage: int, each: BytesPerElement) -> Traffic:
    """Counts a step's traffic: 2 P elements at stages 0 to 2, 3 P at stage 3, for P trained ones.

    Stage 0 reduces the gradients and gathers the sums; stages 1 and 2 reduce them and gather the
    parameters; stage 3 reduces them and gathers all parameters, frozen ones too, for the forward
    and again for the backward, which a second forward shares. Gradients are reduced out of their
    own dtype, whatever the sums are.

    Raises:
        ArgumentError: there is no such stage.
    """
    check_stage(stage)
    grads = Moved(model.trainable, each.grad)
    if stage == 0:
        return Traffic((grads, Moved(model.trainable, each.reduced)))
    if stage < 3:
        return Traffic((grads, Moved(model.trainable, each.param)))
    trained, frozen = Moved(model.trainable, each.param), Moved(model.frozen, each.param)
    return Traffic((grads, trained, frozen, trained, frozen))


def leaving_node_bytes(model: ModelElems, stage: int, world: World, each: BytesPerElement) -> int:
    """Bytes of gradients and parameters that leave each node in a step of one backward.

    (N - 1) / N of what crosses, on N nodes: the gradients once, and either the parameters, which
    the nodes have updated parts of, or the sums of the gradients where each node updates all of
    its copy (``state="node"``, stage 0). With ``params="world"`` the parameters are gathered over
    the network in forward and in backward instead, less those that stay in between: ``model.root``.

    Args:
        model: sizes of the model.
        stage: 0 to 3.
        world: the ranks, equally many on each node.
        each: bytes of an element.

    Raises:
        ArgumentError: there is no such stage.
    """
    check_stage(stage)
    grads = model.trainable * (each.grad if world.wire == "param" else 4)
    if world.wire in _native.WIRES:
        grads = _native.wire_bytes(_native.WIRES[world.wire], model.trainable)
    back = _params_bytes(model.trainable, stage, world, each)
    if stage == 0:
        back = model.trainable * each.reduced
    elif world.state == "node":
        back = grads if world.wire in _native.WIRES else model.trainable * 4
    elif stage == 3 and world.params == "world":
        back = _params_bytes(2 * model.trainable - model.root, stage, world, each)
        back += 2 * model.frozen * each.param
    return (grads + back) * (world.nodes - 1) // world.nodes


def _params_bytes(elems: int, stage: int, world: World, each: BytesPerElement) -> int:
    """Returns what trained parameters take between nodes, as they are or in codes."""
    if world.codes_parameters(stage):
        return _native.wire_bytes(_native.WIRES[world.param_wire], max(elems, 0))
    return elems * each.param


def step_flops(param_elems: int, tokens: int, recompute: bool) -> int:
    """Operations of a rank in a step: 2 x 4 x tokens x parameters, 2 x 3 without recomputing.

    The matrix products of tokens with parameters; those of the attention scores, s / (6 h) of
    them, are left out.

    Args:
        tokens: that the rank computes in the step, bsz x seq.
        recompute: whether full checkpointing runs the forward twice.
    """
    require_at_least("step", 1, param_elems=param_elems, tokens=tokens)
    return (FLOPS_RECOMPUTED if recompute else FLOPS_KEPT) * tokens * param_elems


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on one rank.

    Attributes:
        compute_s: of the matrix products.
        communication_s: of the collectives.
    """

    compute_s: float
    communication_s: float

    @property
    def serial_s(self) -> float:
        """The time of the step when communication and computing take turns."""
        return self.compute_s + self.communication_s

    @property
    def overlapped_s(self) -> float:
        """The time of the step when the shorter of the two hides behind the longer."""
        return max(self.compute_s, self.communication_s)

    @property
    def serial_efficiency(self) -> float:
        """Share of the step that is computing, 0 to 1, when they take turns."""
        return self.compute_s / self.serial_s

    @property
    def overlapped_efficiency(self) -> float:
        """The same when they overlap."""
        return self.compute_s / self.overlapped_s


def step_time(flops: int, sent_bytes: int, gbps: float, peak_tflops: float) -> StepTime:
    """Time of a step from operations, bytes and the machine.

    Args:
        gbps: bandwidth of a rank, 1e9 bytes/s, each direction.
        peak_tflops: 1e12 operations/s that a rank reaches with no communication ("peak_tp").

    Raises:
        ArgumentError: one of them is not positive and finite.
    """
    require_positive(bandwidth_gbps=gbps, peak_tflops=peak_tflops)
    return StepTime(flops / (peak_tflops * TERA), sent_bytes / (gbps * GIGA))


def efficiency(intensity: float, gbps: float, peak_tflops: float, overlap: bool = False) -> float:
    """Share of the time that is computing, 0 to 1: ait bw / (ait bw + peak_tp), equation 6.

    With ``overlap``, min(1, ait bw / peak_tp).

    Args:
        intensity: operations per byte moved ("ait"), see the three functions below.
        gbps: bandwidth to where the bytes lie, 1e9 bytes/s.
        peak_tflops: as in :func:`step_time`.

    Raises:
        ArgumentError: one of them is not positive and finite.
    """
    require_positive(intensity=intensity, bandwidth_gbps=gbps, peak_tflops=peak_tflops)
    fed, peak = intensity * gbps * GIGA, peak_tflops * TERA
    return min(1.0, fed / peak) if overlap else fed / (fed + peak)


def params_intensity(tokens: int) -> float:
    """Operations per byte of 16-bit parameters and gradients: seq x bsz.

    Forward, second forward and backward read all parameters once each, and backward stores all
    gradients once: 2 x 4 x tokens x P operations on 2 x 4 x P bytes; without recomputing, 3 on 3.
    """
    require_at_least("intensity", 1, tokens=tokens)
    return float(tokens)


def bandwidth_needed(share: float, intensity: float, peak_tflops: float) -> float:
    """Bandwidth in 1e9 bytes/s with which so much of the time is computing: undoes equation 6.

    Args:
        share: of :func:`efficiency` without ``overlap``, below 1.
        intensity: as there.
        peak_tflops: as there.

    Raises:
        ArgumentError: the share is not below 1, or one of them is not positive and finite.
    """
    require_positive(share=share, intensity=intensity, peak_tflops=peak_tflops)
    if share >= 1:
        raise ArgumentError(f"time: expected a share below 1, got {share!r}")
    return share / (1 - share) * peak_tflops * TERA / intensity / GIGA


def state_intensity(tokens: int, recompute: bool = True, moved_bytes: float = 32) -> float:
    """Operations per byte of optimizer state: seq x bsz / 4; without recomputing, 3/16 seq x bsz.

    16 bytes per parameter (FP32 master, gradient and moments) are read and written once per step.
    Ranks share that work: the bandwidth to use with it is that of all ranks together.

    Args:
        tokens: that a rank computes in a step.
        recompute: whether full checkpointing runs the forward twice.
        moved_bytes: per parameter and step; a :class:`ringcomm.Disk` moves no gradients, so 16 with
            FP32 parameters, 24 with masters of 16-bit ones and 20 with remainders.
    """
    require_at_least("intensity", 1, tokens=tokens)
    require_positive(moved_bytes=moved_bytes)
    return tokens * (FLOPS_RECOMPUTED if recompute else FLOPS_KEPT) / moved_bytes


def checkpoint_intensity(width: int, every: int = 1) -> float:
    """Operations per byte of 16-bit activation checkpoints: 24 hd ci.

    A checkpoint is written once and read once per ``every`` layers of 12 width^2 parameters.
    """
    require_at_least("intensity", 1, width=width, every=every)
    return 24.0 * width * every


def require_positive(**values: float) -> None:
    """Raise ArgumentError naming the first of ``values`` that is not above 0 and finite."""
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ArgumentError(f"time: expected {name} above 0 and finite, got {value!r}")
