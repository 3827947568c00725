# SPDX-License-Identifier: Apache-2.0
"""Runs the wheel for AArch64, and C++ programs of the tests, under qemu: ``make aarch64-check``.

The wheel must give the same bits as the wheel for x86-64. The programs are compiled by Debian's
cross compiler. qemu on x86-64 shows no reordering that AArch64 allows and x86-64 does not, so the
check says nothing about memory orders; the proofs of tests/proof/litmus and tests/proof/model do.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tools.aarch64 import debian_root
from tools.commands import ROOT, interpreter
from tools.wheels import __main__ as make_wheels
from tools.wheels import trial

# Programs, and the packages of Debian that have them.
NEEDED = {
    "qemu-aarch64-static": "qemu-user-static",
    "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu",
}
# Tests of static assertions, and of C++ programs that need neither torch nor a sanitizer. They
# include only those mutants that give a wrong result.
RACES = "tests/proof/races"
TESTS = (
    f"{RACES}/test_races.py::test_no_race_and_right_results",
    f"{RACES}/test_races.py::test_schedule_compiles",
    f"{RACES}/test_step_races.py::test_no_race_and_right_results",
    f"{RACES}/test_comm_races.py::test_no_race_and_nothing_left",
    f"{RACES}/test_comm_races.py::test_teams_of_different_sizes_race_for_nothing",
    f"{RACES}/test_comm_races.py::test_calls_end_beside_a_stopped_owner_of_the_record",
    f"{RACES}/test_checksum_races.py::test_any_number_of_threads_has_the_sum_of_the_definition",
    f"{RACES}/test_scratch_races.py::test_requests_run_in_order_and_faults_end_them",
    f"{RACES}/test_pool_races.py::test_no_race_and_nobody_waits_in_vain",
    f"{RACES}/test_lending.py::test_what_was_lent_is_what_was_read_or_the_call_fails",
    f"{RACES}/test_lending.py::test_mutants_are_rejected",
    f"{RACES}/test_waits.py::test_sleepers_are_woken",
    "tests/proof/fuzz/test_hostile.py::test_junk_ends_in_a_status",
    "tests/proof/compile/test_isa.py::test_compiles_for_arm",
)


def require_programs() -> None:
    """Raises SystemExit, with the packages to install, if a program of ``NEEDED`` is missing."""
    missing = [package for name, package in NEEDED.items() if shutil.which(name) is None]
    if missing:
        raise SystemExit(f"aarch64: programs are missing: apt-get install {' '.join(missing)}")


def wheels_for(version: str, folder: Path) -> dict[str, Path]:
    """Returns the wheels of both machines for a Python version; builds them if one is missing."""
    machines = ("x86_64", "aarch64")

    def built() -> dict[str, Path | None]:
        wheels = sorted(folder.glob("ringcomm-*.whl"))
        return {each: trial.fitting_wheel(wheels, version, each) for each in machines}

    missing = [machine for machine, wheel in built().items() if wheel is None]
    if missing:
        print(f"{folder} has no wheel of {version} for {', '.join(missing)}: building", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        make_wheels.build_all(folder, [version], missing)
    return {machine: wheel for machine, wheel in built().items() if wheel is not None}


def check_wheels(root: Path, folder: Path) -> None:
    """Runs the wheels of both machines.

    Raises:
        SystemExit: a wheel failed, or the bits differ.
    """
    version = trial.python_of(root).name.removeprefix("python")
    own = interpreter(version)
    if own is None:
        raise SystemExit(f"aarch64: this machine has no Python {version}, the version of {root}")
    wheels = wheels_for(version, folder)
    here = trial.try_bare(own, wheels["x86_64"])
    wheel, foreign = trial.try_foreign([wheels["aarch64"]], root)
    for name, text in ((wheels["x86_64"].name, here), (f"under qemu, {wheel.name}", foreign)):
        print(f"{name}: {' | '.join(text.splitlines())}", flush=True)
    if here.splitlines()[1:] != foreign.splitlines()[1:]:
        raise SystemExit("aarch64: the two wheels give different bits")


def check_programs() -> int:
    """Compiles and runs the programs of ``TESTS`` for AArch64; returns pytest's exit status."""
    variables = {**os.environ, "RINGCOMM_TEST_MACHINE": "aarch64"}
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-n", "2"]
    command += ["--dist", "loadfile", "--timeout=600", *TESTS]
    done = subprocess.run(command, cwd=ROOT, env=variables, check=False)
    return done.returncode


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if the wheel and all programs passed."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.aarch64", description=__doc__, allow_abbrev=False
    )
    add = parser.add_argument
    told = "the root of a Linux for AArch64 with Python; default: Debian's packages, downloaded"
    add("--root", type=Path, metavar="FOLDER", help=told)
    add("--dist", type=Path, default=ROOT / "dist", help="the wheels; default: %(default)s")
    args = parser.parse_args(argv)
    begin = time.monotonic()
    require_programs()
    root = args.root or debian_root.make_root(ROOT / "build" / "aarch64-root")
    check_wheels(root, args.dist)
    status = check_programs()
    print(f"{time.monotonic() - begin:.0f} s", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
