# SPDX-License-Identifier: Apache-2.0
"""Modules that a process imports before it forks ranks and programs, so that they need not.

A rank whose function is in a test file imports this file, which imports pytest: half of a rank's
time. torch's optimizers import torch's compiler, which takes as long as torch itself.
"""

from __future__ import annotations

import os

import pytest
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.launcher.api
import torch.distributed.pipelining

import ringcomm.c10d.process_group
import ringcomm.comm.communicator
import ringcomm.optim
from tests.support.settling import settle
from tests.support.torch_operators import make_operators

__all__ = ["pytest", "ringcomm", "torch"]

# A check of the files that tests of communicators open sets this variable to "core". Otherwise
# every program would open the files of sharded training, whether it uses them or not.
if os.environ.get("RINGCOMM_TEST_PRELOADED") != "core":
    import ringcomm.functional
    import ringcomm.zero

make_operators()
settle()
