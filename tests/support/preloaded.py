# SPDX-License-Identifier: Apache-2.0
"""Modules that a process imports before it forks ranks and programs, so that they need not.

A rank whose function is in a test file imports this file, which imports pytest: half of a rank's
time. torch's optimizers import torch's compiler, which takes as long as torch itself.
"""

from __future__ import annotations

import pytest
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.launcher.api
import torch.distributed.pipelining

import ringcomm.c10d.process_group
import ringcomm.comm.communicator
import ringcomm.functional
import ringcomm.optim
import ringcomm.zero
from tests.support.settling import settle
from tests.support.torch_operators import make_operators

__all__ = ["pytest", "ringcomm", "torch"]

make_operators()
settle()
