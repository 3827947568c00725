# SPDX-License-Identifier: Apache-2.0
"""The modules that a process imports before it forks jobs on emulated devices.

As :mod:`tests.support.preloaded` for all tests, but without ZeRO and the differentiable
collectives: the proofs of kernels would have to run whenever these change.
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
