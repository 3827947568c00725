# SPDX-License-Identifier: Apache-2.0
"""Plays random plans of faults for a given time, and prints each seed that broke a promise.

python -m tests.proof.faults.soak --minutes 60 --seed 0
python -m tests.proof.faults.soak --seed 4711 --only
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from itertools import count

from tests.support.fault_checks import run_chain
from tests.support.fault_schedules import draw_chain, interpreted
from tests.support.fault_training import draw_training, run_training

# In every 25 seeds one plays the interpreter and one a training run, since each takes seconds.
PERIOD = 25
INTERPRETED, TRAINING = 1, 2
REPORT_S = 10.0


def play(seed: int) -> tuple[int, list[str]]:
    """Plays a seed; returns the number of its schedules, and the promises that they broke."""
    if seed % PERIOD == TRAINING:
        return 1, run_training(draw_training(seed))
    chain = draw_chain(seed)
    if seed % PERIOD == INTERPRETED:
        chain = interpreted(chain)
    return len(chain), run_chain(chain)


def describe(seed: int) -> object:
    """Returns the schedules that a seed generates."""
    return draw_training(seed) if seed % PERIOD == TRAINING else draw_chain(seed)


def soak(seeds: Sequence[int] | count[int], minutes: float) -> int:
    """Plays the seeds until the time is over; returns how many broke a promise."""
    began = told = time.monotonic()
    schedules = failed = 0
    for seed in seeds:
        if time.monotonic() - began > minutes * 60:
            break
        played, found = play(seed)
        schedules += played
        if found:
            failed += 1
            print(f"seed {seed} broke a promise: {describe(seed)}")
            print("\n".join(found))
            print(f"replay: python -m tests.proof.faults.soak --seed {seed} --only", flush=True)
        if time.monotonic() - told > REPORT_S:
            told = time.monotonic()
            print(f"{told - began:.0f} s: {schedules} schedules up to seed {seed}", flush=True)
    print(f"{schedules} schedules, {failed} seeds broke a promise")
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="the first (default: %(default)s)")
    parser.add_argument("--only", action="store_true", help="this seed and no other")
    options = parser.parse_args(arguments)
    seeds = [options.seed] if options.only else count(options.seed)
    return 1 if soak(seeds, options.minutes) else 0


if __name__ == "__main__":
    sys.exit(main())
