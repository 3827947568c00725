# SPDX-License-Identifier: Apache-2.0
"""Parameters sent quantized between nodes: compared with a reference, resumed, and written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch

import ringcomm
from ringcomm import CommOptions, Communicator, _native, zero
from ringcomm.comm.nodes import core as sums
from ringcomm.errors import ArgumentError, CheckpointError, UnsupportedError
from ringcomm.extras.estimate import ModelElems, Training
from ringcomm.optim import AdamW, AdamWOptions
from tests.comm.test_quantization import quantize, total
from tests.support.covering import covering
from tests.zero.job import BF16, Job
from tests.zero.models import MODELS, Run, assert_same_bits, groups_of, new_model, options_of, train
from tests.zero.test_nodes import Transport, sent_by_phase

Tensor = torch.Tensor
WORLD: dict[str, Any] = {"params": "world"}


pytestmark = pytest.mark.usefixtures("one_thread_for_each_rank")


def quantized(run: Run, quant_format: str, choice: tuple[int, dict[str, Any]]) -> Run:
    stage, options = choice
    compression = zero.Compression(parameters=quant_format)
    return replace(run, stage=stage, options={"compression": compression, **run.options, **options})


def dequantized(quant_format: str, numbers: Tensor) -> Tensor:
    return total(quant_format, [quantize(quant_format, numbers)], numbers.numel())


#: The elements of a bucket; each parameter's name, begin and end in it.
Layout = tuple[int, list[tuple[str, int, int]]]


def flat_of(bucket: Layout, values: Mapping[str, Tensor]) -> Tensor:
    """Returns the values of a bucket's parameters in FP32, at their places in the bucket."""
    elems, placed = bucket
    flat = torch.zeros(elems)
    for name, begin, end in placed:
        flat[begin:end] = values[name].view(-1)
    return flat


def buckets_of(module: Any) -> list[Layout]:
    stored = zero.stages.sharding.engine_of(module, "test").stored
    return [(b.layout.elems, [(p.name, p.begin, p.end) for p in b.params]) for b in stored]


# ---- bits ---------------------------------------------------------------------------------------


class Reference:
    """Trains on one rank, keeps masters, and quantizes them itself, one bucket at a time."""

    def __init__(self, base: Any, run: Run, buckets: Any, quant_format: str) -> None:
        self.module = deepcopy(base)
        if run.precision.param is not None:
            self.module.to(run.precision.param)
        self.params = dict(self.module.named_parameters())
        self.masters = {n: p.detach().clone().float() for n, p in base.named_parameters()}
        self._buckets, self._format, self._run = buckets, quant_format, run
        # This optimizer steps the masters in FP32 on one rank, so it quantizes nothing.
        self._stepped = deepcopy(base)
        self._optimizer = AdamW(groups_of(self._stepped), lr=1e-2, comm="alone")
        self._schedule = torch.optim.lr_scheduler.ExponentialLR(self._optimizer, 0.97)
        self._generators = [torch.Generator().manual_seed(50 + rank) for rank in range(4)]
        self.show()

    def show(self) -> None:
        """Sets the parameters to their masters, quantized and dequantized."""
        with torch.no_grad():
            for bucket in self._buckets:
                flat = dequantized(self._format, flat_of(bucket, self.masters))
                for name, begin, end in bucket[1]:
                    self.params[name].view(-1).copy_(flat[begin:end])

    def step(self, turn: int) -> None:
        sums: dict[str, list[Tensor]] = {name: [] for name in self.params}
        for generator in self._generators:
            self.module.zero_grad()
            batch = MODELS[self._run.model][1](generator, turn)
            if self._run.precision.param is not None:
                batch = [each.to(self._run.precision.param) for each in batch]
            self.module(*batch).backward()
            for name, param in self.params.items():
                grad = torch.zeros_like(param) if param.grad is None else param.grad
                sums[name].append(grad.float())
        for name, param in self._stepped.named_parameters():
            a, b, c, d = sums[name]
            param.grad = ((a + b) + (c + d)) / 4
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._schedule.step()
        for name, param in self._stepped.named_parameters():
            self.masters[name] = param.detach().clone()
        self.show()


def layout_of(comm: Communicator, base: Any, run: Run) -> Any:
    module = zero.shard(deepcopy(base), run.stage, comm=comm, options=options_of(run))
    found = buckets_of(module)
    zero.remove_sharding(module)
    return found


@pytest.mark.parametrize(
    ("run", "quant_format", "choices"),
    [
        (Run("mlp", 1, steps=2), "int4", [(1, {}), (3, WORLD)]),
        (Run("mlp", 1, steps=2, precision=zero.Precision(param=torch.bfloat16)), "fp8", [(3, {})]),
    ],
    ids=["int4", "bf16 fp8"],
)
def test_steps_end_with_the_bits_of_one_rank_that_quantizes_masters_itself(
    two_by_two, run, quant_format, choices
):
    """Steps equal the reference's quantized masters bit for bit, and differ from the masters."""
    base = new_model(run.model)
    layout = two_by_two.run(layout_of, base, quantized(run, quant_format, (1, {})))[0]
    reference = Reference(base, run, layout, quant_format)
    for turn in range(run.steps):
        reference.step(turn)
    wanted = dict(reference.params)
    for choice in choices:
        for state, _ in two_by_two.run(train, base, quantized(run, quant_format, choice)):
            params = {name: state[name] for name in wanted}
            assert_same_bits(params, {name: each.detach() for name, each in wanted.items()})
    masters = reference.masters
    assert any(not torch.equal(masters[name], wanted[name].float()) for name in wanted)


def test_segments_begin_at_blocks(two_by_two, monkeypatch):
    base, run = new_model("narrow gpt"), Run("narrow gpt", 1, 1)
    wanted = two_by_two.run(train, base, quantized(run, "int4", (1, {})))[0]
    monkeypatch.setattr(sums, "SEGMENT_BYTES", 4 << 10)
    for choice in ((1, {}), (3, WORLD)):
        for state, _ in two_by_two.run(train, base, quantized(run, "int4", choice)):
            assert_same_bits(state, wanted[0])


def test_quantized_values_pass_over_other_rails_unchanged():
    base, run = new_model("mlp"), quantized(Run("mlp", 1, 2), "int8", (3, {}))
    ends = []
    for rails in ("one_shot", "levels", "ring"):
        options = CommOptions(rails=rails)
        with ringcomm.local_world(4, nodes=[1, 1, 1, 1], timeout=60, options=options) as world:
            ends.append(world.run(shown_after, base, run))
    assert ends[0] == ends[1] == ends[2]


def shown_after(comm: Communicator, base: Any, run: Run) -> list[list[float]]:
    """Returns the parameters after shard() alone, which quantizes them."""
    module = zero.shard(deepcopy(base), run.stage, comm=comm, options=options_of(run))
    state = zero.full_state_dict(module)
    zero.remove_sharding(module)
    return [each.view(-1).tolist() for each in state.values()]


def exact_ones(comm: Communicator, base: Any, options: zero.ZeroOptions, stage: int) -> list[str]:
    """Returns the names of parameters that sharding leaves equal, except for their dtype."""
    module = zero.shard(deepcopy(base), stage, comm=comm, options=options)
    state = zero.full_state_dict(module)
    zero.remove_sharding(module)
    params = dict(base.named_parameters())
    return sorted(n for n, each in params.items() if torch.equal(each.to(state[n].dtype), state[n]))


@pytest.mark.parametrize(("stage", "more"), [(1, {}), (3, WORLD)])
def test_frozen_parameters_and_those_that_stay_fp32_are_exact(two_by_two, stage, more):
    base = new_model("partial")
    options = zero.ZeroOptions(compression=zero.Compression(parameters="int4"), **more)
    found = two_by_two.run(exact_ones, base, options, stage)
    assert found == [["frozen.bias", "frozen.weight"]] * 4
    kept = zero.Precision(param=torch.bfloat16, keep_fp32=("head",))
    found = two_by_two.run(exact_ones, base, replace(options, precision=kept), stage)
    assert found == [["frozen.bias", "frozen.weight", "head.bias", "head.weight"]] * 4


# ---- resuming -----------------------------------------------------------------------------------


def resume(comm: Communicator, base: Any, root: Any, settings: dict[str, Any]) -> Any:
    """Trains three steps with a checkpoint after two, and resumes from it in another module."""
    chosen = {"zero_options": settings["options"], "precision": settings["precision"]}
    first = Job(comm, base, settings["stages"][0], **chosen)
    first.train("mlp", 2)
    first.save(root)
    first.train("mlp", 1)
    other = deepcopy(base)
    with torch.no_grad():
        for param in other.parameters():
            param.add_(1.0)
    second = Job(comm, other, settings["stages"][1], **chosen)
    second.load(root)
    loaded = zero.full_state_dict(second.module)
    second.train("mlp", 1)
    ends = [zero.full_state_dict(each.module) for each in (first, second)]
    for each in (first, second):
        zero.remove_sharding(each.module)
    return loaded, *ends


def test_a_run_that_resumes_ends_with_the_same_bits(two_by_two, tmp_path):
    compression = zero.Compression(parameters="int8")
    settings = {"options": {"compression": compression}, "precision": BF16, "stages": (3, 1)}
    for loaded, wanted, found in two_by_two.run(resume, new_model("mlp"), tmp_path, settings):
        assert_same_bits(found, wanted)
        assert any(not torch.equal(loaded[name], wanted[name]) for name in wanted)


def continue_from_a_shard(comm: Communicator, base: Any, stage: int, precision: Any) -> Any:
    """Trains another module from the parameters and this rank's shard of the optimizer's state."""
    options = {"compression": zero.Compression(parameters="int8")}
    first = Job(comm, base, stage, precision=precision, zero_options=options)
    first.train("mlp", 2)
    shown, shard = zero.full_state_dict(first.module), deepcopy(first.optimizer.state_dict())
    second = Job(comm, base, stage, precision=precision, zero_options=options)
    with zero.unsharded(second.module, write_from=0), torch.no_grad():
        for name, param in second.module.named_parameters():
            param.copy_(shown[name])
    # Quantizing dequantized values again differs from quantizing the masters.
    requantized = zero.full_state_dict(second.module)
    second.optimizer.load_state_dict(shard)
    loaded = zero.full_state_dict(second.module)
    for each in (first, second):
        zero.remove_sharding(each.module)
    return shown, requantized, loaded


@covering(strength=1, stage=[1, 3], precision={"bf16": BF16, "fp32": zero.Precision()})
def test_parameters_follow_the_masters_of_a_shard(two_by_two, stage, precision):
    base = new_model("mlp")
    for shown, requantized, loaded in two_by_two.run(continue_from_a_shard, base, stage, precision):
        assert any(not torch.equal(requantized[name], shown[name]) for name in shown)
        assert_same_bits(loaded, shown)


def save_one(comm: Communicator, base: Any, root: Any, options: dict[str, Any]) -> Any:
    job = Job(comm, base, 2, zero_options=options)
    job.train("mlp", 1)
    job.save(root)
    state = zero.full_state_dict(job.module)
    zero.remove_sharding(job.module)
    return state


def load_one(comm: Communicator, base: Any, root: Any, with_optimizer: bool) -> Any:
    job = Job(
        comm, base, 3, zero_options={"compression": zero.Compression(parameters="int8"), **WORLD}
    )
    if with_optimizer:
        job.load(root)
    else:
        zero.load(root, job.module)
    state = zero.full_state_dict(job.module)
    layout = buckets_of(job.module)
    zero.remove_sharding(job.module)
    return state, layout


def test_it_resumes_in_another_world_with_the_same_parameters(two_by_two, tmp_path):
    """Quantization does not depend on chunks. Loaded alone, parameters become the masters."""
    base = new_model("mlp")
    wanted = two_by_two.run(
        save_one, base, tmp_path, {"compression": zero.Compression(parameters="int8")}
    )[0]
    with ringcomm.local_world(3, nodes=[2, 1], timeout=60) as world:
        for state, _ in world.run(load_one, base, tmp_path, True):
            assert_same_bits(state, wanted)
        for state, layout in world.run(load_one, base, tmp_path, False):
            for bucket in layout:
                requantized = dequantized("int8", flat_of(bucket, wanted))
                assert torch.equal(flat_of(bucket, state), requantized)


def go_on(comm: Communicator, base: Any, root: Any, options: dict[str, Any]) -> Any:
    """Loads module and optimizer, and trains; returns parameters and masters before, and after."""
    job = Job(comm, base, 2, zero_options=options)
    job.load(root)
    loaded = zero.full_state_dict(job.module)
    params = job.module.named_parameters() if options else ()
    masters = {name: zero.get_master(param).clone() for name, param in params}
    job.train("mlp", 1)
    found = zero.full_state_dict(job.module)
    zero.remove_sharding(job.module)
    return loaded, masters, found


def test_masters_become_parameters_without_quantization_and_parameters_masters_with_it(
    two_by_two, tmp_path
):
    """With FP32 parameters, each way resumes as the other kind of run would have continued."""
    base, options = new_model("mlp"), {"compression": zero.Compression(parameters="int8")}
    shown = two_by_two.run(save_one, base, tmp_path / "quantized", options)[0]
    [(unquantized, _, ended), *_] = two_by_two.run(go_on, base, tmp_path / "quantized", {})
    [(requantized, masters, _), *_] = two_by_two.run(go_on, base, tmp_path / "quantized", options)
    assert_same_bits({name: unquantized[name] for name in masters}, masters)
    assert_same_bits(requantized, shown)
    assert any(not torch.equal(unquantized[name], shown[name]) for name in shown)
    assert any(not torch.equal(unquantized[name], ended[name]) for name in ended)
    # One node quantizes nothing, and keeps no masters.
    with ringcomm.local_world(2, timeout=60) as world:
        for loaded, _, _ in world.run(go_on, base, tmp_path / "quantized", {}):
            assert_same_bits({name: loaded[name] for name in masters}, masters)

    two_by_two.run(save_one, base, tmp_path / "plain", {})
    [(wanted, _, _), *_] = two_by_two.run(go_on, base, tmp_path / "plain", {})
    [(dequantized_ones, masters, _), *_] = two_by_two.run(go_on, base, tmp_path / "plain", options)
    assert_same_bits(masters, {name: wanted[name] for name in masters})
    assert any(not torch.equal(dequantized_ones[name], wanted[name]) for name in wanted)


def test_16_bit_parameters_do_not_become_masters(two_by_two, tmp_path):
    """16-bit parameters are rounded, so a run with masters can load only the module."""
    base = new_model("mlp")

    def body(comm: Communicator) -> None:
        settings: dict[str, Any] = {"precision": BF16}
        job = Job(
            comm, base, 2, adamw=AdamWOptions(master="none", rounding="stochastic"), **settings
        )
        job.train("mlp", 1)
        job.save(tmp_path)
        zero.remove_sharding(job.module)
        job = Job(
            comm,
            base,
            2,
            zero_options={"compression": zero.Compression(parameters="int8")},
            **settings,
        )
        with pytest.raises(
            CheckpointError, match=r"'master'.*compression: parameters='int8' keeps"
        ):
            job.load(tmp_path)
        zero.remove_sharding(job.module)

    two_by_two.run(body)


# ---- writes from outside ------------------------------------------------------------------------


def has_dequantized(module: Any, quant_format: str, params: dict[str, Tensor]) -> bool:
    """True if all parameters equal their masters, quantized and dequantized."""
    state = zero.full_state_dict(module)
    masters = {name: zero.get_master(param) for name, param in params.items()}
    for bucket in buckets_of(module):
        dtype = state[bucket[1][0][0]].dtype
        wanted = dequantized(quant_format, flat_of(bucket, masters)).to(dtype).float()
        if not torch.equal(flat_of(bucket, state), wanted):
            return False
    return True


def write_unsharded(module: Any, param: Tensor) -> None:
    with zero.unsharded(module, write_from=2):
        param.data.view(-1)[5] = 9.0


def write_one_unsharded(module: Any, param: Tensor) -> None:
    with zero.unsharded(param, write_from=1):
        param.data.view(-1)[5] = 9.0


def write_shards(module: Any, param: Tensor) -> None:
    name = next(name for name, each in module.named_parameters() if each is param)
    with zero.writing_shards(module) as shards:
        shard = shards[name]
        if shard.begin <= 5 < shard.end:
            shard.values[5 - shard.begin] = 9.0


def write_master(module: Any, param: Tensor) -> None:
    value = zero.get_master(param)
    value.view(-1)[5] = 9.0
    zero.set_master(param, value)


WRITES: dict[str, Callable[[Any, Tensor], None]] = {
    "unsharded": write_unsharded,
    "one unsharded": write_one_unsharded,
    "writing_shards": write_shards,
    "set_master": write_master,
}


def write(comm: Communicator, base: Any, run: Run, how: str) -> None:
    module: Any = zero.shard(deepcopy(base), run.stage, comm=comm, options=options_of(run))
    optimizer = AdamW(module.parameters(), lr=1e-2)
    optimizer.prepare()
    params = dict(module.named_parameters())
    param = params["layers.0.weight"]
    before = {name: zero.get_master(each) for name, each in params.items()}
    WRITES[how](module, param)
    assert has_dequantized(module, run.options["compression"].parameters, params)
    after = {name: zero.get_master(each) for name, each in params.items()}
    # Only the written element changes, although its block now has another scale.
    before["layers.0.weight"].view(-1)[5] = 9.0
    assert_same_bits(after, before)
    state = zero.full_state_dict(module)
    assert abs(float(state["layers.0.weight"].view(-1)[5]) - 9.0) < 9 / 250
    module(*MODELS["mlp"][1](torch.Generator().manual_seed(comm.rank), 0)).backward()
    optimizer.step()
    assert has_dequantized(module, run.options["compression"].parameters, params)
    zero.remove_sharding(module)


@covering(strength=1, how=[*WRITES], choice=[(1, {}), (2, {}), (3, {}), (3, WORLD)])
def test_masters_follow_writes_from_outside_and_are_quantized_anew(two_by_two, how, choice):
    two_by_two.run(write, new_model("mlp"), quantized(Run("mlp", 1), "int8", choice), how)


def load_state(comm: Communicator, base: Any, run: Run, early: bool) -> Any:
    """Loads a module's state between steps, at a stage that keeps whole parameters."""
    module: Any = zero.shard(deepcopy(base), run.stage, comm=comm, options=options_of(run))
    optimizer = AdamW(module.parameters(), lr=1e-2)
    if not early:
        optimizer.prepare()
    given = {name: each + 1 for name, each in zero.full_state_dict(module).items()}
    module.load_state_dict(given)
    if early:
        optimizer.prepare()
    masters = {name: zero.get_master(param) for name, param in module.named_parameters()}
    for name, value in masters.items():
        assert torch.equal(value, given[name])
    module(*MODELS["mlp"][1](torch.Generator().manual_seed(comm.rank), 0)).backward()
    optimizer.step()
    assert has_dequantized(module, "int8", dict(module.named_parameters()))
    zero.remove_sharding(module)


@pytest.mark.parametrize("early", [False, True], ids=["after prepare", "before it"])
def test_masters_follow_a_loaded_state_dict(two_by_two, early):
    run = quantized(Run("mlp", 1), "int8", (1, {}))
    two_by_two.run(load_state, new_model("mlp"), run, early)


def exchange(comm: Communicator, base: Any, run: Run) -> None:
    module: Any = zero.shard(deepcopy(base), run.stage, comm=comm, options=options_of(run))
    before = zero.full_state_dict(module)
    values = {
        name: torch.full_like(shard.values, 1 / 3)
        for name, shard in zero.local_shards(module).items()
    }
    with zero.exchanged(module, values):
        inside = zero.full_state_dict(module)
        assert all(bool((each == 1 / 3).all()) for each in inside.values())
    assert_same_bits(zero.full_state_dict(module), before)
    zero.remove_sharding(module)


def test_values_that_are_exchanged_are_not_quantized(two_by_two):
    for choice in ((1, {}), (3, WORLD)):
        two_by_two.run(exchange, new_model("mlp"), quantized(Run("mlp", 1), "int4", choice))


# ---- bytes --------------------------------------------------------------------------------------


def check_masters(module: Any, optimizer: AdamW) -> None:
    """Asserts that masters and moments take the estimated bytes, and that none is held twice."""
    held = 0
    stored_ones = zero.stages.sharding.engine_of(module, "test").stored
    for bucket, stored in zip(optimizer.sharded_step().buckets, stored_ones, strict=True):
        assert bucket.state.master is stored.wide
        held += sum(each.nbytes for each in bucket.state.tensors().values())
    elems = sum(bucket.chunk.elems for bucket in optimizer.sharded_step().buckets)
    compression = zero.Compression(parameters="int8")
    training = Training(ModelElems(2 * elems), 2, 2, zero.ZeroOptions(compression=compression))
    assert held == training.state(1).state == 12 * elems


def step_of(comm: Communicator, transport: Transport, base: Any, run: Run) -> Any:
    """Returns the bytes that leave each node by phase, and the elements of each bucket's chunks."""
    module: Any = zero.shard(deepcopy(base), run.stage, comm=comm, options=options_of(run))
    optimizer = AdamW(module.parameters())
    phases = sent_by_phase(comm, transport, module, optimizer)
    flags = optimizer.sharded_step().table.told.nbytes
    check_masters(module, optimizer)
    chunks = [
        [bucket.layout.chunk(index, comm.world_size).elems for index in range(comm.world_size)]
        for bucket in zero.stages.sharding.engine_of(module, "test").stored
    ]
    units = zero.stages.sharding.engine_of(module, "test").trainable.unit_of
    root = sum(sum(each) for unit, each in zip(units, chunks, strict=True) if unit == 0)
    zero.remove_sharding(module)
    return phases, flags, chunks, root


@covering(strength=1, choice=[(1, {}), (3, WORLD)], quant_format=["int8", "int4"])
def test_what_leaves_a_node_is_quantized(quant_format, choice):
    """Each chunk is sent once per other node; a world's chunks once per unsharding."""
    transport, base = Transport(), new_model("gpt")
    run = quantized(Run("gpt", 1, options={"overlap": False}), quant_format, choice)
    with ringcomm.local_world(
        4, nodes=[2, 2], options=CommOptions(transport=transport), timeout=60
    ) as world:
        (quiet, backward, step), flags, chunks, root = world.run(step_of, transport, base, run)[0]
    code = _native.QUANT_FORMATS[quant_format]
    for node in range(2):
        # Chunk number 2 l + n belongs to local rank l of node n.
        mine = [chunk for each in chunks for chunk in each[node::2]]
        theirs = [chunk for each in chunks for chunk in each[1 - node :: 2]]
        params = sum(_native.quantized_bytes(code, chunk) for chunk in mine)
        grads = 4 * sum(theirs)
        if choice == (3, WORLD):
            # Forward and backward unshard each unit once; the root is unsharded once in all.
            assert params < quiet[node] < 2 * params
            assert step[node] == 2 * flags
            assert backward[node] == grads + quiet[node]
        else:
            assert quiet[node] == 0
            assert backward[node] + step[node] - 2 * flags == grads + params
        options = zero.ZeroOptions(
            compression=zero.Compression(parameters=quant_format), **choice[1]
        )
        elems = ModelElems(sum(mine) + sum(theirs), root=root)
        told = Training(elems, 4, 2, options).leaving_node_bytes(choice[0])
        assert backward[node] + step[node] - 2 * flags == told


# ---- what is refused ----------------------------------------------------------------------------


def test_an_unknown_code_and_unsharded_parameters_are_refused():
    """tests/zero/test_same_bits.py covers the refusals for sharded modules."""
    with pytest.raises(ArgumentError, match="parameters: compression: expected one of param, int8"):
        zero.Compression(parameters="fp32")
    compression = zero.Compression(parameters="int8")
    optimizer = AdamW(
        torch.nn.Linear(4, 4).parameters(),
        comm="alone",
        options=AdamWOptions(compression=compression),
    )
    with pytest.raises(UnsupportedError, match=r"parameters='int8'.*zero.shard\(\)"):
        optimizer.prepare()
    with pytest.raises(UnsupportedError, match="offload_state: expected None with compression"):
        AdamWOptions(compression=compression, offload_state=ringcomm.Disk("/tmp"))
