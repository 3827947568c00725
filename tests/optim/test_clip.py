# SPDX-License-Identifier: Apache-2.0
"""The norm of the whole gradient equals torch's, with the same bits in every world; clipping."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import combinations
from typing import Any

import pytest
import torch

from ringcomm import _native
from ringcomm.comm.host.arguments import DTYPE_CODES
from ringcomm.errors import ArgumentError, MismatchError, RingcommError
from ringcomm.optim import SGD, AdamW, AdamWOptions, GradScaler, LossScaleOptions, LossScaler
from ringcomm.optim.gradients import NORM_WORDS, combine, norm_of
from ringcomm.optim.sharded import ShardedOptimizer
from tests.optim.problems import SHAPES, SMALL_BUCKETS, Problem, values
from tests.support.covering import covering

Tensor = torch.Tensor
ONE = torch.ones((), dtype=torch.float64)
SUM = replace(SMALL_BUCKETS, reduce="sum")


def wild(shape: tuple[int, ...], index: int, step: int, rank: int) -> Tensor:
    """Gives rank 0 a gradient of many magnitudes and others zeros, so all worlds sum the same."""
    whole = values(shape, 100 * step + index) * 10.0 ** values(shape, 500 + index)
    return whole if rank == 0 else torch.zeros(shape)


WILD = Problem(gradient=wild)


def words_of(grad: Tensor, kind: str) -> Tensor:
    words = torch.empty(NORM_WORDS, dtype=torch.int64)
    code = _native.GRAD_NORM_KINDS[kind]
    _native.grad_norm(
        grad.data_ptr(), DTYPE_CODES[grad.dtype], grad.numel(), code, words.data_ptr()
    )
    return words


def exact_norm(grad: Tensor, kind: str) -> float:
    """Returns the norm from exact rational sums."""
    numbers = [Fraction(number) for number in grad.double().tolist()]
    if kind == "inf":
        return float(max(abs(number) for number in numbers))
    total = sum(number * number if kind == "l2" else abs(number) for number in numbers)
    return math.sqrt(total) if kind == "l2" else float(total)


@pytest.mark.parametrize("kind", ["l2", "l1", "inf"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_words_become_the_norm(kind, dtype):
    for elems in (1, 511, 512, 3000):
        grad = (values((elems,), 3) * 2.0 ** (values((elems,), 4) * 4)).to(dtype)
        norm = norm_of(words_of(grad, kind), kind, ONE)
        assert norm.dtype is torch.float32 and norm.dim() == 0
        assert norm.item() == pytest.approx(exact_norm(grad, kind), rel=2**-23)


@pytest.mark.parametrize("kind", ["l2", "l1"])
@pytest.mark.parametrize("magnitude", [1e-45, 1e-30, 1e19, 3e38])
def test_extreme_magnitudes_neither_vanish_nor_overflow(kind, magnitude):
    grad = torch.full((4,), magnitude)
    norm = norm_of(words_of(grad, kind), kind, ONE)
    exact = exact_norm(grad, kind)
    assert norm.item() == (math.inf if exact > 3.4028235e38 else pytest.approx(exact, rel=2**-22))


@pytest.mark.parametrize("kind", ["l2", "l1", "inf"])
def test_buckets_combine_to_the_norm_of_all(kind):
    grads = [values((700,), seed) * 10.0**seed for seed in range(3)]
    together = combine(torch.stack([words_of(grad, kind) for grad in grads]), kind)
    norm = norm_of(together, kind, ONE)
    assert norm.item() == pytest.approx(exact_norm(torch.cat(grads), kind), rel=2**-23)
    nothing = combine(torch.zeros(0, NORM_WORDS, dtype=torch.int64), kind)
    assert norm_of(nothing, kind, ONE).item() == 0.0


def clipped(comm, problem, options, max_norm, norm_type, steps=3):
    """Takes clipped steps; returns the norms and the final parameters."""
    params = problem.params()
    optimizer = problem.ours(params, comm, options)
    norms = []
    for step in range(steps):
        problem.give(params, step, 0 if comm is None else comm.rank)
        norms.append(optimizer.clip_grad_norm_(max_norm, norm_type))
        optimizer.step()
    return torch.stack(norms), params


@covering(strength=1, norm_type=[2.0, 1.0, math.inf], dtype=[torch.float32, torch.bfloat16])
def test_every_world_has_the_same_norm_and_clips_alike(worlds, norm_type, dtype):
    problem = replace(WILD, dtype=dtype)
    norms, expected = clipped(None, problem, SUM, 0.5, norm_type)
    for world in (1, 3):
        for mine, params in worlds(world).run(clipped, problem, SUM, 0.5, norm_type):
            assert torch.equal(mine, norms)
            assert all(torch.equal(a, b) for a, b in zip(params, expected, strict=True))


@covering(strength=1, norm_type=[2.0, 1.0, math.inf], max_norm=[0.7, 0.0, 1e6])
def test_it_clips_as_torch_does(norm_type, max_norm):
    # torch cannot take the largest element of an empty tensor.
    problem = replace(WILD, shapes=tuple(shape for shape in SHAPES if 0 not in shape))
    params, theirs = problem.params(), problem.params()
    optimizer, reference = problem.ours(params, None), problem.torch(theirs)
    for step in range(3):
        problem.give(params, step, 0)
        problem.give(theirs, step, 0)
        norm = optimizer.clip_grad_norm_(max_norm, norm_type)
        other = torch.nn.utils.clip_grad_norm_(theirs, max_norm, norm_type)
        torch.testing.assert_close(norm, other, rtol=1e-5, atol=0.0)
        optimizer.step()
        reference.step()
        for index, (mine, param) in enumerate(zip(params, theirs, strict=True)):
            torch.testing.assert_close(mine, param, rtol=1e-5, atol=1e-6, msg=str(index))


# No empty parameter: torch cannot take the largest element of an empty tensor.
SGD_PROBLEM = replace(
    WILD,
    shapes=tuple(shape for shape in SHAPES if 0 not in shape),
    torch_class=torch.optim.SGD,
    settings={"lr": 0.5, "momentum": 0.5},
    groups=({}, {"lr": 0.25}),
)
MIXED = [
    ("value", lambda clips: (clips.value(0.5), None)),
    ("some values", lambda clips: (clips.value(0.5, clips.some), None)),
    ("one value", lambda clips: (clips.value(0.0, clips.some[1]), None)),
    ("norm of some", lambda clips: clips.norm(0.7, clips.some)),
    ("norms of both", lambda clips: [*clips.norm(0.7, clips.some), *clips.norm(0.1, clips.rest)]),
    ("norm, then value", lambda clips: (clips.norm(2.0, None)[0], clips.value(0.05))),
    ("value, then norm", lambda clips: (clips.value(0.5), *clips.norm(0.7, None))),
    ("value, then norm of some", lambda clips: (clips.value(0.5), *clips.norm(0.7, clips.some))),
]


@dataclass
class Clipping:
    """Clips with ringcomm, or with torch if there is no optimizer."""

    params: list[Tensor]
    optimizer: ShardedOptimizer | None

    @property
    def some(self) -> list[Tensor]:
        return self.params[::2]

    @property
    def rest(self) -> list[Tensor]:
        return self.params[1::2]

    def value(self, most: float, params: Any = None) -> None:
        if self.optimizer is not None:
            self.optimizer.clip_grad_value_(most, params=params)
        else:
            chosen = self.params if params is None else params
            torch.nn.utils.clip_grad_value_(chosen, most, foreach=False)

    def norm(self, most: float, params: Any) -> list[Tensor]:
        if self.optimizer is not None:
            return [self.optimizer.clip_grad_norm_(most, params=params)]
        chosen = self.params if params is None else params
        return [torch.nn.utils.clip_grad_norm_(chosen, most, foreach=False)]


def clipped_by(comm, clip, options=SUM, problem=SGD_PROBLEM):
    """Returns the results of the clip calls, and the final parameters."""
    params = problem.params()
    optimizer = problem.ours(params, comm, options)
    told = []
    for step in range(3):
        problem.give(params, step, 0 if comm is None else comm.rank)
        told += [each for each in clip(Clipping(params, optimizer)) if each is not None]
        optimizer.step()
    return told, params


@pytest.mark.parametrize("clip", [clip for _, clip in MIXED], ids=[name for name, _ in MIXED])
def test_values_and_parts_are_clipped_as_by_torch_in_every_world(worlds, clip):
    told, expected = clipped_by(None, clip)
    theirs = SGD_PROBLEM.params()
    reference, torchs = SGD_PROBLEM.torch(theirs), []
    for step in range(3):
        SGD_PROBLEM.give(theirs, step, 0)
        torchs += [each for each in clip(Clipping(theirs, None)) if each is not None]
        reference.step()
    torch.testing.assert_close(told, torchs, rtol=1e-5, atol=0.0)
    # A norm may differ in its last bit, which changes the scaling; clipping by value is exact.
    rtol, atol = (1e-5, 1e-6) if told else (0.0, 0.0)
    torch.testing.assert_close(expected, theirs, rtol=rtol, atol=atol)
    for world in (1, 3):
        for mine, params in worlds(world).run(clipped_by, clip):
            assert mine == told
            assert all(torch.equal(a, b) for a, b in zip(params, expected, strict=True))


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_scaled_gradient_is_clipped_by_its_unscaled_value(worlds, world, dtype):
    """A step that overflows is skipped, although clipping would make it finite."""

    def work(comm):
        weight = torch.zeros(700, dtype=dtype).requires_grad_()
        scaler = LossScaler(LossScaleOptions(init_scale=1024.0))
        optimizer = SGD([weight], lr=1.0, comm=comm, loss_scaler=scaler)
        weight.grad = torch.full_like(weight, 1024.0 * (0.5 if comm.rank else 1.0))
        weight.grad[0] = 0.125 * 1024.0
        optimizer.clip_grad_value_(0.25)
        optimizer.step()
        assert weight[0].item() == -0.125 and bool((weight[1:] == -0.25).all())
        for value_first in (True, False):
            optimizer.zero_grad()
            weight.grad = torch.zeros_like(weight)
            weight.grad[-1] = math.inf if comm.rank == 0 else 0.0
            if not value_first:
                assert optimizer.clip_grad_norm_(1.0, params=[weight]).isnan()
            optimizer.clip_grad_value_(0.25)
            if value_first:
                assert optimizer.clip_grad_norm_(1.0).item() == 0.25
            optimizer.step()
        return weight[0].item(), optimizer.skipped_steps.item(), scaler.current.item()

    assert worlds(world).run(work) == [(-0.125, 2.0, 256.0)] * world


def test_clipping_what_is_still_scaled_is_refused():
    for clip in (
        lambda o: o.clip_grad_norm_(1.0),
        lambda o: o.clip_grad_value_(1.0),
        lambda o: o.clip_grad_norm_(1.0, params=[]),
    ):
        weight = torch.zeros(4).requires_grad_()
        optimizer, scaler = AdamW([weight]), GradScaler(init_scale=4.0)
        scaler.scale(weight.sum()).backward()
        clip(optimizer)
        with pytest.raises(ArgumentError, match=r"call scaler\.unscale_"):
            scaler.step(optimizer)


def test_the_norm_of_some_is_finite_if_only_the_others_overflow():
    params = [torch.zeros(3).requires_grad_(), torch.zeros(3).requires_grad_()]
    optimizer = SGD(params, lr=1.0)
    params[0].grad, params[1].grad = torch.full((3,), 2.0), torch.full((3,), math.inf)
    some = params[:1]
    assert optimizer.clip_grad_norm_(1.0, math.inf, True, params=some).item() == 2.0
    with pytest.raises(RingcommError, match="Look for the loss that overflowed"):
        optimizer.clip_grad_norm_(1.0, math.inf, True, params=params)
    optimizer.step()
    torch.testing.assert_close(params[0], torch.full((3,), -1.0))
    assert bool((params[1] == -math.inf).all())


def test_ranks_that_clip_differently_are_told_so_and_nothing_is_changed(worlds):
    def work(comm):
        params = [torch.zeros(600).requires_grad_(), torch.zeros(9).requires_grad_()]
        optimizer = SGD(params, lr=1.0, comm=comm)
        for param in params:
            param.grad = torch.ones_like(param)
        mine, stranger = params[comm.rank], torch.zeros(1)
        with pytest.raises(MismatchError, match="Option clip_value"):
            optimizer.clip_grad_value_(0.5 + comm.rank)
        with pytest.raises(MismatchError, match="Option parameters"):
            optimizer.clip_grad_value_(0.5, params=mine)
        with pytest.raises(MismatchError, match="Option max_norm"):
            optimizer.clip_grad_norm_(0.5 + comm.rank, params=params)
        with pytest.raises(ArgumentError, match=r"number 1: expected a parameter of this"):
            optimizer.clip_grad_norm_(0.5, params=[mine, params[0] if comm.rank else stranger])
        calls: list[Any] = [
            lambda: optimizer.clip_grad_norm_(0.5),
            lambda: optimizer.clip_grad_norm_(0.5, params=params),
            lambda: optimizer.clip_grad_value_(0.5),
            optimizer.step,
        ]
        for reduced_before in (False, True):
            if reduced_before:
                assert optimizer.clip_grad_norm_(1e9).isfinite()
            for first, other in combinations(calls, 2):
                if reduced_before and optimizer.step in (first, other):
                    continue  # sends nothing before it changes parameters
                with pytest.raises(MismatchError, match="Option "):
                    (other if comm.rank else first)()
        optimizer.step()
        return all(bool((param == -1.0).all()) for param in params)

    assert worlds(2).run(work) == [True, True]


@pytest.mark.parametrize("world", [1, 2])
def test_clipping_twice_counts_from_the_clipped_gradient(worlds, world):
    def work(comm):
        weight = torch.zeros(512).requires_grad_()
        optimizer = AdamW([weight], comm=comm)
        weight.grad = torch.full((512,), 3.0)
        first = optimizer.clip_grad_norm_(10.0, math.inf)
        second = optimizer.clip_grad_norm_(1.5, math.inf)
        third = optimizer.clip_grad_norm_(99.0, math.inf)
        return [norm.item() for norm in (first, second, third)]

    for norms in worlds(world).run(work):
        assert norms == [3.0, 3.0, pytest.approx(1.5, rel=1e-6)]


def test_zero_grad_forgets_the_clipped_gradient():
    weight = torch.zeros(5).requires_grad_()
    optimizer = AdamW([weight])
    weight.grad = torch.ones(5)
    optimizer.clip_grad_norm_(1.0)
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(weight, torch.zeros(5)), "no gradient, no step"


@covering(strength=1, world=[1, 2], bad=[math.inf, math.nan], norm_type=[2.0, 1.0, math.inf])
def test_a_gradient_that_is_not_finite_has_no_norm(worlds, world, bad, norm_type):
    def work(comm):
        weight = torch.zeros(2000).requires_grad_()
        optimizer = AdamW([weight], comm=comm)
        weight.grad = torch.zeros(2000)
        weight.grad[1999] = bad if comm.rank == 0 else 1.0
        with pytest.raises(RingcommError, match="Look for the loss that overflowed"):
            optimizer.clip_grad_norm_(1.0, norm_type, error_if_nonfinite=True)
        return optimizer.clip_grad_norm_(1.0, norm_type)

    assert all(norm.isnan() for norm in worlds(world).run(work))


def test_the_norm_does_not_depend_on_the_buckets():
    """Other buckets have other tiles of 512 elements, so sums in double round differently."""
    norms = []
    for elems in (512, 4096, 32 << 20):
        options = AdamWOptions(bucket_elems=elems)
        norms.append(clipped(None, WILD, options, 1.0, 2.0, 1)[0].item())
    assert norms == [pytest.approx(norms[0], rel=2**-23)] * 3
    assert sum(math.prod(shape) for shape in SHAPES) > 1024
