# SPDX-License-Identifier: Apache-2.0
"""``ringcomm convert``: converts other checkpoints to ringcomm's, and ringcomm's to safetensors."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch

from ringcomm.errors import ArgumentError
from ringcomm.zero import convert, export_safetensors
from ringcomm.zero.checkpoint import Checkpoints

__all__ = ["add_arguments", "run"]

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.description = (
        "Converts a checkpoint of DeepSpeed (ZeRO stages 1 to 3) or torch.distributed.checkpoint "
        "(FSDP2) to one that ringcomm.zero.load() reads, at any stage and in any world: weights, "
        "FP32 masters and AdamW's state. Converts a ringcomm checkpoint to safetensors files for "
        "Hugging Face's from_pretrained(). Runs no code from pickles."
    )
    parser.add_argument("source", type=Path, help="folder of the checkpoint, or of a ringcomm run")
    parser.add_argument(
        "target", type=Path, help="folder of a run, for a step-NNNNNNNN; or for the safetensors"
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="dtype of the safetensors (default: as saved); zero.load() accepts any",
    )
    parser.add_argument(
        "--weights-only", action="store_true", help="leave the optimizer's state out"
    )
    parser.add_argument(
        "--step", type=int, help="checkpoint number (default: as saved; for ringcomm's: latest)"
    )


def run(args: argparse.Namespace) -> int:
    """Converts a checkpoint, and prints the files that it wrote."""
    try:
        os.stat(args.source)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ArgumentError(f"{args.source}: no such folder") from error
    except (OSError, ValueError):
        pass  # the readers below report the reason
    dtype = None if args.dtype is None else DTYPES[args.dtype]
    folder = _own(args.source, args.step)
    if folder is None:
        if dtype is not None:
            raise ArgumentError(
                "--dtype: only for safetensors; a checkpoint for zero.load() has FP32 weights if "
                "they are known, and zero.load() rounds them to the module's dtype"
            )
        made = convert(
            args.source,
            args.target,
            weights_only=args.weights_only,
            step=args.step,
        )
        print(f"wrote {made}; ringcomm.zero.load({str(args.target)!r}, module, ...) reads it")
        return 0
    if args.weights_only:
        raise ArgumentError("--weights-only: not needed, since safetensors contain only weights")
    files = export_safetensors(folder, args.target, dtype=dtype)
    print(f"wrote {len(files)} file{'s' * (len(files) != 1)} of the weights in {folder}:")
    print(*files, sep="\n")
    return 0


def _own(source: Path, step: int | None) -> Path | None:
    """Returns the folder of a ringcomm checkpoint, or None if ``source`` has none.

    Raises:
        ArgumentError: ``source`` has checkpoints, but none of this step.
    """
    # Path.is_file() raises for an unreadable folder; the search for steps reports the reason.
    if os.path.isfile(source / "checkpoint.json"):
        return source
    checkpoints = Checkpoints(source)
    steps = checkpoints.steps()
    if not steps:
        return None
    if step is not None and step not in steps:
        known = f"{'steps' if len(steps) > 1 else 'step'} {', '.join(map(str, steps))}"
        raise ArgumentError(f"--step: {source} has no checkpoint of step {step}; it has {known}")
    return checkpoints.folder(max(steps) if step is None else step)
