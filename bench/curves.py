"""Losses of one GPT on one text, by optimizer or by the wire of its gradients, beside each other.

``python -m ringcomm.bench.curves optimizers`` trains it with AdamW and AdamW8bit on one rank, and
``wires`` with AdamW at stage 2 on two nodes of two ranks (threads stand for them), from the same
weights with the same batches. The first run is repeated from a second set of weights, since what
two runs of one kind differ by is what the others are to be compared with.
"""

from __future__ import annotations

import argparse
import copy
import csv
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

import ringcomm
from ringcomm.examples.train_gpt import GPT, Corpus, ModelConfig, draw, read_corpus

SEQUENCES, CONTEXT = 16, 64
HELD_OUT_BATCHES = 16
PEAK, WARM_UP_STEPS = 2e-3, 50
NODES = (2, 2)
STAGE = 2


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        make: the optimizer.
        seed: of the first weights.
        options: of stage 2 over two nodes; None trains on one rank.
    """

    make: Callable[..., Any] = ringcomm.optim.AdamW
    seed: int = 0
    options: ringcomm.zero.ZeroOptions | None = None


def on_wire(seed: int = 0, state: str = "world", **wire: Any) -> Run:
    """A run over nodes whose gradients travel in a form."""
    return Run(
        seed=seed, options=ringcomm.zero.ZeroOptions(state=state, wire=ringcomm.zero.Wire(**wire))
    )


RUNS: Mapping[str, Mapping[str, Run]] = {
    "optimizers": {
        "AdamW": Run(),
        "AdamW8bit": Run(ringcomm.optim.AdamW8bit),
        "AdamW, other weights": Run(seed=1),
    },
    "wires": {
        "fp32": on_wire(),
        "fp32, other weights": on_wire(seed=1),
        "int8": on_wire(gradients="int8"),
        "int8, state=node": on_wire(gradients="int8", state="node"),
        "fp8": on_wire(gradients="fp8"),
        "int4": on_wire(gradients="int4"),
        "int4, error feedback": on_wire(gradients="int4", error_feedback=True),
        "int8, parameters int8": on_wire(gradients="int8", parameters="int8"),
        "int8, parameters fp8": on_wire(gradients="int8", parameters="fp8"),
    },
}


def held_out_loss(module: nn.Module, corpus: Corpus) -> float:
    """The mean loss over the same held-out batches."""
    with torch.no_grad():
        batches = (
            draw(corpus.held_out, 0, index, (SEQUENCES, CONTEXT))
            for index in range(HELD_OUT_BATCHES)
        )
        losses = [float(module(*batch)) for batch in batches]
    return sum(losses) / len(losses)


def _train(
    module: nn.Module, optimizer: Any, corpus: Corpus, marks: Sequence[int], rows: slice
) -> list[float]:
    """Trains on ``rows`` of each batch; returns the held-out losses after steps of ``marks``."""
    losses = []
    for step in range(marks[-1]):
        fall = 1.0 - max(0, step - WARM_UP_STEPS) / max(1, marks[-1] - WARM_UP_STEPS)
        optimizer.param_groups[0]["lr"] = PEAK * min(1.0, (step + 1) / WARM_UP_STEPS) * fall
        tokens, targets = draw(corpus.train, 0, step, (SEQUENCES, CONTEXT))
        module(tokens[rows], targets[rows]).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 in marks:
            losses.append(held_out_loss(module, corpus))
    return losses


def curve(run: Run, model: ModelConfig, corpus: Corpus, marks: Sequence[int]) -> list[float]:
    """The held-out losses after the steps of ``marks``, which are sorted."""
    torch.manual_seed(run.seed)
    module = GPT(model)
    make = partial(run.make, lr=PEAK, weight_decay=0.1)
    if run.options is None:
        optimizer = make(module.parameters(), comm="alone")
        return _train(module, optimizer, corpus, marks, slice(None))
    copies = [copy.deepcopy(module) for _ in range(sum(NODES))]

    def body(comm: ringcomm.Communicator) -> list[float]:
        torch.set_num_threads(1)
        sharded = ringcomm.zero.shard(copies[comm.rank], STAGE, comm=comm, options=run.options)
        rows = slice(comm.rank, None, comm.world_size)
        losses = _train(sharded, make(sharded.parameters()), corpus, marks, rows)
        ringcomm.zero.unshard(sharded)
        return losses

    with ringcomm.local_world(sum(NODES), nodes=list(NODES)) as world:
        curves: list[list[float]] = world.run(body)
    return curves[0]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m ringcomm.bench.curves", description=__doc__)
    parser.add_argument("what", choices=RUNS)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--data", metavar="PATH", help="default: Python's standard library")
    parser.add_argument("-o", "--output", metavar="CSV", help="write the losses there, too")
    asked = parser.parse_args(arguments)
    corpus = read_corpus(asked.data, CONTEXT)
    model = ModelConfig(asked.width, asked.depth, 4, CONTEXT, tied=True)
    marks = sorted({max(1, asked.steps * part // 10) for part in (1, 2, 4, 6, 8, 10)})
    print("| held-out loss after steps |", *(f" {mark} |" for mark in marks), sep="")
    print("|---|", *("---|" for _ in marks), sep="")
    rows = []
    for name, run in RUNS[asked.what].items():
        losses = curve(run, model, corpus, marks)
        rows += [(name, mark, f"{loss:.5f}") for mark, loss in zip(marks, losses, strict=True)]
        print(f"| {name} |", *(f" {loss:.4f} |" for loss in losses), sep="", flush=True)
    if asked.output:
        with open(asked.output, "w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([("run", "step", "loss"), *rows])


if __name__ == "__main__":
    main(sys.argv[1:])
