"""Memory that was freed: whether the C library keeps it, or gives it back to the system."""

from __future__ import annotations

import ctypes

import torch

# NOTE [Freed memory]
# A backward frees a gradient as soon as it is reduced, and stage 3 a unit's parameters as soon as
# they were used. glibc's malloc returns such memory to the system once the top of the heap holds
# more free memory than twice the largest block that was ever freed, and the system zeroes it page
# by page when it is allocated again. A step of a GPT of 25 M FP32 parameters takes 2,500 to 10,000
# page faults, of 3 us each on a virtual machine, and 1.06 (stage 2) to 1.18 (stage 3) times as long
# as without them.
#
# The rule counts blocks of at most 32 MiB (M_MMAP_THRESHOLD in mallopt(3)). So one block of that
# size is allocated and freed, without touching its pages, and the bound is at its highest: at most
# 64 MiB stay with the process that malloc would have returned. A threshold set in the environment
# or by mallopt() switches the rule off and stays in force, and other allocators are unaffected.

# The largest block that glibc's rule counts, less the overhead that malloc and torch add.
_BLOCK_BYTES = (32 << 20) - (64 << 10)


def keep_freed_memory() -> None:
    """Has glibc keep the memory that backward frees; see NOTE [Freed memory]."""
    torch.empty(_BLOCK_BYTES, dtype=torch.uint8, device="cpu")


def give_back_freed() -> None:
    """Gives the system the memory that was freed and that the C library keeps for later.

    It keeps blocks of less than 32 MiB for the thread that allocated them, and gradients come in
    autograd's: of a GPT of 202 M bfloat16 parameters on 2 ranks, 470 MiB a rank were lost so.
    Other C libraries than glibc have no such call, and nothing is done.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
