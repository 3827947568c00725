# SPDX-License-Identifier: Apache-2.0
"""Error feedback of quantized gradients: over steps, stages, loss scales and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ringcomm
from ringcomm import Communicator, _native, zero
from ringcomm.comm.nodes import compressed_sums
from ringcomm.comm.nodes import core as sums
from ringcomm.comm.nodes.compressed_sums import ErrorFeedback
from ringcomm.errors import ArgumentError, CheckpointError, UnsupportedError
from ringcomm.optim import AdamW, AdamWOptions, GradScaler, LossScaleOptions, LossScaler
from ringcomm.optim.buckets import Bucket
from ringcomm.optim.gradients import HostReducer, Into, make_error_feedback
from ringcomm.zero.checkpoint import Reader
from tests.support.covering import covering, in_test_all
from tests.zero.models import MODELS, Run, assert_same_bits, new_model, options_of

Tensor = torch.Tensor
INT4, INT8 = (zero.Compression(gradients=code, error_feedback=True) for code in ("int4", "int8"))
BY_NODE: dict[str, Any] = {"state": "node"}


@pytest.fixture(autouse=True)
def small_buckets_are_quantized(monkeypatch, one_thread_for_each_rank):
    """Has small buckets quantized, in segments of a few blocks."""
    monkeypatch.setattr(compressed_sums, "QUANTIZED_ABOVE_BYTES", 64)
    monkeypatch.setattr(sums, "SEGMENT_BYTES", 4096)


# ---- one bucket --------------------------------------------------------------------------------

ELEMS = 5 * 512 + 64  # chunks of 1,024 and 2,048 elements; the last chunk is shorter


@dataclass(frozen=True)
class Reduced:
    """A rank's result of several steps: the received elements with their offset in the bucket."""

    received: tuple[int, Tensor]
    error_feedback: ErrorFeedback | None


def whole_numbers(rank: int, step: int) -> Tensor:
    """Returns gradients in which the largest magnitude is about equal in every block."""
    seed = torch.Generator(device="cpu").manual_seed(100 * step + rank)
    return torch.randint(-15, 16, (ELEMS,), generator=seed).float() / 64


def constant(rank: int, step: int) -> Tensor:
    return whole_numbers(rank, 0)


def all_sent(steps: int) -> Tensor:
    """Returns the exact sum of all ranks' gradients over the steps."""
    sent = torch.zeros(ELEMS, dtype=torch.float64)
    for step in range(steps):
        for rank in range(4):
            sent += whole_numbers(rank, step)
    return sent


def reduce_steps(
    comm: Communicator, options: zero.ZeroOptions, gradients: Any, steps: int, dtype: torch.dtype
) -> Reduced:
    """Adds up the sums that this rank receives; every second step accumulates into ``out``."""
    by_node = options.state == "node"
    begins = (comm.node.rank, comm.node.world_size) if by_node else (comm.steps.shard_index, 4)
    each = _native.chunk_elems(ELEMS, begins[1])
    begin = min(begins[0] * each, ELEMS)
    out = torch.zeros(min(begin + each, ELEMS) - begin)
    reducer = HostReducer(comm, options)
    error_feedback = make_error_feedback(comm, options, ELEMS)
    received = torch.zeros_like(out, dtype=torch.float64)
    for step in range(steps):
        grads = gradients(comm.rank, step).to(dtype)
        before = out.double()
        adds = step % 2 == 1
        reducer.reduce(grads, Into(out, "l2", None, accumulate=adds, error_feedback=error_feedback))
        received += out.double() - (before if adds else 0.0)
    return Reduced((begin, received), error_feedback)


def total(found: list[Reduced], elems: int = ELEMS) -> tuple[Tensor, Tensor]:
    """Returns the received sum of each element, and the quantization errors summed over nodes."""
    arrived, owed = (torch.zeros(elems, dtype=torch.float64) for _ in range(2))
    for each in found:
        begin, received = each.received
        arrived[begin : begin + received.numel()] = received  # each node has equal bits
        if each.error_feedback is not None:
            kept = each.error_feedback
            owed[kept.begin :][: kept.partial.numel()] += kept.partial
            owed[kept.sums_begin :][: kept.sums.numel()] += kept.sums
    return arrived, owed


@covering(
    compression={"int4": INT4, "int8": INT8},
    state=["world", "node"],
    dtype=[torch.float32, torch.bfloat16],
)
def test_what_was_sent_and_what_is_owed_is_what_was_to_be_sent(
    two_by_two, compression, state, dtype
):
    """The sum is exact: a code times a scale has 15 more bits than a code, and is close to x."""
    options = zero.ZeroOptions(reduce="sum", state=state, compression=compression)
    arrived, owed = total(two_by_two.run(reduce_steps, options, whole_numbers, 6, dtype))
    assert torch.equal(arrived + owed, all_sent(6))
    assert torch.count_nonzero(owed) > ELEMS // 2


def forgets_the_sign(self, wide_ptr: int, ptr: int, elems: int, kept: Tensor) -> None:
    QUANTIZE(self, wide_ptr, ptr, elems, kept)
    kept.neg_()


def takes_the_first_elements(self, source: int, wide_ptr: int, ptr: int, elems: int) -> None:
    self._quantize(wide_ptr, ptr, elems, self._error_feedback.partial[:elems])


def keeps_nothing(self, wide_ptr: int, ptr: int, elems: int, kept: Tensor) -> None:
    QUANTIZE(self, wide_ptr, ptr, elems, torch.zeros_like(kept))


QUANTIZE = compressed_sums.FeedbackForm._quantize
MUTANTS = {
    "sign": ("_quantize", forgets_the_sign),
    "chunk": ("write_partial", takes_the_first_elements),
    "nothing": ("_quantize", keeps_nothing),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_identity_sees_error_feedback_that_is_wrong(two_by_two, mutant, monkeypatch):
    monkeypatch.setattr(compressed_sums.FeedbackForm, *MUTANTS[mutant])
    options = zero.ZeroOptions(reduce="sum", compression=INT4)
    found = two_by_two.run(reduce_steps, options, whole_numbers, 6, torch.float32)
    arrived, owed = total(found)
    assert not torch.equal(arrived + owed, all_sent(6))


@pytest.mark.parametrize("state", ["world", "node"])
def test_the_mean_of_a_constant_gradient_comes_nearer_with_each_step(two_by_two, state):
    steps, exact = 16, sum(constant(rank, 0).double() for rank in range(4))
    worst = []
    for compression in (INT4, replace(INT4, error_feedback=False)):
        options = zero.ZeroOptions(reduce="sum", state=state, compression=compression)
        for count in (1, steps):
            found = two_by_two.run(reduce_steps, options, constant, count, torch.float32)
            worst.append(float((total(found)[0] / count - exact).abs().max()))
    fed_first, fed_last, usual_first, usual_last = worst
    assert fed_first == usual_first == usual_last
    # The buffer never holds more than one sum's quantization error: at most M / 14 per node.
    assert fed_last <= 2 * fed_first / steps


# ---- training ----------------------------------------------------------------------------------


def test_unsharded_parameters_end_with_the_bits_of_a_sharded_module(two_by_two):
    """The bucket sizes equal those of the stages, because the module is one unit."""

    def run_with(comm: Communicator, compression: zero.Compression) -> tuple[list[Tensor], int]:
        weight = nn.Parameter(whole_numbers(0, 0).clone())
        optimizer = AdamW(
            [weight], lr=0.1, comm=comm, options=AdamWOptions(compression=compression)
        )
        for step in range(3):
            weight.grad = whole_numbers(comm.rank, step)
            optimizer.step()
        kept = [
            each.error_feedback for each in optimizer.sharded_step().buckets if each.error_feedback
        ]
        return [weight.detach().clone()], sum(each.size_bytes for each in kept)

    def sharded(comm: Communicator, compression: zero.Compression) -> list[Tensor]:
        module = nn.Module()
        module.weight = nn.Parameter(whole_numbers(0, 0).clone())
        zero.shard(module, 1, comm=comm, options=zero.ZeroOptions(compression=compression))
        optimizer = AdamW(module.parameters(), lr=0.1)
        for step in range(3):
            module.weight.grad = whole_numbers(comm.rank, step)
            optimizer.step()
        found = [module.weight.detach().clone()]
        zero.remove_sharding(module)
        return found

    wanted = two_by_two.run(sharded, INT4)[0]
    for found, kept_bytes in two_by_two.run(run_with, INT4):
        assert torch.equal(found[0], wanted[0])
        assert 0 < kept_bytes <= 4 * 2048
    without = two_by_two.run(run_with, replace(INT4, error_feedback=False))[0]
    assert not torch.equal(without[0][0], wanted[0])
    assert without[1] == 0
    with ringcomm.local_world(2, timeout=60) as world:
        assert world.run(run_with, INT4)[0][1] == 0  # with one node, no gradient is quantized


def scaled(
    comm: Communicator, base: nn.Module, stage: int, scale: LossScaleOptions | None
) -> dict[str, Tensor]:
    module: Any = deepcopy(base)
    run = Run("mlp", stage, options={"compression": INT4})
    zero.shard(module, stage, comm=comm, options=options_of(run))
    scaler = None if scale is None else LossScaler(scale)
    optimizer = AdamW(module.parameters(), lr=0.01, loss_scaler=scaler)
    generator = torch.Generator().manual_seed(comm.rank)
    for turn in range(4):
        loss = module(*MODELS["mlp"][1](generator, turn))
        (loss if scaler is None else scaler.scale(loss)).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = zero.full_state_dict(module)
    zero.remove_sharding(module)
    return state


@pytest.mark.parametrize("stage", [2, *in_test_all(1)])
def test_what_is_owed_follows_the_loss_scale(two_by_two, stage):
    """Scaling by a power of two is exact, so the bits equal those without a loss scale."""
    base, growing = new_model("mlp"), LossScaleOptions(init_scale=4.0, growth_interval=1)
    wanted = two_by_two.run(scaled, base, stage, None)[0]
    for state in two_by_two.run(scaled, base, stage, growing):
        assert_same_bits(state, wanted)


@pytest.mark.parametrize("stage", [1, *in_test_all(3)])
def test_a_skipped_step_leaves_nothing_owed(two_by_two, stage):
    base = new_model("mlp")

    def body(comm: Communicator) -> list[int]:
        module: Any = deepcopy(base)
        run = Run("mlp", stage, options={"compression": INT4})
        zero.shard(module, stage, comm=comm, options=options_of(run))
        optimizer = AdamW(module.parameters(), options=AdamWOptions(check_finite=True))
        owed, generator = [], torch.Generator().manual_seed(comm.rank)
        for turn in range(3):
            if turn == 1:  # an infinity in one block; all other gradients are finite
                hook = module.head.bias.register_hook(lambda grad: grad * float("inf"))
            module(*MODELS["mlp"][1](generator, 0)).backward()
            if turn == 1:
                hook.remove()
            optimizer.step()
            optimizer.zero_grad()
            owed.append(
                sum(int(each.partial.count_nonzero()) for each in error_feedback(optimizer))
            )
        assert optimizer.skipped_steps == 1
        zero.remove_sharding(module)
        return owed

    for first, skipped, last in two_by_two.run(body):
        assert first > 0
        assert skipped == 0
        assert last > 0


def error_feedback(optimizer: Any) -> list[ErrorFeedback]:
    buckets: list[Bucket] = optimizer.sharded_step().buckets
    return [each.error_feedback for each in buckets if each.error_feedback is not None]


# ---- checkpoints -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Resumed:
    """The buffers of a rank after a load, and its state after the following steps."""

    owed: Mapping[str, Tensor]
    state: Mapping[str, Tensor]


def owed_by_name(module: Any, optimizer: Any, wanted: str) -> dict[str, Tensor]:
    """Returns this rank's buffers of partial sums, or of sums, by parameter; zeros elsewhere."""
    found = {}
    step, names = optimizer.sharded_step(), dict(module.named_parameters())
    called = {id(param): name for name, param in names.items()}
    for bucket in step.buckets:
        flat = torch.zeros(bucket.layout.elems)
        if bucket.error_feedback is not None:
            kept = bucket.error_feedback
            runs = {"partial": (kept.begin, kept.partial), "sums": (kept.sums_begin, kept.sums)}
            begin, values = runs[wanted]
            flat[begin : begin + values.numel()] = values
        for low, high, index in bucket.layout.segments:
            found[called[id(step.params[index])]] = flat[low:high].clone()
    return found


def continued(
    comm: Communicator, base: nn.Module, choice: Any, root: Path, until: int | None
) -> Resumed:
    """Trains to step ``until`` and saves; without it, loads and trains to the third step."""
    stage, options = choice
    module: Any = deepcopy(base)
    run = Run("mlp", stage, options={"compression": INT4, **options})
    zero.shard(module, stage, comm=comm, options=options_of(run))
    optimizer = AdamW(module.parameters(), lr=0.01)
    first = 0
    if until is None:
        first = zero.load(root, module, optimizer).step
    owed = owed_by_name(module, optimizer, "partial")
    for turn in range(first, until or 3):
        seed = torch.Generator().manual_seed(10 * turn + comm.rank)
        module(*MODELS["mlp"][1](seed, turn)).backward()
        optimizer.step()
        optimizer.zero_grad()
    if until is not None and until < 3:
        zero.save(root, until, module, optimizer)
        owed = owed_by_name(module, optimizer, "partial")
        more = owed_by_name(module, optimizer, "sums")
        # Converts to the scale of partial sums, which are later divided by the number of ranks.
        owed = {name: each + comm.world_size * more[name] for name, each in owed.items()}
    state = zero.full_state_dict(module)
    zero.remove_sharding(module)
    return Resumed(owed, state)


def all_owed(found: list[Resumed], name: str) -> Tensor:
    return sum((each.owed[name].double() for each in found), torch.zeros(1, dtype=torch.float64))


@pytest.mark.parametrize(
    ("saves", "loads"),
    [((0, {}), (3, {})), ((1, BY_NODE), (2, BY_NODE)), *in_test_all(((2, {}), (1, {})))],
)
def test_training_resumes_with_the_same_bits_on_the_same_nodes(two_by_two, tmp_path, saves, loads):
    base = new_model("mlp")
    wanted = two_by_two.run(continued, base, saves, tmp_path / "no", 3)[0].state
    saved = two_by_two.run(continued, base, saves, tmp_path, 2)
    assert any(all_owed(saved, name).count_nonzero() for name in saved[0].owed)
    for found in two_by_two.run(continued, base, loads, tmp_path, None):
        assert_same_bits(dict(found.state), dict(wanted))
    names = Reader(tmp_path / "step-00000002").names()
    for node in (0, 1):
        assert f"optim.error_feedback.{node}.head.weight" in names
    assert ("optim.error_feedback.sums.head.weight" in names) == (saves[1] == BY_NODE)


@covering(
    strength=1,
    nodes=[[1, 1, 1, 1], [1, 1], [1]],
    saves={"world": (2, {}), "node": (1, BY_NODE)},
)
def test_other_nodes_take_over_what_is_owed_in_sum(two_by_two, tmp_path, saves, nodes):
    """The errors are those of mean gradients, to which all ranks contribute."""
    base = new_model("mlp")
    saved = two_by_two.run(continued, base, saves, tmp_path, 2)
    with ringcomm.local_world(len(nodes), nodes=nodes, timeout=60) as world:
        found = world.run(continued, base, (2, {}), tmp_path, None)
    for name in saved[0].owed:
        wanted = all_owed(saved, name) / 4
        if len(nodes) == 1:  # one node quantizes nothing
            wanted = torch.zeros_like(wanted)
        owed = all_owed(found, name) / len(nodes)
        if saves[1] == BY_NODE:  # with one more rounding, to 24 bits
            assert torch.allclose(owed, wanted, 0.0, float(wanted.abs().max()) * 2**-22)
        else:
            assert torch.equal(owed, wanted)


def shards(
    comm: Communicator, state: str, given: list[Any] | None, steps: int
) -> tuple[Any, Tensor, list[ErrorFeedback]]:
    """Trains unsharded parameters from no state, one rank's state, or the states of all ranks."""
    weight = nn.Parameter(torch.ones(ELEMS))
    options = AdamWOptions(compression=INT4, state=state)
    optimizer = AdamW([weight], lr=0.1, comm=comm, options=options)
    optimizer.prepare()
    first = 0
    if given is not None:
        optimizer.load_state_dict(given if len(given) > 1 else given[0])
        first = 2
    owed = deepcopy(error_feedback(optimizer))
    for step in range(first, first + steps):
        weight.grad = whole_numbers(comm.rank, step)
        optimizer.step()
    return deepcopy(optimizer.state_dict()), weight.detach().clone(), owed


@pytest.mark.parametrize("state", ["world", "node"])
def test_shards_of_an_optimizer_keep_what_is_owed(two_by_two, state):
    wanted, _, _ = two_by_two.run(shards, state, None, 3)[0]
    begun = [each for each, _, _ in two_by_two.run(shards, state, None, 2)]

    def resumed(comm: Communicator) -> Any:
        mine = comm.rank if state == "node" else comm.steps.shard_index
        given = next(
            each
            for rank, each in enumerate(begun)
            if mine == (rank if state == "node" else each["shard"]["rank"])
        )
        return shards(comm, state, [given], 1)

    for found, _, _ in two_by_two.run(resumed)[:1]:
        for mine, theirs in zip(
            found["state"]["error_feedback"], wanted["state"]["error_feedback"], strict=True
        ):
            assert torch.equal(mine["partial"], theirs["partial"])
            assert torch.equal(mine["sums"], theirs["sums"])
        for mine, theirs in zip(found["state"]["buckets"], wanted["state"]["buckets"], strict=True):
            assert torch.equal(mine["exp_avg"], theirs["exp_avg"])
    if state == "world":
        with ringcomm.local_world(4, nodes=[1, 1, 1, 1], timeout=60) as world:
            found = [owed[0] for _, _, owed in world.run(shards, state, begun, 0)]
            with pytest.raises(CheckpointError, match="other nodes"):
                world.run(resumed)
        before = []
        for shard in begun:
            begins = shard["shard"]["error_feedback"]["begins"]["0"]
            kept = shard["state"]["error_feedback"][0]
            before.append(ErrorFeedback(begins[0], kept["partial"], begins[1], kept["sums"]))
        nothing, elems = (0, torch.zeros(0)), -(-ELEMS // 512) * 512
        owed, wanted = (
            total([Reduced(nothing, each) for each in kept], elems)[1] for kept in (found, before)
        )
        assert torch.equal(owed, wanted)
        assert torch.count_nonzero(owed) > 0


# ---- refused uses ------------------------------------------------------------------------------


@pytest.mark.parametrize("gradients", [None, "none", "param"])
def test_what_is_not_quantized_has_nothing_to_feed_back(gradients):
    with pytest.raises(ArgumentError, match="expected quantized gradients"):
        zero.Compression(gradients=gradients, error_feedback=True)


def test_a_grad_scaler_is_refused():
    options = AdamWOptions(compression=INT4)
    weight = nn.Parameter(torch.ones(4))
    optimizer = AdamW([weight], comm="alone", options=options)
    scaler = GradScaler("cpu")
    scaler.scale(weight.sum()).backward()
    with pytest.raises(ArgumentError, match="LossScaler"):
        scaler.step(optimizer)


def test_nodes_of_different_sizes_are_refused():
    def sharded(comm: Communicator) -> None:
        zero.shard(nn.Linear(8, 8), 2, comm=comm, options=zero.ZeroOptions(compression=INT4))

    def reference(comm: Communicator) -> None:
        AdamW(
            [nn.Parameter(torch.ones(8))], comm=comm, options=AdamWOptions(compression=INT4)
        ).prepare()

    with ringcomm.local_world(3, nodes=[2, 1], timeout=60) as world:
        for body in (sharded, reference):
            with pytest.raises(UnsupportedError, match="error_feedback=True: expected nodes with"):
                world.run(body)
