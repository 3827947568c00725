# SPDX-License-Identifier: Apache-2.0
"""``ringcomm train``: starts the ranks of ``ringcomm/examples/train_gpt.py``, or is one of them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import torch

from ringcomm import Communicator
from ringcomm.cli.output import why_no_file, why_no_folder
from ringcomm.examples.corpus import read_corpus
from ringcomm.examples.train_gpt import (
    Options,
    add_options,
    argument,
    check,
    checkpoint_to_resume,
    expect,
    train,
)
from ringcomm.launch import (
    STORE_PORT_VARIABLE,
    TIMEOUT,
    RankLaunch,
    launch_ranks,
    launch_store,
    threads_per_rank,
)
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
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Starts the ranks and waits for them, or runs as a launcher's rank.

    Raises:
        ArgumentError: an option is wrong; raised before any rank is started.
    """
    options = Options(**{each.name: getattr(args, each.name) for each in fields(Options)})
    outside = launched_world()
    ranks = args.ranks
    if outside is not None:
        there = int(outside.partition("=")[2])
        told = f"--ranks {ranks}: {outside} is set, so the ranks were already started; drop --ranks"
        expect(ranks in (None, there), told)
        _check(options, there)
        return run_rank(asdict(options))
    ranks = DEFAULT_RANKS if ranks is None else ranks
    expect(ranks >= 1, f"--ranks must be at least 1, got {ranks}")
    _check(options, ranks)
    start = RankLaunch("ringcomm.cli.train", asdict(options), ranks, threads_per_rank(ranks))
    return launch_ranks(start)


def run_rank(options: Mapping[str, Any]) -> int:
    """Trains as one rank, which ``launch_ranks()`` or a launcher has started."""
    launched = read_environment()
    device = "cpu"
    if options["device"] == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', launched.rank)}"
    if STORE_PORT_VARIABLE in os.environ:
        comm = Communicator.from_store(
            launch_store(), launched.rank, launched.world_size, timeout=TIMEOUT, device=device
        )
    else:
        comm = Communicator.from_env(timeout=TIMEOUT, device=device)
    with comm:
        torch.set_num_threads(threads_per_rank(comm.node.world_size))
        if comm.device.type == "cuda":
            torch.cuda.set_device(comm.device)
        train(Options(**options), comm)
        # Rank 0 serves the store: it must not exit while others still use the store.
        comm.barrier()
    return 0


def _check(options: Options, ranks: int) -> None:
    """Raises ArgumentError if ``ranks`` ranks cannot run with the options and their files."""
    check(options, ranks)
    _check_paths(options)
    read_corpus(options.data, options.context)


def _check_paths(options: Options) -> None:
    for name in ("offload_state", "offload_params"):
        folder = getattr(options, name)
        there = folder is None or os.path.isdir(folder)
        expect(there, f"{argument(name)} {folder}: expected a folder on a disk")
    told = f"--offload-params: expected --stage 3, got {options.stage}, which keeps all in memory"
    expect(options.offload_params is None or options.stage == 3, told)
    if options.json is not None:
        why = why_no_file(options.json)
        expect(why is None, f"--json {options.json}: {why}")
    told = "--resume: expected --save FOLDER beside it, where the checkpoints are"
    expect(options.resume is None or options.save is not None, told)
    for name in ("save", "profile"):
        folder = getattr(options, name)
        why = None if folder is None else why_no_folder(folder, with_parents=name == "save")
        expect(why is None, f"{argument(name)} {folder}: {why}")
    checkpoint_to_resume(options)
