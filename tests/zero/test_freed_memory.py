"""NOTE [Freed memory]: shard() raises the sizes from which malloc gives memory back at once."""

import ctypes
import subprocess
import sys

import pytest

# How many of three blocks of 20 MiB malloc takes from the system for themselves, to give them back
# when they are freed: mallinfo2(3) counts such. Twice the size from which it does that is what may
# lie at the top of the heap, see M_MMAP_THRESHOLD in mallopt(3).
PROGRAM = """
import ctypes, sys
import torch
import ringcomm
from ringcomm import zero

class MallInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks")]
    _fields_ += [("rest", ctypes.c_size_t * 6)]

mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = MallInfo
with ringcomm.local_world(1) as world:
    if sys.argv[1] == "shard":
        zero.shard(torch.nn.Linear(3, 3), comm=world[0])
    before = mallinfo().hblks
    blocks = [torch.empty(20 << 20, dtype=torch.uint8) for _ in range(3)]
    print(mallinfo().hblks - before)
"""

pytestmark = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs the mallinfo2 of glibc >= 2.33"
)


def _mapped(what: str, **environment: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, what],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
        timeout=100,
    )
    return int(done.stdout)


def test_large_blocks_stay_with_the_process():
    assert _mapped("shard") == 0


def test_without_it_each_comes_from_the_system():
    assert _mapped("nothing") == 3


def test_a_threshold_of_the_users_own_stays():
    assert _mapped("shard", MALLOC_TRIM_THRESHOLD_="131072") == 3
