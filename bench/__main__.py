# SPDX-License-Identifier: Apache-2.0
"""The entry of all benchmarks: ``python -m ringcomm.bench [WHAT] ...``, and ``ringcomm bench``."""

from __future__ import annotations

import sys

from .run import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
