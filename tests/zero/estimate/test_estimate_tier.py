"""State on a disk: the closed forms, and what runs hold, read and write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ringcomm import Disk, zero
from ringcomm.errors import ArgumentError
from ringcomm.memory import scratch
from ringcomm.memory.scratch import ScratchFile
from ringcomm.optim import AdamW, AdamW8bit, AdamWOptions, tiers
from ringcomm.optim.kernels import PiecedKernels
from ringcomm.zero.estimate import (
    STAGES,
    BytesPerElement,
    World,
    largest_model,
    model_state,
    working_buffers,
)
from ringcomm.zero.estimate_model import ModelElems
from ringcomm.zero.estimate_tier import (
    DiskRates,
    DiskTime,
    Records,
    TierBytes,
    params_in_tier,
    records_of,
    state_in_tier,
)
from ringcomm.zero.estimate_time import bandwidth_needed, efficiency, state_intensity
from ringcomm.zero.options import ZeroOptions
from tests.memory.disk_folder import skip_unless_disk

BF16, FP32 = torch.bfloat16, torch.float32
FP32_BYTES = BytesPerElement.of(FP32)
EIGHT_BITS = BytesPerElement.of(FP32, eight_bits=True)
# By precision: options of the optimizer, the parameters' dtype, what the estimate says.
KINDS: dict[str, tuple[type, str, torch.dtype, BytesPerElement]] = {
    "fp32": (AdamW, "fp32", FP32, BytesPerElement.of(FP32)),
    "masters": (AdamW, "fp32", BF16, BytesPerElement.of()),
    "remainders": (AdamW, "remainder", BF16, BytesPerElement.of(master="remainder")),
    "8 bits": (AdamW8bit, "fp32", FP32, EIGHT_BITS),
    "8 bits, masters": (AdamW8bit, "fp32", BF16, BytesPerElement.of(eight_bits=True)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return skip_unless_disk(tmp_path_factory.mktemp("disk"))


def buffers_for(elems: int) -> int:
    """Buffers with which pieces have so many elements."""
    return tiers.LEAST_BUFFERS * tiers.LARGEST_ELEM_BYTES * elems


def held_by(step: Any) -> TierBytes:
    """What a step's tier has, and what moves in the third step from now."""
    tier, seen = step.tier, set()
    for piece in tier._pieces():
        seen.add(piece.buffer)
    shared = [buffer.memory.nbytes for buffer in seen if buffer.is_shared]
    resident = [buffer.memory.nbytes for buffer in seen if not buffer.is_shared]
    return TierBytes(sum(shared), sum(resident), tier.blocks.size_bytes, 0, 0, 0)


class Count:
    """Counts the bytes of the transfers that are submitted: (read, written)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes: dict[tuple[int, str], int] = {}
        begin, count = ScratchFile._begin, self.bytes

        def counting(scratch: Any, operation: str, block: int, memory: torch.Tensor) -> Any:
            key = (id(scratch), operation)
            count[key] = count.get(key, 0) + memory.nbytes
            return begin(scratch, operation, block, memory)

        monkeypatch.setattr(ScratchFile, "_begin", counting)

    def of(self, scratch: Any) -> tuple[int, int]:
        read, written = (self.bytes.get((id(scratch), name), 0) for name in ("read", "write"))
        return read, written


@pytest.mark.parametrize("resident", [0, 3, 9, 13, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_holds_and_moves_what_the_estimate_says(folder, monkeypatch, kind, resident):
    """To the byte, for pieces that all move, of which some move, and of which none does."""
    made, master, dtype, each = KINDS[kind]
    count, elems = Count(monkeypatch), 4096
    param = torch.zeros(15 * elems + 512, dtype=dtype).requires_grad_()
    size = sum(records.size_bytes for records in records_of(elems, 1, each, Disk(folder)))
    disk = Disk(folder, buffer_bytes=buffers_for(elems), resident_bytes=resident * size)
    options = AdamWOptions(tier=disk, master=master)
    optimizer = made([param], comm="alone", options=options)
    for step in range(3):
        param.grad = torch.ones_like(param)
        if step == 2:
            before = count.of(optimizer.sharded_step().tier.blocks)
        optimizer.step()
    step = optimizer.sharded_step()
    after = count.of(step.tier.blocks)
    model = ModelElems(param.numel(), largest=param.numel())
    told = state_in_tier(model, 0, 1, each, ZeroOptions(), disk)
    held = held_by(step)
    assert (held.buffers, held.resident, held.stored) == (told.buffers, told.resident, told.stored)
    assert (after[0] - before[0], after[1] - before[1]) == (told.moved, told.moved)
    state = model_state(model, 0, 1, each, disk).state
    assert held.buffers <= disk.buffer_bytes and held.resident <= disk.resident_bytes
    # Pages are not counted there.
    assert held.buffers + held.resident <= state + 16 * 4 * scratch.PAGE_BYTES


@pytest.mark.parametrize(("resident", "buffers"), [(0, 2), (2, 2), (0, 6), (6, 1), (5, 1)])
def test_parameters_of_a_run_take_and_move_what_the_estimate_says(folder, resident, buffers):
    """Six chunks of a page; what buffers keep from one pass to the next is not read."""
    size = scratch.PAGE_BYTES
    disk = Disk(folder, buffers * size, resident * size)
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(6)))
    options = zero.ZeroOptions(bucket_elems=1024, tier=disk)
    told = params_in_tier(ModelElems(6 * 1024, largest=1024), 1, FP32_BYTES, options, disk)
    zero.shard(model, 3, comm="alone", options=options)
    optimizer = AdamW(model.parameters())
    store = optimizer.placement.store
    for _ in range(4):
        store.wait()
        read, written = store.file.bytes_read, store.file.bytes_written
        model(torch.ones(1, 32)).square().mean().backward()
        optimizer.step()
        store.wait()
        assert store.held_bytes <= told.buffers
    assert store.file.size_bytes == told.stored
    assert store.file.bytes_written - written == told.written
    assert max(0, told.read - 4 * told.buffers) <= store.file.bytes_read - read <= told.read
    state = model_state(ModelElems(6 * 1024), 3, 1, FP32_BYTES, None, disk)
    assert state.params == min(6 * size, told.buffers + told.resident)


class Net(nn.Module):
    """One bucket that needs no padding for two ranks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).square().mean()


@pytest.mark.parametrize("clips", [False, True])
def test_ranks_hold_what_the_estimate_says_at_every_stage(worlds, folder, clips):
    """The file, the buffers and the gradient shard that a step of one pass stores."""
    width, each = 128, BytesPerElement.of(FP32)
    disk = Disk(folder, buffer_bytes=buffers_for(1024))
    model = ModelElems.of_module(Net(width))

    def work(comm: Any) -> None:
        for stage in STAGES:
            module = zero.shard(Net(width), stage, comm=comm)
            optimizer = AdamW(module.parameters(), options=AdamWOptions(tier=disk))
            for _ in range(2):
                module(torch.ones(2, width)).backward()
                if clips:
                    optimizer.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
            step = optimizer.sharded_step()
            told = state_in_tier(model, stage, 2, each, ZeroOptions(), disk)
            held = held_by(step)
            assert (held.buffers, held.stored) == (told.buffers, told.stored)
            assert told.stored == 8 * width * width // (1 if stage == 0 else 2)
            kernels: Any = step.kernels
            while not isinstance(kernels, PiecedKernels):
                kernels = kernels._native
            own = 0 if kernels._own is None else kernels._own.nbytes
            own += sum(b.grad_shard.nbytes for b in step.buckets if b.grad_shard is not None)
            buffers = working_buffers(model, stage, 2, each, ZeroOptions(), clips, disk)
            if stage == 1:
                assert own == buffers.grad_shard == 4 * width * width // 2
            elif stage == 2:
                reduced = model_state(model, stage, 2, each).grads
                assert own == buffers.grad_shard + reduced
                assert buffers.grad_shard == (0 if clips else reduced)

    worlds(2).run(work)


def moved_by_hand(sizes: list[int], disk: Disk) -> tuple[int, int, int]:
    """What the third step reads, by following the buffers."""
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
    told = TierBytes.of([Records(size * page, count) for size, count in runs], disk)
    sizes = [size * page for size, count in runs for _ in range(count)]
    assert (told.moved, told.ahead, told.stored) == moved_by_hand(sizes, disk)
    assert told.behind <= told.moved and told.resident == sum(sizes) - told.stored


@pytest.mark.parametrize(
    ("each", "moved"),
    [
        (BytesPerElement.of(FP32), 16),
        (BytesPerElement.of(BF16), 24),
        (BytesPerElement.of(master="remainder"), 20),
        (EIGHT_BITS, 4.0625),
        (BytesPerElement.of(eight_bits=True), 12.0625),
    ],
)
def test_bytes_of_an_element_and_step(each, moved):
    """A step reads and writes them: DeepSpeed's ZeRO-Infinity moves 32."""
    elems = 1 << 30
    told = state_in_tier(ModelElems(elems), 3, 4, each, ZeroOptions(), Disk("x"))
    assert 2 * each.state_mean == moved
    assert told.stored == each.state_bytes(elems) // 4
    assert 2 * told.moved * 4 / elems == moved
    assert 56 << 20 <= told.buffers <= 64 << 20 and told.resident == 0
    assert told.ahead == told.behind == told.buffers


def test_pages_widen_the_records_of_small_chunks():
    """Of 2 Mi elements 64 ranks have 32 Ki each, whose moments of 8 bits take 8 pages and 512 B."""
    told = state_in_tier(ModelElems(64 << 25), 1, 64, EIGHT_BITS, ZeroOptions(), Disk("x"))
    assert told.stored == (1 << 10) * 2 * 9 * scratch.PAGE_BYTES


def test_what_is_resident_does_not_move():
    model, each = ModelElems(1 << 30), BytesPerElement.of(FP32)
    sizes = [(1 << 30) * part // 8 for part in (0, 1, 4, 8, 20)]
    found = [
        state_in_tier(model, 1, 4, each, ZeroOptions(), Disk("x", resident_bytes=size))
        for size in sizes
    ]
    assert [told.resident for told in found] == [min(size, 2 << 30) for size in sizes]
    assert [told.moved for told in found] == [max(0, (2 << 30) - size) for size in sizes]
    assert found[-1] == TierBytes(0, 2 << 30, 0, 0, 0, 0)


@pytest.mark.parametrize("world", [1, 2, World(16, 8), World(16, 8, state="node")])
@given(st.integers(0, 10**10), st.sampled_from(STAGES), st.integers(0, 10**10))
def test_memory_is_that_of_buffers_and_what_is_resident(world, elems, stage, resident):
    each, disk = BytesPerElement.of(eight_bits=True), Disk("x", resident_bytes=resident)
    model = ModelElems(elems)
    without, state = (model_state(model, stage, world, each, tier) for tier in (None, disk))
    told = state_in_tier(model, stage, world, each, ZeroOptions(), disk)
    assert (state.params, state.grads) == (without.params, without.grads)
    assert state.state == min(without.state, disk.buffer_bytes + resident)
    assert told.buffers <= disk.buffer_bytes and told.resident <= resident
    assert told.stored + told.resident >= without.state


@pytest.mark.parametrize("stage", STAGES)
def test_the_largest_model_of_a_budget(stage):
    """At stage 0 on one rank FP32 takes 8 bytes an element in place of 16."""
    each, disk, budget = BytesPerElement.of(FP32), Disk("x"), 2 << 30
    elems = largest_model(budget, stage, 4, each, 1 << 20, disk)
    room = budget - (1 << 20)
    assert model_state(ModelElems(elems), stage, 4, each, disk).total <= room
    assert model_state(ModelElems(elems + 1), stage, 4, each, disk).total > room
    gained = elems / largest_model(budget, stage, 4, each, 1 << 20)
    # (p + g + s) / (p + g) by stage, on 4 ranks, less the buffers.
    limits = [16 / 8, 10 / 8, 7 / 5, 16 / 8]
    assert limits[stage] * 0.96 < gained < limits[stage]


def test_times_by_hand():
    moved = TierBytes(40, 0, 400, 400, 40, 20)
    rates = DiskRates(read_gbps=2e-9, write_gbps=1e-9)
    time = rates.time(moved, mates=3)
    assert time == DiskTime(read_s=600.0, write_s=1200.0, between_s=120.0)
    assert (time.added_s(1000.0), time.added_s(50.0)) == (1680.0, 1750.0)
    assert time.hidden_share(1000.0) == pytest.approx(120 / 1800)
    assert rates.both_gbps == pytest.approx(2e-9 * 2 / 3)
    assert DiskTime(0.0, 0.0, 0.0).hidden_share(5.0) == 1.0


def test_efficiency_with_our_bytes():
    """Equation 6 of ZeRO-Infinity; ait is tokens / 4 with its 32 bytes, and up to four times it."""
    intensities = [state_intensity(2048, moved_bytes=size) for size in (32, 24, 20, 16, 8)]
    assert intensities == [512, 2048 / 3, 2048 / 2.5, 1024, 2048]
    for intensity in intensities:
        for share in (0.5, 0.9):
            gbps = bandwidth_needed(share, intensity, 70.0)
            assert efficiency(intensity, gbps, 70.0) == pytest.approx(share)
    # Section 4.2: nearly 1.5 TB/s for 90 % with 2048 tokens a rank; 16 bytes need half of it.
    assert bandwidth_needed(0.9, 512, 70.0) == pytest.approx(1230, rel=1e-3)
    assert bandwidth_needed(0.9, 1024, 70.0) == pytest.approx(615, rel=1e-3)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: DiskRates(0.0, 1.0), "expected disk_read_gbps above 0 and finite, got 0.0"),
        (lambda: bandwidth_needed(1.0, 5.0, 5.0), "expected a share below 1, got 1.0"),
        (lambda: state_intensity(5, moved_bytes=0), "expected moved_bytes above 0"),
        (lambda: BytesPerElement.of(accumulate=BF16), "accumulate: expected None or float32"),
        (lambda: BytesPerElement.of(amsgrad=True, eight_bits=True), "AdamW8bit keeps no maximum"),
        (
            lambda: records_of(512, 1, BytesPerElement(), Disk("x", buffer_bytes=4096)),
            "buffer_bytes: expected at least 32768, got 4096",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(call, says):
    with pytest.raises(ArgumentError, match=says):
        call()


def test_sums_in_fp32_widen_gradients():
    """``accumulate_dtype``: what stages 0 and 1 keep, the buffers of 2 and 3, and what is sent."""
    each, options = BytesPerElement.of(accumulate=FP32), ZeroOptions()
    assert (each.param, each.grad, each.reduced) == (2, 4, 4)
    model = ModelElems(1 << 20)
    assert [model_state(model, stage, 2, each).grads >> 20 for stage in STAGES] == [4, 4, 2, 2]
    assert working_buffers(model, 2, 2, each, options).buckets == 4 << 20
