"""Whether a stage of one of torch's pipeline schedules runs a module.

NOTE [Micro-batches of a schedule]
A schedule of ``torch.distributed.pipelining`` runs a backward for each micro-batch, and divides
``p.grad`` by their number at its end. At stages 2 and 3 a gradient must therefore stay in
``p.grad`` until then, as under ``no_sync``: a backward that reduced it would also communicate once
per micro-batch. A schedule tells only modules of DDP and FSDP which micro-batch is the last. But
its stage calls the module, and its frame is on the stack: of the forward, on whatever device; and
of the backward where autograd runs on the caller's thread, which it does on a CPU. The latter is
seen even if the forward was compiled, whose hooks do not run.

NOTE [Split backwards]
Some schedules first compute the gradients of a stage's inputs, which its neighbour waits for, and
those of its parameters later, by ``torch.autograd.grad()`` from nodes inside of the graph, where no
hook of a module sees it. But both begin by asking for the parameters' nodes in the graph, and at
stage 3 parameters that are absent notice that they are asked. They are gathered then, and stay
until the step.

NOTE [Sums to come]
A schedule that mixes whole and split backwards of a stage, as DualPipeV does, adds split ones to
``p.grad`` itself, in an order that differs between ranks. Where ``p.grad`` is a replicated DTensor
and what comes is a sum to come, each such addition would be an all-reduce, and those of two
parameters could be taken for each other. So during a schedule gradients of DTensors stay as
autograd makes them, and are aligned when the step, or its reduction, takes them: once, and in one
order. Where autograd runs on another thread (on GPUs) this is not seen, and has not been tried.
"""

from __future__ import annotations

import sys
from types import FrameType

_STAGE = "torch.distributed.pipelining.stage"
_BACKWARD = "torch.distributed.pipelining._backward"


def in_pipeline() -> bool:
    """Returns whether this thread is in a call of a pipeline stage."""
    # Every access to p.grad asks.
    return _STAGE in sys.modules and _in_call_of(_STAGE)


def in_split_backward() -> bool:
    """Returns whether this thread is in a backward of a pipeline stage, or prepares one."""
    return _in_call_of(_BACKWARD)


def _in_call_of(module: str) -> bool:
    if module not in sys.modules:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != module:
        frame = frame.f_back
    return frame is not None
