# SPDX-License-Identifier: Apache-2.0
"""Clips reduced gradients: by the norm of all parameters or of some, and by value.

NOTE [What clipping writes]
Clipping by the norm of the whole gradient writes no gradient: it yields one coefficient, by which
the step's kernels multiply the gradients. Clipping some parameters, or each element, writes to the
reduced shards. The norm of some parameters is summed over a copy of a chunk that has zeros in place
of the other parameters, so that the tiles of 512 elements are the same for every number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from ringcomm.comm.agreement import all_or_none
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.host.arguments import ReduceOp
from ringcomm.errors import ArgumentError, RingcommError, UnsupportedError
from ringcomm.optim.buckets import Bucket
from ringcomm.optim.gradients import (
    found_non_finite,
    joint_norm,
    norm_kind,
    norm_of,
    wide_norm_of,
)
from ringcomm.optim.layout import within
from ringcomm.optim.placement import placement_of
from ringcomm.optim.step import Asked, FirstPass, ShardedStep

Tensor = torch.Tensor
_NORM, _VALUE = "optimizer.clip_grad_norm_", "optimizer.clip_grad_value_"


@dataclass(frozen=True)
class NormBound:
    """The checked arguments of clipping by norm.

    Attributes:
        max_norm: the bound.
        kind: "l2", "l1" or "inf".
        error_if_nonfinite: True to read the norm on the host, and raise if it is not finite.
    """

    max_norm: float
    kind: str
    error_if_nonfinite: bool

    def told(self) -> dict[str, Any]:
        """Returns the arguments that ranks compare, as JSON types."""
        return {
            "max_norm": self.max_norm,
            "norm_type": self.kind,
            "error_if_nonfinite": self.error_if_nonfinite,
        }

    @classmethod
    def of(cls, max_norm: Any, norm_type: float, error_if_nonfinite: bool) -> NormBound:
        """Checks a user's arguments, and returns them as a bound.

        Raises:
            ArgumentError: an argument cannot be used.
        """
        return cls(_bound("max_norm", max_norm), norm_kind(norm_type), error_if_nonfinite)

    def coefficient(self, norm: Tensor) -> Tensor:
        """Returns the factor by which to multiply the gradient, float32.

        It is computed in FP32, by the operations of ``torch.nn.utils.clip_grad_norm_``.
        """
        return torch.clamp(self.max_norm / (norm + 1e-6), max=1.0)

    def check(self, norm: Tensor, sharded: ShardedStep) -> None:
        """Raises RingcommError if the norm is not finite and ``error_if_nonfinite`` is set."""
        if self.error_if_nonfinite and not bool(torch.isfinite(norm)):
            raise RingcommError(
                f"{sharded.setting.where('clip_grad_norm_')}: the gradient's norm of type "
                f"{self.kind} is {norm.item()}. Look for the loss that overflowed, or pass "
                "error_if_nonfinite=False"
            )


def _bound(name: str, value: Any) -> float:
    if not isinstance(value, (int, float, Tensor)) or math.isnan(value) or value < 0:
        raise ArgumentError(f"{name}: expected a number >= 0, got {value!r}")
    return float(value)


def clip_norm(sharded: ShardedStep, bound_of: Callable[[], NormBound]) -> Tensor:
    """Makes the next step scale down the whole gradient; returns its norm; collective.

    On a CPU the ranks compare the bound in the message in which they compare hyper-parameters.

    Args:
        sharded: the step.
        bound_of: returns the bound, or raises.

    Raises:
        ArgumentError: the bound cannot be used; on a CPU all ranks raise.
        MismatchError: on a CPU, if the ranks have different bounds.
    """
    sharded.refuse_in_backward("clip_grad_norm_")
    sharded.refuse_if_partly_updated("clip_grad_norm_")
    before = sharded.still_reduced()
    try:
        sharded.check_hyper()
        bound = bound_of()
    except RingcommError as error:
        sharded.reduce("l2", Asked(_NORM, {"max_norm": None}, error))
        raise
    reduced = sharded.reduce(bound.kind, Asked(_NORM, bound.told()))
    coefficient = reduced.clip if before is None else before.clip
    norm = norm_of(reduced.words, bound.kind, sharded.inv_scale() * coefficient)
    try:
        bound.check(norm, sharded)
    except RingcommError:
        sharded.first_pass = before
        raise
    here = bound.coefficient(norm)
    reduced.clip, reduced.clipped = coefficient * here.to(torch.float64), True
    sharded.first_pass = reduced
    return norm


@dataclass(frozen=True)
class NormTerm:
    """One term of a joint norm: the gradient for one of a model's optimizers.

    Attributes:
        step: the optimizer's step.
        others: the ranks whose optimizers update different parameters, such as different experts;
            or None if all ranks have the same parameters.
    """

    step: ShardedStep
    others: Communicator | None = None


def clip_joint_norm(
    terms: Sequence[NormTerm], stages: Communicator | None, bound_of: Callable[[], NormBound]
) -> Tensor:
    """Clips the gradients of all terms by their joint norm in the terms' next steps; collective.

    Args:
        terms: the terms. All ranks of a pipeline stage must have the same first term: if a rank
            refuses to clip, the other ranks learn this when they reduce the first term's gradients.
        stages: the ranks that have the model's different pipeline stages, or None.
        bound_of: returns the bound, or raises.

    Returns:
        The norm of all terms and stages before clipping.

    Raises:
        See :func:`clip_norm`.
    """
    for term in terms:
        term.step.refuse_in_backward("clip_grad_norm_")
        term.step.refuse_if_partly_updated("clip_grad_norm_")
    steps = [term.step for term in terms]
    before = [step.still_reduced() for step in steps]
    try:
        for step in steps:
            step.check_hyper()
        bound = bound_of()
    except RingcommError as error:
        steps[0].reduce("l2", Asked(_NORM, {"max_norm": None}, error))
        raise
    asked = Asked(_NORM, bound.told())
    reduced = [step.reduce(bound.kind, asked) for step in steps]
    clips = [
        now.clip if was is None else was.clip for now, was in zip(reduced, before, strict=True)
    ]
    norms = []
    for term, now, clip in zip(terms, reduced, clips, strict=True):
        words = _of_all(term, now.words, bound.kind)
        norms.append(wide_norm_of(words, bound.kind, term.step.inv_scale() * clip))
    wide = joint_norm(torch.stack(norms), bound.kind)
    if stages is not None:
        of_stages = wide.new_empty(stages.world_size)
        stages.all_gather_into_tensor(of_stages, wide.view(1))
        wide = joint_norm(of_stages, bound.kind)
    norm = wide.to(torch.float32)
    try:
        bound.check(norm, steps[0])
    except RingcommError:
        for step, was in zip(steps, before, strict=True):
            step.first_pass = was
        raise
    here = bound.coefficient(norm).to(torch.float64)
    bad = norm.isnan().to(torch.float64)
    for step, now, clip in zip(steps, reduced, clips, strict=True):
        overflowed = bad if now.overflowed is None else now.overflowed + bad
        step.first_pass = replace(now, clip=clip * here, clipped=True, overflowed=overflowed)
    return norm


def agree_on_finite(terms: Sequence[NormTerm], stages: Communicator | None) -> None:
    """Makes the steps of all terms skip if the gradient of a term is not finite; collective.

    Callers need this only if steps can be skipped (``two_passes``).
    """
    reduced = []
    for term in terms:
        now = term.step.still_reduced()
        if now is None or now.written:
            now = term.step.reduce("l2")
        reduced.append(now)
    found = torch.zeros((), dtype=torch.float64, device=terms[0].step.setting.device)
    for term, now in zip(terms, reduced, strict=True):
        found += found_non_finite(_of_all(term, now.words, now.kind))
        if now.overflowed is not None:
            found += now.overflowed
    if terms[-1].others is not None:
        terms[-1].others.all_reduce(found)
    if stages is not None:
        stages.all_reduce(found)
    for term, now in zip(terms, reduced, strict=True):
        term.step.first_pass = replace(now, overflowed=found)


def _of_all(term: NormTerm, words: Tensor, kind: str) -> Tensor:
    """Returns norm words combined over ``term.others``; collective if there are such ranks."""
    if term.others is None:
        return words
    words = words.clone()
    term.others.all_reduce(words, ReduceOp.MAX if kind == "inf" else ReduceOp.SUM)
    return words


def clip_norm_of(sharded: ShardedStep, params: Any, bound_of: Callable[[], NormBound]) -> Tensor:
    """Scales down the reduced gradients of some parameters to a bounded norm; collective.

    Args:
        params: one parameter or several.
        bound_of: returns the bound of their norm, or raises.

    Returns:
        Their norm before clipping.

    Raises:
        ArgumentError: a parameter is not the optimizer's, or the bound cannot be used; on a CPU all
            ranks raise.
        MismatchError: on a CPU, if the ranks passed different arguments.
        UnsupportedError: Triton's kernels are used by several ranks.
    """
    with _agreed(sharded, _NORM) as told:
        bound = bound_of()
        chosen = _indices(sharded, params)
        told.update(bound.told(), parameters=sorted(chosen))
    before = _reduced(sharded, _NORM)
    words = sharded.norm_words(bound.kind, lambda bucket: _only(sharded, bucket, chosen))
    norm = norm_of(words, bound.kind, sharded.inv_scale() * before.clip)
    bound.check(norm, sharded)
    here = bound.coefficient(norm)
    _write(sharded, chosen, lambda piece: piece.mul_(here))
    sharded.wrote(replace(before, clipped=True))
    return norm


def clip_value_of(sharded: ShardedStep, value: Any, params: Any) -> None:
    """Limits each element of the reduced gradient to a magnitude; collective.

    Args:
        value: the largest magnitude of an element of the unscaled gradient.
        params: one parameter or several; None for all.

    Raises:
        See :func:`clip_norm_of`.
    """
    with _agreed(sharded, _VALUE) as told:
        limit = _bound("clip_value", value)
        chosen = range(len(sharded.params)) if params is None else _indices(sharded, params)
        told.update(clip_value=limit, parameters=None if params is None else sorted(chosen))
    before = _reduced(sharded, _VALUE)
    if before.written and sharded.two_passes:
        before = sharded.reduce("l2")  # sums the norm words of the written gradients
    if before.clipped:
        # An earlier clipping by norm only set a coefficient. Multiply the gradients by it now, so
        # that clipping by value sees the same gradients as in torch.
        factor = before.clip.to(torch.float32)
        _write(sharded, range(len(sharded.params)), lambda piece: piece.mul_(factor))
        before = replace(before, clip=torch.ones_like(before.clip))
    # Clipping makes infinite elements finite, but the step must still be skipped.
    overflowed = found_non_finite(before.words) if sharded.two_passes else None
    if before.overflowed is not None:
        overflowed = before.overflowed if overflowed is None else overflowed + before.overflowed
    most = (limit / sharded.inv_scale()).to(torch.float32)
    _write(sharded, chosen, lambda piece: piece.clamp_(-most, most))
    sharded.wrote(replace(before, clipped=True, overflowed=overflowed))


def _check_step(sharded: ShardedStep, operation: str) -> None:
    """Raises if the step cannot be taken, or if kernels cannot sum a norm of clipped gradients."""
    setting, name = sharded.setting, operation.removeprefix("optimizer.")
    sharded.refuse_in_backward(name)
    sharded.refuse_if_partly_updated(name)
    sharded.check_hyper()
    if setting.options.kernels == "triton" and setting.world_size > 1:
        raise UnsupportedError(
            f"{setting.where(name)}: with several ranks, Triton's kernels sum a norm only during "
            "the reduction. Clipping by value, or clipping only some of the parameters, changes "
            'gradients after the reduction; use kernels="native"'
        )


def _reduced(sharded: ShardedStep, operation: str) -> FirstPass:
    sharded.reduce_now(operation)
    assert sharded.first_pass is not None
    return sharded.first_pass


@contextmanager
def _agreed(sharded: ShardedStep, operation: str) -> Iterator[dict[str, Any]]:
    """Yields a dict for the call's arguments, and compares it on all ranks at exit; collective.

    It sends the same message as clipping by the norm of all parameters, so that ranks that clip in
    different ways raise. On a device each rank checks only its own arguments, since the host would
    have to wait for the other ranks.
    """
    told: dict[str, Any] = {"parameters": None}
    if sharded.setting.comm is None or not sharded.table.compares:
        _check_step(sharded, operation)
        yield told
        return
    refusal = None
    try:
        _check_step(sharded, operation)
        yield told
    except Exception as error:
        refusal = error
    with all_or_none(None, operation, sharded.mesh):
        sharded.agree(Asked(operation, told, refusal))


def _indices(sharded: ShardedStep, params: Any) -> set[int]:
    """Returns the indices of parameters in the optimizer.

    Frozen parameters in no group have no gradient, and are skipped as in torch's clipping.
    """
    several: Iterable[Any] = [params] if isinstance(params, Tensor) else params
    known: dict[int, int] = {}
    for index, param in enumerate(sharded.params):
        known.setdefault(id(param), index)
    chosen = set()
    for number, param in enumerate(several):
        if id(param) in known:
            chosen.add(known[id(param)])
        elif not isinstance(param, torch.nn.Parameter) or param.requires_grad:
            raise ArgumentError(
                f"params: number {number}: expected a parameter of this optimizer, got "
                f"{_told(param)}"
            )
    return chosen


def _told(param: Any) -> str:
    if not isinstance(param, Tensor):
        return repr(param)
    placement = placement_of(param)
    if placement is not None:
        return f"{placement.name_of(param)}, which is in none of its groups; add_param_group() it"
    return f"another tensor, {param.dtype} of shape {tuple(param.shape)}"


def _only(sharded: ShardedStep, bucket: Bucket, chosen: Container[int]) -> Tensor | None:
    """Returns a bucket's reduced gradient, zeroed outside ``chosen``; None if no part is chosen."""
    segments = [each for each in bucket.layout.segments if each.param in chosen]
    if not segments:
        return None
    own = sharded.own_gradient(bucket)
    if len(segments) == len(bucket.layout.segments):
        return own
    chunk, only = sharded.own_chunk(bucket), torch.zeros_like(own)
    for segment in segments:
        within(only, chunk, segment).copy_(within(own, chunk, segment))
    return only


def _write(sharded: ShardedStep, chosen: Container[int], write: Callable[[Tensor], object]) -> None:
    """Calls ``write``, which changes its argument, on this rank's piece of each chosen gradient."""
    for bucket in sharded.buckets:
        chunk = bucket.layout.chunk(*sharded.setting.shard_of)
        for segment in bucket.layout.segments:
            if segment.param in chosen:
                piece = within(sharded.plan.reduced(bucket), chunk, segment)
                if piece.numel():
                    write(piece)
