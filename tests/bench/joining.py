# SPDX-License-Identifier: Apache-2.0
"""A rank that the harness starts: it leaves a file named after its rank, and waits for others."""

import sys
from pathlib import Path

from ringcomm.bench.launch import rank_of_harness

if __name__ == "__main__":
    info = rank_of_harness()
    Path(sys.argv[1], f"{info.rank} of {info.world}").touch()
    info.store.set(f"rank {info.rank}", "here")
    info.store.wait([f"rank {rank}" for rank in range(info.world)])
