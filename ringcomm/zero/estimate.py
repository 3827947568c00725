"""Memory of a rank in sharded data-parallel training, by stage and world.

The model state follows Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models" (SC'20), section 5: stage 1 shards the optimizer's state, stage 2 the gradients
too, stage 3 the parameters too. ``docs/estimate.md`` has the formulas.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import torch

from ringcomm.errors import ArgumentError
from ringcomm.optim.params import DTYPES
from ringcomm.zero.estimate_model import ModelElems, require_at_least
from ringcomm.zero.options import ZeroOptions

STAGES = (0, 1, 2, 3)
MASTERS = ("fp32", "remainder", "none")


@dataclass(frozen=True)
class BytesPerElement:
    """What one element of a parameter takes, by purpose, in bytes.

    The defaults are those of 16-bit training whose reduced gradient stays in FP32.

    Attributes:
        param: the parameter.
        grad: the gradient that a backward leaves; all of it at stages 0 and 1.
        reduced: the reduced gradient of the shard, which is all that stages 2 and 3 keep.
        master: what is kept of a 16-bit parameter in full precision.
        exp_avg: the first moment.
        exp_avg_sq: the second moment.
        max_exp_avg_sq: amsgrad's maximum.
    """

    param: int = 2
    grad: int = 2
    reduced: int = 4
    master: int = 4
    exp_avg: int = 4
    exp_avg_sq: int = 4
    max_exp_avg_sq: int = 0

    def __post_init__(self) -> None:
        require_at_least("bytes per element", 0, **vars(self))

    @property
    def state(self) -> int:
        """The optimizer's state."""
        return self.master + self.exp_avg + self.exp_avg_sq + self.max_exp_avg_sq

    @classmethod
    def of(
        cls,
        dtype: torch.dtype = torch.bfloat16,
        reduce: torch.dtype = torch.float32,
        master: str = "fp32",
        amsgrad: bool = False,
    ) -> BytesPerElement:
        """What ringcomm keeps for Adam and AdamW.

        Args:
            dtype: of parameters and gradients: float32, bfloat16 or float16.
            reduce: of the reduced gradient: float32, or ``dtype``, as in
                :class:`ringcomm.zero.options.Precision`.
            master: of 16-bit parameters, as in :class:`ringcomm.optim.AdamWOptions`; float32 ones
                have none.
            amsgrad: whether the maximum of the second moment is kept, too.

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
        master_bytes = {"fp32": 4, "remainder": 2, "none": 0}[master]
        return cls(
            param=dtype.itemsize,
            grad=dtype.itemsize,
            reduced=reduce.itemsize,
            master=0 if dtype is torch.float32 else master_bytes,
            max_exp_avg_sq=4 if amsgrad else 0,
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


def check_world(stage: int, world_size: int) -> None:
    """Raise ArgumentError unless both make sense."""
    if stage not in STAGES:
        raise ArgumentError(f"stage: expected 0, 1, 2 or 3, got {stage!r}")
    require_at_least("estimate", 1, world_size=world_size)


def model_state(
    model: ModelElems, stage: int, world_size: int, each: BytesPerElement
) -> StateBytes:
    """Model state of the rank that has most of it.

    Frozen parameters have neither gradient nor state; stages 0 to 2 hold them whole. The layout's
    padding is not counted: less than 64 elements per parameter, and 512 per chunk of a bucket.

    Raises:
        ArgumentError: there is no such stage or world.
    """
    check_world(stage, world_size)
    shard = shard_elems(model.trainable, world_size)
    params = shard + shard_elems(model.frozen, world_size) if stage == 3 else model.total
    return StateBytes(
        params=each.param * params,
        grads=each.reduced * shard if stage >= 2 else each.grad * model.trainable,
        state=each.state * (shard if stage >= 1 else model.trainable),
    )


def working_buffers(
    model: ModelElems,
    stage: int,
    world_size: int,
    each: BytesPerElement,
    options: ZeroOptions,
    two_passes: bool = False,
) -> WorkingBytes:
    """Working buffers of a rank.

    Stage 0 stores the reduced gradient of its chunks and gathers it bucket by bucket. Stages 2 and
    3 have ``options.in_flight`` buffers, each as large as the largest bucket. Stage 3 has the root
    and ``options.prefetch + 1`` units: one that computes, and those being fetched; with
    ``overlap=False`` only the former.

    Args:
        two_passes: whether steps are clipped, scaled or checked, so that stage 1 stores its reduced
            gradient between the two passes; the others have it anyway.

    Raises:
        ArgumentError: there is no such stage or world.
    """
    check_world(stage, world_size)
    shard = shard_elems(model.trainable, world_size)
    if stage == 0:
        bucket = _largest_bucket(model, options)
        return WorkingBytes(each.reduced * bucket, 0, each.reduced * shard)
    if stage == 1:
        stored = two_passes and world_size > 1
        return WorkingBytes(0, 0, each.reduced * shard if stored else 0)
    bucket = _largest_bucket(model, options)
    buckets = min(options.in_flight, -(-model.trainable // bucket)) if bucket else 0
    fetched = 0 if options.overlap is False else options.prefetch
    shown = len(model.units) if options.keep_gathered else fetched + 1
    gathered = model.root + sum(heapq.nlargest(shown, model.units))
    return WorkingBytes(
        buckets=each.grad * bucket * buckets,
        units=each.param * gathered if stage == 3 else 0,
        grad_shard=0,
    )


def _largest_bucket(model: ModelElems, options: ZeroOptions) -> int:
    """Elements of it: no bucket spans two units, and a parameter lies in one bucket."""
    unit = max((*model.units, model.root)) if model.has_units else model.trainable
    return min(model.trainable, max(model.largest, min(options.bucket_elems, unit)))


def largest_model(
    budget_bytes: int,
    stage: int,
    world_size: int,
    each: BytesPerElement,
    other_bytes: int = 0,
) -> int:
    """The most trainable elements whose model state fits into a rank's memory; 0 if none does.

    Args:
        budget_bytes: memory of a rank.
        other_bytes: of it, what is not for model state: working buffers, activations.

    Raises:
        ArgumentError: there is no such stage or world, a size is negative, or parameters take no
            memory at all.
    """
    check_world(stage, world_size)
    require_at_least("largest model", 0, budget_bytes=budget_bytes, other_bytes=other_bytes)
    require_at_least("largest model", 1, param_bytes=each.param)
    room = budget_bytes - other_bytes
    # model_state() grows with the elements, and a parameter takes a byte or more on some rank.
    fits, too_many = 0, max(room, 0) * world_size + 1
    while too_many - fits > 1:
        tried = (fits + too_many) // 2
        if model_state(ModelElems(tried), stage, world_size, each).total <= room:
            fits = tried
        else:
            too_many = tried
    return fits
