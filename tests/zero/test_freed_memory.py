"""NOTE [Freed memory]: what a backward frees stays with the process."""

import platform
import subprocess
import sys

import pytest

# What a backward does: blocks of 4 MiB that lie behind each other come and go, ten times. Prints
# the page faults of all turns but the first.
PROGRAM = """
import resource, sys
import torch
import ringcomm
from ringcomm import zero

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def turn():
    return [torch.zeros(1 << 20) for _ in range(8)]

torch.set_num_threads(1)
with ringcomm.local_world(1) as world:
    if sys.argv[1] == "shard":
        zero.shard(torch.nn.Linear(3, 3), comm=world[0])
    turn()
    before = faults()
    for _ in range(10):
        turn()
    print(faults() - before)
"""
PAGES = 10 * 8 * (4 << 20) // 4096

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="a rule of glibc's malloc"
)


def _faults(what: str, **environment: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, what],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
        timeout=100,
    )
    return int(done.stdout)


def test_memory_that_was_freed_is_not_fetched_anew():
    assert _faults("shard") < PAGES / 16


def test_without_it_the_system_takes_it_back():
    assert _faults("nothing") > PAGES / 8


def test_a_threshold_of_the_users_own_stays():
    assert _faults("shard", MALLOC_TRIM_THRESHOLD_="131072") > PAGES / 8
