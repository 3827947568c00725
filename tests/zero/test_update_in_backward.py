# SPDX-License-Identifier: Apache-2.0
"""Updates in backward have the bits of updates in the step; unsupported uses are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext, suppress
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ringcomm
from ringcomm import Disk, DiskError, zero
from ringcomm.comm.local_world import LocalWorld
from ringcomm.errors import ArgumentError, MismatchError, RingcommError
from ringcomm.extras.estimate import ModelElems, Training
from ringcomm.optim import (
    Adafactor,
    AdamW,
    AdamWOptions,
    GradScaler,
    LossScaler,
    Muon,
    muon_groups,
    state_offload,
)
from ringcomm.zero.stages import updates
from ringcomm.zero.stages.unshard import Unsharder
from tests.memory.disk_folder import skip_unless_disk
from tests.support.covering import covering
from tests.zero.checkpoint.states import files_below
from tests.zero.job import BF16, whole_state
from tests.zero.models import MODELS, Run, assert_same_bits, new_model, options_of

Tensor = torch.Tensor
EARLY = AdamWOptions(update="in_backward")
PIECE = 512
#: In this turn no backward reduces, so the step updates everything.
QUIET_TURN = 2


@pytest.fixture
def worlds() -> Iterator[Callable[[int], LocalWorld]]:
    """Returns worlds for one test only: a failed backward stays open while its module lives."""
    with ExitStack() as stack:
        yield cache(lambda size: stack.enter_context(ringcomm.local_world(size)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return skip_unless_disk(tmp_path_factory.mktemp("disk"))


def on_disk(folder: Path, resident_bytes: int = 0) -> Disk:
    buffer_bytes = state_offload.LEAST_BUFFERS * state_offload.LARGEST_ELEM_BYTES * PIECE
    return Disk(folder, buffer_bytes, resident_bytes)


def state_of(module: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    return {**whole_state(module, optimizer), "steps": optimizer.steps_taken.clone()}


def trained(
    comm: Any, base: nn.Module, run: Run, early: bool, root: Path | None = None
) -> dict[str, Tensor]:
    """Trains with one step whose backwards all run under ``no_sync``; returns the state."""
    run = replace(run, adamw=replace(run.adamw, update="in_backward" if early else "in_step"))
    module: Any = zero.shard(deepcopy(base), run.stage, comm=comm, options=options_of(run))
    optimizer = run.optimizer(module)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    generator = torch.Generator().manual_seed(50 + comm.rank)
    for turn in range(run.steps):
        for number in range(run.backwards):
            quiet = number < run.backwards - 1 or turn == QUIET_TURN
            with zero.no_sync(module) if quiet else nullcontext():
                module(*MODELS[run.model][1](generator, turn)).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    if root is not None:
        zero.save(root / str(early), run.steps, module, optimizer)
    found = state_of(module, optimizer)
    zero.remove_sharding(module)
    return found


# ---- bits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "unused"), [(2, "zero"), (3, "skip")])
def test_checkpoints_are_the_same_files(worlds, folder, tmp_path, stage, unused):
    """Covers a turn in which no backward reduces, so that the step updates everything."""
    adamw = AdamWOptions(unused=unused)
    base, run = new_model("partial"), Run("partial", stage, precision=BF16, adamw=adamw)
    early = replace(run, adamw=replace(adamw, offload_state=on_disk(folder)))

    def work(comm):
        trained(comm, base, run, False, tmp_path)
        trained(comm, base, early, True, tmp_path)

    worlds(2).run(work)
    wanted, found = (files_below(tmp_path / str(early)) for early in (False, True))
    assert wanted == found and len(wanted) == 3


# ---- a loop to take apart -----------------------------------------------------------------------

LAYERS, WIDTH = 5, 64


class Deep(nn.Module):
    """A model in which each layer is a bucket and a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


# At import, where no other thread draws random numbers.
torch.manual_seed(3)
DEEP = Deep()


class Loop:
    """Trains on one rank a model in which each layer is a bucket."""

    def __init__(
        self,
        comm: Any,
        stage: int,
        base: nn.Module = DEEP,
        adamw: AdamWOptions = EARLY,
        **options: Any,
    ) -> None:
        chosen = zero.ZeroOptions(bucket_elems=WIDTH * WIDTH, **options)
        self.comm = comm
        self.module: Any = zero.shard(deepcopy(base), stage, comm=comm, options=chosen)
        self.params = list(self.module.parameters())
        self.optimizer: Any = AdamW(self.params, lr=1e-2, options=adamw)
        self.turn = 0

    def loss(self) -> Tensor:
        self.turn += 1
        generator = torch.Generator().manual_seed(10 * self.turn + self.comm.rank)
        return self.module(torch.randn(4, WIDTH, generator=generator))

    def take(self, turns: int = 1) -> None:
        for _ in range(turns):
            self.loss().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def fail_at(self, layer: int, on: int | None = None) -> None:
        """Runs a backward that raises after the gradients of later layers have come."""

        def fail(grad: Tensor) -> None:
            self.engine.reduction.wait()
            if on in (None, self.comm.rank):
                raise InterruptedError

        def watch(_: Any, __: Any, out: Tensor) -> None:
            out.register_hook(fail)

        handle = self.module.layers[layer].register_forward_hook(watch)
        try:
            with pytest.raises(InterruptedError) if on in (None, self.comm.rank) else nullcontext():
                self.loss().backward()
        finally:
            handle.remove()

    def state(self) -> dict[str, Tensor]:
        return state_of(self.module, self.optimizer)

    @property
    def engine(self) -> Any:
        return vars(self.module)["_ringcomm_engine"]

    def own(self) -> list[Tensor]:
        """Returns copies of this rank's chunks."""
        return [each.values.clone() for each in self.shards()]

    def shards(self) -> list[Any]:
        owner = self.engine.placement.owner
        return [type("Shard", (), {"values": bucket.own_params}) for bucket in owner.buckets]


def test_backward_updates_bucket_by_bucket_and_keeps_no_gradients(worlds):
    """Observed from a hook of the first layer's output, and between backward and step."""

    def work(comm, stage, overlap):
        loop = Loop(comm, stage, overlap=overlap)
        loop.take(2)
        before = loop.own()
        seen: list[bool] = []

        def look(grad: Tensor) -> None:
            loop.engine.reduction.wait()
            seen.extend(map(torch.equal, before, loop.own()))

        handle = loop.module.layers[0].register_forward_hook(
            lambda _, __, out: out.register_hook(look) and None
        )
        loop.loss().backward()
        handle.remove()
        assert seen == [True, *[False] * (LAYERS - 1)]
        assert not any(map(torch.equal, before, loop.own()))
        assert all(bucket.shard.numel() == 0 for bucket in loop.engine.reduction.buckets)
        loop.optimizer.step()
        zero.remove_sharding(loop.module)

    for stage, overlap in ((2, True), (3, False)):
        worlds(2).run(work, stage, overlap)


def test_a_disk_moves_the_same_bytes_and_nothing_for_what_rests(worlds, folder):
    """Layer 1 has no gradient from turn 2 on; each turn plans its reads after the last step."""

    class Resting(Deep):
        def forward(self, x: Tensor, rests: bool = False) -> Tensor:
            for number, layer in enumerate(self.layers):
                x = x if rests and number == 1 else torch.tanh(layer(x))
            return x.square().mean()

    made = Resting()

    def work(comm, options):
        loop = Loop(comm, 3, made, replace(options, offload_state=on_disk(folder)))
        disk, moved = loop.optimizer.sharded_step().offload.storage, []
        for turn in range(6):
            before = disk.bytes_read, disk.bytes_written
            loop.module(torch.ones(4, WIDTH), rests=turn > 1).backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()
            loop.optimizer.sharded_step().offload.wait()
            moved.append((disk.bytes_read - before[0], disk.bytes_written - before[1]))
        zero.remove_sharding(loop.module)
        return moved[1], moved[4], moved[5]

    def all_of(comm):
        return work(comm, AdamWOptions()), work(comm, EARLY)

    for wanted, found in worlds(2).run(all_of):
        assert found[1:] == wanted[1:]
        assert found[1][1] < found[0][1]


# ---- what is refused ----------------------------------------------------------------------------


def test_what_cannot_be_updated_in_backward_is_refused(worlds):
    with pytest.raises(ArgumentError, match="check_finite"):
        AdamWOptions(update="in_backward", check_finite=True)
    with pytest.raises(ArgumentError, match="update: expected one of in_step, in_backward"):
        AdamWOptions(update="soon")
    reference = nn.Linear(2, 2)
    with pytest.raises(ArgumentError, match=r"zero\.shard\(\) has sharded at stage 2 or 3"):
        AdamW(reference.parameters(), options=EARLY)

    def work(comm):
        for stage in (0, 1):
            with pytest.raises(ArgumentError, match=f"at stage {stage}.*reduced in the step"):
                Loop(comm, stage)
        precision = zero.Precision(param=torch.float16, scaled=True)
        with pytest.raises(ArgumentError, match="scaled=True"):
            Loop(comm, 2, precision=precision)
        module = zero.shard(deepcopy(DEEP), 2, comm=comm)
        params = list(module.parameters())
        with pytest.raises(ArgumentError, match="loss_scaler: expected None"):
            AdamW(params, options=EARLY, loss_scaler=LossScaler())
        for kind, groups in ((Muon, muon_groups(module)), (Adafactor, params)):
            with pytest.raises(ArgumentError, match="depends on others"):
                kind(groups, options=EARLY)
        handle = zero.on_reduced(module, lambda *_: None)
        with pytest.raises(ArgumentError, match="on_reduced"):
            AdamW(params, options=EARLY)
        handle.remove()
        module(torch.ones(2, WIDTH)).backward()
        with pytest.raises(ArgumentError, match="before the first backward"):
            AdamW(params, options=EARLY)
        module.zero_grad()
        AdamW(params, options=EARLY)

    worlds(2).run(work)


@pytest.mark.parametrize("stage", [2, 3])
def test_what_needs_gradients_or_their_end_is_refused_and_training_goes_on(worlds, tmp_path, stage):
    def work(comm):
        loop, wanted = Loop(comm, stage), Loop(comm, stage, adamw=AdamWOptions())
        for each in (loop, wanted):
            each.take(2)
            each.loss().backward()
        module, optimizer = loop.module, loop.optimizer
        param = loop.params[0]
        never = [
            lambda: optimizer.clip_grad_norm_(1.0),
            lambda: optimizer.clip_grad_norm_(1.0, params=[param]),
            lambda: optimizer.clip_grad_value_(1.0),
            lambda: zero.get_gradient(param),
            lambda: zero.set_gradient(param, torch.zeros(WIDTH, WIDTH)),
            lambda: zero.on_reduced(module, lambda *_: None),
        ]
        for call in never:
            with pytest.raises(ArgumentError, match='update="in_step"'):
                call()
        not_yet = [
            optimizer.zero_grad,
            module.zero_grad,
            optimizer.state_dict,
            optimizer.full_state_dict,
            optimizer.refresh_master_weights,
            lambda: optimizer.load_state_dict({}),
            lambda: optimizer.add_param_group({"params": []}),
            lambda: zero.save(tmp_path, 1, module, optimizer),
            lambda: zero.load(tmp_path, module, optimizer),
            lambda: zero.get_master(param),
            lambda: zero.set_master(param, torch.zeros(WIDTH, WIDTH)),
            lambda: zero.get_state(param, "exp_avg"),
            lambda: zero.local_shards(module),
            lambda: zero.writing_shards(module).__enter__(),
            lambda: zero.exchanged(module, {}).__enter__(),
            lambda: zero.unsharded(module, write_from=0).__enter__(),
            lambda: zero.full_state_dict(module),
            lambda: zero.remove_sharding(module),
            loop.loss,
            lambda: param.detach().sum().item(),
        ]
        for number, call in enumerate(not_yet):
            with pytest.raises(ArgumentError, match=r"all optimizer.step\(\)|needs its values"):
                call()
                raise AssertionError(number)
        loop.turn = wanted.turn
        for each in (loop, wanted):
            each.optimizer.step()
            each.optimizer.zero_grad()
            each.take(2)
        assert_same_bits(loop.state(), wanted.state())

    worlds(2).run(work)


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_after_those_of_a_backward_are_refused(worlds, stage):
    """Refuses a second backward, also under no_sync, and set gradients; the first one counts."""

    def work(comm):
        loop, wanted = Loop(comm, stage), Loop(comm, stage, adamw=AdamWOptions())
        for each in (loop, wanted):
            each.take()
            # Built before the update, as the graph of a second loss may be.
            first, second = each.loss(), each.loss()
            if each is loop:
                first.backward()
                with pytest.raises(ArgumentError, match="gradients come after a backward"):
                    second.backward()
                with zero.no_sync(each.module):
                    each.turn = 2
                    with pytest.raises(ArgumentError):
                        each.loss().backward()
                each.turn = 3
            else:
                first.backward()
            each.optimizer.step()
            each.optimizer.zero_grad()
            each.take()
        assert_same_bits(loop.state(), wanted.state())
        loop.loss().backward()
        with pytest.raises(ArgumentError, match="gradients come after a backward"):
            loop.params[1].grad = torch.ones(WIDTH, WIDTH)

    worlds(2).run(work)


@covering(strength=1, world_size=[1, 2], kind={"ours": GradScaler, "torch's": torch.amp.GradScaler})
def test_grad_scalers_are_refused(worlds, world_size, kind):
    def work(comm):
        loop = Loop(comm, 2)
        scaler = kind("cpu")
        scaler.scale(loop.loss()).backward()
        with pytest.raises(
            ArgumentError, match=r"step by a GradScaler.*as soon as they are reduced"
        ):
            scaler.step(loop.optimizer)

    worlds(world_size).run(work)


# ---- who else needs the old values --------------------------------------------------------------


class Detached(Deep):
    """The second layer also uses the last layer's weight, detached, so without a gradient."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def again(self, x: Tensor) -> Tensor:
        last: Any = self.layers[-1]
        return torch.tanh(x @ last.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if number == 1 and self.kind == "saved":
                x = self.again(x)
            elif number == 1:
                x = checkpoint(self.again, x, use_reentrant=self.kind == "reentrant")
        return x.square().mean()


KINDS = {
    "saved": (RuntimeError, "modified by an inplace operation"),
    "recomputed": (ArgumentError, "a backward has updated it already"),
    "reentrant": (ArgumentError, "a backward has updated it already"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_uses_a_parameter_after_its_update_raises_at_stage_2(worlds, kind, monkeypatch):
    """Without the marks on graphs, the gradient is silently wrong."""
    made = Detached(kind)
    error, text = KINDS[kind]

    def work(comm, marks):
        loop = Loop(comm, 2, made)
        with pytest.raises(error, match=text) if marks else nullcontext():
            loop.take()
        if marks:
            with pytest.raises(RingcommError, match="raised before its end"):
                loop.optimizer.step()
            return None
        return loop.state()

    def usual(comm):
        loop = Loop(comm, 2, made, AdamWOptions())
        loop.take()
        return loop.state()

    worlds(2).run(work, True)
    wanted = worlds(2).run(usual)[0]
    monkeypatch.setattr(updates, "make_updated", lambda *_: None)
    found = worlds(2).run(work, False)[0]
    with pytest.raises(AssertionError, match="layers"):
        assert_same_bits(found, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_stage_3_has_the_old_values_while_they_are_here_and_unshards_no_new_ones(worlds, kind):
    made = Detached(kind)

    def work(comm):
        if kind == "saved":
            found = [Loop(comm, 3, made, adamw) for adamw in (EARLY, AdamWOptions())]
            for loop in found:
                loop.take(2)
            assert_same_bits(found[0].state(), found[1].state())
            return
        loop = Loop(comm, 3, made)
        with pytest.raises(ArgumentError, match=r"needed again.*updated them already"):
            loop.take()

    worlds(2).run(work)


class Shared(Deep):
    """A layer that runs twice, checkpointed; reentrant ones bring its gradient in two parts."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x))
        for _ in range(2):
            x = checkpoint(self.layers[-1], x, use_reentrant=self.reentrant)
        return x.square().mean()


@pytest.mark.parametrize("stage", [2, 3])
def test_a_gradient_in_parts_is_refused_and_one_in_one_piece_is_right(worlds, stage):
    made, in_parts = Shared(), Shared()
    in_parts.reentrant = True

    def work(comm):
        found = []
        for adamw in (EARLY, AdamWOptions()):
            loop = Loop(comm, stage, made, adamw)
            loop.take(2)
            found.append(loop.state())
        assert_same_bits(*found)
        loop = Loop(comm, stage, in_parts)
        with pytest.raises(ArgumentError, match=r"needed again|updated it already"):
            loop.take()
        with pytest.raises(RingcommError, match="raised before its end"):
            loop.optimizer.step()

    worlds(2).run(work)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("stage", [2, 3])
def test_graphs_of_gradients(worlds, stage):
    """A gradient penalty inside the loss works; a backward with create_graph is refused."""

    def penalised(loop):
        x = torch.ones(4, WIDTH, requires_grad=True)
        loss = loop.module(x)
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + grad.square().sum()

    def work(comm):
        found = []
        for adamw in (EARLY, AdamWOptions()):
            loop = Loop(comm, stage, adamw=adamw)
            for _ in range(2):
                penalised(loop).backward()
                loop.optimizer.step()
                loop.optimizer.zero_grad()
            found.append(loop.state())
        assert_same_bits(*found)
        loop = Loop(comm, stage)
        before = loop.own()
        with pytest.raises(ArgumentError, match="create_graph=True"):
            loop.loss().backward(create_graph=True)
        assert all(map(torch.equal, before, loop.own()))
        loop.optimizer.zero_grad()
        loop.take()

    worlds(2).run(work)


def test_a_backward_inside_unsharded_is_refused_at_stage_3(worlds):
    def work(comm):
        loop = Loop(comm, 3)
        before = loop.own()
        with zero.unsharded(loop.module):
            loss = loop.loss()
            with pytest.raises(ArgumentError, match=r"inside unsharded\(\)"):
                loss.backward()
        assert all(map(torch.equal, before, loop.own()))
        loop.optimizer.zero_grad()
        loop.take()

    worlds(2).run(work)


def test_what_was_looked_up_outside_is_compared_before_its_update(worlds, monkeypatch):
    """A unit that is open is compared with its peers' chunks before an update changes them."""

    def work(comm, shuts):
        loop = Loop(comm, 3, reshard_after_forward=False)
        loop.take()
        loss = loop.loss()
        for layer in loop.module.layers:
            layer.weight.sum().item()
        loop.engine.unsharder.open()
        with nullcontext() if shuts else pytest.raises(ArgumentError, match="changed in place"):
            loss.backward()

    worlds(2).run(work, True)
    monkeypatch.setattr(Unsharder, "close_bucket", lambda *_: None)
    worlds(2).run(work, False)


# ---- when something fails -----------------------------------------------------------------------


@covering(strength=1, on=[None, 1], stage=[2, 3], overlap=[False, True])
def test_a_backward_that_raises_halfway_leaves_the_optimizer_partly_updated(
    worlds, tmp_path, stage, on, overlap
):
    """On all ranks or one: later buckets stay unchanged, all ranks raise, and a load recovers."""

    def work(comm):
        loop = Loop(comm, stage, overlap=overlap)
        loop.take(2)
        zero.save(tmp_path, 2, loop.module, loop.optimizer)
        wanted, before = loop.state(), loop.own()
        loop.fail_at(2, on)
        with pytest.raises(RingcommError, match=r"rank [01] of 2.*raised before its end"):
            loop.optimizer.step()
        same = [bool(torch.equal(a, b)) for a, b in zip(before, loop.own(), strict=True)]
        assert same == [True, True, True, False, False]
        loop.optimizer.zero_grad()
        for call in (
            loop.optimizer.step,
            loop.take,
            loop.optimizer.state_dict,
            lambda: zero.save(tmp_path, 3, loop.module, loop.optimizer),
        ):
            with pytest.raises(RingcommError, match="failed halfway"):
                call()
        loop.optimizer.zero_grad()
        zero.load(tmp_path, loop.module, loop.optimizer)
        assert_same_bits(loop.state(), wanted)
        # A load directly after such a backward recovers as well.
        loop.fail_at(1)
        zero.load(tmp_path, loop.module, loop.optimizer)
        assert_same_bits(loop.state(), wanted)
        loop.take(2)

    worlds(2).run(work)


@covering(strength=1, on=[1, None], stage=[2, 3])
def test_a_backward_that_raises_before_any_update_is_forgotten(worlds, on, stage):
    def work(comm):
        loop, wanted = Loop(comm, stage), Loop(comm, stage, adamw=AdamWOptions())
        for each in (loop, wanted):
            each.take(2)
            each.fail_at(LAYERS - 1, on)
            each.optimizer.zero_grad()
            each.take(2)
        assert_same_bits(loop.state(), wanted.state())

    worlds(2).run(work)


@pytest.mark.parametrize(
    ("stage", "on_rank_1", "error", "text"),
    [(2, 0.5, MismatchError, "lr"), (3, -1.0, ArgumentError, "lr: expected a number >= 0")],
)
def test_hyper_parameters_of_one_rank_stop_all_before_anything_changes(
    worlds, stage, on_rank_1, error, text
):
    def work(comm):
        loop = Loop(comm, stage)
        loop.take()
        before, group = loop.own(), loop.optimizer.param_groups[0]
        group["lr"] = on_rank_1 if comm.rank == 1 else 1e-2
        loop.loss().backward()
        with pytest.raises(error, match=text):
            loop.optimizer.step()
        assert all(map(torch.equal, before, loop.own()))
        group["lr"] = 1e-2
        loop.optimizer.zero_grad()
        loop.take()
        assert not any(map(torch.equal, before, loop.own()))

    worlds(2).run(work)


def test_an_error_of_the_disk_is_told_at_the_step(worlds, folder, monkeypatch):
    """No rank waits for the rank whose disk fails at some transfer of a backward."""
    broken = [False]
    wait = ringcomm.offload.scratch.Transfer.wait

    def failing(self):
        wait(self)
        if broken[0] and "rank 1" in self._scratch.what:
            raise DiskError("an error of the test")

    monkeypatch.setattr(ringcomm.offload.scratch.Transfer, "wait", failing)

    def work(comm, stage, overlap):
        options = replace(EARLY, offload_state=on_disk(folder))
        loop = Loop(comm, stage, adamw=options, overlap=overlap)
        loop.take(2)
        comm.barrier()
        broken[0] = True
        loop.loss().backward()
        with pytest.raises(DiskError, match="an error of the test"):
            loop.optimizer.step()
        with pytest.raises(RingcommError, match="failed halfway"):
            loop.optimizer.step()

    for stage, overlap in ((2, True), (3, False)):
        worlds(2).run(work, stage, overlap)
        broken[0] = False


# ---- optimizers that come and go ----------------------------------------------------------------


@pytest.mark.parametrize("stage", [2, 3])
def test_a_group_that_comes_later_is_updated_too(worlds, stage):
    def work(comm):
        found = []
        for adamw in (EARLY, AdamWOptions()):
            module: Any = zero.shard(deepcopy(DEEP), stage, comm=comm)
            first, *others = module.parameters()
            first.requires_grad_(False)
            optimizer = AdamW(others, lr=1e-2, options=adamw)
            for turn in range(4):
                if turn == 2:
                    first.requires_grad_(True)
                    optimizer.add_param_group({"params": [first], "lr": 3e-2})
                module(torch.ones(4, WIDTH) * (turn + comm.rank)).backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(state_of(module, optimizer))
        assert_same_bits(*found)

    worlds(2).run(work)


@pytest.mark.parametrize("stage", [2, 3])
def test_another_optimizer_takes_the_place_of_one_that_is_gone(worlds, stage):
    def work(comm):
        loop = Loop(comm, stage)
        loop.take()
        loop.optimizer = None
        with pytest.raises(ArgumentError, match="is gone"):
            loop.loss().backward()
        loop.module.zero_grad()
        for options in (AdamWOptions(), EARLY):
            loop.optimizer = AdamW(loop.params, lr=1e-2, options=options)
            loop.optimizer.prepare()
            before = loop.own()
            loop.take()
            assert not any(map(torch.equal, before, loop.own()))
            loop.optimizer = None

    worlds(2).run(work)


@pytest.mark.parametrize("stage", [2, 3])
def test_writes_between_steps_are_followed_by_masters(worlds, stage):
    """Version counters that an update raises are not mistaken for such writes."""

    def work(comm):
        found = []
        for adamw in (EARLY, AdamWOptions()):
            loop = Loop(comm, stage, adamw=adamw, precision=BF16)
            loop.take(2)
            taken = loop.engine.placement.owner.written
            expected = list(taken._versions)
            taken.take_over()
            assert taken._versions == expected
            with zero.unsharded(loop.module, write_from=0), torch.no_grad():
                loop.params[1].mul_(1.5)
            if stage == 2:
                with torch.no_grad():
                    loop.params[2].add_(0.25)
            loop.take(2)
            found.append(loop.state())
        assert_same_bits(*found)

    worlds(2).run(work)


def test_parameters_without_elements_count_their_steps(worlds):
    class Empty(Deep):
        def __init__(self) -> None:
            super().__init__()
            self.nothing = nn.Parameter(torch.zeros(0))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.nothing.sum()

    made = Empty()

    def work(comm, stage):
        found = []
        for adamw in (EARLY, AdamWOptions()):
            loop = Loop(comm, stage, made, adamw)
            loop.take(2)
            found.append(loop.state())
        assert_same_bits(*found)
        assert all(value == 2 for name, value in found[0].items() if name.endswith("step"))
        assert sum(name.endswith("step") for name in found[0]) == LAYERS + 1

    for stage in (2, 3):
        worlds(2).run(work, stage)


class InParts(torch.autograd.Function):
    """Adds a bias without reading its values; a separate backward computes the bias's gradient."""

    @staticmethod
    def forward(ctx, x, bias):
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.out = ctx.x + bias
        return ctx.out.detach()

    @staticmethod
    def backward(ctx, grad):
        torch.autograd.backward(ctx.out, grad)
        return ctx.x.grad, None


@pytest.mark.parametrize("stage", [2, 3])
def test_a_gradient_that_comes_after_the_update_is_refused(worlds, stage):
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = InParts.apply(x.requires_grad_(), self.bias)
            return x.square().mean()

    made = Late()

    def work(comm):
        loop = Loop(comm, stage, made)
        with pytest.raises(ArgumentError, match="brings a parameter's gradient in parts"):
            loop.loss().backward()

    worlds(2).run(work)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_parameter_that_is_frozen_after_its_gradient_came_is_refused(worlds, stage):
    def work(comm):
        loop = Loop(comm, stage)
        before = loop.own()
        with zero.no_sync(loop.module):
            loop.loss().backward()
        loop.params[-1].requires_grad_(False)
        loop.loss().backward()
        with pytest.raises(ArgumentError, match="was frozen after its gradient had come"):
            loop.optimizer.step()
        assert all(map(torch.equal, before, loop.own()))

    worlds(2).run(work)


def test_a_write_while_backward_runs_is_refused_at_stage_2(worlds):
    """Masters would undo the write; torch's version counters show it."""

    def work(comm):
        loop = Loop(comm, 2, precision=BF16)
        loop.take()

        def write(grad: Tensor) -> None:
            with torch.no_grad():
                loop.params[0].mul_(2)

        loss = loop.loss()
        loop.params[1].register_hook(write)
        with pytest.raises(ArgumentError, match="changed in place while backward"):
            loss.backward()

    worlds(2).run(work)


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_held_of_reduced_gradients_is_what_the_estimate_says(folder, world_size):
    model = ModelElems(LAYERS * WIDTH * WIDTH, largest=WIDTH * WIDTH)
    options = zero.ZeroOptions(bucket_elems=WIDTH * WIDTH)
    training = Training(model, world_size, options=options, optimizer=EARLY)

    def work(comm, stage, disk):
        loop = Loop(comm, stage, adamw=replace(EARLY, offload_state=disk))
        loop.take()
        own = loop.optimizer.sharded_step().backend._own
        held = 0 if own is None else own.nbytes
        told = replace(training, optimizer=replace(EARLY, offload_state=disk))
        assert (
            told.state(stage).grads
            == sum(b.shard.nbytes for b in loop.engine.reduction.buckets)
            == 0
        )
        assert held == told.buffers(stage).grad_shard

    # A separate world: if a test fails, ranks do not drop its modules at the same moment.
    with ringcomm.local_world(world_size) as world:
        for stage in (2, 3):
            for disk in (None, on_disk(folder)):
                world.run(work, stage, disk)
    rounded = zero.Precision(param=torch.bfloat16, reduce=torch.bfloat16)
    training = Training(model, 2, options=replace(options, precision=rounded), optimizer=EARLY)
    assert training.buffers(2).grad_shard == 6 * WIDTH * WIDTH // 2


@pytest.mark.parametrize("stage", [2, 3])
def test_the_step_raises_the_first_fault_of_the_communicator(stage):
    def work(comm):
        loop = Loop(comm, stage, overlap=True)
        loop.take()
        if comm.rank == 1:
            loop.module.layers[1].register_forward_hook(
                lambda _, __, out: out.register_hook(lambda _: comm.abort("by the test")) and None
            )
        with suppress(RingcommError):
            loop.loss().backward()
        with pytest.raises(RingcommError, match="by the test"):
            loop.optimizer.step()

    with ringcomm.local_world(2, timeout=60) as world:
        world.run(work)


class OwnWay(Deep):
    """Each rank skips a different layer, and all ranks skip the third layer."""

    def forward(self, x: Tensor, left_out: int = 0) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = x if number in (2, left_out) else torch.tanh(layer(x))
        return x.square().mean()


@covering(strength=1, unused=["skip", "zero"], stage=[2, 3])
def test_ranks_that_use_different_parameters(worlds, unused, stage):
    made = OwnWay()

    def work(comm):
        found = []
        for adamw in (EARLY, AdamWOptions()):
            loop = Loop(comm, stage, made, replace(adamw, unused=unused))
            for turn in range(3):
                x = torch.ones(4, WIDTH) * (turn + 1)
                loop.module(x, left_out=3 * comm.rank).backward()
                loop.optimizer.step()
                loop.optimizer.zero_grad()
            found.append(loop.state())
        assert_same_bits(*found)

    worlds(2).run(work)


def test_a_bucket_on_its_way_has_come_before_its_chunks_change(worlds):
    def work(comm):
        loop = Loop(comm, 3, overlap=True)
        unsharder, bucket = loop.engine.unsharder, loop.engine.stored[0]
        unsharder._start([bucket])
        unsharder.close_bucket(bucket)
        assert bucket.is_unsharded and bucket.coming is None
        unsharder.reshard_all()
        # A prefetch guess does not unshard the bucket again, and a request is refused.
        unsharder._last = [id(unit) for unit in loop.engine.setup.units]
        unsharder.need(loop.engine.setup.units[0])
        assert not bucket.is_unsharded and not unsharder._coming
        unsharder.reopen()
        unsharder.need(loop.engine.setup.units[1])
        assert bucket.is_unsharded

    worlds(2).run(work)
