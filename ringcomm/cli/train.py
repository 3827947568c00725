"""``ringcomm train``: starts the ranks of ``ringcomm/examples/train_gpt.py``, or is one of them."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import torch

from ringcomm import Communicator
from ringcomm.examples.train_gpt import Options, expect, read_corpus, train
from ringcomm.launch import (
    STORE_PORT_VARIABLE,
    TIMEOUT,
    LaunchPlan,
    launch,
    launch_store,
    threads_per_rank,
)
from ringcomm.optim import LossScaleOptions
from ringcomm.rendezvous.launchers import launched_world, read_environment

DEFAULT_RANKS = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of ``ringcomm train``."""
    parser.description = (
        "Train a small byte-level GPT on several ranks. Starts them itself; under torchrun "
        "(torchrun --nproc-per-node 2 -m ringcomm train), mpirun and Slurm it is one of theirs. "
        "docs/train.md explains the options."
    )
    told = f"ranks to start (default: {DEFAULT_RANKS}; launchers set their own)"
    parser.add_argument("--ranks", type=int, help=told)
    for each in fields(Options):
        words: dict[str, Any] = {"default": each.default, "help": each.metadata["help"]}
        if each.default not in (None, False) or each.type == "int":
            words["help"] += " (default: %(default)s)"
        if each.type == "bool":
            words["action"] = "store_true"
        else:
            words["choices"] = each.metadata["choices"]
            words["type"] = {"int": int, "float": float, "str": str}[str(each.type).split()[0]]
        if each.name == "resume":
            words |= {"nargs": "?", "const": "latest"}
        parser.add_argument(_flag(each.name), **words)


def run(args: argparse.Namespace) -> int:
    """Starts the ranks and waits for them, or is one of a launcher's.

    Raises:
        ArgumentError: an option is wrong; before any rank is started.
    """
    options = Options(**{each.name: getattr(args, each.name) for each in fields(Options)})
    outside = launched_world()
    ranks = args.ranks
    if outside is not None:
        there = int(outside.partition("=")[2])
        told = f"--ranks {ranks}: {outside} is set, so the ranks were already started; drop --ranks"
        expect(ranks in (None, there), told)
        check(options, there)
        return run_rank(asdict(options))
    ranks = DEFAULT_RANKS if ranks is None else ranks
    expect(ranks >= 1, f"--ranks must be at least 1, got {ranks}")
    check(options, ranks)
    plan = LaunchPlan("ringcomm.cli.train", asdict(options), ranks, threads_per_rank(ranks))
    return launch(plan)


def run_rank(options: Mapping[str, Any]) -> int:
    """Trains as one rank, which ``launch()`` or a launcher has started."""
    place = read_environment()
    device = "cpu"
    if options["device"] == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', place.rank)}"
    if STORE_PORT_VARIABLE in os.environ:
        comm = Communicator.from_store(
            launch_store(), place.rank, place.world_size, timeout=TIMEOUT, device=device
        )
    else:
        comm = Communicator.from_env(timeout=TIMEOUT, device=device)
    with comm:
        torch.set_num_threads(threads_per_rank(comm.node.world_size))
        if comm.device.type == "cuda":
            torch.cuda.set_device(comm.device)
        train(Options(**options), comm)
        # Rank 0 holds the store: it must not leave while others still talk to it.
        comm.barrier()
    return 0


def check(options: Options, ranks: int) -> None:
    """Raises ArgumentError where ``ranks`` ranks cannot run with the options."""
    for name in ("steps", "batch", "accum", "save_every"):
        value = getattr(options, name)
        expect(value >= 1, f"{_flag(name)} must be at least 1, got {value}")
    pieces = ranks * options.accum
    expect(
        options.batch % pieces == 0,
        f"--batch: {options.batch} sequences do not divide among {ranks} ranks x {options.accum} "
        f"micro-batches; choose a multiple of {pieces}",
    )
    rate, seed, clip = options.learning_rate, options.seed, options.clip
    expect(0 < rate < math.inf, f"--learning-rate must be above 0, got {rate}")
    expect(0 <= seed < 1 << 31, f"--seed must be in 0 .. 2^31 - 1, got {seed}")
    expect(clip is None or 0 < clip < math.inf, f"--clip must be a norm above 0, got {clip}")
    expect(options.stage in range(4), f"--stage must be in 0 .. 3, got {options.stage}")
    if options.loss_scale is not None:
        told = f"--loss-scale: {options.dtype} gradients need no scale; take --dtype fp16"
        expect(options.dtype == "fp16", told)
        LossScaleOptions(init_scale=options.loss_scale)
    _check_paths(options)
    read_corpus(options.data, options.context)


def _check_paths(options: Options) -> None:
    for name in ("state_on", "params_on"):
        folder = getattr(options, name)
        there = folder is None or os.path.isdir(folder)
        expect(there, f"{_flag(name)} {folder}: expected a folder on a disk")
    told = f"--params-on: expected --stage 3, got {options.stage}, which keeps all in memory"
    expect(options.params_on is None or options.stage == 3, told)
    for name in ("json", "profile"):
        path = getattr(options, name)
        there = path is None or os.path.isdir(os.path.dirname(os.path.abspath(path)))
        expect(there, f"{_flag(name)} {path}: its folder does not exist")
    told = "--resume: expected --save FOLDER beside it, where the checkpoints are"
    expect(options.resume is None or options.save is not None, told)
    for name in ("save", "profile"):
        folder = getattr(options, name)
        is_free = folder is None or os.path.isdir(folder) or not os.path.exists(folder)
        expect(is_free, f"{_flag(name)} {folder}: expected a folder, or nothing yet, got a file")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
