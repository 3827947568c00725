"""``ringcomm train``: data-parallel training of a small byte-level GPT on real text."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ringcomm.errors import ArgumentError
from ringcomm.examples.gpt.config import (
    BACKENDS,
    DEFAULT_LOSS_SCALE,
    DEFAULT_STAGE,
    DEVICES,
    DTYPES,
    ENGINES,
    FROM_ANY,
    FROM_LATEST,
    STAGES,
    EngineConfig,
    ModelConfig,
    TrainConfig,
)
from ringcomm.examples.gpt.corpus import find_source, min_corpus_bytes
from ringcomm.launch import LaunchPlan, launch, threads_per_rank
from ringcomm.output import PLOT_SUFFIXES
from ringcomm.rendezvous.environment import launched_world

DEFAULT_RANKS = 2
DEFAULT_SAVE_EVERY = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``ringcomm train``."""
    parser.description = (
        "Train a small byte-level GPT on several ranks. Starts them itself; under torchrun "
        "(torchrun --nproc-per-node 2 -m ringcomm train), mpirun and Slurm it is one of theirs. "
        "docs/train.md explains the options."
    )
    _add_run(parser)
    _add_model(parser)
    _add_sharding(parser)
    _add_outputs(parser)


def _add_run(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--data", metavar="PATH", help="text file or folder (default: Python's standard library)")
    add(
        "--ranks",
        type=int,
        help=f"ranks to start (default: {DEFAULT_RANKS}; launchers set their own)",
    )
    add("--steps", type=int, default=200, help="default: %(default)s")
    add(
        "--batch", type=int, default=16, help="sequences a step on all ranks (default: %(default)s)"
    )
    add("--accum", type=int, default=1, help="micro-batches a step (default: %(default)s)")
    add("--clip", type=float, metavar="NORM", help="largest norm of the gradient (default: none)")
    add("--learning-rate", type=float, default=3e-3, help="peak (default: %(default)s)")
    add("--seed", type=int, default=0, help="seed of weights and batches (default: %(default)s)")


def _add_model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model").add_argument
    add("--width", type=int, default=128, help="channels (default: %(default)s)")
    add("--depth", type=int, default=4, help="layers (default: %(default)s)")
    add("--heads", type=int, default=4, help="attention heads (default: %(default)s)")
    add("--context", type=int, default=128, help="bytes a sequence (default: %(default)s)")
    add("--tied", action="store_true", help="share the weights of embedding and output layer")
    add(
        "--checkpoint-activations",
        action="store_true",
        help="compute layers again in backward: less memory, more time",
    )


def _add_sharding(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("sharding").add_argument
    add(
        "--engine",
        choices=ENGINES,
        default="zero",
        help="ringcomm.zero, or torch's DDP or FSDP2 with its fused AdamW (default: %(default)s)",
    )
    add(
        "--stage",
        type=int,
        choices=STAGES,
        help="ZeRO stage: 0 shards nothing, 1 the optimizer's state, 2 gradients, too, "
        f"3 parameters, too (default: {DEFAULT_STAGE})",
    )
    add(
        "--backend",
        choices=BACKENDS,
        default="ringcomm",
        help="what moves the data; gloo for ddp and fsdp2 (default: %(default)s)",
    )
    add(
        "--dtype",
        choices=DTYPES,
        default="fp32",
        help="of parameters and gradients; 16 bits need zero (default: %(default)s)",
    )
    add(
        "--loss-scale",
        type=float,
        help=f"initial loss scale of fp16 (default: {DEFAULT_LOSS_SCALE:.0f})",
    )
    add("--device", choices=DEVICES, default="cpu", help="cuda: rank r takes GPU r")
    for what, default in (("params", "node"), ("state", "world")):
        meaning = f"ranks that share them, over nodes: ZeroOptions.{what} (default: {default})"
        add(f"--shard-{what}", choices=("node", "world"), help=meaning)
    for what, meaning in (
        ("state", "the optimizer's state"),
        ("params", "parameters that are not gathered, at stage 3"),
    ):
        add(f"--{what}-on", metavar="PATH", help=f"folder on a disk for {meaning}")
        add(
            f"--{what}-resident-mib",
            type=int,
            metavar="N",
            help="of it, what stays in a rank's memory, in 2^20 bytes (default: 0)",
        )
        add(
            f"--{what}-buffer-mib",
            type=int,
            metavar="N",
            help="a rank's buffers for what is on its way, in 2^20 bytes (default: 64)",
        )


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("outputs").add_argument
    add("--save", metavar="FOLDER", help="keep the latest two checkpoints in FOLDER")
    add(
        "--save-every",
        type=int,
        metavar="STEPS",
        help=f"steps between checkpoints (default: {DEFAULT_SAVE_EVERY}); "
        "the last step is saved, too",
    )
    add(
        "--resume",
        nargs="?",
        const=FROM_LATEST,
        choices=(FROM_LATEST, FROM_ANY),
        help="go on from the latest checkpoint in --save FOLDER; auto begins if there is none, and "
        "ends if all steps are done: for jobs that are restarted after a failure "
        f"(--resume alone: {FROM_LATEST})",
    )
    add("--plot", metavar="FILE", help="draw loss and memory: png, svg or pdf (needs matplotlib)")
    add("--memory", action="store_true", help="say what each rank held; makes steps slower")
    add("--profile", metavar="FILE", help="record what steps do, for Perfetto or chrome://tracing")
    add("--json", metavar="FILE", help="also write options, losses, memory and speed to FILE")


def run(args: argparse.Namespace) -> int:
    """Start the ranks and wait for them, or be one of a launcher's."""
    config, settings = _settings(args)
    outside = launched_world()
    if outside is not None:
        if args.ranks not in (None, int(outside.partition("=")[2])):
            raise ArgumentError(
                f"--ranks {args.ranks}: {outside} is set, so the ranks were already started; drop "
                "--ranks"
            )
        from ringcomm.examples.gpt.run import run_rank

        return run_rank(settings)
    ranks = DEFAULT_RANKS if args.ranks is None else args.ranks
    if ranks < 1:
        raise ArgumentError(f"--ranks must be at least 1, got {ranks}")
    config.micro_sequences(ranks)
    return launch(LaunchPlan("ringcomm.examples.gpt.run", settings, ranks, threads_per_rank(ranks)))


def _settings(args: argparse.Namespace) -> tuple[TrainConfig, dict[str, Any]]:
    """Check the options, before any rank is started, and gather them as plain values."""
    model = ModelConfig(args.width, args.depth, args.heads, args.context, args.tied)
    config = TrainConfig(
        model, args.batch, args.steps, args.learning_rate, args.seed, args.accum, args.clip
    )
    engine = EngineConfig(
        name=args.engine,
        stage=args.stage,
        backend=args.backend,
        dtype=args.dtype,
        loss_scale=args.loss_scale,
        device=args.device,
        checkpoint_activations=args.checkpoint_activations,
        params=args.shard_params,
        state=args.shard_state,
        state_on=args.state_on,
        state_resident_mib=args.state_resident_mib,
        state_buffer_mib=args.state_buffer_mib,
        params_on=args.params_on,
        params_resident_mib=args.params_resident_mib,
        params_buffer_mib=args.params_buffer_mib,
    )
    for what, folder in (("state", engine.state_on), ("params", engine.params_on)):
        if folder is not None and not os.path.isdir(folder):
            raise ArgumentError(f"--{what}-on {folder}: expected a folder on a disk")
    for option in ("save", "profile"):
        if getattr(args, option) is not None and engine.name != "zero":
            raise ArgumentError(
                f"--{option}: --engine {engine.name} has none; drop it, or take --engine zero"
            )
    find_source(args.data, min_corpus_bytes(model.context))
    for option in ("json", "plot", "profile"):
        path = getattr(args, option)
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise ArgumentError(f"--{option} {path}: its folder does not exist")
    if args.plot is not None and Path(args.plot).suffix.lower() not in PLOT_SUFFIXES:
        raise ArgumentError(f"--plot {args.plot}: expected a name in {', '.join(PLOT_SUFFIXES)}")
    settings = {name: getattr(args, name) for name in ("data", "json", "plot", "profile", "memory")}
    settings["saving"] = _saving(args)
    return config, {**settings, "engine": asdict(engine), "config": asdict(config)}


def _saving(args: argparse.Namespace) -> dict[str, Any] | None:
    if args.save is None:
        for option in ("resume", "save_every"):
            if getattr(args, option):
                raise ArgumentError(
                    f"--{option.replace('_', '-')}: expected --save FOLDER beside it, where the "
                    "checkpoints are"
                )
        return None
    every = DEFAULT_SAVE_EVERY if args.save_every is None else args.save_every
    if Path(args.save).exists() and not Path(args.save).is_dir():
        raise ArgumentError(f"--save {args.save}: expected a folder, or nothing yet, got a file")
    if every < 1:
        raise ArgumentError(f"--save-every must be at least 1, got {every}")
    return {"folder": args.save, "every": every, "resume": args.resume}
