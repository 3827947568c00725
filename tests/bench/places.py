"""A rank that the harness starts: it leaves its place as a file, and waits for the others."""

import sys
from pathlib import Path

from ringcomm.bench.launch import placed

if __name__ == "__main__":
    place = placed()
    Path(sys.argv[1], f"{place.rank} of {place.world}").touch()
    place.store.set(f"rank {place.rank}", "here")
    place.store.wait([f"rank {rank}" for rank in range(place.world)])
