# SPDX-License-Identifier: Apache-2.0
"""Runs the project's programs from the source tree, as a user would."""

import os
import sys

from tests.support import ROOT, fork_server

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PMI_RANK")


def run_program(*command, environment=None, timeout_s=100, anew=False):
    """Runs ``python -m`` with the given words; returns the finished process with text output.

    The process is a fork (see ``fork_server``), or a new interpreter if ``anew``.
    """
    outside = {key: os.environ[key] for key in os.environ if key not in LAUNCHER_VARIABLES}
    return fork_server.run(
        [sys.executable, "-m", *command],
        timeout_s,
        anew,
        cwd=ROOT,
        env={**outside, **(environment or {})},
    )
