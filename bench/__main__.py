# SPDX-License-Identifier: Apache-2.0
"""The entry of all benchmarks: ``python -m ringcomm.bench [WHAT] ...``, and ``ringcomm bench``."""

from __future__ import annotations

import sys

from ringcomm.launch import end_at_ctrl_c

if __name__ == "__main__":
    with end_at_ctrl_c():
        from .run import run
    sys.exit(run(sys.argv[1:]))
