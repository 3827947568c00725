"""Memory of a rank: the closed forms, the paper's figures, and what ringcomm's optimizer holds."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ringcomm
from ringcomm.errors import ArgumentError
from ringcomm.optim import AdamW, AdamWOptions
from ringcomm.zero.estimate import (
    STAGES,
    BytesPerElement,
    largest_model,
    model_state,
    working_buffers,
)
from ringcomm.zero.estimate_model import ModelElems
from ringcomm.zero.options import ZeroOptions

BOOK = BytesPerElement.of(torch.float16, reduce=torch.float16)
# Rajbhandari et al., "ZeRO", table 1, 7.5 B parameters: GB by ranks, for stages 1, 2 and 3.
TABLE_1 = {
    1: ("120", "120", "120"),
    4: ("52.5", "41.3", "30"),
    16: ("35.6", "21.6", "7.5"),
    64: ("31.4", "16.6", "1.88"),
    256: ("30.4", "15.4", "0.47"),
    1024: ("30.1", "15.1", "0.12"),
}
MODELS = st.builds(ModelElems, st.integers(0, 10**12), st.integers(0, 10**12))
WORLDS = st.integers(1, 5000)
SIZES = st.integers(0, 8)
EACH = st.builds(BytesPerElement, SIZES, SIZES, SIZES, SIZES, SIZES, SIZES, SIZES)


def total(stage, world_size, each, elems=7_500_000_000):
    return model_state(ModelElems(elems), stage, world_size, each).total


def test_figure_1_of_the_paper_to_the_printed_digit():
    assert [f"{total(stage, 64, BOOK) / 1e9:.1f}" for stage in STAGES] == [
        "120.0",
        "31.4",
        "16.6",
        "1.9",
    ]


@pytest.mark.parametrize("world_size", TABLE_1)
def test_table_1_of_the_paper_to_the_printed_digit(world_size):
    for stage, printed in enumerate(TABLE_1[world_size], start=1):
        digits = len(printed.partition(".")[2])
        size_gb = Fraction(total(stage, world_size, BOOK), 10**9)
        # The paper rounds halves up: 41.25 is printed as 41.3.
        assert int(size_gb * 10**digits + Fraction(1, 2)) == Fraction(printed) * 10**digits


@pytest.mark.parametrize(
    ("each", "sizes"),
    [
        (BOOK, (2, 2, 2, 12)),
        (BytesPerElement(), (2, 2, 4, 12)),
        (BytesPerElement.of(), (2, 2, 4, 12)),
        (BytesPerElement.of(torch.float32), (4, 4, 4, 8)),
        (BytesPerElement.of(torch.float32, amsgrad=True), (4, 4, 4, 12)),
        (BytesPerElement.of(torch.bfloat16, amsgrad=True), (2, 2, 4, 16)),
        (BytesPerElement.of(torch.bfloat16, master="remainder"), (2, 2, 4, 10)),
        (BytesPerElement.of(torch.float16, master="none"), (2, 2, 4, 8)),
        (BytesPerElement(grad=4), (2, 4, 4, 12)),
    ],
)
def test_closed_forms(each, sizes):
    param, grad, reduced, state = sizes
    trained, frozen, world_size = 640, 192, 64
    whole = param * (trained + frozen)
    shard, frozen_shard = trained // world_size, frozen // world_size
    expected = [
        (whole, grad * trained, state * trained),
        (whole, grad * trained, state * shard),
        (whole, reduced * shard, state * shard),
        (param * (shard + frozen_shard), reduced * shard, state * shard),
    ]
    for stage in STAGES:
        told = model_state(ModelElems(trained, frozen), stage, world_size, each)
        assert (told.params, told.grads, told.state) == expected[stage]
        assert told.total == sum(expected[stage])


def test_the_fullest_rank_of_an_uneven_world():
    told = model_state(ModelElems(10, 5), 3, 4, BytesPerElement())
    assert (told.params, told.grads, told.state) == (2 * (3 + 2), 4 * 3, 12 * 3)
    assert model_state(ModelElems(1), 3, 1000, BytesPerElement()).total == 18


@given(MODELS, WORLDS, EACH)
def test_more_ranks_never_need_more(model, world_size, each):
    for stage in STAGES:
        one, more = (model_state(model, stage, n, each).total for n in (world_size, world_size + 1))
        assert more <= one
        shared = model_state(model, 3, world_size, each).total * world_size
        whole = each.param * model.total + (each.reduced + each.state) * model.trainable
        assert shared >= whole


@given(MODELS, WORLDS, EACH)
def test_a_higher_stage_needs_no_more_unless_it_widens_gradients(model, world_size, each):
    sizes = [model_state(model, stage, world_size, each).total for stage in STAGES]
    assert sizes[0] >= sizes[1]
    assert sizes[2] >= sizes[3]
    shard = -(-model.trainable // world_size)
    assert sizes[1] - sizes[2] == each.grad * model.trainable - each.reduced * shard
    if each.reduced <= each.grad:
        assert sizes[1] >= sizes[2]


def test_one_rank_pays_for_an_fp32_gradient_shard():
    sizes = [total(stage, 1, BytesPerElement(), 100) for stage in STAGES]
    assert sizes == [1600, 1600, 1800, 1800]


@pytest.mark.parametrize(("stage", "printed"), [(0, "2.0"), (1, "7.6"), (2, "14.4"), (3, "128.0")])
def test_largest_models_of_table_2_of_the_paper(stage, printed):
    assert f"{largest_model(32 * 10**9, stage, 64, BOOK) / 1e9:.1f}" == printed


@given(st.integers(0, 10**13), st.integers(0, 10**12), st.sampled_from(STAGES), WORLDS)
def test_the_largest_model_fits_and_one_more_element_does_not(budget, other, stage, world_size):
    each = BytesPerElement()
    elems = largest_model(budget, stage, world_size, each, other)
    if elems:
        assert total(stage, world_size, each, elems) + other <= budget
    assert total(stage, world_size, each, elems + 1) + other > budget


def test_working_buffers_by_hand():
    model = ModelElems(
        10_000, frozen=700, largest=900, units=(300, 4000, 100, 2500, 3700), root=100
    )
    options = ZeroOptions(bucket_elems=512)
    told = [working_buffers(model, stage, 4, BytesPerElement(), options) for stage in STAGES]
    assert [each.buckets for each in told] == [4 * 900, 0, 2 * 2 * 900, 2 * 2 * 900]
    assert [each.units for each in told] == [0, 0, 0, 2 * (100 + 4000 + 3700)]
    assert [each.grad_shard for each in told] == [4 * 2500, 0, 0, 0]
    assert told[3].total == 2 * 2 * 900 + 2 * (100 + 4000 + 3700)


def test_working_buffers_as_options_say():
    model = ModelElems(10_000, units=(300, 4000, 3000, 2700))

    def buffers(stage, world_size=4, two_passes=False, reduced=4, **options):
        each = BytesPerElement(reduced=reduced)
        return working_buffers(model, stage, world_size, each, ZeroOptions(**options), two_passes)

    assert buffers(2).buckets == 2 * 2 * 4000, "a bucket ends where its unit does"
    assert buffers(2, bucket_elems=1024, in_flight=3).buckets == 2 * 3 * 1024
    assert buffers(2, in_flight=9).buckets == 2 * 3 * 4000, "10 000 elements fill three of 4000"
    mostly_frozen = ModelElems(9, frozen=9991, units=(10_000,))
    told = working_buffers(mostly_frozen, 2, 4, BytesPerElement(), ZeroOptions())
    assert told.buckets == 2 * 9, "frozen parameters have no bucket"
    assert buffers(3, prefetch=0).units == 2 * 4000
    assert buffers(3, prefetch=2).units == 2 * (4000 + 3000 + 2700)
    assert buffers(3, keep_gathered=True).units == 2 * 10_000
    assert buffers(1, two_passes=True).grad_shard == 4 * 2500
    assert buffers(1, two_passes=True, reduced=2).grad_shard == 2 * 2500
    assert buffers(1, world_size=1, two_passes=True).total == 0, "nothing to reduce"
    assert buffers(2, two_passes=True) == buffers(2), "its shard is model state"


@pytest.mark.parametrize("elems", [0, 1, 9, 5000, 10**10])
def test_working_buffers_of_a_count(elems):
    each, options = BytesPerElement(), ZeroOptions(bucket_elems=1024)
    told = working_buffers(ModelElems(elems), 3, 4, each, options)
    bucket = min(elems, 1024)
    assert (told.buckets, told.units) == (2 * bucket * (2 if elems > 1024 else 1), 0)


@pytest.mark.parametrize(
    ("dtype", "options", "each"),
    [
        (torch.bfloat16, AdamWOptions(), BytesPerElement.of()),
        (torch.float16, AdamWOptions(), BytesPerElement.of(torch.float16)),
        (torch.float32, AdamWOptions(), BytesPerElement.of(torch.float32)),
        (
            torch.bfloat16,
            AdamWOptions(master="remainder"),
            BytesPerElement.of(master="remainder"),
        ),
        (
            torch.bfloat16,
            AdamWOptions(master="none", rounding="stochastic"),
            BytesPerElement.of(master="none"),
        ),
    ],
)
def test_stage_1_is_what_the_optimizer_holds(dtype, options, each):
    """Models of sizes that need no padding: chunks are multiples of 512 elements."""
    world_size = 2

    def work(comm):
        params = [torch.zeros(64, 64, dtype=dtype), torch.zeros(1024, dtype=dtype)]
        for param in params:
            param.requires_grad_().grad = torch.zeros_like(param)
        params.append(torch.zeros(7, dtype=dtype))
        optimizer = AdamW(params, comm=comm, options=options)
        optimizer.step()
        kept = [bucket.values() for bucket in optimizer.state_dict()["state"]["buckets"]]
        return (
            sum(param.nbytes for param in params),
            params[0].grad.nbytes + params[1].grad.nbytes,
            sum(tensor.nbytes for tensors in kept for tensor in tensors),
        )

    told = model_state(ModelElems(64 * 64 + 1024, frozen=7), 1, world_size, each)
    with ringcomm.local_world(world_size) as world:
        assert world.run(work) == [(told.params, told.grads, told.state)] * world_size


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: total(4, 1, BOOK), "stage: expected 0, 1, 2 or 3, got 4"),
        (lambda: total(3, 0, BOOK), "expected world_size of at least 1, got 0"),
        (lambda: ModelElems(-1), "expected trainable of at least 0, got -1"),
        (lambda: BytesPerElement(param=-2), "expected param of at least 0, got -2"),
        (lambda: BytesPerElement.of(torch.float64), "dtype: expected one of float32, bfloat16"),
        (lambda: BytesPerElement.of(reduce=torch.float16), "reduce: expected float32 or the dtype"),
        (lambda: BytesPerElement.of(master="half"), "master: expected one of fp32, remainder"),
        (
            lambda: BytesPerElement.of(torch.float16, master="remainder"),
            "lower half of bfloat16 parameters, got torch.float16",
        ),
        (
            lambda: largest_model(1, 0, 1, BytesPerElement(param=0)),
            "expected param_bytes of at least 1, got 0",
        ),
        (lambda: largest_model(-1, 0, 1, BOOK), "expected budget_bytes of at least 0, got -1"),
    ],
)
def test_what_makes_no_sense_is_refused(call, says):
    with pytest.raises(ArgumentError, match=says):
        call()
