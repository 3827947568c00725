"""Prints what `import ringcomm` costs beyond `import torch`: the median of interleaved runs."""

import os
import statistics
import subprocess
import sys

RUNS = 11
CODE = """
import time, torch
start = time.perf_counter()
{}
print((time.perf_counter() - start) * 1e3)
"""


def import_ms(statement: str) -> float:
    """Milliseconds that `statement` takes in a fresh interpreter that has loaded torch."""
    # torch would otherwise import ringcomm, through its entry point, before the clock starts.
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "-c", CODE.format(statement)]
    done = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, env=environment)
    return float(done.stdout)


def main() -> None:
    statements = ["import ringcomm", "import ringcomm; ringcomm.Communicator"]
    samples: dict[str, list[float]] = {statement: [] for statement in statements}
    for _ in range(RUNS):
        for statement in statements:
            samples[statement].append(import_ms(statement))
    for statement, taken in samples.items():
        print(
            f"{statement}: {statistics.median(taken):.1f} ms ({min(taken):.1f} to {max(taken):.1f})"
        )


if __name__ == "__main__":
    main()
