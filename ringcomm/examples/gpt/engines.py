"""A step of training on one rank, shared by ringcomm.zero, or by torch's DDP or FSDP2."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ringcomm import zero
from ringcomm.c10d.process_group import ProcessGroup as RingcommGroup
from ringcomm.errors import ArgumentError, MismatchError
from ringcomm.examples.gpt.config import DEFAULT_LOSS_SCALE, EngineConfig, TrainConfig
from ringcomm.examples.gpt.corpus import Corpus, Source, load
from ringcomm.examples.gpt.model import GPT
from ringcomm.launch import RankPlace
from ringcomm.memory import Disk
from ringcomm.memory.scratch import ScratchFile
from ringcomm.optim import AdamW, AdamWOptions, LossScaleOptions, LossScaler
from ringcomm.zero import StepProfile

# What shares a training step among the ranks: ringcomm.zero, or torch's DDP or FSDP2.

PARAM_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
ADAMW: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.1}
MIB = 1 << 20


def tier_of(config: EngineConfig) -> Disk | None:
    """Returns where the optimizer's state lies, as ``AdamWOptions.tier`` has it."""
    return _disk(config.state_on, config.state_resident_mib, config.state_buffer_mib)


def params_tier_of(config: EngineConfig) -> Disk | None:
    """Returns where parameters lie, as ``ZeroOptions.tier`` has it."""
    return _disk(config.params_on, config.params_resident_mib, config.params_buffer_mib)


def _disk(folder: str | None, resident_mib: int | None, buffer_mib: int | None) -> Disk | None:
    if folder is None:
        return None
    resident_bytes = (resident_mib or 0) * MIB
    if buffer_mib is None:
        return Disk(folder, resident_bytes=resident_bytes)
    return Disk(folder, buffer_mib * MIB, resident_bytes)


@dataclass(frozen=True)
class TrainingGroup:
    """The ranks of an engine, and this rank's device."""

    group: dist.ProcessGroup
    device: torch.device

    @classmethod
    def of(cls, config: EngineConfig, rank: int) -> TrainingGroup:
        """Makes that of ``rank`` in the default group; takes its GPU, if ``config`` asks for GPUs.

        Raises:
            UnsupportedError: this process has no such GPU; says why.
        """
        group = dist.group.WORLD
        assert group is not None
        if config.device == "cpu":
            return cls(group, torch.device("cpu"))
        assert isinstance(group, RingcommGroup)
        device = group.communicator_on(f"cuda:{rank}").device
        torch.cuda.set_device(device)
        return cls(group, device)


class TrainingEngine(ABC):
    """A model that trains on all ranks, and its optimizer.

    Attributes:
        place: where it works.
        model: what is called where nothing is trained; tokens and targets, both (B, T) int64, give
            the mean loss in nats, a scalar.
        module: the same, for training.
        optimizer: of its parameters.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer

    def __init__(self, place: TrainingGroup, model: nn.Module) -> None:
        self.place = place
        self.model = model

    @abstractmethod
    def quiet(self) -> AbstractContextManager[None]:
        """Inside, backwards add to the gradients of this rank alone."""

    @abstractmethod
    def clip(self, max_norm: float) -> None:
        """Has the next step scale the gradient down to this norm."""

    def backward(self, loss: Tensor) -> None:
        """Adds the gradients of ``loss``, a scalar."""
        loss.backward()  # type: ignore[no-untyped-call]

    def zero_grad(self) -> None:
        """Drops the gradients, for the next step."""
        self.optimizer.zero_grad()

    @property
    def skipped_steps(self) -> int:
        """Steps that changed nothing, for an overflow."""
        return 0

    @property
    def loss_scale(self) -> float | None:
        """The factor of the losses; None where they have none."""
        return None


class ZeroEngine(TrainingEngine):
    """ringcomm.zero and ringcomm.optim.AdamW.

    Attributes:
        adamw: the optimizer.
        is_on_disk: whether its state is, or parameters are.
    """

    def __init__(self, gpt: GPT, config: EngineConfig, place: TrainingGroup) -> None:
        if not isinstance(place.group, RingcommGroup):
            raise ArgumentError(
                f"zero: expected a group of the backend ringcomm, got {place.group.name()}"
            )
        comm = place.group.communicator_on(place.device)
        self._stage, dtype = config.zero_stage, PARAM_DTYPES[config.dtype]
        precision = zero.Precision(param=dtype, buffer=dtype)
        options = zero.ZeroOptions(
            precision=precision,
            params=config.params or "node",
            state=config.state or "world",
            tier=params_tier_of(config),
        )
        super().__init__(place, gpt)
        self.module = zero.shard(gpt, self._stage, comm=comm, options=options)
        self._scaler: LossScaler | None = None
        if config.dtype == "fp16":
            begin = DEFAULT_LOSS_SCALE if config.loss_scale is None else config.loss_scale
            self._scaler = LossScaler(LossScaleOptions(init_scale=begin), device=place.device)
        self.adamw = AdamW(
            self.module.parameters(),
            options=AdamWOptions(tier=tier_of(config)),
            loss_scaler=self._scaler,
            **ADAMW,
        )
        self.optimizer = self.adamw

        self.is_on_disk = config.state_on is not None or config.params_on is not None

    @property
    def scratches(self) -> list[ScratchFile]:
        """This rank's files with the optimizer's state and with parameters, if there are any."""
        tier, placement = self.adamw.sharded_step().tier, self.adamw.placement
        found = []
        if tier is not None and isinstance(tier.blocks, ScratchFile):
            found.append(tier.blocks)
        if placement is not None and placement.store is not None:
            found.append(placement.store.file)
        return found

    def quiet(self) -> AbstractContextManager[None]:
        return zero.no_sync(self.module)

    def clip(self, max_norm: float) -> None:
        self.adamw.clip_grad_norm_(max_norm)

    def backward(self, loss: Tensor) -> None:
        super().backward(loss if self._scaler is None else self._scaler.scale(loss))

    def zero_grad(self) -> None:
        # At stages 0 and 1 gradients that stay are views of their bucket: nothing is held twice.
        self.adamw.zero_grad(set_to_none=self._stage >= 2)

    @property
    def skipped_steps(self) -> int:
        return int(self.adamw.skipped_steps.item())

    @property
    def loss_scale(self) -> float | None:
        return None if self._scaler is None else self._scaler.current.item()


class TorchEngine(TrainingEngine):
    """The part that DDP and FSDP2 share: torch's fused AdamW."""

    def __init__(self, place: TrainingGroup, model: nn.Module, module: nn.Module) -> None:
        super().__init__(place, model)
        self.module = module
        self.optimizer = torch.optim.AdamW(module.parameters(), fused=True, **ADAMW)

    def clip(self, max_norm: float) -> None:
        nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)


class DDPEngine(TorchEngine):
    """DistributedDataParallel."""

    def __init__(self, gpt: GPT, place: TrainingGroup) -> None:
        self._replica = DistributedDataParallel(
            gpt, process_group=place.group, gradient_as_bucket_view=True
        )
        super().__init__(place, gpt, self._replica)

    def quiet(self) -> AbstractContextManager[None]:
        return self._replica.no_sync()


class FSDP2Engine(TorchEngine):
    """fully_shard on every layer and on the whole."""

    def __init__(self, gpt: GPT, place: TrainingGroup) -> None:
        # Takes a second to import.
        from torch.distributed.fsdp import fully_shard

        mesh = DeviceMesh.from_group(place.group, place.device.type)
        for block in gpt.blocks:
            fully_shard(block, mesh=mesh)
        self._root = fully_shard(gpt, mesh=mesh)
        super().__init__(place, gpt, gpt)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        self._root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._root.set_requires_gradient_sync(True)


def build_engine(gpt: GPT, config: EngineConfig, place: TrainingGroup) -> TrainingEngine:
    """Prepares ``gpt``, which every rank has built with the same weights; collective.

    Raises:
        ArgumentError: the engine does not run on the group's backend.
    """
    gpt.checkpoints_activations = config.checkpoint_activations
    gpt.to(place.device)
    if config.name == "zero":
        return ZeroEngine(gpt, config, place)
    return DDPEngine(gpt, place) if config.name == "ddp" else FSDP2Engine(gpt, place)


# A step of training, and the loss on held-out text, on one rank.

HELD_OUT_BATCHES = 8
WARM_UP_SHARE = 0.05
FINAL_RATE_SHARE = 0.1


def new_model(config: TrainConfig) -> GPT:
    """The model with the weights that the seed gives."""
    torch.manual_seed(config.seed)
    return GPT(config.model)


class Trainer:
    """Trains on one engine, step by step.

    What a step does follows from its number, the parameters and the optimizer's state, so a run can
    begin at any step.

    Attributes:
        config: of the run.
        engine: with the model.
        profile: where the parts of a step are recorded; None records none.
    """

    def __init__(
        self, config: TrainConfig, corpus: Corpus, world: RankPlace, engine: TrainingEngine
    ) -> None:
        self.config = config
        self.engine = engine
        self.profile: StepProfile | None = None
        self._corpus = corpus
        self._world = world
        self._micro_rows = config.micro_sequences(world.size)

    def step(self, index: int, look: Callable[[], None] | None = None) -> Tensor:
        """Train on global batch ``index``.

        Args:
            index: of the step, from 0 on.
            look: called between backward and the optimizer's step.

        Returns:
            The mean loss of this rank's rows, an FP32 scalar in nats.
        """
        engine, last = self.engine, self.config.accum - 1
        self._set_learning_rate(index)
        batch = self._corpus.batch(
            self.config.seed, index, self.config.batch, self.config.model.context
        )
        total = torch.zeros((), device=engine.place.device)
        for number, (tokens, targets) in enumerate(self._own_rows(batch)):
            with nullcontext() if number == last else engine.quiet():
                with self._span("forward"):
                    loss = engine.module(tokens, targets) / self.config.accum
                with self._span("backward"):
                    engine.backward(loss)
            total += loss.detach()
        if look is not None:
            look()
        with self._span("step"):
            if self.config.clip is not None:
                engine.clip(self.config.clip)
            engine.optimizer.step()
            engine.zero_grad()
        return total

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Mean loss in nats per byte over held-out text, over all ranks."""
        losses = []
        for index in range(HELD_OUT_BATCHES):
            batch = self._corpus.held_out_batch(
                self.config.seed, index, self.config.batch, self.config.model.context
            )
            losses += [self.engine.model(*rows) for rows in self._own_rows(batch)]
        return self.mean_over_ranks(torch.stack(losses)).mean().item()

    def mean_over_ranks(self, losses: Tensor) -> Tensor:
        """Average ``losses`` (any shape) over the ranks, in FP64 on the CPU."""
        total = losses.double().cpu()
        dist.all_reduce(total, group=self.engine.place.group)
        return total / self._world.size

    def _own_rows(self, batch: tuple[Tensor, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's micro-batches of a global batch (B, T): (B / ranks / accum, T) each."""
        rows, device = self._micro_rows, self.engine.place.device
        for number in range(self.config.accum):
            start = (self._world.rank * self.config.accum + number) * rows
            tokens, targets = (part[start : start + rows].to(device) for part in batch)
            yield tokens, targets

    def _span(self, name: str) -> AbstractContextManager[None]:
        return nullcontext() if self.profile is None else self.profile.span(name, kind="compute")

    def _set_learning_rate(self, index: int) -> None:
        for group in self.engine.optimizer.param_groups:
            group["lr"] = self._learning_rate(index)

    def _learning_rate(self, index: int) -> float:
        """Linear warm-up, then a cosine down to a tenth."""
        steps = self.config.steps
        warm_up = max(1, int(steps * WARM_UP_SHARE))
        if index < warm_up:
            return self.config.learning_rate * (index + 1) / warm_up
        progress = min(1.0, (index - warm_up) / max(1, steps - warm_up))
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        return self.config.learning_rate * (FINAL_RATE_SHARE + (1 - FINAL_RATE_SHARE) * cosine)


def load_same_on_all_ranks(source: Source, world: RankPlace) -> Corpus:
    """Read the corpus; MismatchError when the ranks did not read the same bytes."""
    corpus = load(source)
    own = torch.tensor([corpus.checksum, corpus.train.numel()])
    seen = [torch.empty_like(own) for _ in range(world.size)]
    dist.all_gather(seen, own)
    if any(not torch.equal(own, other) for other in seen):
        raise MismatchError(
            f"training: the ranks read different text from {source.root}: (checksum, bytes) are "
            f"{[tuple(other.tolist()) for other in seen]}; give every rank the same files"
        )
    return corpus
