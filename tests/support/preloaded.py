"""The modules that a process imports before it forks ranks and programs, so that they need not.

A rank whose function stands in a file of tests imports that file, which imports pytest: half of
what a rank takes. An optimizer of torch's imports torch's compiler, which takes as long as torch
itself. That imports Triton, which must not be there: whether its functions are defined for its
interpreter is decided when it is imported, by an environment variable that some ranks set.
"""

from __future__ import annotations

import gc
import sys

import pytest
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.launcher.api
import torch.distributed.pipelining

import ringcomm.c10d.creation
import ringcomm.comm.communicator
import ringcomm.functional
import ringcomm.optim
import ringcomm.zero

__all__ = ["pytest", "ringcomm", "torch"]

# The compiled part cannot be loaded twice, and does not ask.
for _name in list(sys.modules):
    if _name.split(".")[0] == "triton" and not _name.startswith("triton._C"):
        del sys.modules[_name]

# A rank that collects garbage would mark every object of these modules, and so copy their pages: a
# quarter of a second of each rank.
gc.collect()
gc.freeze()
