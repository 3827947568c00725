"""Losses of AdamW and of AdamW8bit on one text, beside each other.

``python -m ringcomm.bench.curves`` trains a GPT on one rank from the same weights with the same
batches. AdamW is trained from a second set of weights, too, since what two runs of one optimizer
differ by is what the optimizers are to be compared with.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

import ringcomm
from ringcomm.examples.gpt.config import ModelConfig
from ringcomm.examples.gpt.corpus import Corpus, find_source, load, min_corpus_bytes
from ringcomm.examples.gpt.model import GPT

SEQUENCES, CONTEXT = 16, 64
HELD_OUT_BATCHES = 16
PEAK, WARM_UP_STEPS = 2e-3, 50
# The optimizer, and the seed of the first weights.
RUNS: Mapping[str, tuple[Callable[..., Any], int]] = {
    "AdamW": (ringcomm.optim.AdamW, 0),
    "AdamW8bit": (ringcomm.optim.AdamW8bit, 0),
    "AdamW, other weights": (ringcomm.optim.AdamW, 1),
}


def held_out_loss(model: nn.Module, corpus: Corpus) -> float:
    """The mean loss over the same held-out batches."""
    with torch.no_grad():
        batches = (
            corpus.held_out_batch(0, index, SEQUENCES, CONTEXT) for index in range(HELD_OUT_BATCHES)
        )
        losses = [float(model(*batch)) for batch in batches]
    return sum(losses) / len(losses)


def curve(name: str, model: ModelConfig, corpus: Corpus, marks: Sequence[int]) -> list[float]:
    """The held-out losses after the steps of ``marks``, which are sorted."""
    make, seed = RUNS[name]
    torch.manual_seed(seed)
    module = GPT(model)
    optimizer = make(module.parameters(), lr=PEAK, weight_decay=0.1, comm="alone")
    losses = []
    for step in range(marks[-1]):
        fall = 1.0 - max(0, step - WARM_UP_STEPS) / max(1, marks[-1] - WARM_UP_STEPS)
        optimizer.param_groups[0]["lr"] = PEAK * min(1.0, (step + 1) / WARM_UP_STEPS) * fall
        module(*corpus.batch(0, step, SEQUENCES, CONTEXT)).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 in marks:
            losses.append(held_out_loss(module, corpus))
    return losses


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m ringcomm.bench.curves", description=__doc__)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--data", metavar="PATH", help="default: Python's standard library")
    asked = parser.parse_args(arguments)
    corpus = load(find_source(asked.data, min_corpus_bytes(CONTEXT)))
    model = ModelConfig(asked.width, asked.depth, 4, CONTEXT, tied=True)
    marks = sorted({max(1, asked.steps * part // 10) for part in (1, 2, 4, 6, 8, 10)})
    print("| held-out loss after steps |", *(f" {mark} |" for mark in marks), sep="")
    print("|---|", *("---|" for _ in marks), sep="")
    for name in RUNS:
        losses = curve(name, model, corpus, marks)
        print(f"| {name} |", *(f" {loss:.4f} |" for loss in losses), sep="", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
