# SPDX-License-Identifier: Apache-2.0
"""State on a disk: the same bits as in memory, the bytes that are moved, and failing disks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from ringcomm import Disk, DiskError, RingcommError
from ringcomm.errors import ArgumentError, MismatchError
from ringcomm.offload import scratch
from ringcomm.optim import (
    SGD,
    Adafactor,
    AdamW,
    AdamW8bit,
    AdamWOptions,
    Lion,
    LossScaler,
    Muon,
    Sharded,
    state_offload,
)
from ringcomm.optim.layout import Chunk
from tests.memory.disk_folder import skip_unless_disk
from tests.optim.problems import values
from tests.support.covering import covering, in_test_all

Tensor = torch.Tensor
# Several buckets; parameters across pieces and chunks, an empty parameter, and a scalar.
SHAPES = ((40, 70), (90,), (33, 40), (0, 4), ())
PIECE = 512


def by_algorithm(params: list[Tensor]) -> list[dict[str, Any]]:
    """Returns Muon's param groups: non-empty matrices for Muon, the others for AdamW."""
    matrices = [param for param in params if param.dim() == 2 and param.numel()]
    others = [param for param in params if param.dim() != 2 or not param.numel()]
    return [{"params": matrices}, {"params": others, "algorithm": "adamw"}]


def offload_of(optimizer: Any) -> Any:
    """Returns an optimizer's offload, whose storage counts bytes and can be made to fail."""
    offload = optimizer.sharded_step().offload
    assert isinstance(offload, state_offload.PiecedOffload)
    return offload


KINDS: dict[str, Any] = {
    "AdamW": lambda params, **rest: AdamW(params, lr=1e-2, amsgrad=True, **rest),
    "AdamW8bit": lambda params, **rest: AdamW8bit(params, lr=1e-2, **rest),
    "SGD": lambda params, **rest: SGD(params, lr=1e-2, momentum=0.9, **rest),
    "SGD without momentum": lambda params, **rest: SGD(params, lr=1e-2, **rest),
    "Lion": lambda params, **rest: Lion(params, lr=1e-3, **rest),
    "Adagrad": lambda params, **rest: Sharded(
        torch.optim.Adagrad, params, lr=1e-2, initial_accumulator_value=0.5, **rest
    ),
    "NAdam": lambda params, **rest: Sharded(torch.optim.NAdam, params, lr=1e-2, **rest),
    "Adafactor": lambda params, **rest: Adafactor(params, lr=1e-2, **rest),
    "Muon": lambda params, **rest: Muon(by_algorithm(params), lr=1e-2, **rest),
}


# Covers every form of swap unit; tests/zero/test_same_bits.py offloads other optimizers as well.
OFFLOADED = ["AdamW", "AdamW8bit", "SGD without momentum", "Adagrad", "Muon"]
OFFLOADED += in_test_all(*(kind for kind in KINDS if kind not in OFFLOADED))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return skip_unless_disk(tmp_path_factory.mktemp("disk"))


def disk(folder: Path, resident_bytes: int = 0, elems: int = PIECE) -> Disk:
    """Returns a disk with pieces of ``elems`` elements."""
    buffer_bytes = state_offload.LEAST_BUFFERS * state_offload.LARGEST_ELEM_BYTES * elems
    return Disk(folder, buffer_bytes=buffer_bytes, resident_bytes=resident_bytes)


def params_of(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [values(shape, n).to(dtype).requires_grad_() for n, shape in enumerate(SHAPES)]


def give(params: list[Tensor], step: int, rank: int) -> None:
    """Sets a step's gradients; parameters 1 and 2 have none in step 2, so whole pieces rest."""
    for index, param in enumerate(params):
        rests = step == 2 and index in (1, 2)
        grad = values(tuple(param.shape), 100 * step + 10 * index + rank).to(param.dtype)
        param.grad = None if rests else grad


def flattened(params: list[Tensor], optimizer: Any) -> Iterator[Tensor]:
    """Yields every tensor that training has changed."""
    yield from (param.detach() for param in params)
    full = optimizer.full_state_dict()
    for entry in full["state"].values():
        yield from (torch.as_tensor(entry[name]) for name in sorted(entry))
    yield from full.get("master", {}).values()


def assert_same(mine: list[Tensor], other: list[Tensor]) -> None:
    assert len(mine) == len(other) > 0
    for number, (a, b) in enumerate(zip(mine, other, strict=True)):
        assert torch.equal(a, b), f"tensor {number}"


def trained(comm: Any, kind: str, options: AdamWOptions, dtype: torch.dtype, **how: Any) -> Any:
    params = params_of(dtype)
    scaler = LossScaler() if how.get("skips") else None
    optimizer = KINDS[kind](params, comm=comm, options=options, loss_scaler=scaler)
    after_steps: list[Tensor] = []  # after each step, since a later step could hide an error
    for step in range(4):
        give(params, step, comm.rank)
        if how.get("skips") and step == 1 and comm.rank == 0:
            params[0].grad.fill_(torch.inf)
        if how.get("clips"):
            optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        after_steps += [param.detach().clone() for param in params]
    return [*after_steps, *flattened(params, optimizer)]


@pytest.fixture
def new_memory_is_nan() -> Iterator[None]:
    """Fills new memory with NaN, so that no test relies on its old contents."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("new_memory_is_nan")
@covering(strength=1, kind=OFFLOADED, resident_bytes=[0, 20_000, 1 << 20], world=[1, 3])
def test_bits_are_those_of_memory(worlds, folder, kind, resident_bytes, world):
    """All precisions; each number of resident bytes also covers clipping or skipped steps."""
    how = {0: {}, 20_000: {"clips": True}, 1 << 20: {"skips": True}}[resident_bytes]
    fused = kind in ("AdamW", "AdamW8bit", "Lion")
    precisions: list[dict[str, Any]] = [{}, {"dtype": torch.bfloat16}]
    if fused:
        precisions.append({"dtype": torch.bfloat16, "master": "remainder"})
        stochastic = {"master": "none", "rounding": "stochastic"}
        precisions.append({"dtype": torch.bfloat16, **stochastic})

    def work(comm):
        for precision in precisions:
            more = {"bucket_elems": 2048, **precision}
            dtype = more.pop("dtype", torch.float32)
            on_disk = AdamWOptions(offload_state=disk(folder, resident_bytes), **more)
            in_memory = AdamWOptions(**more)
            results = [trained(comm, kind, each, dtype, **how) for each in (in_memory, on_disk)]
            assert_same(*results)

    worlds(world).run(work)


@pytest.mark.parametrize(
    ("dtype", "master", "elem_bytes"),
    [(torch.float32, "fp32", 8), (torch.bfloat16, "fp32", 12), (torch.bfloat16, "remainder", 10)],
)
@pytest.mark.parametrize("resident", [0, 3])
def test_a_step_moves_each_swap_unit_once(folder, dtype, master, elem_bytes, resident):
    """Moves 8, 12 or 10 bytes per element, each way, except for resident pieces."""
    elems, count = 4096, 24
    param = torch.zeros(elems * count, dtype=dtype).requires_grad_()
    target = disk(folder, resident * elems * elem_bytes, elems)
    options = AdamWOptions(offload_state=target, master=master)
    optimizer = AdamW([param], comm="alone", options=options)

    def step() -> tuple[int, int]:
        offload = offload_of(optimizer)
        offload.wait()
        before = offload.storage.bytes_read, offload.storage.bytes_written
        param.grad = torch.ones_like(param)
        optimizer.step()
        offload.wait()
        return offload.storage.bytes_read - before[0], offload.storage.bytes_written - before[1]

    step(), step()
    # wait() writes the buffers' contents, as the next steps would do.
    assert step() == (elem_bytes * elems * (count - resident),) * 2
    offload_of(optimizer).wait()
    before = offload_of(optimizer).storage.bytes_read
    other = torch.zeros(5).requires_grad_()
    optimizer.add_param_group({"params": [other]})
    offload_of(optimizer).wait()
    for _ in range(3):  # a parameter without gradient stays where it is
        param.grad, other.grad = None, torch.ones(5)
        optimizer.step()
    offload_of(optimizer).wait()
    assert offload_of(optimizer).storage.bytes_read - before <= elems * elem_bytes * count


def test_memory_is_of_buffers_whatever_the_size_of_a_parameter(folder):
    """Of 64 pieces, only as many are in memory as the buffers and the resident bytes hold."""
    elems = 64 * PIECE
    param = torch.zeros(elems).requires_grad_()
    target = disk(folder, resident_bytes=2 * 8 * PIECE)
    optimizer = AdamW([param], comm="alone", options=AdamWOptions(offload_state=target))
    param.grad = torch.ones(elems)
    optimizer.step()
    step = optimizer.sharded_step()
    pieces = offload_of(optimizer)._pieces()
    taken = {id(piece.buffer): piece.buffer.memory.nbytes for piece in pieces}
    assert len(pieces) == 64
    assert sum(taken.values()) <= target.buffer_bytes + target.resident_bytes
    (bucket,) = step.buckets
    assert all(moment.is_meta for moment in bucket.state.moments.values())


@pytest.mark.parametrize("count", [1, 511, 512, 1300, 10_000])
def test_pieces_divide_a_chunk(count):
    chunk = Chunk(1024, 1024 + count)
    pieces = state_offload.pieces_of(chunk, 1024)
    assert pieces[0].begin == chunk.begin and pieces[-1].end == chunk.end
    for before, after in pairwise(pieces):
        assert before.end == after.begin and after.elems > 0
        assert before.elems % 512 == 0 and before.elems <= 1024
    assert state_offload.pieces_of(Chunk(5, 5), 1024) == []


def test_offloaded_state_goes_on_in_memory_and_another_world(worlds, folder):
    """State dicts of disk and memory can be exchanged, also when new groups come later."""
    options = [
        AdamWOptions(bucket_elems=2048),
        AdamWOptions(bucket_elems=2048, offload_state=disk(folder)),
    ]

    def work(comm):
        for first, second in (options, options[::-1]):
            params, others = params_of(), params_of()
            one = AdamW(params, lr=1e-2, comm=comm, options=first)
            for step in range(2):
                give(params, step, comm.rank)
                one.step()
            two = AdamW(others, lr=1e-2, comm=comm, options=second)
            two.load_state_dict(one.state_dict())
            with torch.no_grad():
                for mine, other in zip(params, others, strict=True):
                    other.copy_(mine)
            for each in (one, two):  # the swap units become larger
                each.param_groups[0]["amsgrad"] = True
            for step in (3, 4):
                for each, theirs in ((one, params), (two, others)):
                    give(theirs, step, comm.rank)
                    each.step()
            assert_same([*flattened(params, one)], [*flattened(others, two)])

    worlds(2).run(work)


@pytest.mark.parametrize("offloaded", [False, True])
def test_a_group_that_comes_later_leaves_accumulators_alone(folder, offloaded):
    """A new Adagrad parameter gets its initial accumulator; older accumulators stay unchanged."""

    def run(make: Any) -> list[Tensor]:
        params = [values((3000,), 1).requires_grad_(), values((700,), 2).requires_grad_()]
        optimizer = make(params[:1])
        for step in range(4):
            if step == 2:
                optimizer.add_param_group({"params": params[1:]})
            for index, param in enumerate(params[: 1 + step // 2]):
                param.grad = values(tuple(param.shape), 10 * step + index)
            optimizer.step()
        return [param.detach() for param in params]

    hyper: dict[str, Any] = {"lr": 0.1, "initial_accumulator_value": 0.3}
    options = AdamWOptions(offload_state=disk(folder) if offloaded else None)
    mine = run(
        lambda params: Sharded(torch.optim.Adagrad, params, comm="alone", options=options, **hyper)
    )
    assert_same(mine, run(lambda params: torch.optim.Adagrad(params, **hyper)))


class Broken:
    """Makes the wait for transfer number ``at`` of one rank fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
        self.at, self.count = -1, 0
        wait, broken = scratch.Transfer.wait, self

        def failing(self: Any) -> None:
            wait(self)
            if f"rank {rank}" in self._scratch.what:
                broken.count += 1
                if broken.count - 1 == broken.at:
                    raise DiskError(f"{self._scratch.what}: an error of the test")

        monkeypatch.setattr(scratch.Transfer, "wait", failing)


def test_all_ranks_learn_of_an_error_at_any_transfer_of_a_step(worlds, folder, monkeypatch):
    """No rank waits for the failing rank; the optimizer is partly updated on all ranks."""
    broken = Broken(monkeypatch, rank=1)
    options = AdamWOptions(bucket_elems=2048, offload_state=disk(folder))

    def work(comm):
        params = [values((20_000,), 1).requires_grad_()]
        optimizer = AdamW(params, comm=comm, options=options)
        optimizer.prepare()
        for step in range(2):
            params[0].grad = values((20_000,), step)
            try:
                optimizer.step()
            except DiskError as error:
                assert "an error of the test" in str(error)
                with pytest.raises(RingcommError, match="failed halfway"):
                    optimizer.step()
                return step
        return None

    world = worlds(2)
    world.run(work)
    total = broken.count
    assert total == 2 * 20
    for at in range(total):
        broken.at, broken.count = at, 0
        one, other = world.run(work)
        assert one == other is not None, at


@pytest.mark.parametrize("kind", ["AdamW", "Adagrad"])
def test_all_ranks_learn_of_an_error_at_any_transfer_of_a_preparation(
    worlds, folder, monkeypatch, kind
):
    """Preparation writes masters of 16-bit parameters, and Adagrad's accumulators."""
    broken = Broken(monkeypatch, rank=1)
    options = AdamWOptions(bucket_elems=2048, offload_state=disk(folder))
    dtype = torch.bfloat16 if kind == "AdamW" else torch.float32

    def work(comm):
        param = values((16_000,), 1).to(dtype).requires_grad_()
        try:
            KINDS[kind]([param], comm=comm, options=options).prepare()
        except DiskError as error:
            assert "an error of the test" in str(error)
            return True
        return False

    world = worlds(2)
    world.run(work)
    total = broken.count
    assert total > 4
    for at in range(total):
        broken.at, broken.count = at, 0
        assert world.run(work) == [True, True], at


def test_a_rank_waits_half_as_long_for_its_disk_as_others_for_it(worlds, folder):
    def work(comm):
        before = comm.timeout
        for timeout_s in (None, 7.0):
            options = AdamWOptions(offload_state=replace(disk(folder), timeout_s=timeout_s))
            optimizer = AdamW([torch.zeros(5).requires_grad_()], comm=comm, options=options)
            optimizer.prepare()
            file = offload_of(optimizer).storage._file
            comm.timeout = 40.0
            assert file.limit_s == (timeout_s or 20.0)
            comm.timeout = before
        return None

    worlds(2).run(work)


def test_state_that_a_disk_has_lost_is_found(worlds, folder):
    """A truncated file, which only a foreign call causes, fails the checkpoint and the step."""

    def work(comm):
        param = values((20_000,), 1).requires_grad_()
        optimizer = AdamW([param], comm=comm, options=AdamWOptions(offload_state=disk(folder)))
        param.grad = torch.ones(20_000)
        optimizer.step()
        offload = offload_of(optimizer)
        offload.wait()
        comm.barrier()
        if comm.rank == 1:
            os.ftruncate(offload.storage._file.descriptor, 0)
            with pytest.raises(DiskError, match="rank 1"):
                optimizer.state_dict()
        param.grad = torch.ones(20_000)
        with pytest.raises(DiskError, match="rank 1"):
            optimizer.step()

    worlds(2).run(work)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_disk_that_has_no_room_is_told_at_preparation(worlds, folder, monkeypatch, dtype):
    """All ranks raise before masters are written, and no step was taken."""
    add = scratch.ScratchFile.add_extent

    def full(self, size_bytes):
        if "rank 1" in self.what and self.size_bytes > 50_000:
            raise DiskError(f"{self.what}: no room")
        return add(self, size_bytes)

    monkeypatch.setattr(scratch.ScratchFile, "add_extent", full)

    def work(comm):
        param = values((20_000,), 1).to(dtype).requires_grad_()
        optimizer = AdamW([param], comm=comm, options=AdamWOptions(offload_state=disk(folder)))
        with pytest.raises(DiskError, match="no room"):
            optimizer.prepare()

    worlds(2).run(work)


def test_ranks_that_offload_differently_are_told_so_and_go_on(worlds, folder):
    def work(comm):
        offload = disk(folder) if comm.rank else None
        optimizer = AdamW(params_of(), comm=comm, options=AdamWOptions(offload_state=offload))
        with pytest.raises(MismatchError, match="offload_state"):
            optimizer.prepare()
        comm.barrier()

    worlds(2).run(work)


def test_what_cannot_be_offloaded_to_is_refused(worlds, folder):
    with pytest.raises(
        ArgumentError,
        match=r"offload_state: expected a ringcomm\.Disk, \"cpu\" or None, got '/nvme'",
    ):
        AdamWOptions(offload_state="/nvme")
    with pytest.raises(ArgumentError, match=r"state: .* got a Disk; pass that as offload_state="):
        AdamWOptions(state=Disk(folder))  # type: ignore[arg-type]

    def work(comm):
        params = params_of()
        paths = {0: folder, 1: folder / "none"}
        optimizer = AdamW(
            params, comm=comm, options=AdamWOptions(offload_state=Disk(paths[comm.rank]))
        )
        with pytest.raises(DiskError, match="No such file or directory"):
            optimizer.prepare()
        small = AdamWOptions(offload_state=Disk(folder, buffer_bytes=4096))
        with pytest.raises(ArgumentError, match="buffer_bytes: expected at least 32768, got 4096"):
            AdamW(params, comm=comm, options=small).prepare()

    worlds(2).run(work)
