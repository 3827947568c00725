# SPDX-License-Identifier: Apache-2.0
"""Closed formulas match the papers' figures and manual counts, and refuse bad input."""

from __future__ import annotations

import math
from fractions import Fraction
from math import comb
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ringcomm import Disk
from ringcomm.errors import ArgumentError
from ringcomm.extras.estimate import (
    STAGES,
    ActivationBytes,
    ExpertLayer,
    ModelElems,
    OffloadBytes,
    SwapUnits,
    Training,
    Transformer,
    bytes_of,
)
from ringcomm.offload import scratch
from ringcomm.optim import AdamWOptions
from ringcomm.zero import Compression, Precision, ZeroOptions

FP32 = torch.float32
PURE = AdamWOptions(master="none", rounding="stochastic")
# Rajbhandari et al., "ZeRO": FP16 throughout, with FP32 masters and moments.
BOOK = ZeroOptions(Precision(param=torch.float16, reduce=torch.float16))
BF16 = ZeroOptions(Precision(param=torch.bfloat16))
# Table 1 of the paper, for 7.5 B parameters: GB by number of ranks, at stages 1, 2 and 3.
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
TRAININGS = st.sampled_from([BOOK, BF16, ZeroOptions()])
GPT2 = Transformer(layers=12, width=768, heads=12, context=1024, vocab=50257)
GPT2_XL = Transformer(layers=48, width=1600, heads=25, context=1024, vocab=50257)
# Korthikanti et al. (2022), table 3: GPT-3 and Megatron-Turing NLG.
GPT3 = Transformer(layers=96, width=12288, heads=96, context=2048, vocab=51200)
MT_NLG = Transformer(layers=105, width=20480, heads=128, context=2048, vocab=51200)
SHAPE = Transformer(layers=3, width=24, heads=4, context=10, vocab=50)
MICRO_BATCH = 2


def total(stage: int, ranks: int, options: ZeroOptions, elems: int = 7_500_000_000) -> int:
    return sum(Training(ModelElems(elems), ranks, options=options).state(stage))


# ---- model state ----------------------------


def test_figure_1_of_the_paper_to_the_printed_digit():
    sizes = [f"{total(stage, 64, BOOK) / 1e9:.1f}" for stage in STAGES]
    assert sizes == ["120.0", "31.4", "16.6", "1.9"]


@pytest.mark.parametrize("ranks", TABLE_1)
def test_table_1_of_the_paper_to_the_printed_digit(ranks):
    for stage, printed in enumerate(TABLE_1[ranks], start=1):
        digits = len(printed.partition(".")[2])
        size_gb = Fraction(total(stage, ranks, BOOK), 10**9)
        # The paper rounds halves up: it prints 41.25 as 41.3.
        assert int(size_gb * 10**digits + Fraction(1, 2)) == Fraction(printed) * 10**digits


@pytest.mark.parametrize(
    ("options", "more", "sizes"),
    [
        (BOOK, {}, (2, 2, 2, 12)),
        (BF16, {}, (2, 2, 4, 12)),
        (ZeroOptions(), {}, (4, 4, 4, 8)),
        (ZeroOptions(), {"amsgrad": True}, (4, 4, 4, 12)),
        (BF16, {"amsgrad": True}, (2, 2, 4, 16)),
        (BF16, {"optimizer": AdamWOptions(master="remainder")}, (2, 2, 4, 10)),
        (ZeroOptions(Precision.preset("bf16-remainder")), {}, (2, 2, 4, 10)),
        (BF16, {"optimizer": PURE}, (2, 2, 4, 8)),
        (BF16, {"optimizer": AdamWOptions(accumulate_dtype=FP32)}, (2, 4, 4, 12)),
    ],
)
def test_model_state_by_hand(options, more, sizes):
    param, grad, reduced, state = sizes
    trained, frozen, ranks = 640, 192, 64
    whole = param * (trained + frozen)
    shard, frozen_shard = trained // ranks, frozen // ranks
    training = Training(ModelElems(trained, frozen), ranks, options=options, **more)
    assert [training.state(stage) for stage in STAGES] == [
        (whole, grad * trained, state * trained),
        (whole, grad * trained, state * shard),
        (whole, reduced * shard, state * shard),
        (param * (shard + frozen_shard), reduced * shard, state * shard),
    ]


def test_8_bit_moments_have_exponents():
    """For each moment, a block of 64 elements has one exponent byte."""
    training = Training(ModelElems(1000), 1, options=BF16, quantized_state=True)
    assert training.state(0).state == 1000 * (4 + 2) + 2 * 16


def test_the_fullest_rank_of_an_uneven_world():
    told = Training(ModelElems(10, 5), 4, options=BF16).state(3)
    assert told == (2 * (3 + 2), 4 * 3, 12 * 3)
    assert total(3, 1000, BF16, 1) == 18


@given(MODELS, WORLDS, TRAININGS)
def test_more_ranks_and_higher_stages_need_no_more(model, ranks, options):
    """More ranks need no more memory, nor do higher stages, except for gradients in FP32."""
    one, more = (Training(model, n, options=options) for n in (ranks, ranks + 1))
    sizes = [sum(one.state(stage)) for stage in STAGES]
    assert all(sum(more.state(stage)) <= size for stage, size in enumerate(sizes))
    each = one.each
    whole = each.param * model.total + each.reduced * model.trainable
    assert sizes[3] * ranks >= whole + sum(each.state_tensors(model.trainable))
    assert sizes[0] >= sizes[1] and sizes[2] >= sizes[3]
    shard = -(-model.trainable // ranks)
    assert sizes[1] - sizes[2] == each.grad * model.trainable - each.reduced * shard


# ---- models ----------------------------


class Tied(nn.Module):
    """An embedding tied to the output layer, around two layers of an odd size."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("positions", torch.zeros(1000))


class Gpt(nn.Module):
    """The model that ``Transformer`` counts, built from torch's own modules."""

    def __init__(self, shape: Transformer) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocab, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(shape.width, shape.heads, 4 * shape.width)
            for _ in range(shape.layers)
        )
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)
        if shape.tied:
            self.head.weight = self.embed.weight


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tied_weights_count_once_and_buffers_not_at_all(device):
    with torch.device(device):
        told = ModelElems.of_module(Tied())
    assert told == ModelElems(77 + 2 * 56 + 14, largest=77, units=(56, 56), root=77 + 14)


def test_frozen_parameters_are_counted_apart_and_stay_in_their_unit():
    net = Tied()
    net.embed.weight.requires_grad_(False)
    net.layers[1].weight.requires_grad_(False)
    told = ModelElems.of_module(net)
    assert told == ModelElems(2 * 56 + 14 - 49, 77 + 49, largest=49, units=(56, 56), root=91)


def test_a_weight_that_two_units_share_is_in_the_one_around_both():
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    told = ModelElems.of_module(nn.Sequential(first, second))
    assert (told.units, told.root, told.trainable) == ((3, 3), 9, 15)


def test_units_may_be_named():
    told = ModelElems.of_module(Tied(), units=[nn.Linear, nn.LayerNorm])
    assert (told.units, told.root) == ((56, 56, 14), 77)


def test_known_models():
    """OpenAI's published checkpoints have these sizes."""
    assert GPT2.model.trainable == 124_439_808
    assert GPT2_XL.model.trainable == 1_557_611_200


@given(*[st.integers(1, 4)] * 3, *[st.integers(1, 30)] * 2, st.booleans())
def test_a_shape_counts_as_the_module_does(layers, heads, head_width, context, vocab, tied):
    shape = Transformer(layers, heads * head_width, heads, context, vocab, tied)
    with torch.device("meta"):
        assert ModelElems.of_module(Gpt(shape)) == shape.model


# ---- working buffers ----------------------------


def test_working_buffers_by_hand():
    model = ModelElems(
        10_000, frozen=700, largest=900, units=(300, 4000, 100, 2500, 3700), root=100
    )
    options = ZeroOptions(BF16.precision, bucket_elems=512)
    training = Training(model, 4, options=options)
    assert [training.buffers(stage) for stage in STAGES] == [
        (4 * 900, 0, 4 * 2500),
        (0, 0, 0),
        (2 * 2 * 900, 0, 0),
        (2 * 2 * 900, 2 * (100 + 4000 + 3700), 0),
    ]


def test_working_buffers_as_options_say():
    model = ModelElems(10_000, units=(300, 4000, 3000, 2700))

    def buffers(stage, ranks=4, two_passes=False, precision=BF16.precision, **options):
        chosen = ZeroOptions(precision, **options)
        return Training(model, ranks, options=chosen, two_passes=two_passes).buffers(stage)

    assert buffers(2).buckets == 2 * 2 * 4000, "a bucket ends where its unit does"
    assert buffers(2, bucket_elems=1024, in_flight=3).buckets == 2 * 3 * 1024
    assert buffers(2, in_flight=9).buckets == 2 * 3 * 4000, "10 000 elements fill three buckets"
    mostly_frozen = ModelElems(9, frozen=9991, units=(10_000,))
    told = Training(mostly_frozen, 4, options=BF16).buffers(2)
    assert told.buckets == 2 * 9, "frozen parameters have no bucket"
    assert buffers(3, prefetch=0).units == 2 * 4000
    assert buffers(3, prefetch=2).units == 2 * (4000 + 3000 + 2700)
    assert buffers(3, reshard_after_forward=False).units == 2 * 10_000
    assert buffers(1, two_passes=True).grad_shard == 4 * 2500
    assert buffers(1, two_passes=True, precision=BOOK.precision).grad_shard == 2 * 2500
    assert sum(buffers(1, ranks=1, two_passes=True)) == 0, "nothing to reduce"
    assert buffers(2, two_passes=True) == buffers(2), "the gradient shard is model state"


@pytest.mark.parametrize("elems", [0, 1, 9, 5000, 10**10])
def test_working_buffers_of_a_count(elems):
    options = ZeroOptions(BF16.precision, bucket_elems=1024)
    told = Training(ModelElems(elems), 4, options=options).buffers(3)
    bucket = min(elems, 1024)
    assert told == (2 * bucket * (2 if elems > 1024 else 1), 0, 0)


# ---- activations ----------------------------


def test_equation_1_of_korthikanti():
    s, b, h, a = SHAPE.context, MICRO_BATCH, SHAPE.width, SHAPE.heads
    assert SHAPE.layer_bytes(b) * h == s * b * h * (34 * h + 5 * a * s)
    assert SHAPE.attention_core_bytes(b) == 5 * a * s**2 * b


@pytest.mark.parametrize(("shape", "per_34"), [(GPT3, 80), (MT_NLG, 64)])
def test_the_attention_core_of_large_models(shape, per_34):
    """5 a s / h is 80 for GPT-3 and 64 for MT-NLG (section 5 of the paper)."""
    core = shape.attention_core_bytes(1)
    assert core * 34 == (shape.layer_bytes(1) - core) * per_34


def test_checkpointing():
    s, b, h, a, v = SHAPE.context, MICRO_BATCH, SHAPE.width, SHAPE.heads, SHAPE.vocab
    layer, ends = 34 * s * b * h + 5 * a * s**2 * b, 5 * s * b * h + 4 * s * b * v
    assert SHAPE.activations(b) == (3 * layer, 0, ends, 0)
    core = 5 * a * s**2 * b
    assert SHAPE.activations(b, "selective") == (3 * 34 * s * b * h, core, ends, 0)
    assert SHAPE.activations(b, "full") == (3 * 2 * s * b * h, layer, ends, 0)


@pytest.mark.parametrize(("every", "checkpoints", "again"), [(1, 3, 1), (2, 2, 2), (5, 1, 3)])
def test_fewer_checkpoints_recompute_more(every, checkpoints, again):
    told = SHAPE.activations(MICRO_BATCH, "full", every)
    assert told.layers == 2 * SHAPE.context * MICRO_BATCH * SHAPE.width * checkpoints
    assert told.recomputed == again * SHAPE.layer_bytes(MICRO_BATCH)


def test_checkpoints_of_zero_infinity():
    """Equation 3 of Rajbhandari et al. (SC'21): 2 bsz seq hd nl / ci."""
    told = GPT3.activations(32, "full", every=4)
    assert told.layers * 4 == 2 * 32 * 2048 * 12288 * 96


def test_activations_of_four_bytes():
    s, b, h, a, v = SHAPE.context, MICRO_BATCH, SHAPE.width, SHAPE.heads, SHAPE.vocab
    told = SHAPE.activations(b, elem_bytes=4)
    assert told.layers == 3 * (66 * s * b * h + 9 * a * s**2 * b)
    assert told.ends == 9 * s * b * h + 4 * s * b * v


def test_activations_on_a_disk_by_hand():
    held = ActivationBytes(200, 7, 50).kept_on(Disk("x", 4096, 90), layer=100)
    assert held == (250, 7, 0, 160), "all fit into the buffers"
    held = ActivationBytes(20_000, 7, 50).kept_on(Disk("x", 4096, 90), layer=100)
    assert held == (4096 + 90 + 93, 7, 0, 19_960)


# ---- offload ----------------------------


def moved_by_hand(sizes: list[int], disk: Disk) -> tuple[int, int, int]:
    """Returns the bytes that the third step reads, by simulating the buffers."""
    left, pieces = disk.resident_bytes, list(sizes)
    while pieces and 0 < pieces[-1] <= left:
        left -= pieces.pop()
    buffers = min(len(pieces), disk.buffer_bytes // max([scratch.PAGE_BYTES, *pieces]))
    holds: dict[int, int] = {}
    read = ahead = 0
    for _ in range(3):
        read = 0
        for number, size in enumerate(pieces):
            if holds.get(number % buffers) != number:
                holds[number % buffers] = number
                read += size
    for number in range(buffers):
        served = range(number, len(pieces), buffers)
        ahead += pieces[number] if len(served) > 1 else 0
    return read, ahead, sum(pieces)


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 12)), min_size=1, max_size=4),
    st.integers(1, 20),
    st.integers(0, 20),
)
def test_what_moves_is_what_following_the_buffers_finds(runs, buffers, resident):
    page = scratch.PAGE_BYTES
    largest = max(size for size, _ in runs)
    disk = Disk("x", max(buffers, largest) * page, resident * page)
    units = [SwapUnits(size * page, count) for size, count in runs]
    told = OffloadBytes.of_state(units, disk)
    sizes = [size * page for size, count in runs for _ in range(count)]
    assert (told.read, told.ahead, told.stored) == moved_by_hand(sizes, disk)
    assert told.written == told.read >= told.behind
    assert told.resident == sum(sizes) - told.stored == bytes_of(units) - told.stored


def on_disk(elems: int, ranks: int, disk: Disk, **more: Any) -> Training:
    return Training(ModelElems(elems), ranks, optimizer=AdamWOptions(offload_state=disk), **more)


@pytest.mark.parametrize(
    ("more", "moved"),
    [
        ({}, 16),
        ({"options": BF16}, 24),
        ({"options": ZeroOptions(Precision.preset("bf16-remainder"))}, 20),
        ({"quantized_state": True}, 4.0625),
        ({"options": BF16, "quantized_state": True}, 12.0625),
    ],
)
def test_bytes_of_an_element_and_step(more, moved):
    """Reads plus writes of a step, per element; DeepSpeed's ZeRO-Infinity moves 32 bytes."""
    elems = 1 << 30
    told = on_disk(elems, 4, Disk("x"), **more).offloaded_state(3)
    assert told.stored * 4 / elems == moved / 2
    assert (told.read + told.written) * 4 / elems == moved
    assert 56 << 20 <= told.buffers <= 64 << 20 and told.resident == 0
    assert told.ahead == told.behind == told.buffers


def test_pages_widen_the_swap_units_of_small_chunks():
    """64 ranks hold 32 Ki of 2 Mi elements each; their 8-bit moments take 8 pages and 512 B."""
    told = on_disk(64 << 25, 64, Disk("x"), quantized_state=True).offloaded_state(1)
    assert told.stored == (1 << 10) * 2 * 9 * scratch.PAGE_BYTES


def test_what_is_resident_does_not_move():
    sizes = [(1 << 30) * part // 8 for part in (0, 1, 4, 8, 20)]
    found = [
        on_disk(1 << 30, 4, Disk("x", resident_bytes=size)).offloaded_state(1) for size in sizes
    ]
    assert [told.resident for told in found] == [min(size, 2 << 30) for size in sizes]
    assert [told.read for told in found] == [max(0, (2 << 30) - size) for size in sizes]
    assert found[-1] == OffloadBytes(resident=2 << 30)


@pytest.mark.parametrize(
    ("ranks", "nodes", "state"),
    [(1, 1, "world"), (2, 1, "world"), (16, 2, "world"), (16, 2, "node")],
)
@given(st.integers(0, 10**10), st.sampled_from(STAGES), st.integers(0, 10**10))
def test_memory_is_that_of_buffers_and_what_is_resident(
    ranks, nodes, state, elems, stage, resident
):
    disk = Disk("x", resident_bytes=resident)
    shared = {"nodes": nodes, "options": ZeroOptions(BF16.precision, state=state)}
    training = on_disk(elems, ranks, disk, quantized_state=True, **shared)
    held = training.state(stage)
    without = Training(ModelElems(elems), ranks, quantized_state=True, **shared).state(stage)
    assert held[:2] == without[:2]
    assert held.state == min(without.state, disk.buffer_bytes + resident)
    told = training.offloaded_state(stage)
    assert told.buffers <= disk.buffer_bytes and told.resident <= resident
    assert told.stored + told.resident >= without.state


def test_times_of_a_disk_by_hand():
    moved = OffloadBytes(40, 0, 400, read=400, written=400, ahead=40, behind=20)
    time = moved.time(3, read=2e-9, write=1e-9)
    assert time == (600.0, 1200.0, 120.0)
    assert (time.added_s(1000.0), time.added_s(50.0)) == (1680.0, 1750.0)


# ---- traffic and time ----------------------------


def test_volumes_of_the_paper():
    """2 P, 2 P, 2 P, 3 P elements (ZeRO, section 7); a rank sends all but its own chunk."""
    training = Training(ModelElems(1000), 8, options=BOOK)
    moved = [training.traffic(stage) for stage in STAGES]
    assert [sum(elems for elems, _ in each) for each in moved] == [2000, 2000, 2000, 3000]
    assert [training.sent_bytes(stage) for stage in STAGES] == [3500, 3500, 3500, 5250]
    assert Training(ModelElems(1000), 1, options=BOOK).sent_bytes(3) == 0
    uneven = Training(ModelElems(10), 4, options=BOOK)
    assert uneven.sent_bytes(1) == 2 * 2 * (10 - 2), "the smallest chunk's rank sends most"


def test_frozen_parameters_are_unsharded_at_stage_3_only():
    training = Training(ModelElems(1000, frozen=300), 2)
    volumes = [sum(elems for elems, _ in training.traffic(stage)) for stage in STAGES]
    assert volumes == [2000, 2000, 2000, 1000 + 2 * 1300]


def test_gradients_move_in_their_own_dtype_and_sums_in_theirs():
    """Only stage 0 moves sums of gradients."""
    wide = AdamWOptions(accumulate_dtype=FP32)
    for optimizer, sizes in (
        (AdamWOptions(), [600, 400, 400, 600]),
        (wide, [800, 600, 600, 800]),
    ):
        training = Training(ModelElems(100), 2, options=BF16, optimizer=optimizer)
        moved = [training.traffic(stage) for stage in STAGES]
        assert [sum(elems * size for elems, size in each) for each in moved] == sizes


def test_what_leaves_a_node_by_hand():
    """A node sends half of gradients, parameters, sums (if nodes have copies) and unshardings."""
    model = ModelElems(1000, frozen=300, root=100)

    def leaving(stage: int, **options: Any) -> int:
        chosen = ZeroOptions(BF16.precision, **options)
        return Training(model, 4, 2, chosen).leaving_node_bytes(stage)

    assert [leaving(stage) for stage in STAGES] == [4000, 3000, 3000, 3000]
    assert leaving(2, state="node") == 4000
    assert leaving(3, params="world") == (4000 + 2 * (2000 - 100) + 2 * 2 * 300) // 2
    assert leaving(1, compression=Compression("param")) == 2000
    assert (
        leaving(1, compression=Compression("int4"))
        < leaving(1, compression=Compression("int8"))
        < 2000
    )


def test_times_by_hand():
    """6e12 operations; 3e9 x 3 / 4 elements of 2 bytes; over nodes also calls and the network."""
    training = Training(ModelElems(10**9), 4, options=BF16)
    assert training.flops(1000) == 6 * 10**12
    assert training.flops(1000, recompute=True) == 8 * 10**12
    assert training.communication_s(3, 25.0) == pytest.approx(0.18)
    over_nodes = Training(ModelElems(10**9), 4, 2, BF16)
    within_s = 3e9 / 2 * 2 / 450e9
    # 477 buckets of 2 Mi elements, each with a call per direction, of one message per call.
    calls_s = 2 * 477 * (14.3 + 1.0) / 1e6
    network_s = (4 + 2) * 10**9 / 2 / (2 * 50e9)
    told = over_nodes.communication_s(3, 450.0, 50.0)
    assert told == pytest.approx(within_s + calls_s + network_s)
    by_world = Training(ModelElems(10**9), 4, 2, ZeroOptions(BF16.precision, params="world"))
    told = by_world.communication_s(3, 450.0, 50.0, latency_us=0.0, message_us=0.0)
    assert told == pytest.approx(within_s + (4 + 2 * 2) * 10**9 / 2 / (2 * 50e9))


# ---- experts ----------------------------


def layer(
    k: int, group: int, ranks: int = 8, nodes: int = 2, compression: str | None = None
) -> ExpertLayer:
    return ExpertLayer(8, k, 256, comb(8, k), 1000, group, ranks, nodes, 4, compression)


def test_a_group_within_a_node_sends_gradients_alone():
    """If both nodes have all experts, their gradients cross between nodes, and tokens do not."""
    within, over, half = layer(2, 4), layer(2, 8), layer(2, 2)
    assert sum(within.between_nodes()) == 0
    # 2 experts here, of 1000 elements: half of their gradients in FP32, and of their parameters.
    assert within.training(BF16).leaving_node_bytes(2) == 2 * 1000 * (4 + 2) // 2
    assert over.training(BF16).leaving_node_bytes(2) == 0
    training = half.training(BF16)
    assert training.leaving_node_bytes(2) / training.ranks_per_node == 4 * 1000 * (4 + 2) / 2 / 2
    assert sum(within.training(BF16).state(2)) == 2 * 1000 * 2 + (4 + 12) * 1000
    assert sum(over.training(BF16).state(2)) == (2 + 4 + 12) * 1000
    assert within.memory_bytes == 3 * comb(8, 2) * 2 * 256 * 4


# ---- refusals ----------------------------


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: total(4, 1, BOOK), "stage: expected 0, 1, 2 or 3, got 4"),
        (lambda: Training(ModelElems(1), 2).traffic(5), "stage: expected 0, 1, 2 or 3, got 5"),
        (lambda: total(3, 0, BOOK), "expected ranks of at least 1, got 0"),
        (lambda: Training(ModelElems(1), 2, 3), "nodes: expected a divisor of 2 ranks, got 3"),
        (lambda: ModelElems(-1), "expected trainable of at least 0, got -1"),
        (
            lambda: Training(ModelElems(1), 1, amsgrad=True, quantized_state=True),
            "keeps no maximum",
        ),
        (
            lambda: Training(
                ModelElems(1), 1, optimizer=AdamWOptions(update="in_backward"), two_passes=True
            ),
            'update: expected "in_step" for steps of two passes',
        ),
        (lambda: ModelElems.of_module(nn.LazyLinear(3)), "parameter weight has no shape before"),
        (
            lambda: ModelElems.of_module(nn.Linear(2, 2).double()),
            "weight: expected dtype .*float64",
        ),
        (lambda: Transformer(0, 8, 2, 4, 5), "expected layers of at least 1, got 0"),
        (lambda: Transformer(1, 8, 3, 4, 5), "a width that is a multiple of 3 heads, got 8"),
        (lambda: SHAPE.activations(1, "some"), "one of none, selective, full, got 'some'"),
        (lambda: SHAPE.activations(0), "expected micro_batch of at least 1, got 0"),
        (lambda: SHAPE.activations(1, "full", 0), "expected every of at least 1, got 0"),
        (lambda: Training(ModelElems(1), 1).offloaded_state(0), "outside memory, got None"),
        (lambda: Training(ModelElems(1), 1).offloaded_params(), "on a disk, got None"),
        (
            lambda: on_disk(512, 1, Disk("x", buffer_bytes=4096)).offloaded_state(0),
            "buffer_bytes: expected at least 32768, got 4096",
        ),
        (
            lambda: OffloadBytes().time(1, 0.0, 1.0),
            "expected disk_read above 0 and finite, got 0.0",
        ),
        (lambda: Training(ModelElems(1), 1).flops(0), "expected tokens of at least 1, got 0"),
        (lambda: Training(ModelElems(1), 1).communication_s(1, math.inf), "bandwidth above 0"),
        (lambda: Training(ModelElems(1), 2, 2).communication_s(1, 1.0), "rate of the network"),
        (lambda: layer(1, 3), "a group that divides a node's ranks or is whole nodes"),
        (lambda: layer(1, 16, 16, 4), "divides 16 ranks and 8 experts, got 16"),
        (lambda: ExpertLayer(8, 9, 4, 1, 1, 8, 8), "top-k of at most 8 experts"),
        (lambda: layer(1, 8, compression="int4"), "None, int8 or fp8, got 'int4'"),
        (lambda: ExpertLayer(8, 2, 0, 1, 1, 1, 1), "expected hidden of at least 1, got 0"),
    ],
)
def test_what_makes_no_sense_is_refused(call, says):
    with pytest.raises(ArgumentError, match=says):
        call()
