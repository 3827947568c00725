# SPDX-License-Identifier: Apache-2.0
"""The Python objects of torch's operators, which dispatch modes are given."""

from __future__ import annotations

import threading

import torch

_made: frozenset[str] = frozenset()
_making = threading.Lock()


def make_operators() -> None:
    """Makes the objects of all operators that are registered now.

    Torch makes the object of an operator when a dispatch mode first meets the operator, and takes
    no lock. Where two threads meet it at once each makes an object, and ``torch.ops`` keeps only
    the later one: the earlier one is freed while the dispatch of its thread reads it (a
    segmentation fault in ``find_torch_dispatch_rule``; torch 2.13). A mode that several threads
    enter calls this function before.
    """
    global _made
    with _making:
        registered = frozenset(torch._C._dispatch_get_all_op_names())
        for name in registered - _made:
            namespace, _, rest = name.partition("::")
            packet, _, overload = rest.partition(".")
            getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
        _made = registered
