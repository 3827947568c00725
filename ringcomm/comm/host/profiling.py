# SPDX-License-Identifier: Apache-2.0
"""Shows calls to a profiler of torch, as events with the names and the bytes of the calls.

The native fast paths refuse calls while a profiler is on (``is_profiled()`` in
``kernels/bindings/tensors.cpp``), so that all calls pass through Python, which makes the events.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.autograd import profiler

from ringcomm.comm.host.arguments import size_bytes

__all__ = ["event", "is_profiled"]


def is_profiled() -> bool:
    """Returns True while a profiler of torch is on in this process."""
    return profiler._is_profiler_enabled


def event(
    name: str, outputs: Iterable[torch.Tensor], inputs: Iterable[torch.Tensor], more_bytes: int = 0
) -> profiler.record_function:
    """Returns the context manager of an event such as "ringcomm::all_reduce 4096 bytes".

    The bytes are part of the name, because a trace has the arguments of events only with
    ``record_shapes=True``. They are the bytes of the outputs or of the inputs, whichever is more.

    Args:
        name: the name of the call.
        outputs: the call's outputs.
        inputs: the other tensors of the call.
        more_bytes: the bytes of a call whose tensors are not listed.
    """
    most = max(sum(map(size_bytes, outputs)), sum(map(size_bytes, inputs)), more_bytes)
    return profiler.record_function(f"ringcomm::{name} {most} bytes")
