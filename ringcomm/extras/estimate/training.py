"""Memory, traffic and time of sharded data-parallel training, by stage.

Model state and volumes: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models" (SC'20), sections 5 and 7. Operations: Rajbhandari et al., "ZeRO-Infinity"
(SC'21), section 4. ``docs/estimate.md`` lists the formulas.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from ringcomm import _native
from ringcomm.errors import ArgumentError
from ringcomm.extras.estimate.model import ModelElems, require_at_least
from ringcomm.extras.estimate.tiers import GIGA, Records, TierBytes, require_positive
from ringcomm.memory import Disk
from ringcomm.offload.scratch import rounded_up
from ringcomm.optim import AdamWOptions
from ringcomm.optim.layout import BLOCK_ELEMS, round_up
from ringcomm.optim.tiers import PINNED_BUFFER_BYTES, elems_of_pieces, piece_elems
from ringcomm.zero import ZeroOptions

STAGES = (0, 1, 2, 3)
FP32_BYTES = 4
# Elements of a moment of 8 bits that share an exponent of one byte.
MOMENT_BLOCK = _native.MOMENT_BLOCK_ELEMS


class BytesPerElement(NamedTuple):
    """Bytes for one element of a parameter.

    ``grad`` is the gradient that a backward leaves, ``reduced`` the reduced gradient, ``maximum``
    the one that amsgrad keeps. Moments of one byte have exponents besides.
    """

    param: int
    grad: int
    reduced: int
    master: int
    exp_avg: int
    exp_avg_sq: int
    maximum: int

    def state_tensors(self, elems: int) -> list[int]:
        """Returns the bytes of each tensor of the optimizer's state for so many elements."""
        exponents = -(-elems // MOMENT_BLOCK)
        moments = (self.exp_avg, self.exp_avg_sq)
        sizes = [each * elems + (exponents if each == 1 else 0) for each in moments]
        sizes = [self.master * elems, *sizes, self.maximum * elems]
        return [size for size in sizes if size]


class StateBytes(NamedTuple):
    """Bytes of a rank for parameters, gradients and the optimizer's state."""

    params: int
    grads: int
    state: int


class WorkingBytes(NamedTuple):
    """Bytes of a rank for working buffers.

    ``buckets`` are full gradients on their way to the shard, or back at stage 0. ``units`` are
    gathered parameters, 0 where the model's units are unknown. ``grad_shard`` is the reduced
    gradient where it is no model state.
    """

    buckets: int
    units: int
    grad_shard: int


def check_stage(stage: int) -> None:
    """Raises ArgumentError unless ZeRO has the stage."""
    if stage not in STAGES:
        raise ArgumentError(f"stage: expected 0, 1, 2 or 3, got {stage!r}")


def _share(elems: int, shares: int) -> int:
    """Returns the elements of the largest of ``shares`` shards."""
    return -(-elems // shares)


def coded_bytes(wire: str, elems: int) -> int:
    """Returns the bytes of so many FP32 numbers in the codes of a wire."""
    return _native.wire_bytes(_native.WIRES[wire], elems)


@dataclass(frozen=True)
class Training:
    """A training whose methods return bytes of the fullest rank, without the padding of chunks.

    Methods raise ArgumentError for a stage that is not 0 to 3.

    Attributes:
        model: sizes of the model; frozen parameters have neither gradient nor state.
        ranks: ranks of all nodes.
        nodes: nodes, each of equally many ranks.
        options: as for :func:`ringcomm.zero.shard`; parameters count as float32 without
            ``precision.param``. At stages 0 to 2 ``tier`` has no effect.
        optimizer: as for :class:`ringcomm.optim.AdamW`; the precision's choices come first.
        amsgrad: True if the optimizer keeps the maximum of the second moment.
        eight_bits: True for :class:`ringcomm.optim.AdamW8bit`.
        two_passes: True if steps are clipped, scaled or checked.

    Raises:
        ArgumentError: a size is not positive, or ringcomm does not support the combination.
    """

    model: ModelElems
    ranks: int
    nodes: int = 1
    options: ZeroOptions = field(default_factory=ZeroOptions)
    optimizer: AdamWOptions = field(default_factory=AdamWOptions)
    amsgrad: bool = False
    eight_bits: bool = False
    two_passes: bool = False

    def __post_init__(self) -> None:
        require_at_least("training", 1, ranks=self.ranks, nodes=self.nodes)
        if self.ranks % self.nodes:
            raise ArgumentError(
                f"nodes: expected a divisor of {self.ranks} ranks, got {self.nodes}"
            )
        if self.amsgrad and self.eight_bits:
            raise ArgumentError("amsgrad: AdamW8bit keeps no maximum; drop one of the two")
        if self.two_passes and self.optimizer.update == "in_backward":
            raise ArgumentError('update: expected "in_step" for steps of two passes')
        chosen = replace(self.optimizer, **self.options.precision.optimizer_defaults)
        object.__setattr__(self, "optimizer", chosen)

    @property
    def mates(self) -> int:
        """The ranks of a node."""
        return self.ranks // self.nodes

    @property
    def each(self) -> BytesPerElement:
        """The bytes of an element, where parameters do not cross nodes in codes."""
        precision, moment = self.options.precision, 1 if self.eight_bits else 4
        param = precision.param or torch.float32
        masters = {"fp32": 4, "remainder": 2, "none": 0}
        return BytesPerElement(
            param=param.itemsize,
            grad=(self.optimizer.accumulate_dtype or param).itemsize,
            reduced=precision.reduced_dtype(param).itemsize,
            master=0 if param is torch.float32 else masters[self.optimizer.master],
            exp_avg=moment,
            exp_avg_sq=moment,
            maximum=4 if self.amsgrad else 0,
        )

    @property
    def _param_shares(self) -> int:
        return self.ranks if self.options.params == "world" else self.mates

    def _state_shares(self, stage: int) -> int:
        check_stage(stage)
        if stage == 0:
            return 1
        return self.ranks if self.options.state == "world" else self.mates

    def _codes_params(self, stage: int) -> bool:
        return self.nodes > 1 and stage > 0 and self.options.wire.codes_parameters

    @property
    def _tier(self) -> Disk:
        """The tier of the optimizer's state; raises ArgumentError if that is memory."""
        tier = self.optimizer.tier
        if tier is None:
            raise ArgumentError("tier: expected the optimizer's state outside memory, got None")
        return tier if isinstance(tier, Disk) else Disk(tier, PINNED_BUFFER_BYTES)

    def state(self, stage: int) -> StateBytes:
        """Returns the model state in memory; of another tier, buffers and resident at most."""
        model, each, disk = self.model, self.each, self.options.tier
        shard = _share(model.trainable, self._state_shares(stage))
        params = each.param * model.total
        if stage == 3:
            shares = self._param_shares
            params = each.param * (_share(model.trainable, shares) + _share(model.frozen, shares))
            if disk is not None:
                buffers = max(disk.buffer_bytes, each.param * _share(model.largest, shares))
                params = min(params, buffers + disk.resident_bytes)
        if self._codes_params(stage):
            each = each._replace(master=FP32_BYTES)
        grads, state = each.grad * model.trainable, sum(each.state_tensors(shard))
        if stage >= 2:
            grads = each.reduced * shard if self.optimizer.update == "in_step" else 0
        if self.optimizer.tier is not None:
            state = min(state, self._tier.buffer_bytes + self._tier.resident_bytes)
        return StateBytes(params, grads, state + self._residual_bytes(stage))

    def _residual_bytes(self, stage: int) -> int:
        """Returns the bytes that error feedback keeps."""
        if self.nodes == 1 or not self.options.wire.error_feedback:
            return 0
        # Nodes with copies of the state code sums, too, but at stage 0.
        sums = stage > 0 and self.options.state == "node"
        elems = _share(self.model.trainable, self.mates)
        return FP32_BYTES * (elems + (_share(self.model.trainable, self.ranks) if sums else 0))

    @property
    def largest_bucket(self) -> int:
        """Elements of the largest bucket: none spans two units, and none divides a parameter."""
        model = self.model
        unit = max((*model.units, model.root)) if model.has_units else model.trainable
        return min(model.trainable, max(model.largest, min(self.options.bucket_elems, unit)))

    def buffers(self, stage: int) -> WorkingBytes:
        """Returns the working buffers, which ``docs/estimate.md`` explains."""
        model, each, options, bucket = self.model, self.each, self.options, self.largest_bucket
        shares, tier, alone = self._state_shares(stage), self.optimizer.tier, self.ranks == 1
        if stage == 0:
            own = _share(model.trainable, self.ranks)
            return WorkingBytes(each.reduced * bucket, 0, each.reduced * own)
        # A gradient that is rounded after the reduction has a reduction pass of its own.
        one_pass = not (self.two_passes or alone) and each.reduced == FP32_BYTES
        of_bucket = _share(bucket, shares)
        chunk = of_bucket if one_pass and tier is not None else 0
        if stage == 1:
            shard = _share(model.trainable, shares) if self.two_passes and not alone else 0
            return WorkingBytes(0, 0, each.reduced * (shard + chunk))
        buckets = min(options.in_flight, -(-model.trainable // bucket)) if bucket else 0
        fetched = 0 if options.overlap is False else options.prefetch
        shown = len(model.units) if options.keep_gathered else fetched + 1
        units = each.param * (model.root + sum(heapq.nlargest(shown, model.units)))
        grad_shard = each.reduced * chunk if stage == 2 and isinstance(tier, Disk) else 0
        if self.optimizer.update == "in_backward":
            in_one_pass = stage == 2 and (tier is None or alone)
            grad_shard = 0 if in_one_pass else each.reduced * of_bucket
            if each.reduced < FP32_BYTES:  # before and after it is rounded
                grad_shard = (FP32_BYTES + each.reduced) * of_bucket
        return WorkingBytes(each.grad * bucket * buckets, units if stage == 3 else 0, grad_shard)

    def _chunks(self, elems: int, shares: int) -> Iterator[tuple[int, int]]:
        """Yields the elements and the number of a rank's chunks: of whole buckets, of the rest."""
        bucket = self.largest_bucket
        whole, rest = divmod(elems, bucket) if bucket else (0, 0)
        for part, count in ((bucket, whole), (rest, 1)):
            if part and count:
                yield round_up(_share(part, shares), BLOCK_ELEMS), count

    def state_records(self, elems: int, count: int) -> list[Records]:
        """Returns the records of ``count`` chunks of ``elems`` elements in the optimizer's tier."""
        size = elems_of_pieces(elems, piece_elems(self._tier.buffer_bytes))
        equal = (elems - 1) // size
        parts = ((size, equal * count), (elems - equal * size, count))
        return [
            Records(sum(map(rounded_up, self.each.state_tensors(part))), number)
            for part, number in parts
            if number
        ]

    def state_in_tier(self, stage: int) -> TierBytes:
        """Returns the bytes of the optimizer's state outside memory, in buckets of one size.

        Raises:
            ArgumentError: the state is in memory, or the tier's buffers are too small.
        """
        chunks = self._chunks(self.model.trainable, self._state_shares(stage))
        records = [each for chunk in chunks for each in self.state_records(*chunk)]
        return TierBytes.of_state(records, self._tier)

    def params_in_tier(self) -> TierBytes:
        """Returns the bytes of the parameters on a disk at stage 3, in buckets of one size.

        Raises:
            ArgumentError: the parameters are in memory.
        """
        if self.options.tier is None:
            raise ArgumentError("tier: expected the parameters on a disk, got None")
        each = self.each
        frozen, trained = (
            [
                Records(rounded_up(each.param * chunk), count)
                for chunk, count in self._chunks(elems, self._param_shares)
            ]
            for elems in (self.model.frozen, self.model.trainable)
        )
        return TierBytes.of_params(frozen, trained, self.options.tier, each.master >= FP32_BYTES)

    def traffic(self, stage: int) -> tuple[tuple[int, int], ...]:
        """Returns the elements and their bytes of a step's reduce-scatters and all-gathers.

        Stage 0 reduces gradients and gathers sums. Stages 1 and 2 reduce gradients and gather
        parameters. Stage 3 reduces gradients and gathers all parameters, frozen ones too, for the
        forward and for the backward. Gradients move in their own dtype.
        """
        check_stage(stage)
        elems, each = self.model.trainable, self.each
        if stage == 0:
            return (elems, each.grad), (elems, each.reduced)
        gathers = (elems, each.param), (self.model.frozen, each.param)
        return ((elems, each.grad), *(gathers[:1] if stage < 3 else gathers * 2))

    def sent_bytes(self, stage: int, ranks: int | None = None) -> int:
        """Returns the bytes that a rank sends in a step to ``ranks`` ranks (default: all)."""
        ranks = ranks or self.ranks
        return sum((elems - elems // ranks) * size for elems, size in self.traffic(stage))

    def leaving_node_bytes(self, stage: int) -> int:
        """Returns the bytes that leave each node in a step of one backward.

        (N - 1) / N of the gradients, on N nodes, and of the updated parameters; of the sums instead
        at stage 0 and with ``state="node"``. With ``params="world"`` stage 3 gathers the parameters
        over the network in forward and in backward, those of ``model.root`` once.
        """
        model, each, options = self.model, self.each, self.options
        wire = options.wire.gradients
        grads = sums = model.trainable * FP32_BYTES
        if wire in _native.WIRES:
            grads = sums = coded_bytes(wire, model.trainable)
        elif wire == "param":
            grads = model.trainable * each.grad
        back = self._params_bytes(model.trainable, stage)
        if stage == 0:
            back = model.trainable * each.reduced
        elif options.state == "node":
            back = sums
        elif stage == 3 and options.params == "world":
            back = self._params_bytes(2 * model.trainable - model.root, stage)
            back += 2 * model.frozen * each.param
        return (grads + back) * (self.nodes - 1) // self.nodes

    def _params_bytes(self, elems: int, stage: int) -> int:
        if self._codes_params(stage):
            return coded_bytes(self.options.wire.parameters, max(elems, 0))
        return elems * self.each.param

    def communication_s(
        self,
        stage: int,
        bandwidth: float,
        network: float | None = None,
        latency_us: float = 14.3,
        message_us: float = 1.0,
    ) -> float:
        """Returns the seconds of a step's collectives, one bucket after the other.

        A rank sends its share within the node. Over nodes, the bytes that leave a node take the
        network, and each bucket has two direct calls, of its gradients and of its parameters or
        sums; three where stage 3 gathers parameters over the network.

        Args:
            stage: 0 to 3.
            bandwidth: 1e9 bytes/s that a rank sends to the ranks of its node.
            network: 1e9 bytes/s that a rank sends to other nodes while all its node's ranks do.
            latency_us: from the end of a message between nodes until the receiver goes on; the
                defaults are assumptions, which ``docs/scaling.md`` explains.
            message_us: for which a message occupies the network beside its bytes.

        Raises:
            ArgumentError: a rate is missing, or not positive and finite.
        """
        require_positive(bandwidth=bandwidth)
        seconds = self.sent_bytes(stage, self.mates) / (bandwidth * GIGA)
        if self.nodes == 1:
            return seconds
        if network is None:
            raise ArgumentError("time: expected the rate of the network between nodes, got None")
        require_positive(network=network)
        calls = 2 * -(-self.model.trainable // self.options.bucket_elems)
        if stage == 3 and self.options.params == "world":
            calls = calls // 2 + 2 * -(-self.model.total // self.options.bucket_elems)
        call_us = latency_us + (self.nodes - 1) * message_us
        leaving_s = self.leaving_node_bytes(stage) / (self.mates * network * GIGA)
        return seconds + calls * call_us / 1e6 + leaving_s

    def flops(self, tokens: int, recompute: bool = False) -> int:
        """Returns the operations of a rank in a step, without those of attention scores.

        For each token and parameter 2 forward and 4 backward, and 2 if full checkpointing runs the
        forward twice (``recompute``).
        """
        require_at_least("step", 1, tokens=tokens)
        return (8 if recompute else 6) * tokens * self.model.total
