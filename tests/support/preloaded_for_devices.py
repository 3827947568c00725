# SPDX-License-Identifier: Apache-2.0
"""The modules that a process imports before it forks jobs on emulated devices.

As in :mod:`tests.support.preloaded`, but without ZeRO and the differentiable collectives: otherwise
each change to these would make the proofs of kernels run again.
"""

from __future__ import annotations

import torch

import ringcomm.comm.communicator
import ringcomm.optim
from tests.support.settling import settle
from tests.support.torch_operators import make_operators

__all__ = ["ringcomm", "torch"]

make_operators()
settle()
