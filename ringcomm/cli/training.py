"""The training loop that every rank runs."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ringcomm.cli.config import ModelConfig, TrainConfig
from ringcomm.cli.corpus import Corpus, Source, find_source, load, min_corpus_bytes
from ringcomm.cli.gpt import GPT
from ringcomm.cli.progress import ProgressBar
from ringcomm.cli.rank import World, joined_world
from ringcomm.errors import MismatchError

HELD_OUT_BATCHES = 8
WARM_UP_SHARE = 0.05
FINAL_RATE_SHARE = 0.1
PRINTED_LOSSES = 10


class Trainer:
    """A model, its optimizer and its DDP wrapper on one process group."""

    def __init__(
        self, config: TrainConfig, corpus: Corpus, world: World, group: dist.ProcessGroup | None
    ) -> None:
        self.config = config
        self._corpus = corpus
        self._world = world
        self._group = group
        self._rows_per_rank = config.sequences_per_rank(world.size)
        torch.manual_seed(config.seed)
        self.model = GPT(config.model)
        self._replica = DistributedDataParallel(
            self.model, process_group=group, gradient_as_bucket_view=True
        )
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )

    def step(self, index: int) -> Tensor:
        """Train on global batch ``index``; the mean loss of this rank's rows, a scalar in nats."""
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate(index)
        tokens, targets = self._corpus.batch(
            self.config.seed, index, self.config.batch, self.config.model.context
        )
        loss: Tensor = self._replica(self._own_rows(tokens), self._own_rows(targets))
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Mean loss in nats per byte over held-out text, over all ranks."""
        losses = []
        for index in range(HELD_OUT_BATCHES):
            tokens, targets = self._corpus.held_out_batch(
                self.config.seed, index, self.config.batch, self.config.model.context
            )
            losses.append(self.model(self._own_rows(tokens), self._own_rows(targets)))
        return self.mean_over_ranks(torch.stack(losses)).mean().item()

    def mean_over_ranks(self, losses: Tensor) -> Tensor:
        """Average ``losses`` (any shape) over the ranks, in FP64."""
        total = losses.double()
        dist.all_reduce(total, group=self._group)
        return total / self._world.size

    def _own_rows(self, batch: Tensor) -> Tensor:
        """This rank's share (B / ranks, T) of a global batch (B, T)."""
        start = self._world.rank * self._rows_per_rank
        return batch[start : start + self._rows_per_rank]

    def _learning_rate(self, index: int) -> float:
        """Linear warm-up, then a cosine down to a tenth."""
        steps = self.config.steps
        warm_up = max(1, int(steps * WARM_UP_SHARE))
        if index < warm_up:
            return self.config.learning_rate * (index + 1) / warm_up
        progress = min(1.0, (index - warm_up) / max(1, steps - warm_up))
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        return self.config.learning_rate * (FINAL_RATE_SHARE + (1 - FINAL_RATE_SHARE) * cosine)


@dataclass(frozen=True)
class Outcome:
    """What a run gave: losses in nats per byte, averaged over the ranks."""

    losses: list[float]
    held_out_before: float
    held_out_after: float
    tokens_per_s: float


def run_rank(settings: Mapping[str, Any]) -> int:
    """Train as one rank; ``settings`` are those that ``train.py`` puts together."""
    config = TrainConfig(
        **{**settings["config"], "model": ModelConfig(**settings["config"]["model"])}
    )
    with joined_world(settings["backend"]) as world:
        source = find_source(settings["data"], min_corpus_bytes(config.model.context))
        corpus = load_same_on_all_ranks(source, world)
        trainer = Trainer(config, corpus, world, group=None)
        speaks = world.rank == 0
        if speaks:
            print(_headline(settings["backend"], trainer, source, world), flush=True)
        outcome = train(trainer, speaks)
        if speaks:
            print(_summary(outcome), flush=True)
            if settings["json"] is not None:
                record = {**settings, "ranks": world.size, "outcome": vars(outcome)}
                Path(settings["json"]).write_text(json.dumps(record, indent=2) + "\n")
    return 0


def load_same_on_all_ranks(source: Source, world: World) -> Corpus:
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


def train(trainer: Trainer, speaks: bool) -> Outcome:
    """Run all steps, with a progress bar where this rank ``speaks``."""
    config = trainer.config
    before = trainer.held_out_loss()
    losses: list[Tensor] = []
    tokens_per_step = config.batch * config.model.context
    # The first step builds DDP's buckets and the optimizer's state: it is no measure of speed.
    timed_from = min(1, config.steps - 1)
    with ProgressBar("training", config.steps) as bar:
        for index in range(config.steps):
            if index == timed_from:
                started = time.perf_counter()
            losses.append(trainer.step(index))
            if speaks and index >= timed_from:
                trained = tokens_per_step * (index - timed_from + 1)
                speed = trained / (time.perf_counter() - started)
                bar.show(index + 1, f"loss {losses[-1].item():.3f}  {speed:,.0f} tokens/s")
    elapsed_s = time.perf_counter() - started
    return Outcome(
        losses=trainer.mean_over_ranks(torch.stack(losses)).tolist(),
        held_out_before=before,
        held_out_after=trainer.held_out_loss(),
        tokens_per_s=tokens_per_step * (config.steps - timed_from) / elapsed_s,
    )


def _headline(backend: str, trainer: Trainer, source: Source, world: World) -> str:
    model, config = trainer.model.config, trainer.config
    return (
        f"ranks   {world.size} on {backend}, {world.threads} compute thread(s) each\n"
        f"text    {source}\n"
        f"model   {trainer.model.parameter_elems / 1e6:.3g} M parameters: width {model.width}, "
        f"depth {model.depth}, heads {model.heads}, context {model.context} bytes\n"
        f"steps   {config.steps} of {config.batch} x {model.context} bytes"
    )


def _summary(outcome: Outcome) -> str:
    steps = len(outcome.losses)
    shown = sorted({round(i * (steps - 1) / (PRINTED_LOSSES - 1)) for i in range(PRINTED_LOSSES)})
    lines = [f"step {index:>6}   loss {outcome.losses[index]:.4f}" for index in shown]
    lines += [
        f"held-out loss {outcome.held_out_before:.4f} -> {outcome.held_out_after:.4f} nats per "
        f"byte ({outcome.held_out_after / math.log(2):.3f} bits)",
        f"speed         {outcome.tokens_per_s:,.0f} tokens/s",
    ]
    return "\n".join(lines)
