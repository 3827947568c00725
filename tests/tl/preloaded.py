"""The modules that a process imports before it forks ranks whose kernels are interpreted.

Triton looks whether it shall interpret a function when the function is defined.
"""

from __future__ import annotations

import gc
import os

os.environ["TRITON_INTERPRET"] = "1"

from ringcomm import tl
from ringcomm._tl import adamw_launch
from tests.tl import device_kernels, kernels
from tests.tl.interpreter import check_overflow

__all__ = ["adamw_launch", "device_kernels", "kernels", "tl"]

check_overflow(False)
# As of those before: a rank that collects garbage would copy their pages.
gc.collect()
gc.freeze()
