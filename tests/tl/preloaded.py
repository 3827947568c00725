# SPDX-License-Identifier: Apache-2.0
"""The modules that a process imports before it forks ranks whose kernels are interpreted.

Triton decides whether to interpret a function when the function is defined.
"""

from __future__ import annotations

import gc
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

from triton.runtime.interpreter import InterpretedFunction

from ringcomm import tl
from ringcomm._tl import adamw_launch, hooks
from tests.tl import device_kernels, kernels
from tests.tl.interpreter import check_overflow

__all__ = ["adamw_launch", "device_kernels", "kernels", "tl"]

check_overflow(False)
# Waiting ranks poll less often than users' ranks, since there are more ranks than cores.
vars(hooks)["_PAUSE_S"] = 8e-3
# Triton parses a function at its first call; parsing here serves all ranks.
for name, module in list(sys.modules.items()):
    if name.startswith(("ringcomm._tl.", "tests.tl.", "triton.language.")):
        for each in list(vars(module).values()):
            if isinstance(each, InterpretedFunction):
                each.rewrite()
# Freezes the objects made so far: a rank that collects garbage would copy their pages.
gc.collect()
gc.freeze()
