"""``ringcomm train``: data-parallel training of a small byte-level GPT on real text."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ringcomm.cli.config import BACKENDS, ModelConfig, TrainConfig
from ringcomm.cli.corpus import find_source, min_corpus_bytes
from ringcomm.cli.launch import Plan, launch, launched_from_outside, threads_per_rank
from ringcomm.errors import ArgumentError

DEFAULT_RANKS = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``ringcomm train``."""
    parser.description = (
        "Train a small byte-level GPT with DistributedDataParallel. Starts its own ranks; under "
        "torchrun (torchrun --nproc-per-node 2 -m ringcomm train) it is one of torchrun's."
    )
    add = parser.add_argument
    add("--backend", choices=BACKENDS, default="ringcomm", help="default: %(default)s")
    add("--data", metavar="PATH", help="text file or folder (default: Python's standard library)")
    add(
        "--ranks",
        type=int,
        help=f"ranks to start (default: {DEFAULT_RANKS}; torchrun sets its own)",
    )
    add("--steps", type=int, default=200, help="default: %(default)s")
    add(
        "--batch", type=int, default=16, help="sequences a step on all ranks (default: %(default)s)"
    )
    add("--width", type=int, default=128, help="channels (default: %(default)s)")
    add("--depth", type=int, default=4, help="layers (default: %(default)s)")
    add("--heads", type=int, default=4, help="attention heads (default: %(default)s)")
    add("--context", type=int, default=128, help="bytes a sequence (default: %(default)s)")
    add("--tied", action="store_true", help="share the weights of embedding and output layer")
    add("--learning-rate", type=float, default=3e-3, help="peak (default: %(default)s)")
    add("--seed", type=int, default=0, help="of weights and batches (default: %(default)s)")
    add("--json", metavar="FILE", help="also write options, losses and speed to FILE")


def run(args: argparse.Namespace) -> int:
    """Start the ranks and wait for them, or be one under torchrun."""
    config, settings = _settings(args)
    if launched_from_outside():
        if args.ranks not in (None, int(os.environ["WORLD_SIZE"])):
            raise ArgumentError(
                f"--ranks {args.ranks}: WORLD_SIZE={os.environ['WORLD_SIZE']} is set, so the ranks "
                "were already started; drop --ranks"
            )
        from ringcomm.cli.training import run_rank

        return run_rank(settings)
    ranks = DEFAULT_RANKS if args.ranks is None else args.ranks
    if ranks < 1:
        raise ArgumentError(f"--ranks must be at least 1, got {ranks}")
    config.sequences_per_rank(ranks)
    return launch(Plan("ringcomm.cli.training", settings, ranks, threads_per_rank(ranks)))


def _settings(args: argparse.Namespace) -> tuple[TrainConfig, dict[str, Any]]:
    """Check the options, before any rank is started, and gather them as plain values."""
    model = ModelConfig(args.width, args.depth, args.heads, args.context, args.tied)
    config = TrainConfig(model, args.batch, args.steps, args.learning_rate, args.seed)
    find_source(args.data, min_corpus_bytes(model.context))
    if args.json is not None and not Path(args.json).absolute().parent.is_dir():
        raise ArgumentError(f"--json {args.json}: its folder does not exist")
    settings = {"backend": args.backend, "data": args.data, "json": args.json}
    return config, {**settings, "config": asdict(config)}
