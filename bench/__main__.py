"""``python -m ringcomm.bench [WHAT] ...``, and ``ringcomm bench``: one entry to all benches."""

from __future__ import annotations

import importlib
import os
import sys
import traceback

from .launch import started_by
from .run import BENCHES, COLLECTIVES, main


def run(words: list[str]) -> int:
    """Runs the bench that the first word names; returns the exit status."""
    name = COLLECTIVES
    if words and words[0].replace("-", "_") in BENCHES:
        name = words.pop(0).replace("-", "_")
    try:
        return main(importlib.import_module(f"{__package__}.{name}").BENCH, words)
    except KeyboardInterrupt:
        return 130
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        if started_by(os.environ) is not None:
            # A rank that fails must not wait at exit for the others, as MPI's finalizer would.
            os._exit(1)
        return 1


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
