"""Memory of a rank in sharded data-parallel training, by stage and world.

The model state follows Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models" (SC'20), section 5: stage 1 shards the optimizer's state, stage 2 the gradients
too, stage 3 the parameters too. ``docs/estimate.md`` has the formulas.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace

import torch

from ringcomm.errors import ArgumentError
from ringcomm.memory.scratch import Disk
from ringcomm.optim.block_moments import BLOCK, BlockMoment
from ringcomm.optim.layout import DTYPES
from ringcomm.optim.options import Wire
from ringcomm.optim.tiers import PINNED_BUFFER_BYTES
from ringcomm.zero.estimate_model import ModelElems, require_at_least
from ringcomm.zero.options import ZeroOptions

STAGES = (0, 1, 2, 3)
MASTERS = ("fp32", "remainder", "none")


@dataclass(frozen=True)
class BytesPerElement:
    """The bytes that one element of a parameter takes, by purpose.

    The defaults are those of 16-bit training whose reduced gradient stays in FP32.

    Attributes:
        param: the parameter.
        grad: the gradient that a backward leaves; all of it at stages 0 and 1.
        reduced: the reduced gradient of the shard, which is all that stages 2 and 3 keep.
        keeps_reduced: False if that is used as soon as it is there, bucket by bucket, with
            ``AdamWOptions(update="in_backward")``.
        master: what is kept of a 16-bit parameter in full precision.
        exp_avg: the first moment.
        exp_avg_sq: the second moment.
        max_exp_avg_sq: amsgrad's maximum.
        exponents: of moments of 8 bits, for both together and a block of 64 elements.
    """

    param: int = 2
    grad: int = 2
    reduced: int = 4
    master: int = 4
    exp_avg: int = 4
    exp_avg_sq: int = 4
    max_exp_avg_sq: int = 0
    exponents: int = 0
    keeps_reduced: bool = True

    def __post_init__(self) -> None:
        require_at_least("bytes per element", 0, **vars(self))

    @property
    def state(self) -> int:
        """The optimizer's state, without exponents."""
        return self.master + self.exp_avg + self.exp_avg_sq + self.max_exp_avg_sq

    @property
    def state_mean(self) -> float:
        """The optimizer's state, with a share of the exponents."""
        return self.state + self.exponents / BLOCK

    def state_bytes(self, elems: int) -> int:
        """Returns the optimizer's state of so many elements."""
        return self.state * elems + self.exponents * -(-elems // BLOCK)

    def lane_bytes(self, elems: int) -> list[int]:
        """Returns the same tensor by tensor, as a tier moves it; ``elems`` in whole blocks."""
        halves = (self.exponents // 2, self.exponents - self.exponents // 2)
        moments = [
            each * elems + half * (elems // BLOCK)
            for each, half in zip((self.exp_avg, self.exp_avg_sq), halves, strict=True)
        ]
        sizes = (self.master * elems, *moments, self.max_exp_avg_sq * elems)
        return [size for size in sizes if size]

    @classmethod
    def of(
        cls,
        dtype: torch.dtype = torch.bfloat16,
        reduce: torch.dtype = torch.float32,
        master: str = "fp32",
        amsgrad: bool = False,
        eight_bits: bool = False,
        accumulate: torch.dtype | None = None,
    ) -> BytesPerElement:
        """Returns what ringcomm keeps for Adam, AdamW and AdamW8bit.

        Args:
            dtype: of parameters and gradients: float32, bfloat16 or float16.
            reduce: of the reduced gradient: float32, or ``dtype``, as in
                :class:`ringcomm.zero.options.Precision`.
            master: of 16-bit parameters, as in :class:`ringcomm.optim.AdamWOptions`; float32 ones
                have none.
            amsgrad: whether the maximum of the second moment is kept, too.
            eight_bits: whether the moments are those of :class:`ringcomm.optim.AdamW8bit`.
            accumulate: of gradients that add up: None, or float32, as in
                ``AdamWOptions.accumulate_dtype``.

        Raises:
            ArgumentError: ringcomm has no such combination.
        """
        if dtype not in DTYPES.values():
            raise ArgumentError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype}")
        if reduce not in (torch.float32, dtype):
            raise ArgumentError(f"reduce: expected float32 or the dtype {dtype}, got {reduce}")
        if master not in MASTERS:
            raise ArgumentError(f"master: expected one of {', '.join(MASTERS)}, got {master!r}")
        if master == "remainder" and dtype is not torch.bfloat16:
            raise ArgumentError(
                f'master: "remainder" is the lower half of bfloat16 parameters, got {dtype}; pass '
                '"fp32" or "none"'
            )
        if accumulate not in (None, torch.float32):
            raise ArgumentError(f"accumulate: expected None or float32, got {accumulate}")
        if amsgrad and eight_bits:
            raise ArgumentError("amsgrad: AdamW8bit keeps no maximum; drop one of the two")
        master_bytes = {"fp32": 4, "remainder": 2, "none": 0}[master]
        moment = 1 if eight_bits else 4
        return cls(
            param=dtype.itemsize,
            grad=(accumulate or dtype).itemsize,
            reduced=reduce.itemsize,
            master=0 if dtype is torch.float32 else master_bytes,
            exp_avg=moment,
            exp_avg_sq=moment,
            max_exp_avg_sq=4 if amsgrad else 0,
            exponents=2 * (BlockMoment.size_bytes(BLOCK) - BLOCK) if eight_bits else 0,
        )


@dataclass(frozen=True)
class StateBytes:
    """Model state of a rank, in bytes: what it keeps from step to step."""

    params: int
    grads: int
    state: int

    @property
    def total(self) -> int:
        return self.params + self.grads + self.state


@dataclass(frozen=True)
class WorkingBytes:
    """Working buffers of a rank, in bytes.

    Attributes:
        buckets: full gradients on their way to the shard, or on their way back at stage 0.
        units: gathered parameters; 0 where the model's units are not known.
        grad_shard: the reduced gradient, where it is no part of the model state.
    """

    buckets: int
    units: int
    grad_shard: int

    @property
    def total(self) -> int:
        return self.buckets + self.units + self.grad_shard


def shard_elems(elems: int, world_size: int) -> int:
    """Elements of the largest of ``world_size`` shards."""
    return -(-elems // world_size)


@dataclass(frozen=True)
class World:
    """The ranks that share the model, on one node or several.

    Attributes:
        ranks: of all nodes.
        ranks_per_node: None where all are on one node.
        params: "node" or "world", as in :class:`ringcomm.zero.options.ZeroOptions`.
        state: the same.
        wire: of sums of gradients between nodes, as in :class:`ringcomm.comm.options.CommOptions`.
        param_wire: of updated parameters, as ``parameters`` of :class:`ringcomm.zero.Wire`.
        error_feedback: whether what codes lose is kept, as in :class:`ringcomm.zero.Wire`.
    """

    ranks: int
    ranks_per_node: int | None = None
    params: str = "node"
    state: str = "world"
    wire: str = "fp32"
    param_wire: str = "param"
    error_feedback: bool = False

    def __post_init__(self) -> None:
        require_at_least("estimate", 1, world_size=self.ranks)
        if self.ranks_per_node is not None:
            require_at_least("estimate", 1, ranks_per_node=self.ranks_per_node)
        # It refuses what there is not.
        wire = Wire(self.wire, self.param_wire, self.error_feedback)
        ZeroOptions(params=self.params, state=self.state, wire=wire)

    @classmethod
    def of(cls, world: int | World) -> World:
        """Returns a world, or that of so many ranks on one node."""
        return world if isinstance(world, World) else cls(world)

    @property
    def mates(self) -> int:
        """The ranks of a node."""
        return min(self.ranks, self.ranks_per_node or self.ranks)

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return -(-self.ranks // self.mates)

    def codes_parameters(self, stage: int) -> bool:
        """Tells whether parameters cross in codes at a stage, so that all of them have masters."""
        return self.nodes > 1 and stage > 0 and self.param_wire != "param"

    @property
    def param_shares(self) -> int:
        """The ranks over which stage 3 shards the parameters."""
        return self.ranks if self.params == "world" else self.mates

    @property
    def state_shares(self) -> int:
        """The ranks over which stages 1 to 3 shard reduced gradients and state."""
        return self.ranks if self.state == "world" else self.mates

    def residual_bytes(self, elems: int, stage: int) -> int:
        """Returns what a rank keeps in FP32 of the codes' losses, of so many trained elements."""
        if self.nodes == 1 or not self.error_feedback:
            return 0
        # Sums are coded, too, where nodes have copies of the state; stage 0 has none of them.
        of_sums = shard_elems(elems, self.ranks) if stage and self.state == "node" else 0
        return 4 * (shard_elems(elems, self.mates) + of_sums)


def check_stage(stage: int) -> None:
    """Raise ArgumentError unless there is such a stage."""
    if stage not in STAGES:
        raise ArgumentError(f"stage: expected 0, 1, 2 or 3, got {stage!r}")


def tier_sizes(tier: Disk | str) -> Disk:
    """Returns what a tier has of the memory of the parameters' device, as a disk says it."""
    return tier if isinstance(tier, Disk) else Disk(tier, PINNED_BUFFER_BYTES)


def model_state(
    model: ModelElems,
    stage: int,
    world: int | World,
    each: BytesPerElement,
    tier: Disk | str | None = None,
    params_tier: Disk | None = None,
) -> StateBytes:
    """Model state in memory, of the rank that has most of it.

    Frozen parameters have neither gradient nor state; stages 0 to 2 hold them whole. The layout's
    padding is not counted: less than 64 elements per parameter, and 512 per chunk of a bucket.

    Args:
        model: sizes of the model.
        stage: 0 to 3.
        world: the ranks, or how many there are on one node.
        each: bytes of an element; where parameters cross in codes all have FP32 masters besides.
        tier: where the optimizer's state lies, as in ``AdamWOptions``: of that elsewhere, what is
            resident and the buffers, all of them at most, are in memory.
        params_tier: where the parameters lie at stage 3, as in ``ZeroOptions``, likewise.

    Raises:
        ArgumentError: there is no such stage or world.
    """
    check_stage(stage)
    world = World.of(world)
    shard, params = shard_elems(model.trainable, world.state_shares), model.total
    if stage == 3:
        shares = world.param_shares
        params = shard_elems(model.trainable, shares) + shard_elems(model.frozen, shares)
    if world.codes_parameters(stage):
        each = replace(each, master=torch.float32.itemsize)
    param_bytes = each.param * params
    if stage == 3 and params_tier is not None:
        largest = each.param * shard_elems(model.largest, world.param_shares)
        buffers = max(params_tier.buffer_bytes, largest)
        param_bytes = min(param_bytes, buffers + params_tier.resident_bytes)
    state = each.state_bytes(shard if stage >= 1 else model.trainable)
    if tier is not None:
        sizes = tier_sizes(tier)
        state = min(state, sizes.buffer_bytes + sizes.resident_bytes)
    state += world.residual_bytes(model.trainable, stage)
    all_grads = each.grad * model.trainable
    return StateBytes(
        params=param_bytes,
        grads=each.reduced * shard * each.keeps_reduced if stage >= 2 else all_grads,
        state=state,
    )


def working_buffers(
    model: ModelElems,
    stage: int,
    world: int | World,
    each: BytesPerElement,
    options: ZeroOptions,
    two_passes: bool = False,
    tier: Disk | str | None = None,
) -> WorkingBytes:
    """Working buffers of a rank.

    Stage 0 stores the reduced gradient of its chunks and gathers it bucket by bucket. Stages 2 and
    3 have ``options.in_flight`` buffers, each as large as the largest bucket. Stage 3 has the root
    and ``options.prefetch + 1`` units: one that computes, and those being fetched; with
    ``overlap=False`` only the former. With the state in another tier, steps of one pass at stage 1,
    and on the CPU at stage 2, store the reduced gradient of one bucket's chunk at a time. Updates
    in backward do so at stage 3, and wherever reduction and update are not one pass.

    Args:
        model: sizes of the model.
        stage: 0 to 3.
        world: the ranks, or how many there are on one node.
        each: bytes of an element.
        options: of the training; ``world`` says what is sharded over which ranks.
        two_passes: whether steps are clipped, scaled or checked, so that stage 1 stores its reduced
            gradient between the two passes; the others have it anyway.
        tier: where the optimizer's state lies, as in ``AdamWOptions``.

    Raises:
        ArgumentError: there is no such stage or world.
    """
    check_stage(stage)
    world = World.of(world)
    bucket = largest_bucket(model, options)
    if stage == 0:
        own = shard_elems(model.trainable, world.ranks)
        return WorkingBytes(each.reduced * bucket, 0, each.reduced * own)
    # A gradient that is rounded after the reduction is reduced by a pass of its own.
    one_pass = not two_passes and world.ranks > 1 and each.reduced == 4
    of_bucket = shard_elems(bucket, world.state_shares)
    chunk = of_bucket if one_pass and tier is not None else 0
    if stage == 1:
        stored = two_passes and world.ranks > 1
        shard = shard_elems(model.trainable, world.state_shares) if stored else 0
        return WorkingBytes(0, 0, each.reduced * (shard + chunk))
    buckets = min(options.in_flight, -(-model.trainable // bucket)) if bucket else 0
    fetched = 0 if options.overlap is False else options.prefetch
    shown = len(model.units) if options.keep_gathered else fetched + 1
    gathered = model.root + sum(heapq.nlargest(shown, model.units))
    return WorkingBytes(
        buckets=each.grad * bucket * buckets,
        units=each.param * gathered if stage == 3 else 0,
        grad_shard=(
            each.reduced * chunk * (stage == 2 and isinstance(tier, Disk))
            if each.keeps_reduced
            else _used_at_once(stage, of_bucket, world, each, tier)
        ),
    )


def _used_at_once(
    stage: int, elems: int, world: World, each: BytesPerElement, tier: Disk | str | None
) -> int:
    """Returns the bytes of one bucket's reduced gradient on its way to an update in backward."""
    if each.reduced < 4:
        return (4 + each.reduced) * elems  # before and after it is rounded
    in_one_pass = stage == 2 and (tier is None or world.ranks == 1)
    return 0 if in_one_pass else each.reduced * elems


def largest_bucket(model: ModelElems, options: ZeroOptions) -> int:
    """Returns its elements: no bucket spans two units, and a parameter lies in one bucket."""
    unit = max((*model.units, model.root)) if model.has_units else model.trainable
    return min(model.trainable, max(model.largest, min(options.bucket_elems, unit)))


def largest_model(
    budget_bytes: int,
    stage: int,
    world: int | World,
    each: BytesPerElement,
    other_bytes: int = 0,
    tier: Disk | str | None = None,
    params_tier: Disk | None = None,
) -> int:
    """The most trainable elements whose model state fits into a rank's memory; 0 if none does.

    Args:
        budget_bytes: memory of a rank.
        stage: 0 to 3.
        world: the ranks, or how many there are on one node.
        each: bytes of an element.
        other_bytes: of it, what is not for model state: working buffers, activations.
        tier: where the optimizer's state lies, as in ``AdamWOptions``.
        params_tier: where the parameters lie at stage 3, as in ``ZeroOptions``.

    Raises:
        ArgumentError: there is no such stage or world, a size is negative, or parameters take no
            memory at all.
    """
    check_stage(stage)
    world = World.of(world)
    require_at_least("largest model", 0, budget_bytes=budget_bytes, other_bytes=other_bytes)
    require_at_least("largest model", 1, param_bytes=each.param)
    room = budget_bytes - other_bytes
    # model_state() grows with the elements, and a parameter takes a byte or more on some rank.
    fits, too_many = 0, max(room, 0) * world.ranks + 1
    while too_many - fits > 1:
        tried = (fits + too_many) // 2
        if model_state(ModelElems(tried), stage, world, each, tier, params_tier).total <= room:
            fits = tried
        else:
            too_many = tried
    return fits
