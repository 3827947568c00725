# SPDX-License-Identifier: Apache-2.0
"""Compares the losses of a GPT by optimizer, or by compression of gradients.

"optimizers" trains the GPT with AdamW and AdamW8bit on one rank. "compression" trains it with AdamW
at stage 2 on two nodes of two ranks, emulated by threads. All runs use the same text, weights and
batches. The first run is repeated with different initial weights: the difference between two runs
of one kind is the yardstick for the other differences. Losses are of held-out text.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

import ringcomm
from ringcomm.examples.corpus import Corpus, draw
from ringcomm.examples.train_gpt import GPT, ModelConfig

from .options import numbers, subject
from .report import LOSSES, row_of
from .run import Bench, Run
from .training import DATA, read_text

SIZE = SEQUENCES, CONTEXT = 16, 64
HELD_OUT_BATCHES = 16
PEAK, WARM_UP_STEPS = 2e-3, 50
NODES = [2, 2]
STAGE = 2


BeforeStep = Callable[[int, int], object]


class Curve(NamedTuple):
    """A training run: on one rank with the optimizer ``make``, or on nodes with ``compression``.

    ``seed`` is the seed of the initial weights, and ``state`` is as in
    :class:`ringcomm.zero.ZeroOptions`.
    """

    compression: Mapping[str, Any] | None = None
    seed: int = 0
    state: str = "world"
    make: Callable[..., Any] = ringcomm.optim.AdamW


RUNS: Mapping[str, Mapping[str, Curve]] = {
    "optimizers": {
        "AdamW": Curve(),
        "AdamW8bit": Curve(make=ringcomm.optim.AdamW8bit),
        "AdamW, other weights": Curve(seed=1),
    },
    "compression": {
        "fp32": Curve({}),
        "fp32, other weights": Curve({}, seed=1),
        "int8": Curve({"gradients": "int8"}),
        "int8, state=node": Curve({"gradients": "int8"}, state="node"),
        "fp8": Curve({"gradients": "fp8"}),
        "int4": Curve({"gradients": "int4"}),
        "int4, error feedback": Curve({"gradients": "int4", "error_feedback": True}),
        "int8, parameters int8": Curve({"gradients": "int8", "parameters": "int8"}),
        "int8, parameters fp8": Curve({"gradients": "int8", "parameters": "fp8"}),
    },
}


@torch.no_grad()
def held_out_loss(module: nn.Module, corpus: Corpus) -> float:
    """Returns the mean loss over the held-out batches, which are the same for all runs."""
    batches = (draw(corpus.held_out, 0, number, SIZE) for number in range(HELD_OUT_BATCHES))
    return statistics.fmean(float(module(*batch)) for batch in batches)


def _train(
    module: nn.Module,
    optimizer: Any,
    corpus: Corpus,
    marks: Sequence[int],
    rows: slice,
    before_step: BeforeStep,
) -> list[float]:
    """Trains on ``rows`` of each batch; returns the held-out loss after each step in ``marks``."""
    losses = []
    for step in range(marks[-1]):
        before_step(step, marks[-1])
        fall = 1.0 - max(0, step - WARM_UP_STEPS) / max(1, marks[-1] - WARM_UP_STEPS)
        optimizer.param_groups[0]["lr"] = PEAK * min(1.0, (step + 1) / WARM_UP_STEPS) * fall
        tokens, targets = draw(corpus.train, 0, step, SIZE)
        module(tokens[rows], targets[rows]).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 in marks:
            losses.append(held_out_loss(module, corpus))
    return losses


def curve(
    how: Curve,
    model: ModelConfig,
    corpus: Corpus,
    marks: Sequence[int],
    before_step: BeforeStep = lambda step, steps: None,
) -> list[float]:
    """Returns the held-out losses after the steps in ``marks``, which are sorted.

    Calls ``before_step`` with the number of each step and their count, on the first rank.
    """
    torch.manual_seed(how.seed)
    module = GPT(model)
    make = partial(how.make, lr=PEAK, weight_decay=0.1)
    if how.compression is None:
        optimizer = make(module.parameters(), comm="alone")
        return _train(module, optimizer, corpus, marks, slice(None), before_step)
    options = ringcomm.zero.ZeroOptions(
        state=how.state, compression=ringcomm.zero.Compression(**how.compression)
    )
    copies = [copy.deepcopy(module) for _ in range(sum(NODES))]

    def body(comm: ringcomm.Communicator) -> list[float]:
        torch.set_num_threads(1)
        sharded = ringcomm.zero.shard(copies[comm.rank], STAGE, comm=comm, options=options)
        rows = slice(comm.rank, None, comm.world_size)
        shown = before_step if comm.rank == 0 else lambda step, steps: None
        losses = _train(sharded, make(sharded.parameters()), corpus, marks, rows, shown)
        ringcomm.zero.remove_sharding(sharded)
        return losses

    with ringcomm.local_world(sum(NODES), nodes=NODES) as world:
        curves: list[list[float]] = world.run(body)
    return curves[0]


def measure(run: Run) -> None:
    asked = run.options
    model = ModelConfig(asked.width, asked.depth, 4, CONTEXT, tied=True)
    marks = sorted({max(1, asked.steps * part // 10) for part in (1, 2, 4, 6, 8, 10)})
    run.pacing.expect(len(RUNS[asked.what]))
    for name, each in RUNS[asked.what].items():
        run.pacing.begin()
        ranks = 1 if each.compression is None else sum(NODES)
        row = row_of("held_out_loss", f"{asked.width}x{asked.depth}", ranks, 0)
        found = curve(each, model, asked.corpus, marks, run.pacing.show_round)
        run.pacing.end()
        losses = zip(marks, found, strict=True)
        run.add([replace(row, system=name, count=m, loss=round(x, 5)) for m, x in losses], LOSSES)


BENCH = Bench(
    "curves",
    __doc__,
    measure,
    (subject(*RUNS), *numbers(width=128, depth=4, steps=1000), DATA),
    ranks=0,
    rounds=0,
    check=lambda parser, asked: read_text(parser, asked, CONTEXT),
)
BENCH.run_as_main(__name__)
