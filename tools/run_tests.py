"""``make test``: the tests in three parts at once.

Most tests wait: for ranks, interpreters and deadlines. One run after the other leaves two cores
idle for a third of the time. So what mostly trains has a run of its own, and so, at low priority,
on what the others leave of the cores, has what mostly compiles. ``python -m pytest`` runs all tests
one after the other.

    python -m tools.run_tests [options of pytest]
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# None of them has a deadline that a busy machine could miss: ranks that some start wait for each
# other for half an hour.
BESIDE = (
    "tests/cli/test_estimate.py",
    "tests/cli/test_estimate_options.py",
    "tests/proof/fuzz/test_commands.py",
    "tests/proof/fuzz/test_texts.py",
    "tests/cuda/test_kernel_build.py",
    "tests/proof/model/test_model_check.py",
    "tests/proof/races/test_comm_races.py",
    "tests/proof/compile/test_cuda_checks.py",
    "tests/proof/compile/test_cuda_compile.py",
    "tests/proof/fuzz/test_hostile.py",
    "tests/proof/races/test_lending.py",
    "tests/proof/litmus/test_litmus.py",
    "tests/proof/races/test_races.py",
    "tests/proof/races/test_step_races.py",
    "tests/proof/races/test_wakes.py",
    "tests/packaging/test_build.py",
    "tests/test_style.py",
    "tests/test_unpickling.py",
    "tests/proof/compile/test_adamw_compile.py",
    "tests/proof/compile/test_tl_compile.py",
    "tests/proof/compile/test_device_compile.py",
)
# Apart from those above. None of them has a deadline of less than some seconds.
TRAINING = (
    "tests/bench/test_training.py",
    "tests/c10d",
    "tests/cli/test_demo.py",
    "tests/cli/test_train.py",
    "tests/cli/test_train_outputs.py",
    "tests/cli/test_train_plot.py",
    "tests/cli/test_train_resume.py",
    "tests/cli/test_train_stages.py",
    "tests/proof/faults/test_elastic.py",
    "tests/proof/faults/test_training.py",
    "tests/fsdp2",
    "tests/functional",
    "tests/optim",
    "tests/packaging",
    "tests/zero",
)
LOW_PRIORITY = ("nice", "-n", "10")
# They may get little of the machine for as long as the others run.
LIMIT_S = 900
# Of pytest: no test was selected, which options like -k may mean for one part.
NOTHING_RUN = 5


def status_of(statuses: Sequence[int]) -> int:
    """The exit status of all runs together."""
    failed = [status for status in statuses if status not in (0, NOTHING_RUN)]
    return failed[0] if failed else min(statuses)


def run(beside: Sequence[Sequence[str]], others: Sequence[str]) -> int:
    """Runs commands at once, and shows the output of those ``beside`` when all have ended."""
    with ExitStack() as stack:
        started = []
        for command in beside:
            output = stack.enter_context(
                tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
            )
            child = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
            started.append((stack.enter_context(child), output))
        try:
            statuses = [subprocess.run(others, cwd=ROOT, check=False).returncode]
            statuses += [child.wait() for child, _ in started]
        except BaseException:
            for child, _ in started:
                child.send_signal(signal.SIGINT)  # so that it ends what it has started
            raise
        for _, output in started:
            output.seek(0)
            print(output.read(), flush=True)
    return status_of(statuses)


def main(options: Sequence[str]) -> int:
    pytest = [sys.executable, "-m", "pytest", *options]
    without_beside = [f"--ignore={path}" for path in BESIDE]
    without_training = [f"--ignore={path}" for path in TRAINING]
    return run(
        [
            [*LOW_PRIORITY, *pytest, f"--timeout={LIMIT_S}", *BESIDE],
            [*pytest, *TRAINING, *without_beside],
        ],
        [*pytest, *without_beside, *without_training],
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
