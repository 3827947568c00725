# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.proof.soak``: an hour of mixed collectives, without wrong results or growth.

Exits with 1 if an element is wrong, a call fails, or a rank's use of resources grows after the
first quarter.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.proof.soak.ranks import Done, Soak, soak_rank
from tests.proof.soak.usage import complaints, growth
from tests.support.ranks import RanksFailed, run_ranks

# Share of all ranks' heaps whose pages may be touched for the first time late in the run.
SLACK_OF_HEAPS = 1.0
FEWEST_SAMPLES = 8


def report(done: Sequence[Done], heap_bytes: int) -> tuple[str, list[str]]:
    """Returns a text of the work and the resources used, and a list of faults."""
    lines = [
        f"{done[0].calls} calls on {len(done)} ranks, {done[0].communicators} communicators, "
        f"{sum(each.elements for each in done)} elements checked, none wrong"
    ]
    wrong = []
    for rank, each in enumerate(done):
        if len(each.samples) < FEWEST_SAMPLES:
            wrong.append(f"rank {rank}: only {len(each.samples)} samples: run longer")
            continue
        last = asdict(each.samples[-1])
        grown = growth(each.samples)
        lines.append(
            f"rank {rank}: "
            + ", ".join(f"{name} {last[name]:.0f} ({grown[name]:+.0f})" for name in grown)
        )
        slack = round(SLACK_OF_HEAPS * heap_bytes * len(done))
        wrong += [f"rank {rank}: {text}" for text in complaints(each.samples, slack)]
    return "\n".join(lines), wrong


def main(argv: Sequence[str]) -> int:
    """Runs and reports."""
    parser = argparse.ArgumentParser(prog="python -m tests.proof.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the samples here")
    options = parser.parse_args(argv)
    soak = Soak(options.minutes * 60, options.seed)
    try:
        done = run_ranks(soak_rank, options.ranks, soak, timeout_s=soak.seconds + 600)
    except RanksFailed as error:
        print(error)
        return 1
    text, wrong = report(done, soak.heap_bytes)
    print(text)
    print("\n".join(wrong))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(each) for each in done]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
