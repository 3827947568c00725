# SPDX-License-Identifier: Apache-2.0
"""``ringcomm build-backend``: compiles the C++ backend of ``torch.distributed``."""

from __future__ import annotations

import argparse

import torch

from ringcomm.c10d.backend import build, find


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--force", action="store_true", help="compile although it is built already")


def run(args: argparse.Namespace) -> int:
    """Builds the backend for this Python and this torch, and prints its path.

    Raises:
        UnsupportedError: the backend cannot be built; the message says why.
    """
    is_built = find() is not None and not args.force
    path = build(args.force)
    print(f"{'already built' if is_built else 'built'} for torch {torch.__version__}: {path}")
    return 0
