"""Prints what `import ringcomm` costs beyond `import torch`: the median of interleaved runs."""

import statistics
import subprocess
import sys

RUNS = 11
CODE = "import time, torch; start = time.perf_counter(); {}; print((time.perf_counter() - start) * 1e3)"


def import_ms(statement: str) -> float:
    """Milliseconds that `statement` takes in a fresh interpreter that has loaded torch."""
    command = [sys.executable, "-c", CODE.format(statement)]
    return float(subprocess.run(command, check=True, text=True, capture_output=True).stdout)


def main() -> None:
    cases = {"import ringcomm": [], "import ringcomm; ringcomm.Communicator": []}
    for _ in range(RUNS):
        for statement, samples in cases.items():
            samples.append(import_ms(statement))
    for statement, samples in cases.items():
        low, middle, high = min(samples), statistics.median(samples), max(samples)
        print(f"{statement}: {middle:.1f} ms ({low:.1f} to {high:.1f}, {RUNS} runs)")


if __name__ == "__main__":
    main()
