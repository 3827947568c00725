# SPDX-License-Identifier: Apache-2.0
"""Runs the collectives, as ``ringcomm bench`` does: ``python -m ringcomm.bench.collectives``."""

from . import BENCH

BENCH.run_as_main(__name__)
