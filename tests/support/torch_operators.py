# SPDX-License-Identifier: Apache-2.0
"""Creates the Python objects of torch's operators, which dispatch modes receive."""

from __future__ import annotations

import threading

import torch

_made: frozenset[str] = frozenset()
_making = threading.Lock()


def make_operators() -> None:
    """Creates the objects of all operators that are registered now.

    Torch creates the object of an operator without a lock when a dispatch mode first meets the
    operator. If two threads meet it at the same time, each creates an object, and ``torch.ops``
    keeps only the later one. The earlier one is freed while its thread's dispatch reads it (a
    segmentation fault in ``find_torch_dispatch_rule``; torch 2.13). A mode that several threads
    enter must call this function first.
    """
    global _made
    with _making:
        registered = frozenset(torch._C._dispatch_get_all_op_names())
        for name in registered - _made:
            namespace, _, rest = name.partition("::")
            packet, _, overload = rest.partition(".")
            getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
        _made = registered
