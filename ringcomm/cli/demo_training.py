"""The same GPT trained side by side: on ringcomm and Gloo, and at all stages of ZeRO."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ringcomm import zero
from ringcomm.cli.demo_collectives import Pair
from ringcomm.examples.gpt.config import EngineConfig, ModelConfig, TrainConfig
from ringcomm.examples.gpt.corpus import Corpus
from ringcomm.examples.gpt.engines import DDPEngine, Trainer, TrainingGroup, build_engine, new_model
from ringcomm.examples.gpt.report import ClosedForm, MemoryMeter
from ringcomm.launch import World
from ringcomm.zero.estimate import STAGES

# Second part of the demo: the same GPT trained on ringcomm and on Gloo, block beside block.

SEED = 1
BATCH = 8
LEARNING_RATE = 2e-3
MIN_BLOCKS = 3
WARM_UP_STEPS = 2  # the first builds DDP's buckets in guessed order, the second rebuilds them


@dataclass(frozen=True)
class Contest:
    """A model and the steps it is trained for on each system: at most ``blocks`` timed blocks.

    After ``limit_s`` seconds no further block begins, so that a slow machine is done in time too.
    """

    config: TrainConfig
    blocks: int
    limit_s: float

    @property
    def steps_per_block(self) -> int:
        """Steps that one system runs before the other has its turn."""
        return (self.config.steps - WARM_UP_STEPS) // self.blocks


def contest(model: ModelConfig, steps_per_block: int, blocks: int, limit_s: float) -> Contest:
    """A contest of ``blocks * steps_per_block`` timed steps after the warm-up."""
    steps = WARM_UP_STEPS + blocks * steps_per_block
    return Contest(TrainConfig(model, BATCH, steps, LEARNING_RATE, SEED), blocks, limit_s)


@dataclass(frozen=True)
class Result:
    """The result of a contest; losses in nats per byte, speeds are medians over the blocks.

    ``loss_difference`` is the largest over all steps and ranks, ``unequal_weights`` the number of
    weights that differ in any bit after the last step: both are 0 when the systems agree.
    """

    parameters: int
    model: ModelConfig
    tokens_per_step: int
    steps: int
    gloo_tokens_per_s: float
    ringcomm_tokens_per_s: float
    ratio: float
    first_loss: float
    last_loss: float
    held_out_before: float
    held_out_after: float
    loss_difference: float
    unequal_weights: int

    @property
    def equal(self) -> bool:
        """True if every loss of every step and every final weight is bitwise equal."""
        return self.loss_difference == 0 and self.unequal_weights == 0


Report = Callable[[int, float], None]  # (blocks done on both systems, loss)


def train_both(plan: Contest, corpus: Corpus, world: World, pair: Pair, report: Report) -> Result:
    """Train the same model from the same weights on both systems and compare every step."""
    gloo, ringcomm = (
        _Side(Trainer(plan.config, corpus, world, _ddp(plan.config, group)), group)
        for group in (pair.gloo, pair.ringcomm)
    )
    held_out_before = gloo.trainer.held_out_loss()
    for side in (gloo, ringcomm):
        side.run(range(WARM_UP_STEPS))
    gloo_s, ringcomm_s = _alternate(plan, gloo, ringcomm, pair, report)
    tokens_per_step = plan.config.batch * plan.config.model.context
    block_tokens = tokens_per_step * plan.steps_per_block
    losses = gloo.trainer.mean_over_ranks(torch.stack(gloo.losses))
    return Result(
        parameters=sum(param.numel() for param in gloo.trainer.engine.model.parameters()),
        model=plan.config.model,
        tokens_per_step=tokens_per_step,
        steps=len(gloo.losses),
        gloo_tokens_per_s=block_tokens / statistics.median(gloo_s),
        ringcomm_tokens_per_s=block_tokens / statistics.median(ringcomm_s),
        ratio=statistics.median(g / r for g, r in zip(gloo_s, ringcomm_s, strict=True)),
        first_loss=losses[0].item(),
        last_loss=losses[-1].item(),
        held_out_before=held_out_before,
        held_out_after=ringcomm.trainer.held_out_loss(),
        loss_difference=_largest_difference(gloo, ringcomm, pair),
        unequal_weights=_unequal_weights(gloo, ringcomm, pair),
    )


def _ddp(config: TrainConfig, group: dist.ProcessGroup) -> DDPEngine:
    return DDPEngine(new_model(config), TrainingGroup(group, torch.device("cpu")))


def _alternate(
    plan: Contest, gloo: _Side, ringcomm: _Side, pair: Pair, report: Report
) -> tuple[list[float], list[float]]:
    """Seconds of every block on (Gloo, ringcomm); which system goes first changes every time."""
    rounds: list[Tensor] = []
    started = time.perf_counter()
    sides = [(0, gloo), (1, ringcomm)]
    for block in range(plan.blocks):
        first = WARM_UP_STEPS + block * plan.steps_per_block
        # Seconds of this block's two turns, and since the start: the slowest rank's count.
        clock = torch.zeros(3, dtype=torch.float64)
        for column, side in sides if block % 2 == 0 else sides[::-1]:
            clock[column] = side.run(range(first, first + plan.steps_per_block))
        clock[2] = time.perf_counter() - started
        dist.all_reduce(clock, dist.ReduceOp.MAX, group=pair.gloo)
        rounds.append(clock[:2])
        report(block + 1, ringcomm.losses[-1].item())
        if clock[2] > plan.limit_s and block + 1 >= MIN_BLOCKS:
            break
    gloo_s, ringcomm_s = torch.stack(rounds).T.tolist()
    return gloo_s, ringcomm_s


class _Side:
    """One system's trainer and the losses of this rank so far."""

    def __init__(self, trainer: Trainer, group: dist.ProcessGroup) -> None:
        self.trainer = trainer
        self.losses: list[Tensor] = []
        self._group = group

    def run(self, steps: range) -> float:
        """Train ``steps``; the seconds from a common start."""
        dist.barrier(group=self._group)
        started = time.perf_counter()
        self.losses += [self.trainer.step(index) for index in steps]
        return time.perf_counter() - started


def _largest_difference(gloo: _Side, ringcomm: _Side, pair: Pair) -> float:
    """Largest difference of two losses over all steps and ranks; NaN differs from everything."""
    difference = (torch.stack(gloo.losses) - torch.stack(ringcomm.losses)).abs().max()
    difference = difference.nan_to_num(nan=float("inf")).double()
    dist.all_reduce(difference, dist.ReduceOp.MAX, group=pair.gloo)
    return difference.item()


def _unequal_weights(gloo: _Side, ringcomm: _Side, pair: Pair) -> int:
    """Weights that differ after the last step, summed over the ranks."""
    unequal = torch.zeros(1, dtype=torch.int64)
    for ours, theirs in zip(
        gloo.trainer.engine.model.parameters(),
        ringcomm.trainer.engine.model.parameters(),
        strict=True,
    ):
        unequal += (ours != theirs).sum()
    dist.all_reduce(unequal, group=pair.gloo)
    return int(unequal)


# Third part of the demo: the same training at all stages of ZeRO, beside DDP and FSDP2 on Gloo.

STAGES_WARM_UP_STEPS = 3  # buckets are laid out in the first, and DDP does so again in the second
MIN_ROUNDS = 3
DDP, FSDP2 = "DDP, Gloo", "FSDP2, Gloo"


@dataclass(frozen=True)
class Entrant:
    """A participant: its name, its engine, and the stage whose closed form its memory has."""

    name: str
    engine: EngineConfig
    stage: int


ENTRANTS = (
    *(Entrant(f"zero, stage {stage}", EngineConfig("zero", stage), stage) for stage in STAGES),
    Entrant(DDP, EngineConfig("ddp", backend="gloo"), 0),
    Entrant(FSDP2, EngineConfig("fsdp2", backend="gloo"), 3),
)


@dataclass(frozen=True)
class Tour:
    """A model, and at most ``rounds`` timed rounds in which every entrant takes some steps.

    After ``limit_s`` seconds no further round begins, so that a slow machine is done in time too.
    """

    config: TrainConfig
    steps_per_round: int
    rounds: int
    limit_s: float


def tour(model: ModelConfig, steps_per_round: int, rounds: int, limit_s: float) -> Tour:
    """A tour of ``rounds * steps_per_round`` timed steps after the warm-up."""
    steps = STAGES_WARM_UP_STEPS + rounds * steps_per_round
    config = TrainConfig(model, BATCH, steps, LEARNING_RATE, SEED)
    return Tour(config, steps_per_round, rounds, limit_s)


@dataclass(frozen=True)
class Standing:
    """The result of one entrant.

    Attributes:
        name: of the entrant.
        parameters: of the model.
        is_stage: whether it must have the losses and weights of stage 0.
        steps: that it took.
        first_loss: in nats per byte, mean of the ranks.
        last_loss: of the last step.
        unequal_losses: losses that differ from stage 0's in any bit, over all steps and ranks.
        unequal_weights: weights that do after the last step.
        loss_difference: the largest difference of a loss from stage 0's.
        state_bytes: the closed form of its model state.
        buffer_bytes: that of its working buffers; 0 where it has none of ringcomm's.
        held_bytes: what it added to a rank's memory, between backward and the optimizer's step, on
            the rank where that is most.
        step_s: median of a step over the rounds.
        ddp_ratio: median over the rounds of DDP's time over its own.
        fsdp2_ratio: the same of FSDP2's.
    """

    name: str
    parameters: int
    is_stage: bool
    steps: int
    first_loss: float
    last_loss: float
    unequal_losses: int
    unequal_weights: int
    loss_difference: float
    state_bytes: int
    buffer_bytes: int
    held_bytes: int
    step_s: float
    ddp_ratio: float
    fsdp2_ratio: float

    @property
    def equal(self) -> bool:
        """True if all losses and weights are stage 0's, to the bit."""
        return self.unequal_losses == 0 and self.unequal_weights == 0


def tour_stages(
    plan: Tour, corpus: Corpus, world: World, pair: Pair, report: Report
) -> list[Standing]:
    """Train the same model from the same weights on every entrant and compare every step."""
    runners = [_Runner(entrant, plan, corpus, world, pair) for entrant in ENTRANTS]
    rounds_s = _take_rounds(plan, runners, pair, report)
    step_s = dict(zip((e.name for e in ENTRANTS), rounds_s / plan.steps_per_round, strict=True))
    return [runner.standing(runners[0], step_s) for runner in runners]


def _take_rounds(plan: Tour, runners: Sequence[_Runner], pair: Pair, report: Report) -> Tensor:
    """Seconds of (entrant, round); every round begins with the next entrant."""
    rounds: list[Tensor] = []
    started = time.perf_counter()
    for number in range(plan.rounds):
        first = STAGES_WARM_UP_STEPS + number * plan.steps_per_round
        # Seconds of each entrant, and since the start: the slowest rank's count.
        clock = torch.zeros(len(runners) + 1, dtype=torch.float64)
        for turn in range(len(runners)):
            column = (number + turn) % len(runners)
            clock[column] = runners[column].run(range(first, first + plan.steps_per_round))
        clock[-1] = time.perf_counter() - started
        dist.all_reduce(clock, dist.ReduceOp.MAX, group=pair.gloo)
        rounds.append(clock[:-1])
        report(number + 1, runners[0].losses[-1].item())
        if clock[-1] > plan.limit_s and number + 1 >= MIN_ROUNDS:
            break
    return torch.stack(rounds, dim=1)


class _Runner:
    """One entrant on this rank: its trainer, its losses so far and its memory."""

    def __init__(
        self, entrant: Entrant, plan: Tour, corpus: Corpus, world: World, pair: Pair
    ) -> None:
        self.losses: list[Tensor] = []
        self._entrant = entrant
        self._is_stage = entrant.engine.name == "zero"
        self._pair = pair
        place = TrainingGroup(pair.ringcomm if self._is_stage else pair.gloo, torch.device("cpu"))
        meter = MemoryMeter(place.device, has_heap=True, trims=True)
        before_bytes = meter.held_bytes()
        gpt = new_model(plan.config)
        self._parameters = gpt.parameter_elems
        self._closed_form = ClosedForm.of(gpt, entrant.stage, world.size, torch.float32, False)
        self._trainer = Trainer(
            plan.config, corpus, world, build_engine(gpt, entrant.engine, place)
        )
        held: list[int] = []
        for index in range(STAGES_WARM_UP_STEPS):
            loss = self._trainer.step(index, lambda: held.append(meter.held_bytes()))
            self.losses.append(loss)
        self._held_bytes = held[-1] - before_bytes

    def run(self, steps: range) -> float:
        """Train ``steps``; the seconds from a common start."""
        dist.barrier(group=self._trainer.engine.place.group)
        started = time.perf_counter()
        self.losses += [self._trainer.step(index) for index in steps]
        return time.perf_counter() - started

    def weights(self) -> dict[str, Tensor]:
        """Of a stage."""
        return zero.full_state_dict(self._trainer.engine.module)

    def standing(self, first: _Runner, step_s: Mapping[str, Tensor]) -> Standing:
        """Returns its result, compared with that of ``first``; collective.

        Args:
            first: stage 0.
            step_s: seconds of a step by entrant and round.
        """
        losses, expected = torch.stack(self.losses), torch.stack(first.losses)
        unequal_weights = 0
        if self._is_stage:
            weights = self.weights()
            unequal_weights = sum(
                int((weights[name] != tensor).sum()) for name, tensor in first.weights().items()
            )
        unequal = torch.tensor([int((losses != expected).sum()), unequal_weights])
        dist.all_reduce(unequal, group=self._pair.gloo)
        difference = (losses - expected).abs().max().nan_to_num(nan=float("inf"))
        largest = torch.tensor([difference.item(), self._held_bytes], dtype=torch.float64)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._pair.gloo)
        means = self._trainer.mean_over_ranks(losses)
        own_s = step_s[self._entrant.name]
        return Standing(
            name=self._entrant.name,
            parameters=self._parameters,
            is_stage=self._is_stage,
            steps=len(self.losses),
            first_loss=means[0].item(),
            last_loss=means[-1].item(),
            unequal_losses=int(unequal[0]),
            unequal_weights=int(unequal[1]),
            loss_difference=largest[0].item(),
            state_bytes=self._closed_form.state,
            buffer_bytes=self._closed_form.buffers if self._is_stage else 0,
            held_bytes=int(largest[1]),
            step_s=statistics.median(own_s.tolist()),
            ddp_ratio=statistics.median((step_s[DDP] / own_s).tolist()),
            fsdp2_ratio=statistics.median((step_s[FSDP2] / own_s).tolist()),
        )
